// kept = chosen [SLOTS], but of the slots of an expert only the PLACES with the largest weights keep it, of equal ones the earlier; the others get EXPERTS, which
// stands for none. loads [EXPERTS]: how many slots an expert had. Of kept are only the OWN slots from FIRST on. One block an expert; it writes its own slots,
// and block 0 those without an expert.
// Radix selection of the last weight that has a place, byte by byte from the highest, as in top_k.cu. Thread t has slots t, t + THREADS, ..

// Unsigned integers in the order of the floats, both zeros being the same; 0 for slots of other experts.
__device__ __forceinline__ u32 key_of(const int *chosen, const float *weights, int slot) {
    if (slot >= SLOTS || chosen[slot] != (int)blockIdx.x) return 0;
    u32 bits = __float_as_uint(weights[slot]);
    if (bits == 0x80000000u) bits = 0;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

extern "C" __global__ void __launch_bounds__(THREADS) expert_capacity(const int *chosen, const float *weights, int *kept, float *loads) {
    __shared__ int counts[256];
    __shared__ u32 found;
    __shared__ int left, total;
    __shared__ int warp_equal[32];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    u32 keys[KEEP ? EACH : 1];
    const auto key_at = [&](int i) { return KEEP ? keys[KEEP ? i : 0] : key_of(chosen, weights, i * THREADS + tid); };
    if (tid == 0) total = 0;
    __syncthreads();
    int own = 0;
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
        u32 k = key_of(chosen, weights, i * THREADS + tid);
        if (KEEP) keys[KEEP ? i : 0] = k;
        own += k != 0;
    }
    atomicAdd(&total, own); // integers: any order
    __syncthreads();
    if (tid == 0) loads[blockIdx.x] = (float)total;

    // Slots with a larger key have a place, and the first `need` of those that have this key.
    u32 key = 0, known = 0;
    int need = 0;
    if (total > PLACES) {
        need = PLACES;
        for (int shift = 24; shift >= 0; shift -= 8) {
            for (int i = tid; i < 256; i += THREADS) counts[i] = 0;
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < EACH; i++) {
                u32 k = key_at(i);
                if (k && (k & known) == key) atomicAdd(&counts[(k >> shift) & 255], 1);
            }
            __syncthreads();
            if (warp == 0) {
                // Eight bytes a lane, the highest first.
                int here = 0;
                for (int i = 0; i < 8; i++) here += counts[255 - 8 * lane - i];
                int upto = here;
                for (int i = 1; i < 32; i <<= 1) {
                    int other = __shfl_up_sync(0xffffffffu, upto, i);
                    if (lane >= i) upto += other;
                }
                int above = upto - here;
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
    }

    int equal_before = 0;
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
        int slot = i * THREADS + tid;
        u32 k = key_at(i);
        bool has = k > key;
        if (key) { // the same in all threads
            bool equal = k == key;
            u32 votes = __ballot_sync(0xffffffffu, equal);
            if (lane == 0) warp_equal[warp] = __popc(votes);
            __syncthreads();
            int before = equal_before + __popc(votes & ((1u << lane) - 1));
            for (int w = 0; w < THREADS / 32; w++) {
                if (w < warp) before += warp_equal[w];
                equal_before += warp_equal[w];
            }
            has = has || (equal && before < need);
            __syncthreads();
        }
        if (slot < FIRST || slot >= FIRST + OWN) continue;
        if (k) kept[slot - FIRST] = has ? (int)blockIdx.x : EXPERTS;
        else if (blockIdx.x == 0 && chosen[slot] == EXPERTS) kept[slot - FIRST] = EXPERTS;
    }
}
