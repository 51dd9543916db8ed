// WARP_GROUPS warp groups have 64 queries each, of several heads that read the same keys, if there are such, else of one. Keys and values are processed in tiles of
// 128, which four more warps copy ahead. The matmul with a tile's values overlaps with that for the next tile's scores, and one group's exponentials
// with the others' matmuls. Blocks are persistent and take one work item (piece) after another.
// SCALE_2 = scale log2(e): exp(scale s) = 2^(SCALE_2 s).
#define THREADS (128 * WARP_GROUPS)
#define BK 128
typedef QueryPiece<WARP_GROUPS> Piece;

// The tiles from `last` down to `first` contain all keys that some query of a piece sees; none if `first` > `last`.
struct Range { int first, last; };
__device__ __forceinline__ Range range(const Piece &piece, const int *limits, int lane) {
    Range r = {0, (piece.end() - 1) / BK * BK};
    if (!MASKED) return r;
    const auto most = [&](int k0) { return reach<BK>(limits, k0, lane).most; };
    int first = most(r.first), last = most(r.last);
    while (last < piece.t0 && r.last > 0) r.last -= BK, last = most(r.last);
    while (first < piece.t0 && r.first <= r.last) r.first += BK, first = most(r.first);
    return r;
}

extern "C" __global__ void __launch_bounds__(THREADS + COPIERS, 1)
attention_forward(const T *q, const T *k, const T *v, UNTIL T *y, float *lse) {
    extern __shared__ __align__(1024) float shared[];
    __shared__ u64 q_full[2], q_empty[2], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    __shared__ Range ranges[2];
    // Two stages of queries.
    T *queries = (T *)first_place(shared), *keys = queries + 2 * WARP_GROUPS * 64 * D, *values = keys + STAGES * BK * D;
    int *ends = (int *)(values + STAGES * BK * D);
    u32 lane = threadIdx.x % 32;
    if (threadIdx.x < 2) expect(q_full + threadIdx.x, COPIERS + 1), expect(q_empty + threadIdx.x, THREADS / 32);
    if (threadIdx.x < STAGES) {
        expect(k_full + threadIdx.x, COPIERS), expect(k_empty + threadIdx.x, THREADS / 32);
        expect(v_full + threadIdx.x, COPIERS), expect(v_empty + threadIdx.x, THREADS / 32);
    }
    __syncthreads();

    if (threadIdx.x >= THREADS) {
        give_registers<WARP_GROUPS == 2 ? 56 : 32>();
        u32 copier = threadIdx.x - THREADS, n = 0, taken = 0; // tiles and pieces so far
        for (u32 round = 0;; round++) {
            Piece piece(round);
            if (!piece.live()) return;
            if (piece.turn.hole) continue;
            u32 slot = taken % 2;
            if (taken >= 2) await(q_empty + slot, taken / 2 - 1);
#pragma unroll
            for (u32 g = 0; g < WARP_GROUPS; g++) {
                const T *from = q + (u64)piece.b * TIME * Q_ROW + piece.head_of(g) * D;
                load<64>(queries + (slot * WARP_GROUPS + g) * 64 * D, from, Q_ROW, piece.first_of(g), TIME, copier);
            }
            const int *limits = MASKED ? until + (u64)piece.b * KEYS : until;
            Range r = range(piece, limits, lane);
            if (copier == 0) ranges[slot] = r, arrive(q_full + slot);
            arrive_with_copies(q_full + slot);
            const T *k_from = k + (u64)piece.b * KEYS * K_ROW + piece.head / GROUP * D, *v_from = v + (u64)piece.b * KEYS * V_ROW + piece.head / GROUP * D;
            for (int k0 = r.last; k0 >= r.first; k0 -= BK, n++) {
                u32 stage = n % STAGES;
                if (n >= STAGES) await(k_empty + stage, n / STAGES - 1);
                load<BK>(keys + stage * BK * D, k_from, K_ROW, k0, KEYS, copier);
                if (MASKED) copy4(ends + stage * BK + copier, limits + (k0 + copier < KEYS ? k0 + copier : 0), k0 + copier < KEYS);
                arrive_with_copies(k_full + stage);
                if (n >= STAGES) await(v_empty + stage, n / STAGES - 1);
                load<BK>(values + stage * BK * D, v_from, V_ROW, k0, KEYS, copier);
                arrive_with_copies(v_full + stage);
            }
            taken++;
        }
    }

    take_registers<WARP_GROUPS == 2 ? 224 : 160>();
    const u32 group = own_group(), warp = threadIdx.x / 32 % 4;
    const auto release = [&](u64 *barrier) {
        __syncwarp();
        if (lane == 0) arrive(barrier);
    };
    float s[BK / 2], out[D / 2], top[2], total[2];
    u32 w[BK / 16][4], n = 0, taken = 0, before = 0; // tiles and pieces so far; the round of the piece before
    const auto finish = [&](const Piece &piece) {
        const u32 h = piece.head_of(group);
        const int t = piece.first_of(group) + 16 * warp + lane / 4;
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = total[half];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            inverse[half] = MASKED && sum == 0.0f ? 0.0f : 1.0f / sum;
            int row = t + 8 * half;
            const float ln_2 = 0.693147181f;
            if (lane % 4 == 0 && row < TIME) lse[((u64)piece.b * HEADS + h) * TIME + row] = top[half] * SCALE_2 * ln_2 + logf(sum);
        }
        store(out, inverse[0], inverse[1], lane, [&](int half) {
            int row = t + 8 * half;
            return row < TIME ? y + (((u64)piece.b * TIME + row) * HEADS + h) * D : nullptr;
        });
    };
    for (u32 round = 0;; round++) {
        Piece piece(round);
        if (!piece.live()) break;
        if (piece.turn.hole) continue;
        u32 slot = taken % 2;
        int t_group = piece.first_of(group), t_warp = t_group + 16 * warp, t = t_warp + lane / 4;
        await(q_full + slot, taken / 2);
        Range r = ranges[slot];
        // These 64 queries see no key from `seen` on, and so perhaps not the last tiles.
        int seen = t_group >= TIME ? 0 : CAUSAL && t_group + 64 + OFFSET < KEYS ? t_group + 64 + OFFSET : KEYS;
        u64 q_at = rows_at(queries + (slot * WARP_GROUPS + group) * 64 * D);
        // The previous piece is written while the first scores of this one are computed; a fence here would wait for that.
        const auto begin = [&] {
            if (taken > 0) finish(Piece(before));
#pragma unroll
            for (int i = 0; i < D / 2; i++) out[i] = 0.0f;
            top[0] = top[1] = -infinity(), total[0] = total[1] = 0.0f;
        };
        // Turns the scores of tile n into probabilities, and rescales the accumulators once their matmuls are done.
        const auto weigh = [&](int k0, bool first) {
            const int *limits = ends + n % STAGES * BK;
            int least = TIME;
            if (MASKED) {
#pragma unroll
                for (int i = 0; i < BK; i += 32) least = k0 + i + (int)lane < KEYS && limits[i + lane] < least ? limits[i + lane] : least;
                least = __reduce_min_sync(0xffffffffu, least);
            }
            if (first) products_wait<0>();
            else products_wait<1>();
#pragma unroll
            for (int i = 0; i < BK / 2; i++) settled(s[i]);
            if (k0 + BK > KEYS || (CAUSAL && k0 + BK - 1 > t_warp + OFFSET)) {
#pragma unroll
                for (int i = 0; i < BK / 2; i++) {
                    int last = CAUSAL && t + i % 4 / 2 * 8 + OFFSET < KEYS ? t + i % 4 / 2 * 8 + OFFSET : KEYS - 1; // that the row sees
                    if (i / 4 * 8 + i % 2 > last - k0 - (int)lane % 4 * 2) s[i] = -infinity();
                }
            }
            if (MASKED && t_warp + 15 > least) {
#pragma unroll
                for (int i = 0; i < BK / 2; i++)
                    if (t + i % 4 / 2 * 8 > limits[i / 4 * 8 + lane % 4 * 2 + i % 2]) s[i] = -infinity();
            }
            release(k_empty + n % STAGES);
            float shrink[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float high = top[half];
#pragma unroll
                for (int i = 2 * half; i < BK / 2; i += 4) high = fmaxf(high, fmaxf(s[i], s[i + 1]));
                high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1)); // four threads a row
                high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
                float score = high == -infinity() ? 0.0f : high, base = score * SCALE_2, sum = 0.0f; // nothing seen yet
                shrink[half] = power_of_two((top[half] - score) * SCALE_2);
                top[half] = high;
#pragma unroll
                for (int i = 2 * half; i < BK / 2; i += 4) {
                    s[i] = power_of_two(s[i] * SCALE_2 - base), s[i + 1] = power_of_two(s[i + 1] * SCALE_2 - base);
                    sum += s[i] + s[i + 1];
                }
                total[half] = total[half] * shrink[half] + sum; // of this thread's columns
            }
            // The branch here keeps the compiler from waiting for the matmuls before the exponentials.
#pragma unroll
            for (int i = 0; i < BK / 2; i++) settled(s[i]);
            await(v_full + n % STAGES, n / STAGES);
            if (!first) {
                products_wait<0>();
                release(v_empty + (n - 1) % STAGES);
#pragma unroll
                for (int i = 0; i < D / 2; i++) settled(out[i]), out[i] *= shrink[i % 4 / 2];
            }
#pragma unroll
            for (int i = 0; i < BK / 4; i++) w[i / 4][i % 4] = pack<T>(s[2 * i], s[2 * i + 1]);
        };
        // Begins the scores of tile n.
        const auto score = [&] {
            u64 k_at = rows_at(keys + n % STAGES * BK * D);
            products_begin();
#pragma unroll
            for (int i = 0; i < D; i += 16) {
                u64 a = q_at + (i / 64 * 512 + i % 64 / 8), b = k_at + (i / 64 * (BK * 8) + i % 64 / 8);
                if (i == 0) scores_first(s, a, b);
                else scores(s, a, b);
            }
            products_commit();
        };
        // Begins to add the values of tile `of`.
        const auto add = [&](u32 of) {
            u64 v_at = rows_at(values + of % STAGES * BK * D, BK * 128);
#pragma unroll
            for (int i = 0; i < BK / 16; i++) add_values(out, w[i], v_at + 128 * i);
            products_commit();
        };
        int k0 = r.last;
        for (; k0 >= r.first && k0 >= seen; k0 -= BK, n++) {
            await(k_full + n % STAGES, n / STAGES), release(k_empty + n % STAGES);
            await(v_full + n % STAGES, n / STAGES), release(v_empty + n % STAGES);
        }
        if (k0 >= r.first) {
            await(k_full + n % STAGES, n / STAGES);
            show();
            score();
            begin();
            weigh(k0, true);
            while (k0 -= BK, n++, k0 >= r.first) {
                await(k_full + n % STAGES, n / STAGES);
                show();
                score();
                add(n - 1);
                weigh(k0, false);
            }
            show();
            products_begin();
            add(n - 1);
            products_wait<0>();
#pragma unroll
            for (int i = 0; i < D / 2; i++) settled(out[i]);
            release(v_empty + (n - 1) % STAGES);
        } else begin();
        release(q_empty + slot);
        taken++, before = round;
    }
    finish(Piece(before));
}
