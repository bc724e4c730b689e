// Attention in bf16 on tensor cores, without storing the matrix of scores (Dao 2023,
// FlashAttention-2). The macros HEAD (queries and keys) and VALUE (values) are the padded head
// dimensions. Backward computes the scores twice, once for the gradients of keys and values and
// once for those of queries, so that the order of every sum is fixed.

#define THREADS 128
#define PAD 8

// acc[16 × N] += A[16 rows from row m on] · B[N rows]ᵀ, rows of DIM elements.
template <int N, int DIM>
DEVICE void by_rows(float (&acc)[N / 8][4], const bf16* a, int m, const bf16* b) {
#pragma unroll
    for (int k = 0; k < DIM; k += 16) {
        u32 af[4];
        fragment_a<false>(af, a, DIM + PAD, m, k);
#pragma unroll
        for (int n = 0; n < N; n += 16) {
            u32 bf[4];
            fragment_b<false>(bf, b, DIM + PAD, k, n);
            mma(acc[n / 8], af, bf[0], bf[1]);
            mma(acc[n / 8 + 1], af, bf[2], bf[3]);
        }
    }
}

// acc[16 × DIM] += P[16 × N] · B[N rows of DIM], with p in the layout of an mma accumulator.
template <int N, int DIM>
DEVICE void add_weighted(float (&acc)[DIM / 8][4], const float (&p)[N / 8][4], const bf16* b) {
#pragma unroll
    for (int k = 0; k < N; k += 16) {
        u32 af[4] = {pack_bf16(p[k / 8][0], p[k / 8][1]), pack_bf16(p[k / 8][2], p[k / 8][3]),
                     pack_bf16(p[k / 8 + 1][0], p[k / 8 + 1][1]),
                     pack_bf16(p[k / 8 + 1][2], p[k / 8 + 1][3])};
#pragma unroll
        for (int n = 0; n < DIM; n += 16) {
            u32 bf[4];
            fragment_b<true>(bf, b, DIM + PAD, k, n);
            mma(acc[n / 8], af, bf[0], bf[1]);
            mma(acc[n / 8 + 1], af, bf[2], bf[3]);
        }
    }
}

// Writes an accumulator's 16 rows, `stride` apart; times0 and times1 scale a lane's two rows.
template <int DIM>
DEVICE void write_rows(bf16* out, i64 stride, i64 rows, i64 dim, const float (&acc)[DIM / 8][4],
                       float times0, float times1) {
    int lane = threadIdx.x & 31;
    i64 row = lane / 4;
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) {
        i64 c = n * 8 + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float times = half ? times1 : times0;
            bf16* to = out + (row + half * 8) * stride + c;
            if (row + half * 8 >= rows) continue;
            if (c < dim) to[0] = rounded<bf16>(acc[n][half * 2] * times);
            if (c + 1 < dim) to[1] = rounded<bf16>(acc[n][half * 2 + 1] * times);
        }
    }
}

// Lowest and highest position among COUNT queries from `row` on.
struct Span {
    int low, high;
};

template <int COUNT> DEVICE Span span(const u32* positions, i64 row, i64 rows) {
    Span s = {0x7fffffff, -1};
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < COUNT; i += 32) {
        if (row + i + lane >= rows) continue;
        int position = (int)positions[row + i + lane];
        s.low = min(s.low, position);
        s.high = max(s.high, position);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        s.low = min(s.low, __shfl_xor_sync(0xffffffffu, s.low, step));
        s.high = max(s.high, __shfl_xor_sync(0xffffffffu, s.high, step));
    }
    return s;
}

#define FORWARD_QUERIES 64
#define FORWARD_KEYS 64

BOUNDED_KERNEL(THREADS) attention_forward_bf16(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v,
                              const u32* positions, Attention s) {
    DYNAMIC_SHARED(memory);
    const int N = FORWARD_KEYS;
    bf16* qs = (bf16*)memory;
    bf16* ks = qs + FORWARD_QUERIES * (HEAD + PAD);
    bf16* vs = ks + 2 * N * (HEAD + PAD);
    i64 tile = gridDim.x - 1 - blockIdx.x, row0 = tile * FORWARD_QUERIES, head = blockIdx.y, b = blockIdx.z;
    i64 kv = head / (s.heads / s.kv_heads), q_stride = s.heads * s.qk_dim;
    i64 k_stride = s.kv_heads * s.qk_dim, v_stride = s.kv_heads * s.v_dim;
    const bf16* keys = k + b * s.kv_len * k_stride + kv * s.qk_dim;
    const bf16* values = v + b * s.kv_len * v_stride + kv * s.v_dim;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    Span seen = span<FORWARD_QUERIES>(positions, row0, s.q_len);
    i64 first = seen.low - s.window + 1 > 0 ? (seen.low - s.window + 1) / N : 0, last = seen.high / N;
    auto fetch = [&](i64 j) {
        i64 at = j * N;
        copy_tile<N, HEAD, THREADS>(ks + (j & 1) * N * (HEAD + PAD), HEAD + PAD, keys + at * k_stride,
                                    k_stride, s.kv_len - at, s.qk_dim);
        copy_tile<N, VALUE, THREADS>(vs + (j & 1) * N * (VALUE + PAD), VALUE + PAD,
                                     values + at * v_stride, v_stride, s.kv_len - at, s.v_dim);
        copies_commit();
    };
    copy_tile<FORWARD_QUERIES, HEAD, THREADS>(qs, HEAD + PAD,
                                              q + (b * s.q_len + row0) * q_stride + head * s.qk_dim,
                                              q_stride, s.q_len - row0, s.qk_dim);
    fetch(first);
    i64 row[2] = {row0 + warp * 16 + lane / 4, row0 + warp * 16 + lane / 4 + 8}, position[2];
#pragma unroll
    for (int i = 0; i < 2; i++) position[i] = row[i] < s.q_len ? (i64)positions[row[i]] : -1;
    // With a cap or slopes, scores are computed tile by tile in log2 units, and scale is 1.
    bool changed = is_changed(s);
    const bf16* sinks = (const bf16*)s.sinks;
    float scale = changed ? 1.0f : s.scale * LOG2_E, slope = slope_of(s, head);
    float sink = sinks ? as_float(sinks[head]) * LOG2_E / scale : -INFINITY;
    // Four lanes share a query: one of them counts the sink.
    float once = sinks && lane % 4 == 0 ? 1.0f : 0.0f;
    float largest[2] = {sink, sink}, total[2] = {once, once};
    float acc[VALUE / 8][4] = {};
    for (i64 j = first; j <= last; j++) {
        next_tile(j < last, [&] { fetch(j + 1); });
        float p[N / 8][4] = {};
        by_rows<N, HEAD>(p, qs, warp * 16, ks + (j & 1) * N * (HEAD + PAD));
        float top[2] = {largest[0], largest[1]};
        bool whole = j * N + N - 1 <= seen.low && j * N > seen.high - s.window;
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                i64 key = j * N + n * 8 + lane % 4 * 2 + e % 2;
                if (changed) p[n][e] = score(s, p[n][e], slope, position[e / 2], key);
                if (!whole && !sees(s, position[e / 2], key)) p[n][e] = -INFINITY;
                top[e / 2] = fmaxf(top[e / 2], p[n][e]);
            }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 1));
            top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 2));
            float shift = top[i] == -INFINITY ? 0.0f : top[i] * scale;
            float before = exp2f(largest[i] * scale - shift);
            largest[i] = top[i];
            total[i] *= before;
#pragma unroll
            for (int n = 0; n < VALUE / 8; n++) {
                acc[n][2 * i] *= before;
                acc[n][2 * i + 1] *= before;
            }
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int e = 2 * i; e < 2 * i + 2; e++) {
                    p[n][e] = exp2f(p[n][e] * scale - shift);
                    total[i] += p[n][e];
                    if (s.threshold) {
                        i64 key = j * N + n * 8 + lane % 4 * 2 + e % 2;
                        p[n][e] *= kept(s, b, head, position[i], key);
                    }
                }
        }
        add_weighted<N, VALUE>(acc, p, vs + (j & 1) * N * (VALUE + PAD));
        __syncthreads();
    }
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        total[i] += __shfl_xor_sync(0xffffffffu, total[i], 1);
        total[i] += __shfl_xor_sync(0xffffffffu, total[i], 2);
        inverse[i] = total[i] > 0.0f ? 1.0f / total[i] : 0.0f;
        if (lane % 4 == 0 && row[i] < s.q_len)
            lse[(b * s.heads + head) * s.q_len + row[i]] = (largest[i] * scale + log2f(total[i])) * LN_2;
    }
    i64 mine = row0 + warp * 16;
    write_rows<VALUE>(out + (b * s.q_len + mine) * s.heads * s.v_dim + head * s.v_dim, s.heads * s.v_dim,
                      s.q_len - mine, s.v_dim, acc, inverse[0], inverse[1]);
}

#define BACKWARD_KEYS 64
#define BACKWARD_QUERIES 32

// Gradients of 64 keys and values. Scores are transposed (keys × queries); a warp has 16 keys.
BOUNDED_KERNEL(THREADS) attention_key_backward_bf16(bf16* dk, bf16* dv, const bf16* d_out, const bf16* q, const bf16* k,
                                   const bf16* v, const float* lse, const float* delta,
                                   const u32* positions, Attention s) {
    DYNAMIC_SHARED(memory);
    const int M = BACKWARD_KEYS, N = BACKWARD_QUERIES;
    bf16* ks = (bf16*)memory;
    bf16* vs = ks + M * (HEAD + PAD);
    bf16* qs = vs + M * (VALUE + PAD);
    bf16* ds = qs + 2 * N * (HEAD + PAD);
    float* stats = (float*)(ds + 2 * N * (VALUE + PAD));
    i64 key0 = (i64)blockIdx.x * M, kv = blockIdx.y, b = blockIdx.z, group = s.heads / s.kv_heads;
    i64 k_stride = s.kv_heads * s.qk_dim, v_stride = s.kv_heads * s.v_dim;
    i64 q_stride = s.heads * s.qk_dim, o_stride = s.heads * s.v_dim;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    i64 tiles = (s.q_len + N - 1) / N, all = tiles * group;
    // The first tile of queries from t on, of any head of the group, that sees some of these keys.
    auto next = [&](i64 t) {
        for (; t < all; t++) {
            Span seen = span<N>(positions, t % tiles * N, s.q_len);
            if (seen.high >= key0 && seen.low - s.window < key0 + M - 1) break;
        }
        return t;
    };
    auto fetch = [&](i64 t, int buffer) {
        i64 row = t % tiles * N, head = kv * group + t / tiles, at = b * s.q_len + row;
        copy_tile<N, HEAD, THREADS>(qs + buffer * N * (HEAD + PAD), HEAD + PAD,
                                    q + at * q_stride + head * s.qk_dim, q_stride, s.q_len - row, s.qk_dim);
        copy_tile<N, VALUE, THREADS>(ds + buffer * N * (VALUE + PAD), VALUE + PAD,
                                     d_out + at * o_stride + head * s.v_dim, o_stride, s.q_len - row,
                                     s.v_dim);
        copies_commit();
        if (threadIdx.x < N) {
            i64 stat = (b * s.heads + head) * s.q_len + row + threadIdx.x;
            bool in = row + threadIdx.x < s.q_len;
            stats[buffer * 2 * N + threadIdx.x] = in ? lse[stat] * LOG2_E : 0.0f;
            stats[buffer * 2 * N + N + threadIdx.x] = in ? delta[stat] : 0.0f;
        }
    };
    copy_tile<M, HEAD, THREADS>(ks, HEAD + PAD, k + (b * s.kv_len + key0) * k_stride + kv * s.qk_dim,
                                k_stride, s.kv_len - key0, s.qk_dim);
    copy_tile<M, VALUE, THREADS>(vs, VALUE + PAD, v + (b * s.kv_len + key0) * v_stride + kv * s.v_dim,
                                 v_stride, s.kv_len - key0, s.v_dim);
    float d_keys[HEAD / 8][4] = {}, d_values[VALUE / 8][4] = {};
    i64 t = next(0);
    int buffer = 0;
    if (t < all) fetch(t, 0);
    while (t < all) {
        i64 after = next(t + 1);
        next_tile(after < all, [&] { fetch(after, buffer ^ 1); });
        const bf16* qt = qs + buffer * N * (HEAD + PAD);
        const bf16* dt = ds + buffer * N * (VALUE + PAD);
        const float* stat = stats + buffer * 2 * N;
        i64 row0 = t % tiles * N, head = kv * group + t / tiles;
        float p[N / 8][4] = {}, d[N / 8][4] = {}, slope = slope_of(s, head);
        by_rows<N, HEAD>(p, ks, warp * 16, qt);
        by_rows<N, VALUE>(d, vs, warp * 16, dt);
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int column = n * 8 + lane % 4 * 2 + e % 2;
                i64 key = key0 + warp * 16 + lane / 4 + e / 2 * 8, row = row0 + column;
                i64 position = row < s.q_len ? (i64)positions[row] : -1;
                bool visible = sees(s, position, key);
                float value = score(s, p[n][e], slope, position, key);
                float x = visible ? exp2f(value - stat[column]) : 0.0f;
                float keep = s.threshold && visible ? kept(s, b, head, position, key) : 1.0f;
                d[n][e] = x * (d[n][e] * keep - stat[N + column]) * growth(s, p[n][e]);
                p[n][e] = x * keep;
            }
        add_weighted<N, VALUE>(d_values, p, dt);
        add_weighted<N, HEAD>(d_keys, d, qt);
        __syncthreads();
        t = after;
        buffer ^= 1;
    }
    copies_wait<0>();
    i64 mine = key0 + warp * 16;
    write_rows<HEAD>(dk + (b * s.kv_len + mine) * k_stride + kv * s.qk_dim, k_stride, s.kv_len - mine,
                     s.qk_dim, d_keys, 1.0f, 1.0f);
    write_rows<VALUE>(dv + (b * s.kv_len + mine) * v_stride + kv * s.v_dim, v_stride, s.kv_len - mine,
                      s.v_dim, d_values, 1.0f, 1.0f);
}

// Gradients of 64 queries, 16 to a warp.
BOUNDED_KERNEL(THREADS) attention_query_backward_bf16(bf16* dq, const bf16* d_out, const bf16* q, const bf16* k,
                                     const bf16* v, const float* lse, const float* delta,
                                     const u32* positions, Attention s) {
    DYNAMIC_SHARED(memory);
    const int M = BACKWARD_KEYS, N = BACKWARD_QUERIES;
    bf16* qs = (bf16*)memory;
    bf16* ds = qs + M * (HEAD + PAD);
    bf16* ks = ds + M * (VALUE + PAD);
    bf16* vs = ks + 2 * N * (HEAD + PAD);
    i64 row0 = (i64)(gridDim.x - 1 - blockIdx.x) * M, head = blockIdx.y, b = blockIdx.z;
    i64 kv = head / (s.heads / s.kv_heads), q_stride = s.heads * s.qk_dim, o_stride = s.heads * s.v_dim;
    i64 k_stride = s.kv_heads * s.qk_dim, v_stride = s.kv_heads * s.v_dim;
    const bf16* keys = k + b * s.kv_len * k_stride + kv * s.qk_dim;
    const bf16* values = v + b * s.kv_len * v_stride + kv * s.v_dim;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    Span seen = span<M>(positions, row0, s.q_len);
    i64 first = seen.low - s.window + 1 > 0 ? (seen.low - s.window + 1) / N : 0, last = seen.high / N;
    auto fetch = [&](i64 j) {
        i64 at = j * N;
        copy_tile<N, HEAD, THREADS>(ks + (j & 1) * N * (HEAD + PAD), HEAD + PAD, keys + at * k_stride,
                                    k_stride, s.kv_len - at, s.qk_dim);
        copy_tile<N, VALUE, THREADS>(vs + (j & 1) * N * (VALUE + PAD), VALUE + PAD,
                                     values + at * v_stride, v_stride, s.kv_len - at, s.v_dim);
        copies_commit();
    };
    i64 at = b * s.q_len + row0;
    copy_tile<M, HEAD, THREADS>(qs, HEAD + PAD, q + at * q_stride + head * s.qk_dim, q_stride,
                                s.q_len - row0, s.qk_dim);
    copy_tile<M, VALUE, THREADS>(ds, VALUE + PAD, d_out + at * o_stride + head * s.v_dim, o_stride,
                                 s.q_len - row0, s.v_dim);
    fetch(first);
    float stat[2], minus[2];
    i64 position[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        i64 row = row0 + warp * 16 + lane / 4 + i * 8;
        bool in = row < s.q_len;
        i64 own = (b * s.heads + head) * s.q_len + row;
        position[i] = in ? (i64)positions[row] : -1;
        stat[i] = in ? lse[own] * LOG2_E : 0.0f;
        minus[i] = in ? delta[own] : 0.0f;
    }
    float acc[HEAD / 8][4] = {}, slope = slope_of(s, head);
    for (i64 j = first; j <= last; j++) {
        next_tile(j < last, [&] { fetch(j + 1); });
        float p[N / 8][4] = {}, d[N / 8][4] = {};
        const bf16* kt = ks + (j & 1) * N * (HEAD + PAD);
        by_rows<N, HEAD>(p, qs, warp * 16, kt);
        by_rows<N, VALUE>(d, ds, warp * 16, vs + (j & 1) * N * (VALUE + PAD));
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                i64 key = j * N + n * 8 + lane % 4 * 2 + e % 2;
                bool visible = sees(s, position[e / 2], key);
                float value = score(s, p[n][e], slope, position[e / 2], key);
                float x = visible ? exp2f(value - stat[e / 2]) : 0.0f;
                float keep = s.threshold && visible ? kept(s, b, head, position[e / 2], key) : 1.0f;
                d[n][e] = x * (d[n][e] * keep - minus[e / 2]) * growth(s, p[n][e]);
            }
        add_weighted<N, HEAD>(acc, d, kt);
        __syncthreads();
    }
    i64 mine = row0 + warp * 16;
    write_rows<HEAD>(dq + (b * s.q_len + mine) * q_stride + head * s.qk_dim, q_stride, s.q_len - mine,
                     s.qk_dim, acc, 1.0f, 1.0f);
}
