// y [ROWS] = lse - picked, 0 where there is no target. The logits are for the gradient alone.
extern "C" __global__ void __launch_bounds__(256)
loss_of_parts(const T *, const int *targets, const float *lse, const float *picked, float *y) {
    u64 row = (u64)blockIdx.x * 256 + threadIdx.x;
    if (row < (u64)ROWS) y[row] = targets[row] < 0 ? 0.0f : lse[row] - picked[row];
}
