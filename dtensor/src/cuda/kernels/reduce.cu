// Sums in a fixed order: columns over rows, squares, and the optimizer that uses them.

// Sums by column of rows r ≡ blockIdx.y (mod gridDim.y · 8), one line of `partial` per blockIdx.y; 32
// threads stand side by side on eight columns each, eight rows of them below each other.
template <class T> DEVICE void column_sum(float* partial, const T* x, i64 rows, i64 columns) {
    __shared__ float lines[8][256];
    int across = threadIdx.x & 31, down = threadIdx.x >> 5;
    i64 c = ((i64)blockIdx.x * 32 + across) * 8;
    float sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    if (c < columns)
        for (i64 row = (i64)blockIdx.y * 8 + down; row < rows; row += (i64)gridDim.y * 8) {
            float v[8];
            load8(x + row * columns + c, columns - c, v);
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] += v[j];
        }
#pragma unroll
    for (int j = 0; j < 8; j++) lines[down][across * 8 + j] = sum[j];
    __syncthreads();
    i64 column = (i64)blockIdx.x * 256 + threadIdx.x;
    if (column >= columns) return;
    float total = 0.0f;
    for (int line = 0; line < 8; line++) total += lines[line][threadIdx.x];
    partial[blockIdx.y * columns + column] = total;
}

KERNEL column_sum_f32(float* partial, const float* x, i64 rows, i64 columns) {
    column_sum(partial, x, rows, columns);
}
KERNEL column_sum_bf16(float* partial, const bf16* x, i64 rows, i64 columns) {
    column_sum(partial, x, rows, columns);
}

// out += Σ lines.
KERNEL add_lines(float* out, const float* partial, i64 lines, i64 columns) {
    i64 column = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    float sum = 0.0f;
    for (i64 line = 0; line < lines; line++) sum += partial[line * columns + column];
    out[column] += sum;
}

// Sums of squares by block, in 64 bits.
KERNEL square_sum(double* partial, const float* x, i64 n) {
    __shared__ double lanes[256];
    double sum = 0.0;
    for (i64 i = first8(); i < n; i += stride8()) {
        float v[8];
        load8(x + i, n - i, v);
        float square = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) square += v[j] * v[j];
        sum += square;
    }
    lanes[threadIdx.x] = sum;
    __syncthreads();
    for (int step = 128; step > 0; step /= 2) {
        if (threadIdx.x < step) lanes[threadIdx.x] += lanes[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0) partial[blockIdx.x] = lanes[0];
}

struct Step {
    float rate, beta1, beta2, correction1, correction2, epsilon, keep, scale;
};

// AdamW over a flat run (Loshchilov and Hutter 2019), and the weights rounded, in one pass.
KERNEL adamw(float* master, float* momentum, float* variance, const float* gradient, bf16* weights,
             i64 n, Step s) {
    for (i64 i = first8(); i < n; i += stride8()) {
        float w[8], m[8], v[8], g[8];
        load8(master + i, n - i, w);
        load8(momentum + i, n - i, m);
        load8(variance + i, n - i, v);
        load8(gradient + i, n - i, g);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            g[j] *= s.scale;
            m[j] = s.beta1 * m[j] + (1.0f - s.beta1) * g[j];
            v[j] = s.beta2 * v[j] + (1.0f - s.beta2) * g[j] * g[j];
            float root = sqrtf(v[j] / s.correction2) + s.epsilon;
            w[j] = w[j] * s.keep - s.rate * (m[j] / s.correction1) / root;
        }
        store8(master + i, n - i, w);
        store8(momentum + i, n - i, m);
        store8(variance + i, n - i, v);
        if (weights) store8(weights + i, n - i, w);
    }
}
