// A block has one slice [HEIGHT, WIDTH] of the field for all STEPS: in shared memory, or where that is too small in the outputs. Each warp
// leaves its sum of sizes at every step in sums [STEPS, PARTS]; `mean_size` adds them up.
#define AREA (HEIGHT * WIDTH)

__device__ __forceinline__ float laplacian(const float *f, int i) {
    int x = i % WIDTH;
    float up = i >= WIDTH ? f[i - WIDTH] : 0.0f, down = i < AREA - WIDTH ? f[i + WIDTH] : 0.0f;
    float left = x > 0 ? f[i - 1] : 0.0f, right = x < WIDTH - 1 ? f[i + 1] : 0.0f;
    return up + down + left + right - 4.0f * f[i];
}

extern "C" __global__ void __launch_bounds__(THREADS)
evolve(const RE *re_in, const IM *im_in, const K *rate, const SOURCE *source, float *re_out, float *im_out, float *sums) {
    extern __shared__ float slice[];
    u64 start = (u64)blockIdx.x * AREA;
    float *re = SHARED ? slice : re_out + start, *im = SHARED ? slice + AREA : im_out + start;
    for (int i = threadIdx.x; i < AREA; i += THREADS) re[i] = to_float(re_in[start + i]), im[i] = to_float(im_in[start + i]);
    float k = to_float(*rate), push = SOURCED ? to_float(source[blockIdx.x / INNER]) : 0.0f;
    sums += (u64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    __syncthreads();
    for (int step = 0; step < STEPS; step++, sums += PARTS) {
        // A thread alone writes its elements, so it may read them without waiting.
        float sum = 0.0f;
        for (int i = threadIdx.x; i < AREA; i += THREADS) sum += sqrtf(re[i] * re[i] + im[i] * im[i]);
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) *sums = sum;
        for (int i = threadIdx.x; i < AREA; i += THREADS) re[i] = re[i] + k * laplacian(im, i) + push;
        __syncthreads();
        for (int i = threadIdx.x; i < AREA; i += THREADS) im[i] = im[i] - k * laplacian(re, i);
        __syncthreads();
    }
    if (SHARED)
        for (int i = threadIdx.x; i < AREA; i += THREADS) re_out[start + i] = re[i], im_out[start + i] = im[i];
}

extern "C" __global__ void __launch_bounds__(256) mean_size(const float *sums, float *size) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < PARTS; i += 256) sum += sums[(u64)blockIdx.x * PARTS + i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) size[blockIdx.x] = sum / (float)ELEMENTS;
}
