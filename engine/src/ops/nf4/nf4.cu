// Dequantizes weights: eight per thread, 4 bytes of codes with one scale.

__device__ const float levels[16] = {LEVELS};
__device__ const float sizes[256] = {BYTES};

struct alignas(8 * sizeof(T) < 16 ? 8 * sizeof(T) : 16) Eight { T at[8]; };

extern "C" __global__ void __launch_bounds__(256)
nf4_widen(const unsigned char *codes, const unsigned char *scales, const TL *largest, const TM *mean, T *w) {
    __shared__ float level[16];
    if (threadIdx.x < 16) level[threadIdx.x] = levels[threadIdx.x];
    __syncthreads();
    const u64 first = 8 * ((u64)blockIdx.x * 256 + threadIdx.x);
    if (first >= COUNT) return;
    const u64 block = first / BLOCK;
    const float scale = sizes[scales[block]] * to_float(largest[block / SCALES]) + to_float(*mean);
    if (first + 8 <= COUNT) {
        const u32 four = *(const u32 *)(codes + first / 2);
        Eight out;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const u32 two = four >> (i / 2 * 8) & 255;
            from_float(level[i % 2 ? two & 15 : two >> 4] * scale, out.at[i]);
        }
        *(Eight *)(w + first) = out;
        return;
    }
    for (u64 i = first; i < COUNT; i++) {
        const u32 two = codes[i / 2];
        from_float(level[i % 2 ? two & 15 : two >> 4] * scale, w[i]);
    }
}
