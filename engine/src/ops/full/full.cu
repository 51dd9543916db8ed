// N elements; one thread a pack, and one for each element behind the last.
extern "C" __global__ void full(T *y) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 packs = N / VEC;
    T v;
    SET;
    if (i < packs) {
        Pack<T> all;
        for (int k = 0; k < VEC; k++) all.at[k] = v;
        write(y + i * VEC, all);
    } else if (i - packs < N % VEC) {
        y[packs * VEC + (i - packs)] = v;
    }
}
