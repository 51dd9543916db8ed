// The steps besides GEMMs, for every shape and type; xs [batch, TIME, HEADS, N], heads inside, q [batch, HEADS, TIME, N], heads outside.
// One thread per adjacent pair.
struct Pair { u64 inside, outside, table; };

__device__ __forceinline__ Pair pair_of(u64 i) {
    u64 j = i % (N / 2), h = i / (N / 2) % HEADS, t = i / (N / 2) / HEADS % TIME, b = i / (N / 2) / HEADS / TIME;
    return Pair{2 * i, ((b * HEADS + h) * TIME + t) * N + 2 * j, t * (N / 2) + j};
}

// q = xs rotated; and, with CLEAR, 0 in the columns of s [batch, HEADS, TIME, SQUARE] beyond the last.
extern "C" __global__ void linear_attention_turn(const T *xs, const C *cos, const C *sin, T *q, T *s) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)PAIRS) return;
    Pair at = pair_of(i);
    float c = to_float(cos[at.table]), n = to_float(sin[at.table]), x = to_float(xs[at.inside]), y = to_float(xs[at.inside + 1]);
    from_float(x * c - y * n, q[at.outside]);
    from_float(x * n + y * c, q[at.outside + 1]);
    if (CLEAR && i < (u64)PAIRS / (N / 2))
        for (int j = TIME; j < SQUARE; j++) from_float(0.0f, s[i * SQUARE + j]);
}

// dxs = dq rotated back, with ADD plus more, with RELU 0 where xs is not positive.
extern "C" __global__ void linear_attention_turn_back(const T *xs, const C *cos, const C *sin, const T *dq, const M *more, T *dxs) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)PAIRS) return;
    Pair at = pair_of(i);
    float c = to_float(cos[at.table]), n = to_float(sin[at.table]), x = to_float(dq[at.outside]), y = to_float(dq[at.outside + 1]);
    float g[2] = {x * c + y * n, y * c - x * n};
    for (int j = 0; j < 2; j++) {
        if (ADD) g[j] += to_float(more[at.inside + j]);
        if (RELU && !(to_float(xs[at.inside + j]) > 0.0f)) g[j] = 0.0f;
        from_float(g[j], dxs[at.inside + j]);
    }
}

// y [COUNT] = x, rounded.
extern "C" __global__ void linear_attention_round(const float *x, T *y) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (u64)COUNT) from_float(x[i], y[i]);
}
