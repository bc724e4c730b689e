//! Memory of an RMSNorm that PyTorch computes by elementary operators in 32 bits (transformers `LlamaRMSNorm`): its input is cast to
//! 32 bits, normalised, cast back, and multiplied by the weight.

use catalog::model::NormKind;
use catalog::runtime::Rewrite;
use catalog::{Bytes, DType};
use dtensor::{Norm, Op, Operator, Pointwise, TensorRole, Trace};

use super::autocast;
use super::lowering::Lowering;
use super::tensor_set::TensorSet;

/// Bytes that an RMSNorm by elementary operators keeps in addition to its input and result. The
/// square keeps the input in 32 bits instead of the input; the product with a trained weight keeps
/// the normalised input. `None` for other operators. `seen` has the inputs of earlier norms.
pub(super) fn kept(
    lowering: &Lowering<'_>,
    trace: &Trace,
    op: &Op,
    seen: &mut TensorSet,
) -> Option<Bytes> {
    let input = trace.tensor(op.inputs[0]);
    let (narrow, wide) = (input.dtype.size(), DType::F32.size());
    let fused = lowering.has(Rewrite::FuseNorm) || lowering.has(Rewrite::FusePointwise);
    if fused || !lowering.has(Rewrite::NormInF32) || narrow == wide {
        return None;
    }
    let normalised = match op.operator {
        Operator::Norm(Norm {
            kind: NormKind::RmsNorm,
            from_one,
            ..
        }) => {
            let trained = trace.tensor(op.inputs[1]).role != TensorRole::Frozen;
            // `1 + weight` is multiplied in 32 bits (transformers `Gemma2RMSNorm`).
            u64::from(trained) * if from_one { wide } else { narrow }
        }
        Operator::Pointwise(Pointwise::UnitNorm { .. }) => 0,
        _ => return None,
    };
    // A part of a tensor that is kept whole for something else, and an input that another norm reads too, count already.
    let replaces = !autocast::is_part(trace, op.inputs[0]) && seen.insert(op.inputs[0]);
    let of_input = if replaces { wide - narrow } else { wide };
    Some(Bytes(input.elements() * (of_input + normalised)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower::testing::layer_of;

    /// Bytes for each element of their inputs that the norms of a model's first layer keep beside the 16-bit input.
    fn per_element(model: &str, runtime: &str) -> Vec<u64> {
        let trace = layer_of(model);
        let runtime = catalog::load::runtime(runtime).expect("a preset");
        let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
        let mut seen = TensorSet::new(&trace);
        let mut all = Vec::new();
        for op in &trace.forward {
            let bytes = kept(&lowering, &trace, op, &mut seen);
            all.extend(bytes.map(|b| b.0 / trace.tensor(op.inputs[0]).elements()));
        }
        all
    }

    #[test]
    fn a_chain_keeps_its_input_in_32_bits_and_the_normalised_one() {
        let none: &[u64] = &[];
        for (model, runtime, expected) in [
            // 4 bytes of input instead of 2, and 2 of what the weight multiplies.
            ("llama3-8b", "hf-deepspeed", &[4, 4][..]),
            // Norms of queries and keys too.
            ("qwen3-8b", "hf-deepspeed", &[4, 4, 4, 4]),
            // What the weight multiplies has 32 bits.
            ("gemma2-9b", "hf-deepspeed", &[6, 6, 6, 6]),
            ("llama3-8b", "torchtitan", none),
            ("llama3-8b", "megatron-core", none),
            ("gpt2", "hf-deepspeed", none),
        ] {
            assert_eq!(per_element(model, runtime), expected, "{model}, {runtime}");
        }
    }
}
