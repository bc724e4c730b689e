//! Kernels around tensor parallelism's gathers and scatters of sequences.
//!
//! Activations of PyTorch models are `[batch, sequence, hidden]`. Collectives gather and scatter along the first dimension, sequences
//! are the second. PyTorch therefore copies the result of every gather, and the input of every scatter
//! (pytorch/pytorch@000f488, `torch/distributed/_functional_collectives.py`, `all_gather_tensor` and `reduce_scatter_tensor`).
//!
//! Asynchronous tensor parallelism splits a gather or a scatter into copies from rank to rank (PyTorch 2.15,
//! `torch/distributed/_symmetric_memory`). Before a gather every rank copies its own part to a buffer that the others read, and no other
//! kernel overlaps this copy. After a scatter one kernel adds up what the ranks computed; where a scatter is not split, NCCL adds up
//! while it sends.

use catalog::runtime::Rewrite;
use catalog::{Axis, Bytes};
use dtensor::{AnyOp, Collective, CollectiveKind, CostClass, Trace};

use super::kernel::{Kernel, KernelKind};
use super::lowering::Lowering;
use crate::price::MemoryKind;

/// What a kernel around a gather or a scatter does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Around {
    /// Copies what a gather returned, or what is to be scattered, to another order of dimensions.
    Copy(CollectiveKind),
    /// Copies the rank's own part to where other ranks read it, before a gather that is split.
    OwnPart,
    /// Adds up the parts that came from all ranks, after a scatter that is split.
    Sum,
}

/// A message with the kernels that it may need, in launch order. Which of them run is decided when they are issued.
pub(super) fn with_kernels_around(
    lowering: &Lowering<'_>,
    trace: &Trace,
    op: &AnyOp<'_>,
    message: Kernel,
) -> Vec<Kernel> {
    let KernelKind::Comm(collective) = message.kind else {
        return vec![message];
    };
    let moves_parts = [CollectiveKind::AllGather, CollectiveKind::ReduceScatter];
    if collective.axis != Axis::Tp || !moves_parts.contains(&collective.kind) {
        return vec![message];
    }
    let gathers = collective.kind == CollectiveKind::AllGather;
    let moving = |bytes: u64| Kernel {
        kind: KernelKind::Memory {
            kind: MemoryKind::Pointwise,
            bytes: Bytes(bytes),
            launches: 1,
        },
        ..message.clone()
    };
    let rearranges = lowering.has(Rewrite::RearrangeSequences);
    let copies = rearranges && (gathers || !made_in_order(lowering, trace, op));
    let copy = copies.then(|| moving(2 * collective.bytes));
    let of_split = lowering.splits_messages().then(|| {
        let part = part(trace, op, collective);
        Kernel {
            reads: Vec::new(),
            writes: Vec::new(),
            ..moving(if gathers {
                2 * part
            } else {
                collective.bytes + part
            })
        }
    });
    let [before, after] = match gathers {
        true => [of_split, copy],
        false => [copy, of_split],
    };
    [before, Some(message), after]
        .into_iter()
        .flatten()
        .collect()
}

/// Bytes of one rank's part of what a collective gathers or scatters.
fn part(trace: &Trace, op: &AnyOp<'_>, collective: Collective) -> u64 {
    let [input, output] = [op.inputs[0], op.outputs[0]].map(|id| trace.tensor(id).bytes().0);
    let ranks = input.max(output) / input.min(output).max(1);
    collective.bytes / ranks.max(1)
}

/// Whether a compiled pointwise kernel makes what is to be scattered. Such a kernel writes its result in the order in which it is
/// sent, so no copy is needed.
fn made_in_order(lowering: &Lowering<'_>, trace: &Trace, op: &AnyOp<'_>) -> bool {
    let made_by = || trace.producer(op.inputs[0]);
    lowering.has(Rewrite::FusePointwise) && made_by().is_some_and(|of| of.cost().is_pointwise())
}

/// The tensor-parallel collective that a copy or sum prepares or finishes; `None` for any other kernel.
pub(crate) fn serves(trace: &Trace, kernel: &Kernel) -> Option<Collective> {
    if !matches!(kernel.kind, KernelKind::Memory { .. }) {
        return None;
    }
    match trace.op(kernel.pass, kernel.op).cost() {
        CostClass::Collective(of) if of.axis == Axis::Tp => Some(of),
        _ => None,
    }
}
