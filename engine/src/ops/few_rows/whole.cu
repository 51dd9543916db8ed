// The same for weights that nothing writes, loaded in whole rows by bulk copies (compute capability 9.0).
//
// The next kernel may be launched at once, and prefetches its weights while this one works. A round is TILES tiles of eight rows. If all weights of a
// block fit into shared memory together with those of the next kernel's block, there is one round. They are requested in pieces of CR rows, FLIGHT at a
// time, because reads of x queue behind them. There are as many blocks as multiprocessors, and blocks without work stay until `wait_for_turn` returns: so
// each multiprocessor has one block of this kernel and one of the next, never two of the same, which would share bandwidth for x. Otherwise a piece is a
// round, and FLIGHT of them are in flight. Warps, lines and the permutation of K are those of few_rows.cu.
//
// With NORM, x times the norm's weight is rounded and multiplied, and the result is scaled by 1 / rms, so that nothing waits for the sum of squares, which
// is the diagonal of x x^T. The norm's weights, f32 or bf16, are read before `wait_for_turn`.

const int THREADS = 32 * WARPS, MT = (ROWS + 15) / 16, EIGHTS = (ROWS + 7) / 8;
const int SIDE = PAIR ? TILES / 2 : TILES, WIDE = SIDE * 8;    // tiles and columns of y, of one round
const int STRIDE = TILES * 8 + (TILES % 2 ? 0 : 8);            // of the sums of a row: the rows of a warp lie in different banks
const int NEAR = ROWS * WIDE > THREADS ? 2 : 1;                // neighbouring results of a thread
const int OWN = (ROWS * WIDE / NEAR + THREADS - 1) / THREADS;  // and how often it has them
const int PIECES = (TILES * 8 + CR - 1) / CR, SLOTS = ROUNDS > 1 ? FLIGHT : PIECES;

// Two neighbouring weights of a norm: rounded, and what is left of each.
__device__ __forceinline__ void two_weights(const float *w, u32 &whole, u32 &rest) {
    whole = pack<bf16>(w[0], w[1]);
    rest = pack<bf16>(w[0] - to_float(bf16{(unsigned short)whole}), w[1] - to_float(bf16{(unsigned short)(whole >> 16)}));
}
__device__ __forceinline__ void two_weights(const bf16 *w, u32 &whole, u32 &rest) { whole = *(const u32 *)w, rest = 0; }

// a b + c, for two elements at once.
__device__ __forceinline__ u32 fma_two(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
few_rows_whole(const T *x, const TN *norm, const TR *more, WEIGHT_ARGS, OUT_ARGS) {
    extern __shared__ uint4 shared[];
    const T *const weights[] = {WEIGHT_LIST};
    OUT *const ys[] = {OUT_LIST};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, pair = lane % 4;
    const int first = blockIdx.x * (ROUNDS * SIDE);
    T *own = (T *)shared;                                            // [SLOTS * CR, W_ROW]
    float *sums = (float *)((char *)shared + SUMS);                  // [2 or 1, WARPS, 16 MT, STRIDE]; of one round, where its weights were
    float *squares = sums + (ROUNDS > 1 ? 2 : 1) * WARPS * 16 * MT * STRIDE; // [WARPS, 16 MT]
    u64 *arrived = (u64 *)((char *)shared + BARRIERS);               // [SLOTS]
    next_may_begin();
    if (first >= ALL_TILES) {
        wait_for_turn();
        return;
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) expect(arrived + i, 1);
        show();
    }
    __syncthreads();
    // Piece `piece % PIECES` of round `piece / PIECES`, by one warp.
    auto fetch = [&](int piece) {
        const int r = piece % PIECES * CR + lane, t = r / 8, tile = first + piece / PIECES * SIDE + t % SIDE, slot = piece % SLOTS;
        const T *const one[] = {PAIR && t >= SIDE ? weights[PAIR] : weights[0]};
        const auto w = PAIR ? place(one, tile) : place(weights, tile);
        const bool live = lane < CR && r < TILES * 8 && w.row + r % 8 < w.rows;
        const int rows = __popc(__ballot_sync(0xffffffffu, live));
        if (lane == 0) arrive_and_expect(arrived + slot, rows * K * (int)sizeof(T));
        __syncwarp();
        if (live) copy_row(own + (slot * CR + lane) * W_ROW, w.at + (u64)(w.row + r % 8) * K, K * (int)sizeof(T), arrived + slot);
    };
    if (warp == 0)
        for (int piece = 0; piece < SLOTS; piece++) {
            if (ROUNDS == 1 && piece >= FLIGHT) await(arrived + piece - FLIGHT, 0);
            fetch(piece);
        }
    const u32 nothing = 0x80008000u; // -0, twice
    u32 whole[LINES][2][4], rest[LINES][2][4];
    if (NORM)
#pragma unroll
        for (int i = 0; i < 2 * LINES; i++) {
            const int k = (warp * LINES + i / 2) * 64 + i % 2 * 32 + pair * 8;
            const Eight w = *(const Eight *)(norm + (k < K ? k : 0));
#pragma unroll
            for (int e = 0; e < 4; e++) two_weights(w.at + 2 * e, whole[i / 2][i % 2][e], rest[i / 2][i % 2][e]);
        }
    wait_for_turn();

    uint4 a[LINES][2][EIGHTS];
#pragma unroll
    for (int line = 0; line < LINES; line++)
#pragma unroll
        for (int p = 0; p < 2; p++) {
            const int k = (warp * LINES + line) * 64 + p * 32 + pair * 8;
#pragma unroll
            for (int e = 0; e < EIGHTS; e++) {
                const int row = e * 8 + group < ROWS ? e * 8 + group : ROWS - 1;
                a[line][p][e] = k < K ? *(const uint4 *)(x + (u64)row * X_ROW + k) : uint4{0, 0, 0, 0};
            }
        }
    float square[MT][4] = {};
    if (NORM)
#pragma unroll
        for (int i = 0; i < 2 * LINES * EIGHTS; i++) {
            const int line = i / (2 * EIGHTS), p = i / EIGHTS % 2, e = i % EIGHTS;
            u32 *word = &a[line][p][e].x;
            const bool up = e % 2 == 0;
            const u32 one[4] = {up ? word[0] : 0, up ? 0 : word[0], up ? word[1] : 0, up ? 0 : word[1]};
            const u32 two[4] = {up ? word[2] : 0, up ? 0 : word[2], up ? word[3] : 0, up ? 0 : word[3]};
            mma<T>(square[e / 2], one, word[0], word[1]);
            mma<T>(square[e / 2], two, word[2], word[3]);
#pragma unroll
            for (int j = 0; j < 4; j++)
                word[j] = fma_two(word[j], whole[line][p][j], sizeof(TN) == 2 ? nothing : fma_two(word[j], rest[line][p][j], nothing));
        }

    for (int round = 0; round < ROUNDS; round++) {
        const int tile0 = first + round * SIDE;
        float added[OWN][NEAR];
#pragma unroll
        for (int o = 0; o < OWN && ADD; o++) {
            const int i = (threadIdx.x + o * THREADS) * NEAR;
            const auto y = place(ys, tile0 + i % WIDE / 8);
#pragma unroll
            for (int e = 0; e < NEAR; e++) {
                const int column = y.row + i % 8 + e;
                added[o][e] = i < ROWS * WIDE && column < y.rows ? to_float(more[(u64)(i / WIDE) * y.rows + column]) : 0.0f;
            }
        }
        if (ROUNDS > 1) {
            await(arrived + round % SLOTS, round / SLOTS);
        } else { // the pieces before had arrived when these were asked for
#pragma unroll 1
            for (int piece = PIECES > FLIGHT ? PIECES - FLIGHT : 0; piece < PIECES; piece++) await(arrived + piece, 0);
        }
        const T *here = own + (ROUNDS > 1 ? round % SLOTS * CR * W_ROW : 0);
        float c[MT][TILES][4] = {};
#pragma unroll
        for (int line = 0; line < LINES; line++)
#pragma unroll
            for (int p = 0; p < 2; p++) {
                const int k = (warp * LINES + line) * 64 + p * 32 + pair * 8;
#pragma unroll
                for (int t = 0; t < TILES; t++) {
                    const uint4 w = k < K ? *(const uint4 *)(here + (t * 8 + group) * W_ROW + k) : uint4{0, 0, 0, 0};
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        const uint4 up = a[line][p][2 * m], down = 2 * m + 1 < EIGHTS ? a[line][p][(2 * m + 1) % EIGHTS] : uint4{0, 0, 0, 0};
                        const u32 one[4] = {up.x, down.x, up.y, down.y}, two[4] = {up.z, down.z, up.w, down.w};
                        mma<T>(c[m][t], one, w.x, w.y);
                        mma<T>(c[m][t], two, w.z, w.w);
                    }
                }
            }

        if (ROUNDS == 1) __syncthreads();
        if (NORM && round == 0 && group / 2 == pair)
#pragma unroll
            for (int e = 0; e < EIGHTS; e++)
                squares[warp * (16 * MT) + e * 8 + group] = group % 2 ? square[e / 2][e % 2 * 2 + 1] : square[e / 2][e % 2 * 2];
        // Two rounds have sums: one is read while the next is written.
        float *both = sums + (ROUNDS > 1 ? round % 2 * (WARPS * 16 * MT * STRIDE) : 0);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float *to = both + ((warp * MT + m) * 16 + h * 8 + group) * STRIDE + t * 8 + pair * 2;
                    to[0] = c[m][t][2 * h], to[1] = c[m][t][2 * h + 1];
                }
        __syncthreads();
        if (ROUNDS > 1 && warp == 0 && round + SLOTS < ROUNDS) fetch(round + SLOTS); // where this round's weights were
#pragma unroll
        for (int o = 0; o < OWN; o++) {
            const int i = (threadIdx.x + o * THREADS) * NEAR, row = i / WIDE;
            if (i >= ROWS * WIDE) break;
            float v[NEAR] = {}, up[NEAR] = {}, all = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const float *part = both + (w * MT * 16 + row) * STRIDE + i % WIDE;
#pragma unroll
                for (int e = 0; e < NEAR; e++) {
                    v[e] += part[e];
                    if (PAIR) up[e] += part[WIDE + e];
                }
                if (NORM) all += squares[w * 16 * MT + row];
            }
            const float scale = NORM ? rsqrtf(all * (1.0f / K) + EPS) : 1.0f;
            const auto y = place(ys, tile0 + i % WIDE / 8);
#pragma unroll
            for (int e = 0; e < NEAR; e++) {
                if (NORM) v[e] *= scale, up[e] *= scale;
                if (PAIR) v[e] = v[e] / (1.0f + __expf(-v[e])) * up[e];
                if (ADD) v[e] += added[o][e];
                const int column = y.row + i % 8 + e;
                if (column < y.rows) from_float(v[e], y.at[(u64)row * y.rows + column]);
            }
        }
    }
}
