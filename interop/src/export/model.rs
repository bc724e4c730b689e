//! A model's sizes as Megatron-LM options, for Megatron-LM's own GPT model.

use catalog::RopeScaling;
use catalog::model::{
    Activation, AttentionKind, ModelConfig, NormKind, Position, Residual, WindowPattern,
};

use super::flag::Flag;
use super::refusal::Limits;

/// Options that make Megatron-LM build this model; what it cannot build is refused.
pub(crate) fn flags(model: &ModelConfig, limits: &mut Limits) -> Vec<Flag> {
    refuse(model, limits);
    let mut flags = vec![
        Flag::value("--num-layers", model.layers),
        Flag::value("--hidden-size", model.hidden),
        Flag::value("--ffn-hidden-size", model.mlp.ffn),
        Flag::value("--vocab-size", model.vocab),
    ];
    // The vocabulary is the model's; padding it for a tensor-parallel size would be another model.
    flags.push(Flag::value("--make-vocab-size-divisible-by", 1));
    attention(model, &mut flags);
    match model.norm.kind {
        NormKind::RmsNorm => flags.push(Flag::value("--normalization", "RMSNorm")),
        NormKind::LayerNorm => flags.push(Flag::value("--normalization", "LayerNorm")),
    }
    flags.push(Flag::value("--norm-epsilon", model.constants.norm_epsilon));
    position(model, &mut flags);
    match model.mlp.activation {
        Activation::Silu => flags.push(Flag::switch("--swiglu")),
        Activation::Relu2 => flags.push(Flag::switch("--squared-relu")),
        Activation::Gelu | Activation::Relu => {}
    }
    if !model.tied_embeddings {
        flags.push(Flag::switch("--untie-embeddings-and-output-weights"));
    }
    if !model.mlp.bias {
        flags.push(Flag::switch("--disable-bias-linear"));
    }
    flags.push(Flag::value("--hidden-dropout", model.hidden_dropout));
    flags.push(Flag::value("--attention-dropout", model.attention_dropout));
    experts(model, &mut flags);
    if model.mtp_layers > 0 {
        flags.push(Flag::value("--mtp-num-layers", model.mtp_layers));
    }
    flags
}

fn refuse(model: &ModelConfig, limits: &mut Limits) {
    let rotates = matches!(model.position, Position::Rope { .. });
    let lacks = [
        (
            rotates && model.constants.rope_theta.fract() != 0.0,
            "a rotary base that is no whole number",
        ),
        (
            model.position == Position::Alibi,
            "linear attention biases (ALiBi)",
        ),
        (
            matches!(model.residual, Residual::Parallel { .. }),
            "parallel attention and MLP",
        ),
        (
            model.residual == Residual::Sandwich,
            "norms after attention and MLP",
        ),
        (model.embedding_norm, "a norm after the embedding"),
        (model.mlp.activation == Activation::Relu, "ReLU"),
        (
            model.mlp.gated && model.mlp.activation == Activation::Gelu,
            "exact gated GELU (it has the quick approximation only)",
        ),
    ];
    for (has, what) in lacks {
        limits.refuse(
            has,
            format!("model {}", model.name),
            format!("its GPT model has no option for {what}"),
            None,
        );
    }
}

fn attention(model: &ModelConfig, flags: &mut Vec<Flag>) {
    let a = &model.attention;
    flags.push(Flag::value("--num-attention-heads", a.heads));
    match a.kind {
        AttentionKind::Grouped {
            kv_heads,
            head_dim,
            qk_norm,
            ..
        } => {
            if kv_heads != a.heads {
                flags.push(Flag::switch("--group-query-attention"));
                flags.push(Flag::value("--num-query-groups", kv_heads));
            }
            flags.push(Flag::value("--kv-channels", head_dim));
            if qk_norm {
                flags.push(Flag::switch("--qk-layernorm"));
            }
        }
        AttentionKind::Latent {
            q_lora_rank,
            kv_lora_rank,
            qk_nope_dim,
            qk_rope_dim,
            v_dim,
        } => {
            flags.push(Flag::switch("--multi-latent-attention"));
            if let Some(rank) = q_lora_rank {
                flags.push(Flag::value("--q-lora-rank", rank));
            }
            flags.push(Flag::value("--kv-lora-rank", kv_lora_rank));
            flags.push(Flag::value("--qk-head-dim", qk_nope_dim));
            flags.push(Flag::value("--qk-pos-emb-head-dim", qk_rope_dim));
            flags.push(Flag::value("--v-head-dim", v_dim));
            flags.push(Flag::switch("--qk-layernorm"));
        }
    }
    if a.qkv_bias && !model.mlp.bias {
        flags.push(Flag::switch("--add-qkv-bias"));
    }
    if a.sinks {
        flags.push(Flag::value("--softmax-type", "learnable"));
    }
    match a.window {
        WindowPattern::Full => {}
        WindowPattern::All { window } => {
            flags.push(Flag::value("--window-size", format!("{},0", window - 1)));
        }
        WindowPattern::Alternating { window, period } => {
            flags.push(Flag::value("--window-size", format!("{},0", window - 1)));
            flags.push(Flag::value("--window-attn-skip-freq", period));
        }
    }
}

fn position(model: &ModelConfig, flags: &mut Vec<Flag>) {
    match model.position {
        Position::Rope { dims } => {
            flags.push(Flag::value("--position-embedding-type", "rope"));
            flags.push(Flag::value("--rotary-base", model.constants.rope_theta));
            let (head, _) = model.attention.head_dims();
            let grouped = matches!(model.attention.kind, AttentionKind::Grouped { .. });
            if grouped && dims != head {
                let share = dims as f64 / head as f64;
                flags.push(Flag::value("--rotary-percent", share));
            }
            if matches!(model.constants.rope_scaling, RopeScaling::Llama3 { .. }) {
                flags.push(Flag::switch("--use-rope-scaling"));
            }
        }
        Position::Learned { .. } => {
            flags.push(Flag::value("--position-embedding-type", "learned_absolute"));
        }
        Position::Absent | Position::Alibi => {
            flags.push(Flag::value("--position-embedding-type", "none"));
        }
    }
}

fn experts(model: &ModelConfig, flags: &mut Vec<Flag>) {
    let Some(moe) = model.moe else { return };
    flags.push(Flag::value("--num-experts", moe.experts));
    flags.push(Flag::value("--moe-router-topk", moe.top_k));
    flags.push(Flag::value("--moe-ffn-hidden-size", moe.expert_ffn));
    flags.push(Flag::switch("--moe-grouped-gemm"));
    if moe.shared_ffn > 0 {
        let flag = "--moe-shared-expert-intermediate-size";
        flags.push(Flag::value(flag, moe.shared_ffn));
    }
    if moe.shared_gate {
        flags.push(Flag::switch("--moe-shared-expert-gate"));
    }
    if moe.router_correction_bias {
        flags.push(Flag::value("--moe-router-score-function", "sigmoid"));
        flags.push(Flag::switch("--moe-router-enable-expert-bias"));
    }
    let pattern: Vec<u8> = (0..model.layers)
        .map(|layer| u8::from(moe.is_moe_layer(layer)))
        .collect();
    if pattern.contains(&0) {
        flags.push(Flag::value("--moe-layer-freq", compact(&pattern)));
    }
}

/// `([0]*3+[1]*58)`: the list that Megatron-LM evaluates.
fn compact(pattern: &[u8]) -> String {
    let runs = pattern.chunk_by(|a, b| a == b);
    let parts: Vec<String> = runs
        .map(|run| format!("[{}]*{}", run[0], run.len()))
        .collect();
    format!("({})", parts.join("+"))
}
