// A block for each step and row. Every thread goes over its share of the candidates once, with a running maximum; then they join.
#define HALF (N / 2)
#define PLANES (LAYERS * HALF)
#define WARPS (THREADS / 32)
#define GIVEN (2 + 2 * N)

struct Turn { float cos, sin; };

// Plane j of layer l has axes (2 j + l) mod N and the one behind it; the planes of a layer share none.
__device__ __forceinline__ void rotate(float v[N], const Turn *turns) {
#pragma unroll UNROLL
    for (int i = 0; i < PLANES; i++) {
        int a = (2 * (i % HALF) + i / HALF) % N, b = (a + 1) % N;
        float x = v[a], y = v[b];
        v[a] = turns[i].cos * x - turns[i].sin * y;
        v[b] = turns[i].sin * x + turns[i].cos * y;
    }
}

template <class E> __device__ __forceinline__ void take(float v[N], const E *from) {
    for (int j = 0; j < N; j++) v[j] = to_float(from[j]);
}

__device__ __forceinline__ float length(const float v[N], const float metric[N]) {
    float sum = 0.0f;
    for (int j = 0; j < N; j++) sum += metric[j] * v[j] * v[j];
    return sqrtf(sum + EPS);
}

// What a thread has found so far, relative to its best score.
struct Found {
    float top, total, mix[N];

    __device__ __forceinline__ void shrink(float to) {
        float factor = top == to ? 1.0f : expf(top - to);
        top = to;
        total *= factor;
        for (int j = 0; j < N; j++) mix[j] *= factor;
    }
    __device__ __forceinline__ void add(float score, const float value[N]) {
        if (!(score <= top)) shrink(score);
        float p = expf(score - top);
        total += p;
        for (int j = 0; j < N; j++) mix[j] += p * value[j];
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
retrieve(const QUERY *query, const OWN *own, const unsigned char *counts, const MEMORY *memory, const VALUE *values, const int *filled,
         const ANGLE *angles, const METRIC *metrics, const SCALE *scales, float *given) {
    __shared__ Turn turns[PLANES];
    __shared__ float tops[WARPS], parts[WARPS][N + 1];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x % ROWS;
    for (int i = threadIdx.x; i < PLANES; i += THREADS) turns[i].cos = cosf(to_float(angles[i])), turns[i].sin = sinf(to_float(angles[i]));
    __syncthreads();
    float at[N], metric[N], scale = to_float(scales[blockIdx.x / ROWS]);
    take(at, query + (u64)blockIdx.x * N);
    take(metric, metrics);
    rotate(at, turns);

    Found found = {-infinity(), 0.0f, {}};
    auto visit = [&](float c[N], const float value[N]) {
        rotate(c, turns);
        for (int j = 0; j < N; j++) c[j] -= at[j];
        found.add(-SHARPNESS * (scale * length(c, metric)), value);
    };
    for (int t = threadIdx.x; t < TIME; t += THREADS) {
        if (!counts[(u64)row * TIME + t]) continue;
        float c[N], value[N];
        take(value, own + ((u64)blockIdx.x * TIME + t) * OWN_STEP);
        for (int j = 0; j < N; j++) c[j] = value[j];
        visit(c, value);
    }
    int last = min(*filled, SLOTS);
    for (int m = threadIdx.x; m < last; m += THREADS) {
        float c[N], value[N];
        take(c, memory + (u64)m * MEMORY_STEP);
        take(value, values + (u64)m * VALUE_STEP);
        visit(c, value);
    }

    // One maximum for all; a thread that has seen nothing has nothing to shrink.
    float top = warp_max(found.top);
    if (lane == 0) tops[warp] = top;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) top = larger(top, tops[w]);
    if (found.top != -infinity()) found.shrink(top);
    found.total = warp_sum(found.total);
    for (int j = 0; j < N; j++) found.mix[j] = warp_sum(found.mix[j]);
    if (lane == 0) {
        for (int j = 0; j < N; j++) parts[warp][j] = found.mix[j];
        parts[warp][N] = found.total;
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    float place[N], total = 0.0f;
    for (int w = 0; w < WARPS; w++) total += parts[w][N];
    for (int j = 0; j < N; j++) {
        float sum = 0.0f;
        for (int w = 0; w < WARPS; w++) sum += parts[w][j];
        place[j] = 0.5f * (to_float(query[(u64)blockIdx.x * N + j]) + sum / total);
    }
    rotate(place, turns);
    float size = length(place, metric);
    given += (u64)blockIdx.x * GIVEN;
    given[0] = scale * size;
    given[1] = size;
    for (int j = 0; j < N; j++) given[2 + j] = place[j], given[2 + N + j] = scale * place[j] * place[j] / (2.0f * size);
}

// Over given [STEPS, ROWS, GIVEN], in the order of the steps.
extern "C" __global__ void __launch_bounds__(128) mean_of_steps(const float *given, float *energy, float *size, float *place, float *slope) {
    int i = blockIdx.x * 128 + threadIdx.x;
    if (i >= ROWS * GIVEN) return;
    float sum = 0.0f;
#pragma unroll 8
    for (int step = 0; step < STEPS; step++) sum += given[(u64)step * (ROWS * GIVEN) + i];
    sum /= (float)STEPS;
    int row = i / GIVEN, number = i % GIVEN;
    if (number == 0) energy[row] = sum;
    else if (number == 1) size[row] = sum;
    else if (number < 2 + N) place[row * N + number - 2] = sum;
    else slope[row * N + number - 2 - N] = sum;
}
