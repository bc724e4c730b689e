//! Decoders that torchtitan's registries lack, made of the same parts: Llama's blocks with other sizes, Qwen3's with
//! other sizes or experts. `torchtitan.models.common.config_utils` makes the parts, of 0.3 and of main.

use catalog::RopeScaling;
use catalog::model::{AttentionKind, ModelConfig, Moe, Position, QkNorm, Router};

use super::edition::Edition;
use super::registry::{Flavor, grouped, qk_norm};
use crate::config::escape;

/// The decoder nearest to a model that can be made of torchtitan's parts: with the model's sizes where the parts have an
/// argument, else with torchtitan's own values. `None` for torchtitan 0.2, whose files can only name registered flavors, and
/// for latent attention, whose sizes are fixed.
pub(super) fn like(model: &ModelConfig, edition: Edition) -> Option<Flavor> {
    let AttentionKind::Grouped {
        kv_heads,
        head_dim,
        qk_norm: norm,
        ..
    } = model.attention.kind
    else {
        return None;
    };
    if edition == Edition::Toml02 {
        return None;
    }
    let normed = norm != QkNorm::Absent;
    let (module, function) = match model.moe {
        Some(_) => ("qwen3", "qwen3_30b_a3b"),
        None if normed => ("qwen3", "qwen3_32b"),
        None => ("llama3", "llama3_8b"),
    };
    let mut parts = ModelConfig::decoder(model.family, model.layers, model.hidden, model.vocab);
    parts.tied_embeddings = model.tied_embeddings;
    parts.attention.heads = model.attention.heads;
    parts.attention.kind = grouped(kv_heads, head_dim, normed);
    parts.attention.qkv_bias = model.attention.qkv_bias;
    parts.position = Position::Rope { dims: head_dim };
    parts.mlp.ffn = model.mlp.ffn;
    parts.moe = model
        .moe
        .map(|moe| Moe::routed(moe.experts, moe.top_k, moe.expert_ffn));
    let ours = &model.constants;
    let theirs = &mut parts.constants;
    theirs.norm_epsilon = ours.norm_epsilon;
    theirs.rope_theta = ours.rope_theta;
    theirs.initializer_range = ours.initializer_range;
    // Qwen3's rotations have no scaling of Llama 3's kind.
    if module == "llama3" && matches!(ours.rope_scaling, RopeScaling::Llama3 { .. }) {
        theirs.rope_scaling = ours.rope_scaling;
    }
    let Router {
        sigmoid,
        normalise,
        scale,
        ..
    } = ours.router;
    theirs.router = Router {
        sigmoid,
        normalise,
        scale,
        ..theirs.router
    };
    Some(Flavor {
        module,
        name: None,
        function,
        model: parts,
    })
}

/// The names of a module's classes: the model, its blocks, and their rotary embedding.
fn classes(module: &str) -> [&'static str; 3] {
    if module == "llama3" {
        ["Llama3Model", "Llama3TransformerBlock", "ComplexRoPE"]
    } else {
        ["Qwen3Model", "Qwen3TransformerBlock", "CosSinRoPE"]
    }
}

/// The import statements that the decoder's Python source needs.
pub(super) fn imports(flavor: &Flavor) -> String {
    let module = flavor.module;
    let [model, block, rope] = classes(module);
    let feed_forward = if flavor.model.moe.is_some() {
        "make_moe_config, make_routed_experts_config, make_router_config"
    } else {
        "make_ffn_config"
    };
    let skip = if flavor.model.tied_embeddings {
        "from torchtitan.models.common.param_init import skip_param_init\n"
    } else {
        ""
    };
    format!(
        "from torchtitan.models.common import {rope}, Embedding, Linear, RMSNorm\n\
         from torchtitan.models.common.config_utils import get_attention_config, make_gqa_config, {feed_forward}\n\
         {skip}from torchtitan.models.{module}.model import {model}, {block}\n"
    )
}

/// Python source of the function `_decoder()`, which makes the model's configuration. It is read as text by `import` and
/// `export --check`, which take assignments to attributes for settings: there are none in it.
pub(super) fn source(
    name: &str,
    flavor: &Flavor,
    edition: Edition,
    seq_len: u64,
    comm_backend: &str,
) -> String {
    let model = &flavor.model;
    let [class, block, _] = classes(flavor.module);
    let (hidden, vocab, layers) = (model.hidden, model.vocab, model.layers);
    let std = model.constants.initializer_range;
    let (tied, embedded) = match model.tied_embeddings {
        true => ("True", "{\"weight\": skip_param_init}"),
        false => ("False", "weights"),
    };
    let (bias, fed) = (bias(model), feed_forward(model, comm_backend));
    let attended = attention(flavor, edition, seq_len);
    let of = escape::quoted(&format!("{name}, made of torchtitan's parts."));
    format!(
        "def _decoder():\n    {of}\n    \
         weights = {{\"weight\": functools.partial(nn.init.normal_, std={std:?}), \"bias\": nn.init.zeros_}}\n\n    \
         def norm(size):\n        \
         return RMSNorm.Config(normalized_shape=size, eps={eps:?}, param_init={{\"weight\": nn.init.ones_}})\n\n    \
         def block():\n        attention = {attended}{bias}\n        \
         return {block}.Config(\n            attention_norm=norm({hidden}),\n            ffn_norm=norm({hidden}),\n            \
         attention=attention,\n            {fed},\n        )\n\n    \
         return {class}.Config(\n        dim={hidden},\n        vocab_size={vocab},\n        enable_weight_tying={tied},\n        \
         tok_embeddings=Embedding.Config(num_embeddings={vocab}, embedding_dim={hidden}, param_init={embedded}),\n        \
         norm=norm({hidden}),\n        \
         lm_head=Linear.Config(in_features={hidden}, out_features={vocab}, param_init=weights),\n        \
         layers=[block() for _ in range({layers})],\n    )\n\n\n",
        eps = model.constants.norm_epsilon,
    )
}

/// Python source of the attention's configuration.
fn attention(flavor: &Flavor, edition: Edition, seq_len: u64) -> String {
    let model = &flavor.model;
    let (hidden, heads, kv_heads) = (
        model.hidden,
        model.attention.heads,
        model.attention.kv_heads(),
    );
    let (head_dim, _) = model.attention.head_dims();
    let [.., rope] = classes(flavor.module);
    let length = match edition {
        Edition::PythonMain => "max_context_length",
        Edition::Toml02 | Edition::Python03 => "max_seq_len",
    };
    let scaling = match model.constants.rope_scaling {
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original,
        } => format!(
            ", scaling=\"llama\", scaling_factor={factor:?}, low_freq_factor={low_freq_factor:?}, \
             high_freq_factor={high_freq_factor:?}, original_max_position_embeddings={original}"
        ),
        _ => String::new(),
    };
    let normed = match qk_norm(model) {
        true => format!("norm({head_dim})"),
        false => "None".to_owned(),
    };
    format!(
        "make_gqa_config(\n            dim={hidden},\n            n_heads={heads},\n            n_kv_heads={kv_heads},\n            \
         head_dim={head_dim},\n            wqkv_param_init=weights,\n            wo_param_init=weights,\n            \
         inner_attention=get_attention_config(\"flex\"),\n            fuse_qkv=True,\n            qk_norm={normed},\n            \
         rope={rope}.Config(dim={head_dim}, {length}={seq_len}, theta={theta:?}{scaling}),\n        )",
        theta = model.constants.rope_theta,
    )
}

/// Python source that switches on the biases of the query, key and value projections, for which `make_gqa_config` has no
/// argument. It calls `setattr`, because `import` takes assignments to attributes for settings of the plan.
fn bias(model: &ModelConfig) -> &'static str {
    if model.attention.qkv_bias {
        "\n        setattr(attention.qkv_linear.wqkv, \"bias\", True)"
    } else {
        ""
    }
}

/// Python source of the argument that describes a block's feed-forward part.
fn feed_forward(model: &ModelConfig, comm_backend: &str) -> String {
    let hidden = model.hidden;
    let Some(Moe {
        experts,
        top_k,
        expert_ffn,
        ..
    }) = model.moe
    else {
        return format!(
            "feed_forward=make_ffn_config(dim={hidden}, hidden_dim={}, w1_param_init=weights, w2w3_param_init=weights)",
            model.mlp.ffn
        );
    };
    let Router {
        sigmoid,
        normalise,
        scale,
        ..
    } = model.constants.router;
    let score = if sigmoid { "sigmoid" } else { "softmax" };
    let normalise = if normalise { "True" } else { "False" };
    format!(
        "moe=make_moe_config(\n                num_experts={experts},\n                router=make_router_config(\n                    \
         dim={hidden}, num_experts={experts}, gate_param_init=weights, top_k={top_k},\n                    \
         score_func=\"{score}\", route_norm={normalise}, route_scale={scale:?},\n                ),\n                \
         routed_experts=make_routed_experts_config(\n                    \
         dim={hidden}, hidden_dim={expert_ffn}, num_experts={experts}, top_k={top_k}, comm_backend=\"{comm_backend}\",\n                    \
         param_init={{key: weights[\"weight\"] for key in (\"w1_EFD\", \"w2_EDF\", \"w3_EFD\")}},\n                ),\n            )"
    )
}
