//! Kernels around tensor parallelism's gathers and scatters of sequences.
//!
//! Activations of PyTorch models are `[batch, sequence, hidden]`. Sequences are divided along the second dimension, but collectives gather
//! and scatter along the first. PyTorch therefore copies the result of every gather, and the input of every scatter
//! (pytorch/pytorch@000f488, `torch/distributed/_functional_collectives.py`, `all_gather_tensor` and `reduce_scatter_tensor`).
//!
//! Asynchronous tensor parallelism splits a gather or a scatter into copies from rank to rank, which needs two more kernels (PyTorch 2.15,
//! `torch/distributed/_symmetric_memory`):
//! - Before a split gather, every rank copies its own part to a buffer from which the other ranks read. No other kernel runs during this
//!   copy.
//! - After a split scatter, a kernel adds up the parts that all ranks computed. A scatter that is not split needs no such kernel, because
//!   NCCL adds up the parts while it sends them.

use catalog::runtime::Rewrite;
use catalog::{Axis, Bytes};
use dtensor::{AnyOp, Collective, CollectiveKind, CostClass, Trace};

use super::kernel::{Chain, Kernel, KernelKind};
use super::lowering::Lowering;

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
    let moving = |bytes: u64| {
        message.beside(Chain {
            bytes: Bytes(bytes),
            launches: 1,
        })
    };
    let rearranges = lowering.has(Rewrite::RearrangeSequences);
    // A compiled pointwise kernel writes its result in the order in which it is sent.
    let in_order = !gathers && lowering.made_by_compiled_pointwise(trace, op.inputs[0]);
    // The copy reads and writes the message's own tensors.
    let copy = (rearranges && !in_order).then(|| Kernel {
        reads: message.reads.clone(),
        writes: message.writes.clone(),
        ..moving(2 * collective.bytes)
    });
    let of_split = lowering.splits_messages().then(|| {
        let part = part(trace, op, collective);
        match gathers {
            true => moving(2 * part),
            false => moving(collective.bytes + part),
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

/// Bytes of one rank's part of the tensor that a collective gathers or scatters.
fn part(trace: &Trace, op: &AnyOp<'_>, collective: Collective) -> u64 {
    let [input, output] = [op.inputs[0], op.outputs[0]].map(|id| trace.tensor(id).bytes().0);
    let ranks = input.max(output) / input.min(output).max(1);
    collective.bytes / ranks.max(1)
}

/// The tensor-parallel collective that this kernel copies for or adds up; `None` for other kernels.
pub(crate) fn serves(trace: &Trace, kernel: &Kernel) -> Option<Collective> {
    if !matches!(kernel.kind, KernelKind::Memory { .. }) {
        return None;
    }
    match trace.op(kernel.pass, kernel.op).cost() {
        CostClass::Collective(of) if of.axis == Axis::Tp => Some(of),
        _ => None,
    }
}
