// Four elements at once, where they lie on a multiple of their size.
template <typename E> struct alignas(4 * sizeof(E)) Four { E v[4]; };
template <typename E> __device__ __forceinline__ bool by_four(const E *x) { return (u64)x % sizeof(Four<E>) == 0; }

// Elements i to i + 4 of n: all at once where `fours` says that x lies so. What is past the end is read as zeros, and not written.
template <typename E> __device__ __forceinline__ Four<E> read_four(const E *x, int i, int n, bool fours) {
    if (fours && i + 4 <= n) return *(const Four<E> *)(x + i);
    Four<E> q = {};
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (i + e < n) q.v[e] = x[i + e];
    return q;
}
template <typename E> __device__ __forceinline__ void write_four(const Four<E> &q, E *x, int i, int n, bool fours) {
    if (fours && i + 4 <= n) {
        *(Four<E> *)(x + i) = q;
        return;
    }
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (i + e < n) x[i + e] = q.v[e];
}
