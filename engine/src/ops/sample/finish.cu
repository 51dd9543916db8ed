// One block of 1024 for each row: where in the crossing bin the nucleus ends, and a token drawn from it.

#if !DRAW
#define DRAW_ARGUMENTS
#define RESULTS
#elif TURN // the number of this draw
#define DRAW_ARGUMENTS const int *rng, const int *turn,
#else
#define DRAW_ARGUMENTS const int *rng,
const int *const turn = nullptr;
#endif
#if DRAW && LOG_PROB
#define RESULTS , int *token, float *log_prob
#elif DRAW
#define RESULTS , int *token
float *const log_prob = nullptr;
#endif

extern "C" __global__ void __launch_bounds__(1024, 1)
top_p_finish(const T *x, DRAW_ARGUMENTS const float *most, const u64 *sure, const u64 *list, Row *rows RESULTS) {
    const int DIGITS = 10, FEW = 32;
    const int SEGMENTS = CHUNKS * (CHUNK / SEGMENT), PER = (SEGMENTS + 1023) / 1024, SPAN = PER * SEGMENT; // of a row; of a thread; its tokens
    __shared__ Sums<1 << DIGITS> sums;
    __shared__ u64 places[LIST], few[FEW], found, found_before;
    __shared__ u32 count;
    const u64 row = blockIdx.x;
    const u32 tid = threadIdx.x;
    x += row * VOCAB, list += row * LIST, sure += row * SEGMENTS;
#if DRAW
    u32 words[4]; // from what was there before the passes began
    random_words(rng, SITE, (TURN ? (u64)(u32)*turn * ROWS : 0) + row, words);
#endif
    next_may_begin(), wait_for_turn();
    const float m = most_of(most + row * CHUNKS);
    const u64 limit = rows[row].limit, some = list[0];
    const u32 bin = rows[row].bin, listed = rows[row].listed;
    const u32 tokens = listed <= LIST ? listed : VOCAB;
    const int unit = unit_of(bin);
    u64 before = rows[row].before, whole = 0; // of this thread's segments, what surely is kept
    if (DRAW)
        for (u32 i = tid * PER; i < min(tid * PER + PER, (u32)SEGMENTS); i++) whole += sure[i];
    if (limit == 0) { // nothing but NaN
#if DRAW
        if (tid == 0) token[row] = 0;
        if (LOG_PROB && tid == 0) log_prob[row] = __int_as_float(0x7fc00000);
#else
        if (tid == 0) rows[row].last = 0, rows[row].kept = 1;
#endif
        return;
    }
    if (listed <= LIST)
        for (u32 i = tid; i < tokens; i += 1024) places[i] = list[i];
    // f(place) for the tokens of the bin; no thread looks at another's.
    auto in_bin = [&](auto f) {
        for (u32 i = tid; i < tokens; i += 1024) {
            if (listed <= LIST) {
                f(places[i]);
            } else {
                u32 key = key_of(to_float(x[i]), m);
                if (key && bin_of(key) == bin) f(place_of(key, i));
            }
        }
    };

    // The place of the token that crosses the limit, ten bits at a time, from the highest, until few tokens agree in them. Often all weights of the
    // bin are the same (neighbours in bf16 are further apart), which says the upper bits at once.
    u64 last = 0;
    int open = LOW_BITS + INDEX_BITS;
    bool apart = false;
    for (;;) {
        sums.clear(tid);
        if (tid == 0) count = 0;
        __syncthreads();
        in_bin([&](u64 place) {
            apart |= place >> INDEX_BITS != some >> INDEX_BITS;
            if (place >> open != last >> open) return;
            u32 to = atomicAdd(&count, 1u);
            if (to < FEW) few[to] = place;
        });
        apart = __syncthreads_or(apart);
        if (count <= FEW) break;
        if (!apart && open > INDEX_BITS) last = some >> INDEX_BITS << INDEX_BITS, open = INDEX_BITS;
        const int shift = max(open - DIGITS, 0), digit = (1 << DIGITS) - 1 - (int)tid;
        in_bin([&](u64 place) {
            if (place >> open == last >> open) sums.add(place >> shift & ((1 << DIGITS) - 1), units_of(key_at(place, bin)));
        });
        __syncthreads();
        u64 mass = sums.value(digit, unit), all, above = before + scan(mass, all);
        if (above < limit && limit <= above + mass) found = last | (u64)digit << shift, found_before = above;
        __syncthreads();
        last = found, before = found_before, open = shift;
    }
    // Each lane has one of them, and the mass down to it.
    if (tid < count) {
        const u64 own = few[tid];
        u32 down = 0;
        for (u32 i = 0; i < count; i++) down += few[i] >= own ? units_of(key_at(few[i], bin)) : 0;
        const u64 mass = before + ((u64)down << unit);
        if (mass >= limit && mass - weight_of(key_at(own, bin)) < limit) found = own, found_before = mass;
    }
    __syncthreads();
    const u64 kept = found_before;
    last = found;
#if !DRAW
    if (tid == 0) rows[row].last = last, rows[row].kept = kept;
#else
    // Draw a number below the mass, and find the token whose part of the cumulative sum, in the order of token ids, it falls into: first its segment.
    u64 left = __umul64hi((u64)words[0] << 32 | words[1], kept), all;
    in_bin([&](u64 place) {
        if (place >= last) sums.add(index_at(place) / SPAN, units_of(key_at(place, bin)));
    });
    __syncthreads();
    u64 mass = whole + sums.value(tid, unit), below = scan(mass, all);
    if (below <= left && left < below + mass) found = tid, found_before = below;
    __syncthreads();
    const int EACH = (SPAN + 1023) / 1024, first = (int)found * SPAN + (int)tid * EACH, end = min(((int)found + 1) * SPAN, VOCAB);
    left -= found_before;
    u64 masses[EACH];
    mass = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        u32 key = first + i < end ? key_of(to_float(x[first + i]), m) : 0;
        mass += masses[i] = is_kept(key, first + i, bin, last) ? weight_of(key) : 0;
    }
    below = scan(mass, all);
    if (below <= left && left < below + mass) {
        int chosen = first;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            below += masses[i];
            if (below <= left) chosen = first + i + 1;
        }
        token[row] = chosen;
        if (LOG_PROB) log_prob[row] = to_float(x[chosen]) - m - logf((float)rows[row].own * (1.0f / 1099511627776.0f));
    }
#endif
}
