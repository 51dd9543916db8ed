// One time step: a warp for each row [N] of the states [batch, HEADS, P, N].
extern "C" __global__ void ssd_step(const float *, const T *x, const float *dt, const float *decay, const T *b, const T *c, const float *d, T *y, float *state) {
    int lane = threadIdx.x % 32;
    u64 row = (u64)blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= (u64)ROWS) return;
    u64 head = row / P;
    int h = (int)(head % HEADS);
    u64 group = head / HEADS * GROUPS + h / (HEADS / GROUPS);
    float value = to_float(x[row]), keep = expf(decay[head]), add = dt[head] * value, sum = 0.0f;
    for (int i = lane; i < N; i += 32) {
        float now = state[row * N + i] * keep + add * to_float(b[group * N + i]);
        state[row * N + i] = now;
        sum += now * to_float(c[group * N + i]);
    }
    sum = warp_sum(sum);
    if (lane == 0) from_float(sum + d[h] * value, y[row]);
}
