// One chunk of logits, rows STRIDE apart. losses [ROWS] = weight * loss; the logits become the gradient of their sum.
extern "C" __global__ void __launch_bounds__(BLOCK)
linear_ce_rows(T *logits, const int *targets, const W *weights, float *losses) {
    u64 row = row_index();
    if (row >= (u64)ROWS) return; // a whole warp or block
    int lane = lane_index(), target = targets[row];
    T *x = logits + row * STRIDE;
    float weight = to_float(weights[ONE_WEIGHT ? 0 : row]);
    float picked = is_class(target) ? to_float(x[target]) : 0.0f;
    float lse = log_sum_exp(x, lane);
    if (lane == 0) losses[row] = loss_of(target, picked, lse) * weight;
    if (!GRADIENT) return;
    // The target's logit is read before its lane overwrites it.
    if (BY_WARP) __syncwarp();
    else __syncthreads();
    gradient(x, lane, target, lse, weight);
}
