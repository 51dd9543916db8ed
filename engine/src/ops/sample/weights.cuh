// Logits as integer weights (see mod.rs), and sums of them over a block. A row is cut into CHUNKS chunks of CHUNK logits, one for each block of the
// passes, and these into segments, one for each warp.

const int CHUNKS = (VOCAB + CHUNK - 1) / CHUNK;
const u32 FIRST_BIN = (127 - 40) << (23 - LOW_BITS); // of 2^-40

// What is known of a row.
struct Row {
    u64 own;           // the sum of weights at temperature 1
    u64 limit, before; // the mass that the nucleus must reach, and the mass above the bin that reaches it
    u64 last, kept;    // the last token of the nucleus, by its place in that bin; the nucleus' mass
    u32 bin, listed;   // that bin, and how many tokens it has
};

// The CPU's exp, for x <= 0, without FMA contraction, so that the bits are the same. Results below 2^-40, and of NaN, are smaller numbers.
__device__ __forceinline__ float exactly_exp(float x) {
    const float round = 12582912.0f; // the last bits of a sum with it are a whole number
    x = fmaxf(x, -28.0f);
    float t = __fadd_rn(__fmul_rn(x, 1.44269504f), round), n = __fsub_rn(t, round);
    float r = __fsub_rn(__fsub_rn(x, __fmul_rn(n, 0.693359375f)), __fmul_rn(n, -2.12194440e-4f));
    float p = 1.0f / 5040.0f;
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 720.0f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 120.0f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 24.0f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 6.0f);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    p = __fadd_rn(__fadd_rn(__fmul_rn(__fmul_rn(p, r), r), r), 1.0f);
    return __uint_as_float(__float_as_uint(p) + (__float_as_uint(t) << 23)); // p 2^n
}

// ln of a logit's weight, unless it is the largest.
__device__ __forceinline__ float log_weight(float x, float most) { return __fmul_rn(__fsub_rn(x, most), INVERSE); }
// Bits of the weight of logit x, in the order of the weights; 0 for what can never be drawn.
__device__ __forceinline__ u32 key_of(float x, float most) {
    float w = GREEDY ? 0.0f : exactly_exp(log_weight(x, most));
    u32 key = __float_as_uint(x == most ? 1.0f : w);
    return key >= FIRST_BIN << LOW_BITS ? key : 0;
}
__device__ __forceinline__ u64 weight_of(u32 key) { return (u64)(__uint_as_float(key) * 1099511627776.0f); } // 2^40
// The same for keys that are not 0, as 24 bits times a power of two that all keys of a bin share.
__device__ __forceinline__ u32 units_of(u32 key) { return ((key & 0x7fffffu) | 0x800000u) >> max(110 - (int)(key >> 23), 0); }
__device__ __forceinline__ int unit_of(u32 bin) { return max((int)((FIRST_BIN + bin) >> (23 - LOW_BITS)) - 110, 0); }
__device__ __forceinline__ u32 bin_of(u32 key) { return (key >> LOW_BITS) - FIRST_BIN; }
// Where a token of a bin stands in it: larger weights above, of equal ones the earlier.
const u32 LAST_INDEX = (1u << INDEX_BITS) - 1;
__device__ __forceinline__ u64 place_of(u32 key, u32 index) { return (u64)(key & ((1u << LOW_BITS) - 1)) << INDEX_BITS | (LAST_INDEX - index); }
__device__ __forceinline__ u32 key_at(u64 place, u32 bin) { return (FIRST_BIN + bin) << LOW_BITS | (u32)(place >> INDEX_BITS); }
__device__ __forceinline__ u32 index_at(u64 place) { return LAST_INDEX - ((u32)place & LAST_INDEX); }
// The nucleus: bins above `bin`, and of that one what stands no lower than `last`.
__device__ __forceinline__ bool is_kept(u32 key, u32 index, u32 bin, u64 last) {
    return key && (bin_of(key) > bin || (bin_of(key) == bin && place_of(key, index) >= last));
}

__device__ __forceinline__ float most_of(const float *most) {
    float m = -infinity();
    for (int c = threadIdx.x & 31; c < CHUNKS; c += 32) m = fmaxf(m, most[c]);
    return warp_max(m);
}

// 64-bit sums from 32-bit atomics: the old value shows whether an addition carried, which one in 256 does.
template <int COUNT> struct Sums {
    u32 low[COUNT], high[COUNT];
    __device__ __forceinline__ void clear(int i) { low[i] = high[i] = 0; }
    __device__ __forceinline__ void add(int i, u32 units) {
        u32 old = atomicAdd(&low[i], units);
        if (old + units < old) atomicAdd(&high[i], 1u);
    }
    __device__ __forceinline__ u64 value(int i, int unit) const { return ((u64)high[i] << 32 | low[i]) << unit; }
};

// The sum over the threads before this one, and over all of them. Every thread of the block takes part.
__device__ __forceinline__ u64 scan(u64 v, u64 &all) {
    __shared__ u64 parts[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u64 upto = v;
    for (int i = 1; i < 32; i <<= 1) {
        u64 other = __shfl_up_sync(0xffffffffu, upto, i);
        if (lane >= i) upto += other;
    }
    __syncthreads();
    if (lane == 31) parts[warp] = upto;
    __syncthreads();
    u64 part = lane < (int)(blockDim.x >> 5) ? parts[lane] : 0, sum = part;
    for (int i = 1; i < 32; i <<= 1) {
        u64 other = __shfl_up_sync(0xffffffffu, sum, i);
        if (lane >= i) sum += other;
    }
    all = __shfl_sync(0xffffffffu, sum, 31);
    return upto - v + __shfl_sync(0xffffffffu, sum - part, warp);
}
