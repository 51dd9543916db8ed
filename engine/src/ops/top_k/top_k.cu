// Positions of the K largest of each row of x [rows, N], ascending: y [rows, K]. One block a row.
// Radix selection of the K-th largest key, byte by byte from the highest: a histogram of the next byte shows in which bin it lies. Then all larger keys are
// taken, and the first `need` equal ones.

// Unsigned integers in the order of the floats; both zeros are the same.
__device__ __forceinline__ u32 key_of(T v) {
    u32 bits = __float_as_uint(to_float(v));
    if (bits == 0x80000000u) bits = 0;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

extern "C" __global__ void __launch_bounds__(THREADS) top_k(const T *x, int *y) {
    __shared__ u32 kept[KEEP ? N : 1];
    __shared__ int counts[256];
    __shared__ u32 found;
    __shared__ int left;
    __shared__ int warp_larger[32], warp_equal[32];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    x += (u64)blockIdx.x * N;
    y += (u64)blockIdx.x * K;
    if (KEEP)
        for (int i = tid; i < N; i += THREADS) kept[i] = key_of(x[i]);

    u32 key = 0, known = 0; // the bytes of the K-th largest that are known
    int need = K;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = tid; i < 256; i += THREADS) counts[i] = 0;
        __syncthreads();
        for (int i = tid; i < N; i += THREADS) {
            u32 k = KEEP ? kept[KEEP ? i : 0] : key_of(x[i]);
            if ((k & known) == key) atomicAdd(&counts[(k >> shift) & 255], 1);
        }
        __syncthreads();
        if (warp == 0) {
            // Eight bytes a lane, the highest first.
            int own = 0;
            for (int i = 0; i < 8; i++) own += counts[255 - 8 * lane - i];
            int upto = own;
            for (int i = 1; i < 32; i <<= 1) {
                int other = __shfl_up_sync(0xffffffffu, upto, i);
                if (lane >= i) upto += other;
            }
            int above = upto - own;
            if (above < need && need <= upto) {
                int byte = 255 - 8 * lane;
                while (above + counts[byte] < need) above += counts[byte--];
                found = byte;
                left = need - above;
            }
        }
        __syncthreads();
        key |= found << shift;
        known |= 255u << shift;
        need = left;
    }

    int larger_before = 0, equal_before = 0;
    for (int chunk = 0; chunk < N; chunk += THREADS) {
        int i = chunk + tid;
        u32 k = i >= N ? 0 : KEEP ? kept[KEEP ? i : 0] : key_of(x[i]);
        bool is_larger = i < N && k > key, is_equal = i < N && k == key;
        u32 larger_votes = __ballot_sync(0xffffffffu, is_larger), equal_votes = __ballot_sync(0xffffffffu, is_equal);
        if (lane == 0) {
            warp_larger[warp] = __popc(larger_votes);
            warp_equal[warp] = __popc(equal_votes);
        }
        __syncthreads();
        u32 lower = (1u << lane) - 1;
        int larger_here = larger_before + __popc(larger_votes & lower), equal_here = equal_before + __popc(equal_votes & lower);
        for (int w = 0; w < THREADS / 32; w++) {
            if (w < warp) {
                larger_here += warp_larger[w];
                equal_here += warp_equal[w];
            }
            larger_before += warp_larger[w];
            equal_before += warp_equal[w];
        }
        if (is_larger || (is_equal && equal_here < need)) y[larger_here + (equal_here < need ? equal_here : need)] = i;
        __syncthreads();
    }
}
