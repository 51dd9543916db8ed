// columns [rows, GROUPS, WIDTH, QG]: for each (sequence, time step) of `in`, the rows that its taps see:
// columns[(b, t), g, k, q] = in[b, t + k - BEFORE, g, q], zeros outside the sequence. A thread has WIDE channels.
struct alignas(WIDE * sizeof(T)) From { T v[WIDE]; };
struct alignas(WIDE * sizeof(U)) To { U v[WIDE]; };

extern "C" __global__ void conv_unfold(const T *in, To *columns) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)PACKS) return;
    const int ACROSS = QG / WIDE;
    int q = i % ACROSS * WIDE, k = i / ACROSS % WIDTH, g = i / (ACROSS * WIDTH) % GROUPS;
    u64 row = i / ((u64)ACROSS * WIDTH * GROUPS);
    long long t = (long long)(row % TIME) + k - BEFORE;
    To out;
#pragma unroll
    for (int e = 0; e < WIDE; e++) from_float(0.0f, out.v[e]);
    if (t >= 0 && t < TIME) {
        const T *at = in + ((row / TIME * TIME + t) * GROUPS + g) * QG + q;
        From v;
        if ((u64)in % sizeof(From) == 0) v = *(const From *)at;
        else for (int e = 0; e < WIDE; e++) v.v[e] = at[e];
#pragma unroll
        for (int e = 0; e < WIDE; e++) from_float(to_float(v.v[e]), out.v[e]);
    }
    columns[i] = out;
}
