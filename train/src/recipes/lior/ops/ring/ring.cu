// rows [N / D, D] go to rows count, count + 1, .. of the table, around the end.
extern "C" __global__ void __launch_bounds__(256) ring_write(const int *count, const T *rows, T *table) {
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i < N) table[((u64)*count + i / D) % SLOTS * D + i % D] = rows[i];
}
