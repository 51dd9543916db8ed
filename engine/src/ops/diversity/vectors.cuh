// Vectors of D elements, each shared by LANES threads, PER packs a thread. Elements past the end count as zeros.
struct Vector {
    float at[PER * VEC];

    __device__ __forceinline__ void load(const T *from) {
#pragma unroll
        for (int p = 0; p < PER; p++) {
            int d = (p * LANES + row_lane()) * VEC;
            Pack<T> pack;
            if (d < D) pack = read<true>(from + d);
#pragma unroll
            for (int j = 0; j < VEC; j++) at[p * VEC + j] = d < D ? to_float(pack.at[j]) : 0.0f;
        }
    }
    __device__ __forceinline__ float dot(const Vector &other) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PER * VEC; i++) sum += at[i] * other.at[i];
        return row_sum(sum);
    }
};

__device__ __forceinline__ float inverse_length(float square) { return 1.0f / fmaxf(sqrtf(square), 1e-12f); }
