// How the keys of a cache are split over blocks, and how partial results are combined.
const int SPLITS = (CAPACITY + CHUNK - 1) / CHUNK;

// exp2(x - most); 0 if no key was seen yet.
__device__ __forceinline__ float share(float x, float most) { return power_of_two(x - (most == -infinity() ? 0.0f : most)); }

__device__ __forceinline__ int held(int past) { return past < 0 ? 0 : past > CAPACITY - TIME ? CAPACITY - TIME : past; }
