// Replaces v by its layer norm; returns 1 / sqrt(variance + EPS).
__device__ __forceinline__ float norm_row(float (&v)[PACKS][VEC]) {
    float mean = 0.0f, square = 0.0f;
    EACH(p) for (int i = 0; i < VEC; i++) mean += v[p][i];
    mean = row_sum(mean) / D;
    EACH(p) for (int i = 0; i < VEC; i++) v[p][i] -= mean, square += v[p][i] * v[p][i];
    float r = 1.0f / sqrtf(row_sum(square) / D + EPS);
    EACH(p) for (int i = 0; i < VEC; i++) v[p][i] *= r;
    return r;
}

// z = norm(o), s = norm(x + z), y = norm(s), row by row. rstd [3, ROWS].
template <bool PACKED> __device__ __forceinline__ void rows(const T *x, const T *o, T *z, T *s, T *y, float *rstd) {
    u64 row = (u64)blockIdx.x * GROUPS + row_group();
    bool real = row < (u64)ROWS;
    if (!real) row = ROWS - 1; // no such row: its results are not used, but its threads take part in the shuffles
    bool first = real && row_lane() == 0;
    float v[PACKS][VEC] = {}, more[PACKS][VEC] = {};
    fetch<PACKED>(v, o + row * D);
    fetch<PACKED>(more, x + row * D);
    float r = norm_row(v);
    if (first) rstd[row] = r;
    if (real) leave_row(z + row * D, v);
    EACH(p) for (int i = 0; i < VEC; i++) v[p][i] += more[p][i];
    r = norm_row(v);
    if (first) rstd[ROWS + row] = r;
    if (real) leave_row(s + row * D, v);
    r = norm_row(v);
    if (first) rstd[2ull * ROWS + row] = r;
    if (real) leave_row(y + row * D, v);
}

extern "C" __global__ void __launch_bounds__(LANES * GROUPS) residual_norm(const T *x, const T *o, T *z, T *s, T *y, float *rstd) {
    if (packed(x) && packed(o)) rows<true>(x, o, z, s, y, rstd);
    else rows<false>(x, o, z, s, y, rstd);
}
