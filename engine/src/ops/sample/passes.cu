// Passes over logits [ROWS, VOCAB], a block of THREADS for each chunk of a row: the largest; the mass in each bin of weights; the mass of the
// bins that are kept whole, and the tokens of the bin that crosses the limit.
//
// The first pass lets the next launch only after its own `wait_for_turn`. All earlier kernels are done by then, so the other passes may read logits before
// theirs.

const int BINS = (127 << (23 - LOW_BITS)) - FIRST_BIN + 1;

// NaNs are ignored, and never drawn.
__device__ __forceinline__ float largest(const float (&v)[VEC]) {
    float m = v[0];
#pragma unroll
    for (int j = 1; j < VEC; j++) m = fmaxf(m, v[j]);
    return m;
}

// A warp's segment of this block's chunk.
struct Logits {
    static const int EACH = SEGMENT / (32 * VEC);
    Pack<T> packs[EACH];
    int first;
    __device__ __forceinline__ explicit Logits(const T *x) {
        x += (u64)(blockIdx.x / CHUNKS) * VOCAB;
        first = blockIdx.x % CHUNKS * CHUNK + threadIdx.x / 32 * SEGMENT + threadIdx.x % 32 * VEC;
#pragma unroll
        for (int p = 0; p < EACH; p++)
            if (first + p * 32 * VEC < VOCAB) packs[p] = read<true>(x + first + p * 32 * VEC);
    }
    // f(index, logits) for every VEC tokens.
    template <typename F> __device__ __forceinline__ void visit(F f) const {
#pragma unroll
        for (int p = 0; p < EACH; p++) {
            float v[VEC];
#pragma unroll
            for (int j = 0; j < VEC; j++) v[j] = to_float(packs[p].at[j]);
            if (first + p * 32 * VEC < VOCAB) f(first + p * 32 * VEC, v);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) top_p_most(const T *x, float *most, u64 *masses, Row *rows) {
    wait_for_turn();
    next_may_begin();
    Logits logits(x);
    u64 row = blockIdx.x / CHUNKS;
    if (blockIdx.x % CHUNKS == 0) {
        for (int i = threadIdx.x; i < BINS; i += THREADS) masses[row * BINS + i] = 0;
        if (threadIdx.x == 0) rows[row].own = 0, rows[row].listed = 0;
    }
    float m = -infinity();
    logits.visit([&](int, const float (&v)[VEC]) { m = fmaxf(m, largest(v)); });
    m = block_max(m);
    if (threadIdx.x == 0) most[blockIdx.x] = m;
}

extern "C" __global__ void __launch_bounds__(THREADS) top_p_masses(const T *x, const float *most, u64 *masses, Row *rows) {
    __shared__ Sums<BINS> sums;
    Logits logits(x);
    for (int i = threadIdx.x; i < BINS; i += THREADS) sums.clear(i);
    in_turn();
    u64 row = blockIdx.x / CHUNKS, own = 0;
    float m = most_of(most + row * CHUNKS);
    __syncthreads();
    logits.visit([&](int, const float (&v)[VEC]) {
        // All atomics are issued before the first result is used. Lanes without a key add 0, each to another address.
        u32 bins[VEC], units[VEC], old[VEC];
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            u32 key = key_of(v[j], m);
            bins[j] = key ? bin_of(key) : threadIdx.x % 32, units[j] = key ? units_of(key) : 0;
        }
#pragma unroll
        for (int j = 0; j < VEC; j++) old[j] = atomicAdd(&sums.low[bins[j]], units[j]);
        bool carried = false;
#pragma unroll
        for (int j = 0; j < VEC; j++) carried |= old[j] + units[j] < old[j];
        if (carried)
#pragma unroll
            for (int j = 0; j < VEC; j++)
                if (old[j] + units[j] < old[j]) atomicAdd(&sums.high[bins[j]], 1u);
        if (LOG_PROB)
#pragma unroll
            for (int j = 0; j < VEC; j++) own += v[j] == m ? 1ull << 40 : weight_of(__float_as_uint(exactly_exp(__fsub_rn(v[j], m))));
    });
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) {
        u64 mass = sums.value(i, unit_of(i));
        if (mass) atomicAdd(&masses[row * BINS + i], mass);
    }
    if (LOG_PROB) {
        u64 all;
        scan(own, all);
        if (threadIdx.x == 0) atomicAdd(&rows[row].own, all);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
top_p_list(const T *x, const float *most, const u64 *masses, u64 *sure, u64 *list, Row *rows) {
    const int EACH = (BINS + THREADS - 1) / THREADS;
    __shared__ u64 found[LIST];
    __shared__ u32 bin, count, at;
    Logits logits(x);
    in_turn();
    u64 row = blockIdx.x / CHUNKS, own = 0, mass[EACH], total;
    float m = most_of(most + row * CHUNKS);
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
    __syncthreads();
    const u32 b = bin;
    // No exp where all are well below the bin.
    const u32 low_key = (FIRST_BIN + b) << LOW_BITS;
    const float least = logf(__uint_as_float(low_key)) - 1e-3f;
    u64 here = 0;
    logits.visit([&](int first, const float (&v)[VEC]) {
        const float largest_here = largest(v);
        if (largest_here != m && !(log_weight(largest_here, m) >= least)) return;
        u32 keys[VEC], mine = 0;
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            keys[j] = key_of(v[j], m);
            bool above = keys[j] >= low_key + (1u << LOW_BITS);
            here += weight_of(above ? keys[j] : 0);
            mine |= (u32)(keys[j] >= low_key && !above) << j;
        }
        if (!mine) return;
        for (u32 to = atomicAdd(&count, (u32)__popc(mine)); mine && to < LIST; to++, mine &= mine - 1) {
            int j = __ffs(mine) - 1;
            u32 key = keys[0];
#pragma unroll
            for (int k = 1; k < VEC; k++) key = j == k ? keys[k] : key; // an array that is indexed dynamically would not stay in registers
            found[to] = place_of(key, first + j);
        }
    });
    for (int i = 16; i > 0; i >>= 1) here += __shfl_xor_sync(0xffffffffu, here, i);
    if (threadIdx.x % 32 == 0) sure[blockIdx.x * (u64)(THREADS / 32) + threadIdx.x / 32] = here;
    __syncthreads();
    if (threadIdx.x == 0) at = atomicAdd(&rows[row].listed, count);
    __syncthreads();
    for (u32 i = threadIdx.x; i < count && at + i < LIST; i += THREADS) list[row * LIST + at + i] = found[i];
}

// The nucleus as probabilities: 0 outside of it.
extern "C" __global__ void __launch_bounds__(THREADS) top_p_probabilities(const T *x, const float *most, const Row *rows, float *y) {
    Logits logits(x);
    in_turn();
    u64 row = blockIdx.x / CHUNKS, last = rows[row].last;
    float m = most_of(most + row * CHUNKS), kept = (float)rows[row].kept;
    u32 bin = rows[row].bin;
    bool any = rows[row].limit > 0;
    logits.visit([&](int first, const float (&v)[VEC]) {
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            u32 key = key_of(v[j], m);
            y[row * VOCAB + first + j] = any && is_kept(key, first + j, bin, last) ? (float)weight_of(key) / kept : 0.0f;
        }
    });
}
