// Replaces g, the gradient with respect to the layer norm y of a row, by that with respect to the row.
__device__ __forceinline__ void grad_row(float (&g)[PACKS][VEC], const float (&y)[PACKS][VEC], float rstd) {
    float mean = 0.0f, along = 0.0f;
    EACH(p) for (int i = 0; i < VEC; i++) mean += g[p][i], along += g[p][i] * y[p][i];
    mean = row_sum(mean) / D;
    along = row_sum(along) / D;
    EACH(p) for (int i = 0; i < VEC; i++) g[p][i] = rstd * (g[p][i] - mean - y[p][i] * along);
}

// Through y = norm(s), s = norm(x + z), z = norm(o), from the gradients of s and y, those that are there.
template <bool PACKED>
__device__ __forceinline__ void rows(const T *z, const T *s, const T *y, const float *rstd, const S *by_s, const G *by_y, T *dx, T *d_o) {
    u64 row = (u64)blockIdx.x * GROUPS + row_group();
    bool real = row < (u64)ROWS;
    if (!real) row = ROWS - 1; // no such row: its results are not used, but its threads take part in the shuffles
    u64 at = row * D;
    // All loads are issued before the first is used.
    float g[PACKS][VEC] = {}, more[PACKS][VEC] = {}, of_y[PACKS][VEC] = {}, of_s[PACKS][VEC] = {}, of_z[PACKS][VEC] = {};
    if (BY_Y) fetch<PACKED>(g, by_y + at), fetch<PACKED>(of_y, y + at);
    if (BY_S) fetch<PACKED>(more, by_s + at);
    fetch<PACKED>(of_s, s + at);
    fetch<PACKED>(of_z, z + at);
    if (BY_Y) grad_row(g, of_y, rstd[2ull * ROWS + row]);
    if (BY_S) EACH(p) for (int i = 0; i < VEC; i++) g[p][i] += more[p][i];
    grad_row(g, of_s, rstd[ROWS + row]);
    if (real) leave_row(dx + at, g);
    grad_row(g, of_z, rstd[row]);
    if (real) leave_row(d_o + at, g);
}

extern "C" __global__ void __launch_bounds__(LANES * GROUPS)
residual_norm_grad(const T *z, const T *s, const T *y, const float *rstd, const S *by_s, const G *by_y, T *dx, T *d_o) {
    bool aligned = packed(z) && packed(s) && packed(y) && (!BY_S || packed(by_s)) && (!BY_Y || packed(by_y));
    if (aligned) rows<true>(z, s, y, rstd, by_s, by_y, dx, d_o);
    else rows<false>(z, s, y, rstd, by_s, by_y, dx, d_o);
}
