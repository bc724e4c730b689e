// Mixtures of experts: the router's choice, the order of rows by expert, and rows out and back.

#define MOST_EXPERTS 256

// The `k` largest of a token's logits, ties to the lower expert, and their probabilities: softmax
// over all, or over the chosen. One warp per token; a lane holds every 32nd expert.
template <class T>
DEVICE void top_k(u32* chosen, float* probabilities, const T* logits, i64 tokens, int experts,
                  int k, int normalise) {
    i64 token = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (token >= tokens) return;
    int lane = threadIdx.x & 31;
    float v[MOST_EXPERTS / 32];
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < MOST_EXPERTS / 32; i++) {
        int e = i * 32 + lane;
        v[i] = e < experts ? as_float(logits[token * experts + e]) : -INFINITY;
        largest = fmaxf(largest, v[i]);
    }
    largest = warp_max(largest);
    float all = 0.0f;
#pragma unroll
    for (int i = 0; i < MOST_EXPERTS / 32; i++)
        if (i * 32 + lane < experts) all += expf(v[i] - largest);
    all = warp_sum(all);
    u32 taken = 0;
    float among = 0.0f;
    for (int slot = 0; slot < k; slot++) {
        float best = -INFINITY;
        int expert = 0x7fffffff;
#pragma unroll
        for (int i = 0; i < MOST_EXPERTS / 32; i++) {
            int e = i * 32 + lane;
            bool free = e < experts && !(taken >> i & 1);
            if (free && (expert == 0x7fffffff || v[i] > best)) {
                best = v[i];
                expert = e;
            }
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            float other = __shfl_xor_sync(0xffffffffu, best, step);
            int theirs = __shfl_xor_sync(0xffffffffu, expert, step);
            bool better = other > best || (other == best && theirs < expert);
            if (expert == 0x7fffffff || (theirs != 0x7fffffff && better)) {
                best = other;
                expert = theirs;
            }
        }
        if ((expert & 31) == lane) taken |= 1u << (expert >> 5);
        float p = expf(best - largest);
        among += p;
        if (lane == 0) {
            chosen[token * k + slot] = (u32)expert;
            probabilities[token * k + slot] = p;
        }
    }
    if (lane == 0) {
        float sum = normalise ? among : all;
        for (int slot = 0; slot < k; slot++) probabilities[token * k + slot] /= sum;
    }
}

// Gradient of the logits from that of the chosen probabilities.
template <class T>
DEVICE void top_k_backward(T* d_logits, const float* gradient, const u32* chosen,
                           const float* probabilities, const T* logits, i64 tokens, int experts,
                           int k, int normalise) {
    i64 token = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (token >= tokens) return;
    int lane = threadIdx.x & 31;
    float along = 0.0f;
    for (int slot = 0; slot < k; slot++)
        along += probabilities[token * k + slot] * gradient[token * k + slot];
    float largest = -INFINITY, all = 0.0f;
    for (int e = lane; e < experts; e += 32)
        largest = fmaxf(largest, as_float(logits[token * experts + e]));
    largest = warp_max(largest);
    for (int e = lane; e < experts; e += 32) all += expf(as_float(logits[token * experts + e]) - largest);
    all = warp_sum(all);
    for (int e = lane; e < experts; e += 32) {
        float whole = expf(as_float(logits[token * experts + e]) - largest) / all;
        float d = normalise ? 0.0f : -whole * along;
        for (int slot = 0; slot < k; slot++)
            if (chosen[token * k + slot] == (u32)e) {
                float g = gradient[token * k + slot];
                d += probabilities[token * k + slot] * (normalise ? g - along : g);
            }
        d_logits[token * experts + e] = rounded<T>(d);
    }
}

#define CHUNK 1024

// How many choices of each chunk go to each expert: counts[expert · chunks + chunk].
KERNEL route_count(u32* counts, const u32* chosen, i64 choices, int experts) {
    __shared__ u32 own[CHUNK];
    i64 start = (i64)blockIdx.x * CHUNK;
    int here = (int)(choices - start < CHUNK ? choices - start : CHUNK);
    for (int i = threadIdx.x; i < here; i += blockDim.x) own[i] = chosen[start + i];
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        u32 count = 0;
        for (int i = 0; i < here; i++) count += own[i] == (u32)e;
        counts[(i64)e * gridDim.x + blockIdx.x] = count;
    }
}

// Where each expert's rows begin, and each chunk's rows among them, in place of the counts. One block.
KERNEL route_scan(u32* counts, u32* offsets, int experts, int chunks) {
    __shared__ u32 totals[MOST_EXPERTS + 1];
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        u32 total = 0;
        for (int c = 0; c < chunks; c++) total += counts[(i64)e * chunks + c];
        totals[e] = total;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 at = 0;
        for (int e = 0; e < experts; e++) {
            u32 total = totals[e];
            totals[e] = at;
            at += total;
        }
        totals[experts] = at;
    }
    __syncthreads();
    for (int e = threadIdx.x; e <= experts; e += blockDim.x) offsets[e] = totals[e];
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        u32 at = totals[e];
        for (int c = 0; c < chunks; c++) {
            u32 count = counts[(i64)e * chunks + c];
            counts[(i64)e * chunks + c] = at;
            at += count;
        }
    }
}

// The choice behind every row and the row of every choice: rows by expert, then by token.
KERNEL route_place(u32* source, u32* place, const u32* starts, const u32* chosen, i64 choices,
                   int experts) {
    __shared__ u32 own[CHUNK];
    i64 start = (i64)blockIdx.x * CHUNK;
    int here = (int)(choices - start < CHUNK ? choices - start : CHUNK);
    for (int i = threadIdx.x; i < here; i += blockDim.x) own[i] = chosen[start + i];
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        u32 at = starts[(i64)e * gridDim.x + blockIdx.x];
        for (int i = 0; i < here; i++)
            if (own[i] == (u32)e) {
                source[at] = (u32)(start + i);
                place[start + i] = at;
                at++;
            }
    }
}

// Rows of tokens by expert: one block per row.
template <class T>
DEVICE void permute(T* out, const T* x, const u32* source, i64 k, i64 columns) {
    i64 row = blockIdx.x, token = source[row] / k;
    for (i64 c = (i64)threadIdx.x * 8; c < columns; c += (i64)blockDim.x * 8) {
        float v[8];
        load8(x + token * columns + c, columns - c, v);
        store8(out + row * columns + c, columns - c, v);
    }
}

// Rows of a token's choices added in the order of their slots, times their probabilities if there
// are any: one block per token.
template <class T>
DEVICE void combine(T* out, const T* rows, const float* probabilities, const u32* place, i64 k,
                    i64 columns) {
    i64 token = blockIdx.x;
    for (i64 c = (i64)threadIdx.x * 8; c < columns; c += (i64)blockDim.x * 8) {
        float sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        for (i64 slot = 0; slot < k; slot++) {
            i64 choice = token * k + slot;
            float p = probabilities ? probabilities[choice] : 1.0f;
            float v[8];
            load8(rows + (i64)place[choice] * columns + c, columns - c, v);
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] += p * v[j];
        }
        store8(out + token * columns + c, columns - c, sum);
    }
}

// Gradients of the rows and of the probabilities: one block per row.
template <class T>
DEVICE void combine_backward(T* d_rows, float* d_probabilities, const T* dy, const T* rows,
                             const float* probabilities, const u32* source, i64 k, i64 columns) {
    __shared__ float scratch[32];
    i64 row = blockIdx.x, choice = source[row], token = choice / k;
    float p = probabilities[choice], along = 0.0f;
    for (i64 c = (i64)threadIdx.x * 8; c < columns; c += (i64)blockDim.x * 8) {
        float d[8], v[8];
        load8(dy + token * columns + c, columns - c, d);
        load8(rows + row * columns + c, columns - c, v);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            along += d[j] * v[j];
            d[j] *= p;
        }
        store8(d_rows + row * columns + c, columns - c, d);
    }
    along = block_sum(along, scratch);
    if (threadIdx.x == 0) d_probabilities[choice] = along;
}

#define EXPERT(name, T)                                                                            \
    KERNEL top_k_##name(u32* chosen, float* probabilities, const T* logits, i64 tokens,            \
                        int experts, int k, int normalise) {                                       \
        top_k(chosen, probabilities, logits, tokens, experts, k, normalise);                       \
    }                                                                                              \
    KERNEL top_k_backward_##name(T* d_logits, const float* gradient, const u32* chosen,            \
                                 const float* probabilities, const T* logits, i64 tokens,          \
                                 int experts, int k, int normalise) {                              \
        top_k_backward(d_logits, gradient, chosen, probabilities, logits, tokens, experts, k,      \
                       normalise);                                                                 \
    }                                                                                              \
    KERNEL permute_##name(T* out, const T* x, const u32* source, i64 k, i64 columns) {             \
        permute(out, x, source, k, columns);                                                       \
    }                                                                                              \
    KERNEL combine_##name(T* out, const T* rows, const float* probabilities, const u32* place,     \
                          i64 k, i64 columns) {                                                    \
        combine(out, rows, probabilities, place, k, columns);                                      \
    }                                                                                              \
    KERNEL combine_backward_##name(T* d_rows, float* d_probabilities, const T* dy, const T* rows,  \
                                   const float* probabilities, const u32* source, i64 k,           \
                                   i64 columns) {                                                  \
        combine_backward(d_rows, d_probabilities, dy, rows, probabilities, source, k, columns);    \
    }

EXPERT(f32, float)
EXPERT(bf16, bf16)
