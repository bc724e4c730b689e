//! A model as nanotron's `model_config`: every field is written, or the model is refused by its name.

use catalog::model::{
    Activation, Attention, AttentionKind, Family, Mlp, ModelConfig, ModelConstants, Moe, Norm,
    NormKind, Position, QkNorm, Residual, Rotated, Router, WindowPattern,
};
use catalog::{RopeScaling, Window};

use crate::config::{Node, Value};
use crate::export::job::Job;
use crate::export::refusal::Limits;
use plans::decisions::Decisions;

/// Writes the model field by field: as Llama, or as nanotron's Qwen2, which includes Llama and adds ring attention,
/// biases of queries, keys and values, windows, interpolated rotary embedding and experts.
pub(super) fn model(job: &Job<'_>, root: &mut Node, limits: &mut Limits) {
    let ModelConfig {
        // How the weights are named and stored, not what is computed. Adapters and hybrids were refused before.
        name: _,
        family,
        text_of: _,
        stored_as: _,
        adapters: _,
        hybrid: _,
        hidden,
        layers,
        vocab,
        tied_embeddings,
        head_bias,
        norm,
        embedding_norm,
        position,
        attention,
        mlp,
        moe,
        residual,
        hidden_dropout,
        attention_dropout,
        mtp_layers,
        max_position,
        constants,
    } = job.model;
    limits.refuse_model(
        *family == Family::Starcoder2,
        "family starcoder2",
        "it cannot read files of its own StarCoder2: its checks ask for num_key_value_heads, which that class has not",
    );
    let mut set = |key: &str, value: Value| root.set(&format!("model.model_config.{key}"), value);
    set(kind(job), true.into());
    set("hidden_size", (*hidden).into());
    set("num_hidden_layers", (*layers).into());
    set("vocab_size", (*vocab).into());
    set(
        "max_position_embeddings",
        job.workload.seq_len.max(*max_position).into(),
    );
    set("tie_word_embeddings", (*tied_embeddings).into());
    let parts = [
        (*head_bias, "head_bias"),
        (*embedding_norm, "embedding_norm"),
        (*residual != Residual::Sequential, "residual"),
        (*hidden_dropout != 0.0, "hidden_dropout"),
        (*attention_dropout != 0.0, "attention_dropout"),
        (*mtp_layers > 0, "mtp_layers"),
        (other_norm(*norm), "norm"),
    ];
    for (has, field) in parts {
        limits.refuse_model(has, field, "its Llama and Qwen2 have no such part");
    }
    attended(*hidden, attention, job.decisions, &mut set, limits);
    feed_forward(*mlp, &mut set, limits);
    if let Some(moe) = moe {
        experts(*moe, &mut set, limits);
    }
    numbers(
        *constants,
        *position,
        attention,
        moe.is_some(),
        &mut set,
        limits,
    );
    root.set("model.init_method.std", constants.initializer_range);
}

/// nanotron's model class: Llama where it suffices, else Qwen2.
fn kind(job: &Job<'_>) -> &'static str {
    let model = job.model;
    let linear = matches!(model.constants.rope_scaling, RopeScaling::Linear { .. });
    let windows = model.attention.window != WindowPattern::Full;
    let biases = model.attention.qkv_bias;
    if job.decisions.cp > 1 || biases || model.moe.is_some() || windows || linear {
        "is_qwen2_config"
    } else {
        "is_llama_config"
    }
}

fn other_norm(norm: Norm) -> bool {
    let Norm { kind, bias } = norm;
    kind != NormKind::RmsNorm || bias
}

/// Refuses the model for each unsupported part that it has: `(whether it has it, its field, why it is refused)`.
fn lacks(parts: &[(bool, &str, &str)], limits: &mut Limits) {
    for (refused, field, why) in parts {
        limits.refuse_model(*refused, field, *why);
    }
}

fn attended(
    hidden: u64,
    attention: &Attention,
    d: &Decisions,
    set: &mut impl FnMut(&str, Value),
    limits: &mut Limits,
) {
    let Attention {
        heads,
        kind,
        qkv_bias,
        out_bias,
        window,
        rotated,
        sinks,
    } = attention;
    limits.refuse_model(
        *rotated != Rotated::All,
        "attention.rotated",
        "all its layers rotate queries and keys",
    );
    set("num_attention_heads", (*heads).into());
    set("attention_bias", (*qkv_bias).into());
    limits.refuse_model(
        *out_bias,
        "attention.out_bias",
        "its output projection has no bias",
    );
    limits.refuse_model(*sinks, "attention.sinks", "its attention has no sinks");
    match kind {
        AttentionKind::Grouped {
            kv_heads,
            head_dim,
            qk_norm,
            // nanotron has one fused weight, however the hub stores it.
            projections: _,
        } => {
            set("num_key_value_heads", (*kv_heads).into());
            limits.refuse_model(
                head_dim * heads != hidden,
                format_args!("head_dim {head_dim}"),
                "its heads divide the width",
            );
            limits.refuse_model(
                *qk_norm != QkNorm::Absent,
                "qk_norm",
                "it does not norm queries and keys",
            );
            if d.cp > 1 {
                set("_attn_implementation", "llama3_ring_attention".into());
                // Keys and values of all heads are gathered at once, as the prediction assumed.
                set("ring_attn_heads_k_stride", (kv_heads / d.tp).max(1).into());
            }
        }
        AttentionKind::Latent { .. } => {
            limits.refuse_model(true, "latent attention", "its attention is grouped");
        }
    }
    windowed(*window, set, limits);
}

fn windowed(window: WindowPattern, set: &mut impl FnMut(&str, Value), limits: &mut Limits) {
    match window {
        WindowPattern::Full => {}
        WindowPattern::All {
            window: Window::Sliding(tokens),
        } => set("sliding_window_size", tokens.into()),
        WindowPattern::All {
            window: Window::Chunk(_),
        } => limits.refuse_model(true, "attention.window", "its attention has no chunks"),
        WindowPattern::Alternating { .. } => {
            limits.refuse_model(true, "attention.window", "all layers have the same window");
        }
    }
}

fn feed_forward(mlp: Mlp, set: &mut impl FnMut(&str, Value), limits: &mut Limits) {
    let Mlp {
        ffn,
        activation,
        gated,
        bias,
        // nanotron has one fused weight, however the hub stores it.
        fused_gate_up: _,
    } = mlp;
    set("intermediate_size", ffn.into());
    set("hidden_act", "silu".into());
    limits.refuse_model(
        activation != Activation::Silu || !gated || bias,
        "mlp",
        "its feed-forward blocks are SwiGLU without biases",
    );
}

fn experts(moe: Moe, set: &mut impl FnMut(&str, Value), limits: &mut Limits) {
    let Moe {
        experts,
        top_k,
        expert_ffn,
        shared_ffn,
        shared_gate,
        first_dense,
        every,
        bias,
        router_correction_bias,
    } = moe;
    set("moe_config.num_experts", experts.into());
    set("moe_config.top_k", top_k.into());
    set("moe_config.moe_intermediate_size", expert_ffn.into());
    set("moe_config.enable_shared_expert", (shared_ffn > 0).into());
    // nanotron's default is not zero; the model declares no auxiliary loss.
    set("moe_config.router_aux_loss_coef", 0.0.into());
    if shared_ffn > 0 {
        set(
            "moe_config.shared_expert_intermediate_size",
            shared_ffn.into(),
        );
    }
    let lacks = [
        (
            shared_ffn > 0 && !shared_gate,
            "moe.shared_gate false",
            "its shared expert has a gate",
        ),
        (
            first_dense > 0 || every != 1,
            "moe.first_dense, moe.every",
            "the file makes all layers mixtures of experts",
        ),
        (bias, "moe.bias", "its experts have no biases"),
        (
            router_correction_bias,
            "moe.router_correction_bias",
            "its router has no bias",
        ),
    ];
    self::lacks(&lacks, limits);
}

fn numbers(
    constants: ModelConstants,
    position: Position,
    attention: &Attention,
    routed: bool,
    set: &mut impl FnMut(&str, Value),
    limits: &mut Limits,
) {
    let ModelConstants {
        norm_epsilon,
        rope_theta,
        rope_scaling,
        local_rope_theta,
        // Its Llama and Qwen2 use no GELU.
        gelu_tanh: _,
        norm_from_one,
        embedding_scale,
        attention_scale,
        temperature,
        attention_cap,
        logit_cap,
        rope_neighbours,
        router,
        bounded_glu,
        // Written again as the spread of initial weights.
        initializer_range,
    } = constants;
    set("rms_norm_eps", norm_epsilon.into());
    set("rope_theta", rope_theta.into());
    set("rope_interleaved", rope_neighbours.into());
    set("initializer_range", initializer_range.into());
    let (head, _) = attention.head_dims();
    rotation(position, rope_scaling, head, set, limits);
    let scaled = attention_scale.is_some_and(|s| (s * (head as f64).sqrt() - 1.0).abs() > 1e-9);
    let lacks = [
        (local_rope_theta.is_some(), "local_rope_theta"),
        (norm_from_one, "norm_from_one"),
        (embedding_scale != 1.0, "embedding_scale"),
        (scaled, "attention_scale"),
        (temperature.is_some(), "temperature"),
        (attention_cap.is_some(), "attention_cap"),
        (logit_cap.is_some(), "logit_cap"),
        (bounded_glu.is_some(), "bounded_glu"),
    ];
    for (refused, field) in lacks {
        limits.refuse_model(refused, field, "its Llama and Qwen2 have no such thing");
    }
    if routed {
        weighed(router, limits);
    }
}

fn rotation(
    position: Position,
    scaling: RopeScaling,
    head: u64,
    set: &mut impl FnMut(&str, Value),
    limits: &mut Limits,
) {
    limits.refuse_model(
        position != Position::Rope { dims: head },
        "position",
        "it rotates all dimensions of every head",
    );
    match scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => {
            set("rope_seq_len_interpolation_factor", factor.into());
        }
        RopeScaling::Llama3 { .. } | RopeScaling::Yarn { .. } | RopeScaling::Other => {
            let why = "its rotations are plain, or interpolated by one factor";
            limits.refuse_model(true, "rope_scaling", why);
        }
    }
}

fn weighed(router: Router, limits: &mut Limits) {
    let Router {
        sigmoid,
        normalise,
        scale,
        groups,
        // Without groups there is only one.
        best_groups: _,
        weighs_inputs,
    } = router;
    limits.refuse_model(
        sigmoid || normalise || scale != 1.0 || groups > 1 || weighs_inputs,
        "router",
        "its router weighs the chosen experts by the softmax of all",
    );
}
