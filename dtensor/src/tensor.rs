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
