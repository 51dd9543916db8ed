// One block for each tensor: its largest value of this run into the history, and its next scale. See scales.rs.
__device__ const unsigned char wide[] = {WIDE};

extern "C" __global__ void __launch_bounds__(256) fp8_scales(float *history, float *scales, const float *count, const float *parts) {
    float now = 0.0f;
    for (int i = threadIdx.x; i < PARTS; i += blockDim.x) now = larger(now, parts[(u64)blockIdx.x * PARTS + i]);
    now = block_max(now);
    if (!(now < infinity())) return;
    history += (u64)blockIdx.x * HISTORY;
    int oldest = (int)((u32)*count % HISTORY);
    float most = now;
    for (int i = threadIdx.x; i < HISTORY; i += blockDim.x) most = larger(most, i == oldest ? now : history[i]);
    most = block_max(most);
    if (threadIdx.x != 0) return;
    history[oldest] = now;
    if (most == 0.0f) return;
    // The smallest power of two that brings `most` to within the range, 448 or 57344 (both 1.75 times a power of two).
    int exponent = (int)(__float_as_uint(most) >> 23) - 127, top = wide[blockIdx.x] ? 15 : 8;
    bool above = (__float_as_uint(most) & 0x7fffffu) > 0x600000u;
    exponent = exponent - top + above < -126 ? -126 : exponent - top + above;
    scales[4 * blockIdx.x] = __uint_as_float((u32)(127 + exponent) << 23);
}
