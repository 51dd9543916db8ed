// One chunk of logits, rows STRIDE apart. losses [ROWS] = weight * loss; the logits become the gradient of their sum. With ORDERED, targets and
// weights are those of row order[r], and of none where that is -1.
extern "C" __global__ void __launch_bounds__(BLOCK)
linear_ce_rows(T *logits, const int *order, const int *targets, const W *weights, float *losses) {
    u64 row = row_index();
    if (row >= (u64)ROWS) return; // a whole warp or block
    int lane = lane_index(), from = ORDERED ? order[row] : row, target = from >= 0 ? targets[from] : -1;
    T *x = logits + row * STRIDE;
    float weight = from >= 0 ? to_float(weights[ONE_WEIGHT ? 0 : from]) : 0.0f;
    float picked = is_class(target) ? to_float(x[target]) : 0.0f;
    float lse = log_sum_exp(x, lane);
    if (lane == 0) losses[row] = loss_of(target, picked, lse) * weight;
    if (!GRADIENT) return;
    // The target's logit is read before its lane overwrites it.
    if (BY_WARP) __syncwarp();
    else __syncthreads();
    gradient(x, lane, target, lse, weight);
}
