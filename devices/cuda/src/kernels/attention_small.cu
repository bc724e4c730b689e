// Attention in 32 bits, the simplest that is right: a warp per query, or per key. For tests and small
// models; a lane holds every 32nd dimension of a head of at most 256.

#define MOST 8

template <class T> DEVICE void lanes(float (&x)[MOST], const T* p, i64 dim) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        i64 c = i * 32 + lane;
        x[i] = c < dim ? as_float(p[c]) : 0.0f;
    }
}

DEVICE float product(const float (&a)[MOST], const float (&b)[MOST]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < MOST; i++) sum += a[i] * b[i];
    return warp_sum(sum);
}

template <class T> DEVICE void put(T* p, const float (&x)[MOST], float times, i64 dim) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        i64 c = i * 32 + lane;
        if (c < dim) p[c] = rounded<T>(x[i] * times);
    }
}

// A query and where its head's keys and values are.
struct Query {
    i64 b, head, row, position, first, at, v_at;
};

DEVICE bool query(Query* q, const u32* positions, const Attention& s) {
    q->row = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    q->head = blockIdx.y;
    q->b = blockIdx.z;
    if (q->row >= s.q_len) return false;
    q->position = positions[q->row];
    q->first = q->position - s.window + 1 > 0 ? q->position - s.window + 1 : 0;
    i64 kv = q->head / (s.heads / s.kv_heads);
    q->at = (q->b * s.kv_len * s.kv_heads + kv) * s.qk_dim;
    q->v_at = (q->b * s.kv_len * s.kv_heads + kv) * s.v_dim;
    return true;
}

KERNEL attention_forward_f32(float* out, float* lse, const float* q, const float* k, const float* v,
                             const u32* positions, Attention s) {
    Query own;
    if (!query(&own, positions, s)) return;
    i64 line = (own.b * s.q_len + own.row) * s.heads + own.head;
    float x[MOST], sum[MOST] = {};
    lanes(x, q + line * s.qk_dim, s.qk_dim);
    const float* sinks = (const float*)s.sinks;
    float largest = sinks ? sinks[own.head] * LOG2_E : -INFINITY, total = sinks ? 1.0f : 0.0f;
    float slope = slope_of(s, own.head);
    for (i64 key = own.first; key <= own.position; key++) {
        float y[MOST], z[MOST];
        lanes(y, k + own.at + key * s.kv_heads * s.qk_dim, s.qk_dim);
        lanes(z, v + own.v_at + key * s.kv_heads * s.v_dim, s.v_dim);
        float value = score(s, product(x, y), slope, own.position, key);
        float top = fmaxf(largest, value), before = exp2f(largest - top), p = exp2f(value - top);
        total = total * before + p;
        p *= kept(s, own.b, own.head, own.position, key);
#pragma unroll
        for (int i = 0; i < MOST; i++) sum[i] = sum[i] * before + p * z[i];
        largest = top;
    }
    put(out + line * s.v_dim, sum, 1.0f / total, s.v_dim);
    if ((threadIdx.x & 31) == 0)
        lse[(own.b * s.heads + own.head) * s.q_len + own.row] = (largest + log2f(total)) * LN_2;
}

KERNEL attention_query_backward_f32(float* dq, const float* d_out, const float* q, const float* k,
                                    const float* v, const float* lse, const float* delta,
                                    const u32* positions, Attention s) {
    Query own;
    if (!query(&own, positions, s)) return;
    i64 line = (own.b * s.q_len + own.row) * s.heads + own.head;
    i64 stat = (own.b * s.heads + own.head) * s.q_len + own.row;
    float x[MOST], d[MOST], sum[MOST] = {}, slope = slope_of(s, own.head);
    lanes(x, q + line * s.qk_dim, s.qk_dim);
    lanes(d, d_out + line * s.v_dim, s.v_dim);
    for (i64 key = own.first; key <= own.position; key++) {
        float y[MOST], z[MOST];
        lanes(y, k + own.at + key * s.kv_heads * s.qk_dim, s.qk_dim);
        lanes(z, v + own.v_at + key * s.kv_heads * s.v_dim, s.v_dim);
        float plain = product(x, y);
        float p = exp2f(score(s, plain, slope, own.position, key) - lse[stat] * LOG2_E);
        float dp = product(d, z) * kept(s, own.b, own.head, own.position, key);
        float ds = p * (dp - delta[stat]) * growth(s, plain);
#pragma unroll
        for (int i = 0; i < MOST; i++) sum[i] += ds * y[i];
    }
    put(dq + line * s.qk_dim, sum, 1.0f, s.qk_dim);
}

KERNEL attention_key_backward_f32(float* dk, float* dv, const float* d_out, const float* q,
                                  const float* k, const float* v, const float* lse, const float* delta,
                                  const u32* positions, Attention s) {
    i64 key = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), kv = blockIdx.y, b = blockIdx.z;
    if (key >= s.kv_len) return;
    i64 group = s.heads / s.kv_heads, at = (b * s.kv_len + key) * s.kv_heads + kv;
    float y[MOST], z[MOST], d_keys[MOST] = {}, d_values[MOST] = {};
    lanes(y, k + at * s.qk_dim, s.qk_dim);
    lanes(z, v + at * s.v_dim, s.v_dim);
    for (i64 head = kv * group; head < (kv + 1) * group; head++)
        for (i64 row = 0; row < s.q_len; row++) {
            i64 position = positions[row];
            if (!sees(s, position, key)) continue;
            i64 line = (b * s.q_len + row) * s.heads + head, stat = (b * s.heads + head) * s.q_len + row;
            float x[MOST], d[MOST];
            lanes(x, q + line * s.qk_dim, s.qk_dim);
            lanes(d, d_out + line * s.v_dim, s.v_dim);
            float plain = product(x, y);
            float p = exp2f(score(s, plain, slope_of(s, head), position, key) - lse[stat] * LOG2_E);
            float keep = kept(s, b, head, position, key);
            float ds = p * (product(d, z) * keep - delta[stat]) * growth(s, plain);
#pragma unroll
            for (int i = 0; i < MOST; i++) {
                d_keys[i] += ds * x[i];
                d_values[i] += p * keep * d[i];
            }
        }
    put(dk + at * s.qk_dim, d_keys, 1.0f, s.qk_dim);
    put(dv + at * s.v_dim, d_values, 1.0f, s.v_dim);
}

// delta = Σ over a head of output × its gradient, used in the softmax's backward. A warp per query.
template <class T>
DEVICE void delta_of(float* delta, const T* d_out, const T* out, const Attention& s) {
    i64 row = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), head = blockIdx.y, b = blockIdx.z;
    if (row >= s.q_len) return;
    i64 line = (b * s.q_len + row) * s.heads + head;
    float o[MOST], d[MOST];
    lanes(o, out + line * s.v_dim, s.v_dim);
    lanes(d, d_out + line * s.v_dim, s.v_dim);
    float sum = product(o, d);
    if ((threadIdx.x & 31) == 0) delta[(b * s.heads + head) * s.q_len + row] = sum;
}

KERNEL attention_delta_f32(float* delta, const float* d_out, const float* out, Attention s) {
    delta_of(delta, d_out, out, s);
}
KERNEL attention_delta_bf16(float* delta, const bf16* d_out, const bf16* out, Attention s) {
    delta_of(delta, d_out, out, s);
}

// gradient[head] −= Σ over queries of the sink's softmax weight × delta. A block per head.
template <class T>
DEVICE void sinks_of(float* gradient, const float* lse, const float* delta, i64 batch, const Attention& s) {
    __shared__ float scratch[32];
    i64 head = blockIdx.x;
    float sink = as_float(((const T*)s.sinks)[head]) * LOG2_E, sum = 0.0f;
    for (i64 i = threadIdx.x; i < batch * s.q_len; i += blockDim.x) {
        i64 at = (i / s.q_len * s.heads + head) * s.q_len + i % s.q_len;
        sum += exp2f(sink - lse[at] * LOG2_E) * delta[at];
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) gradient[head] -= sum;
}

KERNEL attention_sinks_f32(float* gradient, const float* lse, const float* delta, i64 batch, Attention s) {
    sinks_of<float>(gradient, lse, delta, batch, s);
}
KERNEL attention_sinks_bf16(float* gradient, const float* lse, const float* delta, i64 batch, Attention s) {
    sinks_of<bf16>(gradient, lse, delta, batch, s);
}
