// y = x W^T for few rows x [ROWS, K], where the 4-bit W [N, K] is dequantized in registers: bound by reading W once.
//
// A block has 16 rows of W; its warps alternate along K, 128 elements at a time, with AHEAD iterations of loads in flight; if nothing writes the weights
// (EARLY), the first loads start before `wait_for_turn`. In the mma, W is operand a, and x, eight rows at a time, is b. A thread has 32 adjacent elements
// of two rows of W, 16 bytes each, all with one scale; K is permuted alike in both operands.
#define LINES ((K + 127) / 128)
#define TURNS ((LINES + WARPS - 1) / WARPS)
#define EIGHTS ((ROWS + 7) / 8)

__device__ const float levels[16] = {LEVELS};
__device__ const float sizes[256] = {BYTES};

struct Part {
    uint4 codes[2];
    unsigned char scales[2];
    float largest[2];
};

extern "C" __global__ void __launch_bounds__(32 * WARPS)
nf4_few(const T *x, const unsigned char *codes, const unsigned char *scales, const TL *largest, const TM *mean, T *y) {
    __shared__ float level[16], size[256], sums[WARPS][EIGHTS][16][8];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4, first = blockIdx.x * 16;
    if (threadIdx.x < 16) level[threadIdx.x] = levels[threadIdx.x];
    for (int i = threadIdx.x; i < 256; i += 32 * WARPS) size[i] = sizes[i];
    if (!EARLY) in_turn();

    Part parts[AHEAD];
    auto fetch = [&](Part &part, int turn) {
        const int k = (turn * WARPS + warp) * 128 + pair * 32;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = first + group + 8 * h;
            const bool live = k < K && row < N;
            const u64 at = live ? (u64)row * K + k : 0;
            part.codes[h] = *(const uint4 *)(codes + at / 2);
            part.scales[h] = scales[at / BLOCK];
            part.largest[h] = to_float(largest[at / BLOCK / SCALES]);
        }
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) fetch(parts[i], i);
    const float middle = to_float(*mean);
    __syncthreads();
    if (EARLY) next_may_begin(), wait_for_turn();

    float c[EIGHTS][4] = {};
    for (int from = 0; from < TURNS; from += AHEAD)
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int k = ((from + i) * WARPS + warp) * 128 + pair * 32; // behind the end, x is 0
            uint4 terms[EIGHTS][4];
#pragma unroll
            for (int e = 0; e < EIGHTS; e++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const bool live = k < K && e * 8 + group < ROWS;
                    terms[e][j] = live ? *(const uint4 *)(x + (u64)(e * 8 + group) * K + k + 8 * j) : uint4{0, 0, 0, 0};
                }
            const Part now = parts[i];
            if (from + AHEAD < TURNS) fetch(parts[i], from + AHEAD + i);
            float scale[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const bool live = k < K && first + group + 8 * h < N; // else these are others' weights
                scale[h] = live ? size[now.scales[h]] * now.largest[h] + middle : 0.0f;
            }
#pragma unroll
            for (int s = 0; s < 8; s++) {
                u32 a[4];
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    const int h = q % 2; // rows group and group + 8; of each, terms 4 s and 4 s + 2
                    const u32 two = (&now.codes[h].x)[s / 2] >> (s % 2 * 16 + q / 2 * 8) & 255;
                    a[q] = pack<T>(level[two >> 4] * scale[h], level[two & 15] * scale[h]);
                }
#pragma unroll
                for (int e = 0; e < EIGHTS; e++) {
                    const u32 *word = &terms[e][s / 2].x + s % 2 * 2;
                    mma<T>(c[e], a, word[0], word[1]);
                }
            }
        }

#pragma unroll
    for (int e = 0; e < EIGHTS; e++)
#pragma unroll
        for (int h = 0; h < 2; h++) *(float2 *)&sums[warp][e][group + 8 * h][2 * pair] = make_float2(c[e][2 * h], c[e][2 * h + 1]);
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * 16; i += 32 * WARPS) {
        const int row = i / 16, n = i % 16;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += sums[w][row / 8][n][row % 8];
        if (first + n < N) from_float(sum, y[(u64)row * N + first + n]);
    }
}
