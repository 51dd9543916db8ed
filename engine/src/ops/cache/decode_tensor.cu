// Attention of new queries over a cache as in decode.cu, on tensor cores: head dimensions 16, 32, 64 or 128, in T.
//
// A block has CHUNK keys of one key head, all of them in shared memory at once, and R of up to 16 rows: queries of its group's heads. The keys are loaded
// in small portions, so that other reads are not delayed, and if nothing wrote to the caches (EARLY), before `wait_for_turn`. Each warp has 16 keys at a
// time, with a running maximum, sum and output for every row; the warps' partial results are combined at the end, those of the SPLITS blocks by
// attention_combine. As in few_rows/whole.cu, blocks without work stay until `wait_for_turn` returns.

const int VEC_LANES = D / VEC, SIDE = 32 / VEC_LANES, ROWS = TIME * GROUP, TILES = (ROWS + R - 1) / R;
const int HALF = D / 2, ROW = D + 8, THREADS = 32 * WARPS;
const bool TWO = R > 8; // eights of rows

// The pack of a head at d, normed and rotated.
__device__ __forceinline__ Pack<T> rotated(const Pack<T> &a, const T *head, int d, const TW *weight, const C *cos, const C *sin) {
    const int far = d < HALF ? d + HALF : d - HALF;
    const Pack<T> b = ADJACENT ? a : read<true>(head + far);
    Pack<TW> w, x;
    if (NORM) w = read<true>(weight + d), x = ADJACENT ? w : read<true>(weight + far);
    float c[VEC], s[VEC], square = 0.0f;
#pragma unroll
    for (int e = 0; e < VEC; e++) {
        const int at = ADJACENT ? (d + e) / 2 : d % HALF + e;
        c[e] = to_float(cos[at]), s[e] = to_float(sin[at]);
        square += to_float(a.at[e]) * to_float(a.at[e]);
    }
#pragma unroll
    for (int mask = VEC_LANES / 2; mask > 0; mask /= 2) square += __shfl_xor_sync(0xffffffffu, square, mask);
    const float rstd = NORM ? rsqrtf(square * (1.0f / D) + EPS) : 1.0f;
    Pack<T> to;
#pragma unroll
    for (int e = 0; e < VEC; e++) {
        const int f = ADJACENT ? e ^ 1 : e;
        float own = to_float(a.at[e]), other = to_float(b.at[f]);
        if (NORM) own *= to_float(w.at[e]), other *= to_float(x.at[f]);
        from_float((own * c[e] + other * ((ADJACENT ? e % 2 == 0 : d < HALF) ? -s[e] : s[e])) * rstd, to.at[e]);
    }
    return to;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
attention_decode_tensor(const T *q, const T *k, const T *v, const int *past_at, const int *until, const C *cos, const C *sin, const TW *q_weight,
                        const TW *k_weight, T *k_cache, T *v_cache, T *y, float *partial) {
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, pair = lane % 4;
    T *queries = (T *)shared;                                        // [16, ROW]
    T *keys = queries + 16 * ROW, *values = keys + CHUNK * ROW;      // [CHUNK, ROW] each
    int *seen = (int *)(values + CHUNK * ROW);                       // MASKED: [CHUNK]
    float *sums = (float *)keys;                                     // in the end: [WARPS, R, D + 2], outputs, maximum, sum
    const int split = blockIdx.x % SPLITS, tile = blockIdx.x / SPLITS % TILES, kv = blockIdx.x / (SPLITS * TILES) % KV;
    const u64 b = blockIdx.x / (SPLITS * TILES * KV);
    next_may_begin();
    if (!EARLY || b >= BATCH) wait_for_turn();
    if (b >= BATCH) return;
    const int past = held(*past_at), first = split * CHUNK, all = past + TIME - first, count = all < CHUNK ? all : CHUNK;
    const int old = past < first ? 0 : past - first < count ? past - first : count; // keys that are in the cache
    // After the last key, zeros up to a multiple of 16.
    for (int i = threadIdx.x; i < (count + 15) / 16 * 16 * VEC_LANES; i += THREADS) {
        const int j = i / VEC_LANES, d = i % VEC_LANES * VEC;
        const u64 at = ((b * CAPACITY + first + j) * KV + kv) * D + d;
        if (j < old || j >= count) {
            copy16(keys + j * ROW + d, j < old ? k_cache + at : k_cache, j < old);
            copy16(values + j * ROW + d, j < old ? v_cache + at : v_cache, j < old);
        }
        copies_commit();
        copies_wait<2>();
    }
    if (MASKED)
        for (int j = threadIdx.x; j < count; j += THREADS) copy4(seen + j, until + b * CAPACITY + first + j, true);
    copies_commit();
    for (int i = threadIdx.x + R * (ROW / 8); i < 16 * (ROW / 8); i += THREADS) shared[i] = uint4{0, 0, 0, 0}; // rows that are no queries
    if (NORM && threadIdx.x * VEC < 2 * D) {
        const int d = threadIdx.x * VEC % D;
        asm volatile("prefetch.global.L2 [%0];" ::"l"((threadIdx.x * VEC < D ? q_weight : k_weight) + d));
    }
    if (EARLY) wait_for_turn();
    if (count <= 0) return;

    // VEC_LANES threads for each query, new key and new value.
    const int rows = tile * R + R < ROWS ? R : ROWS - tile * R, heads = rows + 2 * (count - old);
    for (int i0 = 0; i0 < heads; i0 += WARPS * SIDE) {
        const int i = i0 + warp * SIDE + lane / VEC_LANES, d = lane % VEC_LANES * VEC, row = tile * R + i, j = old + (i - rows) / 2;
        const bool live = i < heads, is_query = i < rows, is_value = !is_query && (i - rows) % 2;
        const u64 token = b * TIME + (is_query ? row / GROUP : first + j - past);
        const T *from = !live ? q : is_query ? q + token * Q_ROW + (kv * GROUP + row % GROUP) * D : is_value ? v + token * V_ROW + kv * D : k + token * K_ROW + kv * D;
        Pack<T> head = read<true>(from + d);
        if (ROTATE) {
            const Pack<T> other = rotated(head, from, d, is_query ? q_weight : k_weight, cos + b % TABLE * HALF, sin + b % TABLE * HALF);
            if (!is_value) head = other;
        }
        if (!live) continue;
        write((is_query ? queries + i * ROW : (is_value ? values : keys) + j * ROW) + d, head);
        if (!is_query && tile == 0) write((is_value ? v_cache : k_cache) + ((b * CAPACITY + first + j) * KV + kv) * D + d, head);
    }
    copies_wait<0>();
    __syncthreads();

    u32 a[D / 16][4];
#pragma unroll
    for (int s = 0; s < D / 16; s++) matrices(a[s], queries + lane % 16 * ROW + s * 16 + lane / 16 * 8);
    float out[D / 8][4] = {}, most[2] = {-infinity(), -infinity()}, sum[2] = {};
    for (int j0 = warp * 16; j0 < count; j0 += WARPS * 16) {
        float c[2][4] = {};
#pragma unroll
        for (int s = 0; s < D / 16; s++) {
            u32 w[4]; // two eights of keys, two of elements
            matrices(w, keys + (j0 + lane / 16 * 8 + lane % 8) * ROW + s * 16 + lane / 8 % 2 * 8);
            mma<T>(c[0], a[s], w[0], w[1]);
            mma<T>(c[1], a[s], w[2], w[3]);
        }
        float high[2] = {most[0], most[1]};
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int j = j0 + e * 8 + pair * 2 + i % 2, at = past + (tile * R + group + i / 2 * 8) / GROUP;
                const int last = j >= count ? -1 : MASKED ? seen[j] : CAPACITY; // the last query that sees the key
                c[e][i] = first + j <= at && at <= last ? c[e][i] * SCALE_2 : -infinity();
                high[i / 2] = fmaxf(high[i / 2], c[e][i]);
            }
        u32 p[4] = {};
#pragma unroll
        for (int h = 0; h < 1 + TWO; h++) {
            high[h] = fmaxf(high[h], __shfl_xor_sync(0xffffffffu, high[h], 1));
            high[h] = fmaxf(high[h], __shfl_xor_sync(0xffffffffu, high[h], 2));
            const float shrink = share(most[h], high[h]);
            most[h] = high[h];
            sum[h] *= shrink;
#pragma unroll
            for (int n = 0; n < D / 8; n++) out[n][2 * h] *= shrink, out[n][2 * h + 1] *= shrink;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float left = share(c[e][2 * h], high[h]), right = share(c[e][2 * h + 1], high[h]);
                sum[h] += left + right;
                p[2 * e + h] = pack<T>(left, right);
            }
        }
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            u32 w[4]; // two eights of keys, two of elements
            matrices_t(w, values + (j0 + lane % 16) * ROW + n * 16 + lane / 16 * 8);
            mma<T>(out[2 * n], p, w[0], w[1]);
            mma<T>(out[2 * n + 1], p, w[2], w[3]);
        }
    }

    __syncthreads();
#pragma unroll
    for (int h = 0; h < 1 + TWO; h++) {
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
        const int r = h * 8 + group;
        if (r >= R) continue;
        float *mine = sums + (warp * R + r) * (D + 2);
#pragma unroll
        for (int n = 0; n < D / 8; n++) mine[n * 8 + pair * 2] = out[n][2 * h], mine[n * 8 + pair * 2 + 1] = out[n][2 * h + 1];
        if (pair == 0) mine[D] = most[h], mine[D + 1] = sum[h];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * D; i += THREADS) {
        const int r = i / D, d = i % D, row = tile * R + r;
        float high = -infinity(), total = 0.0f, o = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) high = fmaxf(high, sums[(w * R + r) * (D + 2) + D]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float *part = sums + (w * R + r) * (D + 2);
            const float weight = share(part[D], high);
            o += weight * part[d];
            total += weight * part[D + 1];
        }
        const u64 head = (b * TIME + row / GROUP) * (KV * GROUP) + kv * GROUP + row % GROUP;
        if (SPLITS == 1) {
            from_float(total > 0.0f ? o / total : 0.0f, y[head * D + d]);
        } else {
            float *to = partial + (head * SPLITS + split) * (D + 2);
            to[d] = o;
            if (d == 0) to[D] = high, to[D + 1] = total;
        }
    }
}
