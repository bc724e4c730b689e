//! Memory that `torch.autocast` adds to what is kept for backward. In the trace all activations have 16 bits. Under autocast some
//! have 32, and some exist more than once:
//! - Embeddings and norms are computed in 32 bits, and so the residual stream, which norms read, has 32 bits. If FSDP gathers
//!   parameters in 16 bits, that holds only for what LayerNorm copies and returns.
//! - Every linear layer casts its input to 16 bits and keeps the copy. Layers that read the same tensor each make their own, because
//!   autocast caches casts of parameters only (PyTorch's `autocast_mode.cpp`, `cached_cast`).
//! - An adapter of 32 bits casts its input to 32 bits (PEFT, `tuners/lora/layer.py`, `_cast_input_dtype`). So it keeps a 16-bit copy of its
//!   own even of a tensor of 16 bits.

use catalog::model::NormKind;
use catalog::{Bytes, DType};
use dtensor::{
    CostClass, Norm, Op, Operator, Pointwise, Product, Site, TensorId, TensorInfo, TensorRole,
    Trace,
};

use super::lowering::Lowering;
use super::tensor_set::TensorSet;

/// Bytes that a norm under autocast keeps in addition to its input and its result in 16 bits. `None` if the operator is no norm, or
/// its result has 16 bits. `seen` holds the inputs of the norms before it, which are counted once.
pub(super) fn kept_by_norm(
    lowering: &Lowering<'_>,
    trace: &Trace,
    op: &Op,
    seen: &mut TensorSet,
) -> Option<Bytes> {
    let kind = kind(op).filter(|_| returns_32_bits(lowering, trace, op))?;
    let input = trace.tensor(op.inputs[0]);
    let (narrow, wide) = (input.dtype.size(), DType::F32.size());
    let of_input = match (is_part(trace, op.inputs[0]), seen.insert(op.inputs[0])) {
        (true, _) => wide,
        (false, true) => wide - narrow,
        // A residual stream of 32 bits is there already.
        (false, false) if lowering.widens_stream(input.dtype) => 0,
        (false, false) => wide,
    };
    // Llama's norm consists of elementary operators. The last, the product with the weight, keeps the normalised input.
    let normalised = match kind {
        NormKind::RmsNorm => wide,
        NormKind::LayerNorm => 0,
    };
    let keep = |of: &&Op| !of.saved.is_empty();
    let copies = products(trace, op.outputs[0]).filter(keep).count() as u64;
    let casts = copies.saturating_sub(1) * narrow;
    Some(Bytes(input.elements() * (of_input + normalised + casts)))
}

/// Whether an operator is a norm that autocast computes in 32 bits, and whose result has 32 bits.
fn returns_32_bits(lowering: &Lowering<'_>, trace: &Trace, op: &Op) -> bool {
    let input = || trace.tensor(op.inputs[0]).dtype;
    kind(op).is_some_and(|kind| match kind {
        NormKind::RmsNorm => lowering.widens_stream(input()),
        NormKind::LayerNorm => lowering.autocasts(input()),
    })
}

/// Bytes of the 16-bit copy that an adapter's first layer keeps of its input, in addition to what
/// the trace keeps of that tensor: the trace keeps it once for all its readers, which is the copy
/// of the first adapter unless another operator needs the tensor itself. `None` if the operator is
/// no such layer or makes no further copy.
pub(super) fn kept_by_adapter(lowering: &Lowering<'_>, trace: &Trace, op: &Op) -> Option<Bytes> {
    if !casts_for_adapter(lowering, trace, op) {
        return None;
    }
    let input = trace.tensor(op.inputs[0]);
    let same = |id: &TensorId| trace.tensor(*id).storage == input.storage;
    let mut adapters = trace
        .forward
        .iter()
        .filter(|op| is_first_of_adapter(trace, op));
    let first = adapters.find(|op| same(&op.inputs[0]));
    let mut others = trace
        .forward
        .iter()
        .filter(|op| !is_first_of_adapter(trace, op));
    let mut attended = trace
        .attentions
        .iter()
        .map(|of| trace.forward[of.context].outputs[0]);
    let itself = others.any(|op| op.saved.iter().any(same))
        || lowering.fuses_attention(trace) && attended.any(|id| same(&id));
    let further = itself || first.is_some_and(|first| !std::ptr::eq(first, op));
    further.then(|| input.bytes())
}

/// Whether an operator is an adapter's first layer, and its input of 16 bits is cast to 32 bits, the type of the adapter's weights, and
/// back to 16 by autocast.
pub(super) fn casts_for_adapter(lowering: &Lowering<'_>, trace: &Trace, op: &Op) -> bool {
    let source = match dropout_before(trace, op) {
        Some(dropout) => maker(trace, dropout),
        None => maker(trace, op),
    };
    is_first_of_adapter(trace, op)
        && lowering.casts_for_adapters(trace.tensor(op.inputs[0]).dtype)
        && !source.is_some_and(|norm| returns_32_bits(lowering, trace, norm))
}

/// The dropout that makes another operator's first input; `None` if another operator makes it.
pub(super) fn dropout_before<'t>(trace: &'t Trace, op: &Op) -> Option<&'t Op> {
    maker(trace, op).filter(|of| of.operator.cost() == CostClass::Dropout)
}

/// Whether an operator is the first of an adapter's two layers: its input is not what another layer of an adapter returned.
fn is_first_of_adapter(trace: &Trace, op: &Op) -> bool {
    let of_adapter = |op: &Op| {
        matches!(
            op.operator,
            Operator::Product(Product::Matmul(_, Site::Adapter))
        )
    };
    of_adapter(op) && !maker(trace, op).is_some_and(of_adapter)
}

/// The operator that makes another's first input.
fn maker<'t>(trace: &'t Trace, op: &Op) -> Option<&'t Op> {
    let mut ops = trace.forward.iter();
    ops.find(|other| other.outputs.contains(&op.inputs[0]))
}

/// Bytes that a block's input takes under autocast in addition to its size in 16 bits.
pub(super) fn wider_inputs(lowering: &Lowering<'_>, trace: &Trace) -> Bytes {
    let wider = inputs(trace).filter(|t| lowering.widens_stream(t.dtype));
    wider
        .map(|t| Bytes(t.elements() * (DType::F32.size() - t.dtype.size())))
        .sum()
}

/// The tensors that a block is given, without views of them.
pub(super) fn inputs(trace: &Trace) -> impl Iterator<Item = &TensorInfo> {
    let inputs = (0..).zip(&trace.tensors);
    inputs
        .filter(|(index, t)| t.role == TensorRole::Input && t.storage.0 == *index)
        .map(|(_, t)| t)
}

/// Whether a norm's input is a part of a larger tensor, as queries and keys are of one tensor with the values. The norm keeps a copy
/// of its part in 32 bits, and the values keep the whole tensor in 16.
pub(super) fn is_part(trace: &Trace, input: TensorId) -> bool {
    let mut views = trace.forward_views.iter();
    views.any(|view| view.to == input)
}

fn kind(op: &Op) -> Option<NormKind> {
    match op.operator {
        Operator::Norm(Norm { kind, .. }) => Some(kind),
        Operator::Pointwise(Pointwise::UnitNorm { .. }) => Some(NormKind::RmsNorm),
        _ => None,
    }
}

/// How many linear layers read a tensor.
pub(super) fn readers(trace: &Trace, id: TensorId) -> u64 {
    products(trace, id).count() as u64
}

/// The linear layers that read a tensor.
fn products(trace: &Trace, id: TensorId) -> impl Iterator<Item = &Op> {
    let reads = move |op: &&Op| {
        matches!(op.operator, Operator::Product(Product::Matmul(..))) && op.inputs[0] == id
    };
    trace.forward.iter().filter(reads)
}

#[cfg(test)]
mod tests {
    use models::BlockLayout;
    use plans::Recompute;

    use super::*;
    use crate::execution::Execution;
    use crate::lower::testing::{HIDDEN, TOKENS, layer};

    /// Bytes that a layer keeps for backward, divided by the number of tokens and the hidden size.
    fn kept(json: &str, runtime: &str, recompute: Recompute) -> f64 {
        let model = catalog::hf::decode(json, "test", "test").expect("a model");
        let runtime = catalog::load::runtime(runtime).expect("a preset");
        let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
        let trace = layer(&model, &BlockLayout::alone(1, TOKENS, DType::Bf16));
        let saved = lowering.saved(&trace, recompute).into_iter();
        let bytes: Bytes = saved.map(|(_, bytes)| bytes).sum();
        bytes.as_f64() / (TOKENS * HIDDEN) as f64
    }

    fn model(kind: &str, more: &str) -> String {
        format!(
            r#"{{"model_type": "{kind}", "hidden_size": {HIDDEN}, "num_hidden_layers": 1, "num_attention_heads": 4,
                "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 128, "head_dim": 16,
                "max_position_embeddings": 64, "rms_norm_eps": 1e-5{more}}}"#
        )
    }

    /// Adapters beside queries, keys and values share the norm's result, those beside gate and up another; the output projection reads what
    /// attention keeps itself. The input of the last has no other reader that keeps it.
    #[test]
    fn adapters_of_32_bits_keep_copies_of_their_own() {
        let model = catalog::hf::decode(&model("llama", ""), "test", "test").expect("a model");
        let adapters = Some("rank=4".parse().expect("adapters"));
        let model = model.with_adapters(adapters).expect("a model");
        let trace = layer(&model, &BlockLayout::alone(1, TOKENS, DType::Bf16));
        let runtime = catalog::load::runtime("hf-trainer").expect("a preset");
        let [narrow, wide] = [false, true].map(|wide_adapters| {
            let execution = Execution {
                narrow_parameters: true,
                wide_adapters,
                ..Execution::own(&runtime)
            };
            let lowering = Lowering::of(&runtime, &execution);
            let saved = lowering.saved(&trace, Recompute::None).into_iter();
            saved.map(|(_, bytes)| bytes.0).sum::<u64>()
        });
        assert_eq!(wide - narrow, (2 + 1 + 1) * 2 * TOKENS * HIDDEN);
    }

    /// The backward of a fused attention kernel reads the kernel's result, whether the output projection keeps it or not.
    #[test]
    fn attention_keeps_its_output_where_the_projection_is_frozen() {
        let model = catalog::hf::decode(&model("llama", ""), "test", "test").expect("a model");
        for runtime in ["hf-trainer", "megatron-core", "fsdp2"] {
            let runtime = catalog::load::runtime(runtime).expect("a preset");
            for modules in ["qkv", "qkv+proj"] {
                let adapters = format!("rank=4,modules={modules}").parse();
                let model = (model.clone()).with_adapters(Some(adapters.expect("adapters")));
                let layout = BlockLayout::alone(1, TOKENS, DType::Bf16);
                let trace = layer(&model.expect("a model"), &layout);
                let output = trace.forward[trace.attentions[0].context].outputs[0];
                let output = trace.tensor(trace.tensor(output).storage);
                let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
                let saved = lowering.saved(&trace, Recompute::None);
                let kept = saved.contains(&(output.name.clone(), output.bytes()));
                assert!(kept, "{modules} {}", runtime.name);
            }
        }
    }

    #[test]
    fn norms_keep_32_bits() {
        // Bytes that autocast adds. Each of Llama's two norms has 2 more for its input and 4 for the normalised input. Three linear
        // layers read the first norm and two the second, so there are three copies in 16 bits beyond the first of each.
        let cases = [
            (model("llama", ""), 2.0 * (2.0 + 4.0) + 3.0 * 2.0),
            // Qwen3 also has norms of queries and keys, which come from separate linear layers.
            (model("qwen3", ""), 4.0 * (2.0 + 4.0) + 3.0 * 2.0),
        ];
        for (json, more) in cases {
            for (recompute, more) in [(Recompute::None, more), (Recompute::Full, 2.0)] {
                let [narrow, wide] = ["fsdp2", "hf-trainer"].map(|of| kept(&json, of, recompute));
                assert!(
                    (wide - narrow - more).abs() < 1e-9,
                    "{json}: {narrow} {wide}"
                );
            }
        }
    }
}
