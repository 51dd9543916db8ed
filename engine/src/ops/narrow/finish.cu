// Sums the partial results of narrow.cu, for COUNT adapters: by_row [ACROSS, M, R] over each adapter's part of ACROSS -> [M, COUNT, R]; and by_column
// [DOWN, all n, R] over DOWN -> [n, R]. A thread has two numbers.
template <typename E> __device__ __forceinline__ void add(const float *from, int parts, u64 step, E *to) {
    float2 v = *(const float2 *)from;
    #pragma unroll 8
    for (int i = 1; i < parts; i++) {
        float2 more = *(const float2 *)(from + i * step);
        v.x += more.x, v.y += more.y;
    }
    from_floats(v.x, v.y, to);
}

extern "C" __global__ void narrow_finish(const float *by_row, const float *by_column, A *a, RESULTS) {
    const int starts[COUNT + 1] = STARTS; // among ACROSS
    const u64 columns[COUNT + 1] = COLUMNS; // where those of each start, times R
    B *const results[COUNT] = BS;
    u64 i = ((u64)blockIdx.x * 256 + threadIdx.x) * 2, rows = ROW_SUMS; // none, where no parts are left
    #pragma unroll
    for (int k = 0; k < COUNT; k++) {
        if (i < rows) {
            add(by_row + starts[k] * rows + i, starts[k + 1] - starts[k], rows, a + (i / R * COUNT + k) * R + i % R);
            return;
        }
        i -= rows;
    }
    #pragma unroll
    for (int k = 0; k < COUNT; k++)
        if (i >= columns[k] && i < columns[k + 1]) add(by_column + i, DOWN, columns[COUNT], results[k] + (i - columns[k]));
}
