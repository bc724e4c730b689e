//! Memory that a gated activation keeps for backward in addition to gate and up, where several
//! kernels compute it.

use catalog::Bytes;
use catalog::runtime::Rewrite;
use dtensor::{GatedUnit, Op, Operator, Pointwise, Trace};

use super::lowering::Lowering;

/// Bytes that a gated activation keeps in addition to its inputs and its result. `None` if the operator is no gated activation, or
/// keeps nothing more.
///
/// - As PyTorch's operators, `f(g)·u` keeps `f(g)`, which the product reads.
/// - As PyTorch's operators, gpt-oss's keeps the clamped gate, its sigmoid, their product, and `u + 1`; each clamp keeps its input
///   (transformers, `GptOssExperts._apply_gate`).
/// - Megatron-Core clamps gate and up and joins them before a kernel that keeps the joined tensor (NVIDIA/Megatron-LM@d98e8a6,
///   `core/fusions/fused_bias_geglu.py`, `weighted_bias_quick_geglu_impl`).
pub(super) fn kept(lowering: &Lowering<'_>, trace: &Trace, op: &Op) -> Option<Bytes> {
    let Operator::Pointwise(Pointwise::Gated(unit) | Pointwise::FusedGated(unit)) = op.operator
    else {
        return None;
    };
    let fused = lowering.has(Rewrite::FuseSwiglu) || lowering.has(Rewrite::FusePointwise);
    let tensors = match unit {
        GatedUnit::Bounded(_) if lowering.runs_experts_apart() => 2,
        _ if fused => return None,
        GatedUnit::Plain(_) => 1,
        GatedUnit::Bounded(_) => 4,
    };
    Some(trace.tensor(op.outputs[0]).bytes() * tensors)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower::testing::layer_of;

    /// What the gated activations of a model's first layer keep beside their inputs, over the bytes of their results.
    fn tensors(model: &str, runtime: &str) -> u64 {
        let trace = layer_of(model);
        let runtime = catalog::load::runtime(runtime).expect("a preset");
        let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
        let bytes = |op: &Op| kept(&lowering, &trace, op).map(|bytes| (bytes, op.outputs[0]));
        let all = trace.forward.iter().filter_map(bytes);
        all.map(|(bytes, result)| bytes.0 / trace.tensor(result).bytes().0)
            .sum()
    }

    #[test]
    fn unfused_activations_keep_what_their_kernels_hand_on() {
        for (model, runtime, expected) in [
            ("llama3-8b", "megatron-core", 0),
            ("llama3-8b", "torchtitan-compile", 0),
            ("llama3-8b", "vescale", 0),
            ("llama3-8b", "torchtitan", 1),
            ("llama3-8b", "hf-deepspeed", 1),
            ("gpt-oss-20b", "megatron-core", 2),
            ("gpt-oss-20b", "hf-trainer", 4),
        ] {
            assert_eq!(tensors(model, runtime), expected, "{model}, {runtime}");
        }
    }
}
