// p = exp(SCALE q k^T - lse); dv = p^T dy; ds = p (dy v^T - along); dq = SCALE ds k; dk = SCALE ds^T q.
// SCALE_2 = SCALE log2(e). stats [batch, heads, time, 2] holds lse log2(e) and along = row sum of dy y.
struct __align__(8) Pair { float lse, along; };
struct __align__(16) Eight { T of[8]; };

// D / 8 threads a row.
extern "C" __global__ void __launch_bounds__(256) attention_stats(const T *y, const float *lse, const T *dy, Pair *stats) {
    const int lanes = D / 8;
    u64 row = (u64)blockIdx.x * (256 / lanes) + threadIdx.x / lanes; // (b * TIME + t) * HEADS + h
    bool live = row < (u64)BATCH * TIME * HEADS;
    u64 at = (live ? row : 0) * D + threadIdx.x % lanes * 8;
    Eight a = *(const Eight *)(y + at), g = *(const Eight *)(dy + at);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += to_float(a.of[i]) * to_float(g.of[i]);
    for (int i = lanes / 2; i > 0; i >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, i);
    if (!live || threadIdx.x % lanes != 0) return;
    u64 h = row % HEADS, t = row / HEADS % TIME, b = row / HEADS / TIME, to = (b * HEADS + h) * TIME + t;
    const float log2_e = 1.44269504f;
    stats[to] = Pair{lse[to] * log2_e, sum};
}

