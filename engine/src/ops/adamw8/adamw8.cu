// A step of COUNT parameters whose moments are 8-bit; block b has PIECE elements of one of them.
__device__ const u32 starts[] = {STARTS}; // first block of each parameter
__device__ const u64 sizes[] = {SIZES};
alignas(16) __device__ const u32 signed_words[] = {SIGNED};
alignas(16) __device__ const u32 unsigned_words[] = {UNSIGNED};

// Moments are computed without fused multiply-adds, so that their bytes are the CPU's.
__device__ __forceinline__ void move(P &p, G gradient, float &m, float &v, const Pace &pace) {
    const float g = __fmul_rn(to_float(gradient), pace.scale);
    m = __fadd_rn(m, __fmul_rn(__fsub_rn(g, m), 1.0f - BETA1));
    v = __fadd_rn(__fmul_rn(v, BETA2), __fmul_rn(__fmul_rn(g, g), 1.0f - BETA2));
    from_float(to_float(p) * pace.keep - pace.rate * m / (sqrtf(v) / pace.second + EPS), p);
}

extern "C" __global__ void adamw8(const float *rate, const float *scale, const float *count, const float *go, POINTERS) {
    if (*go == 0.0f) return;
    const int parameter = owner(starts);
    P *p = nullptr;
    const G *g = nullptr;
    u8 *m = nullptr, *v = nullptr;
    float *m_most = nullptr, *v_most = nullptr;
    switch (parameter) { PICK }
    const u64 from = (u64)(blockIdx.x - starts[parameter]) * PIECE, left = sizes[parameter] - from;
    const int n = left < PIECE ? (int)left : PIECE;
    p += from, g += from, m += from, v += from, m_most += from / BLOCK, v_most += from / BLOCK;

    __shared__ Map of_m, of_v;
    copy_map(of_m, signed_words);
    copy_map(of_v, unsigned_words);
    const Pace pace = pace_of(*rate, *scale, *count, parameter); // with a barrier
    const bool fours = by_four(p) && by_four(g) && by_four(m) && by_four(v);
    const int lane = threadIdx.x % 32;
    for (int at = threadIdx.x / 32 * BLOCK; at < n; at += blockDim.x / 32 * BLOCK) {
        Four<P> weights[2];
        Four<G> gradients[2];
        Four<u8> m_bytes[2], v_bytes[2];
        float first[8], second[8], most_m = m_most[at / BLOCK], most_v = v_most[at / BLOCK];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = at + 128 * half + 4 * lane;
            weights[half] = read_four(p, i, n, fours), gradients[half] = read_four(g, i, n, fours);
            m_bytes[half] = read_four(m, i, n, fours), v_bytes[half] = read_four(v, i, n, fours);
        }
        float largest_m = 0.0f, largest_v = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            first[j] = __fmul_rn(of_m.numbers[m_bytes[j / 4].v[j % 4]], most_m);
            second[j] = __fmul_rn(of_v.numbers[v_bytes[j / 4].v[j % 4]], most_v);
            move(weights[j / 4].v[j % 4], gradients[j / 4].v[j % 4], first[j], second[j], pace);
            largest_m = larger(largest_m, fabsf(first[j])), largest_v = larger(largest_v, fabsf(second[j]));
        }
        largest_m = warp_max(largest_m), largest_v = warp_max(largest_v);
        const float inverse_m = inverse_of(largest_m), inverse_v = inverse_of(largest_v);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            m_bytes[j / 4].v[j % 4] = signed_byte(of_m, first[j], inverse_m);
            v_bytes[j / 4].v[j % 4] = unsigned_byte(of_v, second[j], inverse_v);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = at + 128 * half + 4 * lane;
            write_four(weights[half], p, i, n, fours);
            write_four(m_bytes[half], m, i, n, fours), write_four(v_bytes[half], v, i, n, fours);
        }
        if (lane == 0) m_most[at / BLOCK] = largest_m, v_most[at / BLOCK] = largest_v;
    }
}
