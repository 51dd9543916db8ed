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
top_p_finish(const T *x, DRAW_ARGUMENTS const float *most, const u64 *sure, const u32 *list, Row *rows RESULTS) {
    const int DIGITS = 10, ROUNDS = (LOW_BITS + INDEX_BITS + DIGITS - 1) / DIGITS;
    __shared__ Sum sums[1 << DIGITS];
    __shared__ u64 places[LIST], found, found_before;
    const u64 row = blockIdx.x;
    const int tid = threadIdx.x;
    x += row * VOCAB;
    const float m = most_of(most + row * CHUNKS);
    const u64 limit = rows[row].limit;
    const u32 bin = rows[row].bin, listed = rows[row].listed;
    const int count = listed <= LIST ? (int)listed : VOCAB;
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
        for (int i = tid; i < count; i += 1024) {
            u32 index = list[row * LIST + i];
            places[i] = place_of(key_of(to_float(x[index]), m), index);
        }
    // f(place) for the tokens of the bin; no thread looks at another's.
    auto in_bin = [&](auto f) {
        for (int i = tid; i < count; i += 1024) {
            if (listed <= LIST) {
                f(places[i]);
            } else {
                u32 key = key_of(to_float(x[i]), m);
                if (key && bin_of(key) == bin) f(place_of(key, i));
            }
        }
    };

    // The place of the token that crosses the limit, ten bits at a time, from the highest.
    u64 last = 0, before = rows[row].before;
    for (int shift = (ROUNDS - 1) * DIGITS; shift >= 0; shift -= DIGITS) {
        sums[tid] = {0, 0};
        __syncthreads();
        in_bin([&](u64 place) {
            if (place >> shift >> DIGITS == last >> shift >> DIGITS) add(sums[place >> shift & ((1 << DIGITS) - 1)], weight_of(key_at(place, bin)));
        });
        __syncthreads();
        int digit = (1 << DIGITS) - 1 - tid;
        u64 mass = value(sums[digit]), all, above = before + scan(mass, all);
        if (above < limit && limit <= above + mass) found = last | (u64)digit << shift, found_before = above;
        __syncthreads();
        last = found, before = found_before;
    }
    const u64 kept = before + weight_of(key_at(last, bin));
#if !DRAW
    if (tid == 0) rows[row].last = last, rows[row].kept = kept;
#else
    // A number below the mass, and the token on which it falls when the kept ones lie in the order of their numbers: first its chunk.
    u32 words[4];
    random_words(rng, SITE, (TURN ? (u64)(u32)*turn * ROWS : 0) + row, words);
    u64 left = __umul64hi((u64)words[0] << 32 | words[1], kept), all;
    if (tid < CHUNKS) {
        u64 mass = sure[row * CHUNKS + tid];
        sums[tid] = {(u32)mass, (u32)(mass >> 32)};
    }
    __syncthreads();
    in_bin([&](u64 place) {
        if (place >= last) add(sums[index_at(place) / CHUNK], weight_of(key_at(place, bin)));
    });
    __syncthreads();
    u64 mass = tid < CHUNKS ? value(sums[tid]) : 0, below = scan(mass, all);
    if (below <= left && left < below + mass) found = tid, found_before = below;
    __syncthreads();
    const int EACH = CHUNK / 1024, first = (int)found * CHUNK + tid * EACH;
    left -= found_before;
    u64 own[EACH];
    mass = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        u32 key = first + i < VOCAB ? key_of(to_float(x[first + i]), m) : 0;
        mass += own[i] = is_kept(key, first + i, bin, last) ? weight_of(key) : 0;
    }
    below = scan(mass, all);
    if (below <= left && left < below + mass) {
        int chosen = first;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            below += own[i];
            if (below <= left) chosen = first + i + 1;
        }
        token[row] = chosen;
        if (LOG_PROB) log_prob[row] = to_float(x[chosen]) - m - logf((float)rows[row].own * (1.0f / 1099511627776.0f));
    }
#endif
}
