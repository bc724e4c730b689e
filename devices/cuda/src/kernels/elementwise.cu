// Kernels of one pass over flat tensors: additions, nonlinearities, biases, casts, copies of
// columns, dropout, rotary embeddings. Every thread handles eight elements at a time.

// The nonlinearities by function number: GELU by tanh (0), GELU (1), SiLU (2), ReLU (3), ReLU² (4).
DEVICE float hyperbolic_tangent(float x) {
    return 1.0f - 2.0f * reciprocal(exponential(2.0f * x) + 1.0f);
}

template <int F> DEVICE float value(float x) {
    if (F == 0) {
        float t = hyperbolic_tangent(0.7978845608f * (x + 0.044715f * x * x * x));
        return 0.5f * x * (1.0f + t);
    }
    if (F == 1) return 0.5f * x * (1.0f + erff(x * 0.7071067812f));
    if (F == 2) return x * sigmoid(x);
    float positive = fmaxf(x, 0.0f);
    return F == 3 ? positive : positive * positive;
}

template <int F> DEVICE float slope(float x) {
    if (F == 0) {
        float t = hyperbolic_tangent(0.7978845608f * (x + 0.044715f * x * x * x));
        float inner = 0.7978845608f * (1.0f + 3.0f * 0.044715f * x * x);
        return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner;
    }
    if (F == 1) {
        float below = 0.5f * (1.0f + erff(x * 0.7071067812f));
        return below + x * 0.3989422804f * exponential(-0.5f * x * x);
    }
    if (F == 2) {
        float s = sigmoid(x);
        return s * (1.0f + x * (1.0f - s));
    }
    if (F == 3) return x > 0.0f ? 1.0f : 0.0f;
    return 2.0f * fmaxf(x, 0.0f);
}

// out = f(gates) · ups over rows of `columns`; rows of gates and ups are `stride` apart.
template <int F, class T>
DEVICE void gate(T* out, const T* gates, const T* ups, i64 rows, i64 columns, i64 stride) {
    i64 across = (columns + 7) / 8;
    for (i64 i = first8() / 8; i < rows * across; i += stride8() / 8) {
        i64 row = i / across, c = i % across * 8;
        float g[8], u[8];
        load8(gates + row * stride + c, g, ups + row * stride + c, u, columns - c);
#pragma unroll
        for (int j = 0; j < 8; j++) g[j] = value<F>(g[j]) * u[j];
        store8(out + row * columns + c, columns - c, g);
    }
}

template <int F, class T>
DEVICE void gate_backward(T* d_gates, T* d_ups, const T* dy, const T* gates, const T* ups, i64 rows,
                          i64 columns, i64 stride) {
    i64 across = (columns + 7) / 8;
    for (i64 i = first8() / 8; i < rows * across; i += stride8() / 8) {
        i64 row = i / across, c = i % across * 8;
        float g[8], u[8], d[8];
        load8(gates + row * stride + c, g, ups + row * stride + c, u, dy + row * columns + c, d,
              columns - c);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float up = u[j];
            u[j] = d[j] * value<F>(g[j]);
            g[j] = d[j] * up * slope<F>(g[j]);
        }
        store8(d_gates + row * stride + c, columns - c, g);
        store8(d_ups + row * stride + c, columns - c, u);
    }
}

#define BY_FUNCTION(call)                                                                          \
    switch (function) {                                                                            \
    case 0: call(0); break;                                                                        \
    case 1: call(1); break;                                                                        \
    case 2: call(2); break;                                                                        \
    case 3: call(3); break;                                                                        \
    default: call(4); break;                                                                       \
    }

// out = x + bias, the table's only row; with `positions`, x + the table's row of that position.
template <class T>
DEVICE void bias(T* out, const T* x, const T* table, const u32* positions, i64 rows, i64 columns,
                 i64 sequence) {
    i64 across = (columns + 7) / 8;
    for (i64 i = first8() / 8; i < rows * across; i += stride8() / 8) {
        i64 row = i / across, c = i % across * 8;
        i64 at = positions ? (i64)positions[row % sequence] * columns : 0;
        float v[8], b[8];
        load8(x + row * columns + c, v, table + at + c, b, columns - c);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] += b[j];
        store8(out + row * columns + c, columns - c, v);
    }
}

// Copies `columns` columns of every row from one tensor to another; rows may have other strides.
template <class T>
DEVICE void columns_copy(T* out, const T* x, i64 rows, i64 columns, i64 out_stride, i64 x_stride) {
    i64 across = (columns + 7) / 8;
    for (i64 i = first8() / 8; i < rows * across; i += stride8() / 8) {
        i64 row = i / across, c = i % across * 8;
        float v[8];
        load8(x + row * x_stride + c, columns - c, v);
        store8(out + row * out_stride + c, columns - c, v);
    }
}

// Position of a local tensor in the global one, for dropout; rows are sequences × positions.
struct Place {
    Stream stream;
    u32 threshold;
    float scale;
    i64 first_sequence, sequence, global_sequence;
    i64 columns, first_column, global_columns;
};

// Scales kept elements, zeroes the others, and writes a mask of one byte per element.
template <class T>
DEVICE void dropout(T* out, u8* mask, const T* x, const u32* positions, i64 rows, Place at) {
    i64 across = (at.columns + 7) / 8;
    for (i64 i = first8() / 8; i < rows * across; i += stride8() / 8) {
        i64 row = i / across, c = i % across * 8;
        i64 count = at.columns - c;
        i64 b = at.first_sequence + row / at.sequence;
        i64 line = b * at.global_sequence + positions[row % at.sequence];
        u64 index = (u64)(line * at.global_columns + at.first_column + c);
        float v[8];
        load8(x + row * at.columns + c, count, v);
        u32 word[8];
        philox8(at.stream, index, word);
        u8 kept[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            kept[j] = is_kept(word[j], at.threshold);
            v[j] = kept[j] ? v[j] * at.scale : 0.0f;
        }
        store8(mask + row * at.columns + c, count, kept);
        store8(out + row * at.columns + c, count, v);
    }
}

template <class T> DEVICE void masked(T* out, const T* x, const u8* mask, float scale, i64 n) {
    for (i64 i = first8(); i < n; i += stride8()) {
        float v[8];
        u8 kept[8];
        load8(x + i, n - i, v);
        load8(mask + i, n - i, kept);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = kept[j] ? v[j] * scale : 0.0f;
        store8(out + i, n - i, v);
    }
}

// Rotary embedding: `dims` columns of a head from `first` on are rotated, in pairs (i, i + dims/2),
// or (2i, 2i + 1) with `neighbours`.
struct Turning {
    i64 sequence, heads, head_dim, first, dims;
    int neighbours;
    // 1 to rotate, −1 to rotate back.
    float direction;
};

DEVICE void turn(float& a, float& b, const float* by, float direction) {
    float cosine = by[0], sine = by[1] * direction, low = a * cosine - b * sine;
    b = b * cosine + a * sine;
    a = low;
}

// Rotates pairs of columns of every head by the angle of the row's position; `turns` has cosine and
// sine by position and pair. The other columns are copied.
template <class T>
DEVICE void rope(T* out, const T* x, const float* turns, i64 rows, Turning s) {
    i64 half = s.dims / 2, end = s.first + s.dims;
    i64 before = (s.first + 7) / 8, turned = ((s.neighbours ? s.dims : half) + 7) / 8;
    i64 pieces = before + turned + (s.head_dim - end + 7) / 8;
    for (i64 i = first8() / 8; i < rows * s.heads * pieces; i += stride8() / 8) {
        i64 piece = i % pieces, line = i / pieces, at = line * s.head_dim;
        const float* own = turns + line / s.heads % s.sequence * half * 2;
        float a[8], b[8];
        if (piece < before || piece >= before + turned) {
            bool low = piece < before;
            i64 c = low ? piece * 8 : end + (piece - before - turned) * 8;
            i64 count = (low ? s.first : s.head_dim) - c;
            load8(x + at + c, count, a);
            store8(out + at + c, count, a);
            continue;
        }
        i64 c = (piece - before) * 8;
        at += s.first + c;
        float by[2][8];
        if (s.neighbours) {
            load8(x + at, a, own + c, by[0], s.dims - c);
#pragma unroll
            for (int j = 0; j < 8; j += 2) turn(a[j], a[j + 1], by[0] + j, s.direction);
            store8(out + at, s.dims - c, a);
            continue;
        }
        load8(x + at, a, x + at + half, b, half - c);
        load8(own + 2 * c, 2 * (half - c), by[0]);
        load8(own + 2 * c + 8, 2 * (half - c) - 8, by[1]);
#pragma unroll
        for (int j = 0; j < 8; j++) turn(a[j], b[j], by[j / 4] + 2 * j % 8, s.direction);
        store8(out + at, half - c, a);
        store8(out + at + half, half - c, b);
    }
}

#define ACTIVATE(F) each(out, x, n, [](float x) { return value<F>(x); })
#define ACTIVATE_BACKWARD(F) each(dx, dy, x, n, [](float d, float x) { return d * slope<F>(x); })
#define GATE(F) gate<F>(out, gates, ups, rows, columns, stride)
#define GATE_BACKWARD(F) gate_backward<F>(d_gates, d_ups, dy, gates, ups, rows, columns, stride)

#define ELEMENTWISE(name, T)                                                                       \
    KERNEL add_##name(T* out, const T* a, const T* b, i64 n) {                                     \
        each(out, a, b, n, [](float a, float b) { return a + b; });                                \
    }                                                                                              \
    KERNEL activation_##name(T* out, const T* x, i64 n, int function) { BY_FUNCTION(ACTIVATE) }    \
    KERNEL activation_backward_##name(T* dx, const T* dy, const T* x, i64 n, int function) {       \
        BY_FUNCTION(ACTIVATE_BACKWARD)                                                             \
    }                                                                                              \
    KERNEL gated_##name(T* out, const T* gates, const T* ups, i64 rows, i64 columns, i64 stride,   \
                        int function) {                                                            \
        BY_FUNCTION(GATE)                                                                          \
    }                                                                                              \
    KERNEL gated_backward_##name(T* d_gates, T* d_ups, const T* dy, const T* gates, const T* ups,  \
                                 i64 rows, i64 columns, i64 stride, int function) {                \
        BY_FUNCTION(GATE_BACKWARD)                                                                 \
    }                                                                                              \
    KERNEL bias_##name(T* out, const T* x, const T* table, const u32* positions, i64 rows,         \
                       i64 columns, i64 sequence) {                                                \
        bias(out, x, table, positions, rows, columns, sequence);                                   \
    }                                                                                              \
    KERNEL columns_##name(T* out, const T* x, i64 rows, i64 columns, i64 out_stride,               \
                          i64 x_stride) {                                                          \
        columns_copy(out, x, rows, columns, out_stride, x_stride);                                 \
    }                                                                                              \
    KERNEL dropout_##name(T* out, u8* mask, const T* x, const u32* positions, i64 rows,            \
                          Place at) {                                                              \
        dropout(out, mask, x, positions, rows, at);                                                \
    }                                                                                              \
    KERNEL masked_##name(T* out, const T* x, const u8* mask, float scale, i64 n) {                 \
        masked(out, x, mask, scale, n);                                                            \
    }                                                                                              \
    KERNEL rope_##name(T* out, const T* x, const float* turns, i64 rows, Turning s) {              \
        rope(out, x, turns, rows, s);                                                              \
    }

ELEMENTWISE(f32, float)
ELEMENTWISE(bf16, bf16)

KERNEL cast_f32_bf16(bf16* out, const float* x, i64 n) { each(out, x, n, [](float x) { return x; }); }
KERNEL cast_bf16_f32(float* out, const bf16* x, i64 n) { each(out, x, n, [](float x) { return x; }); }
