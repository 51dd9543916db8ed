// loss [1] = the sum of losses [ROWS], by one block, in double precision.
extern "C" __global__ void linear_ce_sum(const float *losses, float *loss) {
    __shared__ double parts[1024];
    double sum = 0.0;
    for (u64 i = threadIdx.x; i < (u64)ROWS; i += blockDim.x) sum += losses[i];
    parts[threadIdx.x] = sum;
    for (u32 half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    }
    if (threadIdx.x == 0) loss[0] = (float)parts[0];
}
