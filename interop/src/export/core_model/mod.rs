//! A model as fields of Megatron-Core's configuration (`TransformerConfig`, `MLATransformerConfig`, `GPTModel`), which
//! both Megatron-LM's options and Megatron Bridge's providers fill in. Every field of the model is destructured here:
//! it is either written, or the model is refused by that field's name.

mod configuration;
mod positions;

pub(crate) use self::configuration::{Field, Reach};
pub(crate) use self::positions::{temperature, tidy};

use catalog::Window;
use catalog::model::{
    Activation, Attention, AttentionKind, Mlp, ModelConfig, ModelConstants, Moe, Norm, NormKind,
    QkNorm, Residual, Rotated, Router, WindowPattern,
};

use self::configuration::Core;
use crate::config::{Node, Value};
use crate::export::refusal::Limits;

/// The fields with which Megatron-Core builds this model for sequences of `seq_len` tokens; a model that it cannot
/// build is refused.
pub(crate) fn fields(
    model: &ModelConfig,
    seq_len: u64,
    reach: Reach,
    limits: &mut Limits,
) -> Vec<Field> {
    let ModelConfig {
        name: _, // Names and storage change nothing that is computed; adapters and hybrids were refused before.
        family: _,
        text_of: _,
        stored_as: _,
        adapters: _,
        hybrid: _,
        hidden,
        layers,
        vocab,
        tied_embeddings,
        head_bias,
        embedding_norm,
        attention,
        mlp,
        moe,
        residual,
        hidden_dropout,
        attention_dropout,
        mtp_layers,
        max_position,
        // Written together.
        norm: _,
        position: _,
        constants: _,
    } = model;
    let mut core = Core::new(reach, limits);
    core.set("num_layers", *layers);
    core.set("hidden_size", *hidden);
    core.set("vocab_size", *vocab);
    core.set("share_embeddings_and_output_weights", *tied_embeddings);
    core.lacks(*head_bias, "head_bias", "its output layer has no bias");
    let why = "no norm follows its embedding";
    core.lacks(*embedding_norm, "embedding_norm", why);
    core.joined(*residual);
    core.attention(attention);
    let dense = (0..*layers).any(|layer| !moe.is_some_and(|m| m.is_moe_layer(layer)));
    core.biases(attention, mlp.bias, *moe, dense);
    core.set("hidden_dropout", *hidden_dropout);
    core.set("attention_dropout", *attention_dropout);
    moe.iter().for_each(|moe| core.experts(*moe, *layers));
    let lengths = (seq_len, seq_len.max(*max_position));
    core.constants(model, dense, lengths);
    if *mtp_layers > 0 {
        core.set("mtp_num_layers", *mtp_layers);
    }
    core.fields
}

impl Core<'_> {
    /// Numerical constants, and the parts of a layer that they belong to; whether some layer is dense, not a mixture of experts;
    /// the sequence's length and that of the longest that the model declares, in tokens.
    fn constants(&mut self, model: &ModelConfig, dense: bool, lengths: (u64, u64)) {
        let ModelConstants {
            norm_epsilon,
            // Written with the positions.
            rope_theta: _,
            rope_scaling: _,
            local_rope_theta: _,
            rope_neighbours: _,
            attention_scale: _,
            gelu_tanh,
            norm_from_one,
            embedding_scale,
            temperature,
            attention_cap,
            logit_cap,
            router,
            bounded_glu,
            initializer_range,
        } = model.constants;
        self.set("init_method_std", initializer_range);
        self.lacks(
            embedding_scale != 1.0,
            format_args!("embedding_scale {embedding_scale}"),
            "it does not scale embeddings (except with µP)",
        );
        let why = "it scales the scores of all queries alike";
        self.lacks(temperature.is_some(), "temperature", why);
        let capped = attention_cap.is_some() || logit_cap.is_some();
        self.lacks(capped, "attention_cap, logit_cap", "it has no soft caps");
        self.norm(model.norm, norm_epsilon, norm_from_one);
        self.positions(model, lengths);
        self.mlp(model.mlp, gelu_tanh, bounded_glu, dense);
        if let Some(moe) = model.moe {
            self.router(moe, router);
        }
    }

    fn norm(&mut self, norm: Norm, epsilon: f64, from_one: bool) {
        let Norm { kind, bias } = norm;
        let (name, has_bias) = match kind {
            NormKind::RmsNorm => ("RMSNorm", false),
            NormKind::LayerNorm => ("LayerNorm", true),
        };
        self.lacks(
            bias != has_bias,
            format_args!("norm.bias {bias}"),
            "its LayerNorm has a bias, its RMSNorm has none",
        );
        self.set("normalization", name);
        self.set("layernorm_epsilon", epsilon);
        self.set("layernorm_zero_centered_gamma", from_one);
    }

    /// Refuses models whose attention and MLP do not join the residual stream in sequence.
    fn joined(&mut self, residual: Residual) {
        let why = match residual {
            Residual::Sequential => return,
            Residual::Parallel { shared_norm: _ } => "attention and MLP follow one another",
            Residual::Sandwich | Residual::After => "no norm follows attention and MLP",
        };
        self.lacks(true, format_args!("residual {residual:?}"), why);
    }

    fn attention(&mut self, attention: &Attention) {
        let Attention {
            heads,
            kind,
            // Written with the biases of the MLP.
            qkv_bias: _,
            out_bias: _,
            window,
            rotated,
            sinks,
        } = attention;
        self.set("num_attention_heads", *heads);
        match kind {
            AttentionKind::Grouped {
                kv_heads,
                head_dim,
                qk_norm,
                // Megatron-Core has one fused weight, however the hub stores it.
                projections: _,
            } => {
                self.set("multi_latent_attention", false);
                if kv_heads != heads || self.reach == Reach::Provider {
                    self.set("num_query_groups", *kv_heads);
                }
                self.set("kv_channels", *head_dim);
                let why = "its norms of queries and keys are over one head, with a weight";
                let other = matches!(qk_norm, QkNorm::Whole | QkNorm::Unweighted);
                self.lacks(other, format_args!("qk_norm {qk_norm:?}"), why);
                self.set("qk_layernorm", *qk_norm == QkNorm::Heads);
            }
            AttentionKind::Latent {
                q_lora_rank,
                kv_lora_rank,
                qk_nope_dim,
                qk_rope_dim,
                v_dim,
            } => {
                self.set("multi_latent_attention", true);
                self.set("q_lora_rank", q_lora_rank.map_or(Value::Null, Value::from));
                self.set("kv_lora_rank", *kv_lora_rank);
                self.set("qk_head_dim", *qk_nope_dim);
                self.set("qk_pos_emb_head_dim", *qk_rope_dim);
                self.set("v_head_dim", *v_dim);
                self.set("qk_layernorm", true);
            }
        }
        let why = "layers with and without a window rotate alike";
        self.lacks(*rotated != Rotated::All, "attention.rotated", why);
        let softmax = if *sinks { "learnable" } else { "vanilla" };
        self.set("softmax_type", softmax);
        match *window {
            WindowPattern::Full => {}
            WindowPattern::All { window } => self.window(window),
            WindowPattern::Alternating { window, period } => {
                self.window(window);
                self.set("window_attn_skip_freq", period);
            }
        }
    }

    /// Sets a sliding window; Megatron-Core counts only the tokens before the current one.
    fn window(&mut self, window: Window) {
        let chunked = matches!(window, Window::Chunk(_));
        self.lacks(chunked, "attention.window", "its attention has no chunks");
        let sides = [window.tokens() - 1, 0].map(Node::made).to_vec();
        self.set("window_size", Value::List(sides));
    }

    fn mlp(&mut self, mlp: Mlp, gelu_tanh: bool, bounded: Option<f64>, dense: bool) {
        let Mlp {
            ffn,
            activation,
            gated,
            bias,
            // Megatron-Core has one fused weight, however the hub stores it.
            fused_gate_up: _,
        } = mlp;
        self.set("ffn_hidden_size", ffn);
        self.set("gated_linear_unit", gated);
        if let Some(bound) = bounded {
            // `g·σ(1.702·g)·(u + 1)` with both clamped: Megatron-Core's quick GEGLU.
            self.lacks(dense, "bounded_glu", "its bounds hold for all layers");
            self.set("activation_func", "quick_gelu");
            self.set("activation_func_clamp_value", bound);
            self.set("glu_linear_offset", 1.0);
            return;
        }
        let name = match activation {
            Activation::Silu => "silu",
            Activation::Relu2 => "squared_relu",
            Activation::Gelu => "gelu",
            Activation::Relu => "relu",
        };
        self.set("activation_func", name);
        let by_option = match activation {
            Activation::Silu => gated,
            Activation::Relu2 | Activation::Gelu => !gated,
            Activation::Relu => false,
        };
        let what = format!(
            "mlp.activation {name}{}",
            if gated { ", gated" } else { "" }
        );
        self.unreached(!by_option, &what, "no option makes this activation");
        if activation == Activation::Gelu {
            // Its GELU is exact, except the fused bias and GELU, which is approximated by tanh.
            self.lacks(
                gelu_tanh && (gated || !bias),
                "gelu_tanh",
                "only the fused bias and GELU is by tanh",
            );
            self.set("bias_activation_fusion", gelu_tanh);
        } else if activation != Activation::Silu {
            // Only GELU and SiLU are fused with their biases.
            self.set("bias_activation_fusion", false);
        }
    }

    /// Sets biases, which Megatron-Core has in all linear layers, in QKV only, or in none.
    fn biases(&mut self, attention: &Attention, mlp: bool, moe: Option<Moe>, dense: bool) {
        let (qkv_bias, out_bias) = (attention.qkv_bias, attention.out_bias);
        let mut others = vec![out_bias];
        others.extend(dense.then_some(mlp));
        others.extend(moe.map(|moe| moe.bias));
        let all = out_bias && qkv_bias;
        let alike = others.iter().all(|&bias| bias == all);
        self.lacks(
            !alike,
            "attention.out_bias, mlp.bias, moe.bias",
            "biases are in all linear layers, in those of queries, keys and values, or in none",
        );
        self.set("add_bias_linear", all);
        self.set("add_qkv_bias", qkv_bias);
    }

    fn experts(&mut self, moe: Moe, layers: u64) {
        let Moe {
            experts,
            top_k,
            expert_ffn,
            shared_ffn,
            shared_gate,
            first_dense: _,
            every: _,
            // Written with all other biases.
            bias: _,
            // Written with the router.
            router_correction_bias: _,
        } = moe;
        self.set("num_moe_experts", experts);
        self.set("moe_router_topk", top_k);
        self.set("moe_ffn_hidden_size", expert_ffn);
        self.set("moe_grouped_gemm", true);
        if shared_ffn > 0 {
            self.set("moe_shared_expert_intermediate_size", shared_ffn);
        }
        self.set("moe_shared_expert_gate", shared_gate);
        let layers = (0..layers).map(|layer| Node::made(u64::from(moe.is_moe_layer(layer))));
        self.set("moe_layer_freq", Value::List(layers.collect()));
    }

    fn router(&mut self, moe: Moe, router: Router) {
        let Router {
            sigmoid,
            normalise,
            scale,
            groups,
            best_groups,
            weighs_inputs,
        } = router;
        let why = "the router's weights multiply what experts return";
        self.lacks(weighs_inputs, "router.weighs_inputs", why);
        let score = if sigmoid { "sigmoid" } else { "softmax" };
        self.set("moe_router_score_function", score);
        self.lacks(
            sigmoid && !normalise && moe.top_k > 1,
            "router.normalise false",
            "sigmoids of the chosen experts are normalised",
        );
        // A softmax over the chosen logits equals the softmax over all, normalised.
        let grouped = groups > 1;
        self.lacks(
            !sigmoid && normalise && grouped,
            "router.groups with router.normalise",
            "normalised softmax chooses groups by logits",
        );
        self.set("moe_router_pre_softmax", !sigmoid && !normalise);
        if scale != 1.0 {
            self.set("moe_router_topk_scaling_factor", scale);
        }
        if grouped {
            // A group's score is the sum of its best top_k / best_groups experts; models add the best two, or take the
            // best one.
            let summed = if sigmoid { 2 } else { 1 };
            self.lacks(
                moe.top_k / best_groups.max(1) != summed,
                format_args!("router.groups {groups}"),
                "it scores a group by the sum of its best top_k / best_groups experts",
            );
            self.set("moe_router_num_groups", groups);
            self.set("moe_router_group_topk", best_groups);
        }
        self.lacks(
            moe.router_correction_bias && !sigmoid,
            "moe.router_correction_bias",
            "its expert bias needs sigmoids",
        );
        self.set("moe_router_enable_expert_bias", moe.router_correction_bias);
        if moe.router_correction_bias {
            // DeepSeek-V3's rate (DeepSeek-AI 2024, §4.2), and Megatron-Core's default.
            self.set("moe_router_bias_update_rate", 0.001);
        }
        // The model declares no auxiliary loss; Megatron-Core's coefficient is 0 unless it is set.
        self.set("moe_aux_loss_coeff", 0.0);
    }
}
