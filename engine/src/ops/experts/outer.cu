// y [EXPERTS, M, N] = the sum over an expert's rows of left[row] right[row], left [.., M] and right [.., N] by row or by token (BY_TOKEN).
// Stream-K: the steps along K of all tiles of all experts are divided evenly among the blocks, whatever the experts' loads. A tile that one block has alone
// is written to y; partial sums of tiles that several blocks share are added in order by `outer_join`.
#define TILES_ACROSS ((N + TN - 1) / TN)
#define TILES ((M + TM - 1) / TM * TILES_ACROSS) // of one expert

__device__ __forceinline__ u32 steps_of(u32 rows) { return (rows + STEP - 1) / STEP; }

// All steps of all tiles.
__device__ __forceinline__ u32 all_steps(const int *offsets) {
    u32 all = 0;
    for (u32 some = 0; some < EXPERTS; some += 32) {
        u32 e = some + threadIdx.x % 32, upto;
        all += count_up(e < EXPERTS ? steps_of(offsets[e + 1] - offsets[e]) * TILES : 0, upto);
    }
    return all;
}
__device__ __forceinline__ u32 blocks_for(u32 steps) { return steps < BLOCKS ? steps : BLOCKS; }
__device__ __forceinline__ u32 first_step(u32 block, u32 steps) { return (u64)block * steps / blocks_for(steps); }

// Step `step` of `steps` of a tile.
struct Part {
    u32 expert, first, end, m, n, step, steps; // rows from `first` on, at this step
};
__device__ __forceinline__ Part find_part(const int *offsets, u32 number) {
    Found f;
    find(offsets, number, [](u32 rows) { return steps_of(rows) * TILES; }, f);
    u32 steps = steps_of(f.end - f.first), tile = f.number / steps, step = f.number % steps;
    return {f.expert, f.first + step * STEP, f.end, tile / TILES_ACROSS * TM, tile % TILES_ACROSS * TN, step, steps};
}

#if JOIN
// Each block joins 16 rows of a tile.
extern "C" __global__ void __launch_bounds__(THREADS) outer_join(const int *offsets, const float *parts, float *y) {
    u32 tile = blockIdx.x / (TM / 16), expert = tile / TILES, all = all_steps(offsets), before = 0;
    tile %= TILES;
    for (u32 e = 0; e < expert; e++) before += steps_of(offsets[e + 1] - offsets[e]) * TILES;
    u32 steps = steps_of(offsets[expert + 1] - offsets[expert]), first = before + tile * steps;
    // Block b has the steps first_step(b) <= step < first_step(b + 1).
    const auto block_of = [&](u32 step) { return (u32)((((u64)step + 1) * blocks_for(all) - 1) / all); };
    u32 begin = 0, end = 0;
    if (steps > 0) {
        begin = block_of(first);
        end = block_of(first + steps - 1);
        if (begin == end) return; // written already
    }
    u32 m0 = tile / TILES_ACROSS * TM + blockIdx.x % (TM / 16) * 16, n0 = tile % TILES_ACROSS * TN;
    for (u32 i = threadIdx.x; i < 16 * TN / 4; i += THREADS) {
        u32 r = i / (TN / 4), n = i % (TN / 4) * 4;
        if (m0 + r >= M || n0 + n >= N) continue;
        u64 at = (u64)(blockIdx.x % (TM / 16) * 16 + r) * TN + n;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (steps > 0) sum = *(const float4 *)(parts + (u64)(2 * begin + 1) * (TM * TN) + at);
        for (u32 b = begin + 1; b <= end; b++) {
            float4 v = *(const float4 *)(parts + (u64)(2 * b) * (TM * TN) + at);
            sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
        }
        *(float4 *)(y + ((u64)expert * M + m0 + r) * N + n0 + n) = sum;
    }
}
#else
struct Source {
    const T *left, *right;
    const int *offsets, *order;
    // The step that is loaded next, and the slots of this thread's rows.
    u32 number, end;
    Part p;
    int slots[STEP / PASS];

    __device__ __forceinline__ void start(const T *of_left, const T *of_right, const int *of_offsets, const int *of_order, u32 from, u32 to) {
        left = of_left, right = of_right, offsets = of_offsets, order = of_order, number = from, end = to;
        if (number < end) begin();
    }
    __device__ __forceinline__ void begin() {
        p = find_part(offsets, number);
        look_up();
    }
    __device__ __forceinline__ void look_up() {
        if (LEFT_BY_TOKEN || RIGHT_BY_TOKEN)
#pragma unroll
            for (int i = 0; i < STEP / PASS; i++) slots[i] = p.first + own_row(i) < p.end ? order[p.first + own_row(i)] : 0;
    }
    __device__ __forceinline__ bool copy(char *stage) {
        if (number >= end) return false;
#pragma unroll
        for (int h = 0; h < STEP / PASS; h++) {
            u32 row = p.first + own_row(h), m = p.m + own_piece(), n = p.n + own_piece();
            bool in = row < p.end;
            const T *l = left + (u64)(LEFT_BY_TOKEN ? slots[h] / TOP : row) * M + m, *r = right + (u64)(RIGHT_BY_TOKEN ? slots[h] / TOP : row) * N + n;
#pragma unroll
            for (int i = 0; i < TM / 64; i++) copy16(own_place(stage, STEP / PASS * i + h), l + i * 64, in && (M % TM == 0 || m + i * 64 < M));
#pragma unroll
            for (int i = 0; i < TN / 64; i++) copy16(own_place(stage + A_BYTES, STEP / PASS * i + h), r + i * 64, in && (N % TN == 0 || n + i * 64 < N));
        }
        number++;
        p.first += STEP;
        if (number >= end) return true;
        if (++p.step == p.steps) begin();
        else look_up();
        return true;
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK, 1) grouped_outer(const T *left, const T *right, const int *offsets, const int *order, float *y, float *parts) {
    u32 all = all_steps(offsets), number = 0, end = 0;
    if (blockIdx.x < blocks_for(all)) {
        number = first_step(blockIdx.x, all);
        end = first_step(blockIdx.x + 1, all);
    }
    Source source;
    Ring<Source> ring(source);
    if (ring.copying()) source.start(left, right, offsets, order, number, end);
    if (ring.copied()) return;
    while (number < end) {
        Part p = find_part(offsets, number);
        u32 steps = p.steps - p.step < end - number ? p.steps - p.step : end - number;
        Sums c = {};
        ring.add(c, steps);
        ring.finish(c);
        bool whole = steps == p.steps;
        float *to = whole ? y + (u64)p.expert * M * N + (u64)p.m * N + p.n : parts + (u64)(2 * blockIdx.x + (p.step == 0)) * (TM * TN);
        u32 pitch = whole ? N : TN, down = whole ? M - p.m : TM, across = whole ? N - p.n : TN;
#pragma unroll
        for (int i = 0; i < 2 * DOWN; i++) {
            u32 m = warp_row() + 8 * i + threadIdx.x % 32 / 4;
#pragma unroll
            for (int j = 0; j < ACROSS; j++) {
                u32 n = warp_column() + 8 * j + threadIdx.x % 4 * 2;
                if (m < down && n < across) *(float2 *)(to + (u64)m * pitch + n) = make_float2(c[i / 2][j][i % 2 * 2], c[i / 2][j][i % 2 * 2 + 1]);
            }
        }
        number += steps;
    }
}
#endif
