// y combines the partial results of all splits that have keys. A warp for each head of each query.
extern "C" __global__ void __launch_bounds__(256) attention_combine(const int *past_at, const float *partial, TQ *y) {
    u64 head = (u64)blockIdx.x * 8 + threadIdx.x / 32;
    if (head >= (u64)BATCH * TIME * KV * GROUP) return;
    int lane = threadIdx.x % 32, splits = (held(*past_at) + TIME + CHUNK - 1) / CHUNK;
    partial += head * SPLITS * (D + 2);
    float high = -infinity(), total = 0.0f, out[(D + 31) / 32] = {};
    for (int s = lane; s < splits; s += 32) high = fmaxf(high, partial[s * (D + 2) + D]);
    high = warp_max(high);
    for (int s = lane; s < splits; s += 32) total += partial[s * (D + 2) + D + 1] * share(partial[s * (D + 2) + D], high);
    total = warp_sum(total);
#pragma unroll 4
    for (int s = 0; s < splits; s++) {
        const float *part = partial + s * (D + 2);
        float weight = share(part[D], high);
#pragma unroll
        for (int i = 0; i < (D + 31) / 32; i++)
            if (i * 32 + lane < D) out[i] += weight * part[i * 32 + lane];
    }
#pragma unroll
    for (int i = 0; i < (D + 31) / 32; i++)
        if (i * 32 + lane < D) from_float(total > 0.0f ? out[i] / total : 0.0f, y[head * D + i * 32 + lane]);
}
