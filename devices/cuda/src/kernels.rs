//! Our kernels: their CUDA C sources, and the functions that each file defines.

/// A file of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// Elementwise operators on flat tensors.
    Elementwise,
    /// Layer and RMS norms.
    Norm,
    /// Scaling, soft caps and gates, and columns that all heads share.
    Scale,
    /// Sums in a fixed order, the gradient norm, and the optimizer.
    Reduce,
    /// Casts to FP8.
    EightBits,
    /// Embeddings and the loss.
    Token,
    /// Routing of tokens to experts, and permutation of their rows.
    Expert,
    /// Grouped GEMMs: one product per expert.
    Grouped,
    /// Attention in 32 bits, without tensor cores.
    AttentionSmall,
    /// Attention in bf16 on tensor cores.
    Attention,
}

/// One of our own CUDA kernels, and what it is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Kernel {
    /// The file that defines it.
    pub source: Source,
    /// Name of the function in that file.
    pub name: &'static str,
    /// What the file is compiled for: padded dimensions of a head, for [`Source::Attention`].
    pub head: Head,
}

/// Head dimensions that a file is compiled for, padded; zeros where the file has no heads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Head {
    /// Dimensions of a query or key head.
    pub key: u32,
    /// Dimensions of a value head.
    pub value: u32,
}

/// Every file.
pub const SOURCES: [Source; 10] = [
    Source::Elementwise,
    Source::Norm,
    Source::Scale,
    Source::Reduce,
    Source::EightBits,
    Source::Token,
    Source::Expert,
    Source::Grouped,
    Source::AttentionSmall,
    Source::Attention,
];

macro_rules! text {
    ($name:literal) => {
        include_str!(concat!("kernels/", $name))
    };
}

impl Source {
    /// Name of the file.
    #[must_use]
    pub fn file(self) -> &'static str {
        match self {
            Self::Elementwise => "elementwise.cu",
            Self::Norm => "norm.cu",
            Self::Scale => "scale.cu",
            Self::Reduce => "reduce.cu",
            Self::EightBits => "eight_bits.cu",
            Self::Token => "token.cu",
            Self::Expert => "expert.cu",
            Self::Grouped => "grouped.cu",
            Self::AttentionSmall => "attention_small.cu",
            Self::Attention => "attention.cu",
        }
    }

    /// Source text, preceded by the files that it builds on.
    #[must_use]
    pub fn text(self) -> String {
        let parts: &[&str] = match self {
            Self::Elementwise => &[text!("elementwise.cu")],
            Self::Norm => &[text!("norm.cu")],
            Self::Scale => &[text!("scale.cu")],
            Self::Reduce => &[text!("reduce.cu")],
            Self::EightBits => &[text!("eight_bits.cu")],
            Self::Token => &[text!("token.cu")],
            Self::Expert => &[text!("expert.cu")],
            Self::Grouped => &[text!("tensor_core.cu"), text!("grouped.cu")],
            Self::AttentionSmall => &[text!("attention_prelude.cu"), text!("attention_small.cu")],
            Self::Attention => &[
                text!("tensor_core.cu"),
                text!("attention_prelude.cu"),
                text!("attention.cu"),
            ],
        };
        [&[text!("prelude.cu")], parts].concat().concat()
    }

    /// Names of the kernels that it defines.
    #[must_use]
    pub fn kernels(self) -> &'static [&'static str] {
        match self {
            Self::Elementwise => ELEMENTWISE,
            Self::Norm => NORM,
            Self::Scale => SCALE,
            Self::Reduce => &[
                "column_sum_f32",
                "column_sum_bf16",
                "add_lines",
                "square_sum",
                "clip",
                "adamw",
            ],
            Self::EightBits => &["largest_bf16", "cast_e4m3", "cast_e5m2"],
            Self::Token => &[
                "embedding_f32",
                "embedding_bf16",
                "embedding_backward_f32",
                "embedding_backward_bf16",
                "loss_f32",
                "loss_bf16",
                "loss_merge",
            ],
            Self::Expert => EXPERT,
            Self::Grouped => &[
                "grouped_forward_f32",
                "grouped_forward_bf16",
                "grouped_backward_f32",
                "grouped_backward_bf16",
                "grouped_weight_f32",
                "grouped_weight_bf16",
            ],
            Self::AttentionSmall => &[
                "attention_forward_f32",
                "attention_query_backward_f32",
                "attention_key_backward_f32",
                "attention_delta_f32",
                "attention_delta_bf16",
                "attention_sinks_f32",
                "attention_sinks_bf16",
            ],
            Self::Attention => &[
                "attention_forward_bf16",
                "attention_query_backward_bf16",
                "attention_key_backward_bf16",
            ],
        }
    }
}

const ELEMENTWISE: &[&str] = &[
    "add_f32",
    "add_bf16",
    "activation_f32",
    "activation_bf16",
    "activation_backward_f32",
    "activation_backward_bf16",
    "gated_f32",
    "gated_bf16",
    "gated_backward_f32",
    "gated_backward_bf16",
    "bias_f32",
    "bias_bf16",
    "columns_f32",
    "columns_bf16",
    "dropout_f32",
    "dropout_bf16",
    "masked_f32",
    "masked_bf16",
    "rope_f32",
    "rope_bf16",
    "cast_f32_bf16",
    "cast_bf16_f32",
];

const NORM: &[&str] = &[
    "layer_norm_f32",
    "layer_norm_bf16",
    "layer_norm_wide_f32",
    "layer_norm_wide_bf16",
    "rms_norm_f32",
    "rms_norm_bf16",
    "rms_norm_wide_f32",
    "rms_norm_wide_bf16",
    "layer_norm_backward_f32",
    "layer_norm_backward_bf16",
    "layer_norm_backward_wide_f32",
    "layer_norm_backward_wide_bf16",
    "rms_norm_backward_f32",
    "rms_norm_backward_bf16",
    "rms_norm_backward_wide_f32",
    "rms_norm_backward_wide_bf16",
];

const SCALE: &[&str] = &[
    "scale_f32",
    "scale_bf16",
    "cap_f32",
    "cap_bf16",
    "cap_backward_f32",
    "cap_backward_bf16",
    "gate_rows_f32",
    "gate_rows_bf16",
    "gate_rows_backward_f32",
    "gate_rows_backward_bf16",
    "bounded_glu_f32",
    "bounded_glu_bf16",
    "bounded_glu_backward_f32",
    "bounded_glu_backward_bf16",
    "join_f32",
    "join_bf16",
    "join_backward_f32",
    "join_backward_bf16",
];

const EXPERT: &[&str] = &[
    "top_k_f32",
    "top_k_bf16",
    "top_k_backward_f32",
    "top_k_backward_bf16",
    "route_count",
    "route_scan",
    "route_place",
    "permute_f32",
    "permute_bf16",
    "combine_f32",
    "combine_bf16",
    "combine_backward_f32",
    "combine_backward_bf16",
    "expert_bias_f32",
    "expert_bias_bf16",
    "expert_bias_backward_f32",
    "expert_bias_backward_bf16",
];

/// The kernel of this name for 16-bit or 32-bit elements: `typed!(Norm, "rms_norm", x.is_bf16())` is `rms_norm_bf16` or
/// `rms_norm_f32`.
macro_rules! typed {
    ($source:ident, $name:literal, $bf16:expr) => {
        $crate::kernels::Kernel {
            source: $crate::kernels::Source::$source,
            name: if $bf16 {
                concat!($name, "_bf16")
            } else {
                concat!($name, "_f32")
            },
            head: $crate::kernels::Head { key: 0, value: 0 },
        }
    };
}
pub(crate) use typed;

impl Kernel {
    /// A kernel that has no variants by element type.
    #[must_use]
    pub const fn plain(source: Source, name: &'static str) -> Self {
        Self {
            source,
            name,
            head: Head { key: 0, value: 0 },
        }
    }
}
