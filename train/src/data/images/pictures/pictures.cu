// One thread a pixel of the result [batch, CHANNELS, SIDE, SIDE]. AUGMENT: a square of its own for every item.
__device__ __forceinline__ float place(float from, int i, float step) {
    float at = from + (i + 0.5f) * step - 0.5f;
    return fminf(fmaxf(at, 0.0f), (float)(SIDE - 1));
}

extern "C" __global__ void __launch_bounds__(256) pictures(const unsigned char *set, const int *index, RNG float *y) {
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= N) return;
    int column = i % SIDE, row = i / SIDE % SIDE;
    u64 plane = i / (SIDE * SIDE), item = plane / CHANNELS;
    int picture = index[item];
    if ((u32)picture >= PICTURES) __trap(); // the caller's mistake
    const unsigned char *from = set + ((u64)picture * CHANNELS + plane % CHANNELS) * (SIDE * SIDE);
#if AUGMENT
    item += FIRST;
    float length = SIDE * sqrtf(LEAST + (1.0f - LEAST) * random_uniform(rng, SITE, 4 * item));
    float room = SIDE - length, step = length / SIDE;
    if (MIRROR && random_uniform(rng, SITE, 4 * item + 3) < 0.5f) column = SIDE - 1 - column;
    float ax = place(room * random_uniform(rng, SITE, 4 * item + 1), column, step);
    float ay = place(room * random_uniform(rng, SITE, 4 * item + 2), row, step);
    int x0 = (int)ax, y0 = (int)ay, x1 = min(x0 + 1, SIDE - 1), y1 = min(y0 + 1, SIDE - 1);
    float fx = ax - x0, fy = ay - y0;
    float a = from[y0 * SIDE + x0], b = from[y0 * SIDE + x1], c = from[y1 * SIDE + x0], d = from[y1 * SIDE + x1];
    float upper = a + (b - a) * fx, lower = c + (d - c) * fx;
    y[i] = (upper + (lower - upper) * fy) / 127.5f - 1.0f;
#else
    y[i] = from[row * SIDE + column] / 127.5f - 1.0f;
#endif
}
