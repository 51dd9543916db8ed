// A row that is normed: x, or x + b, where b is one row for all (TERM 1) or has rows of its own (TERM 2).
template <bool PACKED> struct Summed {
    Row<PACKED, T> x;
    Row<PACKED, B> own;
    const B *shared;

    __device__ __forceinline__ Summed(const T *x, const B *b, u64 row)
        : x(x + row * D, D), own(TERM == 2 ? b + row * D : b, TERM == 2 ? D : 0), shared(b) {}

    // Pack p, not rounded.
    __device__ __forceinline__ void get(int p, float *v) const {
        Pack<T> a = x[p];
        for (int i = 0; i < VEC; i++) v[i] = to_float(a.at[i]);
        if (TERM == 0) return;
        Pack<B> c;
        if (TERM == 2) c = own[p];
        else c = read<PACKED>(shared + row_start(p));
        for (int i = 0; i < VEC; i++) v[i] += to_float(c.at[i]);
    }
};
