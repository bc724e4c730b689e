// Shared by the attention kernels: sizes, which keys a query sees, how a query-key product becomes
// a score, and dropout of probabilities.
//
// Queries are [batch, q_len, heads · qk_dim], keys and values [batch, kv_len, kv_heads · dim]. Keys
// are in global order. positions[i] is query i's global position: it sees the keys up to there, the
// last `window` of them. Log-sum-exps are [batch, heads, q_len], natural; within kernels, scores
// and their log-sum-exps are in log2 units.

struct Attention {
    i64 q_len, kv_len, heads, kv_heads, qk_dim, v_dim;
    // The most keys that a query sees.
    i64 window;
    float scale;
    // Dropout: words whose upper 24 bits are below this are dropped. `keep` scales the others.
    u32 threshold;
    float keep;
    // Soft cap c of the scaled scores, c · tanh(x / c); 0 for none.
    float cap;
    Stream stream;
    i64 first_sequence, first_head, global_heads, global_q_len;
    // Per head, or null. Slopes: what a score loses per token of distance (ALiBi). Sinks: extra
    // scores in the softmax, without a value, of the queries' type.
    const float* slopes;
    const void* sinks;
};

#define LN_2 0.6931471805599453f

DEVICE bool sees(const Attention& s, i64 position, i64 key) {
    return key <= position && key > position - s.window;
}

DEVICE float slope_of(const Attention& s, i64 head) { return s.slopes ? s.slopes[head] : 0.0f; }

// Whether scores have a cap or slopes.
DEVICE bool is_changed(const Attention& s) { return s.cap > 0.0f || s.slopes; }

// The score of a query-key product x, in log2 units.
DEVICE float score(const Attention& s, float x, float slope, i64 position, i64 key) {
    if (!is_changed(s)) return x * (s.scale * LOG2_E);
    x *= s.scale;
    if (s.cap > 0.0f) x = s.cap * tanhf(x / s.cap);
    return (x - slope * (float)(position - key)) * LOG2_E;
}

// Derivative of the score, in natural units, by the product x.
DEVICE float growth(const Attention& s, float x) {
    if (s.cap == 0.0f) return s.scale;
    float t = tanhf(x * s.scale / s.cap);
    return s.scale * (1.0f - t * t);
}

// Dropout's factor of a probability: 0 or `keep`; 1 without dropout.
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
