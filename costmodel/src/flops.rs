//! Model FLOPs: the numerator of MFU, independent of how the model is run.

use catalog::model::{AttentionKind, Mlp, ModelConfig, Moe};
use catalog::{AdaptedModule, Adapters, Flops, Window, Workload};

/// Model FLOPs of one token, forward and backward, without recomputation: 6 per active parameter of matrix products
/// (the head counted once), or 4 if it is frozen, because its gradient is not computed; plus those of attention,
/// `6 · Σ_layers heads · (d_qk + d_v) · keys`, and of recurrences, three times their products' forward. The fields differ
/// in how many keys they count for a query, and in how they count a recurrence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelFlops {
    /// Model FLOPs where attention counts only the keys that a query may see under the causal mask
    /// and the layer's sliding window, averaged over the sequence, and a recurrence counts token by
    /// token. If sequences are padded, or packed with attention within documents, a query sees only
    /// keys of its own document.
    pub once: Flops,
    /// Model FLOPs where attention counts all keys of the sequence or document, or of the window,
    /// as if nothing were masked (PaLM, appendix B), and a recurrence counts as in Megatron-LM.
    /// Megatron-LM's count of causal attention is half of this one.
    pub palm: Flops,
}

/// Computes the model FLOPs of forward and backward per token, without recomputation. Sums are floats, so that models of any
/// size fit.
#[must_use]
pub fn per_token(model: &ModelConfig, workload: &Workload) -> ModelFlops {
    let hidden = model.hidden as f64;
    let head = hidden * model.vocab as f64;
    let mut parameters = head;
    let contexts = workload.contexts();
    let (mut seen, mut all) = (0.0, 0.0);
    let (qk, v) = model.attention.head_dims();
    let per_key = model.attention.heads as f64 * (qk as f64 + v as f64);
    for index in 0..model.layers + model.mtp_layers {
        let class = model.layer_class(index.min(model.layers.saturating_sub(1)));
        parameters += match (&model.moe, class.moe) {
            _ if !class.kind.feeds() => 0.0,
            (Some(moe), true) => expert_parameters(model, moe),
            _ => mlp_parameters(model.hidden, &model.mlp, model.mlp.ffn as f64),
        };
        if let Some(hybrid) = model.hybrid.as_ref().filter(|_| class.kind.recurs()) {
            let recurrence = &hybrid.recurrence;
            parameters += (recurrence.projections(model.hidden) + recurrence.convolution()) as f64;
            // Forward once and backward twice, as 6 per parameter.
            let [plain, megatron] = recurrence.token_operations();
            let tokens: f64 = contexts.iter().map(|context| context.tokens).sum();
            seen += plain / 2.0 * tokens;
            all += megatron / 2.0 * tokens;
        }
        if !class.kind.attends() {
            continue;
        }
        parameters += attention_parameters(model);
        for context in &contexts {
            let window = class.window.unwrap_or(Window::Sliding(context.length));
            seen += per_key * window.mean(context.length) * context.tokens;
            all += per_key * window.tokens().min(context.length) as f64 * context.tokens;
        }
    }
    // A multi-token-prediction module projects two hidden states to one and runs the head once more.
    parameters += model.mtp_layers as f64 * (2.0 * hidden * hidden + head);
    if let Some(adapters) = &model.adapters {
        // Of the three products with a frozen weight, the one that gives its gradient is not computed.
        parameters =
            parameters * (2.0 / 3.0) + model.layers as f64 * adapter_parameters(model, adapters);
    }
    ModelFlops {
        once: Flops(6.0 * (parameters + seen)),
        palm: Flops(6.0 * (parameters + all)),
    }
}

/// Parameters of a layer's adapters, each linear layer counted by itself.
fn adapter_parameters(model: &ModelConfig, adapters: &Adapters) -> f64 {
    let hidden = model.hidden as f64;
    let (qk, v) = model.attention.head_dims();
    let [heads, kv_heads] = [model.attention.heads, model.attention.kv_heads()];
    let width = |heads: u64, dim: u64| heads as f64 * dim as f64;
    let widths = |module: AdaptedModule| match module {
        AdaptedModule::Q => hidden + width(heads, qk),
        AdaptedModule::K => hidden + width(kv_heads, qk),
        AdaptedModule::V => hidden + width(kv_heads, v),
        AdaptedModule::Proj => width(heads, v) + hidden,
        AdaptedModule::Fc1 => {
            let matrices = if model.mlp.gated { 2.0 } else { 1.0 };
            matrices * (hidden + model.mlp.ffn as f64)
        }
        AdaptedModule::Fc2 => model.mlp.ffn as f64 + hidden,
    };
    adapters.rank as f64 * adapters.modules.modules().map(widths).sum::<f64>()
}

fn attention_parameters(model: &ModelConfig) -> f64 {
    let (hidden, heads) = (model.hidden as f64, model.attention.heads as f64);
    match model.attention.kind {
        AttentionKind::Grouped {
            kv_heads, head_dim, ..
        } => {
            let gated = (model.hybrid.as_ref()).is_some_and(|of| of.gated_attention);
            let gate = if gated { heads } else { 0.0 };
            hidden * head_dim as f64 * (2.0 * (heads + kv_heads as f64) + gate)
        }
        AttentionKind::Latent {
            q_lora_rank,
            kv_lora_rank,
            qk_nope_dim,
            qk_rope_dim,
            v_dim,
        } => {
            let [rank, nope, rope, v] =
                [kv_lora_rank, qk_nope_dim, qk_rope_dim, v_dim].map(|size| size as f64);
            let q_out = heads * (nope + rope);
            let query = q_lora_rank.map_or(hidden * q_out, |r| r as f64 * (hidden + q_out));
            query + hidden * (rank + rope) + rank * heads * (nope + v) + heads * v * hidden
        }
    }
}

fn mlp_parameters(hidden: u64, mlp: &Mlp, ffn: f64) -> f64 {
    let matrices = if mlp.gated { 3.0 } else { 2.0 };
    matrices * hidden as f64 * ffn
}

fn expert_parameters(model: &ModelConfig, moe: &Moe) -> f64 {
    let active = moe.top_k as f64 * moe.expert_ffn as f64 + moe.shared_ffn as f64;
    mlp_parameters(model.hidden, &model.mlp, active) + model.hidden as f64 * moe.experts as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Model FLOPs per token of a Nemotron-H with this layer pattern and width 8, without its head.
    fn hybrid(pattern: &str) -> ModelFlops {
        let text = format!(
            r#"{{"model_type": "nemotron_h", "hidden_size": 8, "vocab_size": 16, "hybrid_override_pattern": "{pattern}",
                "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 32,
                "mamba_num_heads": 4, "mamba_head_dim": 4, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4}}"#
        );
        let model = catalog::hf::decode(&text, "test", "hybrid").expect("a model");
        let workload = Workload::new(catalog::WorkloadSizes {
            gpus: 1,
            seq_len: 64,
            global_batch: 1,
            precision: catalog::Precision::Bf16,
        });
        let mut flops = per_token(&model, &workload.expect("a workload"));
        let head = 6.0 * 8.0 * 16.0;
        flops.once.0 -= head;
        flops.palm.0 -= head;
        flops
    }

    #[test]
    fn each_layer_of_a_hybrid_counts_what_it_has() {
        // In and out projections, four taps of 16 + 2 · 32 channels, and the state: 4 · 16 · 16 operations forward, by
        // Megatron-LM's count 7 · 16 · 16.
        let weights = 8.0 * (2.0 * 16.0 + 2.0 * 32.0 + 4.0) + 16.0 * 8.0 + 4.0 * 80.0;
        let state_space = hybrid("M");
        assert_eq!(state_space.once.0, 6.0 * weights + 3.0 * 4.0 * 256.0);
        assert_eq!(state_space.palm.0, 6.0 * weights + 3.0 * 7.0 * 256.0);
        let feed_forward = hybrid("-");
        assert_eq!(feed_forward.once.0, 6.0 * 2.0 * 8.0 * 32.0);
        assert_eq!(feed_forward.palm, feed_forward.once);
        // Projections of 2 query, 1 key and 1 value heads and back; 32.5 of 64 keys are seen.
        let attention = hybrid("*");
        assert_eq!(attention.once.0, 6.0 * (8.0 * 24.0 + 2.0 * 8.0 * 32.5));
        assert_eq!(attention.palm.0, 6.0 * (8.0 * 24.0 + 2.0 * 8.0 * 64.0));
        let all = hybrid("M-*");
        let sum = state_space.once.0 + feed_forward.once.0 + attention.once.0;
        assert_eq!(all.once.0, sum);
    }
}
