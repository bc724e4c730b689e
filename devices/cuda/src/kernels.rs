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

/// The name of a file and its text.
macro_rules! file {
    ($name:literal) => {
        ($name, include_str!(concat!("kernels/", $name)))
    };
}

impl Source {
    /// The file, and before it those that it builds on, by name and text.
    fn files(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Elementwise => &[file!("elementwise.cu")],
            Self::Norm => &[file!("norm.cu")],
            Self::Scale => &[file!("scale.cu")],
            Self::Reduce => &[file!("reduce.cu")],
            Self::EightBits => &[file!("eight_bits.cu")],
            Self::Token => &[file!("token.cu")],
            Self::Expert => &[file!("expert.cu")],
            Self::Grouped => &[file!("tensor_core.cu"), file!("grouped.cu")],
            Self::AttentionSmall => &[file!("attention_prelude.cu"), file!("attention_small.cu")],
            Self::Attention => &[
                file!("tensor_core.cu"),
                file!("attention_prelude.cu"),
                file!("attention.cu"),
            ],
        }
    }

    /// Name of the file.
    #[must_use]
    pub fn file(self) -> &'static str {
        self.files().last().map_or("", |(name, _)| name)
    }

    /// Source text, preceded by the files that it builds on.
    #[must_use]
    pub fn text(self) -> String {
        let prelude = [file!("prelude.cu")];
        let files = prelude.iter().chain(self.files());
        files.map(|(_, text)| *text).collect()
    }
}

/// The kernel of this name for 16-bit or 32-bit elements: `typed!(Norm, "rms_norm", x.is_bf16())` is `rms_norm_bf16` or
/// `rms_norm_f32`.
macro_rules! typed {
    ($source:ident, $name:literal, $bf16:expr) => {
        $crate::kernels::Kernel::plain(
            $crate::kernels::Source::$source,
            if $bf16 {
                concat!($name, "_bf16")
            } else {
                concat!($name, "_f32")
            },
        )
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
