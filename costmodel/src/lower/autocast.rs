//! What modules keep for backward under `torch.autocast` beyond the trace's tensors, which have the type of the activations.
//!
//! Embeddings and norms are no operators that autocast runs in 16 bits, so the sum of all layers' outputs has 32, and so have the
//! inputs and results of norms. A linear layer casts its input; several that read one tensor cast it once each, because autocast
//! remembers casts of parameters only (PyTorch's `autocast_mode.cpp`, `cached_cast`).

use catalog::model::NormKind;
use catalog::{Bytes, DType};
use dtensor::{Norm, Op, Operator, Pointwise, Product, TensorId, TensorRole, Trace};

use super::lowering::Lowering;
use super::tensor_set::TensorSet;

/// Bytes that the norm of an operator keeps in addition to its input and to one copy of its result in the type of activations;
/// `None` if it is no norm, or nothing is cast. `seen` are the tensors that norms before it keep in 32 bits.
pub(super) fn kept_by_norm(
    lowering: &Lowering<'_>,
    trace: &Trace,
    op: &Op,
    seen: &mut TensorSet,
) -> Option<Bytes> {
    let kind = kind(op)?;
    let input = trace.tensor(op.inputs[0]);
    if !lowering.autocasts(input.dtype) {
        return None;
    }
    let (narrow, wide) = (input.dtype.size(), DType::F32.size());
    // A part of a larger tensor is copied to 32 bits; the larger tensor stays for the sake of its other parts.
    let mut views = trace.forward_views.iter();
    let part = views.any(|view| view.to == op.inputs[0]);
    let of_input = match (part, seen.insert(op.inputs[0])) {
        (true, _) => wide,
        (false, true) => wide - narrow,
        (false, false) => 0,
    };
    // Llama's norm, which is made of elementary operators, keeps the normalised input for its product with the weight.
    let normalised = match kind {
        NormKind::RmsNorm => wide,
        NormKind::LayerNorm => 0,
    };
    let casts = readers(trace, op.outputs[0]).saturating_sub(1) * narrow;
    Some(Bytes(input.elements() * (of_input + normalised + casts)))
}

/// Bytes that the inputs of a block take beyond the type of activations, as far as these come from the layers before it.
pub(super) fn wider_inputs(lowering: &Lowering<'_>, trace: &Trace) -> Bytes {
    let inputs = trace.tensors.iter().enumerate();
    let inputs = inputs.filter(|(index, t)| {
        t.role == TensorRole::Input && t.storage.0 as usize == *index && lowering.autocasts(t.dtype)
    });
    inputs
        .map(|(_, t)| Bytes(t.elements() * (DType::F32.size() - t.dtype.size())))
        .sum()
}

fn kind(op: &Op) -> Option<NormKind> {
    match op.operator {
        Operator::Norm(Norm { kind, .. }) => Some(kind),
        Operator::Pointwise(Pointwise::UnitNorm { .. }) => Some(NormKind::RmsNorm),
        _ => None,
    }
}

/// How many linear layers read a tensor.
fn readers(trace: &Trace, id: TensorId) -> u64 {
    let products = trace.forward.iter();
    let reads = |op: &&Op| {
        matches!(op.operator, Operator::Product(Product::Matmul(..))) && op.inputs[0] == id
    };
    products.filter(reads).count() as u64
}

#[cfg(test)]
mod tests {
    use models::{BlockClass, BlockLayout};
    use plans::Recompute;

    use super::*;

    const TOKENS: u64 = 32;
    const HIDDEN: u64 = 64;

    /// Bytes that a layer keeps, for each token and element of the hidden state, under a runtime that may autocast.
    fn kept(json: &str, runtime: &str, recompute: Recompute) -> f64 {
        let model = catalog::hf::decode(json, "test", "test").expect("a model");
        let runtime = catalog::load::runtime(runtime).expect("a preset");
        let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
        let class = BlockClass::Layer(model.layer_class(0));
        let layout = BlockLayout::alone(1, TOKENS, DType::Bf16);
        let trace = models::trace_block(&model, class, &layout).expect("a block");
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

    #[test]
    fn norms_keep_32_bits() {
        // What is kept beyond the trace's tensors, in bytes: of Llama's two norms each input 2 more and the normalised input 4,
        // and one more copy for every linear layer but the first: two in attention, one in the feed-forward part.
        let cases = [
            (model("llama", ""), 2.0 * (2.0 + 4.0) + 3.0 * 2.0),
            // Its norms of queries and keys too. One layer reads them, and they are tensors of their own.
            (model("qwen3", ""), 4.0 * (2.0 + 4.0) + 3.0 * 2.0),
        ];
        for (json, more) in cases {
            let narrow = kept(&json, "fsdp2", Recompute::None);
            let wide = kept(&json, "hf-trainer", Recompute::None);
            assert!(
                (wide - narrow - more).abs() < 1e-9,
                "{json}: {narrow} {wide}"
            );
            let narrow = kept(&json, "fsdp2", Recompute::Full);
            let wide = kept(&json, "hf-trainer", Recompute::Full);
            assert!(
                (wide - narrow - 2.0).abs() < 1e-9,
                "{json}: {narrow} {wide}"
            );
        }
    }
}
