// The order in which persistent blocks take work items (pieces). A stream is what the pieces that read the same keys belong to: a head of an example, or
// several heads that share their keys. With causality a piece with a higher number sees more keys.
struct Turn {
    u32 stream, piece;
    bool live; // false if there are no more for this block
    bool hole; // nothing in this round, but perhaps in the next
};

// The longest pieces of all streams first. Every other round is reversed, so that all blocks have about the same amount of work.
__device__ __forceinline__ Turn longest_first(u32 streams, u32 pieces, u32 blocks, u32 block, u32 round) {
    u32 n = round * blocks + (round % 2 ? blocks - 1 - block : block);
    return Turn{n % streams, pieces - 1 - n / streams, n < streams * pieces, false};
}

// One stream after another: blocks that run at once read the keys of few streams, which stay in L2. A block takes pairs of a long and a short piece, all with
// the same amount of work; if the number of pieces is odd, a stream's longest piece is alone, and a hole in the place of the short one. The last rounds, at
// least one of pairs, are taken longest first again, so that all blocks end at about the same time.
__device__ __forceinline__ Turn in_pairs(u32 streams, u32 pieces, u32 blocks, u32 block, u32 round) {
    const u32 odd = pieces % 2, half = (pieces + 1) / 2, pairs = streams * half;
    const u32 rounds = pairs / blocks > 1 ? pairs / blocks - 1 : 0; // of pairs
    if (round < 2 * rounds) {
        u32 n = round / 2 * blocks + block, stream = n / half, pair = n % half;
        if (round % 2 == 0) return Turn{stream, pieces - 1 - pair, true, false};
        return Turn{stream, pair - odd, true, odd && pair == 0};
    }
    // What is left: of stream `first` the pairs from `begun` on, of those behind it all, of which pairs below `begun` come first.
    const u32 done = rounds * blocks, rest = pairs - done, first = done / half, begun = done % half, others = streams - first - 1;
    const u32 early = begun * others, holes = odd * (others + (begun == 0));
    u32 r = round - 2 * rounds, n = r * blocks + (r % 2 ? blocks - 1 - block : block);
    const bool is_long = n < rest;
    u32 i = is_long ? n : 2 * rest - 1 - n, stream, pair;
    if (i < early) pair = i / (others > 0 ? others : 1), stream = first + 1 + i % (others > 0 ? others : 1);
    else pair = begun + (i - early) / (others + 1), stream = first + (i - early) % (others + 1);
    return Turn{stream, is_long ? pieces - 1 - pair : pair - odd, n < 2 * rest - holes, false};
}

