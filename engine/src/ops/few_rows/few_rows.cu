// y = x W^T for few rows x [ROWS, K] and weights W [n, K]: bound by reading W once.
//
// A block processes TILES tiles of eight rows of W at a time; its warps split K: LINES lines of 64 elements, 128 bytes of each row. W is copied to shared
// memory, STAGES lines of all tiles ahead of the arithmetic; if nothing writes the weights (EARLY), the first copies start before `wait_for_turn`. In the
// mma, x (16 rows at a time) is operand a and a tile is b; K is permuted alike in both, so that a thread's 16 bytes are used as they lie. The warps'
// partial sums are added in order.
//
// NORM: x is rms_norm(x) norm. PAIR: y = silu(x W0^T) * (x W1^T). ADD: y has `more` added.

const int THREADS = 32 * WARPS, MT = (ROWS + 15) / 16, EIGHTS = (ROWS + 7) / 8;
const int SIDE = PAIR ? TILES / 2 : TILES, WIDE = SIDE * 8;    // tiles and columns of y, of one round
const int STRIDE = TILES * 8 + (TILES % 2 ? 0 : 8);            // of the sums of a row: the rows of a warp lie in different banks
const int OWN = (ROWS * WIDE + THREADS - 1) / THREADS;         // results of a thread
const bool KEEP = AHEAD == LINES;                              // a warp's part of x stays in registers

// A thread's part of a line of x: 8 elements of each half, of rows group, group + 8, ..
typedef uint4 Line[2][EIGHTS];

extern "C" __global__ void __launch_bounds__(THREADS, 2)
few_rows(const T *x, const TN *norm, const TR *more, WEIGHT_ARGS, OUT_ARGS) {
    extern __shared__ uint4 shared[];
    const T *const weights[] = {WEIGHT_LIST};
    OUT *const ys[] = {OUT_LIST};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, pair = lane % 4;
    const int first = blockIdx.x * (ROUNDS * SIDE);
    uint4 *ring = shared + warp * (STAGES * TILES * 64);                    // [STAGES, TILES, 2, 32]
    float *sums = (float *)(shared + WARPS * STAGES * TILES * 64);          // [WARPS, 16 MT, STRIDE]
    float *squares = sums + WARPS * 16 * MT * STRIDE;                       // [WARPS, 16 MT]

    // Loads line `turn % LINES` of round `turn / LINES`. Eight threads have 128 bytes of a row; simultaneous reads are in different banks.
    auto fetch = [&](int turn) {
        if (turn < ROUNDS * LINES) {
            const int k = (warp * LINES + turn % LINES) * 64 + lane % 8 * 8, half = lane % 8 / 4;
            uint4 *to = ring + turn % STAGES * (TILES * 64) + half * 32;
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                const int tile = first + turn / LINES * SIDE + t % SIDE;
                const T *const one[] = {weights[t / SIDE]};
                const auto w = PAIR ? place(one, tile) : place(weights, tile);
#pragma unroll
                for (int r = lane / 8; r < 8; r += 4) {
                    bool live = k < K && w.row + r < w.rows;
                    copy16(to + t * 64 + ((r * 4 + lane % 4) ^ (half * 4)), live ? w.at + (u64)(w.row + r) * K + k : w.at, live);
                }
            }
        }
        copies_commit();
    };
    if (!EARLY) in_turn();
#pragma unroll
    for (int s = 0; s < STAGES; s++) fetch(s);
    if (EARLY) next_may_begin(), wait_for_turn();

    Line a[AHEAD];
    auto load = [&](Line &to, int line) {
#pragma unroll
        for (int p = 0; p < 2; p++) {
            const int k = (warp * LINES + line) * 64 + p * 32 + pair * 8;
#pragma unroll
            for (int e = 0; e < EIGHTS; e++) {
                const int row = e * 8 + group < ROWS ? e * 8 + group : ROWS - 1;
                to[p][e] = k < K ? *(const uint4 *)(x + (u64)row * X_ROW + k) : uint4{0, 0, 0, 0};
            }
        }
    };
    float rstd[EIGHTS];
    auto scale = [&](Line &v, int line) {
#pragma unroll
        for (int p = 0; p < 2; p++) {
            const int k = (warp * LINES + line) * 64 + p * 32 + pair * 8;
            if (k >= K) continue;
            const Eight w = *(const Eight *)(norm + k);
#pragma unroll
            for (int e = 0; e < EIGHTS; e++) {
                u32 *word = &v[p][e].x;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float s = rstd[e];
                    word[i] = pack<T>(low(word[i]) * s * to_float(w.at[2 * i]), high(word[i]) * s * to_float(w.at[2 * i + 1]));
                }
            }
        }
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) load(a[i], i);
    if (NORM) {
        float square[EIGHTS] = {};
#pragma unroll
        for (int line = 0; line < LINES; line++) {
            if (line >= AHEAD) load(a[line % AHEAD], line);
#pragma unroll
            for (int p = 0; p < 2; p++)
#pragma unroll
                for (int e = 0; e < EIGHTS; e++) {
                    const u32 *word = &a[line % AHEAD][p][e].x;
#pragma unroll
                    for (int i = 0; i < 4; i++) square[e] += low(word[i]) * low(word[i]) + high(word[i]) * high(word[i]);
                }
        }
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            square[e] += __shfl_xor_sync(0xffffffffu, square[e], 1);
            square[e] += __shfl_xor_sync(0xffffffffu, square[e], 2);
            if (pair == 0) squares[warp * (16 * MT) + e * 8 + group] = square[e];
        }
        __syncthreads();
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            float all = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) all += squares[w * (16 * MT) + e * 8 + group];
            rstd[e] = rsqrtf(all * (1.0f / K) + EPS);
        }
        if (KEEP)
#pragma unroll
            for (int i = 0; i < AHEAD; i++) scale(a[i], i);
    }

    for (int round = 0; round < ROUNDS; round++) {
        if (!KEEP && (NORM || round > 0))
#pragma unroll
            for (int i = 0; i < AHEAD; i++) load(a[i], i);
        float added[OWN];
        if (ADD)
#pragma unroll
            for (int o = 0; o < OWN; o++) {
                const int i = threadIdx.x + o * THREADS;
                const auto y = place(ys, first + round * SIDE + i % WIDE / 8);
                const int column = y.row + i % 8;
                added[o] = i < ROWS * WIDE && column < y.rows ? to_float(more[(u64)(i / WIDE) * y.rows + column]) : 0.0f;
            }
        float c[MT][TILES][4] = {};
#pragma unroll
        for (int line = 0; line < LINES; line++) {
            const int turn = round * LINES + line;
            Line &own = a[line % AHEAD];
            if (NORM && !KEEP) scale(own, line);
            copies_wait<STAGES - 1>();
            __syncwarp();
            const uint4 *from = ring + turn % STAGES * (TILES * 64);
#pragma unroll
            for (int p = 0; p < 2; p++)
#pragma unroll
                for (int t = 0; t < TILES; t++) {
                    const uint4 w = from[t * 64 + p * 32 + (lane ^ (p * 4))];
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        const uint4 up = own[p][2 * m], down = 2 * m + 1 < EIGHTS ? own[p][(2 * m + 1) % EIGHTS] : uint4{0, 0, 0, 0};
                        const u32 one[4] = {up.x, down.x, up.y, down.y}, two[4] = {up.z, down.z, up.w, down.w};
                        mma<T>(c[m][t], one, w.x, w.y);
                        mma<T>(c[m][t], two, w.z, w.w);
                    }
                }
            __syncwarp();
            fetch(turn + STAGES);
            if (line + AHEAD < LINES) load(own, line + AHEAD);
        }

#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float *to = sums + ((warp * MT + m) * 16 + h * 8 + group) * STRIDE + t * 8 + pair * 2;
                    to[0] = c[m][t][2 * h], to[1] = c[m][t][2 * h + 1];
                }
        __syncthreads();
#pragma unroll
        for (int o = 0; o < OWN; o++) {
            const int i = threadIdx.x + o * THREADS, row = i / WIDE;
            if (i >= ROWS * WIDE) break;
            float v = 0.0f, up = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const float *part = sums + (w * MT * 16 + row) * STRIDE + i % WIDE;
                v += part[0];
                if (PAIR) up += part[WIDE];
            }
            if (PAIR) v = v / (1.0f + __expf(-v)) * up;
            if (ADD) v += added[o];
            const auto y = place(ys, first + round * SIDE + i % WIDE / 8);
            const int column = y.row + i % 8;
            if (column < y.rows) from_float(v, y.at[(u64)row * y.rows + column]);
        }
        if (ROUNDS > 1) __syncthreads();
    }
}
