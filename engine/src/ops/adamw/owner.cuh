// Of several tensors, each with blocks of its own from starts[i] on, the one that this block belongs to.
template <int COUNTED> __device__ __forceinline__ int owner(const u32 (&starts)[COUNTED]) {
    int first = 0;
    for (int past = COUNTED; past - first > 1;) {
        const int middle = (first + past) / 2;
        if (blockIdx.x >= starts[middle]) first = middle;
        else past = middle;
    }
    return first;
}
