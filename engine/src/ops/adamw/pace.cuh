// The numbers of a step for one parameter; the rate includes the first moment's bias correction.
__device__ const u32 decays[] = {DECAYS}; // the bits of floats
struct Pace { float rate, scale, keep, second; };

// Every thread of the block calls it; it ends with a barrier.
__device__ __forceinline__ Pace pace_of(float rate, float scale, float count, int parameter) {
    // Bias correction, since moments start at 0: 1 - beta^count.
    __shared__ float bias[2];
    if (threadIdx.x == 0) {
        bias[0] = (float)(1.0 - pow((double)BETA1, (double)count));
        bias[1] = sqrtf((float)(1.0 - pow((double)BETA2, (double)count)));
    }
    __syncthreads();
    return {rate / bias[0], scale, 1.0f - rate * __uint_as_float(decays[parameter]), bias[1]};
}
