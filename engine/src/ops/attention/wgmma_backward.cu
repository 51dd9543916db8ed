// Two kernels. In the first, a block owns keys and walks over the queries: it computes dk and dv, and stores ds in tiles of 64 x 64, from which the
// second computes dq.
#define QUERY_TILES ((TIME + 63) / 64)
#define KEY_TILES ((KEYS + 63) / 64)
// Tiles of ds of a head; those above the diagonal are not stored.
#define FIRST_ROW ((63 + OFFSET) / 64 + 1)
#define TILES_BEFORE(row) (CAUSAL ? (u64)(row) * ((row) - 1) / 2 + (u64)(row) * FIRST_ROW : (u64)(row) * KEY_TILES)
#define TILES_A_HEAD TILES_BEFORE(QUERY_TILES)

// The tile of queries from t0 and keys from k0 on, of head h: 64 rows of keys, in the swizzled layout that wgmma reads.
__device__ __forceinline__ T *tile_at(T *tiles, u64 b, u64 h, int t0, int k0) {
    return tiles + ((b * HEADS + h) * TILES_A_HEAD + TILES_BEFORE(t0 / 64) + k0 / 64) * 4096;
}
// Whether any of ROWS queries sees any key of a tile; `most` is the largest `until` of its keys.
template <int ROWS> __device__ __forceinline__ bool is_seen(int t0, int k0, int most) {
    return t0 < TIME && k0 < KEYS && t0 <= most && (!CAUSAL || k0 <= t0 + ROWS - 1 + OFFSET);
}

// A piece: 128 keys of a head, 64 for each of two groups of four warps, and all queries of the heads that read them, QUERY_ROWS (64 or 128) at a time.
#define BK 128
#define KEY_PIECES ((KEYS + BK - 1) / BK)
#define KV_HERE (HEADS_HERE / GROUP)
#define KEY_STREAMS (BATCH * KV_HERE)
#define WHOLE (!MASKED && KEYS % BK == 0) // every key is seen by the last query
#define STEPS 3 // stages of queries, so that there are two steps to fetch one in

struct KeyPiece {
    Turn turn;
    u32 b, kv;
    int k0;
    // With causality the first keys are seen by the most queries.
    __device__ __forceinline__ KeyPiece(u32 round) : turn(ORDER(KEY_STREAMS, KEY_PIECES, KEY_BLOCKS, blockIdx.x, round)) {
        b = turn.stream / KV_HERE, kv = turn.stream % KV_HERE, k0 = (KEY_PIECES - 1 - (int)turn.piece) * BK;
    }
    __device__ __forceinline__ bool live() const { return turn.live; }
};

// Queries that see some key of a piece lie in here, and `until` of each group's keys.
struct Queries { int first, end; Reach own[2]; };

extern "C" __global__ void __launch_bounds__(256 + COPIERS, 1)
attention_dkdv(const T *q, const T *k, const T *v, const T *dy, UNTIL const Pair *stats, T *tiles, T *dk, T *dv) {
    extern __shared__ __align__(1024) float shared[];
    __shared__ u64 k_full[2], k_empty[2], full[STEPS], empty[STEPS];
    __shared__ Queries ranges[2];
    // Keys and values of two pieces; then queries, dy and their statistics. They fill all of shared memory, without room for alignment.
    T *keys = (T *)shared, *values = keys + 2 * BK * D, *queries = values + 2 * BK * D, *dys = queries + STEPS * QUERY_ROWS * D;
    float *columns = (float *)(dys + STEPS * QUERY_ROWS * D);
    const u64 y_step = HEADS * D;
    u32 lane = threadIdx.x % 32;
    if (threadIdx.x < 2) expect(k_full + threadIdx.x, COPIERS + 1), expect(k_empty + threadIdx.x, 8);
    if (threadIdx.x < STEPS) expect(full + threadIdx.x, COPIERS), expect(empty + threadIdx.x, 8);
    __syncthreads();

    if (threadIdx.x >= 256) {
        give_registers<40>();
        u32 copier = threadIdx.x - 256, n = 0, taken = 0; // stages and pieces so far
        for (u32 round = 0;; round++) {
            KeyPiece piece(round);
            if (!piece.live()) return;
            if (piece.turn.hole) continue;
            u32 slot = taken % 2;
            if (taken >= 2) await(k_empty + slot, taken / 2 - 1);
            taken++;
            load<BK>(keys + slot * BK * D, k + (u64)piece.b * KEYS * K_ROW + piece.kv * D, K_ROW, piece.k0, KEYS, copier);
            load<BK>(values + slot * BK * D, v + (u64)piece.b * KEYS * V_ROW + piece.kv * D, V_ROW, piece.k0, KEYS, copier);
            Queries r = {CAUSAL && piece.k0 > OFFSET ? (piece.k0 - OFFSET) / QUERY_ROWS * QUERY_ROWS : 0, TIME, {{TIME, TIME}, {TIME, TIME}}};
            if (MASKED) {
                const int *limits = until + (u64)piece.b * KEYS;
                r.own[0] = reach<64>(limits, piece.k0, lane), r.own[1] = reach<64>(limits, piece.k0 + 64, lane);
                int most = r.own[0].most > r.own[1].most ? r.own[0].most : r.own[1].most;
                r.end = most < TIME ? most + 1 : TIME;
            }
            if (copier == 0) ranges[slot] = r, arrive(k_full + slot);
            arrive_with_copies(k_full + slot);
            for (u32 h = piece.kv * GROUP; h < (piece.kv + 1) * GROUP; h++)
                for (int t0 = r.first; t0 < r.end; t0 += QUERY_ROWS, n++) {
                    u32 stage = n % STEPS;
                    if (n >= STEPS) await(empty + stage, n / STEPS - 1);
                    const u64 q_at = (u64)piece.b * TIME * Q_ROW + h * D, y_at = (u64)piece.b * TIME * y_step + h * D;
                    load<QUERY_ROWS>(queries + stage * QUERY_ROWS * D, q + q_at, Q_ROW, t0, TIME, copier);
                    load<QUERY_ROWS>(dys + stage * QUERY_ROWS * D, dy + y_at, y_step, t0, TIME, copier);
#pragma unroll
                    for (int i = copier / 2; i < QUERY_ROWS; i += 64) {
                        int t = t0 + i;
                        const float *from = (const float *)(stats + ((u64)piece.b * HEADS + h) * TIME + (t < TIME ? t : 0)) + copier % 2;
                        copy4(columns + (stage * 2 + copier % 2) * QUERY_ROWS + i, from, t < TIME);
                    }
                    arrive_with_copies(full + stage);
                }
        }
    }

    take_registers<232>();
    const u32 group = own_group(), row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    const auto release = [&](u64 *barrier) {
        __syncwarp();
        if (lane == 0) arrive(barrier);
    };
    u32 n = 0, taken = 0; // stages and pieces so far
    for (u32 round = 0;; round++) {
        KeyPiece piece(round);
        if (!piece.live()) return;
        if (piece.turn.hole) continue;
        int k_group = piece.k0 + 64 * group;
        // A thread's two keys are seen by queries from low to high.
        int low = k_group + row - OFFSET, high[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int key = k_group + row + 8 * half;
            high[half] = key >= KEYS ? -1 : MASKED ? until[(u64)piece.b * KEYS + key] : TIME;
        }
        u32 slot = taken % 2;
        await(k_full + slot, taken / 2);
        taken++;
        const int first = ranges[slot].first, end = ranges[slot].end;
        const Reach own = ranges[slot].own[group];
        u64 k_at = rows_at(keys + slot * BK * D) + group * 512, v_at = rows_at(values + slot * BK * D) + group * 512;
        float sum_k[D / 2], sum_v[D / 2], s[QUERY_ROWS / 2], dp[QUERY_ROWS / 2];
        u32 w[QUERY_ROWS / 16][4], u[QUERY_ROWS / 16][4];
#pragma unroll
        for (int i = 0; i < D / 2; i++) sum_k[i] = sum_v[i] = 0.0f;

        // Stages whose queries see no key of this group are skipped.
        u32 h = piece.kv * GROUP, h_end = first < end ? h + GROUP : h;
        int t0 = first;
        const auto advance = [&] {
            n++, t0 += QUERY_ROWS;
            if (t0 >= end) t0 = first, h++;
        };
        const auto is_hidden = [&] { return h < h_end && (await(full + n % STEPS, n / STEPS), !is_seen<QUERY_ROWS>(t0, k_group, own.most)); };
        const auto pass = [&] { release(empty + n % STEPS), advance(); };
        // Scores of keys and queries, or dy v^T: 64 x QUERY_ROWS, summed over D.
        const auto multiply = [&](float *c, u64 a, const T *rows) {
            u64 b = rows_at(rows);
#pragma unroll
            for (int i = 0; i < D; i += 16) {
                u64 left = a + (i / 64 * (BK * 8) + i % 64 / 8), right = b + (i / 64 * (QUERY_ROWS * 8) + i % 64 / 8);
                if (i == 0) scores_first(c, left, right);
                else scores(c, left, right);
            }
            products_commit();
        };
        // ds to its tile, or two, `gap` bytes apart.
        char *tile;
        int gap;
        u32 seen; // a bit for each tile that any query sees a key of
        const auto leave = [&] {
#pragma unroll
            for (int i = 0; i < QUERY_ROWS / 16; i++) {
                if (QUERY_ROWS > 64 && !(seen >> i / 4 & 1)) continue;
                u32 c = lane % 4 + i % 4 / 2 * 4, at = i / 2 * 8 + i % 2;
                *(uint4 *)(tile + i / 4 * gap + i % 2 * 1024 + ((c ^ lane / 4) << 4)) = make_uint4(u[at / 4][at % 4], u[(at + 2) / 4][(at + 2) % 4],
                                                                                 u[(at + 4) / 4][(at + 4) % 4], u[(at + 6) / 4][(at + 6) % 4]);
            }
        };
        while (is_hidden()) pass();
        if (h < h_end) {
            show();
            products_begin();
            multiply(s, k_at, queries + n % STEPS * QUERY_ROWS * D);
            for (;;) {
                const u32 stage = n % STEPS;
                const float *column = columns + stage * 2 * QUERY_ROWS + lane % 4 * 2;
                products_begin();
                multiply(dp, v_at, dys + stage * QUERY_ROWS * D);
                products_wait<1>();
#pragma unroll
                for (int i = 0; i < QUERY_ROWS / 2; i++) {
                    settled(s[i]);
                    s[i] = power_of_two(s[i] * SCALE_2 - column[i / 4 * 8 + i % 2]);
                }
                // The branch also keeps the compiler from waiting for dp before the exponentials.
#pragma unroll
                for (int i = 0; i < QUERY_ROWS / 2; i++) settled(s[i]);
                if (k_group + 64 > KEYS || (CAUSAL && k_group + 63 > t0 + OFFSET) || (MASKED && t0 + QUERY_ROWS - 1 > own.least)) {
#pragma unroll
                    for (int i = 0; i < QUERY_ROWS / 2; i++) {
                        int t = t0 + i / 4 * 8 + lane % 4 * 2 + i % 2;
                        if ((CAUSAL && t < low + i % 4 / 2 * 8) | (!WHOLE && t > high[i % 4 / 2])) s[i] = 0.0f;
                    }
                }
#pragma unroll
                for (int i = 0; i < QUERY_ROWS / 4; i++) w[i / 4][i % 4] = pack<T>(s[2 * i], s[2 * i + 1]);
                products_wait<0>();
#pragma unroll
                for (int i = 0; i < QUERY_ROWS / 2; i++) {
                    settled(dp[i]);
                    dp[i] = s[i] * (dp[i] - column[QUERY_ROWS + i / 4 * 8 + i % 2]);
                }
#pragma unroll
                for (int i = 0; i < QUERY_ROWS / 4; i++) u[i / 4][i % 4] = pack<T>(dp[2 * i], dp[2 * i + 1]);
                tile = (char *)tile_at(tiles, piece.b, h, t0, k_group) + row * 128;
                seen = is_seen<64>(t0, k_group, own.most) | is_seen<64>(t0 + 64, k_group, own.most) << 1;
                gap = (int)(TILES_BEFORE(t0 / 64 + 1) - TILES_BEFORE(t0 / 64)) * 8192;
                u64 q_at = rows_at(queries + stage * QUERY_ROWS * D, QUERY_ROWS * 128), dy_at = rows_at(dys + stage * QUERY_ROWS * D, QUERY_ROWS * 128);
                products_begin();
#pragma unroll
                for (int i = 0; i < QUERY_ROWS / 16; i++) add_rows(sum_v, w[i], dy_at + 128 * i);
#pragma unroll
                for (int i = 0; i < QUERY_ROWS / 16; i++) add_rows(sum_k, u[i], q_at + 128 * i);
                products_commit();
                advance();
                bool held = true;
                if (is_hidden()) {
                    products_wait<0>();
                    release(empty + stage), held = false;
                    while (is_hidden()) pass();
                }
                if (h >= h_end) {
                    leave();
                    products_wait<0>();
                    if (held) release(empty + stage);
                    break;
                }
                show();
                products_begin();
                multiply(s, k_at, queries + n % STEPS * QUERY_ROWS * D);
                leave(); // after the fence, which would wait for it
                products_wait<1>(); // for all but the scores
                if (held) release(empty + stage);
            }
#pragma unroll
            for (int i = 0; i < D / 2; i++) settled(sum_k[i]), settled(sum_v[i]);
        }
        release(k_empty + slot);
        const auto place_in = [&](T *to) {
            return [=](int half) {
                int key = k_group + row + 8 * half;
                return key < KEYS ? to + ((u64)piece.b * KEYS + key) * DK_ROW + piece.kv * D : nullptr;
            };
        };
        store(sum_k, SCALE, SCALE, lane, place_in(dk));
        store(sum_v, 1.0f, 1.0f, lane, place_in(dv));
    }
}

// dq = ds k, 64 keys at a time. One GEMM alone is memory-bound: four stages, and keys for four warp groups.
#define GROUPS 4
#define STAGES 4
#define STAGE (64 * D + GROUPS * 4096) // elements: keys, then a tile of ds for each group

extern "C" __global__ void __launch_bounds__(128 * GROUPS + COPIERS, 1) attention_dq(const T *k, UNTIL T *tiles, T *dq) {
    extern __shared__ __align__(1024) float shared[];
    __shared__ u64 full[STAGES], empty[STAGES];
    __shared__ u32 notes[STAGES]; // which groups have a tile in a stage, and whether it is the last one of its piece
    T *stages = (T *)first_place(shared);
    u32 lane = threadIdx.x % 32, n = 0; // stages so far
    const u32 last_one = 1 << GROUPS;
    if (threadIdx.x < STAGES) expect(full + threadIdx.x, COPIERS + 1), expect(empty + threadIdx.x, 4 * GROUPS);
    __syncthreads();

    if (threadIdx.x >= 128 * GROUPS) {
        u32 copier = threadIdx.x - 128 * GROUPS;
        for (u32 round = 0;; round++) {
            QueryPiece<GROUPS> piece(round);
            if (!piece.live()) return;
            if (piece.turn.hole) continue;
            const int *limits = MASKED ? until + (u64)piece.b * KEYS : until;
            const auto most = [&](int k0) { return MASKED ? reach<64>(limits, k0, lane).most : TIME; };
            int end = piece.end(), k0 = 0;
            while (MASKED && k0 + 64 < end && most(k0) < piece.t0) k0 += 64;
            for (; k0 < end; k0 += 64, n++) {
                T *stage = stages + n % STAGES * STAGE;
                u32 note = k0 + 64 >= end ? last_one : 0;
                int of_tile = most(k0);
                if (n >= STAGES) await(empty + n % STAGES, n / STAGES - 1);
                load<64>(stage, k + (u64)piece.b * KEYS * K_ROW + piece.head / GROUP * D, K_ROW, k0, KEYS, copier);
#pragma unroll
                for (u32 g = 0; g < GROUPS; g++) {
                    if (!is_seen<64>(piece.first_of(g), k0, of_tile)) continue;
                    note |= 1 << g;
                    const T *from = tile_at(tiles, piece.b, piece.head_of(g), piece.first_of(g), k0) + copier * 8;
                    T *to = stage + 64 * D + g * 4096 + copier * 8;
#pragma unroll
                    for (int i = 0; i < 4096; i += COPIERS * 8) copy16(to + i, from + i, true);
                }
                if (copier == 0) notes[n % STAGES] = note, arrive(full + n % STAGES);
                arrive_with_copies(full + n % STAGES);
            }
        }
    }

    const u32 group = own_group(), row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    for (u32 round = 0;; round++) {
        QueryPiece<GROUPS> piece(round);
        if (!piece.live()) return;
        if (piece.turn.hole) continue;
        float sum[D / 2];
#pragma unroll
        for (int i = 0; i < D / 2; i++) sum[i] = 0.0f;
        for (u32 note = 0; !(note & last_one); n++) {
            await(full + n % STAGES, n / STAGES);
            note = notes[n % STAGES];
            if (note >> group & 1) {
                const T *stage = stages + n % STAGES * STAGE;
                u64 ds = rows_at(stage + 64 * D + group * 4096), keys = rows_at(stage, 8192);
                show();
                products_begin();
#pragma unroll
                for (int i = 0; i < 4; i++) add_transposed(sum, ds + 128 * i, keys + 128 * i);
                products_commit();
                products_wait<0>();
#pragma unroll
                for (int i = 0; i < D / 2; i++) settled(sum[i]);
            }
            __syncwarp();
            if (lane == 0) arrive(empty + n % STAGES);
        }
        store(sum, SCALE, SCALE, lane, [&](int half) {
            int t = piece.first_of(group) + place(row + 8 * half);
            return t < TIME ? dq + ((u64)piece.b * TIME + t) * DQ_ROW + piece.head_of(group) * D : nullptr;
        });
    }
}
