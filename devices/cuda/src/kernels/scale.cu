// Scaling by a number or by the sigmoid of a number per row, soft caps by tanh, gpt-oss's bounded
// gate, and columns that all heads share, appended to each head's own.

DEVICE float cap_slope(float x, float bound) {
    float t = tanhf(x / bound);
    return 1.0f - t * t;
}

// Multiplies every row by the sigmoid of its gate. One block per row.
template <class T> DEVICE void gate_rows(T* out, const T* x, const T* gate, i64 columns) {
    i64 row = blockIdx.x;
    float factor = sigmoid(as_float(gate[row]));
    each_of_row(out + row * columns, x + row * columns, columns, [&](float v) { return v * factor; });
}

template <class T>
DEVICE void gate_rows_backward(T* dx, T* d_gate, const T* dy, const T* x, const T* gate, i64 columns) {
    __shared__ float scratch[32];
    i64 row = blockIdx.x;
    float factor = sigmoid(as_float(gate[row])), along = 0.0f;
    auto scaled = [&](float d, float v) {
        along += d * v;
        return d * factor;
    };
    each_of_row(dx + row * columns, dy + row * columns, x + row * columns, columns, scaled);
    along = block_sum(along, scratch);
    if (threadIdx.x == 0) d_gate[row] = rounded<T>(along * factor * (1.0f - factor));
}

// Factor of the sigmoid's argument in gpt-oss's gate.
#define STEEP 1.702f

DEVICE float within(float x, float limit) { return fminf(fmaxf(x, -limit), limit); }

// out = g · σ(1.702 · g) · (u + 1), with g clamped to at most the limit and u to ± the limit.
DEVICE float bounded_glu(float g, float u, float limit) {
    float bounded = fminf(g, limit);
    return bounded * sigmoid(STEEP * bounded) * (within(u, limit) + 1.0f);
}

// The gradient of a clamped value is 0.
template <class T>
DEVICE void bounded_glu_backward(T* d_gates, T* d_ups, const T* dy, const T* gates, const T* ups,
                                 float limit, i64 n) {
    for (i64 i = first8(); i < n; i += stride8()) {
        float g[8], u[8], d[8];
        load8(gates + i, g, ups + i, u, dy + i, d, n - i);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float bounded = fminf(g[j], limit), s = sigmoid(STEEP * bounded);
            float slope = s * (1.0f + STEEP * bounded * (1.0f - s));
            float d_gate = d[j] * (within(u[j], limit) + 1.0f) * slope, d_up = d[j] * bounded * s;
            g[j] = g[j] > limit ? 0.0f : d_gate;
            u[j] = fabsf(u[j]) > limit ? 0.0f : d_up;
        }
        store8(d_gates + i, n - i, g);
        store8(d_ups + i, n - i, u);
    }
}

// Every head's `own` columns, then the `shared` ones of the row: one block per row.
template <class T>
DEVICE void join(T* out, const T* x, const T* more, i64 heads, i64 own, i64 shared) {
    i64 row = blockIdx.x, head = own + shared;
    for (i64 c = threadIdx.x; c < heads * head; c += blockDim.x) {
        i64 h = c / head, in = c % head;
        out[row * heads * head + c] =
            in < own ? x[(row * heads + h) * own + in] : more[row * shared + in - own];
    }
}

// The gradient of the shared columns is the sum over heads, in their order.
template <class T>
DEVICE void join_backward(T* dx, T* d_more, const T* dy, i64 heads, i64 own, i64 shared) {
    i64 row = blockIdx.x, head = own + shared;
    const T* d = dy + row * heads * head;
    for (i64 c = threadIdx.x; c < heads * own; c += blockDim.x)
        dx[row * heads * own + c] = d[c / own * head + c % own];
    for (i64 c = threadIdx.x; c < shared; c += blockDim.x) {
        float sum = 0.0f;
        for (i64 h = 0; h < heads; h++) sum += as_float(d[h * head + own + c]);
        d_more[row * shared + c] = rounded<T>(sum);
    }
}

#define SCALE(name, T)                                                                             \
    KERNEL scale_##name(T* out, const T* x, float factor, i64 n) {                                 \
        each(out, x, n, [=](float x) { return x * factor; });                                      \
    }                                                                                              \
    KERNEL cap_##name(T* out, const T* x, float bound, i64 n) {                                    \
        each(out, x, n, [=](float x) { return bound * tanhf(x / bound); });                        \
    }                                                                                              \
    KERNEL cap_backward_##name(T* dx, const T* dy, const T* x, float bound, i64 n) {               \
        each(dx, dy, x, n, [=](float d, float x) { return d * cap_slope(x, bound); });             \
    }                                                                                              \
    KERNEL gate_rows_##name(T* out, const T* x, const T* gate, i64 columns) {                      \
        gate_rows(out, x, gate, columns);                                                          \
    }                                                                                              \
    KERNEL gate_rows_backward_##name(T* dx, T* d_gate, const T* dy, const T* x, const T* gate,     \
                                     i64 columns) {                                                \
        gate_rows_backward(dx, d_gate, dy, x, gate, columns);                                      \
    }                                                                                              \
    KERNEL bounded_glu_##name(T* out, const T* gates, const T* ups, float limit, i64 n) {          \
        each(out, gates, ups, n, [=](float g, float u) { return bounded_glu(g, u, limit); });      \
    }                                                                                              \
    KERNEL bounded_glu_backward_##name(T* d_gates, T* d_ups, const T* dy, const T* gates,          \
                                       const T* ups, float limit, i64 n) {                         \
        bounded_glu_backward(d_gates, d_ups, dy, gates, ups, limit, n);                            \
    }                                                                                              \
    KERNEL join_##name(T* out, const T* x, const T* more, i64 heads, i64 own, i64 shared) {        \
        join(out, x, more, heads, own, shared);                                                    \
    }                                                                                              \
    KERNEL join_backward_##name(T* dx, T* d_more, const T* dy, i64 heads, i64 own, i64 shared) {   \
        join_backward(dx, d_more, dy, heads, own, shared);                                         \
    }

SCALE(f32, float)
SCALE(bf16, bf16)
