//! What one rank would execute: the record a model leaves when it runs on the meta device.
//!
//! The trace is an *unfused* operator graph over local shapes. Costs are not here: `costmodel`
//! lowers the graph for a runtime (fusion, kept tensors, overlapped collectives) and prices it.

use catalog::model::{Activation, NormKind, Router};
use catalog::{Axis, DType, RopeScaling};

use crate::placement::{Placement, Placements};

/// Index into [`Trace::tensors`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub u32);

/// A local tensor of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// Producer's scope and role, such as `self_attn.q_proj.output`.
    pub name: String,
    /// Local shape.
    pub shape: Vec<u64>,
    /// Element type.
    pub dtype: DType,
    /// What it is.
    pub role: TensorRole,
    /// The tensor whose storage it shares (a view); itself when it owns its storage.
    pub storage: TensorId,
    /// Shape over all ranks; the local shape for tensors that are not placed.
    pub global: Vec<u64>,
    /// Where the shards lie.
    pub placements: Placements,
}

/// What a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TensorRole {
    /// Trained weight: lives for the whole step.
    Parameter,
    /// The layer's input from the previous layer or stage.
    Input,
    /// Computed in forward.
    Activation,
    /// Computed in backward.
    Gradient,
    /// Not trained and made once: rotary tables, alibi slopes, causal masks, labels.
    Constant,
}

/// Which pass an operator belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// Forward.
    Forward,
    /// Backward, towards the inputs (needed by the previous layer at once).
    BackwardInput,
    /// Backward, towards the weights (may be deferred by zero-bubble schedules).
    BackwardWeight,
}

/// One operator of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Op {
    /// Dotted path of the module that issued it, relative to the layer: `self_attn.q_proj`,
    /// `self_attn.core_attention`, `mlp.down_proj`, `input_layernorm`.
    pub scope: String,
    /// What it computes.
    pub kind: OpKind,
    /// Which pass it belongs to.
    pub pass: Pass,
    /// Tensors read, in argument order.
    pub inputs: Vec<TensorId>,
    /// Tensors written.
    pub outputs: Vec<TensorId>,
    /// Forward only: tensors this operator keeps for its backward.
    pub saved: Vec<TensorId>,
    /// What running it needs beyond its sizes. Prices do not depend on it.
    pub detail: Detail,
}

/// What running an operator needs beyond its sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Detail {
    /// Nothing.
    #[default]
    None,
    /// The backward of a forward operator.
    Gradient {
        /// Its index in [`Trace::forward`].
        of: usize,
        /// The input whose gradient this is, where every input has an operator of its own.
        input: Option<usize>,
    },
    /// A norm.
    Norm {
        /// Which.
        kind: NormKind,
        /// Added to the variance.
        epsilon: f64,
        /// Its bias.
        bias: Option<TensorId>,
        /// Whether the weight is what the factor has beyond 1.
        from_one: bool,
    },
    /// Rows of a table: token embeddings by id, positions by place.
    Table {
        /// The table.
        table: TensorId,
        /// The row of id, or position, 0.
        first: u64,
    },
    /// From scores to weights.
    Softmax(SoftmaxRule),
    /// Multiplication by a number.
    Scale {
        /// The number.
        factor: f64,
    },
    /// Multiplication by the sigmoid of one number per row, the second input.
    Gate,
    /// `c·tanh(x/c)`.
    Cap {
        /// The bound `c`.
        bound: f64,
    },
    /// Rotary positions over `dims` of every `head_dim`, from `first` on.
    Rope {
        /// Dimensions per head.
        head_dim: u64,
        /// First rotated dimension.
        first: u64,
        /// Whether neighbours turn together, rather than dimensions `dims / 2` apart.
        neighbours: bool,
        /// Rotated dimensions.
        dims: u64,
        /// Base of the frequencies.
        theta: f64,
        /// How they are rescaled.
        scaling: RopeScaling,
    },
    /// A nonlinearity.
    Activation {
        /// Which.
        function: Activation,
        /// Whether a GELU is the tanh approximation.
        tanh: bool,
    },
    /// `g·σ(1.702·g)·(u + 1)` with `g` at most `limit` and `u` within `±limit`.
    BoundedGlu {
        /// The bound.
        limit: f64,
    },
    /// A bias for the rows of each expert.
    ExpertBias,
    /// Dropout with this probability.
    Dropout {
        /// Of a zero.
        probability: f64,
    },
    /// A redistribution.
    Redistribute {
        /// Mesh axis.
        axis: Axis,
        /// Placement before.
        from: Placement,
        /// Placement after.
        to: Placement,
    },
    /// A router's choice.
    Route {
        /// How it chooses.
        router: Router,
        /// Added to scores for the choice alone.
        bias: Option<TensorId>,
    },
    /// Every head's own columns followed by those that all heads share, the second input.
    Join {
        /// Columns of a head.
        own: u64,
        /// Columns that heads share.
        shared: u64,
    },
    /// Rows to the ranks of their experts, or back.
    Dispatch {
        /// Back to the ranks of their tokens.
        back: bool,
    },
    /// Rows of all expert-tensor-parallel peers together, or summed and shared out.
    ExpertTensor {
        /// Together.
        gather: bool,
    },
    /// The loss's reduction over a sharded vocabulary, from these logits.
    VocabularySums {
        /// The logits.
        logits: TensorId,
    },
    /// A loss.
    Loss {
        /// Its reduction over a sharded vocabulary, if it is.
        sums: Option<TensorId>,
    },
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

/// A tensor that another one's storage holds: no kernel, no bytes of its own that were written.
#[derive(Clone, Debug, PartialEq)]
pub struct View {
    /// Index of the operator it is made before.
    pub before: usize,
    /// What it is a view of. In backward: the gradient of the part.
    pub from: TensorId,
    /// The view. In backward: the gradient of the whole, which the part is written into.
    pub to: TensorId,
    /// How.
    pub kind: ViewKind,
}

/// How a view lies in what it views.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ViewKind {
    /// Columns of the last dim.
    Columns(Columns),
    /// This rank's shard of a tensor it holds whole.
    Shard,
}

/// Of every `period` columns of a dim, `width` from `offset` on: one part of a fused projection.
/// Numbers are global.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Columns {
    /// First.
    pub offset: u64,
    /// How many.
    pub width: u64,
    /// Out of how many, again and again.
    pub period: u64,
    /// Columns of the whole.
    pub whole: u64,
}

impl Columns {
    /// The same of a local tensor with `columns`, as `[columns per row, first, number]`: where parts
    /// alternate, ranks share out whole periods, and a row of the tensor is several rows here; where
    /// they do not, ranks have their share of each part.
    #[must_use]
    pub fn local(&self, columns: usize) -> [usize; 3] {
        if self.period < self.whole {
            return [self.period, self.offset, self.width].map(|n| n as usize);
        }
        let share = |n: u64| (n * columns as u64 / self.whole) as usize;
        [columns, share(self.offset), share(self.width)]
    }

    /// Local columns of the whole when the part has so many.
    #[must_use]
    pub fn whole(&self, part: usize) -> usize {
        (part as u64 * self.period / self.width) as usize
    }
}

/// What an operator computes, with local sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// Dense product of an activation and a weight: `[m, k] × [k, n]`. In backward the sizes are
    /// those of the product actually run (dgrad: `[m, n] × [n, k]`; wgrad: `[k, m] × [m, n]`).
    Matmul {
        /// Rows of the result.
        m: u64,
        /// Columns of the result.
        n: u64,
        /// Contracted length.
        k: u64,
    },
    /// One product per local expert.
    GroupedMatmul {
        /// Local experts.
        groups: u64,
        /// Rows over all groups together.
        m: u64,
        /// Columns of the result.
        n: u64,
        /// Contracted length.
        k: u64,
    },
    /// `Q·Kᵀ` per head; in backward one of the two products of its transpose.
    AttentionScores(AttentionShape),
    /// `P·V` per head; in backward one of the two products of its transpose.
    AttentionContext(AttentionShape),
    /// Scale, mask and softmax of the scores.
    Softmax(AttentionShape),
    /// Layer or RMS norm.
    Norm,
    /// Nonlinearity of an MLP, with the gate's product when gated.
    Activation {
        /// Whether a gate multiplies.
        gated: bool,
    },
    /// Addition of two tensors (residual) .
    Add,
    /// Addition of a bias vector to a matrix; in backward the column sum.
    Bias,
    /// Dropout; saves a one-byte mask.
    Dropout,
    /// Rotary embedding of queries or keys.
    Rope,
    /// Multiplication by a scalar or by a broadcast tensor.
    Scale,
    /// Copy that changes layout or dtype, and cannot be a view.
    Copy,
    /// Row lookup in a table; in backward the scatter-add.
    Embedding,
    /// Softmax cross-entropy over (possibly vocabulary-sharded) logits.
    CrossEntropy,
    /// Router: softmax or sigmoid over experts and top-k choice, with the auxiliary loss.
    TopK,
    /// Tokens ordered by expert; in backward the inverse.
    Permute,
    /// Tokens back in order, top-k outputs combined; in backward the inverse.
    Unpermute,
    /// Communication. Inputs and outputs are the local tensors.
    Collective(Collective),
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

/// A communication operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Collective {
    /// Which.
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

/// A parameter as one rank holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterInfo {
    /// Fully qualified name, with `{layer}` and `{expert}` for repeated ones.
    pub name: String,
    /// Global shape (of one expert, for experts).
    pub global_shape: Vec<u64>,
    /// Elements over all ranks of the layer: global elements × experts.
    pub global_elements: u64,
    /// Elements this rank holds before any ZeRO sharding.
    pub local_elements: u64,
    /// Whether it belongs to a routed expert (and so to the expert mesh).
    pub expert: bool,
    /// Routed experts that share the name; 1 for dense parameters.
    pub experts: u64,
    /// Its tensor.
    pub tensor: TensorId,
}

/// A layer's forward and backward on one rank.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Trace {
    /// Every tensor.
    pub tensors: Vec<TensorInfo>,
    /// Every parameter.
    pub parameters: Vec<ParameterInfo>,
    /// Forward operators in order.
    pub forward: Vec<Op>,
    /// Backward operators in order.
    pub backward: Vec<Op>,
    /// Views made in forward.
    pub forward_views: Vec<View>,
    /// Gradients of parts written into gradients of wholes in backward.
    pub backward_views: Vec<View>,
    /// Gradient of the block's input, if it has one.
    pub input_gradient: Option<TensorId>,
    /// Gradient of the block's output: where backward starts.
    pub output_gradient: Option<TensorId>,
    /// The layer's output: what the next layer or stage reads.
    pub output: Option<TensorId>,
    /// Whether linear layers multiply in 8 bits.
    pub eight_bits: bool,
}

/// Products in 8 bits want sizes that are multiples of this: rows of 16 bytes (cuBLAS, "FP8 data types":
/// 16-byte alignment of all dimensions).
pub const EIGHT_BIT_MULTIPLE: u64 = 16;

impl SoftmaxRule {
    /// What a head's scores lose per token of distance (Press et al. 2022, §3): powers of `2^(−8/n)` for `n`
    /// heads, a power of two; further heads take every other power for twice as many.
    #[must_use]
    pub fn slope(&self, head: u64) -> Option<f32> {
        let n = 1u64 << self.alibi?.ilog2();
        let power = if head < n {
            8.0 * (head + 1) as f64 / n as f64
        } else {
            4.0 * (2 * (head - n) + 1) as f64 / n as f64
        };
        Some((-power).exp2() as f32)
    }
}

impl TensorInfo {
    /// Local elements.
    #[must_use]
    pub fn elements(&self) -> u64 {
        // Scores of a very long sequence are more than can be counted: as many as can.
        self.shape
            .iter()
            .fold(1, |product, &size| product.saturating_mul(size))
    }

    /// Local bytes.
    #[must_use]
    pub fn bytes(&self) -> catalog::Bytes {
        catalog::Bytes(self.elements().saturating_mul(self.dtype.size()))
    }
}

impl Trace {
    /// The tensor behind an id.
    #[must_use]
    pub fn tensor(&self, id: TensorId) -> &TensorInfo {
        &self.tensors[id.0 as usize]
    }

    /// Whether an operator is a product that runs in 8 bits: a linear layer's, of sizes that allow it, and no
    /// router's, which chooses by small differences.
    #[must_use]
    pub fn is_eight_bit(&self, op: &Op) -> bool {
        let fits = match op.kind {
            OpKind::Matmul { m, n, k } => [m, n, k]
                .iter()
                .all(|size| size.is_multiple_of(EIGHT_BIT_MULTIPLE)),
            _ => false,
        };
        self.eight_bits && fits && !op.scope.ends_with("router") && !op.scope.ends_with("gate")
    }
}
