//! Decides which tensors live from forward to backward.
//!
//! The trace says what each operator's backward reads. A runtime keeps a tensor as it is, keeps a
//! cheaper one it can be rebuilt from, or runs the operators again.

use std::ops::Range;

use catalog::runtime::Rewrite;
use catalog::{Bytes, DType};
use dtensor::{
    AttentionPieces, CollectiveKind, CostClass, Exchange, Expert, Op, Operator, Pass, Pointwise,
    Product, Recurrent, Site, TensorId, TensorRole, Trace,
};
use plans::Recompute;
use rustc_hash::FxHashSet;

use super::autocast;
use super::checkpoint;
use super::chunked_loss::Head;
use super::elementary_gelu;
use super::elementary_norm;
use super::gated;
use super::input_copies;
use super::loss;
use super::lowering::Lowering;
use super::masked;
use super::modules;
use super::norm_copies;
use super::row_indices;
use super::saved_tensor::SavedTensor;
use super::softmax;
use super::split_recurrence;
use super::sums;
use super::tensor_set::TensorSet;
use super::wide_routing;

/// End of the name of a loss's log-probabilities; its scope comes before.
const LOG_PROBABILITIES: &str = ".log_probabilities";

/// Tensors kept for backward under a recompute mode (under `Full` only the block's input).
pub(super) fn kept<'t>(
    lowering: &Lowering<'_>,
    trace: &'t Trace,
    recompute: Recompute,
) -> Vec<SavedTensor<'t>> {
    let saved = kept_undivided(lowering, trace, recompute);
    match Head::divided(lowering, trace) {
        Some(head) => without_loss(&head, saved),
        None => saved,
    }
}

/// Tensors that a head keeps for backward if its loss runs in chunks, each forward and backward:
/// the hidden states that the product reads, and their gradients. What the product and the loss
/// write is not kept, as its backward is over. `saved` is what the head keeps otherwise.
///
/// The hidden states count until backward because a pipeline schedule keeps them. Without a
/// pipeline torchtitan frees them earlier (`trainer.py`, `del pred`).
fn without_loss<'t>(head: &Head<'t>, mut saved: Vec<SavedTensor<'t>>) -> Vec<SavedTensor<'t>> {
    let hidden = head.hidden();
    saved.retain(|of| !is_of_loss(head, of) && of.storage != Some(hidden.storage));
    let [mut kept, gradient] =
        ["", ".gradient"].map(|ending| SavedTensor::beside(&hidden.name, ending, hidden.bytes()));
    kept.storage = Some(hidden.storage);
    saved.extend([kept, gradient]);
    saved
}

/// Bytes of the tensors that a head's product and its loss write, and that are kept for backward if they run over all tokens at once.
pub(super) fn kept_by_loss(lowering: &Lowering<'_>, trace: &Trace, head: &Head<'_>) -> Bytes {
    let saved = kept_undivided(lowering, trace, Recompute::None);
    let of_loss = saved.iter().filter(|of| is_of_loss(head, of));
    of_loss.map(|of| of.bytes).sum()
}

/// Whether it is the head's product or the loss that writes this tensor.
fn is_of_loss(head: &Head<'_>, saved: &SavedTensor<'_>) -> bool {
    match saved.storage {
        Some(storage) => !head.is_before(storage),
        None => saved.name.ending == LOG_PROBABILITIES,
    }
}

/// Tensors kept for backward where head and loss run over all tokens at once. [`kept`] changes this list if they run in chunks.
/// What checkpoints do not cover keeps what it keeps without recomputation.
fn kept_undivided<'t>(
    lowering: &Lowering<'_>,
    trace: &'t Trace,
    recompute: Recompute,
) -> Vec<SavedTensor<'t>> {
    let all = trace.forward.len();
    let covered = match recompute {
        Recompute::None => all,
        _ => checkpoint::covered(trace),
    };
    let mut saved = match recompute.of_first_and_others()[0] {
        Recompute::Full => inputs(lowering, trace),
        _ => kept_of(lowering, trace, recompute, 0..covered),
    };
    if covered < all {
        let known: FxHashSet<_> = saved.iter().filter_map(|of| of.storage).collect();
        let after = kept_of(lowering, trace, Recompute::None, covered..all).into_iter();
        saved.extend(after.filter(|of| of.storage.is_none_or(|storage| !known.contains(&storage))));
    }
    saved
}

/// Tensors that the forward operators with indices in `part` keep for backward.
fn kept_of<'t>(
    lowering: &Lowering<'_>,
    trace: &'t Trace,
    recompute: Recompute,
    part: Range<usize>,
) -> Vec<SavedTensor<'t>> {
    let for_weight = weight_operands(trace);
    let selected = selected_products(lowering, trace);
    let row_indices = row_indices::kept(lowering, trace);
    let mut seen = TensorSet::new(trace);
    let mut saved: Vec<SavedTensor<'t>> = Vec::new();
    let mut keep = |id: TensorId, weight: bool| {
        let storage = trace.tensor(id).storage;
        let info = trace.tensor(storage);
        let kept = matches!(info.role, TensorRole::Activation | TensorRole::Input);
        if kept && seen.insert(storage) {
            let rows = row_indices.get(&storage).copied();
            saved.push(SavedTensor {
                for_weight: weight || rows.is_some(),
                storage: Some(storage),
                ..SavedTensor::beside(&info.name, "", rows.unwrap_or(info.bytes()))
            });
        }
    };
    let mut quantised: Vec<TensorId> = Vec::new();
    for Read { source, of, narrow } in reads(lowering, trace, recompute, (&selected, &part)) {
        if narrow {
            quantised.push(trace.tensor(source).storage);
        } else {
            keep(source, for_weight.contains(trace.tensor(of).storage));
        }
    }
    let fused_keeps = lowering.fuses_attention(trace)
        && !lowering.selects_attention(recompute)
        && !reruns_attention(lowering, recompute);
    if fused_keeps {
        for output in outputs_kept_by_attention(lowering, trace, &part) {
            keep(output, for_weight.contains(trace.tensor(output).storage));
        }
    }
    if recompute == Recompute::SelectiveOps {
        if lowering.has(Rewrite::KeepSelected) {
            selected.iter().for_each(|&output| keep(output, false));
        }
        drop_parts(trace, &seen, &mut saved);
    }
    saved.extend(eight_bit(trace, quantised));
    if fused_keeps {
        saved.extend(log_sum_exp(trace, &part));
    }
    // A recomputed core of attention still reads copied keys and values.
    let keeps_copies = lowering.copies_keys(trace) && !reruns_attention(lowering, recompute);
    if fused_keeps || keeps_copies {
        let of_mask = |op| masked::kept(lowering, trace, op);
        let ops = &trace.forward[part.clone()];
        saved.extend(of_operators(ops, ".mask and copied keys", of_mask));
    }
    saved.extend(beside_the_trace(lowering, trace, recompute, &part));
    saved
}

/// What the runtime's kernels for the operators in `part` keep for backward although the trace has no such tensor.
fn beside_the_trace<'t>(
    lowering: &Lowering<'_>,
    trace: &'t Trace,
    recompute: Recompute,
    part: &Range<usize>,
) -> impl Iterator<Item = SavedTensor<'t>> {
    let mut seen = TensorSet::new(trace);
    let again = modules::selected(lowering, trace, recompute);
    let wide = move |op| {
        autocast::kept_by_norm(lowering, trace, op, &mut seen)
            .or_else(|| elementary_norm::kept(lowering, trace, op, &mut seen))
    };
    let is_once = move |op: &Op| !op.outputs.iter().any(|output| again.contains(output));
    let [is_once_too, is_once_itself] = [is_once.clone(), is_once.clone()];
    let gates = move |op| gated::kept(lowering, trace, op).filter(|_| is_once(op));
    let apart = move |op| split_recurrence::kept(lowering, trace, op).filter(|_| is_once_too(op));
    let inputs = move |op| input_copies::kept(lowering, trace, op).filter(|_| is_once_itself(op));
    let factors = |op| elementary_gelu::kept(lowering, trace, op);
    let copies = |op| norm_copies::kept(lowering, trace, op);
    let scores_again =
        lowering.selects_attention(recompute) || reruns_attention(lowering, recompute);
    let softmaxes = move |op| softmax::kept(lowering, trace, op).filter(|_| !scores_again);
    let losses = |op| loss::kept(lowering, trace, op);
    let run_again = recompute == Recompute::SelectiveOps;
    let adapters = |op| autocast::kept_by_adapter(lowering, trace, op);
    let routing = |op| wide_routing::kept(lowering, trace, op);
    let router = |op| wide_routing::kept_by_router(lowering, trace, op);
    let for_weight = |saved| SavedTensor {
        for_weight: true,
        ..saved
    };
    let ops = &trace.forward[part.clone()];
    let pointwise = of_operators(ops, " in 32 bits", wide)
        .chain(of_operators(ops, ".gate", gates))
        .chain(of_operators(ops, ".apart", apart))
        .chain(of_operators(ops, ".input", inputs).map(for_weight))
        .chain(of_operators(ops, ".input", adapters).map(for_weight))
        .chain(of_operators(ops, " for routing in 32 bits", routing))
        .chain(of_operators(ops, ".input in 32 bits", router).map(for_weight))
        .filter(move |_| !run_again);
    of_operators(ops, LOG_PROBABILITIES, losses)
        .chain(of_operators(ops, ".factors", factors))
        .chain(of_operators(ops, ".softmax in 32 bits", softmaxes))
        .chain(pointwise)
        .chain(of_operators(ops, ".copy", copies))
}

/// A tensor that backward needs.
struct Read {
    /// The tensor that is kept so that backward has `of`.
    source: TensorId,
    /// The tensor that backward reads, which may be computed again from the source.
    of: TensorId,
    /// Whether the 8-bit copy of `source` is kept instead of `source`.
    narrow: bool,
}

/// The tensors that backward of the operators in `part` needs, with what is kept for them.
fn reads(
    lowering: &Lowering<'_>,
    trace: &Trace,
    recompute: Recompute,
    (selected, part): (&FxHashSet<TensorId>, &Range<usize>),
) -> Vec<Read> {
    let producers = producers(trace, part);
    let again = modules::selected(lowering, trace, recompute);
    let sums = match reruns_pointwise(lowering, recompute) {
        true => sums::kept_instead_of_terms(trace, &producers),
        false => FxHashSet::default(),
    };
    let mut reads = Vec::new();
    for op in &trace.forward[part.clone()] {
        let narrow = lowering.keeps_quantised(trace, op.operator);
        for of in saved_by(lowering, trace, op, recompute) {
            let whole = trace.tensor(of).storage;
            let sources = match keeps_gathered(lowering, trace, &producers, op) {
                true => vec![of],
                false => {
                    let again = [selected, &again, &sums];
                    resolve(lowering, trace, &producers, again, of, recompute)
                }
            };
            reads.extend(sources.into_iter().map(|source| {
                let itself = trace.tensor(source).storage == whole || again.is_empty();
                Read {
                    source,
                    of,
                    narrow: narrow && itself,
                }
            }));
        }
    }
    reads
}

/// Whether an operator keeps a gathered input as it is: an adapter does, beside a linear layer that would gather it again
/// (Megatron-Bridge `peft/lora.py`, `sequence_parallel_input_regather`, which is off).
fn keeps_gathered(
    lowering: &Lowering<'_>,
    trace: &Trace,
    producers: &[Option<usize>],
    op: &Op,
) -> bool {
    let gathers = |index: usize| {
        let operator = trace.forward[index].operator;
        matches!(operator, Operator::Exchange(e) if e.collective.kind == CollectiveKind::AllGather)
    };
    let of_adapter = matches!(
        op.operator,
        Operator::Product(Product::Matmul(_, Site::Adapter))
    );
    of_adapter
        && lowering.has(Rewrite::RegatherSequenceParallelInput)
        && producers[op.inputs[0].0 as usize].is_some_and(gathers)
}

/// Tensors that the trace does not have, one for each of `ops` for which `bytes` gives a size. Each has the operator's name
/// with this ending.
fn of_operators<'t>(
    ops: &'t [Op],
    ending: &'static str,
    mut bytes: impl FnMut(&'t Op) -> Option<Bytes>,
) -> impl Iterator<Item = SavedTensor<'t>> {
    let of_op = move |op: &'t Op| Some(SavedTensor::beside(&op.scope, ending, bytes(op)?));
    ops.iter().filter_map(of_op)
}

/// Drops views of tensors that are kept themselves: a view takes no memory of its own.
fn drop_parts(trace: &Trace, seen: &TensorSet, saved: &mut Vec<SavedTensor<'_>>) {
    let views = trace.forward_views.iter();
    let views = views.filter(|view| seen.contains(trace.tensor(view.from).storage));
    let parts = TensorSet::of(trace, views.map(|view| trace.tensor(view.to).storage));
    saved.retain(|tensor| {
        tensor
            .storage
            .is_none_or(|storage| !parts.contains(storage))
    });
}

/// The 8-bit copies of linear layers' inputs.
fn eight_bit(trace: &Trace, mut ids: Vec<TensorId>) -> impl Iterator<Item = SavedTensor<'_>> {
    ids.sort_unstable();
    ids.dedup();
    ids.into_iter()
        .map(|id| trace.tensor(id))
        .filter(|info| matches!(info.role, TensorRole::Activation | TensorRole::Input))
        .map(|info| SavedTensor {
            for_weight: true,
            ..SavedTensor::beside(&info.name, " (8 bits)", Bytes(info.elements()))
        })
}

/// Whether recomputation selected by operator runs attention again.
pub(super) fn reruns_attention(lowering: &Lowering<'_>, recompute: Recompute) -> bool {
    recompute == Recompute::SelectiveOps && lowering.has(Rewrite::KeepAttentionProjections)
}

/// Tensors that an operator's backward reads under this runtime.
pub(super) fn saved_by(
    lowering: &Lowering<'_>,
    trace: &Trace,
    op: &Op,
    recompute: Recompute,
) -> Vec<TensorId> {
    if lowering.has(Rewrite::WeightActivations)
        && op.operator == Operator::Expert(Expert::Unpermute)
    {
        return Vec::new();
    }
    if loss::kept(lowering, trace, op).is_some() {
        return Vec::new();
    }
    // Casts of its operands are kept instead, unless they are made again.
    if recompute != Recompute::SelectiveOps
        && wide_routing::kept_by_router(lowering, trace, op).is_some()
    {
        return Vec::new();
    }
    if op.attention().is_none() {
        let copied = input_copies::kept(lowering, trace, op).map(|_| op.inputs[0]);
        let saved = op.saved.iter().copied();
        return saved.filter(|&id| Some(id) != copied).collect();
    }
    // Fused or recomputed attention keeps queries, keys and values, not the scores. Its output is kept by the
    // projection that reads it, or by [`outputs_kept_by_attention`].
    if lowering.fuses_attention(trace) || lowering.selects_attention(recompute) {
        let external = |id: &TensorId| {
            !trace
                .forward
                .iter()
                .any(|p| p.attention().is_some() && p.outputs.contains(id))
        };
        return op.saved.iter().copied().filter(external).collect();
    }
    op.saved.clone()
}

/// The tensors kept so that backward has `id`: the tensor itself, or those it is recomputed from.
/// The sets are the products whose outputs selection by operator keeps, the outputs of selected
/// modules, which run again, and the sums that are kept instead of their terms.
fn resolve(
    lowering: &Lowering<'_>,
    trace: &Trace,
    producers: &[Option<usize>],
    [selected, modules, sums]: [&FxHashSet<TensorId>; 3],
    id: TensorId,
    recompute: Recompute,
) -> Vec<TensorId> {
    let again = |op: &Op| {
        let output = &op.outputs[0];
        modules.contains(output)
            || !sums.contains(output) && rebuilt(lowering, op, selected, recompute)
    };
    let mut pending = vec![id];
    let mut sources = Vec::new();
    let mut visited = Vec::new();
    while let Some(id) = pending.pop() {
        if visited.contains(&id) {
            continue;
        }
        visited.push(id);
        let producer = |id: &TensorId| producers[id.0 as usize].map(|index| &trace.forward[index]);
        let Some(op) = producer(&id) else {
            // A view into a tensor that is recomputed is recomputed with it.
            let whole = trace.forward_views.iter().find(|view| view.to == id);
            match whole
                .map(|view| view.from)
                .filter(|from| producer(from).is_some_and(again))
            {
                Some(from) => pending.push(from),
                None => sources.push(id),
            }
            continue;
        };
        if again(op) {
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

/// Whether backward runs pointwise operators again instead of keeping their results.
fn reruns_pointwise(lowering: &Lowering<'_>, recompute: Recompute) -> bool {
    recompute == Recompute::SelectiveOps || lowering.has(Rewrite::FusePointwise)
}

/// Whether backward recomputes this operator's output from its inputs instead of keeping it.
fn rebuilt(
    lowering: &Lowering<'_>,
    op: &Op,
    selected: &FxHashSet<TensorId>,
    recompute: Recompute,
) -> bool {
    if op.attention().is_some() && reruns_attention(lowering, recompute) {
        return true;
    }
    match op.operator {
        Operator::Exchange(Exchange { collective: c, .. }) => {
            let again = lowering.gathers_again(c.axis) || recompute == Recompute::SelectiveOps;
            again && c.kind == CollectiveKind::AllGather
        }
        Operator::Product(_) => {
            recompute == Recompute::SelectiveOps && !selected.contains(&op.outputs[0])
        }
        // What runs the convolution again is part of the recurrence's backward.
        Operator::Recurrent(Recurrent::Convolution(of)) if of.again => true,
        Operator::Recurrent(Recurrent::Convolution(_) | Recurrent::Scan(_)) => {
            recompute == Recompute::SelectiveOps
        }
        // A fused loss does not make the 32-bit copy of the logits. One that keeps their gradient in 32 bits keeps as much.
        Operator::Pointwise(Pointwise::Copy) if lowering.has(Rewrite::FuseCrossEntropy) => {
            !lowering.has(Rewrite::WideLossGradient)
        }
        // Dropout masks cannot be rebuilt by a compiler's partitioner; other pointwise results
        // can, at no more than the traffic of reading them back.
        operator => {
            let class = operator.cost();
            class.is_pointwise()
                && class != CostClass::Dropout
                && reruns_pointwise(lowering, recompute)
        }
    }
}

/// Outputs of products that recomputation selected by operator keeps: every second one (torchtitan), or the projections
/// around attention (MaxText).
pub(super) fn selected_products(lowering: &Lowering<'_>, trace: &Trace) -> FxHashSet<TensorId> {
    let covered = trace.forward[..checkpoint::covered(trace)].iter();
    let products = covered.filter_map(|op| match op.operator {
        Operator::Product(product) => Some((product, op.outputs[0])),
        _ => None,
    });
    if !lowering.has(Rewrite::KeepAttentionProjections) {
        return products.step_by(2).map(|(_, output)| output).collect();
    }
    let kept = |site| match site {
        Site::AttentionInput => true,
        Site::AttentionOutput => lowering.has(Rewrite::KeepOutputProjection),
        Site::FeedForwardInput
        | Site::FeedForwardOutput
        | Site::Router
        | Site::Adapter
        | Site::Vocabulary
        | Site::Other => false,
    };
    products
        .filter(|(product, _)| matches!(product, Product::Matmul(_, site) if kept(*site)))
        .map(|(_, output)| output)
        .collect()
}

/// Outputs of attention that a fused kernel's backward reads, and that the operator after it does not keep: an all-to-all of heads and a
/// frozen projection keep nothing, and some projections keep an 8-bit copy (Transformer Engine, `backends.py`, `FusedAttnFunc` saves
/// `out_f16`).
fn outputs_kept_by_attention<'t>(
    lowering: &Lowering<'_>,
    trace: &'t Trace,
    part: &Range<usize>,
) -> impl Iterator<Item = TensorId> + 't {
    let kept_otherwise = |op: &Op| match op.operator {
        Operator::Exchange(e) => e.collective.kind != CollectiveKind::AllToAll,
        Operator::Product(_) if op.saved.is_empty() => false,
        operator => !lowering.keeps_quantised(trace, operator),
    };
    let of_attention = |output: &TensorId| {
        let storage = trace.tensor(*output).storage;
        let reads = |op: &&Op| {
            op.inputs
                .iter()
                .any(|&id| trace.tensor(id).storage == storage)
        };
        !trace.forward.iter().filter(reads).all(kept_otherwise)
    };
    let contexts = trace.attentions.iter().map(|pieces| pieces.context);
    let contexts = contexts.filter(|context| part.contains(context));
    let outputs = contexts.map(|context| trace.forward[context].outputs[0]);
    outputs.filter(of_attention).collect::<Vec<_>>().into_iter()
}

/// The statistics that a fused attention kernel keeps: one 32-bit log-sum-exp per head and query.
fn log_sum_exp<'t>(trace: &'t Trace, part: &Range<usize>) -> impl Iterator<Item = SavedTensor<'t>> {
    let of_part = |pieces: &&AttentionPieces| part.contains(&pieces.scores);
    trace
        .attentions
        .iter()
        .filter(of_part)
        .filter_map(|pieces| {
            let op = &trace.forward[pieces.scores];
            let s = op.attention()?.shape;
            let bytes = Bytes(s.batch * s.heads * s.q_len * DType::F32.size());
            Some(SavedTensor::beside(&op.scope, ".log_sum_exp", bytes))
        })
}

fn inputs<'t>(lowering: &Lowering<'_>, trace: &'t Trace) -> Vec<SavedTensor<'t>> {
    let bytes = autocast::wider_inputs(lowering, trace);
    let wider = SavedTensor::beside("input", " in 32 bits", bytes);
    let inputs = autocast::inputs(trace).map(|t| SavedTensor {
        storage: Some(t.storage),
        ..SavedTensor::beside(&t.name, "", t.bytes())
    });
    inputs
        .chain(Some(wider).filter(|w| w.bytes.0 > 0))
        .collect()
}

/// For every tensor, the index of the forward operator of `part` that makes it.
fn producers(trace: &Trace, part: &Range<usize>) -> Vec<Option<usize>> {
    let mut producers = vec![None; trace.tensors.len()];
    for (index, op) in trace.forward.iter().enumerate() {
        if !part.contains(&index) {
            continue;
        }
        for &output in &op.outputs {
            producers[output.0 as usize] = Some(index);
        }
    }
    producers
}

/// Storages of the tensors that the weight half of backward reads.
fn weight_operands(trace: &Trace) -> TensorSet {
    let halves = trace.backward.iter();
    let halves = halves.filter(|op| op.pass == Pass::BackwardWeight);
    let inputs = halves.flat_map(|op| &op.inputs);
    TensorSet::of(trace, inputs.map(|&id| trace.tensor(id).storage))
}

/// Bytes of the kept activations that weight gradients are computed from, and of the output gradients.
pub(super) fn weight_half_bytes(trace: &Trace, saved: &[SavedTensor<'_>]) -> Bytes {
    let mut gradients = TensorSet::new(trace);
    let mut bytes: Bytes = saved.iter().filter(|s| s.for_weight).map(|s| s.bytes).sum();
    for op in trace
        .backward
        .iter()
        .filter(|op| op.pass == Pass::BackwardWeight)
    {
        for &id in &op.inputs {
            let storage = trace.tensor(id).storage;
            let info = trace.tensor(storage);
            if info.role == TensorRole::Gradient && gradients.insert(storage) {
                bytes += info.bytes();
            }
        }
    }
    bytes
}
