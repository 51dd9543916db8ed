// With g the gradient of the probabilities p, dx = p (g - sum of p g). That of the weights w_j = p_j / s adds (dw_j - sum of w dw) / s to
// the g of the chosen; that of w_j = p_j, not NORMALIZED, adds dw_j.
#if BY_P && BY_W
#define GRADIENTS const float *dp, const float *dw
#elif BY_P
#define GRADIENTS const float *dp
#else
#define GRADIENTS const float *dw
#endif
extern "C" __global__ void route_grad(const float *p, const float *weights, const int *chosen, GRADIENTS, float *dx) {
    int lane = row_lane();
    u64 row = (u64)blockIdx.x * (256 / LANES) + row_group();
    bool real = row < (u64)ROWS; // threads without a row take part in the shuffles
    float v[EACH], g[EACH], along = 0.0f;
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
        bool in = real && i * LANES + lane < EXPERTS;
        u64 at = row * EXPERTS + i * LANES + lane;
        v[i] = in ? p[at] : 0.0f;
        g[i] = 0.0f;
#if BY_P
        if (in) g[i] = dp[at];
#endif
    }
#if BY_W
    if (real) {
        float mean = 0.0f, total = 0.0f;
        for (int j = 0; j < K; j++) {
            mean += weights[row * K + j] * dw[row * K + j];
            total += p[row * EXPERTS + chosen[row * K + j]];
        }
        for (int j = 0; j < K; j++) {
            int expert = chosen[row * K + j];
            float d = NORMALIZED ? (dw[row * K + j] - mean) / total : dw[row * K + j];
            #pragma unroll
            for (int i = 0; i < EACH; i++)
                if (i * LANES + lane == expert) g[i] += d;
        }
    }
#endif
    #pragma unroll
    for (int i = 0; i < EACH; i++) along += v[i] * g[i];
    along = row_sum(along);
    #pragma unroll
    for (int i = 0; i < EACH; i++)
        if (real && i * LANES + lane < EXPERTS) dx[row * EXPERTS + i * LANES + lane] = v[i] * (g[i] - along);
}
