// Softmax of each row of x [ROWS, EXPERTS]; the K largest, the earlier of equal ones first, and their probabilities, with NORMALIZED over their sum. LANES
// threads own a row: expert i * LANES + lane is number i of a thread.
extern "C" __global__ void route(const T *x, float *p, float *weights, int *chosen) {
    int lane = row_lane();
    u64 row = (u64)blockIdx.x * (256 / LANES) + row_group();
    bool real = row < (u64)ROWS; // threads without a row take part in the shuffles
    float v[EACH], e[EACH], top = -infinity(), total = 0.0f;
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
        int expert = i * LANES + lane;
        v[i] = real && expert < EXPERTS ? to_float(x[row * EXPERTS + expert]) : -infinity();
        top = larger(top, v[i]);
    }
    top = row_max(top);
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
        e[i] = real && i * LANES + lane < EXPERTS ? expf(v[i] - top) : 0.0f;
        total += e[i];
    }
    float scale = 1.0f / row_sum(total);
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
        e[i] *= scale;
        if (real && i * LANES + lane < EXPERTS) p[row * EXPERTS + i * LANES + lane] = e[i];
    }

    // Compare logits, which are exact, not probabilities. EXPERTS stands for none.
    u32 taken = 0;
    float sum = 0.0f;
    for (int j = 0; j < K; j++) {
        float best = -infinity(), best_p = 0.0f;
        int who = EXPERTS;
        #pragma unroll
        for (int i = 0; i < EACH; i++) {
            int expert = i * LANES + lane;
            if (expert < EXPERTS && !(taken >> i & 1) && (who == EXPERTS || v[i] > best)) {
                best = v[i];
                best_p = e[i];
                who = expert;
            }
        }
        for (int i = LANES / 2; i > 0; i >>= 1) {
            float other = __shfl_xor_sync(0xffffffffu, best, i), other_p = __shfl_xor_sync(0xffffffffu, best_p, i);
            int whose = __shfl_xor_sync(0xffffffffu, who, i);
            // If neither is larger (both may be NaN), the earlier one.
            if (who == EXPERTS || (whose != EXPERTS && (other > best || (!(best > other) && whose < who)))) {
                best = other;
                best_p = other_p;
                who = whose;
            }
        }
        if (who % LANES == lane) taken |= 1u << who / LANES;
        sum += best_p;
        if (real && lane == 0) {
            chosen[row * K + j] = who;
            weights[row * K + j] = best_p;
        }
    }
    if (NORMALIZED && real && lane == 0)
        for (int j = 0; j < K; j++) weights[row * K + j] *= 1.0f / sum;
}
