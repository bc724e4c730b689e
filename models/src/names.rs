//! Module names of each family, as in the Hugging Face `state_dict`.

use catalog::model::{Family, ModelConfig, Residual};

/// Module names of a family. Names inside layers are relative to the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    /// Prefix of a decoder layer, containing `{layer}`.
    pub layer: &'static str,
    /// Token embedding.
    pub embedding: &'static str,
    /// Learned position embedding.
    pub positions: &'static str,
    /// Norm after the embedding.
    pub embedding_norm: &'static str,
    /// Norm before the head.
    pub final_norm: &'static str,
    /// Output head (`lm_head`).
    pub head: &'static str,
    /// Attention module.
    pub attention: &'static str,
    /// Query projection, relative to the attention module.
    pub q: &'static str,
    /// Key projection.
    pub k: &'static str,
    /// Value projection.
    pub v: &'static str,
    /// Fused query, key and value projection.
    pub qkv: &'static str,
    /// Output projection.
    pub o: &'static str,
    /// Recurrence in place of attention.
    pub recurrence: &'static str,
    /// Feed-forward module.
    pub mlp: &'static str,
    /// Gate projection.
    pub gate: &'static str,
    /// Up (or only) projection.
    pub up: &'static str,
    /// Fused gate and up projection.
    pub gate_up: &'static str,
    /// Fused gate and up projection of an expert.
    pub expert_gate_up: &'static str,
    /// Down projection.
    pub down: &'static str,
    /// Norm before attention.
    pub norm1: &'static str,
    /// Norm before the feed-forward block.
    pub norm2: &'static str,
    /// Mixture-of-experts module.
    pub moe: &'static str,
    /// Router, relative to the mixture-of-experts module.
    pub router: &'static str,
    /// Score-correction bias of the router, relative to the mixture-of-experts module.
    pub correction: &'static str,
    /// Gate, up and down projections of an expert, relative to the mixture-of-experts module.
    pub expert: [&'static str; 3],
    /// Shared expert, relative to the mixture-of-experts module.
    pub shared: &'static str,
}

const LLAMA: Names = Names {
    layer: "model.layers.{layer}.",
    embedding: "model.embed_tokens",
    positions: "model.embed_positions",
    embedding_norm: "model.embed_norm",
    final_norm: "model.norm",
    head: "lm_head",
    attention: "self_attn",
    q: "q_proj",
    k: "k_proj",
    v: "v_proj",
    qkv: "qkv_proj",
    o: "o_proj",
    recurrence: "linear_attn",
    mlp: "mlp",
    gate: "gate_proj",
    up: "up_proj",
    gate_up: "gate_up_proj",
    expert_gate_up: "experts.{expert}.gate_up_proj",
    down: "down_proj",
    norm1: "input_layernorm",
    norm2: "post_attention_layernorm",
    moe: "mlp",
    router: "gate",
    correction: "gate.e_score_correction_bias",
    expert: [
        "experts.{expert}.gate_proj",
        "experts.{expert}.up_proj",
        "experts.{expert}.down_proj",
    ],
    shared: "shared_expert",
};

const GPT2: Names = Names {
    layer: "transformer.h.{layer}.",
    embedding: "transformer.wte",
    positions: "transformer.wpe",
    final_norm: "transformer.ln_f",
    attention: "attn",
    qkv: "c_attn",
    o: "c_proj",
    up: "c_fc",
    down: "c_proj",
    norm1: "ln_1",
    norm2: "ln_2",
    ..LLAMA
};

const BLOOM: Names = Names {
    layer: "transformer.h.{layer}.",
    embedding: "transformer.word_embeddings",
    embedding_norm: "transformer.word_embeddings_layernorm",
    final_norm: "transformer.ln_f",
    attention: "self_attention",
    qkv: "query_key_value",
    o: "dense",
    up: "dense_h_to_4h",
    down: "dense_4h_to_h",
    ..LLAMA
};

const OPT: Names = Names {
    layer: "model.decoder.layers.{layer}.",
    embedding: "model.decoder.embed_tokens",
    positions: "model.decoder.embed_positions",
    final_norm: "model.decoder.final_layer_norm",
    o: "out_proj",
    up: "fc1",
    down: "fc2",
    norm1: "self_attn_layer_norm",
    norm2: "final_layer_norm",
    ..LLAMA
};

const GPT_NEOX: Names = Names {
    layer: "gpt_neox.layers.{layer}.",
    embedding: "gpt_neox.embed_in",
    final_norm: "gpt_neox.final_layer_norm",
    head: "embed_out",
    attention: "attention",
    ..BLOOM
};

/// Falcon models whose attention and feed-forward block each have a norm.
const FALCON: Names = Names {
    norm1: "ln_attn",
    norm2: "ln_mlp",
    ..BLOOM
};

const MPT: Names = Names {
    layer: "transformer.blocks.{layer}.",
    embedding: "transformer.wte",
    positions: "transformer.wpe",
    final_norm: "transformer.norm_f",
    attention: "attn",
    qkv: "Wqkv",
    o: "out_proj",
    mlp: "ffn",
    norm1: "norm_1",
    norm2: "norm_2",
    ..LLAMA
};

const MIXTRAL: Names = Names {
    moe: "block_sparse_moe",
    expert: [
        "experts.{expert}.w1",
        "experts.{expert}.w3",
        "experts.{expert}.w2",
    ],
    ..LLAMA
};

const MINIMAX: Names = Names {
    correction: "e_score_correction_bias",
    ..MIXTRAL
};

const DEEPSEEK: Names = Names {
    shared: "shared_experts",
    ..LLAMA
};

const ERNIE: Names = Names {
    correction: "moe_statics.e_score_correction_bias",
    ..DEEPSEEK
};

const GPT_OSS: Names = Names {
    router: "router",
    // Files have one tensor for the gates and ups of all experts, and one for their down projections.
    expert: [
        "experts.gate_up_proj.{expert}.gate",
        "experts.gate_up_proj.{expert}.up",
        "experts.down_proj.{expert}",
    ],
    ..LLAMA
};

/// Every layer is one `mixer`, whatever it is.
const NEMOTRON_H: Names = Names {
    layer: "backbone.layers.{layer}.",
    embedding: "backbone.embeddings",
    final_norm: "backbone.norm_f",
    attention: "mixer",
    recurrence: "mixer",
    mlp: "mixer",
    moe: "mixer",
    norm1: "norm",
    ..DEEPSEEK
};

const LLAMA4: Names = Names {
    mlp: "feed_forward",
    moe: "feed_forward",
    router: "router",
    // Files have one tensor for the gates and ups of all experts, gates first, and one for their down projections.
    expert: [
        "experts.gate_up_proj.{expert}.gate_half",
        "experts.gate_up_proj.{expert}.up_half",
        "experts.down_proj.{expert}",
    ],
    ..LLAMA
};

const STARCODER2: Names = Names {
    up: "c_fc",
    down: "c_proj",
    ..LLAMA
};

/// Whether the hub's files store a parameter as `[in, out]`: they do for GPT-2's linear layers, which are `Conv1D`
/// modules there. All others are `[out, in]`.
#[must_use]
pub fn is_stored_turned(parameter: &str) -> bool {
    let (before, _) = GPT2
        .layer
        .split_once("{layer}")
        .expect("layers have numbers");
    let inside = parameter.strip_prefix(before);
    let Some((_, inside)) = inside.and_then(|rest| rest.split_once('.')) else {
        return false;
    };
    let linears = [
        [GPT2.attention, GPT2.qkv],
        [GPT2.attention, GPT2.o],
        [GPT2.mlp, GPT2.up],
        [GPT2.mlp, GPT2.down],
    ];
    let turned = linears.map(|[module, linear]| format!("{module}.{linear}.weight"));
    turned.iter().any(|name| name == inside)
}

/// Whether the hub's files store this vector as a matrix of one row: they do so for the bias of ERNIE's router.
#[must_use]
pub fn is_stored_as_row(parameter: &str) -> bool {
    parameter.ends_with(ERNIE.correction)
}

/// Module names of a model's family.
#[must_use]
pub fn names(model: &ModelConfig) -> Names {
    match model.family {
        Family::Llama | Family::Phi3 | Family::QwenMoe => LLAMA,
        Family::Gpt2 => GPT2,
        Family::Opt => OPT,
        Family::Bloom => BLOOM,
        Family::GptNeox => GPT_NEOX,
        // Attention and feed-forward block share one norm, or have one each.
        Family::Falcon if model.residual == (Residual::Parallel { shared_norm: true }) => BLOOM,
        Family::Falcon => FALCON,
        Family::Mpt => MPT,
        Family::Mixtral => MIXTRAL,
        Family::MiniMax => MINIMAX,
        Family::Starcoder2 => STARCODER2,
        Family::DeepSeek => DEEPSEEK,
        Family::Ernie => ERNIE,
        Family::GptOss => GPT_OSS,
        Family::NemotronH => NEMOTRON_H,
        Family::Llama4 => LLAMA4,
    }
}
