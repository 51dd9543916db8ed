// dw [outputs, CG, WIDTH] from the GEMM results by_tap [outputs, WIDTH, CG].
extern "C" __global__ void conv_by_tap(const float *by_tap, T *dw) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)OUTPUTS * CG * WIDTH) return;
    u64 j = i % WIDTH, c = i / WIDTH % CG, o = i / ((u64)WIDTH * CG);
    from_float(by_tap[(o * WIDTH + j) * CG + c], dw[i]);
}
