//! Decides which operators share a kernel.

use catalog::Axis;
use catalog::runtime::Rewrite;
use dtensor::{
    AnyOp, Attention, Collective, CollectiveKind, CostClass, Epilogues, Gemm, Gradient, Operator,
    Pass, Pointwise, Product, TensorId, Trace,
};

use super::autocast_operators;
use super::casts;
use super::context;
use super::elementary_gelu;
use super::elementary_rope;
use super::expert_operators::{self, Apart};
use super::input_copies;
use super::kernel::{Chain, FusedAttention, Kernel, KernelKind, Lowered, traffic};
use super::lowering::{Lowering, has_loss, is_routed};
use super::masked;
use super::narrow_attention;
use super::norm_copies;
use super::rearranged;
use super::softmax;
use super::tensor_set::TensorSet;
use super::vocabulary;
use super::wide_routing;
use crate::price::{MemoryKind, alignment};

/// The kernels of one pass's operators.
pub(super) fn kernels(lowering: &Lowering<'_>, trace: &Trace, ops: &[AnyOp<'_>]) -> Vec<Kernel> {
    let readers = readers(trace, ops);
    let fused_attention = lowering.fuses_attention(trace);
    let mut kernels = Vec::with_capacity(ops.len());
    let mut index = 0;
    while index < ops.len() {
        let end = run_end(lowering, ops, index, fused_attention);
        let run = &ops[index..end];
        if fused_attention && run[0].is_core_attention() {
            let kernel = attention(lowering, trace, run);
            let beside = context::beside_attention(lowering, trace, &kernel);
            let of_mask = masked::beside_attention(lowering, trace, &run[0], &kernel);
            let casts = narrow_attention::casts(&kernel);
            kernels.extend([casts, Some(kernel), beside, of_mask].into_iter().flatten());
        } else if run.len() > 1 || run[0].cost().is_pointwise() {
            let kernel = pointwise(lowering, trace, run, &readers);
            let with_cast = |kernel| norm_copies::with_cast(lowering, trace, &run[0], kernel);
            kernels.extend(kernel.into_iter().flat_map(with_cast));
        } else {
            let single = single(lowering, trace, &run[0]);
            let first = single.first();
            let copies = first.and_then(|of| masked::beside_scores(lowering, trace, &run[0], of));
            kernels.extend(wide_routing::with_casts(lowering, trace, &run[0], single));
            kernels.extend(copies);
        }
        index = end;
    }
    kernels
}

/// Merges GELUs into the products next to them, where the runtime fuses the two. The product then
/// moves one tensor more than the GELU alone would: forward writes the GELU's input beside its
/// result, backward reads it.
pub(super) fn gelus(trace: &Trace, lowered: &mut Lowered) {
    let epilogues = Epilogues::of(trace);
    for kernels in [&mut lowered.forward, &mut lowered.backward] {
        let gelu = |kernel: &Kernel| match kernel.pass {
            Pass::Forward => (epilogues.gelu(kernel.op), epilogues.is_gelu(kernel.op)),
            _ => (
                epilogues.gelu_gradient(kernel.op),
                epilogues.is_gelu_gradient(kernel.op),
            ),
        };
        for kernel in kernels.iter_mut() {
            if gelu(kernel).1 {
                let bytes = trace
                    .tensor(trace.op(kernel.pass, kernel.op).inputs[0])
                    .bytes();
                // Its arithmetic is the product's. The bytes are still moved, but nothing is launched.
                let launches = 0;
                *kernel = kernel.beside(Chain { bytes, launches });
            }
            if let (Some(taken), KernelKind::Gemm { .. }) = (gelu(kernel).0, kernel.kind) {
                let taken = trace.op(kernel.pass, taken);
                kernel.reads.extend(&taken.inputs[1..]);
                kernel.writes = taken.outputs.to_vec();
            }
        }
    }
}

/// Index after the last operator that shares a kernel with the one at `start`.
fn run_end(
    lowering: &Lowering<'_>,
    ops: &[AnyOp<'_>],
    start: usize,
    fused_attention: bool,
) -> usize {
    let mut end = start + 1;
    if fused_attention && ops[start].is_core_attention() {
        while end < ops.len() && ops[end].is_core_attention() {
            end += 1;
        }
        return end;
    }
    while end < ops.len() && joins(lowering, &ops[end - 1], &ops[end]) {
        end += 1;
    }
    end
}

/// Whether `next` runs in the same kernel as `previous`. Symmetric, so that backward, which visits
/// the operators in reverse, fuses the same pairs.
fn joins(lowering: &Lowering<'_>, first: &AnyOp<'_>, second: &AnyOp<'_>) -> bool {
    use CostClass::{Activation, Add, Bias, Dropout, Rope};
    let (previous, next) = (first.cost(), second.cost());
    if lowering.has(Rewrite::FusePointwise) {
        return previous.is_pointwise() && next.is_pointwise();
    }
    match (previous, next) {
        (Bias, Activation { .. }) | (Activation { .. }, Bias) => {
            lowering.has(Rewrite::FuseBiasGelu)
        }
        (Bias, Dropout | Add) | (Dropout, Bias | Add) | (Add, Dropout | Bias) => {
            lowering.has(Rewrite::FuseBiasDropoutAdd)
        }
        (Rope, Rope) => [first, second].map(|op| lowering.fuses_rope(op.operator)) == [true; 2],
        _ => false,
    }
}

/// One memory-bound kernel for a run of operators: it reads what comes from outside the run and writes what leaves it.
fn pointwise(
    lowering: &Lowering<'_>,
    trace: &Trace,
    run: &[AnyOp<'_>],
    readers: &[u32],
) -> Option<Kernel> {
    // Only the addition of a bias is part of the product's kernel. Its gradient, a sum over rows, is a separate kernel in
    // PyTorch and in our executor.
    let is_epilogue = run[0].cost() == CostClass::Bias && run[0].pass == Pass::Forward;
    if run.len() == 1 && is_epilogue && lowering.has(Rewrite::FuseBiasEpilogue) {
        return None;
    }
    let apart = match run {
        [op] => expert_operators::bias(lowering, trace, op),
        _ => None,
    };
    if apart == Some(Apart::Epilogue) {
        return None;
    }
    if run.len() == 1 && vocabulary::is_in_fused_loss(lowering, trace, &run[0]) {
        return None;
    }
    let (reads, writes) = crossing(run, readers);
    let (kind, eager_passes) = pointwise_kind(lowering, run);
    let operators = match (apart, run) {
        (Some(Apart::Chain(chain)), _) => Some(chain),
        (_, [op]) => elementary_gelu::chain(lowering, trace, op)
            .or_else(|| elementary_rope::chain(lowering, trace, op))
            .or_else(|| autocast_operators::chain(lowering, trace, op)),
        _ => None,
    };
    let mut chain = operators.unwrap_or_else(|| Chain {
        bytes: traffic(trace, &reads, &writes) * u64::from(eager_passes),
        launches: if run.len() > 1 { 1 } else { eager_passes },
    });
    for bounds in run
        .iter()
        .filter_map(|op| expert_operators::bounds(lowering, trace, op))
    {
        chain.bytes += bounds.bytes;
        chain.launches += bounds.launches;
    }
    Some(Kernel {
        reads,
        writes,
        ..Kernel::of(&run[0], chain.bound_by_memory(kind))
    })
}

/// The tensors that a kernel made of these operators reads, and those that it writes. A tensor that
/// only the next operator of the run reads is in neither list.
fn crossing(run: &[AnyOp<'_>], readers: &[u32]) -> (Vec<TensorId>, Vec<TensorId>) {
    let outputs = || run.iter().flat_map(|op| op.outputs.iter().copied());
    let inside = |id: TensorId| outputs().any(|output| output == id);
    let mut reads: Vec<TensorId> = Vec::new();
    for op in run {
        for &input in op.inputs {
            if !inside(input) && !reads.contains(&input) {
                reads.push(input);
            }
        }
    }
    let leaves = |id: &TensorId| {
        let within = run.iter().filter(|op| op.inputs.contains(id)).count() as u32;
        let all = readers[id.0 as usize];
        all == 0 || all > within || run.iter().any(|op| op.saved.contains(id))
    };
    let writes: Vec<TensorId> = outputs().filter(leaves).collect();
    (reads, writes)
}

/// The price class of a pointwise run, and the number of passes over its data that an unfused runtime makes.
fn pointwise_kind(lowering: &Lowering<'_>, run: &[AnyOp<'_>]) -> (MemoryKind, u32) {
    let compiled = lowering.has(Rewrite::FusePointwise);
    let backward = run[0].pass != Pass::Forward;
    if run.iter().any(|op| op.cost() == CostClass::Norm) {
        let fused = compiled || lowering.has(Rewrite::FuseNorm);
        if !fused && lowering.has(Rewrite::NormInF32) && is_root_mean_square(run[0]) {
            return (MemoryKind::Pointwise, if backward { 12 } else { 9 });
        }
        let kind = match (fused, backward) {
            (true, false) => MemoryKind::NormForward,
            (true, true) => MemoryKind::NormBackward,
            (false, false) => MemoryKind::EagerNormForward,
            (false, true) => MemoryKind::EagerNormBackward,
        };
        // Autocast copies the input to 32 bits and the result back beside the norm itself.
        return (kind, if fused { 1 } else { 2 });
    }
    match run[0].cost() {
        // Eager gated activations run the nonlinearity and the product separately: 5 tensors moved
        // instead of 3, counted as 6.
        CostClass::Activation { gated: true }
            if !compiled && !lowering.has(Rewrite::FuseSwiglu) =>
        {
            (MemoryKind::Pointwise, 2)
        }
        // Eager RoPE negates, concatenates, multiplies twice, adds: 10 tensors, not 2. Backward has
        // two products, a negation, two writes into zeros, two sums: 15 tensors, counted as 16.
        CostClass::Rope if !compiled && !lowering.fuses_rope(run[0].operator) => {
            (MemoryKind::Pointwise, if backward { 8 } else { 5 })
        }
        CostClass::Dropout => (MemoryKind::Dropout, 1),
        _ => (MemoryKind::Pointwise, 1),
    }
}

/// Whether a norm is an RMSNorm, as in Llama. In eager PyTorch it moves 36 bytes per element in forward, nine times
/// what a fused kernel does, and about twelve times in backward (operators of transformers 5.23 counted by dispatch,
/// most in 32 bits).
fn is_root_mean_square(op: AnyOp<'_>) -> bool {
    match op.operator {
        Operator::Norm(norm) => norm.kind == catalog::model::NormKind::RmsNorm,
        Operator::Pointwise(of) => matches!(of, Pointwise::UnitNorm { .. }),
        _ => false,
    }
}

/// The fused attention kernel of a run of core-attention operators.
fn attention(lowering: &Lowering<'_>, trace: &Trace, run: &[AnyOp<'_>]) -> Kernel {
    let backward = run[0].pass != Pass::Forward;
    let pieces = run.iter().find_map(|op| match op.operator {
        Operator::Attention(attention) => Some(attention),
        _ => None,
    });
    let Attention { of, shape, .. } = pieces.expect("a run of pieces of core attention");
    let outputs = || run.iter().flat_map(|op| op.outputs.iter().copied());
    let inputs = || run.iter().flat_map(|op| op.inputs.iter().copied());
    let inside = TensorSet::of(trace, outputs());
    let consumed = TensorSet::of(trace, inputs());
    let kv_len = shape.kv_len;
    let scores = |id: &TensorId| {
        let shape = &trace.tensor(*id).shape;
        shape.len() >= 2 && shape[shape.len() - 1] == kv_len
    };
    let outside = |id: &TensorId| !(inside.contains(*id) || backward && scores(id));
    let mut reads: Vec<TensorId> = inputs().filter(outside).collect();
    let mut writes: Vec<TensorId> = outputs().filter(|&id| !consumed.contains(id)).collect();
    for tensors in [&mut reads, &mut writes] {
        tensors.sort_unstable();
        tensors.dedup();
    }
    let kind = KernelKind::Attention(narrow_attention::computed(FusedAttention {
        shape: masked::computed(lowering, trace, shape),
        kernel: lowering.attention_kernel(trace, of),
        backward,
    }));
    Kernel {
        reads,
        writes,
        ..Kernel::of(&run[0], kind)
    }
}

/// Kernels of an operator that fuses with none of its neighbours.
fn single(lowering: &Lowering<'_>, trace: &Trace, op: &AnyOp<'_>) -> Vec<Kernel> {
    let kernel = |kind: KernelKind| Kernel::of(op, kind);
    let memory = |kind: MemoryKind, launches: u32| {
        let bytes = traffic(trace, op.inputs, op.outputs) * u64::from(launches);
        kernel(Chain { bytes, launches }.bound_by_memory(kind))
    };
    let one = match op.cost() {
        CostClass::Product(of) => {
            let cast = casts::before(lowering, trace, op, of).into_iter();
            let product = kernel(product(lowering, trace, op.pass, of));
            let copy = input_copies::before(lowering, trace, &product);
            let of_adapter = autocast_operators::of_adapter(lowering, trace, op, &product);
            let before = cast.chain(copy).chain(of_adapter);
            return before.chain([product]).collect();
        }
        CostClass::AttentionScores(s) => kernel(KernelKind::BatchedGemm {
            batch: s.batch * s.heads,
            sizes: [s.q_len, s.kv_len, s.qk_dim],
        }),
        CostClass::AttentionContext(s) => kernel(KernelKind::BatchedGemm {
            batch: s.batch * s.heads,
            sizes: [s.q_len, s.v_dim, s.kv_len],
        }),
        CostClass::Softmax(_) => return Vec::from_iter(softmax::kernels(lowering, trace, op)),
        CostClass::Scan(sizes) => kernel(KernelKind::Scan(sizes)),
        CostClass::Convolution => memory(MemoryKind::Pointwise, 1),
        CostClass::Embedding => vocabulary::embedding(lowering, trace, op),
        CostClass::CrossEntropy => {
            return Vec::from_iter(vocabulary::loss(lowering, trace, op));
        }
        CostClass::TopK => memory(MemoryKind::Pointwise, 4),
        CostClass::Permute | CostClass::Unpermute => {
            let passes = 1 + u32::from(!lowering.has(Rewrite::FusePermute));
            let padded = u32::from(lowering.pads_experts(trace));
            memory(MemoryKind::Permute, passes + padded)
        }
        CostClass::Collective(collective) => {
            let bytes = sent(lowering, trace, op, collective);
            let message = kernel(KernelKind::Comm(Collective {
                bytes,
                ..collective
            }));
            let messages = messages(lowering, trace, op, collective);
            let one = match collective.axis {
                Axis::Cp => context::messages(lowering, trace, op, collective, message),
                _ => rearranged::with_kernels_around(lowering, trace, op, message),
            };
            return vec![one; messages].concat();
        }
        CostClass::Norm
        | CostClass::Activation { .. }
        | CostClass::Add
        | CostClass::Bias
        | CostClass::Dropout
        | CostClass::Rope
        | CostClass::Scale
        | CostClass::Copy => memory(MemoryKind::Pointwise, 1),
    };
    vec![one]
}

/// The kernel that runs a product of a linear layer, or of all experts.
fn product(lowering: &Lowering<'_>, trace: &Trace, pass: Pass, product: Product) -> KernelKind {
    let low_precision = lowering.is_eight_bit(trace, product) && !lowering.widens(pass);
    match product {
        Product::Matmul(Gemm { m, n, k }, _) => {
            let sizes = [m, n, k];
            let padded = alignment::padded(sizes, pass);
            // Nearly all products are aligned already and need no search for the loss.
            let pads = padded != sizes && lowering.has(Rewrite::PadVocabulary) && has_loss(trace);
            KernelKind::Gemm {
                sizes: if pads { padded } else { sizes },
                low_precision,
            }
        }
        Product::GroupedMatmul(Gemm { m, n, k }, groups) => KernelKind::GroupedGemm {
            groups,
            sizes: [m, n, k],
            low_precision,
        },
    }
}

/// Bytes that a collective sends. Runtimes that gather the inputs of 8-bit products under tensor parallelism send them in 8 bits.
/// Under autocast a linear layer casts its input inside the layer, so the gradient of that input is all-reduced in 32 bits.
fn sent(lowering: &Lowering<'_>, trace: &Trace, op: &AnyOp<'_>, collective: Collective) -> u64 {
    if collective.axis != Axis::Tp {
        return collective.bytes;
    }
    let of_input = op.pass == Pass::BackwardInput && collective.kind == CollectiveKind::AllReduce;
    let wide = of_input && lowering.autocasts(trace.tensor(op.inputs[0]).dtype);
    let gathers = collective.kind == CollectiveKind::AllGather;
    let narrow =
        gathers && trace.eight_bits && lowering.gathers_quantised() && !is_routed(trace, op);
    match (wide, narrow) {
        (true, _) => collective.bytes * 2,
        (_, true) => collective.bytes / 2,
        _ => collective.bytes,
    }
}

/// Number of messages of a collective: one, or one per linear layer that reads the same input.
fn messages(
    lowering: &Lowering<'_>,
    trace: &Trace,
    op: &AnyOp<'_>,
    collective: Collective,
) -> usize {
    let reduces = collective.axis == Axis::Tp
        && matches!(
            collective.kind,
            CollectiveKind::AllReduce | CollectiveKind::ReduceScatter
        );
    if op.pass == Pass::Forward || !reduces || !lowering.has(Rewrite::ReducePerLinear) {
        return 1;
    }
    // One sum for each further linear layer that reads the input.
    let sum_before = |of: TensorId| {
        let mut backward = trace.backward.iter();
        backward.find(|op| op.operator == Gradient::Sum && op.outputs.contains(&of))
    };
    let sums = std::iter::successors(sum_before(op.inputs[0]), |sum| sum_before(sum.inputs[0]));
    1 + sums.count()
}

/// Number of operators that read each tensor.
fn readers(trace: &Trace, ops: &[AnyOp<'_>]) -> Vec<u32> {
    let mut readers = vec![0; trace.tensors.len()];
    for op in ops {
        for &input in op.inputs {
            readers[input.0 as usize] += 1;
        }
    }
    if let Some(output) = trace.output {
        readers[output.0 as usize] += 1;
    }
    readers
}

#[cfg(test)]
mod tests {
    use catalog::DType;
    use models::BlockLayout;

    use super::*;
    use crate::lower::testing::{layer, lowered, runtime};

    /// For forward and backward: the number of GELUs with a kernel of their own, and of those that
    /// a product's kernel computes.
    fn gelus(kind: &str, dtype: DType) -> [[usize; 2]; 2] {
        let json = format!(
            r#"{{"model_type": "{kind}", "n_embd": 64, "n_head": 4, "n_layer": 1, "n_positions": 64,
                "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1,
                "max_position_embeddings": 64, "intermediate_size": 256, "vocab_size": 128}}"#
        );
        let model = catalog::hf::decode(&json, "test", kind).expect("a model");
        let trace = layer(&model, &BlockLayout::alone(1, 32, dtype));
        let lowered = lowered(&runtime("vescale-cuda"), &trace);
        let of = |ops: &[AnyOp<'_>], kernels: &[Kernel]| {
            let is = |op: &AnyOp<'_>| matches!(op.cost(), CostClass::Activation { .. });
            let own = |kernel: &&Kernel| is(&ops[kernel.op]) && !kernel.writes.is_empty();
            let apart = kernels.iter().filter(own).count();
            let products = kernels
                .iter()
                .filter(|kernel| matches!(kernel.kind, KernelKind::Gemm { .. }));
            let writes = |gelu: &AnyOp<'_>| {
                products
                    .clone()
                    .any(|product| product.writes == gelu.outputs)
            };
            [apart, ops.iter().filter(|op| is(op) && writes(op)).count()]
        };
        [
            of(&trace.forward_ops().collect::<Vec<_>>(), &lowered.forward),
            of(&trace.backward_ops().collect::<Vec<_>>(), &lowered.backward),
        ]
    }

    /// How many all-reduces a layer of Llama runs under tensor parallelism, in its forward or its backward pass.
    fn reductions(of_runtime: &str, backward: bool) -> usize {
        let model = catalog::load::model("llama2-7b").expect("a preset");
        let layout = BlockLayout {
            tp: 2,
            ..BlockLayout::alone(1, 32, DType::Bf16)
        };
        let lowered = lowered(&runtime(of_runtime), &layer(&model, &layout));
        let kernels = if backward {
            lowered.backward
        } else {
            lowered.forward
        };
        let sums = kernels.iter().filter(|kernel| {
            matches!(kernel.kind, KernelKind::Comm(of) if of.kind == CollectiveKind::AllReduce)
        });
        sums.count()
    }

    /// YaRN multiplies what it rotates, which Transformer Engine's kernel cannot.
    #[test]
    fn a_kernel_without_a_factor_leaves_scaled_rotation_to_operators() {
        for (of_runtime, model, expected) in [
            ("megatron-core", "llama3-8b", vec![1, 1]),
            ("megatron-core", "gpt-oss-20b", vec![5, 5, 8, 8]),
            ("nemo", "gpt-oss-20b", vec![5, 5, 8, 8]),
            ("vescale-cuda", "gpt-oss-20b", vec![1, 1]),
        ] {
            let model = catalog::load::model(model).expect("a preset");
            let trace = layer(&model, &BlockLayout::alone(1, 32, DType::Bf16));
            let lowered = lowered(&runtime(of_runtime), &trace);
            let all = lowered.forward.iter().chain(&lowered.backward);
            let rotations = all.filter_map(|kernel| match kernel.kind {
                KernelKind::Memory { launches, .. }
                    if trace.op(kernel.pass, kernel.op).cost() == CostClass::Rope =>
                {
                    Some(launches)
                }
                _ => None,
            });
            assert_eq!(rotations.collect::<Vec<_>>(), expected, "{of_runtime}");
        }
    }

    #[test]
    fn linears_that_reduce_by_themselves_reduce_a_shared_input_once_each() {
        assert_eq!(reductions("megatron-2022", false), 2);
        assert_eq!(reductions("megatron-2022", true), 2);
        assert_eq!(reductions("paddle", false), 2);
        // Queries, keys, values; gate and up.
        assert_eq!(reductions("paddle", true), 5);
    }

    #[test]
    fn gelus_that_products_take_are_no_kernels_of_their_own() {
        assert_eq!(gelus("gpt2", DType::Bf16), [[0, 1]; 2]);
        // In 32 bits, and for a GELU by the error function, nothing is fused.
        assert_eq!(gelus("gpt2", DType::F32), [[1, 0]; 2]);
        assert_eq!(gelus("gpt_neox", DType::Bf16), [[1, 0]; 2]);
    }
}
