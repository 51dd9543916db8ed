// dw [N] = the sum of parts [SLICES, N], in a fixed order: 8 warps have every 8th slice of 32 packs of WIDE elements.
struct alignas(4 * WIDE) Pack { float v[WIDE]; };

extern "C" __global__ void __launch_bounds__(256) conv_sum_slices(const Pack *parts, T *dw) {
    __shared__ float sums[8][WIDE][32];
    const u32 PACKS = N / WIDE;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 i = blockIdx.x * 32 + lane;
    float sum[WIDE] = {};
    if (i < PACKS)
#pragma unroll 8
        for (int s = warp; s < SLICES; s += 8) {
            Pack pack = parts[(u64)s * PACKS + i];
#pragma unroll
            for (int e = 0; e < WIDE; e++) sum[e] += pack.v[e];
        }
#pragma unroll
    for (int e = 0; e < WIDE; e++) sums[warp][e][lane] = sum[e];
    __syncthreads();
    if (warp || i >= PACKS) return;
#pragma unroll
    for (int e = 0; e < WIDE; e++) {
        for (int w = 1; w < 8; w++) sum[e] += sums[w][e][lane];
        from_float(sum[e], dw[(u64)i * WIDE + e]);
    }
}
