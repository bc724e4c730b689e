//! Models whose decoder layers differ in kind: attention, a recurrence over the sequence, feed-forward blocks, experts.

use crate::error::{Wrong, in_range};

/// Largest value of one size of a recurrence, so that products of four sizes fit in 64 bits.
const MOST_SIZE: u64 = 1 << 14;
/// Largest width of all heads together, equal to the limit of any dimension of a model.
const MOST_WIDE: u64 = 1 << 24;

/// The layers of a hybrid model.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Hybrid {
    /// The kind of every decoder layer, in order.
    pub layers: Vec<LayerKind>,
    /// The recurrence, in the layers that have one.
    pub recurrence: Recurrence,
    /// Whether attention's output is multiplied, element by element, by the sigmoid of a gate that is projected together
    /// with the queries (Qwen3-Next).
    pub gated_attention: bool,
}

/// The sublayers of a decoder layer, each with a norm before it and a residual connection around it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerKind {
    /// Attention, then a dense feed-forward block or experts: the layer of a plain decoder.
    #[default]
    AttentionThenFeedForward,
    /// A recurrence in place of attention, then a dense feed-forward block or experts (Qwen3-Next).
    RecurrenceThenFeedForward,
    /// Attention alone (`*` in Nemotron-H's pattern).
    Attention,
    /// A recurrence alone (`M`).
    Recurrence,
    /// A dense feed-forward block alone (`-`).
    FeedForward,
    /// Experts alone (`E`).
    Experts,
}

/// A recurrence that carries a state along the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Recurrence {
    /// The selective state space of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060).
    StateSpace(StateSpace),
    /// The gated delta rule (Yang et al. 2024, arXiv 2412.06464).
    GatedDelta(GatedDelta),
}

/// Sizes of a Mamba-2 mixer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StateSpace {
    /// Number of heads.
    pub heads: u64,
    /// Channels per head.
    pub head_dim: u64,
    /// State size per channel.
    pub state: u64,
    /// Groups of heads that share their input and output matrices, B and C.
    pub groups: u64,
    /// Width of the convolution before the recurrence, in tokens.
    pub kernel: u64,
    /// Whether that convolution has a bias.
    pub kernel_bias: bool,
    /// Tokens of a chunk, inside which the recurrence is computed by matrix products.
    pub chunk: u64,
}

/// Sizes of a gated delta net.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GatedDelta {
    /// Number of key heads; there are as many query heads.
    pub key_heads: u64,
    /// Number of value heads. It is a multiple of `key_heads`: several value heads share one key head.
    pub value_heads: u64,
    /// Size of a key head and of a query head.
    pub key_dim: u64,
    /// Size of a value head.
    pub value_dim: u64,
    /// Width of the convolution before the recurrence, in tokens.
    pub kernel: u64,
}

impl LayerKind {
    /// Whether the layer has attention.
    #[must_use]
    pub fn attends(self) -> bool {
        matches!(self, Self::AttentionThenFeedForward | Self::Attention)
    }

    /// Whether the layer has a recurrence.
    #[must_use]
    pub fn recurs(self) -> bool {
        matches!(self, Self::RecurrenceThenFeedForward | Self::Recurrence)
    }

    /// Whether the layer has a dense feed-forward block or experts.
    #[must_use]
    pub fn feeds(self) -> bool {
        !matches!(self, Self::Attention | Self::Recurrence)
    }
}

impl Recurrence {
    /// Number of independent parts into which tensor parallelism may split the recurrence: groups
    /// of state-space heads, or key heads with their value heads.
    #[must_use]
    pub fn parts(&self) -> u64 {
        match self {
            Self::StateSpace(of) => of.groups,
            Self::GatedDelta(of) => of.key_heads,
        }
    }

    /// Width of the layer's widest tensor, the output of the first projection.
    #[must_use]
    pub fn widest(&self) -> u64 {
        match self {
            Self::StateSpace(of) => 2 * of.width() + 2 * of.shared() + of.heads,
            Self::GatedDelta(of) => {
                let [keys, values] = of.widths();
                2 * (keys + values)
            }
        }
    }

    /// Weights of the linear layers around the recurrence, for this hidden size.
    #[must_use]
    pub fn projections(&self, hidden: u64) -> u64 {
        let (beside, out) = match self {
            Self::StateSpace(of) => (0, of.width()),
            Self::GatedDelta(of) => (2 * of.value_heads, of.widths()[1]),
        };
        hidden * (self.widest() + beside + out)
    }

    /// FLOPs of the recurrence's products for one token, forward: `[without chunks, as Megatron-LM
    /// counts]` (`megatron/training/training.py`, `mamba_layer_flops`, `gdn_layer_flops`).
    #[must_use]
    pub fn token_operations(&self) -> [f64; 2] {
        let [plain, megatron, sizes] = match *self {
            // Per number of state: 2 to add the input to the state, 2 to read the output from it.
            Self::StateSpace(of) => [4.0, 7.0, (of.width() * of.state) as f64],
            // 2 to read with the key, 2 to add the difference, 2 to read with the query.
            Self::GatedDelta(of) => [6.0, 8.0, (of.widths()[1] * of.key_dim) as f64],
        };
        [plain * sizes, megatron * sizes]
    }

    /// Weights of the convolution before the recurrence.
    #[must_use]
    pub fn convolution(&self) -> u64 {
        match self {
            Self::StateSpace(of) => of.kernel * (of.width() + 2 * of.shared()),
            Self::GatedDelta(of) => {
                let [keys, values] = of.widths();
                of.kernel * (2 * keys + values)
            }
        }
    }
}

impl StateSpace {
    /// Number of channels of all heads.
    #[must_use]
    pub fn width(&self) -> u64 {
        self.heads * self.head_dim
    }

    /// Numbers per token in B of all groups; C has as many.
    #[must_use]
    pub fn shared(&self) -> u64 {
        self.groups * self.state
    }
}

impl GatedDelta {
    /// Widths `[all keys together, all values together]`.
    #[must_use]
    pub fn widths(&self) -> [u64; 2] {
        [
            self.key_heads * self.key_dim,
            self.value_heads * self.value_dim,
        ]
    }
}

impl Hybrid {
    /// Checks sizes and counts for a model with this many layers, with experts or without; the
    /// error is the wrong field and what is wrong with it.
    pub(crate) fn check(&self, layers: u64, experts: bool) -> Result<(), Wrong> {
        let pattern = "layer pattern";
        if self.layers.len() as u64 != layers {
            let message = format!("{} kinds for {layers} layers", self.layers.len());
            return Err((pattern, message));
        }
        if !experts && self.layers.contains(&LayerKind::Experts) {
            return Err((
                pattern,
                "layers of experts, but no number of experts".to_owned(),
            ));
        }
        let (sizes, [heads, parts]) = match self.recurrence {
            Recurrence::StateSpace(of) => (
                vec![
                    of.heads,
                    of.head_dim,
                    of.state,
                    of.groups,
                    of.kernel,
                    of.chunk,
                ],
                [of.heads, of.groups],
            ),
            Recurrence::GatedDelta(of) => (
                vec![
                    of.value_heads,
                    of.key_heads,
                    of.key_dim,
                    of.value_dim,
                    of.kernel,
                ],
                [of.value_heads, of.key_heads],
            ),
        };
        for size in sizes {
            in_range(size, 1..=MOST_SIZE).map_err(|wrong| ("recurrence", wrong))?;
        }
        if !heads.is_multiple_of(parts) {
            let message = format!(
                "{parts} does not divide the {heads} heads; expected one of their divisors"
            );
            return Err(("recurrence", message));
        }
        let widest = match self.recurrence {
            Recurrence::StateSpace(of) => of.width().max(of.shared()),
            Recurrence::GatedDelta(of) => of.widths().into_iter().max().unwrap_or(0),
        };
        if widest > MOST_WIDE {
            let message = format!("heads are {widest} wide together, more than {MOST_WIDE}");
            return Err(("recurrence", message));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_cannot_be_are_refused_by_name() {
        let usual = Hybrid {
            layers: vec![LayerKind::Recurrence, LayerKind::FeedForward],
            recurrence: Recurrence::StateSpace(StateSpace {
                heads: 8,
                head_dim: 64,
                state: 128,
                groups: 4,
                kernel: 4,
                kernel_bias: true,
                chunk: 128,
            }),
            gated_attention: false,
        };
        assert_eq!(usual.check(2, false), Ok(()));
        let wrong = |hybrid: &Hybrid, layers| hybrid.check(layers, false).expect_err("wrong").0;
        assert_eq!(wrong(&usual, 3), "layer pattern");
        let mut experts = usual.clone();
        experts.layers[1] = LayerKind::Experts;
        assert_eq!(wrong(&experts, 2), "layer pattern");
        assert_eq!(experts.check(2, true), Ok(()));
        let Recurrence::StateSpace(sizes) = usual.recurrence else {
            unreachable!("made above")
        };
        for sizes in [
            StateSpace { groups: 3, ..sizes },
            StateSpace { chunk: 0, ..sizes },
            StateSpace {
                state: 1 << 15,
                ..sizes
            },
        ] {
            let hybrid = Hybrid {
                recurrence: Recurrence::StateSpace(sizes),
                ..usual.clone()
            };
            assert_eq!(wrong(&hybrid, 2), "recurrence", "{sizes:?}");
        }
    }
}
