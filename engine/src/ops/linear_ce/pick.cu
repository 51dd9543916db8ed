// y [ROWS, D] = rows `from` of x, zeros where that is -1; one thread a pack.
template <bool PACKED> __device__ __forceinline__ void pick(const T *x, const int *from, T *y) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)ROWS * (D / VEC)) return;
    int row = from[i / (D / VEC)];
    Pack<T> v;
    if (row >= 0) v = read<PACKED>(x + (u64)row * D + i % (D / VEC) * VEC);
    else
        for (int k = 0; k < VEC; k++) from_float(0.0f, v.at[k]);
    write(y + i * VEC, v);
}

extern "C" __global__ void linear_ce_pick(const T *x, const int *from, T *y) {
    if (packed(x)) pick<true>(x, from, y);
    else pick<false>(x, from, y);
}
