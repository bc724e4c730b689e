// Kernels per token: embeddings and the loss.

// Copies table rows by id; an id outside [first, first + count) gives −0.
template <class T, class Out>
DEVICE void embedding(Out* out, const T* table, const u32* ids, i64 first, i64 count, i64 columns) {
    i64 at = (i64)ids[blockIdx.x] - first;
    bool here = at >= 0 && at < count;
    for (i64 c = (i64)threadIdx.x * 8; c < columns; c += (i64)blockDim.x * 8) {
        float v[8];
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = -0.0f;
        if (here) load8(table + at * columns + c, columns - c, v);
        store8(out + (i64)blockIdx.x * columns + c, columns - c, v);
    }
}

// Gradients of table rows. A block adds up the tokens of one row in their order: `order` lists
// tokens by row, `starts` says where a row's tokens begin, `rows` are the rows that have tokens.
// Surplus blocks have none.
template <class T>
DEVICE void embedding_backward(float* gradient, const T* dy, const u32* order, const u32* starts,
                               const u32* rows, i64 columns) {
    u32 start = starts[blockIdx.x], end = starts[blockIdx.x + 1];
    if (start == end) return;
    i64 row = rows[blockIdx.x];
    for (i64 c = (i64)threadIdx.x * 8; c < columns; c += (i64)blockDim.x * 8) {
        float sum[8];
        load8(gradient + row * columns + c, columns - c, sum);
        for (u32 i = start; i < end; i++) {
            float v[8];
            load8(dy + (i64)order[i] * columns + c, columns - c, v);
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] += v[j];
        }
        store8(gradient + row * columns + c, columns - c, sum);
    }
}

// Softmax cross-entropy of one row of logits per block. `sums` holds three lines of one number per
// row: the largest logit, the sum of exponentials relative to it, the label's logit. `measure`
// computes them. `finish` writes the loss and replaces the logits by their gradient times `scale`.
template <class T>
DEVICE void loss(T* logits, float* losses, float* sums, const u32* labels, i64 rows, i64 columns,
                 i64 first, float scale, int measure, int finish) {
    __shared__ float scratch[32];
    i64 row = blockIdx.x;
    T* x = logits + row * columns;
    i64 label = (i64)labels[row] - first;
    bool here = label >= 0 && label < columns;
    float largest, sum, target;
    if (measure) {
        target = here ? as_float(x[label]) : -0.0f;
        largest = -INFINITY;
        sum = 0.0f;
        for (i64 c = (i64)threadIdx.x * 8; c < columns; c += (i64)blockDim.x * 8) {
            float v[8];
            load8(x + c, columns - c, v);
            if (columns - c < 8)
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (c + j >= columns) v[j] = -INFINITY;
            float before = largest;
#pragma unroll
            for (int j = 0; j < 8; j++) largest = fmaxf(largest, v[j]);
            if (before != largest) sum *= exponential(before - largest);
#pragma unroll
            for (int j = 0; j < 8; j++) sum += exponential(v[j] - largest);
        }
        float own = largest;
        largest = block_max(own, scratch);
        sum = block_sum(sum > 0.0f ? sum * exponential(own - largest) : 0.0f, scratch);
        if (threadIdx.x == 0) {
            sums[row] = largest;
            sums[rows + row] = sum;
            sums[2 * rows + row] = target;
        }
    } else {
        largest = sums[row];
        sum = sums[rows + row];
        target = sums[2 * rows + row];
    }
    if (!finish) return;
    float factor = scale / sum;
    for (i64 c = (i64)threadIdx.x * 8; c < columns; c += (i64)blockDim.x * 8) {
        float v[8];
        load8(x + c, columns - c, v);
        int own = here && label >= c && label < c + 8 ? (int)(label - c) : -1;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[j] = exponential(v[j] - largest) * factor;
            if (j == own) v[j] -= scale;
        }
        store8(x + c, columns - c, v);
    }
    if (threadIdx.x == 0) losses[row] = largest + logf(sum) - target;
}

// Merges the loss's sums of all vocabulary shards, a thread per row. Only one shard has the label;
// the −0 of the others adds nothing.
KERNEL loss_merge(float* sums, const float* shards, i64 count, i64 rows) {
    i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float largest = -INFINITY, sum = 0.0f, target = -0.0f;
    for (i64 s = 0; s < count; s++) largest = fmaxf(largest, shards[3 * s * rows + row]);
    for (i64 s = 0; s < count; s++) {
        const float* own = shards + 3 * s * rows + row;
        sum += own[rows] * expf(own[0] - largest);
        target += own[2 * rows];
    }
    sums[row] = largest;
    sums[rows + row] = sum;
    sums[2 * rows + row] = target;
}

#define TOKEN(name, T)                                                                             \
    KERNEL embedding_##name(T* out, const T* table, const u32* ids, i64 first, i64 count,          \
                            i64 columns) {                                                         \
        embedding(out, table, ids, first, count, columns);                                         \
    }                                                                                              \
    KERNEL embedding_backward_##name(float* gradient, const T* dy, const u32* order,               \
                                     const u32* starts, const u32* rows, i64 columns) {            \
        embedding_backward(gradient, dy, order, starts, rows, columns);                            \
    }                                                                                              \
    KERNEL loss_##name(T* logits, float* losses, float* sums, const u32* labels, i64 rows,         \
                       i64 columns, i64 first, float scale, int measure, int finish) {             \
        loss(logits, losses, sums, labels, rows, columns, first, scale, measure, finish);          \
    }

TOKEN(f32, float)
TOKEN(bf16, bf16)
