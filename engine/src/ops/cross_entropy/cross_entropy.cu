// logits [ROWS, CLASSES], targets [ROWS]; loss, lse [ROWS].
extern "C" __global__ void __launch_bounds__(BLOCK) cross_entropy(const T *logits, const int *targets, float *loss, float *lse) {
    u64 row = row_index();
    if (row >= (u64)ROWS) return; // a whole warp or block
    const T *x = logits + row * CLASSES;
    float l = log_sum_exp(x, lane_index());
    if (lane_index() != 0) return;
    int target = targets[row];
    loss[row] = loss_of(target, is_class(target) ? to_float(x[target]) : 0.0f, l);
    lse[row] = l;
}
