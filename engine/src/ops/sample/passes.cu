// Three passes over logits [ROWS, VOCAB], a block of THREADS for each chunk of a row: the largest; the mass in each bin of weights; the mass of
// the bins that are kept whole, and the tokens of the bin that crosses the limit.

const int BINS = (127 << (23 - LOW_BITS)) - FIRST_BIN + 1;

// f(index, logit) for every token of this block's chunk, all read before the first is looked at.
template <typename F> __device__ __forceinline__ void visit(const T *x, F f) {
    const int EACH = CHUNK / (THREADS * VEC);
    x += (u64)(blockIdx.x / CHUNKS) * VOCAB;
    int first = blockIdx.x % CHUNKS * CHUNK + threadIdx.x * VEC;
    Pack<T> v[EACH];
#pragma unroll
    for (int p = 0; p < EACH; p++)
        if (first + p * THREADS * VEC < VOCAB) v[p] = read<true>(x + first + p * THREADS * VEC);
#pragma unroll
    for (int p = 0; p < EACH; p++) {
        int i = first + p * THREADS * VEC;
        if (i >= VOCAB) continue;
#pragma unroll
        for (int j = 0; j < VEC; j++) f(i + j, to_float(v[p].at[j]));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) top_p_most(const T *x, float *most, u64 *masses, Row *rows) {
    u64 row = blockIdx.x / CHUNKS;
    if (blockIdx.x % CHUNKS == 0) {
        for (int i = threadIdx.x; i < BINS; i += THREADS) masses[row * BINS + i] = 0;
        if (threadIdx.x == 0) rows[row].own = 0, rows[row].listed = 0;
    }
    float m = -infinity(); // a NaN is no maximum, and is never drawn
    visit(x, [&](int, float v) { m = fmaxf(m, v); });
    m = block_max(m);
    if (threadIdx.x == 0) most[blockIdx.x] = m;
}

extern "C" __global__ void __launch_bounds__(THREADS) top_p_masses(const T *x, const float *most, u64 *masses, Row *rows) {
    __shared__ Sum sums[BINS];
    u64 row = blockIdx.x / CHUNKS, own = 0;
    for (int i = threadIdx.x; i < BINS; i += THREADS) sums[i] = {0, 0};
    float m = most_of(most + row * CHUNKS);
    __syncthreads();
    visit(x, [&](int, float v) {
        u32 key = key_of(v, m);
        if (key) add(sums[bin_of(key)], weight_of(key));
        if (LOG_PROB) own += v == m ? 1ull << 40 : weight_of(__float_as_uint(exactly_exp(__fsub_rn(v, m))));
    });
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) {
        u64 mass = value(sums[i]);
        if (mass) atomicAdd(&masses[row * BINS + i], mass);
    }
    if (LOG_PROB) {
        u64 all;
        scan(own, all);
        if (threadIdx.x == 0) atomicAdd(&rows[row].own, all);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
top_p_list(const T *x, const float *most, const u64 *masses, u64 *sure, u32 *list, Row *rows) {
    const int EACH = (BINS + THREADS - 1) / THREADS;
    __shared__ u32 bin;
    __shared__ u32 found[CHUNK], count, at;
    u64 row = blockIdx.x / CHUNKS, own = 0, mass[EACH], total;
    // Bins from the highest on, EACH for a thread.
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int b = BINS - 1 - (threadIdx.x * EACH + i);
        own += mass[i] = b >= 0 ? masses[row * BINS + b] : 0;
    }
    if (threadIdx.x == 0) bin = BINS, count = 0;
    u64 above = scan(own, total);
    // before < TOP_P total / 2^32, in whole numbers.
    u64 low = TOP_P * total, high = __umul64hi(TOP_P, total);
    u64 limit = GREEDY ? 1 : (high << 32 | low >> 32) + ((u32)low != 0);
    if (limit == 0) limit = 1;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (above < limit && limit <= above + mass[i]) {
            bin = BINS - 1 - (threadIdx.x * EACH + i);
            if (blockIdx.x % CHUNKS == 0) rows[row].limit = limit, rows[row].before = above, rows[row].bin = bin;
        }
        above += mass[i];
    }
    if (total == 0 && threadIdx.x == 0 && blockIdx.x % CHUNKS == 0) rows[row].limit = 0; // no token can be drawn
    float m = most_of(most + row * CHUNKS);
    __syncthreads();
    u32 b = bin;
    u64 here = 0;
    visit(x, [&](int i, float v) {
        u32 key = key_of(v, m);
        if (!key || bin_of(key) < b) return;
        if (bin_of(key) > b) here += weight_of(key);
        else found[atomicAdd(&count, 1u)] = i;
    });
    scan(here, total);
    if (threadIdx.x == 0) {
        sure[blockIdx.x] = total;
        at = atomicAdd(&rows[row].listed, count);
    }
    __syncthreads();
    // Too many tokens: the row itself is gone through instead.
    if (at + count <= LIST)
        for (u32 i = threadIdx.x; i < count; i += THREADS) list[row * LIST + at + i] = found[i];
}

// The nucleus as probabilities: 0 outside of it.
extern "C" __global__ void __launch_bounds__(THREADS) top_p_probabilities(const T *x, const float *most, const Row *rows, float *y) {
    u64 row = blockIdx.x / CHUNKS, last = rows[row].last;
    float m = most_of(most + row * CHUNKS), kept = (float)rows[row].kept;
    u32 bin = rows[row].bin;
    bool any = rows[row].limit > 0;
    visit(x, [&](int i, float v) {
        u32 key = key_of(v, m);
        y[row * VOCAB + i] = any && is_kept(key, i, bin, last) ? (float)weight_of(key) / kept : 0.0f;
    });
}
