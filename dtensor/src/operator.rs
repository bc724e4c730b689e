//! What operators compute, with local sizes and all that running them needs. What follows from it (placements,
//! what is kept, backward, names and classes of cost) is in `operators`, a file for each family.

use std::borrow::Cow;

use catalog::model::{Activation, NormKind, Router};
use catalog::{Axis, RopeScaling};

use crate::placement::Placement;
use crate::tensor::TensorId;

/// What an operator of forward computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operator {
    /// A product with weights.
    Product(Product),
    /// A piece of core attention.
    Attention(Attention),
    /// A layer or RMS norm.
    Norm(Norm),
    /// A function of each element, or of each row.
    Pointwise(Pointwise),
    /// What token ids, positions or labels decide.
    Token(Token),
    /// Routing of tokens to experts.
    Expert(Expert),
    /// The sum of two tensors. Its gradient is that of both, so backward runs nothing.
    Add,
    /// An exchange between ranks.
    Exchange(Exchange),
}

/// What an operator of backward computes. The number is the place in [`Trace::forward`](crate::Trace::forward) of the
/// operator whose gradient it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gradient {
    /// The gradient of one of a product's factors: the input, or the weight. Sizes are those of the product run.
    Product(usize, Product, Factor),
    /// The gradient of a piece of core attention: of one of its factors, where it is a product.
    Attention(usize, Attention, Factor),
    /// The gradients of a norm's input, weight and bias.
    Norm(usize, Norm),
    /// The gradients of all inputs.
    Pointwise(usize, Pointwise),
    /// The gradient of a table, or of the logits.
    Token(usize, Token),
    /// The gradients of all inputs.
    Expert(usize, Expert),
    /// The sum of two gradients of a tensor that has several readers.
    Sum,
    /// The exchange that undoes one of forward.
    Exchange(Exchange),
    /// Keys and values go round the context-parallel ring again, their gradients beside them. Devices send them with
    /// the gradients of attention.
    Ring(Collective),
}

/// One of the two factors of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Factor {
    /// The first: rows, queries, or attention's weights.
    First,
    /// The second: a layer's weight, keys, or values.
    Second,
}

/// A product with weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Product {
    /// A linear layer, where it stands.
    Matmul(Gemm, Site),
    /// One product per local expert, of which there are so many; rows are those over all groups together.
    GroupedMatmul(Gemm, u64),
}

/// Sizes of a product `[m, k] × [k, n]`. In backward they are those of the product actually run (dgrad:
/// `[m, n] × [n, k]`; wgrad: `[k, m] × [m, n]`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gemm {
    /// Rows of the result.
    pub m: u64,
    /// Columns of the result.
    pub n: u64,
    /// Contracted length.
    pub k: u64,
}

/// Where in its block a linear layer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Site {
    /// Before core attention.
    AttentionInput,
    /// After core attention, into the residual stream.
    AttentionOutput,
    /// Into a feed-forward block.
    FeedForwardInput,
    /// Out of a feed-forward block, into the residual stream.
    FeedForwardOutput,
    /// Scores of experts, in 32 bits.
    Router,
    /// Elsewhere: the head, a prediction module's projection, the gate of a shared expert.
    Other,
}

/// A piece of core attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Its place in [`Trace::attentions`](crate::Trace::attentions).
    pub of: usize,
    /// Sizes.
    pub shape: AttentionShape,
    /// Which piece.
    pub piece: AttentionPiece,
}

/// The pieces of core attention, in order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AttentionPiece {
    /// `Q·Kᵀ` per head.
    Scores,
    /// Scale, mask and softmax of the scores.
    Softmax(SoftmaxRule),
    /// Dropout of the weights, with this probability of a zero.
    Dropout(f64),
    /// `P·V` per head.
    Context,
}

/// Sizes of one attention call on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: u64,
    /// Query heads.
    pub heads: u64,
    /// Key/value heads.
    pub kv_heads: u64,
    /// Query tokens per sequence on this rank.
    pub q_len: u64,
    /// Key tokens per sequence that the queries may see (after context-parallel exchange).
    pub kv_len: u64,
    /// Dimensions of a query/key head.
    pub qk_dim: u64,
    /// Dimensions of a value head.
    pub v_dim: u64,
    /// Causal mask (with zig-zag balance under context parallelism: half the products are needed).
    pub causal: bool,
    /// Sliding window in tokens.
    pub window: Option<u64>,
}

/// How attention's scores become weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoftmaxRule {
    /// Factor of the scores.
    pub scale: f64,
    /// Bound `c` of the scaled scores, `c·tanh(x/c)`.
    pub cap: Option<f64>,
    /// A number per head that stands beside its scores and whose weight goes nowhere.
    pub sinks: Option<TensorId>,
    /// Number of heads whose scores fall linearly with distance (Press et al. 2022, ALiBi); each head
    /// has its own slope.
    pub alibi: Option<u64>,
}

/// A layer or RMS norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// Which of the two.
    pub kind: NormKind,
    /// Added to the variance.
    pub epsilon: f64,
    /// Its bias.
    pub bias: Option<TensorId>,
    /// Whether the weight is what the factor has beyond 1.
    pub from_one: bool,
}

/// A function of each element, or of each row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pointwise {
    /// A nonlinearity.
    Activation(Nonlinearity),
    /// A gated nonlinearity, `f(gate) · up`, of two tensors.
    Gated(Nonlinearity),
    /// A gated nonlinearity of one tensor that holds gate and up.
    FusedGated(Nonlinearity),
    /// `g·σ(1.702·g)·(u + 1)` with `g` at most this limit and `u` within it either way.
    BoundedGlu(f64),
    /// `c·tanh(x/c)` for this bound `c`.
    Cap(f64),
    /// Rotary positions of queries or keys.
    Rope(Rotary),
    /// Multiplication by this number.
    Scale(f64),
    /// Multiplication of every row by the sigmoid of its number in the second input.
    Gate,
    /// Addition of a vector to every row; in backward the column sum.
    Bias,
    /// Dropout with this probability of a zero; saves a one-byte mask.
    Dropout(f64),
    /// A copy to another type, or into a wider tensor.
    Copy,
    /// Every head's own columns followed by those that all heads share, the second input.
    Join {
        /// Columns of a head.
        own: u64,
        /// Columns that heads share.
        shared: u64,
    },
}

/// A nonlinearity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nonlinearity {
    /// The function.
    pub function: Activation,
    /// Whether a GELU is the tanh approximation.
    pub tanh: bool,
}

/// Rotary positions over `dims` of every `head_dim` columns, from `first` on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// Dimensions per head.
    pub head_dim: u64,
    /// First rotated dimension.
    pub first: u64,
    /// Rotated dimensions.
    pub dims: u64,
    /// Whether neighbours turn together, rather than dimensions `dims / 2` apart.
    pub neighbours: bool,
    /// Base of the frequencies.
    pub theta: f64,
    /// How they are rescaled.
    pub scaling: RopeScaling,
}

/// What token ids, positions or labels decide.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Token {
    /// Rows of this table by token id; in backward the scatter-add.
    Embedding(TensorId),
    /// Addition of a table's rows by position; in backward the scatter-add.
    Positions {
        /// The table.
        table: TensorId,
        /// The row of position 0.
        first: u64,
    },
    /// Softmax cross-entropy over logits, with its sums over the vocabulary where that is sharded.
    CrossEntropy(Option<TensorId>),
}

/// Routing of tokens to experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Expert {
    /// Softmax or sigmoid over experts and top-k choice, with the auxiliary loss.
    Route(Route),
    /// Tokens ordered by expert.
    Permute,
    /// Tokens back in order, top-k outputs combined.
    Unpermute,
    /// A bias for the rows of each expert.
    Bias,
}

/// How experts are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Route {
    /// From scores to weights.
    pub router: Router,
    /// Added to scores for the choice alone.
    pub bias: Option<TensorId>,
}

/// An exchange between ranks. Inputs and outputs are the local tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exchange {
    /// The message.
    pub collective: Collective,
    /// What it brings where.
    pub moves: Moves,
}

/// What an exchange brings where.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Moves {
    /// A tensor from one placement to another.
    Redistribute {
        /// Placement before.
        from: Placement,
        /// Placement after.
        to: Placement,
    },
    /// Rows to the ranks of their experts.
    Dispatch,
    /// Rows back to the ranks of their tokens.
    Combine,
    /// Rows of all expert-tensor-parallel peers together.
    ExpertGather,
    /// Rows summed over expert-tensor-parallel peers and shared out.
    ExpertReduce,
    /// The loss's three numbers per token over a sharded vocabulary, of these logits.
    VocabularySums(TensorId),
    /// Keys and values round the context-parallel ring.
    Ring,
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Collective {
    /// Its kind.
    pub kind: CollectiveKind,
    /// Over which mesh axis.
    pub axis: Axis,
    /// Bytes of the whole (gathered) tensor for all-gather and reduce-scatter; of one rank's tensor
    /// for all-reduce, all-to-all and each ring step.
    pub bytes: u64,
}

/// Kind of communication. Names are NCCL's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CollectiveKind {
    /// Every rank ends with the sum.
    AllReduce,
    /// Every rank ends with all shards.
    AllGather,
    /// Every rank ends with its shard of the sum.
    ReduceScatter,
    /// Every rank sends a part to every other.
    AllToAll,
    /// `size − 1` point-to-point steps around the ring, overlapped with attention.
    RingExchange,
    /// One rank to all.
    Broadcast,
    /// One rank to one.
    SendRecv,
}

/// What decides an operator's cost: operators of a class are fused, priced and rebuilt alike. A gradient has the class
/// of its operator.
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
    /// The loss.
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

/// An operator's name in profiles, and its class of cost.
pub(crate) type Class = (Cow<'static, str>, CostClass);

impl Gradient {
    /// The operator whose class, name and sizes its own are, and the factor whose gradient it is, where each has an
    /// operator of its own.
    pub(crate) fn operator(&self) -> (Operator, Option<Factor>) {
        let operator = match *self {
            Self::Product(_, of, factor) => return (Operator::Product(of), Some(factor)),
            Self::Attention(_, of, factor) => return (Operator::Attention(of), Some(factor)),
            Self::Norm(_, norm) => Operator::Norm(norm),
            Self::Pointwise(_, pointwise) => Operator::Pointwise(pointwise),
            Self::Token(_, token) => Operator::Token(token),
            Self::Expert(_, expert) => Operator::Expert(expert),
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
