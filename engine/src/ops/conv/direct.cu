// Small groups. out[t, p] = sum over k, q of w[k][q][p] in[t + k - BEFORE, q], p and q inside one group; zeros outside the
// sequence. A block has TILE time steps of one group of one sequence; a thread has 4 time steps of 4 outputs.
// Forward: BEFORE = WIDTH - 1. Gradient of the input: outputs and inputs change places, taps run backwards, BEFORE = 0.
template <typename E> struct alignas(4 * sizeof(E)) Four { E v[4]; };

extern "C" __global__ void __launch_bounds__(BLOCK) conv_direct(const T *in, const W *weight, T *out) {
    extern __shared__ float4 memory[];
    float *w = (float *)memory;            // [WIDTH, QG, PAD]; PAD is PG rounded up to 4, what is beyond PG is never stored
    float *x = w + WIDTH * QG * PAD;       // [QG, SPAN]
    const int ROWS = TILE + WIDTH - 1;     // at most SPAN
    u32 g = blockIdx.x % GROUPS, rest = blockIdx.x / GROUPS;
    u64 b = rest / TILES;
    int t0 = (int)(rest % TILES) * TILE;

    for (int i = threadIdx.x; i < PG * QG * WIDTH; i += BLOCK) {
        int k = i % WIDTH, j = i / WIDTH;
        int q = BACKWARD ? j / PG : j % QG, p = BACKWARD ? j % PG : j / QG;
        w[((BACKWARD ? WIDTH - 1 - k : k) * QG + q) * PAD + p] = to_float(weight[(u64)g * PG * QG * WIDTH + i]);
    }
    const T *from = in + b * TIME * GROUPS * QG + g * QG;
    const int STEP = QG % 4 == 0 ? 4 : 1;
    bool whole = STEP == 4 && (u64)in % sizeof(Four<T>) == 0;
    for (int i = threadIdx.x; i < ROWS * (QG / STEP); i += BLOCK) {
        int q = i % (QG / STEP) * STEP, r = i / (QG / STEP), t = t0 + r - BEFORE;
        Four<T> v;
#pragma unroll
        for (int e = 0; e < STEP; e++) from_float(0.0f, v.v[e]);
        if (t >= 0 && t < TIME) {
            const T *at = from + (u64)t * GROUPS * QG + q;
            if (whole) v = *(const Four<T> *)at;
            else for (int e = 0; e < STEP; e++) v.v[e] = at[e];
        }
#pragma unroll
        for (int e = 0; e < STEP; e++) x[(q + e) * SPAN + r] = to_float(v.v[e]);
    }
    __syncthreads();

    int slot = threadIdx.x / (PAD / 4), p = threadIdx.x % (PAD / 4) * 4;
    if (slot >= TILE / 4) return;
    float sum[4][4] = {};
    for (int q = 0; q < QG; q++) {
        float v[WIDTH + 3];
#pragma unroll
        for (int r = 0; r < WIDTH + 3; r++) v[r] = x[q * SPAN + slot * 4 + r];
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            float4 f = *(const float4 *)(w + (k * QG + q) * PAD + p);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                sum[r][0] += v[r + k] * f.x;
                sum[r][1] += v[r + k] * f.y;
                sum[r][2] += v[r + k] * f.z;
                sum[r][3] += v[r + k] * f.w;
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int t = t0 + slot * 4 + r;
        if (t >= TIME) return;
        T *to = out + (b * TIME + t) * GROUPS * PG + g * PG + p;
        Four<T> v;
#pragma unroll
        for (int e = 0; e < 4; e++) from_float(sum[r][e], v.v[e]);
        if (PG % 4 == 0) {
            u64 words[sizeof(T) / 2]; // NVRTC would store a Four element by element
            memcpy(words, &v, sizeof(v));
            for (int i = 0; i < sizeof(T) / 2; i++) ((u64 *)to)[i] = words[i];
        } else for (int e = 0; e < 4 && p + e < PG; e++) to[e] = v.v[e];
    }
}
