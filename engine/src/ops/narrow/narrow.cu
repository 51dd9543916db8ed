// d [M, N], its rows D_ROW apart. d^T p -> by_column [DOWN, N, R], or TURNED [DOWN, R, N], where rows of p [M, R] are P_ROW apart. With BY_ROW
// also d q -> by_row [ACROSS, M, R], where q [N, R] has strides Q_ROW and Q_COLUMN. A block has WIDE columns and a share of the
// rows, TILE at a time; where it is the only one across (down), the sums are the result, and have its type.
// Warps w / 4 = 0, 1 have 32 rows of a tile each, w % 4 = 0 .. 3 have 64 columns.
#define TILE 64
#define WIDE 256
#define TILES ((M + TILE - 1) / TILE)
#define PAIRS ((R + 15) / 16)          // of eights among the columns of p: behind an odd one nothing is read that counts
#define P_PITCH ((R / 8 + 1 | 1) * 16) // bytes of a row of p in shared memory: an odd number of pieces, so that eight rows' are in different banks
#define STAGE (TILE * WIDE * 2 + TILE * P_PITCH)

// Piece c (16 bytes) of row r lies at c ^ r % 8.
__device__ __forceinline__ char *place(char *stage, int row, int piece) { return stage + row * (WIDE * 2) + ((piece ^ row % 8) << 4); }

__device__ __forceinline__ void load(char *stage, const T *d, const T *p, int tile, int column) {
    const int c = threadIdx.x % 32, at = column + 8 * c; // a warp has a row
    #pragma unroll
    for (int k = 0; k < TILE / 8; k++) {
        int r = threadIdx.x / 32 + 8 * k, row = tile * TILE + r;
        bool live = row < M && at < N;
        copy16(place(stage, r, c), d + (live ? (u64)row * D_ROW + at : 0), live);
    }
    #pragma unroll
    for (int i = threadIdx.x; i < TILE * R / 8; i += 256) {
        int r = i / (R / 8), c = i % (R / 8), row = tile * TILE + r;
        copy16(stage + TILE * WIDE * 2 + r * P_PITCH + 16 * c, p + (row < M ? (u64)row * P_ROW + 8 * c : 0), row < M);
    }
}

__device__ __forceinline__ u32 bits(T v) { return v.bits; }

// Columns [column + 64 (warp % 4), .. + 64) of q as the second factor of a product.
__device__ __forceinline__ void load_q(u32 (&q)[4][R / 8][2], const T *from, int column) {
    int lane = threadIdx.x % 32, first = column + threadIdx.x / 32 % 4 * 64 + lane % 4 * 2;
    #pragma unroll
    for (int k = 0; k < 4; k++)
        #pragma unroll
        for (int t = 0; t < R / 8; t++)
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                int n = first + 16 * k + 8 * h;
                const T *at = from + (u64)n * Q_ROW + (u64)(8 * t + lane / 4) * Q_COLUMN;
                q[k][t][h] = n < N ? bits(at[0]) | bits(at[Q_ROW]) << 16 : 0; // N is even
            }
}

extern "C" __global__ void __launch_bounds__(256, 1)
narrow(const T *d, const T *p, const T *q, ROW_OUT *by_row, COLUMN_OUT *by_column) {
    extern __shared__ __align__(128) char shared[];
    float *sums = (float *)(shared + STAGES * STAGE); // [4, TILE, R]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
    const int across = blockIdx.x % ACROSS, down = blockIdx.x / ACROSS, column = across * WIDE;
    const int first = (u64)down * TILES / DOWN, end = (u64)(down + 1) * TILES / DOWN;
    const int row = warp / 4 * 32, piece = warp % 4 * 8; // of this warp in a tile

    float total[4][R / 8][4] = {}; // of 16 columns each, by eights of R

    #pragma unroll
    for (int s = 0; s < STAGES; s++) {
        if (first + s < end) load(shared + s * STAGE, d, p, first + s, column);
        copies_commit();
    }
    u32 own[4][R / 8][2];
    if (BY_ROW) load_q(own, q, column);
    for (int tile = first, now = 0; tile < end; tile++, now = now + 1 < STAGES ? now + 1 : 0) {
        copies_wait<STAGES - 1>();
        __syncthreads(); // this tile is there, and nobody reads the sums of the one before it any more
        char *stage = shared + now * STAGE;

        if (BY_ROW) {
            float c[2][R / 8][4] = {};
            #pragma unroll
            for (int k = 0; k < 4; k++)
                #pragma unroll
                for (int m = 0; m < 2; m++) {
                    u32 a[4];
                    matrices(a, place(stage, row + 16 * m + lane % 16, piece + 2 * k + lane / 16));
                    #pragma unroll
                    for (int t = 0; t < R / 8; t++) mma<T>(c[m][t], a, own[k][t][0], own[k][t][1]);
                }
            #pragma unroll
            for (int m = 0; m < 2; m++)
                #pragma unroll
                for (int t = 0; t < R / 8; t++)
                    #pragma unroll
                    for (int h = 0; h < 2; h++) {
                        float *at = sums + (warp % 4 * TILE + row + 16 * m + 8 * h + group) * R + 8 * t + 2 * pair;
                        *(float2 *)at = make_float2(c[m][t][2 * h], c[m][t][2 * h + 1]);
                    }
        }
        #pragma unroll
        for (int k = 0; k < 2; k++) {
            u32 b[PAIRS][4];
            #pragma unroll
            for (int t = 0; t < PAIRS; t++)
                matrices_t(b[t], stage + TILE * WIDE * 2 + (row + 16 * k + lane % 16) * P_PITCH + (2 * t + lane / 16) * 16);
            #pragma unroll
            for (int m = 0; m < 4; m++) {
                u32 a[4];
                matrices_t(a, place(stage, row + 16 * k + lane / 16 * 8 + lane % 8, piece + 2 * m + lane / 8 % 2));
                #pragma unroll
                for (int t = 0; t < R / 8; t++) mma<T>(total[m][t], a, b[t / 2][t % 2 * 2], b[t / 2][t % 2 * 2 + 1]);
            }
        }
        __syncthreads(); // nobody reads this tile any more
        if (tile + STAGES < end) load(stage, d, p, tile + STAGES, column);
        copies_commit();
        if (BY_ROW) {
            #pragma unroll
            for (int k = 0; k < TILE * R / 256; k++) {
                int i = threadIdx.x + 256 * k;
                u64 at = (u64)tile * TILE * R + i;
                float v = sums[i] + sums[TILE * R + i] + sums[2 * TILE * R + i] + sums[3 * TILE * R + i];
                if (at < (u64)M * R) from_float(v, by_row[(u64)across * M * R + at]);
            }
        }
    }

    // The lower rows of all tiles are added to the upper.
    copies_wait<0>();
    __syncthreads();
    float *lower = (float *)shared + (warp % 4 * 32 + lane) * (16 * (R / 8) + 1);
    #pragma unroll
    for (int m = 0; m < 4; m++)
        #pragma unroll
        for (int t = 0; t < R / 8; t++)
            #pragma unroll
            for (int i = 0; i < 4; i++)
                if (warp / 4 == 1) lower[(m * (R / 8) + t) * 4 + i] = total[m][t][i];
    __syncthreads();
    if (warp / 4 == 1) return;
    #pragma unroll
    for (int m = 0; m < 4; m++)
        #pragma unroll
        for (int t = 0; t < R / 8; t++)
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                int n = column + warp * 64 + 16 * m + group + i / 2 * 8, r = 8 * t + 2 * pair + i % 2;
                u64 at = TURNED ? ((u64)down * R + r) * N + n : ((u64)down * N + n) * R + r;
                if (n < N) from_float(total[m][t][i] + lower[(m * (R / 8) + t) * 4 + i], by_column[at]);
            }
}
