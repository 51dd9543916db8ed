// For each of COUNT adapters: d [M, n], its rows d_row apart. d^T p -> by_column [n, R], or TRANSPOSED [R, n], DOWN times, STEP apart, where rows of
// p [M, R] are p_row apart. With BY_ROW also d q -> by_row [across, M, R], where q [n, R] has strides q_row and q_column; those of
// all adapters lie one after another. A block has WIDE columns of one d and a share of the rows, TILE at a time; where it is the only one across (down), the
// sums are the result, and have its type.
// Warps w / 4 = 0, 1 have 32 rows of a tile each, w % 4 = 0 .. 3 have 64 columns.
#define TILE 64
#define WIDE 256
#define TILES ((M + TILE - 1) / TILE)
#define PAIRS ((R + 15) / 16)          // of eights among the columns of p: behind an odd one nothing is read that counts
#define P_PITCH ((R / 8 + 1 | 1) * 16) // bytes of a row of p in shared memory: an odd number of pieces, so that eight rows' are in different banks
#define STAGE (TILE * WIDE * 2 + TILE * P_PITCH)

// Piece c (16 bytes) of row r lies at c ^ r % 8.
__device__ __forceinline__ char *place(char *stage, int row, int piece) { return stage + row * (WIDE * 2) + ((piece ^ row % 8) << 4); }

// What a block works on.
struct Own {
    const T *d, *p, *q;
    COLUMN_OUT *by_column;
    int n, column; // its first
    u64 d_row, p_row, q_row, q_column;
};

template <typename V> __device__ __forceinline__ V pick(int which, const V (&of)[COUNT]) {
    V v = of[0];
    #pragma unroll
    for (int i = 1; i < COUNT; i++)
        if (which == i) v = of[i];
    return v;
}

__device__ __forceinline__ void load(char *stage, const Own &own, int tile) {
    const int c = threadIdx.x % 32, at = own.column + 8 * c; // a warp has a row
    #pragma unroll
    for (int k = 0; k < TILE / 8; k++) {
        int r = threadIdx.x / 32 + 8 * k, row = tile * TILE + r;
        bool live = row < M && at < own.n;
        copy16(place(stage, r, c), own.d + (live ? row * own.d_row + at : 0), live);
    }
    #pragma unroll
    for (int i = threadIdx.x; i < TILE * R / 8; i += 256) {
        int r = i / (R / 8), c = i % (R / 8), row = tile * TILE + r;
        copy16(stage + TILE * WIDE * 2 + r * P_PITCH + 16 * c, own.p + (row < M ? row * own.p_row + 8 * c : 0), row < M);
    }
}

__device__ __forceinline__ u32 bits(T v) { return v.bits; }

// Columns [column + 64 (warp % 4), .. + 64) of q as the right operand of an mma.
__device__ __forceinline__ void load_q(u32 (&q)[4][R / 8][2], const Own &own) {
    int lane = threadIdx.x % 32, first = own.column + threadIdx.x / 32 % 4 * 64 + lane % 4 * 2;
    #pragma unroll
    for (int k = 0; k < 4; k++)
        #pragma unroll
        for (int t = 0; t < R / 8; t++)
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                int n = first + 16 * k + 8 * h;
                const T *at = own.q + n * own.q_row + (8 * t + lane / 4) * own.q_column;
                q[k][t][h] = n < own.n ? bits(at[0]) | bits(at[own.q_row]) << 16 : 0; // n is even
            }
}

extern "C" __global__ void __launch_bounds__(256, 1)
narrow(MATRICES, ROW_OUT *by_row) {
    extern __shared__ __align__(128) char shared[];
    float *sums = (float *)(shared + STAGES * STAGE); // [4, TILE, R]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
    const int across = blockIdx.x % ACROSS, down = blockIdx.x / ACROSS;
    const int starts[COUNT] = STARTS; // among the blocks across
    int which = 0;
    #pragma unroll
    for (int i = 1; i < COUNT; i++) which += across >= starts[i];
    const Own own = {pick<const T *>(which, DS), pick<const T *>(which, PS), pick<const T *>(which, QS), pick<COLUMN_OUT *>(which, BY_COLUMNS),
                     pick<int>(which, NS), (across - pick<int>(which, STARTS)) * WIDE,
                     pick<u64>(which, D_ROWS), pick<u64>(which, P_ROWS), pick<u64>(which, Q_ROWS), pick<u64>(which, Q_COLUMNS)};
    const int first = (u64)down * TILES / DOWN, end = (u64)(down + 1) * TILES / DOWN;
    const int row = warp / 4 * 32, piece = warp % 4 * 8; // of this warp in a tile

    float total[4][R / 8][4] = {}; // of 16 columns each, by eights of R

    #pragma unroll
    for (int s = 0; s < STAGES; s++) {
        if (first + s < end) load(shared + s * STAGE, own, first + s);
        copies_commit();
    }
    u32 q[4][R / 8][2];
    if (BY_ROW) load_q(q, own);
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
                    for (int t = 0; t < R / 8; t++) mma<T>(c[m][t], a, q[k][t][0], q[k][t][1]);
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
        if (tile + STAGES < end) load(stage, own, tile + STAGES);
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
                int n = own.column + warp * 64 + 16 * m + group + i / 2 * 8, r = 8 * t + 2 * pair + i % 2;
                u64 at = down * (u64)STEP + (TRANSPOSED ? (u64)r * own.n + n : (u64)n * R + r);
                if (n < own.n) from_float(total[m][t][i] + lower[(m * (R / 8) + t) * 4 + i], own.by_column[at]);
            }
}
