//! Routing in 32 bits where the layer computes in 16, operator by operator.
//!
//! - Rows of experts are cast to 32 bits, multiplied by the router's weights of 32 bits, and cast back. The product keeps the rows in
//!   32 bits for the gradient of the weights (pytorch/torchtitan@b5bcd76, `models/common/token_dispatcher.py`, `combine`).
//! - The router's own product reads tokens and weight in 32 bits. It keeps both casts, and softmax keeps its result in 32 bits
//!   (`models/common/moe.py`, `TokenChoiceTopKRouter.forward`).
//!
//! - Where tensor-parallel ranks gather all tokens, each adds up the rows of all their experts: rows that others computed are zeros.
//!
//! - Transformer Engine's permutation keeps a map of 32-bit numbers, two for each token and expert and one more for each token
//!   (NVIDIA/TransformerEngine@d0067d0, `pytorch/triton/permutation.py:52`, `pytorch/permutation.py:519`). Megatron-Core, which calls it,
//!   computes scores of all experts in 32 bits (NVIDIA/Megatron-LM@d98e8a6, `moe_utils.py:902`, `:917`). Under DeepEP the map is of the
//!   tokens that arrive and of a rank's own experts, which is somewhat less.
//!
//! Where `torch.compile` compiles the first two, it keeps the 16-bit tensors and casts again: a cast costs no more than reading its result.
//! The product in 32 bits is priced like one in 16: with so few columns it takes little time.

use catalog::runtime::Rewrite;
use catalog::{Bytes, DType};
use dtensor::{AnyOp, Expert, Op, Operator, Pass, Product, Site, TensorId, Trace};

use super::kernel::{Chain, Kernel, WIDE};
use super::lowering::Lowering;

/// Bytes of the casts that the router's product keeps instead of its operands; of a frozen weight's it keeps that alone. `None` if the
/// operator is no such product.
pub(super) fn kept_by_router(lowering: &Lowering<'_>, trace: &Trace, op: &Op) -> Option<Bytes> {
    let read = op.inputs.iter().skip(usize::from(op.saved.is_empty()));
    let casts = || read.map(|&id| wide(trace, id)).sum();
    is_router(lowering, trace, op.operator, *op.inputs.first()?).then(|| Bytes(casts()))
}

/// Bytes that the choice of experts, or the product of rows and weights, keeps for backward beyond what the trace says. `None` if it keeps
/// no more.
pub(super) fn kept(lowering: &Lowering<'_>, trace: &Trace, op: &Op) -> Option<Bytes> {
    let (first, output) = (*op.inputs.first()?, *op.outputs.first()?);
    let more = match op.operator {
        Operator::Expert(Expert::Route(_)) if lowering.maps_rows() => {
            wider(trace, first) + row_map(trace, first)
        }
        Operator::Expert(Expert::Route(_)) if lowering.has(Rewrite::GateInF32) => {
            wider(trace, first)
        }
        Operator::Expert(Expert::Unpermute) => {
            let size = match weighs(lowering, trace, first) {
                true => WIDE,
                false => trace.tensor(first).dtype.size(),
            };
            let all = all_rows(trace, output, *op.inputs.get(1)?) * size;
            all.saturating_sub(trace.tensor(first).bytes().0)
        }
        Operator::Expert(Expert::WeightedPermute) if weighs(lowering, trace, first) => {
            wide(trace, output)
        }
        _ => 0,
    };
    (more > 0).then_some(Bytes(more))
}

/// Whether this is the router's product, and reads 32-bit casts of its operands, the first of which is given.
fn is_router(
    lowering: &Lowering<'_>,
    trace: &Trace,
    operator: Operator,
    operand: TensorId,
) -> bool {
    lowering.has(Rewrite::GateInF32)
        && matches!(
            operator,
            Operator::Product(Product::Matmul(_, Site::Router))
        )
        && is_narrow(trace, operand)
}

/// Adds the kernels that cast, and what the product of rows and weights moves in 32 bits beyond its traffic in 16.
pub(super) fn with_casts(
    lowering: &Lowering<'_>,
    trace: &Trace,
    op: &AnyOp<'_>,
    mut kernels: Vec<Kernel>,
) -> Vec<Kernel> {
    let chain = of_router(lowering, trace, op).or_else(|| of_rows(lowering, trace, op));
    let beside = chain.and_then(|chain| Some(kernels.first()?.beside(chain)));
    kernels.extend(beside);
    kernels
}

/// The casts of the router's operands; in backward, that of the tokens' gradient. The weight's is small.
fn of_router(lowering: &Lowering<'_>, trace: &Trace, op: &AnyOp<'_>) -> Option<Chain> {
    let cast = match op.pass {
        Pass::Forward => op.inputs,
        Pass::BackwardInput | Pass::BackwardWeight => op.outputs,
    };
    is_router(lowering, trace, op.operator, *cast.first()?).then(|| Chain {
        bytes: Bytes(cast.iter().map(|&id| elements(trace, id) * CAST).sum()),
        launches: cast.len() as u32,
    })
}

/// What 32 bits add where rows are multiplied by the router's weights: two casts, and wider rows for the operators between them. In
/// backward these are two products, one with the weights and one with the rows, and the sum of the latter.
fn of_rows(lowering: &Lowering<'_>, trace: &Trace, op: &AnyOp<'_>) -> Option<Chain> {
    let forward = op.pass == Pass::Forward;
    let (rows, all) = match (op.operator, forward) {
        (Operator::Expert(Expert::Unpermute), true) => {
            let all = all_rows(trace, *op.outputs.first()?, *op.inputs.get(1)?);
            (*op.inputs.first()?, all)
        }
        (Operator::Expert(Expert::Unpermute), false) => {
            let all = all_rows(trace, *op.inputs.first()?, *op.outputs.get(1)?);
            (*op.outputs.first()?, all)
        }
        (Operator::Expert(Expert::WeightedPermute), false) => {
            let rows = *op.inputs.first()?;
            (rows, elements(trace, rows))
        }
        (Operator::Expert(Expert::WeightedPermute), true) => {
            let rows = *op.outputs.first()?;
            (rows, elements(trace, rows))
        }
        _ => return None,
    };
    let own = elements(trace, rows);
    let others = all.saturating_sub(own) * if forward { ZEROS } else { ZEROS_BACKWARD };
    let tensors = if forward { 2 } else { 2 + 3 + 1 };
    let weighs = weighs(lowering, trace, rows);
    let wider = u64::from(weighs) * own * (2 * CAST + tensors * (WIDE - NARROW));
    (others + wider > 0).then_some(Chain {
        bytes: Bytes(others + wider),
        launches: 2 * u32::from(weighs),
    })
}

/// Bytes moved per element of other ranks' rows: written as zeros, cast to 32 bits and multiplied by the router's weights.
const ZEROS: u64 = NARROW + CAST + WIDE;
/// Bytes moved per element of other ranks' rows in backward: the gradient of the product is written, and cast; the product for the
/// router's weights reads the rows.
const ZEROS_BACKWARD: u64 = WIDE + CAST + WIDE;

/// Number of elements of the rows that a rank adds up into tokens. If each rank has all tokens, and a share of their rows, those of other
/// ranks are there as zeros (pytorch/torchtitan v0.2.2, `models/moe/moe.py`, `routed_output_unsorted`).
fn all_rows(trace: &Trace, tokens: TensorId, weights: TensorId) -> u64 {
    let chosen = trace.tensor(weights).shape.last().copied().unwrap_or(1);
    elements(trace, tokens) * chosen
}

fn weighs(lowering: &Lowering<'_>, trace: &Trace, rows: TensorId) -> bool {
    lowering.has(Rewrite::WeighRowsInF32) && is_narrow(trace, rows)
}

/// Bytes of a 16-bit number.
const NARROW: u64 = 2;
/// Bytes that are read and written to cast one number from 32 bits to 16, or from 16 to 32.
const CAST: u64 = WIDE + NARROW;

fn is_narrow(trace: &Trace, id: TensorId) -> bool {
    trace.tensor(id).dtype.size() < DType::F32.size()
}

fn elements(trace: &Trace, id: TensorId) -> u64 {
    trace.tensor(id).elements()
}

/// Bytes of the map from tokens to rows, given the scores of all experts.
fn row_map(trace: &Trace, scores: TensorId) -> u64 {
    let experts = trace.tensor(scores).shape.last().copied().unwrap_or(1);
    let tokens = elements(trace, scores) / experts;
    tokens * (2 * experts + 1) * WIDE
}

/// Bytes of a tensor in 32 bits.
fn wide(trace: &Trace, id: TensorId) -> u64 {
    elements(trace, id) * WIDE
}

/// Bytes by which a tensor is larger in 32 bits than in its own type.
fn wider(trace: &Trace, id: TensorId) -> u64 {
    wide(trace, id).saturating_sub(trace.tensor(id).bytes().0)
}

#[cfg(test)]
mod tests {
    use catalog::Model;
    use models::BlockLayout;
    use plans::Recompute;

    use super::*;
    use crate::lower::KernelKind;
    use crate::lower::testing::{HIDDEN, TOKENS, layer, model, runtime};

    /// A model with four experts, of which a token chooses two.
    fn experts() -> Model {
        model(
            "mixtral",
            r#", "num_local_experts": 4, "num_experts_per_tok": 2"#,
        )
    }

    /// Bytes that a layer keeps and moves, in forward and backward, beyond those of the same runtime without both rewrites, and its
    /// further launches.
    fn added(name: &str, model: &Model, dtype: DType) -> (u64, [(u64, u32); 2]) {
        let trace = layer(model, &BlockLayout::alone(1, TOKENS, dtype));
        let mut without = runtime(name);
        without.rewrites.remove(&Rewrite::WeighRowsInF32);
        without.rewrites.remove(&Rewrite::GateInF32);
        let [(a, x), (b, y)] = [runtime(name), without].map(|runtime| {
            let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
            let saved = lowering.saved(&trace, Recompute::None);
            let lowered = lowering.lower(&trace);
            let moved = [lowered.forward, lowered.backward].map(|kernels| {
                let of = |kernel: &Kernel| match kernel.kind {
                    KernelKind::Memory {
                        bytes, launches, ..
                    } => (bytes.0, launches),
                    _ => (0, 0),
                };
                let all = kernels.iter().map(of);
                all.fold((0, 0), |(a, b), (c, d)| (a + c, b + d))
            });
            (saved.iter().map(|(_, bytes)| bytes.0).sum::<u64>(), moved)
        });
        let moved = [0, 1].map(|pass| (x[pass].0 - y[pass].0, x[pass].1 - y[pass].1));
        (a - b, moved)
    }

    #[test]
    fn megatron_core_keeps_a_map_of_rows_and_scores_in_32_bits() {
        let trace = layer(&experts(), &BlockLayout::alone(1, TOKENS, DType::Bf16));
        for (name, want) in [
            ("megatron-core", TOKENS * (9 * 4 + 4 * 2)),
            // It has lists of its own.
            ("vescale-cuda", 0),
            ("nanotron", 0),
        ] {
            let runtime = runtime(name);
            let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
            let saved = lowering.saved(&trace, Recompute::None).into_iter();
            let routing = saved.filter(|(name, _)| name.ends_with("for routing in 32 bits"));
            let bytes: u64 = routing.map(|(_, bytes)| bytes.0).sum();
            assert_eq!(bytes, want, "{name}");
        }
    }

    #[test]
    fn eager_torchtitan_keeps_and_moves_rows_and_tokens_in_32_bits() {
        let experts = experts();
        let (tokens, weight) = (TOKENS * HIDDEN, 4 * HIDDEN);
        let rows = 2 * tokens;
        let weighing = [(rows * 16, 2), (rows * 24, 2)];
        // Tokens no longer in 16 bits; the weight; softmax over four experts.
        let gate = 2 * tokens + 4 * weight + 2 * 4 * TOKENS;
        let both = [
            (rows * 16 + 6 * (tokens + weight), 4),
            (rows * 24 + 6 * tokens, 3),
        ];
        let none = (0, [(0, 0); 2]);
        for (runtime, dtype, want) in [
            ("torchtitan", DType::Bf16, (2 * rows, weighing)),
            ("torchtitan-2026", DType::Bf16, (2 * rows + gate, both)),
            ("torchtitan-2026", DType::F32, none),
            // Of 2025, which compiles a layer's modules but not what is between them.
            ("torchtitan-compile-2025", DType::Bf16, (2 * rows, weighing)),
            ("torchtitan-compile-2026", DType::Bf16, none),
            ("fsdp2", DType::Bf16, none),
        ] {
            assert_eq!(added(runtime, &experts, dtype), want, "{runtime} {dtype:?}");
        }
        let dense = model("llama", "");
        assert_eq!(added("torchtitan-2026", &dense, DType::Bf16), none, "dense");
    }
}
