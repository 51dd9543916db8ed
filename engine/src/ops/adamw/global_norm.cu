// parts[b] = the sum of squares of the PIECE elements that block b has, of one of several tensors.
__device__ const u32 starts[] = {STARTS}; // first block of each tensor
__device__ const u64 sizes[] = {SIZES};
const int WIDE = 16 / sizeof(T);
struct alignas(16) Pack { T v[WIDE]; };

extern "C" __global__ void global_norm_parts(POINTERS, float *parts) {
    const int tensor = owner(starts);
    const T *x = nullptr;
    switch (tensor) { PICK }
    u64 from = (u64)(blockIdx.x - starts[tensor]) * PIECE, left = sizes[tensor] - from;
    int n = left < PIECE ? (int)left : PIECE;
    x += from;
    // A view may be unaligned: then it is read element by element.
    int packs = ((u64)x & 15) == 0 ? n / WIDE : 0;
    float sum = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        Pack q = ((const Pack *)x)[i];
#pragma unroll
        for (int e = 0; e < WIDE; e++) sum += to_float(q.v[e]) * to_float(q.v[e]);
    }
    for (int i = packs * WIDE + threadIdx.x; i < n; i += blockDim.x) sum += to_float(x[i]) * to_float(x[i]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}
