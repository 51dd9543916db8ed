// y [ROWS, D] takes source [N, D], for small N. One thread a pack of a source row; of the sources with the same index, one does the
// work for all: the first adds them in order, the last replaces. Every thread goes through the whole index.
template <bool PACKED> __device__ __forceinline__ void scatter(const int *index, const T *source, T *y) {
    u64 item = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (item >= (u64)N * (D / VEC)) return;
    int i = item / (D / VEC), column = item % (D / VEC) * VEC;
    int row = index[i];
    if ((u32)row >= (u32)ROWS) return;
    T *to = y + (u64)row * D + column;
    if (!ADD) {
        for (int j = i + 1; j < N; j++)
            if (index[j] == row) return;
        write(to, read<PACKED>(source + (u64)i * D + column));
        return;
    }
    for (int j = 0; j < i; j++)
        if (index[j] == row) return;
    float acc[VEC] = {};
    for (int j = i; j < N; j++) {
        if (index[j] != row) continue;
        Pack<T> v = read<PACKED>(source + (u64)j * D + column);
        for (int k = 0; k < VEC; k++) acc[k] += to_float(v.at[k]);
    }
    Pack<T> v = read<true>(to);
    for (int k = 0; k < VEC; k++) from_float(to_float(v.at[k]) + acc[k], v.at[k]);
    write(to, v);
}

extern "C" __global__ void scatter_few(const int *index, const T *source, T *y) {
    if (packed(source)) scatter<true>(index, source, y);
    else scatter<false>(index, source, y);
}
