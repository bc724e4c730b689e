// Sums in a fixed order: columns over rows, squares, and the optimizer that uses them.

// Column sums of the rows with row / 8 ≡ blockIdx.y (mod gridDim.y), one line of `partial` per
// blockIdx.y. A block has 32 threads across, eight columns each, and 8 threads down, one row each.
template <class T> DEVICE void column_sum(float* partial, const T* x, i64 rows, i64 columns) {
    __shared__ float lines[8][256];
    int across = threadIdx.x & 31, down = threadIdx.x >> 5;
    i64 c = ((i64)blockIdx.x * 32 + across) * 8;
    float sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    if (c < columns)
        // Two rows at a time, so that both loads are in flight together.
        for (i64 row = (i64)blockIdx.y * 8 + down; row < rows; row += (i64)gridDim.y * 16) {
            i64 other = row + (i64)gridDim.y * 8;
            float v[8], w[8];
            if (other < rows) load8(x + row * columns + c, v, x + other * columns + c, w, columns - c);
            else {
                load8(x + row * columns + c, columns - c, v);
                load_each(x, 0, w);
            }
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] += v[j] + w[j];
        }
    float total = column_total(sum, lines);
    i64 column = (i64)blockIdx.x * 256 + threadIdx.x;
    if (column < columns) partial[blockIdx.y * columns + column] = total;
}

KERNEL column_sum_f32(float* partial, const float* x, i64 rows, i64 columns) {
    column_sum(partial, x, rows, columns);
}
KERNEL column_sum_bf16(float* partial, const bf16* x, i64 rows, i64 columns) {
    column_sum(partial, x, rows, columns);
}

// out += Σ lines. A block has 32 columns; each is summed by 32 threads, then across one warp.
BOUNDED_KERNEL(1024) add_lines(float* out, const float* partial, i64 lines, i64 columns) {
    __shared__ float sums[32][33];
    int across = threadIdx.x & 31, down = threadIdx.x >> 5;
    i64 column = (i64)blockIdx.x * 32 + across;
    float sum = 0.0f;
    if (column < columns)
#pragma unroll 8
        for (i64 line = down; line < lines; line += 32) sum += partial[line * columns + column];
    sums[down][across] = sum;
    __syncthreads();
    column = (i64)blockIdx.x * 32 + down;
    sum = warp_sum(sums[across][down]);
    if (across == 0 && column < columns) out[column] += sum;
}

// One launch handles many runs of numbers, in chunks of 2048. A table gives the address of each run
// and the index of its first chunk; run_of finds the run of a chunk.
#define CHUNK 2048

// A thread has eight elements of a chunk: four at in_chunk, and four half a chunk later.
#define HALF_CHUNK (CHUNK / 2)

DEVICE i64 in_chunk(i64 chunk) { return chunk * CHUNK + threadIdx.x * 4; }

// Loads a thread's eight numbers of N tensors, all at once; numbers beyond `count` are 0.
template <int N> DEVICE void load_halves(const float* const (&p)[N], i64 count, float (&x)[N][8]) {
    bool whole = count >= HALF_CHUNK + 4;
#pragma unroll
    for (int n = 0; n < N; n++) whole = whole && is_aligned(p[n]);
    if (whole) {
        Raw<float> raw[N];
#pragma unroll
        for (int n = 0; n < N; n++) {
            raw[n].low = *(const Words*)p[n];
            raw[n].high = *(const Words*)(p[n] + HALF_CHUNK);
        }
#pragma unroll
        for (int n = 0; n < N; n++) unpack(raw[n], x[n]);
        return;
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            i64 at = i < 4 ? i : HALF_CHUNK + i - 4;
            x[n][i] = at < count ? p[n][at] : 0.0f;
        }
}

template <class T> DEVICE void store_halves(T* p, i64 count, const float (&x)[8]) {
    store4(p, count, x);
    store4(p + HALF_CHUNK, count - HALF_CHUNK, x + 4);
}

template <class R> DEVICE i64 run_of(const R* runs, i64 count, i64 chunk) {
    i64 low = 0, high = count;
    while (high - low > 1) {
        i64 middle = (low + high) / 2;
        if (runs[middle].first <= chunk) low = middle;
        else high = middle;
    }
    return low;
}

// A run of numbers: its squares add to the norm if `counts`, else it is only checked to be finite.
struct Numbers {
    const float* x;
    i64 n, first, counts;
};

// The sum over a block of 256 threads, in 64 bits, in a fixed order.
DEVICE double sum_256(double x, double* lanes) {
    lanes[threadIdx.x] = x;
    __syncthreads();
    for (int step = 128; step > 0; step /= 2) {
        if (threadIdx.x < step) lanes[threadIdx.x] += lanes[threadIdx.x + step];
        __syncthreads();
    }
    return lanes[0];
}

// partial[block] = its sum of squares, in 64 bits; not finite if any number of the runs is not.
KERNEL square_sum(double* partial, const Numbers* runs, i64 count, i64 chunks) {
    __shared__ double lanes[256];
    double sum = 0.0;
    for (i64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        Numbers run = runs[run_of(runs, count, chunk)];
        i64 i = in_chunk(chunk - run.first);
        if (i >= run.n) continue;
        float v[1][8];
        load_halves({run.x + i}, run.n - i, v);
        float square = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) square += run.counts ? v[0][j] * v[0][j] : v[0][j] * 0.0f;
        sum += square;
    }
    sum = sum_256(sum, lanes);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// The square of the gradient's norm, and the factor by which clipping multiplies the gradient; NaN
// if the norm is NaN.
struct Norm {
    double squares;
    float scale;
};

KERNEL clip(Norm* norm, const double* partial, i64 lines, double limit) {
    __shared__ double lanes[256];
    double sum = 0.0;
    for (i64 line = threadIdx.x; line < lines; line += blockDim.x) sum += partial[line];
    sum = sum_256(sum, lanes);
    if (threadIdx.x > 0) return;
    double length = sqrt(sum);
    norm->squares = sum;
    double factor = length > limit ? limit / (length + 1e-6) : 1.0;
    norm->scale = (float)(factor + 0.0 * length);
}

// Hyperparameters of a step; a run of weights with states. `weights`: the copy that kernels read.
struct Step {
    float rate, beta1, beta2, correction1, correction2, epsilon, keep;
};

struct Weights {
    float *master, *momentum, *variance;
    const float* gradient;
    void* weights;
    i64 n, first;
    int is_bf16, decays;
};

// AdamW over many runs (Loshchilov and Hutter 2019), with the weights rounded in the same pass.
// Does nothing if the norm is NaN.
KERNEL adamw(const Weights* runs, i64 count, i64 chunks, const Step* step, const Norm* norm) {
    Step s = *step;
    float scale = norm->scale;
    if (!(scale == scale)) return;
    for (i64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        Weights run = runs[run_of(runs, count, chunk)];
        i64 i = in_chunk(chunk - run.first), n = run.n;
        if (i >= n) continue;
        float keep = run.decays ? s.keep : 1.0f;
        float states[4][8];
        load_halves({run.master + i, run.momentum + i, run.variance + i, run.gradient + i}, n - i,
                    states);
        float(&w)[8] = states[0], (&m)[8] = states[1], (&v)[8] = states[2], (&g)[8] = states[3];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            g[j] *= scale;
            m[j] = s.beta1 * m[j] + (1.0f - s.beta1) * g[j];
            v[j] = s.beta2 * v[j] + (1.0f - s.beta2) * g[j] * g[j];
            float root = sqrtf(v[j] / s.correction2) + s.epsilon;
            w[j] = w[j] * keep - s.rate * (m[j] / s.correction1) / root;
        }
        store_halves(run.master + i, n - i, w);
        store_halves(run.momentum + i, n - i, m);
        store_halves(run.variance + i, n - i, v);
        if (!run.weights) continue;
        if (run.is_bf16) store_halves((bf16*)run.weights + i, n - i, w);
        else store_halves((float*)run.weights + i, n - i, w);
    }
}
