// Instructions of the tensor-core kernels: cp.async, ldmatrix and mma.
// With group = lane / 4 and pair = lane % 4, a thread holds
//   of a (16 x 16): a[0] (group, 2 pair..), a[1] (group + 8, 2 pair..), a[2] (group, 2 pair + 8..), a[3] (group + 8, 2 pair + 8..),
//   of b (16 x 8):  b0 (2 pair.., group), b1 (2 pair + 8.., group),
//   of c (16 x 8):  c[0], c[1] (group, 2 pair..) and c[2], c[3] (group + 8, 2 pair..).
// So two adjacent fragments c, rounded, are a fragment a.

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// Zeros where not `live`.
__device__ __forceinline__ void copy16(void *to, const void *from, bool live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(live ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy8(void *to, const void *from, bool live) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(to)), "l"(from), "r"(live ? 8 : 0) : "memory");
}
__device__ __forceinline__ void copy4(void *to, const void *from, bool live) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(live ? 4 : 0) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// Four 8 x 8 matrices; lanes 8 i .. 8 i + 7 give the addresses of the rows of matrix i.
__device__ __forceinline__ void matrices(u32 r[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void matrices_t(u32 r[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// An 8 x 8 matrix, of which a thread holds (group, 2 pair..), transposed.
__device__ __forceinline__ u32 transposed(u32 a) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
    return r;
}

// Forces a value into a register, where the compiler would otherwise recompute it in every iteration.
__device__ __forceinline__ void kept(int &x) { asm volatile("" : "+r"(x)); }

// Lets warps work on the same shared memory in a fixed order: a warp sees what the one before it wrote before `pass_turn`.
__device__ __forceinline__ void wait_turn(const int *turns, int turn) {
    int now;
    do asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(now) : "r"(shared_address(turns)) : "memory");
    while (now != turn);
    __syncwarp();
}
__device__ __forceinline__ void pass_turn(int *turns, int turn, int lane) {
    __syncwarp();
    if (lane == 0) asm volatile("st.release.cta.shared.s32 [%0], %1;" ::"r"(shared_address(turns)), "r"(turn + 1) : "memory");
}

// c += a b.
template <class E> __device__ void mma(float c[4], const u32 a[4], u32 b0, u32 b1);
template <> __device__ __forceinline__ void mma<bf16>(float c[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> __device__ __forceinline__ void mma<f16>(float c[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = c + a b.
template <class E> __device__ void mma_onto(float d[4], const float c[4], const u32 a[4], u32 b0, u32 b1);
template <> __device__ __forceinline__ void mma_onto<bf16>(float d[4], const float c[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
template <> __device__ __forceinline__ void mma_onto<f16>(float d[4], const float c[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Two numbers in one register, `low` in the lower half.
template <class E> __device__ u32 pack(float low, float high);
template <> __device__ __forceinline__ u32 pack<bf16>(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
template <> __device__ __forceinline__ u32 pack<f16>(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ float power_of_two(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// Sums of the 16 columns of two adjacent fragments c, of which a thread has added up its own: column 8 n + 2 pair + j in v[n][j].
__device__ __forceinline__ void write_columns(float *to, const float v[2][2], int lane) {
    bool upper = lane & 16, odd = lane & 8;
    float one = upper ? v[1][0] : v[0][0], two = upper ? v[1][1] : v[0][1];
    one += __shfl_xor_sync(0xffffffffu, upper ? v[0][0] : v[1][0], 16);
    two += __shfl_xor_sync(0xffffffffu, upper ? v[0][1] : v[1][1], 16);
    float all = (odd ? two : one) + __shfl_xor_sync(0xffffffffu, odd ? one : two, 8);
    all += __shfl_xor_sync(0xffffffffu, all, 4);
    if (!(lane & 4)) to[(upper ? 8 : 0) + lane % 4 * 2 + (odd ? 1 : 0)] = all;
}

// A lane has two of each 8 of 32 columns; afterwards it has the 8 adjacent columns number lane % 4.
__device__ __forceinline__ void transpose(u32 (&p)[4]) {
    bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        u32 other = __shfl_xor_sync(0xffffffffu, odd ? p[i] : p[i + 1], 1);
        p[i] = odd ? other : p[i];
        p[i + 1] = odd ? p[i + 1] : other;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 other = __shfl_xor_sync(0xffffffffu, upper ? p[i] : p[i + 2], 2);
        p[i] = upper ? other : p[i];
        p[i + 2] = upper ? p[i + 2] : other;
    }
}
