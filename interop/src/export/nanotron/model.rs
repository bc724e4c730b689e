//! A model as nanotron's `model_config`. Every field is written; one that cannot be is refused by
//! name.

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
        // Left out, as the export notes.
        mtp_layers: _,
        max_position,
        constants,
    } = job.model;
    let mut file = File { root, limits };
    file.lacks(
        *family == Family::Starcoder2,
        "family starcoder2",
        "it cannot read files of its own StarCoder2: its checks ask for num_key_value_heads, which that class has not",
    );
    file.set(kind(job), true);
    file.set("hidden_size", *hidden);
    file.set("num_hidden_layers", *layers);
    file.set("vocab_size", *vocab);
    let longest = job.workload.seq_len.max(*max_position);
    file.set("max_position_embeddings", longest);
    file.set("tie_word_embeddings", *tied_embeddings);
    let parts = [
        (*head_bias, "head_bias"),
        (*embedding_norm, "embedding_norm"),
        (*residual != Residual::Sequential, "residual"),
        (*hidden_dropout != 0.0, "hidden_dropout"),
        (*attention_dropout != 0.0, "attention_dropout"),
        (other_norm(*norm), "norm"),
    ];
    for (has, field) in parts {
        file.lacks(has, field, "its Llama and Qwen2 have no such part");
    }
    file.attended(*hidden, attention, job.decisions);
    file.feed_forward(*mlp);
    if let Some(moe) = moe {
        file.experts(*moe);
    }
    file.numbers(*constants, *position, attention, moe.is_some());
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

/// The file that is written, and the reasons to refuse the model.
struct File<'a> {
    root: &'a mut Node,
    limits: &'a mut Limits,
}

impl File<'_> {
    /// Sets a field of the model.
    fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.root.set(&format!("model.model_config.{key}"), value);
    }

    /// Refuses the model for one of its fields when `refused`.
    fn lacks(&mut self, refused: bool, field: impl std::fmt::Display, why: &str) {
        self.limits.refuse_model(refused, field, why);
    }

    fn attended(&mut self, hidden: u64, attention: &Attention, d: &Decisions) {
        let Attention {
            heads,
            kind,
            qkv_bias,
            out_bias,
            window,
            rotated,
            sinks,
        } = attention;
        self.lacks(
            *rotated != Rotated::All,
            "attention.rotated",
            "all its layers rotate queries and keys",
        );
        self.set("num_attention_heads", *heads);
        self.set("attention_bias", *qkv_bias);
        self.lacks(
            *out_bias,
            "attention.out_bias",
            "its output projection has no bias",
        );
        self.lacks(*sinks, "attention.sinks", "its attention has no sinks");
        match kind {
            AttentionKind::Grouped {
                kv_heads,
                head_dim,
                qk_norm,
                // nanotron has one fused weight, however the hub stores it.
                projections: _,
            } => {
                self.set("num_key_value_heads", *kv_heads);
                self.lacks(
                    head_dim * heads != hidden,
                    format_args!("head_dim {head_dim}"),
                    "its heads divide the width",
                );
                self.lacks(
                    *qk_norm != QkNorm::Absent,
                    "qk_norm",
                    "it does not norm queries and keys",
                );
                if d.cp > 1 {
                    self.set("_attn_implementation", "llama3_ring_attention");
                    // Keys and values of all heads are gathered at once, as the prediction assumed.
                    self.set("ring_attn_heads_k_stride", (kv_heads / d.tp).max(1));
                }
            }
            AttentionKind::Latent { .. } => {
                self.lacks(true, "latent attention", "its attention is grouped");
            }
        }
        self.windowed(*window);
    }

    fn windowed(&mut self, window: WindowPattern) {
        match window {
            WindowPattern::Full => {}
            WindowPattern::All {
                window: Window::Sliding(tokens),
            } => self.set("sliding_window_size", tokens),
            WindowPattern::All {
                window: Window::Chunk(_),
            } => self.lacks(true, "attention.window", "its attention has no chunks"),
            WindowPattern::Alternating { .. } => {
                self.lacks(
                    true,
                    "attention.window",
                    "its layers all have the same window",
                );
            }
        }
    }

    fn feed_forward(&mut self, mlp: Mlp) {
        let Mlp {
            ffn,
            activation,
            gated,
            bias,
            // nanotron has one fused weight, however the hub stores it.
            fused_gate_up: _,
        } = mlp;
        self.set("intermediate_size", ffn);
        self.set("hidden_act", "silu");
        self.lacks(
            activation != Activation::Silu || !gated || bias,
            "mlp",
            "its feed-forward blocks are SwiGLU without biases",
        );
    }

    fn experts(&mut self, moe: Moe) {
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
        self.set("moe_config.num_experts", experts);
        self.set("moe_config.top_k", top_k);
        self.set("moe_config.moe_intermediate_size", expert_ffn);
        self.set("moe_config.enable_shared_expert", shared_ffn > 0);
        // nanotron's default is not zero; the model declares no auxiliary loss.
        self.set("moe_config.router_aux_loss_coef", 0.0);
        if shared_ffn > 0 {
            self.set("moe_config.shared_expert_intermediate_size", shared_ffn);
        }
        let ungated = shared_ffn > 0 && !shared_gate;
        let why = "its shared expert has a gate";
        self.lacks(ungated, "moe.shared_gate false", why);
        let dense = first_dense > 0 || every != 1;
        let why = "the file makes all layers mixtures of experts";
        self.lacks(dense, "moe.first_dense, moe.every", why);
        self.lacks(bias, "moe.bias", "its experts have no biases");
        let field = "moe.router_correction_bias";
        self.lacks(router_correction_bias, field, "its router has no bias");
    }

    fn numbers(
        &mut self,
        constants: ModelConstants,
        position: Position,
        attention: &Attention,
        routed: bool,
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
        self.set("rms_norm_eps", norm_epsilon);
        self.set("rope_theta", rope_theta);
        self.set("rope_interleaved", rope_neighbours);
        self.set("initializer_range", initializer_range);
        let (head, _) = attention.head_dims();
        self.rotation(position, rope_scaling, head);
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
            self.lacks(refused, field, "its Llama and Qwen2 have no such thing");
        }
        if routed {
            self.weighed(router);
        }
    }

    fn rotation(&mut self, position: Position, scaling: RopeScaling, head: u64) {
        self.lacks(
            position != Position::Rope { dims: head },
            "position",
            "it rotates all dimensions of every head",
        );
        match scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => {
                self.set("rope_seq_len_interpolation_factor", factor);
            }
            RopeScaling::Llama3 { .. } | RopeScaling::Yarn { .. } | RopeScaling::Other => {
                let why = "its rotations are plain, or interpolated by one factor";
                self.lacks(true, "rope_scaling", why);
            }
        }
    }

    fn weighed(&mut self, router: Router) {
        let Router {
            sigmoid,
            normalise,
            scale,
            groups,
            // Without groups there is only one.
            best_groups: _,
            weighs_inputs,
        } = router;
        self.lacks(
            sigmoid || normalise || scale != 1.0 || groups > 1 || weighs_inputs,
            "router",
            "its router weighs the chosen experts by the softmax of all",
        );
    }
}
