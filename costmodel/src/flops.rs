//! Model FLOPs: the numerator of MFU, independent of how the model is run.

use spec::model::{AttentionKind, Mlp, ModelConfig, Moe};
use spec::{Flops, Workload};

/// Model FLOPs per token, forward and backward, without recomputation (PaLM, appendix B; Megatron):
/// 6 per active parameter in matrix products, the head once, plus
/// `6 · Σ_layers heads · (d_qk + d_v) · min(seq, window)`. Causality is not credited.
#[must_use]
pub fn per_token(model: &ModelConfig, workload: &Workload) -> Flops {
    let mut parameters = model.hidden * model.vocab;
    let mut attention = 0u64;
    let (qk, v) = model.attention.head_dims();
    for index in 0..model.layers + model.mtp_layers {
        let class = model.layer_class(index.min(model.layers - 1));
        parameters += attention_parameters(model);
        parameters += match (&model.moe, class.moe) {
            (Some(moe), true) => expert_parameters(model, moe),
            _ => mlp_parameters(model.hidden, &model.mlp, model.mlp.ffn),
        };
        let seen = class
            .window
            .map_or(workload.seq_len, |w| w.min(workload.seq_len));
        attention += model.attention.heads * (qk + v) * seen;
    }
    // A prediction module projects two hidden states to one and has its own pass of the head.
    parameters += model.mtp_layers * (2 * model.hidden * model.hidden + model.hidden * model.vocab);
    Flops(6.0 * (parameters + attention) as f64)
}

fn attention_parameters(model: &ModelConfig) -> u64 {
    let heads = model.attention.heads;
    match model.attention.kind {
        AttentionKind::Grouped {
            kv_heads, head_dim, ..
        } => 2 * model.hidden * heads * head_dim + 2 * model.hidden * kv_heads * head_dim,
        AttentionKind::Latent {
            q_lora_rank,
            kv_lora_rank,
            qk_nope_dim,
            qk_rope_dim,
            v_dim,
        } => {
            let q_out = heads * (qk_nope_dim + qk_rope_dim);
            let query = q_lora_rank.map_or(model.hidden * q_out, |r| r * (model.hidden + q_out));
            let down = model.hidden * (kv_lora_rank + qk_rope_dim);
            let up = kv_lora_rank * heads * (qk_nope_dim + v_dim);
            query + down + up + heads * v_dim * model.hidden
        }
    }
}

fn mlp_parameters(hidden: u64, mlp: &Mlp, ffn: u64) -> u64 {
    let matrices = if mlp.gated { 3 } else { 2 };
    matrices * hidden * ffn
}

fn expert_parameters(model: &ModelConfig, moe: &Moe) -> u64 {
    let active = moe.top_k * moe.expert_ffn + moe.shared_ffn;
    mlp_parameters(model.hidden, &model.mlp, active) + model.hidden * moe.experts
}
