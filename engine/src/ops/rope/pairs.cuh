// x [ROWS = places * HEADS, D]; cos, sin [TABLE, D / 2]. LANES threads share a row: pack p of a thread is VEC pairs, and lies in two packs of
// elements. A thread has the same pairs of ITEMS heads of one place, which are rotated by the same angles.
const int HALF = D / 2, SLOTS = HEADS / ITEMS;
const u64 UNITS = (u64)ROWS / ITEMS;

__device__ __forceinline__ bool there(int p) { return row_start(p) < HALF; }
// Where the packs of p begin; behind the row, where there is no such pack.
__device__ __forceinline__ int column(int p, int which) {
    int at = row_start(p);
    if (!there(p)) return D;
    return ADJACENT ? 2 * at + which * VEC : at + which * HALF;
}

template <typename E> struct Pair { Pack<E> at[2]; };

template <bool PACKED, typename E> __device__ __forceinline__ Pair<E> read_pair(const E *row, int p) {
    return {read<PACKED>(row + column(p, 0)), read<PACKED>(row + column(p, 1))};
}

// The places of pair i's two elements among those of its packs.
__device__ __forceinline__ constexpr int one(int i) { return ADJACENT ? 2 * i : i; }
__device__ __forceinline__ constexpr int other(int i) { return ADJACENT ? 2 * i + 1 : i + VEC; }
template <typename E> __device__ __forceinline__ float get(const Pair<E> &v, int k) { return to_float(v.at[k / VEC].at[k % VEC]); }
template <typename E> __device__ __forceinline__ void put(float f, Pair<E> &v, int k) { from_float(f, v.at[k / VEC].at[k % VEC]); }

// The rows of a thread: heads of the unit's place.
struct Unit {
    AT place, slot;
    bool real;

    __device__ __forceinline__ Unit(u64 unit) : real(unit < UNITS) {
        AT at = real ? unit : UNITS - 1; // no such row: its results are not used, but its threads take part in the shuffles
        place = at / SLOTS;
        slot = at % SLOTS;
    }
    __device__ __forceinline__ u64 row(int k) const { return (u64)place * HEADS + slot + k * SLOTS; }
    __device__ __forceinline__ u64 angle(int p) const { return (u64)(place % TABLE) * HALF + row_start(p); }
};
