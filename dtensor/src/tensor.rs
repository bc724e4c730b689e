//! Local tensors of one rank, and views of them.

use catalog::DType;

use crate::placement::Placements;

/// Index into [`Trace::tensors`](crate::Trace::tensors).
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
    /// What kind of tensor it is.
    pub role: TensorRole,
    /// The tensor whose storage it shares, if it is an alias; else itself.
    pub storage: TensorId,
    /// Shape over all ranks; the local shape for tensors that are not placed.
    pub global: Vec<u64>,
    /// Placement on every axis.
    pub placements: Placements,
}

/// What kind of tensor it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TensorRole {
    /// Trained weight: lives for the whole step.
    Parameter,
    /// Weight that is not trained, because adapters beside it are: lives for the whole step and has no gradient.
    Frozen,
    /// The layer's input from the previous layer or stage.
    Input,
    /// Computed in forward.
    Activation,
    /// Computed in backward.
    Gradient,
    /// Not trained and made once: rotary tables, alibi slopes, causal masks, labels.
    Constant,
}

/// A slice or shard of another tensor, made without an operator; backward writes slices back.
#[derive(Clone, Debug, PartialEq)]
pub struct View {
    /// Index of the operator before which it is made.
    pub before: usize,
    /// The tensor viewed. In backward: the gradient of the part.
    pub from: TensorId,
    /// The view. In backward: the gradient of the whole, which the part is written into.
    pub to: TensorId,
    /// Which part of the other tensor it is.
    pub kind: ViewKind,
}

/// Which part of the other tensor a view is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ViewKind {
    /// A range of columns of the last dim.
    Columns(Columns),
    /// This rank's shard of a replicated tensor.
    Shard,
}

/// Of every `period` columns of a dim, the `width` columns from `offset` on: one part of a fused projection. Counted
/// in global columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Columns {
    /// First column of the part within a period.
    pub offset: u64,
    /// Columns of the part per period.
    pub width: u64,
    /// Columns after which the pattern repeats.
    pub period: u64,
    /// Columns of the whole dim.
    pub whole: u64,
}

impl Columns {
    /// The part's columns in a local tensor with `columns` columns, as `[columns per row, first,
    /// number]`. Where parts alternate, ranks hold whole periods, and each period counts as a row
    /// here; otherwise a rank holds its share of each part.
    #[must_use]
    pub fn local(&self, columns: usize) -> [usize; 3] {
        if self.period < self.whole {
            return [self.period, self.offset, self.width].map(|n| n as usize);
        }
        let share = |n: u64| (n * columns as u64 / self.whole) as usize;
        [columns, share(self.offset), share(self.width)]
    }

    /// Local columns of the whole tensor when the part has `part` of them.
    #[must_use]
    pub fn whole(&self, part: usize) -> usize {
        (part as u64 * self.period / self.width) as usize
    }
}

impl TensorInfo {
    /// Number of local elements.
    #[must_use]
    pub fn elements(&self) -> u64 {
        // The scores of a very long sequence can overflow 64 bits.
        self.shape
            .iter()
            .fold(1, |product, &size| product.saturating_mul(size))
    }

    /// Size of the local tensor in bytes.
    #[must_use]
    pub fn bytes(&self) -> catalog::Bytes {
        catalog::Bytes(self.elements().saturating_mul(self.dtype.size()))
    }
}

impl TensorRole {
    /// Whether it is a weight of the model, trained or not.
    #[must_use]
    pub fn is_weight(self) -> bool {
        matches!(self, Self::Parameter | Self::Frozen)
    }
}
