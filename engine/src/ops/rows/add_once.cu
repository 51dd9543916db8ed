// y [ROWS, D] += source [N, D] by row, in groups of GROUP rows and EACH indices; one thread a pack. Indices are distinct, so there are no races.
template <bool PACKED> __device__ __forceinline__ void add(const int *index, const T *source, T *y) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)N * (D / VEC)) return;
    Pack<T> v = read<PACKED>(source + i * VEC);
    u64 n = i / (D / VEC);
    int row = index[n];
    if ((u32)row >= (u32)GROUP) return;
    T *to = y + (n / EACH * GROUP + row) * D + i % (D / VEC) * VEC;
    Pack<T> old = read<true>(to);
    for (int k = 0; k < VEC; k++) from_float(to_float(old.at[k]) + to_float(v.at[k]), v.at[k]);
    write(to, v);
}

extern "C" __global__ void add_once(const int *index, const T *source, T *y) {
    if (packed(source)) add<true>(index, source, y);
    else add<false>(index, source, y);
}
