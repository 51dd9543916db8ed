// Which rows of which weights a tile of eight is, and where its columns of y are.
constexpr int SIZES[] = {COLUMNS}, FIRSTS[] = {FIRST}; // of each y: columns, and tiles before it

// The tile's matrix, that one's rows, and the first row of the tile. Past the last tile there are no rows.
template <class E> struct Place { E *at; int rows, row; };
template <class E, int COUNT> __device__ __forceinline__ Place<E> place(E *const (&all)[COUNT], int tile) {
    Place<E> p = {all[0], SIZES[0], tile * 8};
#pragma unroll
    for (int i = 1; i < COUNT; i++)
        if (tile >= FIRSTS[i]) p = {all[i], SIZES[i], (tile - FIRSTS[i]) * 8};
    if (tile >= ALL_TILES) p.rows = 0;
    return p;
}

__device__ __forceinline__ float low(u32 two) { return to_float(T{(unsigned short)two}); }
__device__ __forceinline__ float high(u32 two) { return to_float(T{(unsigned short)(two >> 16)}); }

// Of a norm's weights.
struct alignas(sizeof(TN) * 8 < 16 ? sizeof(TN) * 8 : 16) Eight { TN at[8]; };
