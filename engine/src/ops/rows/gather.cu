// y [N, D] = rows of a table of groups of ROWS rows, EACH indices a group; one thread a pack.
template <bool PACKED> __device__ __forceinline__ void copy(const T *table, const int *index, T *y) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)N * (D / VEC)) return;
    u64 n = i / (D / VEC);
    int row = index[n];
    if ((u32)row >= (u32)ROWS) __trap(); // the caller's mistake
    write(y + i * VEC, read<PACKED>(table + (n / EACH * ROWS + row) * D + i % (D / VEC) * VEC));
}

extern "C" __global__ void gather(const T *table, const int *index, T *y) {
    if (packed(table)) copy<true>(table, index, y);
    else copy<false>(table, index, y);
}
