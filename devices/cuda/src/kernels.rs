//! Our kernels, and their CUDA C sources.

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
}

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
