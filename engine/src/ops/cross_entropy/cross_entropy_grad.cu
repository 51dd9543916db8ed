// dx [ROWS, CLASSES] holds the logits, and their gradient afterwards; targets, lse, dy [ROWS].
extern "C" __global__ void __launch_bounds__(BLOCK)
cross_entropy_grad(const T *, const int *targets, const L *lse, const D *dy, T *dx) {
    u64 row = row_index();
    if (row >= (u64)ROWS) return;
    gradient(dx + row * CLASSES, lane_index(), targets[row], to_float(lse[row]), to_float(dy[row]));
}
