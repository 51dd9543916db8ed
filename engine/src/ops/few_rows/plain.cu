// The same for every type and size: a warp for each column of y, with one sum for each row of x.
constexpr int SIZES[] = {COLUMNS}, FIRSTS[] = {FIRST}; // of each y: columns, and columns before it

extern "C" __global__ void __launch_bounds__(256) few_rows_plain(const T *x, const TN *norm, const TR *more, WEIGHT_ARGS, OUT_ARGS) {
    __shared__ float rstd[ROWS];
    const T *const weights[] = {WEIGHT_LIST};
    OUT *const ys[] = {OUT_LIST};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int r = warp; r < ROWS && NORM; r += 8) {
        float square = 0.0f;
        for (int k = lane; k < K; k += 32) square += to_float(x[(u64)r * X_ROW + k]) * to_float(x[(u64)r * X_ROW + k]);
        square = warp_sum(square);
        if (lane == 0) rstd[r] = rsqrtf(square * (1.0f / K) + EPS);
    }
    __syncthreads();

    const int column = blockIdx.x * 8 + warp;
    if (column >= ALL_COLUMNS) return;
    const T *w = weights[0];
    OUT *y = ys[0];
    int n = column, columns = SIZES[0];
#pragma unroll
    for (int i = 1; i < PARTS; i++)
        if (column >= FIRSTS[i]) w = weights[i], y = ys[i], n = column - FIRSTS[i], columns = SIZES[i];
    float sum[ROWS] = {}, up[ROWS] = {};
    for (int k = lane; k < K; k += 32) {
        float a = to_float(w[(u64)n * K + k]), b = PAIR ? to_float(weights[PAIR][(u64)n * K + k]) : 0.0f, scale = NORM ? to_float(norm[k]) : 1.0f;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float v = to_float(x[(u64)r * X_ROW + k]) * scale;
            if (NORM) v *= rstd[r];
            sum[r] += v * a;
            if (PAIR) up[r] += v * b;
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float v = warp_sum(sum[r]);
        if (PAIR) v = v / (1.0f + __expf(-v)) * warp_sum(up[r]);
        if (lane != 0) continue;
        if (ADD) v += to_float(more[(u64)r * columns + n]);
        from_float(v, y[(u64)r * columns + n]);
    }
}
