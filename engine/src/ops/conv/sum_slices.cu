// dw [N] = the sum of parts [SLICES, N], in order.
extern "C" __global__ void conv_sum_slices(const float *parts, T *dw) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N) return;
    float sum = 0.0f;
#pragma unroll 8
    for (int s = 0; s < SLICES; s++) sum += parts[(u64)s * N + i];
    from_float(sum, dw[i]);
}
