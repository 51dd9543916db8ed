// A step of COUNT parameters; block b has PIECE elements of one of them.
__device__ const u32 starts[] = {STARTS}; // first block of each parameter
__device__ const u64 sizes[] = {SIZES};

__device__ __forceinline__ void move(P &p, G gradient, M &m, V &v, const Pace &pace) {
    float g = to_float(gradient) * pace.scale, first = to_float(m);
    first += (g - first) * (1.0f - BETA1);
    float second = to_float(v) * BETA2 + g * g * (1.0f - BETA2);
    from_float(first, m);
    from_float(second, v);
    from_float(to_float(p) * pace.keep - pace.rate * first / (sqrtf(second) / pace.second + EPS), p);
}

extern "C" __global__ void adamw(const float *rate, const float *scale, const float *count, const float *go, POINTERS) {
    if (*go == 0.0f) return;
    const int parameter = owner(starts);
    P *p = nullptr;
    const G *g = nullptr;
    M *m = nullptr;
    V *v = nullptr;
    switch (parameter) { PICK }
    u64 from = (u64)(blockIdx.x - starts[parameter]) * PIECE, left = sizes[parameter] - from;
    int n = left < PIECE ? (int)left : PIECE;
    p += from, g += from, m += from, v += from;
    Pace pace = pace_of(*rate, *scale, *count, parameter);

    int fours = by_four(p) && by_four(g) && by_four(m) && by_four(v) ? n / 4 : 0;
#pragma unroll 2
    for (int i = threadIdx.x; i < fours; i += blockDim.x) {
        Four<P> a = ((Four<P> *)p)[i];
        Four<G> b = ((const Four<G> *)g)[i];
        Four<M> c = ((Four<M> *)m)[i];
        Four<V> d = ((Four<V> *)v)[i];
#pragma unroll
        for (int e = 0; e < 4; e++) move(a.v[e], b.v[e], c.v[e], d.v[e], pace);
        ((Four<P> *)p)[i] = a;
        ((Four<M> *)m)[i] = c;
        ((Four<V> *)v)[i] = d;
    }
    for (int i = fours * 4 + threadIdx.x; i < n; i += blockDim.x) move(p[i], g[i], m[i], v[i], pace);
}
