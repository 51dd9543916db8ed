// Attention of TIME new queries, at past, past + 1, .., over the keys of a cache, new ones included; those are written into it.
// q [BATCH, TIME, KV * GROUP, D], k and v [BATCH, TIME, KV, D], caches [BATCH, CAPACITY, KV, D]. Query i sees key j where i <= until[j], if MASKED.
// ROTATE (TIME is 1): queries and keys are rotated first, by cosines and sines [TABLE, D / 2], and normed before that if NORM.
//
// A block has CHUNK keys of one key head and R rows: queries of its group's heads. LANES threads share a key, PER packs each, and keep a running maximum,
// sum and output for every row; a warp has SIDE keys at once, and processes UNROLL times as many together. Keys and values are copied to shared memory,
// STAGES times that ahead, and read by the thread that copied them; if nothing wrote to the caches (EARLY), copying starts before `wait_for_turn`. The
// threads' partial results are combined at the end, those of the SPLITS blocks by attention_combine.

const int SIDE = 32 / LANES, DIMS = PER * VEC, ROWS = TIME * GROUP, TILES = (ROWS + R - 1) / R;
const int HALF = D / 2;

__device__ __forceinline__ void copy_pack(Pack<T> *to, const T *from, bool live) {
    if (sizeof(*to) == 16) copy16(to, from, live);
    else if (sizeof(*to) == 8) copy8(to, from, live);
    else if (sizeof(*to) == 4) copy4(to, from, live);
    else if (live) to->at[0] = *from; // too small for cp.async
    else from_float(0.0f, to->at[0]);
}

// A thread's elements of a head, and those that they are paired with.
template <class E> __device__ __forceinline__ void read_head(const E *from, int own, float (&head)[DIMS], float (&other)[DIMS]) {
#pragma unroll
    for (int p = 0; p < PER; p++) {
        const int d = (p * LANES + own) * VEC;
        Pack<E> a, b;
        if (d < D) a = read<true>(from + d);
        if (d < D && !ADJACENT) b = read<true>(from + (d < HALF ? d + HALF : d - HALF));
#pragma unroll
        for (int e = 0; e < VEC; e++) {
            head[p * VEC + e] = d < D ? to_float(a.at[e]) : 0.0f;
            other[p * VEC + e] = d >= D ? 0.0f : ADJACENT ? to_float(from[(d + e) ^ 1]) : to_float(b.at[e]);
        }
    }
}

// The head, normed, and rotated by the angles of row `table`.
__device__ __forceinline__ void rotate(const float (&head)[DIMS], const float (&other)[DIMS], int own, const TW *weight, const C *cos, const C *sin,
                                     u64 table, float (&to)[DIMS]) {
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < DIMS; i++) square += head[i] * head[i];
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) square += __shfl_xor_sync(0xffffffffu, square, mask);
    const float rstd = NORM ? rsqrtf(square * (1.0f / D) + EPS) : 1.0f;
    cos += table * HALF, sin += table * HALF;
#pragma unroll
    for (int p = 0; p < PER; p++) {
        const int d = (p * LANES + own) * VEC, far = d < HALF ? d + HALF : d - HALF;
        if (d >= D) continue;
        Pack<C> c, s;
        Pack<TW> w, x;
        if (!ADJACENT) c = read<true>(cos + (d < HALF ? d : far)), s = read<true>(sin + (d < HALF ? d : far));
        if (NORM) w = read<true>(weight + d);
        if (NORM && !ADJACENT) x = read<true>(weight + far);
#pragma unroll
        for (int e = 0; e < VEC; e++) {
            float a = head[p * VEC + e], b = other[p * VEC + e];
            if (NORM) a *= to_float(w.at[e]), b *= to_float(ADJACENT ? weight[(d + e) ^ 1] : x.at[e]);
            const float angle = to_float(ADJACENT ? sin[(d + e) / 2] : s.at[e]), sign = (ADJACENT ? (d + e) % 2 == 0 : d < HALF) ? -angle : angle;
            to[p * VEC + e] = (a * to_float(ADJACENT ? cos[(d + e) / 2] : c.at[e]) + b * sign) * rstd;
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
attention_decode(const TQ *q, const T *k, const T *v, const int *past_at, const int *until, const C *cos, const C *sin, const TW *q_weight,
                 const TW *k_weight, T *k_cache, T *v_cache, TQ *y, float *partial) {
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = lane % LANES;
    Pack<T> *ring = (Pack<T> *)shared + warp * (STAGES * UNROLL * 2 * PER * 32) + lane;              // [STAGES, UNROLL, 2, PER, 32]
    float *queries = (float *)((Pack<T> *)shared + WARPS * STAGES * UNROLL * 2 * PER * 32);          // ROTATE: [R, D]
    T *fresh = (T *)(queries + ROTATE * R * D);                                                         // ROTATE: the new key and value, [2, D]
    float *sums = (float *)(fresh + ROTATE * 2 * D);                                                    // [WARPS, R, D + 2]: outputs, maximum, sum
    int *seen = (int *)(sums + WARPS * R * (D + 2)) + warp * (STAGES * UNROLL * 32) + lane;           // MASKED: [STAGES, UNROLL, 32]
    const int split = blockIdx.x % SPLITS, tile = blockIdx.x / SPLITS % TILES, kv = blockIdx.x / (SPLITS * TILES) % KV;
    const u64 b = blockIdx.x / (SPLITS * TILES * KV);
    if (!EARLY) in_turn();
    const int past = held(*past_at), first = split * CHUNK, end = past + TIME < first + CHUNK ? past + TIME : first + CHUNK;

    auto fetch = [&](int batch) {
        const int j0 = first + (batch * WARPS + warp) * UNROLL * SIDE;
        if (j0 < end) {
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                const int j = j0 + u * SIDE + lane / LANES, slot = batch % STAGES * UNROLL + u;
                const u64 at = (b * CAPACITY + j) * KV * D + kv * D;
#pragma unroll
                for (int p = 0; p < PER; p++) {
                    const int d = (p * LANES + own) * VEC;
                    const bool live = j < past && j < end && d < D;
                    copy_pack(ring + (slot * 2 * PER + p) * 32, live ? k_cache + at + d : k_cache, live);
                    copy_pack(ring + (slot * 2 * PER + PER + p) * 32, live ? v_cache + at + d : v_cache, live);
                }
                if (MASKED) copy4(seen + slot * 32, j < end ? until + b * CAPACITY + j : until, j < end);
            }
        }
        copies_commit();
    };
#pragma unroll
    for (int s = 0; s < STAGES; s++) fetch(s);
    if (EARLY) next_may_begin(), wait_for_turn();
    if (first >= end) return;

    float query[R][DIMS], out[R][DIMS] = {}, most[R], sum[R] = {};
    auto query_row = [&](int r) {
        const int row = tile * R + r < ROWS ? tile * R + r : ROWS - 1;
        return q + (b * TIME + row / GROUP) * Q_ROW + (kv * GROUP + row % GROUP) * D;
    };
    if (ROTATE) { // LANES threads for each query, for the key and for the value
        for (int i0 = 0; i0 < R + 2; i0 += WARPS * SIDE) {
            const int i = i0 + warp * SIDE + lane / LANES;
            float head[DIMS], other[DIMS], rotated[DIMS];
            if (i < R) read_head(query_row(i), own, head, other);
            else read_head(i == R ? k + b * K_ROW + kv * D : v + b * V_ROW + kv * D, own, head, other);
            rotate(head, other, own, i < R ? q_weight : k_weight, cos, sin, b % TABLE, rotated);
#pragma unroll
            for (int n = 0; n < DIMS; n++) {
                const int d = (n / VEC * LANES + own) * VEC + n % VEC;
                if (d >= D || i > R + 1) continue;
                if (i < R) queries[i * D + d] = rotated[n] * SCALE_2;
                else from_float(i == R ? rotated[n] : head[n], fresh[(i - R) * D + d]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        most[r] = -infinity();
#pragma unroll
        for (int n = 0; n < DIMS; n++) {
            const int d = (n / VEC * LANES + own) * VEC + n % VEC;
            query[r][n] = d >= D ? 0.0f : ROTATE ? queries[r * D + d] : to_float(query_row(r)[d]) * SCALE_2;
        }
    }

    for (int batch = 0, j0; (j0 = first + (batch * WARPS + warp) * UNROLL * SIDE) < end; batch++) {
        copies_wait<STAGES - 1>();
        Pack<T> keys[UNROLL][PER], values[UNROLL][PER];
        float score[UNROLL][R];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int j = j0 + u * SIDE + lane / LANES, slot = batch % STAGES * UNROLL + u;
            const bool is_new = j >= past && j < end;
            const u64 at = (b * CAPACITY + j) * KV * D + kv * D, new_row = b * TIME + (j - past);
            const T *key = ROTATE ? fresh : k + new_row * K_ROW + kv * D, *value = ROTATE ? fresh + D : v + new_row * V_ROW + kv * D;
#pragma unroll
            for (int p = 0; p < PER; p++) {
                const int d = (p * LANES + own) * VEC;
                keys[u][p] = ring[(slot * 2 * PER + p) * 32], values[u][p] = ring[(slot * 2 * PER + PER + p) * 32];
                if (is_new && d < D) {
                    keys[u][p] = read<true>(key + d), values[u][p] = read<true>(value + d);
                    if (tile == 0) write(k_cache + at + d, keys[u][p]), write(v_cache + at + d, values[u][p]);
                }
            }
            const int last = j >= end ? -1 : MASKED ? seen[slot * 32] : CAPACITY; // the last query that sees the key
#pragma unroll
            for (int r = 0; r < R; r++) {
                float s = 0.0f;
#pragma unroll
                for (int i = 0; i < DIMS; i++) s += query[r][i] * to_float(keys[u][i / VEC].at[i % VEC]);
#pragma unroll
                for (int mask = LANES / 2; mask > 0; mask /= 2) s += __shfl_xor_sync(0xffffffffu, s, mask);
                const int i = past + (tile * R + r) / GROUP;
                score[u][r] = j <= i && i <= last ? s : -infinity();
            }
        }
#pragma unroll
        for (int r = 0; r < R; r++) {
            float high = most[r];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) high = fmaxf(high, score[u][r]);
            float shrink = share(most[r], high);
            most[r] = high;
            sum[r] *= shrink;
#pragma unroll
            for (int i = 0; i < DIMS; i++) out[r][i] *= shrink;
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                float p = share(score[u][r], high);
                sum[r] += p;
#pragma unroll
                for (int i = 0; i < DIMS; i++) out[r][i] += p * to_float(values[u][i / VEC].at[i % VEC]);
            }
        }
        fetch(batch + STAGES);
    }

#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int mask = LANES; mask < 32; mask *= 2) {
            float high = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], mask)), shrink = share(most[r], high);
            most[r] = high;
            sum[r] *= shrink;
            sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], mask);
#pragma unroll
            for (int i = 0; i < DIMS; i++) {
                out[r][i] *= shrink;
                out[r][i] += __shfl_xor_sync(0xffffffffu, out[r][i], mask);
            }
        }
        float *mine = sums + (warp * R + r) * (D + 2);
        if (lane < LANES) {
#pragma unroll
            for (int i = 0; i < DIMS; i++) {
                int d = (i / VEC * LANES + own) * VEC + i % VEC;
                if (d < D) mine[d] = out[r][i];
            }
        }
        if (lane == 0) mine[D] = most[r], mine[D + 1] = sum[r];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < R * D; i += 32 * WARPS) {
        int r = i / D, d = i % D, row = tile * R + r;
        if (row >= ROWS) break;
        float high = -infinity(), total = 0.0f, o = 0.0f;
        for (int w = 0; w < WARPS; w++) high = fmaxf(high, sums[(w * R + r) * (D + 2) + D]);
        for (int w = 0; w < WARPS; w++) {
            const float *part = sums + (w * R + r) * (D + 2);
            float weight = share(part[D], high);
            o += weight * part[d];
            total += weight * part[D + 1];
        }
        u64 head = (b * TIME + row / GROUP) * (KV * GROUP) + kv * GROUP + row % GROUP;
        if (SPLITS == 1) {
            from_float(total > 0.0f ? o / total : 0.0f, y[head * D + d]);
        } else {
            float *to = partial + (head * SPLITS + split) * (D + 2);
            to[d] = o;
            if (d == 0) to[D] = high, to[D + 1] = total;
        }
    }
}
