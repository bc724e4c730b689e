//! A resolved decoder-only transformer: every field has a value, whatever the family's
//! `config.json` leaves out. One structure describes all families, so that a published run's
//! `model` block can be decoded into it as well.

use crate::adapters::Adapters;
use crate::hybrid::{Hybrid, LayerKind, Recurrence};
use crate::rope::RopeScaling;
use crate::window::Window;

/// How parameters are named, after the Hugging Face `state_dict` of the family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// `transformer.h.N.attn.c_attn` …
    Gpt2,
    /// `model.decoder.layers.N.self_attn.q_proj` …
    Opt,
    /// `transformer.h.N.self_attention.query_key_value` …
    Bloom,
    /// `gpt_neox.layers.N.attention.query_key_value` …
    GptNeox,
    /// `transformer.h.N.self_attention.query_key_value`, parallel attention and MLP.
    Falcon,
    /// `transformer.blocks.N.attn.Wqkv` …
    Mpt,
    /// `model.layers.N.self_attn.q_proj`, `mlp.gate_proj` … (also Mistral, Qwen2, Qwen3, Gemma, OLMo 2).
    Llama,
    /// As Llama with fused `qkv_proj` and `gate_up_proj`.
    Phi3,
    /// As Llama with `block_sparse_moe.experts.E.w1` ….
    Mixtral,
    /// As Mixtral with `block_sparse_moe.e_score_correction_bias`.
    MiniMax,
    /// As Llama with `mlp.experts.E.gate_proj`, `mlp.gate` (Qwen2-MoE, Qwen3-MoE).
    QwenMoe,
    /// As Llama with `mlp.experts.E.gate_proj`, `mlp.shared_experts`, `mlp.gate` (DeepSeek, GLM-4.5).
    DeepSeek,
    /// As DeepSeek with `mlp.moe_statics.e_score_correction_bias` (ERNIE 4.5).
    Ernie,
    /// As Llama with `feed_forward.experts.gate_up_proj` for all experts, `feed_forward.router`,
    /// `feed_forward.shared_expert`.
    Llama4,
    /// As Llama with `mlp.c_fc`, `mlp.c_proj`.
    Starcoder2,
    /// As Llama with `mlp.experts.gate_up_proj` for all experts, `mlp.router`, sinks.
    GptOss,
    /// `backbone.layers.N.mixer`, whatever the layer is: `in_proj`, `q_proj`, `up_proj` or `experts` in it.
    NemotronH,
}

/// A resolved model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Name to show, as in the preset or the `config.json`'s folder.
    pub name: String,
    /// Which names and fused layouts the parameters have.
    pub family: Family,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Number of decoder layers, MTP layers not included.
    pub layers: u64,
    /// Rows of the embedding table.
    pub vocab: u64,
    /// Whether the head reuses the embedding table.
    pub tied_embeddings: bool,
    /// Whether the head has a bias.
    pub head_bias: bool,
    /// Normalisation used throughout.
    pub norm: Norm,
    /// Whether a norm follows the embedding (BLOOM).
    pub embedding_norm: bool,
    /// How positions are encoded.
    pub position: Position,
    /// Self-attention.
    pub attention: Attention,
    /// The dense feed-forward block.
    pub mlp: Mlp,
    /// Experts; `None` if the model has none. [`Self::layer_class`] says which layers have them.
    pub moe: Option<Moe>,
    /// How attention and MLP join the residual stream.
    pub residual: Residual,
    /// The kinds of layers; `None` if all have attention and a feed-forward block.
    pub hybrid: Option<Hybrid>,
    /// Dropout probability of hidden states (after attention and MLP); 0 means the operator is absent.
    pub hidden_dropout: f64,
    /// Dropout probability of attention weights; 0 means the operator is absent.
    pub attention_dropout: f64,
    /// Multi-token-prediction modules after the last layer (DeepSeek-V3, GLM-4.5).
    pub mtp_layers: u64,
    /// Longest sequence the model declares.
    pub max_position: u64,
    /// Constants of its arithmetic.
    pub constants: ModelConstants,
    /// Type of the multimodal model whose text part this is; its other parts are not planned.
    pub text_of: Option<String>,
    /// Storage format of published weights if nothing trains in it (`fp8`, `mxfp4`), else `None`.
    pub stored_as: Option<String>,
    /// LoRA adapters. With them the model's own weights are frozen and only the adapters are trained; `None` trains all
    /// weights.
    pub adapters: Option<Adapters>,
}

/// Constants of a model's arithmetic. They change results; they cost at most a pointwise kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelConstants {
    /// Added to the variance in norms.
    pub norm_epsilon: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// How the rotary frequencies are rescaled for long contexts.
    pub rope_scaling: RopeScaling,
    /// Base of the rotary frequencies in layers with a sliding window, which are not rescaled
    /// (Gemma 3, OLMo 3); `None` if all layers have the same frequencies.
    pub local_rope_theta: Option<f64>,
    /// Whether the GELU is the tanh approximation.
    pub gelu_tanh: bool,
    /// Whether a norm multiplies by `1 + weight` (Gemma).
    pub norm_from_one: bool,
    /// Factor of token embeddings (Gemma: the square root of the hidden size).
    pub embedding_scale: f64,
    /// Factor of attention scores; `None` for `1/√d` of the query/key head.
    pub attention_scale: Option<f64>,
    /// Scaling of queries by position in layers without rotary positions (Llama 4).
    pub temperature: Option<Temperature>,
    /// Soft cap `c` of attention scores, `c·tanh(x/c)` (Gemma 2).
    pub attention_cap: Option<f64>,
    /// Soft cap `c` of the logits, `c·tanh(x/c)`.
    pub logit_cap: Option<f64>,
    /// Whether rotary positions turn neighbouring dimensions rather than those half a head apart.
    pub rope_neighbours: bool,
    /// How experts are chosen.
    pub router: Router,
    /// Clamp value of gate and up in `g·σ(1.702·g)·(u + 1)` (gpt-oss); `None` for ordinary gates.
    pub bounded_glu: Option<f64>,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
}

impl Default for ModelConstants {
    fn default() -> Self {
        Self {
            norm_epsilon: 1e-5,
            rope_theta: 10_000.0,
            rope_scaling: RopeScaling::None,
            local_rope_theta: None,
            gelu_tanh: true,
            norm_from_one: false,
            embedding_scale: 1.0,
            attention_scale: None,
            temperature: None,
            attention_cap: None,
            logit_cap: None,
            rope_neighbours: false,
            router: Router::default(),
            bounded_glu: None,
            initializer_range: 0.02,
        }
    }
}

/// Growth of queries with their position, so that attention over long sequences stays sharp (Nakanishi 2025): a query
/// at position `p` is multiplied by `1 + scale·ln(1 + ⌊(p + 1) / floor⌋)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Temperature {
    /// The `floor` of this formula, in tokens.
    pub floor: u64,
    /// The `scale` of this formula.
    pub scale: f64,
}

impl Temperature {
    /// Factor of a query at this position (from 0).
    #[must_use]
    pub fn factor(self, position: u64) -> f64 {
        let steps = (position + 1) / self.floor.max(1);
        1.0 + self.scale * crate::elementary::ln(1.0 + steps as f64)
    }
}

/// How a router chooses experts and weighs them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    /// Scores are sigmoids of the logits, not their softmax (DeepSeek-V3, GLM-4.5).
    pub sigmoid: bool,
    /// Whether the chosen experts' scores are normalised to 1.
    pub normalise: bool,
    /// Factor that the chosen experts' weights are multiplied by.
    pub scale: f64,
    /// Number of groups of experts; experts are chosen from the best groups (DeepSeek-V2, §2.1.2),
    /// ranked by their best score, or with sigmoids by the sum of their two best.
    pub groups: u64,
    /// Number of the best groups that a token's experts are chosen from (`topk_group` of
    /// DeepSeek-V3); at most `groups`.
    pub best_groups: u64,
    /// Whether the weights multiply the experts' inputs instead of their outputs (Llama 4).
    pub weighs_inputs: bool,
}

impl Default for Router {
    fn default() -> Self {
        Self {
            sigmoid: false,
            normalise: true,
            scale: 1.0,
            groups: 1,
            best_groups: 1,
            weighs_inputs: false,
        }
    }
}

/// Normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Norm {
    /// Which statistics it uses.
    pub kind: NormKind,
    /// Whether there is a bias beside the weight.
    pub bias: bool,
}

/// The statistics by which a norm normalises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NormKind {
    /// Mean and variance.
    LayerNorm,
    /// Root mean square.
    RmsNorm,
}

/// How the model encodes positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Position {
    /// A learned table with that many rows, added to the embedding.
    Learned {
        /// Rows of the table (OPT has 2 more than positions).
        rows: u64,
    },
    /// Rotary embedding of queries and keys, over that many of each head's dimensions.
    Rope {
        /// Rotated dimensions per head.
        dims: u64,
    },
    /// Linear attention biases; no parameters.
    Alibi,
    /// None.
    Absent,
}

/// Self-attention.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Attention {
    /// Query heads.
    pub heads: u64,
    /// How keys and values are made.
    pub kind: AttentionKind,
    /// Bias on the query, key and value projections.
    pub qkv_bias: bool,
    /// Bias on the output projection.
    pub out_bias: bool,
    /// Which layers attend only within a window.
    pub window: WindowPattern,
    /// Which layers rotate queries and keys, if positions are rotary.
    pub rotated: Rotated,
    /// Learned attention sinks, one per head (gpt-oss).
    pub sinks: bool,
}

/// Which layers rotate queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rotated {
    /// All.
    All,
    /// Those with a window; the others have no positional encoding (Llama 4).
    Windowed,
}

/// How keys and values are projected.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum AttentionKind {
    /// Multi-head, grouped-query or multi-query attention.
    Grouped {
        /// Key/value heads.
        kv_heads: u64,
        /// Dimensions per head.
        head_dim: u64,
        /// Norms of queries and keys.
        qk_norm: QkNorm,
        /// How the query, key and value projections are stored.
        projections: Projections,
    },
    /// Multi-head latent attention (DeepSeek-V2/V3).
    Latent {
        /// Rank of the query compression; `None` projects queries directly.
        q_lora_rank: Option<u64>,
        /// Rank of the joint key/value compression.
        kv_lora_rank: u64,
        /// Unrotated dimensions per query/key head.
        qk_nope_dim: u64,
        /// Rotated dimensions per head, shared by all key heads.
        qk_rope_dim: u64,
        /// Dimensions per value head.
        v_dim: u64,
    },
}

/// Norms of queries and keys, between their projections and attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QkNorm {
    /// None.
    Absent,
    /// Over each head, with one weight for all heads (Qwen3, Gemma 3).
    Heads,
    /// Over all heads together (OLMo 2, MiniMax-M2).
    Whole,
    /// Over each rotated head, without a weight; absent in layers without rotation (Llama 4).
    Unweighted,
}

/// How the query, key and value projections are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Projections {
    /// Three weights.
    Separate,
    /// One weight: all queries, then all keys, then all values (GPT-2, MPT, Phi-3).
    Stacked,
    /// One weight: for each key head its queries, its key, its value (BLOOM, GPT-NeoX, Falcon).
    Grouped,
}

/// Which layers attend only to a window of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WindowPattern {
    /// Every layer attends to everything before it.
    Full,
    /// Every layer has this window.
    All {
        /// The window.
        window: Window,
    },
    /// Layers have the window, except each `period`-th, which is full (Gemma 3: 6; Gemma 2, gpt-oss: 2).
    Alternating {
        /// The window.
        window: Window,
        /// Layer `i` is full when `(i + 1) % period == 0`.
        period: u64,
    },
}

/// A feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mlp {
    /// Inner width.
    pub ffn: u64,
    /// Nonlinearity.
    pub activation: Activation,
    /// Whether a gate multiplies the activation (three weight matrices instead of two).
    pub gated: bool,
    /// Whether its linear layers have biases.
    pub bias: bool,
    /// One fused weight for gate and up (Phi-3, gpt-oss experts).
    pub fused_gate_up: bool,
}

/// Nonlinearity of an MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Activation {
    /// Gaussian error linear unit.
    Gelu,
    /// Sigmoid linear unit.
    Silu,
    /// Rectifier.
    Relu,
    /// Squared rectifier (Nemotron).
    Relu2,
}

/// Mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Moe {
    /// Routed experts.
    pub experts: u64,
    /// Experts per token.
    pub top_k: u64,
    /// Inner width of a routed expert.
    pub expert_ffn: u64,
    /// Inner width of the shared expert(s) together; 0 if there are none.
    pub shared_ffn: u64,
    /// Whether the shared expert has a sigmoid gate (Qwen2-MoE).
    pub shared_gate: bool,
    /// Leading layers that are dense.
    pub first_dense: u64,
    /// A layer is MoE when `(i + 1 - first_dense) % every == 0` (1: all after the dense ones; 2 in Llama 4 Maverick).
    pub every: u64,
    /// Biases in expert linears and in the router (gpt-oss).
    pub bias: bool,
    /// Router has a score-correction bias per expert (DeepSeek-V3, GLM-4.5, MiniMax-M2, ERNIE 4.5).
    pub router_correction_bias: bool,
}

/// How attention and MLP join the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Residual {
    /// `x + attn(norm(x))`, then `x + mlp(norm(x))`.
    Sequential,
    /// `x + attn(norm(x)) + mlp(norm'(x))`.
    Parallel {
        /// Attention and MLP read the same norm (Falcon 7B); otherwise each has its own (NeoX, Falcon 40B+).
        shared_norm: bool,
    },
    /// Norms before and after each block (Gemma 2 and 3).
    Sandwich,
    /// `x + norm(attn(x))`, then `x + norm(mlp(x))` (OLMo 2 and 3).
    After,
}

/// The properties in which layers of one model differ; layers of the same class have equal cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayerClass {
    /// What the layer is made of.
    pub kind: LayerKind,
    /// Whether the feed-forward block is a mixture of experts.
    pub moe: bool,
    /// Window of attention, if the layer has one.
    pub window: Option<Window>,
}

impl ModelConfig {
    /// A decoder with RMSNorm and gated SiLU, and without position encoding, biases, experts or dropout. The caller sets the name,
    /// the attention heads, their kind and size, the feed-forward width and the longest sequence.
    #[must_use]
    pub fn decoder(family: Family, layers: u64, hidden: u64, vocab: u64) -> Self {
        Self {
            name: String::new(),
            family,
            hidden,
            layers,
            vocab,
            tied_embeddings: false,
            head_bias: false,
            norm: Norm {
                kind: NormKind::RmsNorm,
                bias: false,
            },
            embedding_norm: false,
            position: Position::Absent,
            attention: Attention {
                heads: 1,
                kind: AttentionKind::Grouped {
                    kv_heads: 1,
                    head_dim: 1,
                    qk_norm: QkNorm::Absent,
                    projections: Projections::Separate,
                },
                qkv_bias: false,
                out_bias: false,
                window: WindowPattern::Full,
                rotated: Rotated::All,
                sinks: false,
            },
            mlp: Mlp {
                ffn: 0,
                activation: Activation::Silu,
                gated: true,
                bias: false,
                fused_gate_up: false,
            },
            moe: None,
            residual: Residual::Sequential,
            hybrid: None,
            hidden_dropout: 0.0,
            attention_dropout: 0.0,
            mtp_layers: 0,
            max_position: 0,
            constants: ModelConstants::default(),
            text_of: None,
            stored_as: None,
            adapters: None,
        }
    }

    /// The class of decoder layer `index` (0-based).
    #[must_use]
    pub fn layer_class(&self, index: u64) -> LayerClass {
        let kind = self
            .hybrid
            .as_ref()
            .and_then(|of| of.layers.get(index as usize));
        let kind = kind.copied().unwrap_or_default();
        let moe = match kind {
            LayerKind::AttentionThenFeedForward | LayerKind::RecurrenceThenFeedForward => {
                self.moe.is_some_and(|m| m.is_moe_layer(index))
            }
            LayerKind::Experts => true,
            LayerKind::Attention | LayerKind::Recurrence | LayerKind::FeedForward => false,
        };
        let window = match self.attention.window {
            WindowPattern::Full => None,
            WindowPattern::All { window } => Some(window),
            WindowPattern::Alternating { window, period } => {
                (!(index + 1).is_multiple_of(period)).then_some(window)
            }
        };
        let window = window.filter(|_| kind.attends());
        LayerClass { kind, moe, window }
    }

    /// Whether some layer has a dense feed-forward block.
    #[must_use]
    pub fn has_dense_feed_forward(&self) -> bool {
        (0..self.layers)
            .map(|index| self.layer_class(index))
            .any(|class| class.kind.feeds() && !class.moe)
    }

    /// Whether some layer is a selective state space (Mamba-2).
    #[must_use]
    pub fn has_state_spaces(&self) -> bool {
        let recurrence = self.hybrid.as_ref().map(|hybrid| hybrid.recurrence);
        matches!(recurrence, Some(Recurrence::StateSpace(_)))
    }
}

impl Moe {
    /// Experts in every layer, without biases or shared experts.
    #[must_use]
    pub fn routed(experts: u64, top_k: u64, expert_ffn: u64) -> Self {
        Self {
            experts,
            top_k,
            expert_ffn,
            shared_ffn: 0,
            shared_gate: false,
            first_dense: 0,
            every: 1,
            bias: false,
            router_correction_bias: false,
        }
    }

    /// Whether decoder layer `index` (0-based) has experts.
    #[must_use]
    pub fn is_moe_layer(&self, index: u64) -> bool {
        index >= self.first_dense && (index + 1 - self.first_dense).is_multiple_of(self.every)
    }
}

impl Attention {
    /// Number of key/value heads; latent attention has one per query head.
    #[must_use]
    pub fn kv_heads(&self) -> u64 {
        match self.kind {
            AttentionKind::Grouped { kv_heads, .. } => kv_heads,
            AttentionKind::Latent { .. } => self.heads,
        }
    }

    /// Dimensions of a query/key head and of a value head.
    #[must_use]
    pub fn head_dims(&self) -> (u64, u64) {
        match self.kind {
            AttentionKind::Grouped { head_dim, .. } => (head_dim, head_dim),
            AttentionKind::Latent {
                qk_nope_dim,
                qk_rope_dim,
                v_dim,
                ..
            } => (qk_nope_dim + qk_rope_dim, v_dim),
        }
    }
}
