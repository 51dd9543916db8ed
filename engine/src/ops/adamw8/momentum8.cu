// u = the direction that momentum and gradient give (momentum.rs), and the momentum's next value in 8 bits. A block has PIECE elements.
alignas(16) __device__ const u32 signed_words[] = {SIGNED};

extern "C" __global__ void momentum8(const float *scale, const float *go, const G *g, U *u, u8 *m, float *most) {
    const u64 from = (u64)blockIdx.x * PIECE, left = (u64)N - from;
    const int n = left < PIECE ? (int)left : PIECE;
    g += from, u += from, m += from, most += from / BLOCK;
    __shared__ Map map;
    copy_map(map, signed_words);
    __syncthreads();
    const bool counts = *go != 0.0f, fours = by_four(g) && by_four(u) && by_four(m);
    const float by = *scale;
    const int lane = threadIdx.x % 32;
    for (int at = threadIdx.x / 32 * BLOCK; at < n; at += blockDim.x / 32 * BLOCK) {
        Four<G> gradients[2];
        Four<u8> bytes[2];
        float next[8], was = most[at / BLOCK], largest = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = at + 128 * half + 4 * lane;
            gradients[half] = read_four(g, i, n, fours), bytes[half] = read_four(m, i, n, fours);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Four<U> way;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int j = 4 * half + e;
                const float d = __fmul_rn(to_float(gradients[half].v[e]), by), old = __fmul_rn(map.numbers[bytes[half].v[e]], was);
                next[j] = __fadd_rn(old, __fmul_rn(__fsub_rn(d, old), 1.0f - BETA));
                largest = larger(largest, fabsf(next[j]));
                from_float(__fadd_rn(d, __fmul_rn(__fsub_rn(next[j], d), BETA)), way.v[e]);
            }
            write_four(way, u, at + 128 * half + 4 * lane, n, fours);
        }
        largest = warp_max(largest);
        if (!counts) continue;
        const float inverse = inverse_of(largest);
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int e = 0; e < 4; e++) bytes[half].v[e] = signed_byte(map, next[4 * half + e], inverse);
            write_four(bytes[half], m, at + 128 * half + 4 * lane, n, fours);
        }
        if (lane == 0) most[at / BLOCK] = largest;
    }
}
