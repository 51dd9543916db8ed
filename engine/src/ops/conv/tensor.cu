// Tensor cores. out[t, p] = sum over k, q of w[k][q][p] in[t + k - BEFORE, q], p and q inside one group; zeros outside the sequence.
// A block keeps the weights of one slice of the outputs in shared memory, PS outputs of each of GB groups, and walks over tiles
// of TILE time steps: the rows of the next one arrive while this one is multiplied. A warp has 32 time steps and NW outputs.
// Forward: BEFORE = WIDTH - 1. Gradient of the input: outputs and inputs change places, taps run backwards, BEFORE = 0.
#define NQ (GB * QG)
#define ROWS (TILE + WIDTH - 1)
#define PITCH (NQ + 8) // eight rows, 16 bytes each, lie in different banks
// Weights [WIDTH, W_ROWS, W_COLUMNS], the convolution's outputs in rows and its channels in columns, for both directions.
#define W_ROWS (BACKWARD ? NQ : GB * PS)
#define W_COLUMNS (BACKWARD ? PS : QG)
#define W_PITCH (W_COLUMNS + 8)
#define UNITS (TILE / 32 * (GB * PS / NW))

// Of 16 outputs, 4 n .. 4 n + 3 lie at places 2 n, 2 n + 1, 2 n + 8, 2 n + 9, one thread's share of two mma results: it stores them
// together.
__device__ __forceinline__ void load_weights(T *w, const T *weight, u32 g, u32 p) {
    const int CG = BACKWARD ? PG : QG;
    const T *from = weight + ((u64)g * PG * QG + (BACKWARD ? p : (u64)p * CG)) * WIDTH;
#pragma unroll(WIDTH <= 4 ? 4 : 1)
    for (int i = threadIdx.x; i < W_ROWS * (W_COLUMNS / 8); i += BLOCK) {
        int r = i / (W_COLUMNS / 8), c = i % (W_COLUMNS / 8) * 8;
        u32 v[4 * WIDTH]; // [8 channels, WIDTH]
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            uint4 four = ((const uint4 *)(from + ((u64)r * CG + c) * WIDTH))[j];
            v[4 * j] = four.x, v[4 * j + 1] = four.y, v[4 * j + 2] = four.z, v[4 * j + 3] = four.w;
        }
        int place = r / 16 * 16 + r % 4 / 2 * 8 + r % 16 / 4 * 2 + r % 2;
#pragma unroll
        for (int tap = 0; tap < WIDTH; tap++) {
            u32 two[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int low = 2 * j * WIDTH + tap, high = low + WIDTH;
                two[j] = __byte_perm(v[low / 2], v[high / 2], (low % 2 ? 0x32 : 0x10) | (high % 2 ? 0x7600 : 0x5400));
            }
            T *to = w + (BACKWARD ? WIDTH - 1 - tap : tap) * W_ROWS * W_PITCH;
            if (BACKWARD) {
                to += r * W_PITCH + c / 16 * 16 + c % 16 / 2;
                *(uint2 *)to = make_uint2(two[0], two[2]);
                *(uint2 *)(to + 8) = make_uint2(two[1], two[3]);
            } else *(uint4 *)(to + place * W_PITCH + c) = make_uint4(two[0], two[1], two[2], two[3]);
        }
    }
}

__device__ __forceinline__ void load_rows(T *rows, const T *in, u32 tile, u32 g) {
    int t0 = (int)(tile % TILES) * TILE - BEFORE;
    const T *from = in + (u64)(tile / TILES) * TIME * GROUPS * QG + g * QG;
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * (NQ / 8); i += BLOCK) {
        int r = i / (NQ / 8), c = i % (NQ / 8) * 8, t = t0 + r;
        bool live = t >= 0 && t < TIME;
        copy16(rows + r * PITCH + c, from + (u64)(live ? t : 0) * GROUPS * QG + c, live);
    }
    copies_commit();
}

extern "C" __global__ void __launch_bounds__(BLOCK) conv_tensor(const T *in, const T *weight, T *out) {
    extern __shared__ __align__(16) float shared[];
    T *w = (T *)shared, *rows = w + WIDTH * W_ROWS * W_PITCH; // rows [BUFFERS, ROWS, PITCH]
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 slice = blockIdx.x % SLICES, tile = blockIdx.x / SLICES;
    u32 g = slice / (PG / PS) * GB, p = slice % (PG / PS) * PS;
    load_rows(rows, in, tile, g);
    load_weights(w, weight, g, p);

    for (int buffer = 0; tile < BATCH * TILES; tile += STEP) {
        copies_wait<0>();
        __syncthreads(); // these rows are there, and nobody reads the other buffer
        const T *x = rows + buffer * ROWS * PITCH;
        buffer = (buffer + 1) % BUFFERS;
        if (tile + STEP < BATCH * TILES) load_rows(rows + buffer * ROWS * PITCH, in, tile + STEP, g);
        for (int unit = warp; unit < UNITS; unit += BLOCK / 32) {
            int m = unit % (TILE / 32) * 32, n = unit / (TILE / 32) * NW, q0 = n / PS * QG;
            float sum[2][NW / 8][4] = {};
#pragma unroll 2
            for (int q = 0; q < QG; q += 16)
#pragma unroll
                for (int k = 0; k < WIDTH; k++) {
                    u32 a[2][4];
#pragma unroll
                    for (int i = 0; i < 2; i++) matrices(a[i], x + (m + 16 * i + k + lane % 16) * PITCH + q0 + q + lane / 16 * 8);
#pragma unroll
                    for (int j = 0; j < NW / 16; j++) {
                        u32 b[4];
                        const T *tap = w + k * W_ROWS * W_PITCH;
                        if (BACKWARD) matrices_t(b, tap + (q0 + q + lane % 16) * W_PITCH + n % PS + 16 * j + lane / 16 * 8);
                        else matrices(b, tap + (n + 16 * j + lane % 8 + lane / 16 * 8) * W_PITCH + q + lane / 8 % 2 * 8);
#pragma unroll
                        for (int i = 0; i < 2; i++) mma<T>(sum[i][2 * j], a[i], b[0], b[1]), mma<T>(sum[i][2 * j + 1], a[i], b[2], b[3]);
                    }
                }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int t = (int)(tile % TILES) * TILE + m + 8 * i + lane / 4;
                if (t >= TIME) break;
                T *to = out + ((u64)(tile / TILES) * TIME + t) * GROUPS * PG + g * PG + p + n + lane % 4 * 4;
#pragma unroll
                for (int j = 0; j < NW / 16; j++) {
                    const float *low = sum[i / 2][2 * j] + i % 2 * 2, *high = sum[i / 2][2 * j + 1] + i % 2 * 2;
                    *(uint2 *)(to + 16 * j) = make_uint2(pack<T>(low[0], low[1]), pack<T>(high[0], high[1]));
                }
            }
        }
    }
}
