//! The blocks that a model is traced in; equal blocks under equal layouts have equal traces.

use catalog::CpKind;
use catalog::dispatcher::RoutedTokens;
use catalog::{DType, LayerClass, Precision};
use dtensor::Routing;
use plans::Decisions;

/// A traceable part of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BlockClass {
    /// Token embedding, with positions if the model has learned ones.
    Embedding,
    /// A decoder layer of this class.
    Layer(LayerClass),
    /// Final norm, head and loss.
    Head,
    /// A multi-token-prediction module: its projection, its layer, and its head and loss.
    Mtp,
}

/// Everything in a strategy that affects a block's local operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockLayout {
    /// Tensor-parallel size.
    pub tp: u64,
    /// Whether Megatron sequence parallelism is on.
    pub sequence_parallel: bool,
    /// Context-parallel size.
    pub cp: u64,
    /// Whether context parallelism uses a ring, KV all-gather or all-to-all.
    pub cp_kind: CpKind,
    /// Expert-parallel size.
    pub ep: u64,
    /// Expert-tensor-parallel size.
    pub etp: u64,
    /// Sequences per micro-batch.
    pub micro_batch: u64,
    /// Tokens per sequence, before context parallelism.
    pub seq_len: u64,
    /// Element type of activations and of the weights that kernels read.
    pub dtype: DType,
    /// Whether linear layers of decoder layers multiply in FP8.
    pub eight_bits: bool,
    /// Which tokens each tensor-parallel rank routes in a layer with experts.
    pub routed_tokens: RoutedTokens,
    /// How many rows reach this rank's experts.
    pub routing: Routing,
}

impl BlockLayout {
    /// The layout of a single rank that holds everything.
    #[must_use]
    pub fn alone(micro_batch: u64, seq_len: u64, dtype: DType) -> Self {
        Self {
            tp: 1,
            sequence_parallel: false,
            cp: 1,
            cp_kind: CpKind::Ring,
            ep: 1,
            etp: 1,
            micro_batch,
            seq_len,
            dtype,
            eight_bits: false,
            routed_tokens: RoutedTokens::Own,
            routing: Routing::Balanced,
        }
    }

    /// The layout that a strategy gives every block, with balanced routing.
    #[must_use]
    pub fn of(strategy: &Decisions, seq_len: u64, precision: Precision) -> Self {
        Self {
            tp: strategy.tp,
            sequence_parallel: strategy.sequence_parallel,
            cp: strategy.cp,
            cp_kind: strategy.cp_kind,
            ep: strategy.ep,
            etp: strategy.etp,
            eight_bits: precision == Precision::Fp8,
            ..Self::alone(strategy.micro_batch, seq_len, precision.activation())
        }
    }
}
