//! Kernels that a runtime launches for a block.

use catalog::Bytes;
use catalog::runtime::AttentionKernel;
use dtensor::{AttentionShape, Collective, Pass, Scan, TensorId, Trace};

use crate::price::{GemmLayout, MemoryKind};

/// Bytes of a 32-bit number.
pub(super) const WIDE: u64 = 4;

/// The kind of a kernel, with the sizes that its price depends on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KernelKind {
    /// A dense matrix product.
    Gemm {
        m: u64,
        n: u64,
        k: u64,
        layout: GemmLayout,
        low_precision: bool,
    },
    /// One matrix product per expert.
    GroupedGemm {
        groups: u64,
        m: u64,
        n: u64,
        k: u64,
        layout: GemmLayout,
        low_precision: bool,
    },
    /// Equal matrix products, one per sequence and head.
    BatchedGemm { batch: u64, m: u64, n: u64, k: u64 },
    /// Fused attention.
    Attention {
        shape: AttentionShape,
        kernel: AttentionKernel,
        backward: bool,
    },
    /// The kernels of a recurrence in chunks.
    Scan { sizes: Scan, backward: bool },
    /// A kernel bound by memory bandwidth.
    Memory {
        kind: MemoryKind,
        bytes: Bytes,
        launches: u32,
    },
    /// A collective or other message.
    Comm(Collective),
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
    /// A memory-bound kernel at the place of this one. It lists no tensors that it reads or writes, so it changes no peak of memory.
    pub(super) fn beside(&self, Chain { bytes, launches }: Chain) -> Self {
        Self {
            op: self.op,
            kind: KernelKind::Memory {
                kind: MemoryKind::Pointwise,
                bytes,
                launches,
            },
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chain {
    pub(super) bytes: Bytes,
    pub(super) launches: u32,
}

/// Sum of the bytes of tensors read and written.
pub(super) fn traffic(trace: &Trace, reads: &[TensorId], writes: &[TensorId]) -> Bytes {
    reads
        .iter()
        .chain(writes)
        .map(|&id| trace.tensor(id).bytes())
        .sum()
}
