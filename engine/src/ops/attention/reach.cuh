// Which queries see which keys.
#define GROUP (HEADS / KV)
#define OFFSET (KEYS - TIME) // causal: query t sees key j where j <= t + OFFSET

// The least and the largest `until` of ROWS keys from key `first` on, where there are any: the same for all threads.
struct Reach { int least, most; };
template <int ROWS> __device__ __forceinline__ Reach reach(const int *limits, int first, int lane) {
    Reach r = {TIME, -1};
#pragma unroll
    for (int i = 0; i < ROWS; i += 32) {
        int key = first + i + lane;
        if (key >= KEYS) continue;
        int limit = limits[key];
        r.least = limit < r.least ? limit : r.least, r.most = limit > r.most ? limit : r.most;
    }
    return Reach{__reduce_min_sync(0xffffffffu, r.least), __reduce_max_sync(0xffffffffu, r.most)};
}

