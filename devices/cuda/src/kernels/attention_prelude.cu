// What the attention kernels share: sizes, which keys a query sees, how products become scores, dropout of
// probabilities.
//
// Queries are [batch, q_len, heads · qk_dim], keys and values [batch, kv_len, kv_heads · dim]. Keys lie
// in global order; a query stands where `positions` says and sees the keys up to its own, the last
// `window` of them. Log-sum-exps are [batch, heads, q_len], natural;
// within kernels scores and their sums are in powers of two.

struct Attention {
    i64 q_len, kv_len, heads, kv_heads, qk_dim, v_dim;
    // Keys seen at most.
    i64 window;
    float scale;
    // Dropout: nothing is dropped below a threshold of 0.
    u32 threshold;
    float keep;
    // Bound of the scaled scores, c · tanh(x / c); none at 0.
    float cap;
    Stream stream;
    i64 first_sequence, first_head, global_heads, global_q_len;
    // By head, or none: what a score loses per token of distance; a score beside the others, of the queries'
    // type, whose weight goes nowhere.
    const float* slopes;
    const void* sinks;
};

#define LN_2 0.6931471805599453f

DEVICE bool sees(const Attention& s, i64 position, i64 key) {
    return key <= position && key > position - s.window;
}

DEVICE float slope_of(const Attention& s, i64 head) { return s.slopes ? s.slopes[head] : 0.0f; }

// Whether scores are more than scaled products.
DEVICE bool is_changed(const Attention& s) { return s.cap > 0.0f || s.slopes; }

// A product as a score, in powers of two.
DEVICE float score(const Attention& s, float x, float slope, i64 position, i64 key) {
    if (!is_changed(s)) return x * (s.scale * LOG2_E);
    x *= s.scale;
    if (s.cap > 0.0f) x = s.cap * tanhf(x / s.cap);
    return (x - slope * (float)(position - key)) * LOG2_E;
}

// How a score grows with its product.
DEVICE float growth(const Attention& s, float x) {
    if (s.cap == 0.0f) return s.scale;
    float t = tanhf(x * s.scale / s.cap);
    return s.scale * (1.0f - t * t);
}

// What dropout multiplies a probability by.
DEVICE float kept(const Attention& s, i64 b, i64 head, i64 position, i64 key) {
    if (s.threshold == 0) return 1.0f;
    i64 line = ((s.first_sequence + b) * s.global_heads + s.first_head + head) * s.global_q_len + position;
    u64 index = (u64)(line * s.kv_len + key);
    u32 word[4];
    philox(s.stream, index / 4, word);
    u32 lane = (u32)(index & 3);
    u32 own = lane == 0 ? word[0] : lane == 1 ? word[1] : lane == 2 ? word[2] : word[3];
    return is_kept(own, s.threshold) ? s.keep : 0.0f;
}
