//! Kernels that a runtime launches for a block.

use catalog::Bytes;
use catalog::runtime::AttentionKernel;
use dtensor::{AnyOp, AttentionShape, Collective, Pass, Scan, TensorId, Trace};

use crate::price::MemoryKind;

/// Bytes of a 32-bit number.
pub(super) const WIDE: u64 = 4;

/// The kind of a kernel, with the sizes that its price depends on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KernelKind {
    /// A dense matrix product of `[m, n, k]`.
    Gemm {
        sizes: [u64; 3],
        low_precision: bool,
    },
    /// One matrix product per expert; `[m, n, k]` as in [`crate::price::TablePrices::grouped_gemm`].
    GroupedGemm {
        groups: u64,
        sizes: [u64; 3],
        low_precision: bool,
    },
    /// Equal matrix products of `[m, n, k]`, one per sequence and head.
    BatchedGemm { batch: u64, sizes: [u64; 3] },
    /// Fused attention.
    Attention(FusedAttention),
    /// The kernels of a recurrence in chunks.
    Scan(Scan),
    /// A kernel bound by memory bandwidth.
    Memory {
        kind: MemoryKind,
        bytes: Bytes,
        launches: u32,
    },
    /// A collective or other message.
    Comm(Collective),
}

/// Core attention as one kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FusedAttention {
    pub shape: AttentionShape,
    pub kernel: AttentionKernel,
    pub backward: bool,
}

/// A kernel and the tensors it reads and writes.
#[derive(Clone, Debug, PartialEq)]
pub struct Kernel {
    /// Index of the first traced operator that it runs, in the list of its pass.
    pub op: usize,
    /// Its kind and sizes.
    pub kind: KernelKind,
    /// The pass that it belongs to.
    pub pass: Pass,
    /// Tensors read from memory.
    pub reads: Vec<TensorId>,
    /// Tensors written to memory.
    pub writes: Vec<TensorId>,
}

impl Kernel {
    /// The kernel of an operator, which reads and writes the operator's tensors.
    pub(super) fn of(op: &AnyOp<'_>, kind: KernelKind) -> Self {
        Self {
            op: op.index,
            kind,
            pass: op.pass,
            reads: op.inputs.to_vec(),
            writes: op.outputs.to_vec(),
        }
    }

    /// An additional memory-bound kernel that belongs to the same operator and pass as this one,
    /// and is launched next to it. It lists no tensors that it reads or writes, so it changes no
    /// peak of memory.
    pub(super) fn beside(&self, chain: Chain) -> Self {
        Self {
            op: self.op,
            kind: chain.bound_by_memory(MemoryKind::Pointwise),
            pass: self.pass,
            reads: Vec::new(),
            writes: Vec::new(),
        }
    }
}

/// A block as the kernels that the runtime launches.
#[derive(Clone, Debug, PartialEq)]
pub struct Lowered {
    /// Forward kernels, in launch order.
    pub forward: Vec<Kernel>,
    /// Backward kernels, in launch order.
    pub backward: Vec<Kernel>,
}

/// Operators that run one after another, each a kernel of its own: the bytes that all of them move, and how many kernels they
/// are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Chain {
    pub(super) bytes: Bytes,
    pub(super) launches: u32,
}

impl std::iter::Sum for Chain {
    fn sum<I: Iterator<Item = Self>>(each: I) -> Self {
        each.fold(Self::default(), |all, one| Self {
            bytes: all.bytes + one.bytes,
            launches: all.launches + one.launches,
        })
    }
}

impl Chain {
    /// These operators as a kernel of this class.
    pub(super) fn bound_by_memory(self, kind: MemoryKind) -> KernelKind {
        KernelKind::Memory {
            kind,
            bytes: self.bytes,
            launches: self.launches,
        }
    }
}

/// Sum of the bytes of tensors read and written.
pub(super) fn traffic(trace: &Trace, reads: &[TensorId], writes: &[TensorId]) -> Bytes {
    reads
        .iter()
        .chain(writes)
        .map(|&id| trace.tensor(id).bytes())
        .sum()
}
