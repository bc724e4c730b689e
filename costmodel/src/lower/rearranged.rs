//! Copies around tensor parallelism's gathers and scatters of sequences.
//!
//! Activations of PyTorch models are `[batch, sequence, hidden]`. Collectives gather and scatter along the first dimension, sequences
//! are the second. PyTorch therefore copies the result of every gather, and the input of every scatter
//! (pytorch/pytorch@000f488, `torch/distributed/_functional_collectives.py`, `all_gather_tensor` and `reduce_scatter_tensor`).

use catalog::runtime::Rewrite;
use catalog::{Axis, Bytes};
use dtensor::{AnyOp, Collective, CollectiveKind, CostClass, Trace};

use super::kernel::{Kernel, KernelKind};
use super::lowering::Lowering;
use crate::price::MemoryKind;

/// A message with the copy that it needs, in launch order.
pub(super) fn with_copy(
    lowering: &Lowering<'_>,
    trace: &Trace,
    op: &AnyOp<'_>,
    message: Kernel,
) -> Vec<Kernel> {
    let KernelKind::Comm(collective) = message.kind else {
        return vec![message];
    };
    if collective.axis != Axis::Tp || !lowering.has(Rewrite::RearrangeSequences) {
        return vec![message];
    }
    let copy = Kernel {
        kind: KernelKind::Memory {
            kind: MemoryKind::Pointwise,
            bytes: Bytes(2 * collective.bytes),
            launches: 1,
        },
        ..message.clone()
    };
    match collective.kind {
        CollectiveKind::AllGather => vec![message, copy],
        CollectiveKind::ReduceScatter if !made_in_order(lowering, trace, op) => vec![copy, message],
        _ => vec![message],
    }
}

/// Whether a compiled pointwise kernel makes what is to be scattered. Such a kernel writes its result in the order in which it is
/// sent, so no copy is needed.
fn made_in_order(lowering: &Lowering<'_>, trace: &Trace, op: &AnyOp<'_>) -> bool {
    let made_by = || trace.producer(op.inputs[0]);
    lowering.has(Rewrite::FusePointwise) && made_by().is_some_and(|of| of.cost().is_pointwise())
}

/// The collective that a kernel copies for, if it is such a copy.
pub(crate) fn copied_for(trace: &Trace, kernel: &Kernel) -> Option<Collective> {
    if !matches!(kernel.kind, KernelKind::Memory { .. }) {
        return None;
    }
    match trace.op(kernel.pass, kernel.op).cost() {
        CostClass::Collective(of) => Some(of),
        _ => None,
    }
}
