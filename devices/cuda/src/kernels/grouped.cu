// Products of rows sorted by expert with each expert's weights, on tensor cores; and in 32 bits for
// tests and small models. The sizes of groups are read from the device: nothing waits for the host.

#define TILE_M 128
#define TILE_N 128
#define TILE_K 32
#define THREADS 256

// A tile of the result: expert, first row m, first column n, and the expert's rows [begin, end).
struct Tile {
    i64 expert, m, n, begin, end;
    bool none;
};

// The tile of M rows that blockIdx.x stands for, and of N columns: tiles never cross experts.
template <int M, int N> DEVICE Tile tile_of_rows(const u32* offsets, int experts) {
    Tile t;
    i64 left = blockIdx.x;
    t.n = (i64)blockIdx.y * N;
    for (t.expert = 0; t.expert < experts; t.expert++) {
        t.begin = offsets[t.expert];
        t.end = offsets[t.expert + 1];
        i64 tiles = (t.end - t.begin + M - 1) / M;
        if (left < tiles) break;
        left -= tiles;
    }
    t.none = t.expert == experts;
    t.m = t.begin + left * M;
    return t;
}

// acc += A · B over `length` of the contracted dim. A: [m][k], or [k][m] when transposed; B: [n][k], or
// [k][n] when by k. Eight warps in two rows of four, 64×32 each.
template <bool A_TRANSPOSED, bool B_BY_K>
DEVICE void multiply(float (&acc)[4][4][4], bf16* shared, const bf16* a, i64 a_stride, i64 a_rest,
                     const bf16* b, i64 b_stride, i64 b_rest, i64 length) {
    const int A_PITCH = A_TRANSPOSED ? TILE_M + 8 : TILE_K + 8;
    const int B_PITCH = B_BY_K ? TILE_N + 8 : TILE_K + 8;
    const int A_SIZE = (A_TRANSPOSED ? TILE_K : TILE_M) * A_PITCH;
    const int B_SIZE = (B_BY_K ? TILE_K : TILE_N) * B_PITCH;
    int warp = threadIdx.x >> 5, row = (warp >> 2) * 64, column = (warp & 3) * 32;
    bf16* as = shared;
    bf16* bs = shared + 2 * A_SIZE;
    i64 steps = (length + TILE_K - 1) / TILE_K;
    auto fetch = [&](i64 step) {
        i64 k = step * TILE_K, rest = length - k;
        if (A_TRANSPOSED)
            copy_tile<TILE_K, TILE_M, THREADS>(as + (step & 1) * A_SIZE, A_PITCH, a + k * a_stride, a_stride, rest, a_rest);
        else
            copy_tile<TILE_M, TILE_K, THREADS>(as + (step & 1) * A_SIZE, A_PITCH, a + k, a_stride, a_rest, rest);
        if (B_BY_K)
            copy_tile<TILE_K, TILE_N, THREADS>(bs + (step & 1) * B_SIZE, B_PITCH, b + k * b_stride, b_stride, rest, b_rest);
        else
            copy_tile<TILE_N, TILE_K, THREADS>(bs + (step & 1) * B_SIZE, B_PITCH, b + k, b_stride, b_rest, rest);
        copies_commit();
    };
    if (steps > 0) fetch(0);
    for (i64 step = 0; step < steps; step++) {
        next_tile(step + 1 < steps, [&] { fetch(step + 1); });
        const bf16 *at = as + (step & 1) * A_SIZE, *bt = bs + (step & 1) * B_SIZE;
#pragma unroll
        for (int k = 0; k < TILE_K; k += 16) {
            u32 af[4][4], bf[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) fragment_a<A_TRANSPOSED>(af[i], at, A_PITCH, row + i * 16, k);
#pragma unroll
            for (int j = 0; j < 2; j++) fragment_b<B_BY_K>(bf[j], bt, B_PITCH, k, column + j * 16);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    mma(acc[i][j], af[i], bf[j / 2][j % 2 * 2], bf[j / 2][j % 2 * 2 + 1]);
        }
        __syncthreads();
    }
}

// Calls put(row, column, first, second) for every pair of neighbouring results of the tile.
template <class Put> DEVICE void each_pair(float (&acc)[4][4][4], Put put) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int row = (warp >> 2) * 64 + lane / 4, column = (warp & 3) * 32 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            put(row + i * 16, column + j * 8, acc[i][j][0], acc[i][j][1]);
            put(row + i * 16 + 8, column + j * 8, acc[i][j][2], acc[i][j][3]);
        }
}

template <bool BACKWARD>
DEVICE void rows_product(bf16* out, const bf16* x, const bf16* weights, const u32* offsets,
                         int experts, i64 columns, i64 length) {
    DYNAMIC_SHARED(shared);
    Tile t = tile_of_rows<TILE_M, TILE_N>(offsets, experts);
    if (t.none) return;
    float acc[4][4][4] = {};
    const bf16* w = weights + t.expert * columns * length;
    // Forward: weights [columns][length]; backward: [length][columns].
    if (BACKWARD)
        multiply<false, true>(acc, (bf16*)shared, x + t.m * length, length, t.end - t.m, w + t.n,
                              columns, columns - t.n, length);
    else
        multiply<false, false>(acc, (bf16*)shared, x + t.m * length, length, t.end - t.m,
                               w + t.n * length, length, columns - t.n, length);
    each_pair(acc, [&](int row, int column, float first, float second) {
        if (t.m + row >= t.end || t.n + column >= columns) return;
        bf16* to = out + (t.m + row) * columns + t.n + column;
        if (columns % 2 == 0) {
            *(u32*)to = pack_bf16(first, second);
        } else {
            to[0] = rounded<bf16>(first);
            if (t.n + column + 1 < columns) to[1] = rounded<bf16>(second);
        }
    });
}

// out = x · wᵀ per expert: x [rows, length], w [experts][columns][length].
BOUNDED_KERNEL(THREADS) grouped_forward_bf16(bf16* out, const bf16* x, const bf16* weights, const u32* offsets,
                            int experts, i64 columns, i64 length) {
    rows_product<false>(out, x, weights, offsets, experts, columns, length);
}

// out = x · w per expert: x [rows, length], w [experts][length][columns].
BOUNDED_KERNEL(THREADS) grouped_backward_bf16(bf16* out, const bf16* x, const bf16* weights, const u32* offsets,
                             int experts, i64 columns, i64 length) {
    rows_product<true>(out, x, weights, offsets, experts, columns, length);
}

// gradient[expert][m][n] += Σ over the expert's rows of dy[row][m] · x[row][n].
BOUNDED_KERNEL(THREADS) grouped_weight_bf16(float* gradient, const bf16* dy, const bf16* x, const u32* offsets, i64 ms,
                           i64 ns) {
    DYNAMIC_SHARED(shared);
    i64 expert = blockIdx.z, m = (i64)blockIdx.x * TILE_M, n = (i64)blockIdx.y * TILE_N;
    i64 begin = offsets[expert], rows = offsets[expert + 1] - begin;
    if (rows == 0) return;
    float acc[4][4][4] = {};
    multiply<true, true>(acc, (bf16*)shared, dy + begin * ms + m, ms, ms - m, x + begin * ns + n, ns,
                         ns - n, rows);
    each_pair(acc, [&](int row, int column, float first, float second) {
        if (m + row >= ms || n + column >= ns) return;
        float* to = gradient + (expert * ms + m + row) * ns + n + column;
        to[0] += first;
        if (n + column + 1 < ns) to[1] += second;
    });
}

// The same in 32 bits: a thread per element of the result, in blocks of 16 × 16.
#define SMALL 16

template <bool BACKWARD>
DEVICE void rows_product_small(float* out, const float* x, const float* weights, const u32* offsets,
                               int experts, i64 columns, i64 length) {
    __shared__ float xs[SMALL][SMALL + 1], ws[SMALL][SMALL + 1];
    int down = threadIdx.x / SMALL, across = threadIdx.x % SMALL;
    Tile t = tile_of_rows<SMALL, SMALL>(offsets, experts);
    if (t.none) return;
    i64 row = t.m + down, column = t.n + across;
    const float* w = weights + t.expert * columns * length;
    float sum = 0.0f;
    for (i64 k = 0; k < length; k += SMALL) {
        xs[down][across] = row < t.end && k + across < length ? x[row * length + k + across] : 0.0f;
        i64 at = BACKWARD ? (k + down) * columns + column : column * length + k + down;
        ws[down][across] = column < columns && k + down < length ? w[at] : 0.0f;
        __syncthreads();
        for (int i = 0; i < SMALL; i++) sum += xs[down][i] * ws[i][across];
        __syncthreads();
    }
    if (row < t.end && column < columns) out[row * columns + column] = sum;
}

KERNEL grouped_forward_f32(float* out, const float* x, const float* weights, const u32* offsets,
                           int experts, i64 columns, i64 length) {
    rows_product_small<false>(out, x, weights, offsets, experts, columns, length);
}

KERNEL grouped_backward_f32(float* out, const float* x, const float* weights, const u32* offsets,
                            int experts, i64 columns, i64 length) {
    rows_product_small<true>(out, x, weights, offsets, experts, columns, length);
}

KERNEL grouped_weight_f32(float* gradient, const float* dy, const float* x, const u32* offsets, i64 ms,
                          i64 ns) {
    i64 m = (i64)blockIdx.x * SMALL + threadIdx.x / SMALL, expert = blockIdx.z;
    i64 n = (i64)blockIdx.y * SMALL + threadIdx.x % SMALL;
    if (m >= ms || n >= ns) return;
    float sum = 0.0f;
    for (i64 row = offsets[expert]; row < offsets[expert + 1]; row++) sum += dy[row * ms + m] * x[row * ns + n];
    gradient[(expert * ms + m) * ns + n] += sum;
}
