//! Casts of operands to 8 bits before matrix products.

use catalog::device::Architecture;
use catalog::runtime::Rewrite;
use catalog::{Bytes, Fp8Recipe};
use dtensor::{AnyOp, CostClass, Gemm, Operator, Pass, Product, TensorId, TensorRole, Trace};

use super::compiled_casts;
use super::kernel::{Chain, Kernel};
use super::lowering::{Lowering, are_read_both_ways};
use crate::price::MemoryKind;

/// Bytes moved per element to find a tensor's largest magnitude and then cast it from 16 bits to 8.
const SCALED: u64 = 2 + 2 + 1;
/// Bytes moved per element if the cast also writes the transpose.
const SCALED_BOTH_WAYS: u64 = SCALED + 1;

/// The kernel that casts a product's operands, if the product runs in 8 bits and needs one.
pub(super) fn before(
    lowering: &Lowering<'_>,
    trace: &Trace,
    op: &AnyOp<'_>,
    product: Product,
) -> Option<Kernel> {
    if !lowering.is_eight_bit(trace, product) {
        return None;
    }
    let compiled =
        lowering.has(Rewrite::FusePointwise) || lowering.fp8_recipe == Fp8Recipe::Rowwise;
    let chain = if compiled {
        compiled_casts::of_product(lowering, trace, op)
    } else if scales_apart(lowering) {
        scaled(trace, op)
    } else {
        quantised(lowering, trace, op, product)?
    };
    (chain.launches > 0).then(|| Kernel {
        reads: Vec::new(),
        writes: Vec::new(),
        ..Kernel::of(op, chain.bound_by_memory(MemoryKind::Pointwise))
    })
}

/// Whether one pass finds the largest magnitude of each operand and another casts it, for every product: torchao without a
/// compiler, and our own executor.
fn scales_apart(lowering: &Lowering<'_>) -> bool {
    lowering.fp8_recipe == Fp8Recipe::Tensorwise
        && !lowering.has(Rewrite::SaveQuantisedInputs)
        && !lowering.has(Rewrite::FusePointwise)
}

/// Casting a linear's activation operand to 8 bits, with its transpose for the weight gradient:
/// reads 2 bytes, writes 1 + 1 per element (Transformer Engine `cast_transpose`). Weight gradients read the transposes that the
/// forward and data-gradient casts left behind. If the input itself was kept, its transpose is cast just before. Nothing is
/// transposed if matrix units read one copy both ways.
fn quantised(
    lowering: &Lowering<'_>,
    trace: &Trace,
    op: &AnyOp<'_>,
    product: Product,
) -> Option<Chain> {
    let later = lowering.keeps_original(trace, product);
    let by_columns = !lowering.reads_casts_both_ways();
    if op.pass == Pass::BackwardWeight {
        let input = op.inputs[1];
        // What is gathered in 8 bits is cast by rows and transposed after the gather.
        let transposed = u64::from(by_columns && lowering.quantised_gather(trace, input).is_some());
        return later.then(|| cast(lowering, trace, input, transposed));
    }
    // No gradient of a frozen weight reads the transpose.
    let frozen = op
        .inputs
        .iter()
        .any(|&id| trace.tensor(id).role == TensorRole::Frozen);
    let at_once = !later || op.pass != Pass::Forward;
    let transposed = u64::from(by_columns && at_once && !frozen);
    let casts = activations(trace, op).map(|id| cast(lowering, trace, id, transposed));
    let both = casts.reduce(|a, b| Chain {
        bytes: a.bytes + b.bytes,
        launches: a.launches.max(b.launches),
    });
    Some(both.unwrap_or_default())
}

/// The operands of a product that are not weights.
fn activations<'a>(trace: &'a Trace, op: &AnyOp<'a>) -> impl Iterator<Item = TensorId> + 'a {
    let inputs = op.inputs.iter().copied();
    inputs.filter(|&id| !trace.tensor(id).role.is_weight())
}

/// Bytes of memory traffic of Transformer Engine's cast of one operand to 8 bits, and the number of operators that the host
/// launches for it. The kernel that transposes a gathered operand is not counted as a launch: it takes the host little, because
/// autograd does not see it.
///
/// If tensor parallelism gathers the operand in 8 bits, each rank casts its part before the gather. With one scale for the
/// tensor the transpose is made of the gathered numbers, by another kernel (v2.9 `distributed.py`, `_all_gather_fp8`); with
/// blocks of 32 numbers the parts are cast both ways and gathered. A scale of the tensor's own largest magnitude takes a pass
/// over the operand before the cast (`Float8CurrentScalingQuantizer`), unless a norm made the operand, which finds the
/// magnitude on the way (v2.7, `csrc/extensions/normalization.cpp`).
fn cast(lowering: &Lowering<'_>, trace: &Trace, id: TensorId, transposed: u64) -> Chain {
    let gather = lowering.quantised_gather(trace, id);
    let part = gather.as_ref().map_or(id, |gather| gather.inputs[0]);
    let scaled = lowering.fp8_recipe == Fp8Recipe::Tensorwise;
    let by_norm = lowering.has(Rewrite::FuseNorm);
    let of_a_norm = || {
        trace
            .producer(part)
            .is_some_and(|op| op.cost() == CostClass::Norm)
    };
    let searched = u64::from(scaled && !(by_norm && of_a_norm()));
    let (part, whole) = (trace.tensor(part).elements(), trace.tensor(id).elements());
    let apart = gather.is_some() && lowering.fp8_recipe != Fp8Recipe::Mxfp8;
    let bytes = if apart {
        (3 + 2 * searched) * part + 2 * transposed * whole
    } else {
        (3 + 2 * searched + transposed) * part
    };
    Chain {
        bytes: Bytes(bytes),
        launches: 1 + searched as u32,
    }
}

/// Number of kernels per expert with which Transformer Engine casts the expert's rows to 8 bits.
/// With scales of earlier steps it is 0: one kernel casts the rows of all experts. A scale of the
/// rows' own largest magnitude takes four: clear the magnitude, find it, turn it into a scale, cast
/// (v2.8, `csrc/extensions/cast.cpp`, `multi_tensor_quantize_impl`, and `csrc/quantizer.cpp`).
pub(crate) const fn kernels_per_expert(recipe: Fp8Recipe) -> u32 {
    match recipe {
        Fp8Recipe::Delayed => 0,
        Fp8Recipe::Tensorwise => 4,
        Fp8Recipe::Rowwise | Fp8Recipe::Blockwise | Fp8Recipe::Mxfp8 => 1,
    }
}

/// Bytes and launches of scaling both operands by their largest magnitudes: one pass finds it, one casts. An operand
/// that the previous product cast is not cast again: projections read the same activations, and both gradient products
/// the output's gradient, which is written both ways (`devices/cuda/src/run/eight_bits.rs`).
fn scaled(trace: &Trace, op: &AnyOp<'_>) -> Chain {
    let narrow = |o: &AnyOp<'_>| matches!(o.cost(), CostClass::Product(p) if trace.is_eight_bit(p));
    let mut before = (0..op.index)
        .rev()
        .map(|index| trace.op(op.pass, index))
        .filter(narrow);
    let [first, second] = [op.inputs[0], op.inputs[1]];
    let casts: Vec<(TensorId, u64)> = match op.pass {
        Pass::Forward => {
            let again = before.next().is_some_and(|o| o.inputs[0] == first);
            let x = (!again).then_some((first, SCALED));
            x.into_iter().chain([(second, SCALED)]).collect()
        }
        Pass::BackwardInput => vec![(first, SCALED_BOTH_WAYS), (second, SCALED)],
        Pass::BackwardWeight => {
            let gradient = before.clone().next().is_some_and(|o| o.inputs[0] == first);
            let again = before
                .find(|o| o.pass == Pass::BackwardWeight)
                .is_some_and(|o| o.inputs[1] == second);
            let dy = (!gradient).then_some((first, SCALED));
            let x = (!again).then_some((second, SCALED));
            dy.into_iter().chain(x).collect()
        }
    };
    let bytes = casts
        .iter()
        .map(|&(id, each)| each * trace.tensor(id).elements());
    Chain {
        bytes: Bytes(bytes.sum()),
        launches: 2 * casts.len() as u32,
    }
}

/// Bytes that the casts of a linear layer's products hold in addition to its tensors, for the
/// largest layer: the gradient of its output and its transpose, its weight and its input.
pub(crate) fn held(lowering: &Lowering<'_>, trace: &Trace) -> Bytes {
    if !scales_apart(lowering) {
        return Bytes(0);
    }
    let held = trace.forward.iter().filter_map(|op| match op.operator {
        Operator::Product(p @ Product::Matmul(Gemm { m, n, k }, _)) if trace.is_eight_bit(p) => {
            Some(2 * m * n + n * k + m * k)
        }
        _ => None,
    });
    Bytes(held.max().unwrap_or(0))
}

/// Number of 8-bit copies of a weight that its products read. Forward reads a weight by rows, backward by columns.
pub(crate) fn copies_of_a_weight(recipe: Fp8Recipe, architecture: Architecture) -> u64 {
    1 + u64::from(!are_read_both_ways(recipe, architecture))
}

/// Bytes of the 8-bit copies of a block's weights that are kept from one micro-batch to the next.
pub(crate) fn of_weights(lowering: &Lowering<'_>, trace: &Trace) -> Bytes {
    if !(trace.eight_bits && lowering.has(Rewrite::KeepQuantisedWeights)) {
        return Bytes(0);
    }
    let narrow = |op: &dtensor::Op, weight: TensorId| {
        op.inputs.contains(&weight)
            && matches!(op.operator, Operator::Product(p) if lowering.is_eight_bit(trace, p))
    };
    let cast = (trace.parameters.iter())
        .filter(|parameter| (trace.forward.iter()).any(|op| narrow(op, parameter.tensor)));
    let elements: u64 = cast.map(|parameter| parameter.local_elements).sum();
    let copies = 1 + u64::from(!lowering.reads_casts_both_ways());
    let scales = match lowering.fp8_recipe {
        Fp8Recipe::Mxfp8 => elements / 32,
        _ => 0,
    };
    Bytes(copies * (elements + scales))
}

#[cfg(test)]
mod tests {
    use catalog::{DType, Model, Runtime};
    use models::BlockLayout;

    use super::*;
    use crate::lower::KernelKind;
    use crate::lower::testing::{self, HIDDEN, INNER, KEYS, TOKENS, lowered, model, runtime};

    fn layer(model: &Model, tokens: u64) -> Trace {
        let layout = BlockLayout {
            eight_bits: true,
            ..BlockLayout::alone(1, tokens, DType::Bf16)
        };
        testing::layer(model, &layout)
    }

    /// Bytes and launches of the casts of each pass.
    fn casts(runtime: &Runtime, trace: &Trace) -> [(u64, u32); 2] {
        let lowered = lowered(runtime, trace);
        [lowered.forward, lowered.backward].map(|kernels| {
            let casts = kernels
                .iter()
                .filter(|k| k.reads.is_empty() && k.writes.is_empty());
            casts.fold((0, 0), |(all, times), kernel| match kernel.kind {
                KernelKind::Memory {
                    bytes, launches, ..
                } => (all + bytes.0, times + launches),
                _ => (all, times),
            })
        })
    }

    #[test]
    fn operands_are_cast_once_for_all_that_read_them_next() {
        let trace = layer(&model("llama", ""), TOKENS);
        let [x, keys, inner] = [HIDDEN, KEYS, INNER].map(|columns| TOKENS * columns);
        let [square, narrow, wide] = [HIDDEN, KEYS, INNER].map(|rows| HIDDEN * rows);
        // Queries with keys and values; the output; gate with up; down.
        let weights = 2 * square + 2 * narrow + 3 * wide;
        let forward = 5 * (weights + x + x + x + inner);
        // Gradients of q, k, v, output, gate, up and down; then what gradients of weights read.
        let gradients = 6 * (x + 2 * keys + x + 2 * inner + x);
        let backward = gradients + 5 * weights + 5 * (x + x + x + inner);
        let want = [(forward, 2 * (7 + 4)), (backward, 2 * (7 + 7 + 4))];
        assert_eq!(casts(&runtime("vescale-cuda"), &trace), want);
        // One token more, and no product is one of 8 bits.
        let odd = layer(&model("llama", ""), TOKENS + 1);
        assert_eq!(casts(&runtime("vescale-cuda"), &odd), [(0, 0), (0, 0)]);
    }

    /// Bytes and operators of the cast of the input of the first projection, which a norm made, and of the gradient of the
    /// last product's output, on one of two ranks that split sequences between layers.
    #[test]
    fn what_tensor_parallelism_gathers_is_cast_before() {
        let layout = BlockLayout {
            tp: 2,
            sequence_parallel: true,
            eight_bits: true,
            ..BlockLayout::alone(1, TOKENS, DType::Bf16)
        };
        let trace = testing::layer(&model("llama", ""), &layout);
        let [part, whole] = [TOKENS / 2 * HIDDEN, TOKENS * HIDDEN];
        use Architecture::{Blackwell, Hopper};
        let rows = [
            (true, Fp8Recipe::Delayed, Hopper, [3, 3], 2, [1, 1]),
            (true, Fp8Recipe::Tensorwise, Hopper, [3, 5], 2, [1, 2]),
            (true, Fp8Recipe::Tensorwise, Blackwell, [3, 5], 0, [1, 2]),
            (true, Fp8Recipe::Mxfp8, Blackwell, [4, 4], 0, [1, 1]),
            (false, Fp8Recipe::Delayed, Hopper, [0, 0], 4, [1, 1]),
            (false, Fp8Recipe::Delayed, Blackwell, [0, 0], 3, [1, 1]),
            (false, Fp8Recipe::Tensorwise, Hopper, [0, 0], 6, [2, 2]),
        ];
        for (gathers_casts, recipe, architecture, of_part, of_whole, launches) in rows {
            let mut runtime = runtime("megatron-core");
            if !gathers_casts {
                runtime.rewrites.remove(&Rewrite::GatherQuantised);
            }
            let lowering = Lowering::new(&runtime, recipe).on(architecture);
            let narrow = |op: &AnyOp<'_>| matches!(op.cost(), CostClass::Product(p) if trace.is_eight_bit(p));
            let input = trace.forward_ops().find(narrow).expect("a product");
            let gradient = trace.backward_ops().find(narrow).expect("a product");
            let found = [input, gradient].map(|op| match op.cost() {
                CostClass::Product(of) => quantised(&lowering, &trace, &op, of),
                _ => None,
            });
            let wanted = [0, 1].map(|at| {
                Some(Chain {
                    bytes: Bytes(of_part[at] * part + of_whole * whole),
                    launches: launches[at],
                })
            });
            assert_eq!(found, wanted, "{gathers_casts} {recipe:?} {architecture:?}");
        }
    }

    #[test]
    fn experts_stay_wide_where_the_runtime_says_so() {
        let experts = r#", "num_local_experts": 4, "num_experts_per_tok": 2"#;
        let trace = layer(&model("mixtral", experts), TOKENS);
        for (name, narrow) in [("vescale-cuda", false), ("megatron-core", true)] {
            let lowered = lowered(&runtime(name), &trace);
            let grouped = lowered
                .forward
                .iter()
                .filter_map(|kernel| match kernel.kind {
                    KernelKind::GroupedGemm { low_precision, .. } => Some(low_precision),
                    _ => None,
                });
            let grouped: Vec<bool> = grouped.collect();
            assert!(!grouped.is_empty() && !grouped.contains(&!narrow), "{name}");
        }
    }

    /// Each row has one or two copies of each weight, with MXFP8 also a scale for every 32 numbers;
    /// no copies if the runtime keeps none.
    #[test]
    fn copies_of_weights_stay_where_the_runtime_keeps_them() {
        use Architecture::{Blackwell, Hopper};
        use Fp8Recipe::{Blockwise, Delayed, Mxfp8, Rowwise, Tensorwise};
        let dense = layer(&model("llama", ""), TOKENS);
        let [square, narrow, wide] = [HIDDEN, KEYS, INNER].map(|rows| HIDDEN * rows);
        let weights = 2 * square + 2 * narrow + 3 * wide;
        let odd = layer(&model("llama", ""), TOKENS + 1);
        let experts = r#", "num_local_experts": 4, "num_experts_per_tok": 2"#;
        let routed = layer(&model("mixtral", experts), TOKENS);
        let of_experts = 2 * square + 2 * narrow + 4 * 3 * wide;
        let core = "megatron-core";
        let rows = [
            (core, Delayed, Hopper, &dense, 2 * weights),
            (core, Tensorwise, Blackwell, &dense, weights),
            (core, Blockwise, Hopper, &dense, 2 * weights),
            (core, Mxfp8, Blackwell, &dense, 2 * weights * 33 / 32),
            (core, Delayed, Hopper, &routed, 2 * of_experts),
            (core, Delayed, Hopper, &odd, 0),
            ("nemo", Delayed, Hopper, &dense, 0),
            ("torchtitan", Rowwise, Hopper, &dense, 0),
        ];
        for (name, recipe, architecture, trace, want) in rows {
            let runtime = runtime(name);
            let lowering = Lowering::new(&runtime, recipe).on(architecture);
            let found = of_weights(&lowering, trace);
            assert_eq!(found, Bytes(want), "{name} {recipe:?} {architecture:?}");
        }
    }
}
