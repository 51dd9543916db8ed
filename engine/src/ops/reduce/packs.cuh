// VEC neighbouring elements, moved at once: at most 16 bytes.
template <typename E> struct alignas(sizeof(E) * VEC) Pack { E at[VEC]; };

// Outputs start at a pack; a view of something else need not, and is then read element by element.
template <typename E> __device__ __forceinline__ bool packed(const E *p) { return VEC == 1 || ((u64)p & (sizeof(Pack<E>) - 1)) == 0; }

template <bool PACKED, typename E> __device__ __forceinline__ Pack<E> read(const E *p) {
    if constexpr (PACKED) {
        return *(const Pack<E> *)p;
    } else {
        Pack<E> r;
        for (int i = 0; i < VEC; i++) r.at[i] = p[i];
        return r;
    }
}
template <typename E> __device__ __forceinline__ void write(E *p, const Pack<E> &v) { *(Pack<E> *)p = v; }
