// For every chunk and head NUMBERS numbers, see fast.cuh: [batch, CHUNKS, HEADS, 4, CHUNK]. One block for each chunk and 32 heads.
extern "C" __global__ void __launch_bounds__(THREADS) ssd_sums(const float *dt, const float *decay, float *numbers) {
    __shared__ float steps[CHUNK][33], decays[CHUNK][33];
    const int SETS = (HEADS + 31) / 32;
    int set = blockIdx.x % SETS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u64 chunk = blockIdx.x / SETS, first = chunk / CHUNKS * TIME;
    int t0 = chunk % CHUNKS * CHUNK;
    for (int i = threadIdx.x; i < CHUNK * 32; i += THREADS) {
        int r = i / 32, h = set * 32 + i % 32;
        bool live = t0 + r < TIME && h < HEADS;
        u64 from = live ? (first + place(t0 + r)) * HEADS + h : 0;
        steps[r][i % 32] = live ? dt[from] : 0.0f, decays[r][i % 32] = live ? decay[from] * LOG2_E : 0.0f;
    }
    __syncthreads();
    for (int k = warp; k < 32 && set * 32 + k < HEADS; k += THREADS / 32) {
        float sum[4], step[4], all = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++) all += decays[4 * lane + j][k], sum[j] = all, step[j] = steps[4 * lane + j][k];
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            float other = __shfl_up_sync(0xffffffffu, all, by);
            if (lane >= by) all += other;
        }
        float before = __shfl_up_sync(0xffffffffu, all, 1);
#pragma unroll
        for (int j = 0; j < 4; j++) sum[j] += lane > 0 ? before : 0.0f;
        float last = __shfl_sync(0xffffffffu, sum[3], 31), end[4], start[4];
#pragma unroll
        for (int j = 0; j < 4; j++) end[j] = power_of_two(last - sum[j]) * step[j], start[j] = power_of_two(sum[j]);
        float4 *to = (float4 *)(numbers + (chunk * HEADS + set * 32 + k) * NUMBERS) + lane;
        to[0] = make_float4(step[0], step[1], step[2], step[3]), to[CHUNK / 4] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        to[2 * CHUNK / 4] = make_float4(end[0], end[1], end[2], end[3]), to[3 * CHUNK / 4] = make_float4(start[0], start[1], start[2], start[3]);
    }
}
