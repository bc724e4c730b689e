//! Which tensors live from forward to backward.
//!
//! The trace says what each operator's backward reads. A runtime keeps a tensor as it is, keeps a
//! cheaper one it can be rebuilt from, or runs the operators again.

use dtensor::{CollectiveKind, Op, OpKind, Pass, TensorId, TensorRole, Trace};
use plans::Recompute;
use rustc_hash::{FxHashMap, FxHashSet};
use spec::Axis;
use spec::runtime::Rewrite;
use spec::{Bytes, DType};

use super::fuse::is_pointwise;
use super::{Kernel, KernelKind, Lowered, Lowering, is_core_attention};

/// A tensor kept for backward.
#[derive(Clone, Debug, PartialEq)]
pub struct SavedTensor {
    /// Its name, with scope.
    pub name: String,
    /// Its size.
    pub bytes: Bytes,
    /// Whether the weight half of a split backward still needs it.
    pub for_weight: bool,
}

/// Tensors kept for backward under a recompute mode (`Full` and `Layers` keep the input only).
#[must_use]
pub fn kept(lowering: &Lowering<'_>, trace: &Trace, recompute: Recompute) -> Vec<SavedTensor> {
    if matches!(recompute, Recompute::Full | Recompute::Layers(_)) {
        return inputs(trace);
    }
    let producers = producers(trace);
    let for_weight = weight_operands(trace);
    let alternate = alternate_products(trace);
    let mut seen: FxHashSet<TensorId> = FxHashSet::default();
    let mut saved = Vec::new();
    let mut keep = |id: TensorId, weight: bool| {
        let storage = trace.tensor(id).storage;
        let info = trace.tensor(storage);
        let kept = matches!(info.role, TensorRole::Activation | TensorRole::Input);
        if kept && seen.insert(storage) {
            let name = info.name.clone();
            saved.push(SavedTensor {
                name,
                bytes: info.bytes(),
                for_weight: weight,
            });
        }
    };
    for op in &trace.forward {
        for id in saved_by(lowering, trace, op, recompute) {
            let weight = for_weight.contains(&trace.tensor(id).storage);
            for source in resolve(lowering, trace, &producers, &alternate, id, recompute) {
                keep(source, weight);
            }
        }
    }
    if lowering.fuses_attention() && recompute != Recompute::Selective {
        saved.extend(log_sum_exp(trace));
    }
    if !lowering.has(Rewrite::FuseCrossEntropy) && !lowering.has(Rewrite::InPlaceCrossEntropy) {
        saved.extend(log_probabilities(trace));
    }
    saved
}

/// PyTorch's own cross-entropy writes the log-probabilities beside the logits and keeps them.
fn log_probabilities(trace: &Trace) -> impl Iterator<Item = SavedTensor> + '_ {
    trace
        .forward
        .iter()
        .filter(|op| op.kind == OpKind::CrossEntropy)
        .map(|op| {
            let bytes = trace.tensor(op.inputs[0]).bytes();
            SavedTensor {
                name: format!("{}.log_probabilities", op.scope),
                bytes,
                for_weight: false,
            }
        })
}

/// Forward kernels that run again before backward, by index into `lowered.forward`.
#[must_use]
pub fn recomputed(trace: &Trace, lowered: &Lowered, recompute: Recompute) -> Vec<usize> {
    let alternate = alternate_products(trace);
    let again = |kernel: &Kernel| match recompute {
        Recompute::None => false,
        Recompute::Selective => is_core_attention(&trace.forward[kernel.op]),
        Recompute::Full | Recompute::Layers(_) => true,
        Recompute::SelectiveOps => match kernel.kind {
            KernelKind::Memory { .. } => true,
            KernelKind::Gemm { .. } | KernelKind::GroupedGemm { .. } => {
                !alternate.contains(&trace.forward[kernel.op].outputs[0])
            }
            KernelKind::Comm(c) => c.kind == CollectiveKind::AllGather,
            KernelKind::BatchedGemm { .. } | KernelKind::Attention { .. } => false,
        },
    };
    (0..lowered.forward.len())
        .filter(|&i| again(&lowered.forward[i]))
        .collect()
}

/// What an operator's backward reads under this runtime.
fn saved_by(
    lowering: &Lowering<'_>,
    trace: &Trace,
    op: &Op,
    recompute: Recompute,
) -> Vec<TensorId> {
    if !is_core_attention(op) {
        return op.saved.clone();
    }
    // Fused or recomputed attention keeps queries, keys and values, not what is between. Its
    // output is kept by the projection that reads it.
    if lowering.fuses_attention() || recompute == Recompute::Selective {
        let external = |id: &TensorId| {
            !trace
                .forward
                .iter()
                .any(|p| is_core_attention(p) && p.outputs.contains(id))
        };
        return op.saved.iter().copied().filter(external).collect();
    }
    op.saved.clone()
}

/// What is kept so that `id` is there in backward: itself, or what it is rebuilt from.
fn resolve(
    lowering: &Lowering<'_>,
    trace: &Trace,
    producers: &FxHashMap<TensorId, usize>,
    alternate: &FxHashSet<TensorId>,
    id: TensorId,
    recompute: Recompute,
) -> Vec<TensorId> {
    let mut pending = vec![id];
    let mut sources = Vec::new();
    let mut visited: FxHashSet<TensorId> = FxHashSet::default();
    while let Some(id) = pending.pop() {
        if !visited.insert(id) {
            continue;
        }
        let Some(op) = producers.get(&id).map(|&index| &trace.forward[index]) else {
            sources.push(id);
            continue;
        };
        if rebuilt(lowering, op, alternate, recompute) {
            pending.extend(op.inputs.iter().copied().filter(|&i| {
                matches!(
                    trace.tensor(i).role,
                    TensorRole::Activation | TensorRole::Input
                )
            }));
        } else {
            sources.push(id);
        }
    }
    sources
}

/// Whether a kept output of this operator is rebuilt in backward from the operator's inputs.
fn rebuilt(
    lowering: &Lowering<'_>,
    op: &Op,
    alternate: &FxHashSet<TensorId>,
    recompute: Recompute,
) -> bool {
    match op.kind {
        OpKind::Collective(c) => {
            let regather = c.axis == Axis::Tp
                && c.kind == CollectiveKind::AllGather
                && lowering.has(Rewrite::RegatherSequenceParallelInput);
            regather
                || (recompute == Recompute::SelectiveOps && c.kind == CollectiveKind::AllGather)
        }
        OpKind::Matmul { .. } | OpKind::GroupedMatmul { .. } => {
            recompute == Recompute::SelectiveOps && !alternate.contains(&op.outputs[0])
        }
        // The 32-bit copy that a fused loss does not make.
        OpKind::Copy if lowering.has(Rewrite::FuseCrossEntropy) => true,
        // Dropout masks cannot be rebuilt by a compiler's partitioner; other pointwise results
        // can, at no more than the traffic of reading them back.
        kind if is_pointwise(kind) => {
            kind != OpKind::Dropout
                && (recompute == Recompute::SelectiveOps || lowering.has(Rewrite::FusePointwise))
        }
        _ => false,
    }
}

/// Every second product's output, which torchtitan's selective checkpointing keeps.
fn alternate_products(trace: &Trace) -> FxHashSet<TensorId> {
    trace
        .forward
        .iter()
        .filter(|op| {
            matches!(
                op.kind,
                OpKind::Matmul { .. } | OpKind::GroupedMatmul { .. }
            )
        })
        .step_by(2)
        .map(|op| op.outputs[0])
        .collect()
}

/// The statistics a fused attention kernel keeps: one 32-bit log-sum-exp per head and query.
fn log_sum_exp(trace: &Trace) -> impl Iterator<Item = SavedTensor> + '_ {
    trace.forward.iter().filter_map(|op| match op.kind {
        OpKind::AttentionScores(s) => Some(SavedTensor {
            name: format!("{}.log_sum_exp", op.scope),
            bytes: Bytes(s.batch * s.heads * s.q_len * DType::F32.size()),
            for_weight: false,
        }),
        _ => None,
    })
}

fn inputs(trace: &Trace) -> Vec<SavedTensor> {
    trace
        .tensors
        .iter()
        .enumerate()
        .filter(|(index, t)| t.role == TensorRole::Input && t.storage.0 as usize == *index)
        .map(|(_, t)| SavedTensor {
            name: t.name.clone(),
            bytes: t.bytes(),
            for_weight: false,
        })
        .collect()
}

fn producers(trace: &Trace) -> FxHashMap<TensorId, usize> {
    let mut producers = FxHashMap::default();
    for (index, op) in trace.forward.iter().enumerate() {
        for &output in &op.outputs {
            producers.insert(output, index);
        }
    }
    producers
}

/// Storages that the weight half of backward reads.
fn weight_operands(trace: &Trace) -> FxHashSet<TensorId> {
    trace
        .backward
        .iter()
        .filter(|op| op.pass == Pass::BackwardWeight)
        .flat_map(|op| op.inputs.iter().map(|&id| trace.tensor(id).storage))
        .collect()
}
