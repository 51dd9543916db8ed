// One row of CLASSES logits, worked on by a warp or by a block: loss and gradient.
const int LANES = BY_WARP ? 32 : BLOCK;
const int WIDE = 16 / sizeof(T);
struct alignas(16) Pack { T v[WIDE]; };

// A row may start anywhere: elements before its first 16-byte boundary, packs from there, elements after the last pack.
struct Parts { int before, packs, after; };
__device__ __forceinline__ Parts parts_of(const T *x) {
    int before = (int)((16 - ((u64)x & 15)) & 15) / (int)sizeof(T);
    if (before > CLASSES) before = CLASSES;
    int packs = (CLASSES - before) / WIDE;
    return {before, packs, CLASSES - before - packs * WIDE};
}
// The element outside of the packs that a lane has, of which there are fewer than 32; -1 for none.
__device__ __forceinline__ int loose(Parts parts, int lane) {
    if (lane < parts.before) return lane;
    lane -= parts.before;
    return lane < parts.after ? CLASSES - parts.after + lane : -1;
}

// Largest value so far, and the sum of exp(value - largest).
struct Running { float most, sum; };
template <int N> __device__ __forceinline__ void take(Running &r, const float (&v)[N]) {
    float most = r.most;
#pragma unroll
    for (int i = 0; i < N; i++) most = fmaxf(most, v[i]); // a NaN shows in the sum
    float base = most == -infinity() ? 0.0f : most;
    r.sum *= __expf(r.most - base);
#pragma unroll
    for (int i = 0; i < N; i++) r.sum += __expf(v[i] - base);
    r.most = most;
}
template <int N> __device__ __forceinline__ void take_packs(Running &r, const Pack *p, int stride) {
    Pack q[N];
    float v[N * WIDE];
#pragma unroll
    for (int i = 0; i < N; i++) q[i] = p[i * stride];
#pragma unroll
    for (int i = 0; i < N * WIDE; i++) v[i] = to_float(q[i / WIDE].v[i % WIDE]);
    take(r, v);
}

// ln(sum(exp(x))), in one pass; all lanes get it. Every lane has read its part of x when it returns.
__device__ __forceinline__ float log_sum_exp(const T *x, int lane) {
    Parts parts = parts_of(x);
    const Pack *packs = (const Pack *)(x + parts.before);
    Running r = {-infinity(), 0.0f};
    int i = lane;
    for (; i + 3 * LANES < parts.packs; i += 4 * LANES) take_packs<4>(r, packs + i, LANES);
    for (; i < parts.packs; i += LANES) take_packs<1>(r, packs + i, LANES);
    int j = loose(parts, lane);
    if (j >= 0) {
        float v[1] = {to_float(x[j])};
        take(r, v);
    }
    float most = BY_WARP ? warp_max(r.most) : block_max(r.most);
    float part = r.sum * expf(r.most - most);
    return most + logf(BY_WARP ? warp_sum(part) : block_sum(part));
}

__device__ __forceinline__ bool is_class(int target) { return target >= 0 && target < CLASSES; }
// `picked` is the target's logit. A target outside of the classes gives NaN.
__device__ __forceinline__ float loss_of(int target, float picked, float lse) {
    if (target < 0) return 0.0f;
    return is_class(target) ? lse - picked : __int_as_float(0x7fc00000);
}

template <int N> __device__ __forceinline__ void slope_packs(Pack *p, int stride, int at, int target, float lse, float weight) {
    Pack q[N];
#pragma unroll
    for (int i = 0; i < N; i++) q[i] = p[i * stride];
#pragma unroll
    for (int i = 0; i < N; i++) {
#pragma unroll
        for (int e = 0; e < WIDE; e++) {
            float v = expf(to_float(q[i].v[e]) - lse) * weight;
            from_float(at + i * stride * WIDE + e == target ? v - weight : v, q[i].v[e]);
        }
        p[i * stride] = q[i];
    }
}

// Overwrites x by weight * (softmax - one_hot(target)); zeros if the row is ignored.
__device__ __forceinline__ void gradient(T *x, int lane, int target, float lse, float weight) {
    Parts parts = parts_of(x);
    Pack *packs = (Pack *)(x + parts.before);
    int j = loose(parts, lane);
    if (target < 0) {
        Pack zeros;
#pragma unroll
        for (int e = 0; e < WIDE; e++) from_float(0.0f, zeros.v[e]);
        for (int i = lane; i < parts.packs; i += LANES) packs[i] = zeros;
        if (j >= 0) x[j] = zeros.v[0];
        return;
    }
    int i = lane;
    for (; i + LANES < parts.packs; i += 2 * LANES) slope_packs<2>(packs + i, LANES, parts.before + i * WIDE, target, lse, weight);
    for (; i < parts.packs; i += LANES) slope_packs<1>(packs + i, LANES, parts.before + i * WIDE, target, lse, weight);
    if (j >= 0) {
        float v = expf(to_float(x[j]) - lse) * weight;
        from_float(j == target ? v - weight : v, x[j]);
    }
}

// The row of this warp or block.
__device__ __forceinline__ u64 row_index() { return BY_WARP ? (u64)blockIdx.x * (BLOCK / 32) + threadIdx.x / 32 : blockIdx.x; }
__device__ __forceinline__ int lane_index() { return BY_WARP ? threadIdx.x % 32 : threadIdx.x; }
