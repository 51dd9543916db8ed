// The sums over ACROSS of by_row [ACROSS, ROW_SUMS], and over DOWN of by_column [DOWN, COLUMN_SUMS]. A thread has two.
template <int PARTS, typename E> __device__ __forceinline__ void add(const float *from, u64 step, E *to) {
    float2 v = *(const float2 *)from;
    #pragma unroll 16
    for (int i = 1; i < PARTS; i++) {
        float2 more = *(const float2 *)(from + i * step);
        v.x += more.x, v.y += more.y;
    }
    from_floats(v.x, v.y, to);
}

extern "C" __global__ void narrow_finish(const float *by_row, const float *by_column, A *a, B *b) {
    u64 i = ((u64)blockIdx.x * 256 + threadIdx.x) * 2, rows = ROW_SUMS, columns = COLUMN_SUMS; // none, where no parts are left
    if (i < rows) add<ACROSS>(by_row + i, rows, a + i);
    else if ((i -= rows) < columns) add<DOWN>(by_column + i, columns, b + i);
}
