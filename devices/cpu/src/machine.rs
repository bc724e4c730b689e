//! One rank: its position on the mesh, its communicator, and how it computes.

use catalog::Axis;

use super::micro_batch::MicroBatch;
use super::tree::{FEATURE_LEAF, TOKEN_LEAF, leaves};
use crate::watch::{Watch, WatchError};
use comm::{CommError, Communicator, Group};
use dtensor::TensorInfo;
use dtensor::layout::BlockPosition;
use dtensor::placement::BLOCK_AXES;

/// How sums over a sharded dimension are evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numerics {
    /// Over the canonical tree: bit-identical under every layout.
    Exact,
    /// By library kernels and plain sums: equal within rounding.
    Fast,
}

/// Why a rank cannot go on.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CpuError {
    /// Communication with another rank failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// No kernel for an operator with these operands.
    #[error("operator {operator} in {scope} has no cpu kernel for {reason}")]
    Unsupported {
        /// Kind of the operator.
        operator: String,
        /// Module that it belongs to.
        scope: String,
        /// What the cpu device has no kernel for.
        reason: String,
    },
    /// A watch stopped the rank.
    #[error(transparent)]
    Watch(#[from] WatchError),
    /// Exact mode: a shard ends inside a leaf of the canonical tree.
    #[error(
        "exact mode reduces {what} in blocks of {leaf}; this layout cuts the {size} of them at {cut}, inside a block; \
         expected shards of a multiple of {leaf}, or --numerics fast, which runs every layout that `estimate` takes"
    )]
    Misaligned {
        /// Name of the sharded dimension.
        what: String,
        /// Elements per leaf.
        leaf: u64,
        /// Elements of the dimension.
        size: u64,
        /// Index at which a shard ends or begins inside a leaf.
        cut: u64,
    },
}

/// Result of an operation on the cpu device.
pub(crate) type Result<T, E = CpuError> = std::result::Result<T, E>;

/// Leaves of the canonical tree that a rank holds: the number of each, and where its elements lie.
pub(crate) type Leaves = Vec<(u64, std::ops::Range<usize>)>;

/// One rank.
pub struct Machine<'c> {
    /// Its communicator with the other ranks.
    pub comm: &'c dyn Communicator,
    /// The groups it belongs to, one for each of [`BLOCK_AXES`].
    pub groups: [Group; 4],
    /// Its coordinates on those axes.
    pub position: BlockPosition,
    /// How it evaluates sums over sharded dimensions.
    pub numerics: Numerics,
    /// Number of threads that a kernel may use.
    pub threads: usize,
    /// Seed of every random number, such as dropout masks.
    pub seed: u64,
    /// Called after every operator, if set.
    pub watch: Option<&'c dyn Watch>,
}

impl Machine<'_> {
    /// The group of ranks along one of [`BLOCK_AXES`] that this rank belongs to.
    #[must_use]
    pub fn group(&self, axis: Axis) -> &Group {
        let index = BLOCK_AXES.iter().position(|&a| a == axis).unwrap_or(0);
        &self.groups[index]
    }

    pub(super) fn is_exact(&self) -> bool {
        self.numerics == Numerics::Exact
    }

    /// Leaves of a feature dimension that this rank holds.
    pub(super) fn feature_leaves(&self, info: &TensorInfo, dim: usize) -> Result<Leaves> {
        let indices = self.position.indices(&info.global, &info.placements, dim);
        let size = info.global[dim];
        leaves(&indices, size, FEATURE_LEAF).map_err(|cut| CpuError::Misaligned {
            what: format!("features of {}", info.name),
            leaf: FEATURE_LEAF,
            size,
            cut,
        })
    }

    /// Positions in their sequence of the tokens that a tensor `[batch, sequence, …]` holds on this rank.
    pub(super) fn positions(&self, info: &TensorInfo) -> Vec<u64> {
        self.position.indices(&info.global, &info.placements, 1)
    }

    /// Leaves of sequence positions that this rank holds.
    pub(super) fn position_leaves(&self, positions: &[u64], seq_len: u64) -> Result<Leaves> {
        leaves(positions, seq_len, TOKEN_LEAF).map_err(|cut| CpuError::Misaligned {
            what: "tokens of a sequence".to_owned(),
            leaf: TOKEN_LEAF,
            size: seq_len,
            cut,
        })
    }

    /// Global indices of the tokens in the rows of `[batch, sequence, …]`.
    pub(super) fn tokens(&self, info: &TensorInfo, batch: &MicroBatch<'_>) -> Vec<u64> {
        let positions = self.positions(info);
        (0..info.global[0])
            .flat_map(|b| {
                let first = (batch.first_sequence + b) * batch.seq_len;
                positions.iter().map(move |p| first + p)
            })
            .collect()
    }

    /// Leaves of the batch's tokens that these rows belong to.
    pub(super) fn token_leaves(&self, info: &TensorInfo, batch: &MicroBatch<'_>) -> Result<Leaves> {
        let positions = self.positions(info);
        self.leaves_at(&positions, info.global[0], batch)
    }

    /// Leaves of the batch's tokens that the rows of `sequences` sequences at these positions belong to.
    pub(super) fn leaves_at(
        &self,
        positions: &[u64],
        sequences: u64,
        batch: &MicroBatch<'_>,
    ) -> Result<Leaves> {
        let one = self.position_leaves(positions, batch.seq_len)?;
        let per_sequence = batch.seq_len.div_ceil(TOKEN_LEAF);
        Ok((0..sequences)
            .flat_map(|b| {
                let (first, at) = (
                    (batch.first_sequence + b) * per_sequence,
                    b as usize * positions.len(),
                );
                one.iter()
                    .map(move |(leaf, range)| (first + leaf, at + range.start..at + range.end))
            })
            .collect())
    }

    /// The error for an operator without a kernel.
    pub(super) fn unsupported(operator: &str, scope: &str, reason: &str) -> CpuError {
        CpuError::Unsupported {
            operator: operator.to_owned(),
            scope: scope.to_owned(),
            reason: reason.to_owned(),
        }
    }
}
