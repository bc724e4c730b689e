// Layer and RMS norms over rows, one block per row at a time. A thread keeps its part of the row, V
// times eight elements, in registers, so the row is read once. A column's factor is `from` + its
// weight, where `from` is 0 or 1.

template <bool LAYER> DEVICE void statistics(const float* kept, i64 row, float* mean, float* r) {
    *mean = LAYER ? kept[2 * row] : 0.0f;
    *r = LAYER ? kept[2 * row + 1] : kept[row];
}

template <bool LAYER, int V, class T>
DEVICE void norm(T* out, float* kept, const T* x, const T* weight, const T* bias, i64 columns,
                 float epsilon, float from) {
    __shared__ float scratch[32];
    i64 row = blockIdx.x;
    float v[V][8];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < V; i++) {
        i64 c = ((i64)i * blockDim.x + threadIdx.x) * 8;
        load8(x + row * columns + c, columns - c, v[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += v[i][j];
    }
    float mean = LAYER ? block_sum(sum, scratch) / columns : 0.0f;
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < V; i++) {
        i64 c = ((i64)i * blockDim.x + threadIdx.x) * 8;
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (c + j < columns) square += (v[i][j] - mean) * (v[i][j] - mean);
    }
    float r = 1.0f / sqrtf(block_sum(square, scratch) / columns + epsilon);
#pragma unroll
    for (int i = 0; i < V; i++) {
        i64 c = ((i64)i * blockDim.x + threadIdx.x) * 8;
        if (c >= columns) continue;
        float w[8], b[8];
        load8(weight + c, columns - c, w);
        if (bias) load8(bias + c, columns - c, b);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[i][j] = (v[i][j] - mean) * r * (from + w[j]);
            if (bias) v[i][j] += b[j];
        }
        store8(out + row * columns + c, columns - c, v[i]);
    }
    if (threadIdx.x == 0) {
        if (LAYER) kept[2 * row] = mean;
        kept[LAYER ? 2 * row + 1 : row] = r;
    }
}

// dx = r · (g − mean(g) − x̂ · mean(g · x̂)), g = dy · factor; the mean of g only for layer norms. A
// block goes through many rows and leaves its sums of dy · x̂ and dy by column in `d_weight` and
// `d_bias`, one line per block.
template <bool LAYER, int V, class T>
DEVICE void norm_backward(T* dx, float* d_weight, float* d_bias, const T* dy, const T* x,
                          const T* weight, const float* kept, i64 rows, i64 columns, float from) {
    __shared__ float scratch[32];
    float weights[V][8], biases[V][8];
#pragma unroll
    for (int i = 0; i < V; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) weights[i][j] = biases[i][j] = 0.0f;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        float mean, r;
        statistics<LAYER>(kept, row, &mean, &r);
        float g[V][8], hat[V][8];
        float along = 0.0f, average = 0.0f;
#pragma unroll
        for (int i = 0; i < V; i++) {
            i64 c = ((i64)i * blockDim.x + threadIdx.x) * 8;
            float w[8];
            load8(dy + row * columns + c, g[i], x + row * columns + c, hat[i], weight + c, w,
                  columns - c);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                hat[i][j] = (hat[i][j] - mean) * r;
                weights[i][j] += g[i][j] * hat[i][j];
                biases[i][j] += g[i][j];
                g[i][j] *= from + w[j];
                along += g[i][j] * hat[i][j];
                average += g[i][j];
            }
        }
        if (!dx) continue;
        along = block_sum(along, scratch) / columns;
        average = LAYER ? block_sum(average, scratch) / columns : 0.0f;
#pragma unroll
        for (int i = 0; i < V; i++) {
            i64 c = ((i64)i * blockDim.x + threadIdx.x) * 8;
            if (c >= columns) continue;
#pragma unroll
            for (int j = 0; j < 8; j++) g[i][j] = r * (g[i][j] - average - hat[i][j] * along);
            store8(dx + row * columns + c, columns - c, g[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < V; i++) {
        i64 c = ((i64)i * blockDim.x + threadIdx.x) * 8;
        if (c >= columns) continue;
        store8(d_weight + blockIdx.x * columns + c, columns - c, weights[i]);
        if (d_bias) store8(d_bias + blockIdx.x * columns + c, columns - c, biases[i]);
    }
}

// A thread has V · 8 elements of a row. V = 1 needs fewer registers and allows 1024 threads.
#define NORM(name, T, LAYER, V)                                                                    \
    BOUNDED_KERNEL(V == 1 ? 1024 : 512) name(T* out, float* kept, const T* x, const T* weight, const T* bias, i64 columns,      \
                float epsilon, float from) {                                                       \
        norm<LAYER, V>(out, kept, x, weight, bias, columns, epsilon, from);                        \
    }
#define NORM_BACKWARD(name, T, LAYER, V)                                                           \
    BOUNDED_KERNEL(V == 1 ? 1024 : 512) name(T* dx, float* d_weight, float* d_bias, const T* dy, const T* x, const T* weight,   \
                const float* kept, i64 rows, i64 columns, float from) {                            \
        norm_backward<LAYER, V>(dx, d_weight, d_bias, dy, x, weight, kept, rows, columns, from);   \
    }

NORM(layer_norm_f32, float, true, 1)
NORM(layer_norm_bf16, bf16, true, 1)
NORM(layer_norm_wide_f32, float, true, 4)
NORM(layer_norm_wide_bf16, bf16, true, 4)
NORM(rms_norm_f32, float, false, 1)
NORM(rms_norm_bf16, bf16, false, 1)
NORM(rms_norm_wide_f32, float, false, 4)
NORM(rms_norm_wide_bf16, bf16, false, 4)
NORM_BACKWARD(layer_norm_backward_f32, float, true, 1)
NORM_BACKWARD(layer_norm_backward_bf16, bf16, true, 1)
NORM_BACKWARD(layer_norm_backward_wide_f32, float, true, 4)
NORM_BACKWARD(layer_norm_backward_wide_bf16, bf16, true, 4)
NORM_BACKWARD(rms_norm_backward_f32, float, false, 1)
NORM_BACKWARD(rms_norm_backward_bf16, bf16, false, 1)
NORM_BACKWARD(rms_norm_backward_wide_f32, float, false, 4)
NORM_BACKWARD(rms_norm_backward_wide_bf16, bf16, false, 4)
