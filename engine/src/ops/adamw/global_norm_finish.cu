// norm [1] = sqrt of the sum of parts [PARTS], by one block, in double precision.
extern "C" __global__ void global_norm_finish(const float *parts, float *norm) {
    __shared__ double sums[1024];
    double sum = 0.0;
    for (u64 i = threadIdx.x; i < (u64)PARTS; i += blockDim.x) sum += parts[i];
    sums[threadIdx.x] = sum;
    for (u32 half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) norm[0] = (float)sqrt(sums[0]);
}
