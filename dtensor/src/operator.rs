//! The operators of a trace, with local sizes and all that running them needs. Placements, saved tensors, backward,
//! names and cost classes are derived in `operators`, one file per family.

use std::fmt;

use catalog::model::{Activation, NormKind, Router, Temperature};
use catalog::{Axis, RopeScaling, Window};

use crate::placement::Placement;
use crate::tensor::TensorId;

/// A forward operator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operator {
    /// A GEMM with a weight: a linear layer or experts.
    Product(Product),
    /// One of the operators of core attention.
    Attention(Attention),
    /// A layer or RMS norm.
    Norm(Norm),
    /// A function of each element, or of each row.
    Pointwise(Pointwise),
    /// An embedding or the loss: driven by token ids, positions or labels.
    Token(Token),
    /// Routing of tokens to experts.
    Expert(Expert),
    /// An operator of a layer that carries a state along the sequence.
    Recurrent(Recurrent),
    /// The sum of two tensors. Both inputs have the output's gradient, so backward runs nothing.
    Add,
    /// An exchange between ranks.
    Exchange(Exchange),
}

/// A backward operator. The number is the index in [`Trace::forward`](crate::Trace::forward) of the operator whose
/// gradient it computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gradient {
    /// The gradient of one factor of a product, input or weight. Sizes are those of the GEMM that computes it.
    Product(usize, Product, Factor),
    /// The gradient of an operator of core attention; for its two products, of one factor.
    Attention(usize, Attention, Factor),
    /// The gradients of a norm's input, weight and bias.
    Norm(usize, Norm),
    /// The gradients of all inputs.
    Pointwise(usize, Pointwise),
    /// The gradient of an embedding table, or of the logits.
    Token(usize, Token),
    /// The gradients of all inputs.
    Expert(usize, Expert),
    /// The gradients of all inputs.
    Recurrent(usize, Recurrent),
    /// The sum of two gradients of a tensor that several operators read.
    Sum,
    /// The exchange that reverses a forward exchange.
    Exchange(Exchange),
    /// Keys and values go around the context-parallel ring again, together with their gradients. Devices send them as
    /// part of the gradients of attention.
    Ring(Collective),
}

/// One of the two factors of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Factor {
    /// The first factor: rows of activations, queries, or attention probabilities.
    First,
    /// The second factor: a layer's weight, keys, or values.
    Second,
}

/// A GEMM with weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Product {
    /// A linear layer, and where in the block it is.
    Matmul(Gemm, Site),
    /// One GEMM per local expert. `m` counts the rows of all; the number counts local experts.
    GroupedMatmul(Gemm, u64),
}

/// Sizes of a product `[m, k] × [k, n]`. In backward they are those of the product actually run
/// (dgrad: `[m, n] × [n, k]`; wgrad: `[n, m] × [m, k]`, in forward's letters).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gemm {
    /// Rows of the result.
    pub m: u64,
    /// Columns of the result.
    pub n: u64,
    /// Length of the contracted dim.
    pub k: u64,
}

/// Where in its block a linear layer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Site {
    /// Before core attention, or before a recurrence: projections to what it reads.
    AttentionInput,
    /// After core attention or a recurrence, into the residual stream.
    AttentionOutput,
    /// Into a feed-forward block.
    FeedForwardInput,
    /// Out of a feed-forward block, into the residual stream.
    FeedForwardOutput,
    /// The router's scores of experts, computed in fp32.
    Router,
    /// Either of the two narrow layers of an adapter.
    Adapter,
    /// The head's product with the vocabulary's table, of the model or of a prediction module.
    Vocabulary,
    /// Elsewhere: a prediction module's projection, the gate of a shared expert.
    Other,
}

/// One of the operators of core attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Index of the core attention in [`Trace::attentions`](crate::Trace::attentions).
    pub of: usize,
    /// Sizes on this rank.
    pub shape: AttentionShape,
    /// Which operator it is.
    pub piece: AttentionPiece,
}

/// The operators of core attention, in order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AttentionPiece {
    /// `Q·Kᵀ` per head.
    Scores,
    /// Scale, mask and softmax of the scores.
    Softmax(SoftmaxRule),
    /// Dropout of the attention probabilities; the number is the probability that one is zeroed.
    Dropout(f64),
    /// `P·V` per head.
    Context,
}

/// Sizes of one attention call on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Number of sequences.
    pub batch: u64,
    /// Number of query heads.
    pub heads: u64,
    /// Number of key/value heads.
    pub kv_heads: u64,
    /// Query tokens per sequence on this rank.
    pub q_len: u64,
    /// Key tokens per sequence that the queries may see (after the context-parallel exchange).
    pub kv_len: u64,
    /// Dimensions of a query/key head.
    pub qk_dim: u64,
    /// Dimensions of a value head.
    pub v_dim: u64,
    /// Whether the mask is causal (balanced by zig-zag under context parallelism, so half the products are needed).
    pub causal: bool,
    /// Window of attention, if there is one.
    pub window: Option<Window>,
}

/// How attention's scores become probabilities.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoftmaxRule {
    /// Factor that the scores are multiplied by.
    pub scale: f64,
    /// Soft cap `c` of the scaled scores, `c·tanh(x/c)`.
    pub cap: Option<f64>,
    /// Attention sinks: one extra logit per head that takes part in the softmax but has no value.
    pub sinks: Option<TensorId>,
    /// ALiBi (Press et al. 2022): the number of heads, each with its own slope by which scores fall with distance.
    pub alibi: Option<u64>,
}

/// A layer or RMS norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// Layer norm or RMS norm.
    pub kind: NormKind,
    /// Epsilon added to the variance.
    pub epsilon: f64,
    /// The bias parameter, if there is one.
    pub bias: Option<TensorId>,
    /// Whether the norm multiplies by `1 + weight` instead of `weight`.
    pub from_one: bool,
}

/// A function of each element, or of each row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pointwise {
    /// A nonlinearity.
    Activation(Nonlinearity),
    /// A gated linear unit of two tensors, gate and up.
    Gated(GatedUnit),
    /// A gated linear unit of one tensor that holds gate and up.
    FusedGated(GatedUnit),
    /// Soft cap `c·tanh(x/c)` with this bound `c`.
    Cap(f64),
    /// Rotary positions of queries or keys.
    Rope(Rotary),
    /// Multiplication by this number.
    Scale(f64),
    /// Multiplication of every row by a factor of its position.
    Temperature(Temperature),
    /// RMS norm without a weight over every run of `width` columns.
    UnitNorm {
        /// Columns of a run.
        width: u64,
        /// Epsilon added to the mean square.
        epsilon: f64,
    },
    /// Multiplication of every row by the sigmoid of the row's number in the second input.
    Gate,
    /// Multiplication of every element by the sigmoid of the second input's element.
    SigmoidGate,
    /// Addition of a vector to every row; in backward the column sum.
    Bias,
    /// Dropout; the number is the probability that an element is zeroed. Saves a one-byte mask.
    Dropout(f64),
    /// A copy to another type, or into a wider tensor (concatenation).
    Copy,
    /// Concatenation per head: the head's own columns, then those of the second input, which all heads share.
    Join {
        /// A head's own columns.
        own: u64,
        /// Columns that all heads share.
        shared: u64,
    },
}

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nonlinearity {
    /// The function that is applied.
    pub function: Activation,
    /// Whether a GELU uses the tanh approximation.
    pub tanh: bool,
}

/// A gated linear unit of gate `g` and up `u` (Shazeer 2020, arXiv:2002.05202).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GatedUnit {
    /// `f(g)·u`.
    Plain(Nonlinearity),
    /// gpt-oss's `g·σ(1.702·g)·(u + 1)`, with `g` clamped from above by this limit and `u` to ± the limit.
    Bounded(f64),
}

/// Rotary position embedding of dimensions `first..first + dims` of every head of `head_dim` columns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// Dimensions per head.
    pub head_dim: u64,
    /// First rotated dimension.
    pub first: u64,
    /// Rotated dimensions.
    pub dims: u64,
    /// Whether adjacent dimensions form the rotated pairs, rather than dimensions `dims / 2` apart.
    pub neighbours: bool,
    /// Base of the rotary frequencies.
    pub theta: f64,
    /// How the frequencies are rescaled for long contexts.
    pub scaling: RopeScaling,
}

/// Operators driven by token ids, positions or labels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Token {
    /// Lookup of rows of this table by token id; in backward a scatter-add.
    Embedding(TensorId),
    /// Addition of the rows of a position table; in backward a scatter-add.
    Positions {
        /// The table.
        table: TensorId,
        /// The row of the table that belongs to position 0.
        first: u64,
    },
    /// Softmax cross-entropy over logits. With a sharded vocabulary, the tensor holds its sums over the whole
    /// vocabulary.
    CrossEntropy(Option<TensorId>),
}

/// Routing of tokens to experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Expert {
    /// Softmax or sigmoid over experts and top-k choice, with the auxiliary loss.
    Route(Route),
    /// Permutes tokens into rows ordered by expert.
    Permute,
    /// Permutes tokens into rows ordered by expert, each multiplied by the router's weight for it.
    WeightedPermute,
    /// Restores token order and adds up the outputs of the top-k experts, multiplied by the router's weights.
    Unpermute,
    /// Restores token order and adds up the outputs of the top-k experts, without weights.
    PlainUnpermute,
    /// Adds each expert's bias to its rows.
    Bias,
}

/// How experts are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Route {
    /// How scores become weights.
    pub router: Router,
    /// Bias added to the scores only to choose experts, not to weight them.
    pub bias: Option<TensorId>,
}

/// Operators of a layer that carries a state along the sequence. Their weights are among their inputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Recurrent {
    /// A causal convolution of every channel over the sequence, then SiLU.
    Convolution(Convolution),
    /// The recurrence itself, computed in chunks of the sequence.
    Scan(Scan),
    /// An RMS norm over groups of columns, and the product with the SiLU of a gate.
    GatedNorm(GatedNorm),
}

/// A convolution of every channel over the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Convolution {
    /// Tokens that an output depends on.
    pub kernel: u64,
    /// Whether backward computes the output again, instead of keeping it.
    pub again: bool,
}

/// Sizes of a recurrence on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scan {
    /// Number of sequences.
    pub batch: u64,
    /// Tokens per sequence.
    pub length: u64,
    /// Tokens per chunk: matrix products compute a chunk, then its state goes on to the next.
    pub chunk: u64,
    /// Number of heads.
    pub heads: u64,
    /// The recurrence that is computed, with the sizes that only it has.
    pub rule: ScanRule,
}

/// A recurrence, with the sizes that only it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScanRule {
    /// Mamba-2's state space.
    StateSpace {
        /// Channels per head.
        head_dim: u64,
        /// Elements of state per channel.
        state: u64,
        /// Groups of heads that share B and C.
        groups: u64,
    },
    /// The gated delta rule. `Scan::heads` counts value heads.
    GatedDelta {
        /// Number of key heads; several value heads share one.
        key_heads: u64,
        /// Size of a key head and of a query head.
        key_dim: u64,
        /// Size of a value head.
        value_dim: u64,
    },
}

/// An RMS norm with a gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedNorm {
    /// Columns that share a statistic.
    pub group: u64,
    /// Epsilon added to the mean square.
    pub epsilon: f64,
    /// Whether the gate multiplies before the norm (Mamba-2) rather than after it.
    pub gate_first: bool,
}

/// Communication between ranks. Inputs and outputs are local tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exchange {
    /// The collective and its size.
    pub collective: Collective,
    /// What the data is and how it is redistributed.
    pub moves: Moves,
}

/// What an exchange moves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Moves {
    /// Redistributes a tensor from one placement to another.
    Redistribute {
        /// Placement before.
        from: Placement,
        /// Placement after.
        to: Placement,
    },
    /// Sends rows to the ranks of their experts.
    Dispatch,
    /// Sends rows back to the ranks of their tokens.
    Combine,
    /// Gathers the rows of all expert-tensor-parallel peers.
    ExpertGather,
    /// Sums rows over expert-tensor-parallel peers and scatters them (reduce-scatter).
    ExpertReduce,
    /// All-reduces the loss's three numbers per token over a sharded vocabulary; the tensor is the logits.
    VocabularySums(TensorId),
    /// Passes keys and values around the context-parallel ring.
    Ring,
}

/// A collective of one rank: kind, axis and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Collective {
    /// Which collective it is.
    pub kind: CollectiveKind,
    /// The mesh axis that it runs over.
    pub axis: Axis,
    /// Bytes of the whole (gathered) tensor for all-gather and reduce-scatter; of one rank's tensor
    /// for all-reduce, all-to-all and each ring step.
    pub bytes: u64,
}

/// Kind of communication, named as in NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CollectiveKind {
    /// Every rank ends with the sum.
    AllReduce,
    /// Every rank ends with all shards.
    AllGather,
    /// Every rank ends with its own shard of the sum.
    ReduceScatter,
    /// Every rank sends a different part to every other rank.
    AllToAll,
    /// `size − 1` point-to-point steps around the ring, overlapped with attention.
    RingExchange,
    /// One rank sends to one other.
    SendRecv,
}

/// What decides an operator's cost: operators of the same class are fused, priced and recomputed alike. A gradient has
/// the class of its forward operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CostClass {
    /// A product with weights.
    Product(Product),
    /// `Q·Kᵀ` per head; in backward one of the two products of its transpose.
    AttentionScores(AttentionShape),
    /// `P·V` per head; in backward one of the two products of its transpose.
    AttentionContext(AttentionShape),
    /// Scale, mask and softmax of attention's scores.
    Softmax(AttentionShape),
    /// A recurrence in chunks of the sequence.
    Scan(Scan),
    /// A convolution over the sequence.
    Convolution,
    /// A layer or RMS norm.
    Norm,
    /// A nonlinearity, with the gate's product when gated.
    Activation {
        /// Whether a gate multiplies.
        gated: bool,
    },
    /// A sum of two tensors.
    Add,
    /// A vector added to rows; in backward the column sum.
    Bias,
    /// Dropout.
    Dropout,
    /// Rotary positions.
    Rope,
    /// Multiplication by a scalar or by a broadcast tensor.
    Scale,
    /// A copy that changes layout or type.
    Copy,
    /// Rows of a table; in backward the scatter-add.
    Embedding,
    /// The cross-entropy loss.
    CrossEntropy,
    /// A router's choice.
    TopK,
    /// Tokens ordered by expert; in backward the inverse.
    Permute,
    /// Tokens back in order; in backward the inverse.
    Unpermute,
    /// An exchange between ranks.
    Collective(Collective),
}

impl CostClass {
    /// Whether a pointwise compiler can fuse the operator into a chain: elementwise operators and row reductions.
    #[must_use]
    pub fn is_pointwise(self) -> bool {
        match self {
            Self::Norm
            | Self::Activation { .. }
            | Self::Add
            | Self::Bias
            | Self::Dropout
            | Self::Rope
            | Self::Scale
            | Self::Copy => true,
            Self::Product(_)
            | Self::AttentionScores(_)
            | Self::AttentionContext(_)
            | Self::Softmax(_)
            | Self::Scan(_)
            | Self::Convolution
            | Self::Embedding
            | Self::CrossEntropy
            | Self::TopK
            | Self::Permute
            | Self::Unpermute
            | Self::Collective(_) => false,
        }
    }
}

/// An operator's name in profiles, and its cost class.
pub(crate) type Class = (Name, CostClass);

/// An operator's name in profiles, formatted only when it is displayed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Name {
    /// This name.
    Is(&'static str),
    /// A product of core attention, or the gradient of one of its factors.
    Attention(&'static str, Option<Factor>),
    /// An activation function; whether it is multiplied by a gate.
    Activation(Nonlinearity, bool),
    /// A redistribution.
    Moves(Placement, Placement),
}

impl From<&'static str> for Name {
    fn from(name: &'static str) -> Self {
        Self::Is(name)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let placed = |f: &mut fmt::Formatter<'_>, p: Placement| match p {
            Placement::Replicate => f.write_str("replicate"),
            Placement::Partial => f.write_str("partial"),
            Placement::Shard(dim) | Placement::Interleaved(dim, _) => write!(f, "shard {dim}"),
        };
        match *self {
            Self::Is(name) => f.write_str(name),
            Self::Attention(name, factor) => {
                let of = match factor {
                    Some(Factor::First) => " of input 0",
                    Some(Factor::Second) => " of input 1",
                    None => "",
                };
                write!(f, "attention {name}{of}")
            }
            Self::Activation(of, gated) => {
                let name = format!("{:?}", of.function).to_lowercase();
                let tanh = if of.tanh { " tanh" } else { "" };
                let gated = if gated { " gated" } else { "" };
                write!(f, "{name}{tanh}{gated}")
            }
            Self::Moves(from, to) => {
                placed(f, from)?;
                f.write_str(" to ")?;
                placed(f, to)
            }
        }
    }
}

impl Gradient {
    /// The forward operator that gives a gradient its class, name and sizes; and the factor whose
    /// gradient it computes, if each factor has its own gradient operator.
    pub(crate) fn operator(&self) -> (Operator, Option<Factor>) {
        let operator = match *self {
            Self::Product(_, of, factor) => return (Operator::Product(of), Some(factor)),
            Self::Attention(_, of, factor) => return (Operator::Attention(of), Some(factor)),
            Self::Norm(_, norm) => Operator::Norm(norm),
            Self::Pointwise(_, pointwise) => Operator::Pointwise(pointwise),
            Self::Token(_, token) => Operator::Token(token),
            Self::Expert(_, expert) => Operator::Expert(expert),
            Self::Recurrent(_, recurrent) => Operator::Recurrent(recurrent),
            Self::Sum => Operator::Add,
            Self::Exchange(exchange) => Operator::Exchange(exchange),
            Self::Ring(collective) => {
                let moves = Moves::Ring;
                Operator::Exchange(Exchange { collective, moves })
            }
        };
        (operator, None)
    }
}
