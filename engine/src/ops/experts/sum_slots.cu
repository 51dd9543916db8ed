// y[token] = the sum of its TOP rows, in f32 and in the order of its slots: of those that belong to EXPERTS experts from offsets[0] on. The others have not been
// written: they belong to other ranks' experts, or to none.
extern "C" __global__ void sum_slots(const T *rows, const int *position, const int *offsets, T *y) {
    AT at = (AT)blockIdx.x * 256 + threadIdx.x, token = at / (D / VEC);
    if (token >= (AT)TOKENS) return;
    int column = at % (D / VEC) * VEC;
    Pack<T> v[TOP];
    bool own[TOP];
    #pragma unroll
    for (int j = 0; j < TOP; j++) {
        int row = position[token * TOP + j];
        own[j] = row >= offsets[0] && row < offsets[EXPERTS];
        if (own[j]) v[j] = read<true>(rows + (u64)row * D + column);
    }
    Pack<T> out;
    #pragma unroll
    for (int e = 0; e < VEC; e++) {
        float sum = 0.0f;
        for (int j = 0; j < TOP; j++) sum += own[j] ? to_float(v[j].at[e]) : 0.0f;
        from_float(sum, out.at[e]);
    }
    write(y + (u64)at * VEC, out);
}
