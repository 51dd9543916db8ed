// The sums over PARTS of partial [PARTS, COLUMNS]: the first FIRST columns to a, the others to b. A block takes 32 columns.
extern "C" __global__ void __launch_bounds__(1024) finish(const float *partial, A *a, B *b) {
    __shared__ float tile[32][33];
    int x = threadIdx.x % 32, y = threadIdx.x / 32, column = blockIdx.x * 32 + x;
    float v = 0.0f;
    if (column < COLUMNS) {
        #pragma unroll 8
        for (int part = y; part < PARTS; part += 32) v += partial[(u64)part * COLUMNS + column];
    }
    tile[y][x] = v;
    __syncthreads();
    // Warp y now has column y, a part of its sum in each lane.
    v = warp_sum(tile[x][y]);
    column = blockIdx.x * 32 + y;
    if (x > 0 || column >= COLUMNS) return;
    if (column < FIRST) from_float(v, a[column]);
    else from_float(v, b[column - FIRST]);
}
