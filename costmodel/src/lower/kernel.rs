//! Kernels: what a runtime launches for a block.

use catalog::Bytes;
use catalog::runtime::AttentionKernel;
use dtensor::{AttentionShape, Collective, Pass, TensorId};

use crate::price::{GemmLayout, MemoryKind};

/// What a kernel launches with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KernelKind {
    /// A dense product.
    Gemm {
        m: u64,
        n: u64,
        k: u64,
        layout: GemmLayout,
        low_precision: bool,
    },
    /// One product per expert.
    GroupedGemm {
        groups: u64,
        m: u64,
        n: u64,
        k: u64,
        layout: GemmLayout,
        low_precision: bool,
    },
    /// One product per sequence and head.
    BatchedGemm { batch: u64, m: u64, n: u64, k: u64 },
    /// Fused attention.
    Attention {
        shape: AttentionShape,
        kernel: AttentionKernel,
        backward: bool,
    },
    /// Bound by memory bandwidth.
    Memory {
        kind: MemoryKind,
        bytes: Bytes,
        launches: u32,
    },
    /// Communication.
    Comm(Collective),
}

/// A kernel with the tensors it touches.
#[derive(Clone, Debug, PartialEq)]
pub struct Kernel {
    /// Index of the first traced operator it stands for, in its pass's list.
    pub op: usize,
    /// What it launches with.
    pub kind: KernelKind,
    /// Pass it belongs to.
    pub pass: Pass,
    /// Tensors read from memory.
    pub reads: Vec<TensorId>,
    /// Tensors written to memory.
    pub writes: Vec<TensorId>,
}

/// A block as the runtime executes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Lowered {
    /// Forward kernels in order.
    pub forward: Vec<Kernel>,
    /// Backward kernels in order.
    pub backward: Vec<Kernel>,
}
