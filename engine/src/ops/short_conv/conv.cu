// One thread for VEC adjacent channels and SLICE positions, in the order of the scan; the last WIDTH rows of x are in registers.
struct __align__(VEC * sizeof(T)) Pack { T of[VEC]; };
#define PACKS (CHANNELS / VEC)

__device__ __forceinline__ int place(int t) { return REVERSE ? TIME - 1 - t : t; }

// Row t, zeros outside of the sequence.
__device__ __forceinline__ void read(float (&row)[VEC], const T *from, u64 step, int t) {
    Pack p = {};
    if (t >= 0 && t < TIME) p = *(const Pack *)(from + (u64)place(t) * step);
#pragma unroll
    for (int v = 0; v < VEC; v++) row[v] = to_float(p.of[v]);
}
__device__ __forceinline__ void write(T *to, int t, const float (&row)[VEC]) {
    Pack p;
#pragma unroll
    for (int v = 0; v < VEC; v++) from_float(row[v], p.of[v]);
    *(Pack *)(to + (u64)place(t) * CHANNELS) = p;
}
template <int ROWS> __device__ __forceinline__ void shift(float (&rows)[ROWS][VEC]) {
#pragma unroll
    for (int j = 0; j + 1 < ROWS; j++)
#pragma unroll
        for (int v = 0; v < VEC; v++) rows[j][v] = rows[j + 1][v];
}

struct Filter {
    float tap[WIDTH][VEC], bias[VEC];
    __device__ __forceinline__ Filter(const float *weight, const float *offset, int c) {
#pragma unroll
        for (int v = 0; v < VEC; v++) {
            bias[v] = offset[c + v];
#pragma unroll
            for (int j = 0; j < WIDTH; j++) tap[j][v] = weight[(c + v) * WIDTH + j];
        }
    }
    // reach: how far back the row's own position lets it see.
    __device__ __forceinline__ float at(const float (&rows)[WIDTH][VEC], int reach, int v) const {
        float sum = bias[v];
#pragma unroll
        for (int j = 0; j < WIDTH; j++)
            if (WIDTH - 1 - j <= reach) sum += tap[j][v] * rows[j][v];
        return sum;
    }
};
#if PLACED
#define POSITIONS const int *positions,
#define REACH(t) ((t) < TIME ? positions[blockIdx.z * (u64)TIME + (t)] : WIDTH)
#else
#define POSITIONS
#define REACH(t) WIDTH
#endif

extern "C" __global__ void __launch_bounds__(128) short_conv(const T *x, const float *weight, const float *bias, POSITIONS T *y) {
    int pack = blockIdx.x * 128 + threadIdx.x, first = blockIdx.y * SLICE;
    if (pack >= PACKS) return;
    const u64 step = X_ROW;
    x += blockIdx.z * TIME * step + pack * VEC, y += blockIdx.z * (u64)TIME * CHANNELS + pack * VEC;
    Filter filter(weight, bias, pack * VEC);
    float rows[WIDTH][VEC] = {};
#pragma unroll
    for (int j = 1; j < WIDTH; j++) read(rows[j], x, step, first - WIDTH + j);
    int last = first + SLICE < TIME ? first + SLICE : TIME;
#pragma unroll 4
    for (int t = first; t < last; t++) {
        shift(rows);
        read(rows[WIDTH - 1], x, step, t);
        int reach = REACH(t);
        float out[VEC];
#pragma unroll
        for (int v = 0; v < VEC; v++) {
            float s = filter.at(rows, reach, v);
            out[v] = s / (1.0f + expf(-s));
        }
        write(y, t, out);
    }
}

// dx, and each slice's sums for the gradients of weight and bias: [slices, CHANNELS, WIDTH] and [slices, CHANNELS]. A slice reads WIDTH - 1 positions more
// than it has, whose gradients reach into it.
extern "C" __global__ void __launch_bounds__(128)
short_conv_grad(const T *x, const float *weight, const float *bias, const T *dy, POSITIONS T *dx, float *by_weight, float *by_bias) {
    int pack = blockIdx.x * 128 + threadIdx.x, first = blockIdx.y * SLICE;
    if (pack >= PACKS) return;
    const u64 step = X_ROW;
    u64 own = blockIdx.z * (u64)TIME * CHANNELS + pack * VEC;
    x += blockIdx.z * TIME * step + pack * VEC, dy += own, dx += own;
    Filter filter(weight, bias, pack * VEC);
    float rows[WIDTH][VEC] = {}, before[WIDTH][VEC] = {}, sums[WIDTH][VEC] = {}, sum[VEC] = {}; // `before`: gradients before SiLU
#pragma unroll
    for (int j = 1; j < WIDTH; j++) read(rows[j], x, step, first - WIDTH + j);
    int last = first + SLICE < TIME ? first + SLICE : TIME, reaches[WIDTH] = {};
#pragma unroll 2
    for (int t = first; t < last + WIDTH - 1; t++) {
        shift(rows), shift(before);
#pragma unroll
        for (int j = 0; j + 1 < WIDTH; j++) reaches[j] = reaches[j + 1];
        reaches[WIDTH - 1] = REACH(t);
        read(rows[WIDTH - 1], x, step, t);
        float g[VEC], out[VEC];
        read(g, dy, CHANNELS, t);
#pragma unroll
        for (int v = 0; v < VEC; v++) {
            float s = filter.at(rows, reaches[WIDTH - 1], v), gate = 1.0f / (1.0f + expf(-s));
            float back = t < TIME ? g[v] * gate * (1.0f + s * (1.0f - gate)) : 0.0f;
            before[WIDTH - 1][v] = back, out[v] = 0.0f;
            if (t < last) {
                sum[v] += back;
#pragma unroll
                for (int j = 0; j < WIDTH; j++)
                    if (WIDTH - 1 - j <= reaches[WIDTH - 1]) sums[j][v] += back * rows[j][v];
            }
            // Position t - (WIDTH - 1) is seen by all that are in `before`, by the newest of them with its first tap.
#pragma unroll
            for (int j = 0; j < WIDTH; j++)
                if (j <= reaches[j]) out[v] += filter.tap[WIDTH - 1 - j][v] * before[j][v];
        }
        if (t - (WIDTH - 1) >= first) write(dx, t - (WIDTH - 1), out);
    }
    u64 slice = blockIdx.z * (u64)gridDim.y + blockIdx.y;
#pragma unroll
    for (int v = 0; v < VEC; v++) {
        by_bias[slice * CHANNELS + pack * VEC + v] = sum[v];
#pragma unroll
        for (int j = 0; j < WIDTH; j++) by_weight[(slice * CHANNELS + pack * VEC + v) * WIDTH + j] = sums[j][v];
    }
}
