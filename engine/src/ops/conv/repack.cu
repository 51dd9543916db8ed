// matrix [GROUPS, PG, WIDTH, QG], what the columns of `unfold` are multiplied with, from weight [outputs, cg, WIDTH].
// Backward, P are the channels, Q the outputs, and the taps run backwards.
extern "C" __global__ void conv_repack(const W *weight, T *matrix) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)GROUPS * PG * WIDTH * QG) return;
    u64 q = i % QG, k = i / QG % WIDTH, p = i / ((u64)QG * WIDTH) % PG, g = i / ((u64)QG * WIDTH * PG);
    u64 from = BACKWARD ? ((g * QG + q) * PG + p) * WIDTH + WIDTH - 1 - k : ((g * PG + p) * QG + q) * WIDTH + k;
    from_float(to_float(weight[from]), matrix[i]);
}
