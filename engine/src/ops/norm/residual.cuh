// A row as this thread holds it: PACKS packs of VEC columns, those past D being 0.
#define EACH(p) _Pragma("unroll") for (int p = 0; p < PACKS; p++) if (row_start(p) < D)

template <bool PACKED, typename E> __device__ __forceinline__ void fetch(float (&v)[PACKS][VEC], const E *row) {
    EACH(p) {
        Pack<E> a = read<PACKED>(row + row_start(p));
        for (int i = 0; i < VEC; i++) v[p][i] = to_float(a.at[i]);
    }
}

template <typename E> __device__ __forceinline__ void leave_row(E *row, const float (&v)[PACKS][VEC]) {
    EACH(p) {
        Pack<E> a;
        for (int i = 0; i < VEC; i++) from_float(v[p][i], a.at[i]);
        write(row + row_start(p), a);
    }
}
