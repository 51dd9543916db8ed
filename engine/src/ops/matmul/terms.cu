// y [M, N] = a b of few terms, a [M, K], its rows A_ROW apart, b [K, N] with strides B_ROW and B_COLUMN, one of them 1: bound by writing y.
// A warp keeps 64 columns of b in registers and walks over rows, 8 at a time, AHEAD of them in flight. b's columns are the 16 rows of the mma, so that a
// thread has 8 adjacent columns of two rows of y, and a warp writes whole cache lines. K is split into CHUNKS of 16, permuted so that a thread reads four
// adjacent elements of a row.
#define CHUNKS ((K + 15) / 16)
#define TILES ((M + 7) / 8)
#define PARTS ((N + 63) / 64)

extern "C" __global__ void __launch_bounds__(256)
few_terms(const T *a, const T *b, T *y) {
    const u32 lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
    const u32 warp = blockIdx.x * 8 + threadIdx.x / 32, n = warp % PARTS * 64 + group * 8;
    u32 tile = warp / PARTS;
    if (tile >= WALKERS) return;

    // Columns n + 2 t and the next are rows `group` and group + 8 of the t-th mma.
    u32 columns[CHUNKS][4][4] = {};
#pragma unroll
    for (u32 c = 0; c < CHUNKS; c++)
        if (n < N && c * 16 + pair * 4 < K) {
            const T *from = b + (u64)(c * 16 + pair * 4) * B_ROW + (u64)n * B_COLUMN;
            if (B_ROW == 1) {
#pragma unroll
                for (u32 t = 0; t < 4; t++) {
                    const uint2 even = *(const uint2 *)(from + (u64)(2 * t) * B_COLUMN), odd = *(const uint2 *)(from + (u64)(2 * t + 1) * B_COLUMN);
                    columns[c][t][0] = even.x, columns[c][t][1] = odd.x, columns[c][t][2] = even.y, columns[c][t][3] = odd.y;
                }
            } else {
#pragma unroll
                for (u32 k = 0; k < 4; k += 2) {
                    const uint4 low = *(const uint4 *)(from + (u64)k * B_ROW), high = *(const uint4 *)(from + (u64)(k + 1) * B_ROW);
                    const u32 l[4] = {low.x, low.y, low.z, low.w}, h[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
                    for (u32 t = 0; t < 4; t++) {
                        columns[c][t][k] = __byte_perm(l[t], h[t], 0x5410);
                        columns[c][t][k + 1] = __byte_perm(l[t], h[t], 0x7632);
                    }
                }
            }
        }

    for (; tile < TILES; tile += AHEAD * WALKERS) {
        uint2 rows[AHEAD][CHUNKS];
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            const u32 m = (tile + i * WALKERS) * 8 + group;
#pragma unroll
            for (u32 c = 0; c < CHUNKS; c++) {
                const bool live = m < M && c * 16 + pair * 4 < K;
                rows[i][c] = live ? *(const uint2 *)(a + (u64)m * A_ROW + c * 16 + pair * 4) : uint2{0, 0};
            }
        }
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            float sums[4][4] = {};
#pragma unroll
            for (u32 c = 0; c < CHUNKS; c++)
#pragma unroll
                for (u32 t = 0; t < 4; t++) mma<T>(sums[t], columns[c][t], rows[i][c].x, rows[i][c].y);
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                const u32 m = (tile + i * WALKERS) * 8 + pair * 2 + r;
                if (m >= M || n >= N) continue;
                uint4 out;
                out.x = pack<T>(sums[0][r], sums[0][2 + r]), out.y = pack<T>(sums[1][r], sums[1][2 + r]);
                out.z = pack<T>(sums[2][r], sums[2][2 + r]), out.w = pack<T>(sums[3][r], sums[3][2 + r]);
                *(uint4 *)(y + (u64)m * N + n) = out;
            }
        }
    }
}
