// x [ROWS = places * HEADS, D]; cos, sin [TABLE, D / 2]. A row belongs to LANES threads, a thread's packs start at row_start(p).
const int HALF = D / 2;

// A pack, and what its elements are paired with. Half a row away that is another thread's pack, and read a second time: it is in the
// first-level cache, and a load is less work than a shuffle for each element.
template <typename E> struct Pair { Pack<E> own, other; };

template <bool PACKED, typename E> __device__ __forceinline__ Pair<E> read_pair(const E *row, int at) {
    Pair<E> r;
    r.own = read<PACKED>(row + at);
    if (ADJACENT)
        for (int i = 0; i < VEC; i++) r.other.at[i] = r.own.at[i ^ 1];
    else r.other = read<PACKED>(row + (at < HALF ? at + HALF : at - HALF));
    return r;
}

// Turned, an element is own * cos + other * sin: the sine has its sign here.
struct Angles { float cos[VEC], sin[VEC]; };

template <bool PACKED> __device__ __forceinline__ Angles angles(const C *cos, const C *sin, AT row, int at) {
    u64 table = (u64)(row / HEADS % TABLE) * HALF;
    Angles r;
    if (ADJACENT) {
        for (int i = 0; i < VEC; i++) {
            r.cos[i] = to_float(cos[table + at / 2 + i / 2]);
            r.sin[i] = to_float(sin[table + at / 2 + i / 2]) * (i % 2 == 0 ? -1.0f : 1.0f);
        }
    } else {
        table += at < HALF ? at : at - HALF;
        Pack<C> c = read<PACKED>(cos + table), s = read<PACKED>(sin + table);
        for (int i = 0; i < VEC; i++) {
            r.cos[i] = to_float(c.at[i]);
            r.sin[i] = at < HALF ? -to_float(s.at[i]) : to_float(s.at[i]);
        }
    }
    return r;
}
