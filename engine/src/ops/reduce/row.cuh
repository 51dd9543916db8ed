// A row of D elements, shared by LANES threads: pack p of a thread starts at row_start(p).
__device__ __forceinline__ int row_start(int p) { return (p * LANES + row_lane()) * VEC; }

// The first `limit` elements of a row. Short rows stay in registers; long ones are read again each time.
template <bool PACKED, typename E> struct Row {
    const E *from;
    Pack<E> kept[KEEP ? PACKS : 1];

    __device__ __forceinline__ Row(const E *row, int limit) : from(row) {
        if (!KEEP) return;
        #pragma unroll UNROLL
        for (int p = 0; p < PACKS; p++)
            if (row_start(p) < limit) kept[KEEP ? p : 0] = read<PACKED>(from + row_start(p));
    }
    __device__ __forceinline__ Pack<E> operator[](int p) const { return KEEP ? kept[KEEP ? p : 0] : read<PACKED>(from + row_start(p)); }
};
