// Mixtures of experts: routing, the order of rows by expert, and permutation of rows and back.

#define MOST_EXPERTS 256

// How experts are chosen and weighed. Scores are sigmoids of the logits or their softmax; weights
// of the chosen are normalised or not, and scaled. With several groups, experts come from the best
// ones: groups rank by their best score, or with sigmoids by the sum of their two best.
struct Router {
    int experts, k, sigmoid, normalise, groups, best_groups;
    float scale;
};

// An expert and its value; NOBODY means no expert.
#define NOBODY 0x7fffffff
struct Best {
    float value;
    int expert;
};

DEVICE Best better(Best a, Best b) {
    if (b.expert == NOBODY) return a;
    bool wins = b.value > a.value || (b.value == a.value && b.expert < a.expert);
    return a.expert == NOBODY || wins ? b : a;
}

// The best of a warp's values. Ties go to the lower expert; NaN counts as −∞, so that all lanes
// agree. A lane holds every 32nd value; bit i of `open` says whether its i-th value takes part.
DEVICE Best best_of(const float (&v)[MOST_EXPERTS / 32], u32 open) {
    int lane = threadIdx.x & 31;
    Best best = {-INFINITY, NOBODY};
#pragma unroll
    for (int i = 0; i < MOST_EXPERTS / 32; i++)
        if (open >> i & 1) best = better(best, {fmaxf(v[i], -INFINITY), i * 32 + lane});
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        Best other;
        other.value = __shfl_xor_sync(0xffffffffu, best.value, step);
        other.expert = __shfl_xor_sync(0xffffffffu, best.expert, step);
        best = better(best, other);
    }
    return best;
}

// Removes an expert from the lanes' `open` bits.
DEVICE u32 without(u32 open, int expert) {
    return (expert & 31) == (int)(threadIdx.x & 31) ? open & ~(1u << (expert >> 5)) : open;
}

// The bits of `open` whose experts are in the best groups.
DEVICE u32 in_best_groups(const float (&v)[MOST_EXPERTS / 32], u32 open, const Router& r) {
    int lane = threadIdx.x & 31, size = r.experts / r.groups;
    auto of_group = [&](int group) {
        u32 own = 0;
        for (int i = 0; i < MOST_EXPERTS / 32; i++)
            if ((open >> i & 1) && (i * 32 + lane) / size == group) own |= 1u << i;
        return own;
    };
    // Lane g holds the score of group g.
    float scores[MOST_EXPERTS / 32] = {-INFINITY};
    for (int group = 0; group < r.groups; group++) {
        u32 own = of_group(group);
        Best first = best_of(v, own);
        float score = first.value;
        if (r.sigmoid && size > 1) score += best_of(v, without(own, first.expert)).value;
        if (group == lane) scores[0] = score;
    }
    u32 left = lane < r.groups, chosen = 0;
    for (int i = 0; i < r.best_groups; i++) {
        int group = best_of(scores, left).expert;
        left = without(left, group);
        chosen |= of_group(group);
    }
    return chosen;
}

// Chooses the `k` best experts of every token, ties to the lower one, and their weights. `bias`, if
// not null, is added for the choice only. One warp per token; a lane holds every 32nd expert.
template <class T>
DEVICE void top_k(u32* chosen, float* weights, const T* logits, const float* bias, i64 tokens,
                  Router r) {
    i64 token = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (token >= tokens) return;
    int lane = threadIdx.x & 31;
    const T* row = logits + token * r.experts;
    float v[MOST_EXPERTS / 32];
    float largest = -INFINITY, all = 0.0f;
    u32 open = 0;
#pragma unroll
    for (int i = 0; i < MOST_EXPERTS / 32; i++) {
        int e = i * 32 + lane;
        v[i] = -INFINITY;
        if (e >= r.experts) continue;
        v[i] = as_float(row[e]);
        open |= 1u << i;
        largest = fmaxf(largest, v[i]);
    }
    largest = warp_max(largest);
#pragma unroll
    for (int i = 0; i < MOST_EXPERTS / 32; i++) {
        if (!(open >> i & 1)) continue;
        all += expf(v[i] - largest);
        // Softmax preserves the order of the logits, so the choice needs no softmax.
        if (r.sigmoid) v[i] = sigmoid(v[i]);
        if (bias) v[i] += bias[i * 32 + lane];
    }
    all = warp_sum(all);
    if (r.groups > 1) open = in_best_groups(v, open, r);
    float among = 0.0f;
    for (int slot = 0; slot < r.k; slot++) {
        int expert = best_of(v, open).expert;
        open = without(open, expert);
        float x = as_float(row[expert]), score = r.sigmoid ? sigmoid(x) : expf(x - largest);
        among += score;
        if (lane == 0) {
            chosen[token * r.k + slot] = (u32)expert;
            weights[token * r.k + slot] = score;
        }
    }
    if (lane == 0) {
        float sum = r.normalise ? among : r.sigmoid ? 1.0f : all;
        for (int slot = 0; slot < r.k; slot++) weights[token * r.k + slot] *= r.scale / sum;
    }
}

// Gradient of the logits from the gradient of the chosen experts' weights.
template <class T>
DEVICE void top_k_backward(T* d_logits, const float* gradient, const u32* chosen,
                           const float* weights, const T* logits, i64 tokens, Router r) {
    i64 token = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (token >= tokens) return;
    int lane = threadIdx.x & 31;
    const T* row = logits + token * r.experts;
    float along = 0.0f;
    for (int slot = 0; slot < r.k; slot++)
        along += weights[token * r.k + slot] * gradient[token * r.k + slot];
    float largest = -INFINITY, all = 0.0f;
    for (int e = lane; e < r.experts; e += 32) largest = fmaxf(largest, as_float(row[e]));
    largest = warp_max(largest);
    for (int e = lane; e < r.experts; e += 32) all += expf(as_float(row[e]) - largest);
    all = warp_sum(all);
    for (int e = lane; e < r.experts; e += 32) {
        float x = as_float(row[e]);
        float d = r.normalise || r.sigmoid ? 0.0f : -expf(x - largest) / all * along;
        for (int slot = 0; slot < r.k; slot++)
            if (chosen[token * r.k + slot] == (u32)e) {
                float w = weights[token * r.k + slot], g = gradient[token * r.k + slot];
                float own = w * (r.normalise ? g - along / r.scale : g);
                d += r.sigmoid ? own * (1.0f - sigmoid(x)) : own;
            }
        d_logits[token * r.experts + e] = rounded<T>(d);
    }
}

// Choices per chunk. Each of eight warps handles an eighth of a chunk, 32 choices at a time.
#define CHUNK 1024
#define EIGHTH (CHUNK / 8)

// How many choices of each chunk go to each expert: counts[expert · chunks + chunk].
KERNEL route_count(u32* counts, const u32* chosen, i64 choices, int experts) {
    __shared__ u32 own[MOST_EXPERTS];
    i64 start = (i64)blockIdx.x * CHUNK, end = start + CHUNK < choices ? start + CHUNK : choices;
    for (int e = threadIdx.x; e < experts; e += blockDim.x) own[e] = 0;
    __syncthreads();
    for (i64 i = start + threadIdx.x; i < end; i += blockDim.x) atomicAdd(&own[chosen[i]], 1u);
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x)
        counts[(i64)e * gridDim.x + blockIdx.x] = own[e];
}

// offsets[e] = first row of expert e. Each count becomes the first row of its expert and chunk.
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

// source[row] = the row's choice, place[choice] = its row. Rows are sorted by expert, then token.
KERNEL route_place(u32* source, u32* place, const u32* starts, const u32* chosen, i64 choices,
                   int experts) {
    // Next row by warp and expert.
    __shared__ u32 next[8][MOST_EXPERTS];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    i64 first = (i64)blockIdx.x * CHUNK + warp * EIGHTH + lane;
    for (int e = lane; e < experts; e += 32) next[warp][e] = 0;
    __syncwarp();
    for (i64 i = first; i < first + EIGHTH; i += 32)
        if (i < choices) atomicAdd(&next[warp][chosen[i]], 1u);
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        u32 at = starts[(i64)e * gridDim.x + blockIdx.x];
        for (int w = 0; w < 8; w++) {
            u32 count = next[w][e];
            next[w][e] = at;
            at += count;
        }
    }
    __syncthreads();
    for (i64 i = first; i < first + EIGHTH; i += 32) {
        bool is_one = i < choices;
        u32 expert = is_one ? chosen[i] : ~0u, row = 0;
        // Lanes whose choices have the same expert; lanes are in the order of tokens.
        u32 same = __match_any_sync(0xffffffffu, expert);
        if (is_one) {
            row = next[warp][expert] + __popc(same & ((1u << lane) - 1));
            source[row] = (u32)i;
            place[i] = row;
        }
        __syncwarp();
        if (is_one && same >> lane == 1) next[warp][expert] = row + 1;
        __syncwarp();
    }
}

// Copies every row's token, so that rows are sorted by expert. One block per row.
template <class T>
DEVICE void permute(T* out, const T* x, const u32* source, i64 k, i64 columns) {
    i64 row = blockIdx.x, token = source[row] / k;
    each_of_row(out + row * columns, x + token * columns, columns, [](float v) { return v; });
}

// Adds up the rows of a token's choices in the order of slots, times their probabilities if these
// are not null. One block per token.
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

// Gradients of combine's rows and probabilities. One block per row.
template <class T>
DEVICE void combine_backward(T* d_rows, float* d_probabilities, const T* dy, const T* rows,
                             const float* probabilities, const u32* source, i64 k, i64 columns) {
    __shared__ float scratch[32];
    i64 row = blockIdx.x, choice = source[row], token = choice / k;
    float p = probabilities[choice], along = 0.0f;
    auto scaled = [&](float d, float v) {
        along += d * v;
        return d * p;
    };
    each_of_row(d_rows + row * columns, dy + token * columns, rows + row * columns, columns, scaled);
    along = block_sum(along, scratch);
    if (threadIdx.x == 0) d_probabilities[choice] = along;
}

// The expert that a row belongs to: the last whose rows begin at or before it.
DEVICE int expert_of(const u32* offsets, int experts, u32 row) {
    int low = 0, high = experts;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (offsets[middle] <= row) low = middle;
        else high = middle;
    }
    return low;
}

// Rows plus the bias of their expert: one block per row.
template <class T>
DEVICE void expert_bias(T* out, const T* x, const T* bias, const u32* offsets, int experts,
                        i64 columns) {
    i64 row = blockIdx.x, at = expert_of(offsets, experts, blockIdx.x) * columns;
    each_of_row(out + row * columns, x + row * columns, bias + at, columns,
                [](float v, float b) { return v + b; });
}

// gradient[expert] += the sum of its rows. A block has 256 columns of one expert: 32 threads
// across, eight columns each, and 8 threads down, each on every eighth row.
template <class T>
DEVICE void expert_bias_backward(float* gradient, const T* dy, const u32* offsets, i64 columns) {
    __shared__ float lines[8][256];
    int across = threadIdx.x & 31, down = threadIdx.x >> 5;
    i64 expert = blockIdx.y, c = ((i64)blockIdx.x * 32 + across) * 8, end = offsets[expert + 1];
    float sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    if (c < columns)
        for (i64 row = (i64)offsets[expert] + down; row < end; row += 8) {
            float v[8];
            load8(dy + row * columns + c, columns - c, v);
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] += v[j];
        }
    float total = column_total(sum, lines);
    i64 column = (i64)blockIdx.x * 256 + threadIdx.x;
    if (column < columns) gradient[expert * columns + column] += total;
}

#define EXPERT(name, T)                                                                            \
    KERNEL top_k_##name(u32* chosen, float* weights, const T* logits, const float* bias,           \
                        i64 tokens, Router r) {                                                    \
        top_k(chosen, weights, logits, bias, tokens, r);                                           \
    }                                                                                              \
    KERNEL top_k_backward_##name(T* d_logits, const float* gradient, const u32* chosen,            \
                                 const float* weights, const T* logits, i64 tokens, Router r) {    \
        top_k_backward(d_logits, gradient, chosen, weights, logits, tokens, r);                    \
    }                                                                                              \
    KERNEL expert_bias_##name(T* out, const T* x, const T* bias, const u32* offsets, int experts,  \
                              i64 columns) {                                                       \
        expert_bias(out, x, bias, offsets, experts, columns);                                      \
    }                                                                                              \
    KERNEL expert_bias_backward_##name(float* gradient, const T* dy, const u32* offsets,           \
                                       i64 columns) {                                              \
        expert_bias_backward(gradient, dy, offsets, columns);                                      \
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
