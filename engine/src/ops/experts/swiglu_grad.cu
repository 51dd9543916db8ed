// With y = w silu(gate) up of each row of h (gate [D], up [D]): dgate = w dy up silu'(gate), dup = w dy silu(gate), and of the row's slot
// dw = the sum of dy silu(gate) up. With SOME, for the rows of EXPERTS experts from offsets[0] on; dw of the others is 0.
template <bool PACKED>
__device__ __forceinline__ void back(const T *h, const T *dy, const int *order, const float *weights, const int *offsets, T *dh, float *dw) {
    u64 i = (u64)blockIdx.x * GROUPS + row_group();
    bool real = i < (u64)N; // threads without a row take part in the shuffles
    float dot = 0.0f;
    int slot = real ? order[i] : 0;
    if (real && (!SOME || ((int)i >= offsets[0] && (int)i < offsets[EXPERTS]))) {
        float w = weights[slot];
        h += i * (2 * D);
        dh += i * (2 * D);
        dy += i * D;
        for (int first = 0; first < PACKS; first += UNROLL) {
            Pack<T> gate[UNROLL], up[UNROLL], d[UNROLL];
            #pragma unroll
            for (int p = 0; p < UNROLL; p++) {
                int at = row_start(first + p);
                if (at >= D) continue;
                gate[p] = read<PACKED>(h + at);
                up[p] = read<PACKED>(h + D + at);
                d[p] = read<PACKED>(dy + at);
            }
            #pragma unroll
            for (int p = 0; p < UNROLL; p++) {
                int at = row_start(first + p);
                if (at >= D) continue;
                for (int e = 0; e < VEC; e++) {
                    float g = to_float(gate[p].at[e]), u = to_float(up[p].at[e]), v = to_float(d[p].at[e]);
                    float s = 1.0f / (1.0f + __expf(-g)), silu = g * s;
                    dot += v * silu * u;
                    from_float(w * v * u * (s + silu * (1.0f - s)), gate[p].at[e]);
                    from_float(w * v * silu, up[p].at[e]);
                }
                write(dh + at, gate[p]);
                write(dh + D + at, up[p]);
            }
        }
    }
    dot = row_sum(dot);
    if (real && row_lane() == 0) dw[slot] = dot;
}

extern "C" __global__ void __launch_bounds__(LANES * GROUPS)
grouped_swiglu_grad(const T *h, const T *dy, const int *order, const float *weights, const int *offsets, T *dh, float *dw) {
    if (packed(h) && packed(dy)) back<true>(h, dy, order, weights, offsets, dh, dw);
    else back<false>(h, dy, order, weights, offsets, dh, dw);
}
