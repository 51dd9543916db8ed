// Attention of TIME new queries, at past, past + 1, .., over the keys of a cache, new ones included; those are written into it.
// q [BATCH, TIME, KV * GROUP, D], k and v [BATCH, TIME, KV, D], caches [BATCH, CAPACITY, KV, D].
//
// A block has CHUNK keys of one key head and R rows: queries of its group's heads, the heads of a query side by side. LANES threads own a key, PER packs of it
// each, with running maximum, sum and output for every row; a warp has SIDE keys at once, and reads UNROLL times as many before it looks at the
// first. The parts of the block's threads are put together in the end, those of the SPLITS blocks by attention_combine.

#if MASKED // query i sees key j only where i <= until[j]
#define UNTIL const int *until,
#else
#define UNTIL
constexpr const int *until = nullptr;
#endif

const int SIDE = 32 / LANES, DIMS = PER * VEC, ROWS = TIME * GROUP, TILES = (ROWS + R - 1) / R, SPLITS = (CAPACITY + CHUNK - 1) / CHUNK;

__device__ __forceinline__ float power_of_two(float v) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
// exp2(x - most) where nothing may have been seen yet.
__device__ __forceinline__ float share(float x, float most) { return power_of_two(x - (most == -infinity() ? 0.0f : most)); }

__device__ __forceinline__ int held(int past) { return past < 0 ? 0 : past > CAPACITY - TIME ? CAPACITY - TIME : past; }

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
attention_decode(const TQ *q, const T *k, const T *v, const int *past_at, UNTIL T *k_cache, T *v_cache, TQ *y, float *partial) {
    extern __shared__ float shared[]; // [WARPS, R, D + 2]: outputs, maximum, sum
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = lane % LANES;
    const int split = blockIdx.x % SPLITS, tile = blockIdx.x / SPLITS % TILES, kv = blockIdx.x / (SPLITS * TILES) % KV;
    const u64 b = blockIdx.x / (SPLITS * TILES * KV);
    const int past = held(*past_at), first = split * CHUNK, end = past + TIME < first + CHUNK ? past + TIME : first + CHUNK;
    if (first >= end) return;

    // In shared memory each pack has a place; a pack past the end of a head is read as zeros.
    float query[R][DIMS], out[R][DIMS] = {}, most[R], sum[R] = {};
#pragma unroll
    for (int r = 0; r < R; r++) {
        most[r] = -infinity();
        int row = tile * R + r < ROWS ? tile * R + r : ROWS - 1;
        const TQ *from = q + (b * TIME + row / GROUP) * Q_ROW + (kv * GROUP + row % GROUP) * D;
#pragma unroll
        for (int p = 0; p < PER; p++) {
            int d = (p * LANES + own) * VEC;
#pragma unroll
            for (int e = 0; e < VEC; e++) query[r][p * VEC + e] = d < D ? to_float(from[d + e]) * SCALE_2 : 0.0f;
        }
    }

    for (int j0 = first + warp * UNROLL * SIDE; j0 < end; j0 += WARPS * UNROLL * SIDE) {
        Pack<T> keys[UNROLL][PER], values[UNROLL][PER];
        int last[UNROLL]; // the last query that sees the key
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            int j = j0 + u * SIDE + lane / LANES;
            last[u] = j >= end ? -1 : MASKED ? until[b * CAPACITY + j] : CAPACITY;
            if (j >= end) j = end - 1;
            bool fresh = j >= past;
            u64 at = (b * CAPACITY + j) * KV * D + kv * D, new_row = b * TIME + (j - past);
            const T *key = fresh ? k + new_row * K_ROW + kv * D : k_cache + at;
            const T *value = fresh ? v + new_row * V_ROW + kv * D : v_cache + at;
#pragma unroll
            for (int p = 0; p < PER; p++) {
                int d = (p * LANES + own) * VEC;
                if (d < D) {
                    keys[u][p] = read<true>(key + d), values[u][p] = read<true>(value + d);
                } else {
#pragma unroll
                    for (int e = 0; e < VEC; e++) from_float(0.0f, keys[u][p].at[e]), from_float(0.0f, values[u][p].at[e]);
                }
            }
        }
        float score[UNROLL][R];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            int j = j0 + u * SIDE + lane / LANES;
            if (tile == 0 && j >= past && j < end) {
                u64 at = (b * CAPACITY + j) * KV * D + kv * D;
#pragma unroll
                for (int p = 0; p < PER; p++) {
                    int d = (p * LANES + own) * VEC;
                    if (d < D) write(k_cache + at + d, keys[u][p]), write(v_cache + at + d, values[u][p]);
                }
            }
#pragma unroll
            for (int r = 0; r < R; r++) {
                float s = 0.0f;
#pragma unroll
                for (int i = 0; i < DIMS; i++) s += query[r][i] * to_float(keys[u][i / VEC].at[i % VEC]);
#pragma unroll
                for (int mask = LANES / 2; mask > 0; mask /= 2) s += __shfl_xor_sync(0xffffffffu, s, mask);
                int i = past + (tile * R + r) / GROUP;
                score[u][r] = j <= i && i <= last[u] ? s : -infinity();
            }
        }
#pragma unroll
        for (int r = 0; r < R; r++) {
            float high = most[r];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) high = fmaxf(high, score[u][r]);
            float shrink = share(most[r], high);
            most[r] = high;
            sum[r] *= shrink;
#pragma unroll
            for (int i = 0; i < DIMS; i++) out[r][i] *= shrink;
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                float p = share(score[u][r], high);
                sum[r] += p;
#pragma unroll
                for (int i = 0; i < DIMS; i++) out[r][i] += p * to_float(values[u][i / VEC].at[i % VEC]);
            }
        }
    }

#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int mask = LANES; mask < 32; mask *= 2) {
            float high = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], mask)), shrink = share(most[r], high);
            most[r] = high;
            sum[r] *= shrink;
            sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], mask);
#pragma unroll
            for (int i = 0; i < DIMS; i++) {
                out[r][i] *= shrink;
                out[r][i] += __shfl_xor_sync(0xffffffffu, out[r][i], mask);
            }
        }
        float *mine = shared + (warp * R + r) * (D + 2);
        if (lane < LANES) {
#pragma unroll
            for (int i = 0; i < DIMS; i++) {
                int d = (i / VEC * LANES + own) * VEC + i % VEC;
                if (d < D) mine[d] = out[r][i];
            }
        }
        if (lane == 0) mine[D] = most[r], mine[D + 1] = sum[r];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < R * D; i += 32 * WARPS) {
        int r = i / D, d = i % D, row = tile * R + r;
        if (row >= ROWS) break;
        float high = -infinity(), total = 0.0f, o = 0.0f;
        for (int w = 0; w < WARPS; w++) high = fmaxf(high, shared[(w * R + r) * (D + 2) + D]);
        for (int w = 0; w < WARPS; w++) {
            const float *part = shared + (w * R + r) * (D + 2);
            float weight = share(part[D], high);
            o += weight * part[d];
            total += weight * part[D + 1];
        }
        u64 head = (b * TIME + row / GROUP) * (KV * GROUP) + kv * GROUP + row % GROUP;
        if (SPLITS == 1) {
            from_float(total > 0.0f ? o / total : 0.0f, y[head * D + d]);
        } else {
            float *to = partial + (head * SPLITS + split) * (D + 2);
            to[d] = o;
            if (d == 0) to[D] = high, to[D + 1] = total;
        }
    }
}

// y = the parts of as many splits as there are keys for. A warp for each head of each query.
extern "C" __global__ void __launch_bounds__(256) attention_combine(const int *past_at, const float *partial, TQ *y) {
    u64 head = (u64)blockIdx.x * 8 + threadIdx.x / 32;
    if (head >= (u64)BATCH * TIME * KV * GROUP) return;
    int lane = threadIdx.x % 32, splits = (held(*past_at) + TIME + CHUNK - 1) / CHUNK;
    partial += head * SPLITS * (D + 2);
    float high = -infinity(), total = 0.0f, out[(D + 31) / 32] = {};
    for (int s = lane; s < splits; s += 32) high = fmaxf(high, partial[s * (D + 2) + D]);
    high = warp_max(high);
    for (int s = lane; s < splits; s += 32) total += partial[s * (D + 2) + D + 1] * share(partial[s * (D + 2) + D], high);
    total = warp_sum(total);
#pragma unroll 4
    for (int s = 0; s < splits; s++) {
        const float *part = partial + s * (D + 2);
        float weight = share(part[D], high);
#pragma unroll
        for (int i = 0; i < (D + 31) / 32; i++)
            if (i * 32 + lane < D) out[i] += weight * part[i * 32 + lane];
    }
#pragma unroll
    for (int i = 0; i < (D + 31) / 32; i++)
        if (i * 32 + lane < D) from_float(total > 0.0f ? out[i] / total : 0.0f, y[head * D + i * 32 + lane]);
}
