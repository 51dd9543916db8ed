// The tensor that this block belongs to: tensor i has the blocks from starts[i] on.
template <int COUNTED> __device__ __forceinline__ int owner(const u32 (&starts)[COUNTED]) {
    int first = 0;
    for (int past = COUNTED; past - first > 1;) {
        const int middle = (first + past) / 2;
        if (blockIdx.x >= starts[middle]) first = middle;
        else past = middle;
    }
    return first;
}
