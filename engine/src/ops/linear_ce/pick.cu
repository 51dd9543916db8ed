// Rows of D elements between two matrices, one thread a pack.
struct Part {
    u64 row, column;
    __device__ __forceinline__ Part() {
        u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
        row = i / (D / VEC), column = i % (D / VEC) * VEC;
    }
    __device__ __forceinline__ bool real() const { return row < (u64)ROWS; }
};

__device__ __forceinline__ void clear(T *y) {
    Pack<T> none;
    for (int k = 0; k < VEC; k++) from_float(0.0f, none.at[k]);
    write(y, none);
}

// y [ROWS, D] = rows `order` of x, zeros where that is -1.
extern "C" __global__ void linear_ce_pick(const T *x, const int *order, T *y) {
    Part p;
    if (!p.real()) return;
    int from = order[p.row];
    const T *at = x + (u64)(from < 0 ? 0 : from) * D + p.column;
    T *to = y + p.row * D + p.column;
    if (from < 0) clear(to);
    else write(to, packed(x) ? read<true>(at) : read<false>(at));
}

// Rows `order` of y = x [ROWS, D], but for -1.
extern "C" __global__ void linear_ce_put(const T *x, const int *order, T *y) {
    Part p;
    if (!p.real()) return;
    int to = order[p.row];
    if (to >= 0) write(y + (u64)to * D + p.column, read<true>(x + p.row * D + p.column));
}

// Zeros in rows of y [ROWS, D] that have no target.
extern "C" __global__ void linear_ce_clear(const int *targets, const int *, T *y) {
    Part p;
    if (p.real() && targets[p.row] < 0) clear(y + p.row * D + p.column);
}
