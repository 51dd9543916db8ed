// rows [BATCH / EACH, TIME, WIDE] of keys and values go to rows past, past + 1, .. of caches [BATCH, CAPACITY, WIDE], each sequence to EACH consecutive ones. K_ROW
// and V_ROW: distance between rows, in elements. past is clamped to what fits.
extern "C" __global__ void __launch_bounds__(256)
cache_write(const int *past_at, const TK *k, const TV *v, CK *k_cache, CV *v_cache) {
    u64 i = ((u64)blockIdx.x * 256 + threadIdx.x) * VEC;
    if (i >= (u64)BATCH * TIME * WIDE) return;
    int past = *past_at < 0 ? 0 : *past_at > CAPACITY - TIME ? CAPACITY - TIME : *past_at;
    u64 row = i / WIDE, column = i % WIDE, to = (row / TIME * CAPACITY + past + row % TIME) * WIDE + column;
    row = row / (TIME * EACH) * TIME + row % TIME;
    Pack<TK> key = read<true>(k + row * K_ROW + column);
    Pack<TV> value = read<true>(v + row * V_ROW + column);
    Pack<CK> key_out;
    Pack<CV> value_out;
#pragma unroll
    for (int j = 0; j < VEC; j++) from_float(to_float(key.at[j]), key_out.at[j]), from_float(to_float(value.at[j]), value_out.at[j]);
    write(k_cache + to, key_out);
    write(v_cache + to, value_out);
}
