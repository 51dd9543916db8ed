// CUDA's keywords and functions for a C++ compiler. The kernel's source follows, its inline PTX replaced by calls of ptx_NAME(operands).
#define __CUDA_ARCH__ 800
#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

// Set by the machine whenever it lets a thread run. Not in .bss, which is shared memory and is overwritten before every block.
static emu_thread *emu_now __attribute__((section(".data"))) = (emu_thread *)1;
#define threadIdx (emu_now->index)
#define blockIdx (emu_now->block)
#define blockDim (emu_now->threads)
#define gridDim (emu_now->grid)

extern char __bss_start[] __attribute__((visibility("hidden")));
extern char _end[] __attribute__((visibility("hidden")));
struct emu_module { emu_thread **now; char *shared, *shared_end; };
extern "C" __attribute__((visibility("default"))) void emu_module_of(emu_module *m) { *m = {&emu_now, __bss_start, _end}; }

// Arguments are pointers, whatever they point to.
struct emu_argument {
    void *p;
    template <class T> operator T *() const { return (T *)p; }
};

// An unaligned access of 16 bytes is an error here too.
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

extern "C" {
float expf(float) noexcept, exp2f(float) noexcept, logf(float) noexcept, log2f(float) noexcept, powf(float, float) noexcept;
float sqrtf(float) noexcept, sinf(float) noexcept, cosf(float) noexcept, tanhf(float) noexcept, erff(float) noexcept, atan2f(float, float) noexcept;
float fabsf(float) noexcept, floorf(float) noexcept, fmaxf(float, float) noexcept, fminf(float, float) noexcept, fmaf(float, float, float) noexcept;
float truncf(float) noexcept, rintf(float) noexcept, ldexpf(float, int) noexcept, log1pf(float) noexcept, expm1f(float) noexcept;
void *memcpy(void *, const void *, unsigned long) noexcept, *memset(void *, int, unsigned long) noexcept;
double sqrt(double) noexcept, exp(double) noexcept, log(double) noexcept, pow(double, double) noexcept;
}
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float __expf(float x) { return expf(x); }
static inline float __logf(float x) { return logf(x); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline float min(float a, float b) { return fminf(a, b); }

template <class To, class From> static inline To emu_bits(From v) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    __builtin_memcpy(&to, &v, sizeof to);
    return to;
}
static inline float __uint_as_float(unsigned v) { return emu_bits<float>(v); }
static inline float __int_as_float(int v) { return emu_bits<float>(v); }
static inline unsigned __float_as_uint(float v) { return emu_bits<unsigned>(v); }
static inline int __float_as_int(float v) { return emu_bits<int>(v); }
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned long long)((unsigned __int128)a * b >> 64); }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= (unsigned)(both >> 8 * (s >> 4 * i & 7) & 255) << 8 * i;
    return r;
}
[[noreturn]] static inline void __trap() { emu_stop("__trap()"); }

// One thread runs at a time, and is not interrupted here.
template <class T, class V> static inline T atomicAdd(T *at, V v) {
    T old = *at;
    *at = old + (T)v;
    return old;
}
template <class T, class V> static inline T atomicMax(T *at, V v) {
    T old = *at;
    if ((T)v > old) *at = (T)v;
    return old;
}

#define EMU_EVERYONE(mask) \
    if ((mask) != 0xffffffffu) emu_stop("a warp's instruction with a mask of some lanes: the emulator has all of them meet only");
static inline unsigned emu_lane() { return emu_now->index.x & 31; }
static inline void __syncthreads() { emu_barrier(0); }
static inline int __syncthreads_or(int yes) { return emu_barrier(yes); }
static inline void __syncwarp(unsigned mask = 0xffffffffu) { EMU_EVERYONE(mask) emu_meet(1, &mask, 4); }
template <class T> static inline T emu_from(const emu_slot *slots, unsigned lane) {
    T v;
    __builtin_memcpy(&v, &slots[lane], sizeof v);
    return v;
}
template <class T> static inline T __shfl_sync(unsigned mask, T v, int from, int width = 32) {
    EMU_EVERYONE(mask)
    unsigned first = emu_lane() & ~(unsigned)(width - 1);
    return emu_from<T>(emu_meet(2, &v, sizeof v), first + ((unsigned)from & (width - 1)));
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T v, int by, int width = 32) {
    EMU_EVERYONE(mask)
    unsigned from = emu_lane() ^ by;
    auto *slots = emu_meet(3, &v, sizeof v);
    return from / width > emu_lane() / width ? v : emu_from<T>(slots, from);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32) {
    EMU_EVERYONE(mask)
    auto *slots = emu_meet(4, &v, sizeof v);
    return emu_lane() % width < by ? v : emu_from<T>(slots, emu_lane() - by);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32) {
    EMU_EVERYONE(mask)
    auto *slots = emu_meet(5, &v, sizeof v);
    return emu_lane() % width + by >= (unsigned)width ? v : emu_from<T>(slots, emu_lane() + by);
}
template <class T> static inline unsigned __match_any_sync(unsigned mask, T v) {
    EMU_EVERYONE(mask)
    auto *slots = emu_meet(6, &v, sizeof v);
    unsigned same = 0;
    for (int i = 0; i < 32; i++) same |= (unsigned)(emu_from<T>(slots, i) == v) << i;
    return same;
}
static inline unsigned __ballot_sync(unsigned mask, int yes) {
    EMU_EVERYONE(mask)
    yes = yes != 0;
    auto *slots = emu_meet(7, &yes, sizeof yes);
    unsigned votes = 0;
    for (int i = 0; i < 32; i++) votes |= slots[i].word[0] << i;
    return votes;
}
static inline int __any_sync(unsigned mask, int yes) { return __ballot_sync(mask, yes) != 0; }
static inline int __all_sync(unsigned mask, int yes) { return __ballot_sync(mask, yes) == 0xffffffffu; }
template <class T> static inline T __reduce_min_sync(unsigned mask, T v) {
    EMU_EVERYONE(mask)
    auto *slots = emu_meet(8, &v, sizeof v);
    for (int i = 0; i < 32; i++) v = min(v, emu_from<T>(slots, i));
    return v;
}
template <class T> static inline T __reduce_max_sync(unsigned mask, T v) {
    EMU_EVERYONE(mask)
    auto *slots = emu_meet(9, &v, sizeof v);
    for (int i = 0; i < 32; i++) v = max(v, emu_from<T>(slots, i));
    return v;
}
static inline unsigned long long __cvta_generic_to_shared(const void *p) { return emu_shared_address(p); }

// Instructions. Operands in their order in the text, without brackets and braces.
static inline void ptx_cvt_f32_f16(float &r, unsigned short v) { r = emu_wide(v, 1); }
static inline void ptx_cvt_rn_bf16_f32(unsigned short &r, float v) { r = emu_bf16(v); }
static inline void ptx_cvt_rn_f16_f32(unsigned short &r, float v) { r = emu_f16(v); }
static inline void ptx_cvt_rn_bf16x2_f32(unsigned &r, float high, float low) { r = (unsigned)emu_bf16(high) << 16 | emu_bf16(low); }
static inline void ptx_cvt_rn_f16x2_f32(unsigned &r, float high, float low) { r = (unsigned)emu_f16(high) << 16 | emu_f16(low); }
static inline void ptx_rcp_approx_ftz_f32(float &r, float v) { r = 1.0f / v; }
static inline void ptx_ex2_approx_ftz_f32(float &r, float v) { r = exp2f(v); }
static inline void ptx_fma_rn_bf16x2(unsigned &r, unsigned a, unsigned b, unsigned c) {
    unsigned out = 0;
    for (int i = 0; i < 32; i += 16) {
        float sum = emu_wide((unsigned short)(a >> i), 0) * emu_wide((unsigned short)(b >> i), 0) + emu_wide((unsigned short)(c >> i), 0); // the product is exact
        out |= (unsigned)emu_bf16(sum) << i;
    }
    r = out;
}
static inline void ptx_prefetch_global_L2(const void *) {}
static inline void ptx_cp_async_cg_shared_global(unsigned to, const void *from, unsigned bytes, unsigned live) { emu_copy(emu_shared_pointer(to), from, bytes, live); }
static inline void ptx_cp_async_ca_shared_global(unsigned to, const void *from, unsigned bytes, unsigned live) { emu_copy(emu_shared_pointer(to), from, bytes, live); }
static inline void ptx_cp_async_commit_group() { emu_copies_commit(); }
static inline void ptx_cp_async_wait_group(unsigned left) { emu_copies_wait(left); }
// Threads of a block run one at a time and only change where they wait, so these order everything by themselves.
static inline void ptx_ld_acquire_cta_shared_s32(int &r, unsigned at) { emu_yield(), r = *(volatile int *)emu_shared_pointer(at); }
static inline void ptx_st_release_cta_shared_s32(unsigned at, int v) { *(volatile int *)emu_shared_pointer(at) = v; }

static inline void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned &r0, unsigned &r1, unsigned &r2, unsigned &r3, unsigned row) {
    unsigned r[4];
    emu_ldmatrix(r, row, 0);
    r0 = r[0], r1 = r[1], r2 = r[2], r3 = r[3];
}
static inline void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned &r0, unsigned &r1, unsigned &r2, unsigned &r3, unsigned row) {
    unsigned r[4];
    emu_ldmatrix(r, row, 1);
    r0 = r[0], r1 = r[1], r2 = r[2], r3 = r[3];
}
static inline void ptx_movmatrix_sync_aligned_m8n8_trans_b16(unsigned &r, unsigned a) {
    auto *slots = emu_meet(13, &a, 4);
    unsigned group = emu_lane() / 4, pair = emu_lane() % 4 * 2;
    auto at = [&](unsigned row, unsigned column) { return slots[4 * row + column / 2].word[0] >> 16 * (column % 2) & 0xffff; };
    r = at(pair + 1, group) << 16 | at(pair, group);
}
#define EMU_MMA(NAME, HALF) \
    static inline void NAME(float &d0, float &d1, float &d2, float &d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1, float c0, float c1, float c2, float c3) { \
        float d[4], c[4] = {c0, c1, c2, c3}; \
        unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1}; \
        emu_mma(d, a, b, c, HALF); \
        d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3]; \
    }
EMU_MMA(ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, 0)
EMU_MMA(ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, 1)
