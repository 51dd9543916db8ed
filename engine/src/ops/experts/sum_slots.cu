// y[token] = the sum of its TOP rows, in f32 and in the order of its slots.
extern "C" __global__ void sum_slots(const T *rows, const int *position, T *y) {
    AT at = (AT)blockIdx.x * 256 + threadIdx.x, token = at / (D / VEC);
    if (token >= (AT)TOKENS) return;
    int column = at % (D / VEC) * VEC;
    Pack<T> v[TOP];
    #pragma unroll
    for (int j = 0; j < TOP; j++) v[j] = read<true>(rows + (u64)position[token * TOP + j] * D + column);
    Pack<T> out;
    #pragma unroll
    for (int e = 0; e < VEC; e++) {
        float sum = 0.0f;
        for (int j = 0; j < TOP; j++) sum += to_float(v[j].at[e]);
        from_float(sum, out.at[e]);
    }
    write(y + (u64)at * VEC, out);
}
