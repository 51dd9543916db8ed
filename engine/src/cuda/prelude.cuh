// Put before every kernel: types, conversions, reductions over a block, random numbers. No headers are needed.
typedef unsigned int u32;
typedef unsigned long long u64;

// Programmatic dependent launch. `Launch::text` inserts `in_turn()` at the start of every kernel, unless the kernel calls `wait_for_turn()` itself:
// the next kernel may be launched, and this one waits until all kernels before it have finished, since it reads their results and may overwrite
// their inputs. Before `wait_for_turn()` a kernel may only prefetch what no kernel before it writes. Without the launch attribute both do nothing.
__device__ __forceinline__ void next_may_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_turn() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void in_turn() { next_may_begin(), wait_for_turn(); }

struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };
struct e4m3 { unsigned char bits; };
struct e5m2 { unsigned char bits; };

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(bf16 v) { return __uint_as_float((u32)v.bits << 16); }
__device__ __forceinline__ float to_float(f16 v) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v.bits)); return r; }
__device__ __forceinline__ float to_float(int v) { return (float)v; }
__device__ __forceinline__ float to_float(unsigned char v) { return (float)v; }

__device__ __forceinline__ void from_float(float v, float &out) { out = v; }
__device__ __forceinline__ void from_float(float v, bf16 &out) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(v)); }
__device__ __forceinline__ void from_float(float v, f16 &out) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(v)); }
__device__ __forceinline__ void from_float(float v, int &out) { out = (int)v; }
__device__ __forceinline__ void from_float(float v, unsigned char &out) { out = (unsigned char)v; }

// Rounds two adjacent numbers at once.
template <typename E> __device__ __forceinline__ void from_floats(float a, float b, E *out) { from_float(a, out[0]), from_float(b, out[1]); }
template <> __device__ __forceinline__ void from_floats(float a, float b, bf16 *out) { asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(*(u32 *)out) : "f"(b), "f"(a)); }
template <> __device__ __forceinline__ void from_floats(float a, float b, f16 *out) { asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(*(u32 *)out) : "f"(b), "f"(a)); }

// FP8, rounded to nearest, ties to even; what is too large becomes the largest number. MANTISSA: its bits; LEAST: the exponent of the smallest normal number.
template <int MANTISSA, int LEAST> __device__ __forceinline__ unsigned char fp8_bits(float v, float most) {
    u32 bits = __float_as_uint(v), sign = bits >> 24 & 0x80u;
    if (v != v) return (unsigned char)(sign | 0x7fu);
    float size = __uint_as_float(bits & 0x7fffffffu);
    size = size > most ? most : size;
    int exponent = (int)(__float_as_uint(size) >> 23) - 127;
    exponent = exponent < LEAST ? LEAST : exponent;
    float units = size * __uint_as_float((u32)(127 + MANTISSA - exponent) << 23);
    float rounded = (units + 8388608.0f) - 8388608.0f;
    return (unsigned char)(sign | (u32)(((exponent - LEAST) << MANTISSA) + (int)rounded));
}
template <int MANTISSA, int LEAST> __device__ __forceinline__ float fp8_value(unsigned char bits) {
    int code = bits & 0x7f, exponent = code >> MANTISSA, fraction = code & ((1 << MANTISSA) - 1);
    if (MANTISSA == 3 ? code == 0x7f : exponent == 31) return __int_as_float(0x7fc00000);
    int units = exponent > 0 ? fraction + (1 << MANTISSA) : fraction, power = LEAST - MANTISSA + (exponent > 0 ? exponent - 1 : 0);
    float size = (float)units * __uint_as_float((u32)(127 + power) << 23);
    return bits & 0x80 ? -size : size;
}
__device__ __forceinline__ float to_float(e4m3 v) { return fp8_value<3, -6>(v.bits); }
__device__ __forceinline__ float to_float(e5m2 v) { return fp8_value<2, -14>(v.bits); }
__device__ __forceinline__ void from_float(float v, e4m3 &out) { out.bits = fp8_bits<3, -6>(v, 448.0f); }
__device__ __forceinline__ void from_float(float v, e5m2 &out) { out.bits = fp8_bits<2, -14>(v, 57344.0f); }
#if __CUDA_ARCH__ >= 890
template <> __device__ __forceinline__ void from_floats(float a, float b, e4m3 *out) { asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(*(unsigned short *)out) : "f"(b), "f"(a)); }
template <> __device__ __forceinline__ void from_floats(float a, float b, e5m2 *out) { asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(*(unsigned short *)out) : "f"(b), "f"(a)); }
#endif

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float inverse(float v) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }

// A NaN wins, as on the CPU.
__device__ __forceinline__ float larger(float a, float b) { return (b > a || b != b) ? b : a; }

__device__ __forceinline__ float warp_sum(float v) {
    for (int i = 16; i > 0; i >>= 1) v += __shfl_xor_sync(0xffffffffu, v, i);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
    for (int i = 16; i > 0; i >>= 1) v = larger(v, __shfl_xor_sync(0xffffffffu, v, i));
    return v;
}
// Over all threads of a block (a multiple of 32, at most 1024); every thread gets the result. The order of additions is fixed.
__device__ __forceinline__ float block_sum(float v) {
    __shared__ float parts[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    v = warp_sum(v);
    __syncthreads();
    if (lane == 0) parts[warp] = v;
    __syncthreads();
    return warp_sum(lane < warps ? parts[lane] : 0.0f);
}
__device__ __forceinline__ float block_max(float v) {
    __shared__ float parts[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    v = warp_max(v);
    __syncthreads();
    if (lane == 0) parts[warp] = v;
    __syncthreads();
    return warp_max(lane < warps ? parts[lane] : -infinity());
}

// Philox4x32-10: the four words of block number `block` of a site, as in philox.rs.
__device__ __forceinline__ void random_words(const int *rng, u32 site, u64 block, u32 word[4]) {
    u32 c0 = (u32)block, c1 = site, c2 = (u32)rng[2], c3 = (u32)rng[3] ^ ((u32)(block >> 32) << 16);
    u32 k0 = (u32)rng[0], k1 = (u32)rng[1];
    for (int round = 0; round < 10; round++) {
        u32 a0 = 0xD2511F53u * c0, a1 = __umulhi(0xD2511F53u, c0);
        u32 b0 = 0xCD9E8D57u * c2, b1 = __umulhi(0xCD9E8D57u, c2);
        c0 = b1 ^ c1 ^ k0; c1 = b0; c2 = a1 ^ c3 ^ k1; c3 = a0;
        k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
    }
    word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
}
// In [0, 1).
__device__ __forceinline__ float uniform(u32 word) { return (float)(word >> 8) * (1.0f / 16777216.0f); }
// Draws of 16 bits number index to index + COUNT (a power of two up to 8 that divides index): eight to a block.
template <int COUNT> __device__ __forceinline__ void random_halves(const int *rng, u32 site, u64 index, u32 half[COUNT]) {
    u32 w[4], first = (u32)index % 8;
    random_words(rng, site, index / 8, w);
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        u32 at = COUNT == 8 ? j : first + j;
        u32 word = at < 2 ? w[0] : at < 4 ? w[1] : at < 6 ? w[2] : w[3];
        half[j] = at % 2 ? word >> 16 : word & 0xffffu;
    }
}
// Draw number `index` of a site: word `index % 4` of block `index / 4`.
__device__ __forceinline__ float random_uniform(const int *rng, u32 site, u64 index) {
    u32 w[4], lane = (u32)(index & 3);
    random_words(rng, site, index / 4, w);
    return uniform(lane == 0 ? w[0] : lane == 1 ? w[1] : lane == 2 ? w[2] : w[3]);
}
