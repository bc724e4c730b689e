//! Activation recomputation: which kernels of a block's forward pass are launched a second time, just before its backward
//! pass.

use catalog::Axis;
use catalog::runtime::Rewrite;
use dtensor::{Collective, CollectiveKind, Trace};
use plans::Recompute;

use super::checkpoint;
use super::kernel::{Kernel, KernelKind, Lowered};
use super::lowering::Lowering;
use super::modules;
use super::norm_copies;
use super::rearranged;
use super::saved::{reruns_attention, saved_by, selected_products};
use super::tensor_set::TensorSet;

/// The kernels that recomputation launches a second time. Each is given by its index in `lowered.forward`.
#[must_use]
pub fn recomputed(
    lowering: &Lowering<'_>,
    trace: &Trace,
    lowered: &Lowered,
    recompute: Recompute,
) -> Vec<usize> {
    if recompute == Recompute::None && !lowering.has(Rewrite::NormOnCopy) {
        return Vec::new();
    }
    let selected = selected_products(lowering, trace);
    let modules = modules::selected(lowering, trace, recompute);
    let of_norm =
        |kernel: &Kernel| norm_copies::runs_again(lowering, trace, &trace.forward[kernel.op]);
    let chosen = |kernel: &Kernel| match recompute {
        Recompute::None => false,
        Recompute::Selective | Recompute::Modules(_) => {
            let op = &trace.forward[kernel.op];
            let attention = op.attention().is_some() && lowering.selects_attention(recompute);
            // `op` is only the first operator of a fused kernel. The selected operator may come later in the kernel, as an
            // activation does after its bias; the kernel's results show it.
            let mut results = op.outputs.iter().chain(&kernel.writes);
            attention || results.any(|output| modules.contains(output))
        }
        Recompute::Full | Recompute::Layers(_) | Recompute::Falling(_) => true,
        Recompute::SelectiveOps => match kernel.kind {
            KernelKind::Scan(_) => true,
            KernelKind::Memory { .. } => {
                let of = rearranged::serves(trace, kernel);
                of.is_none_or(|of| of.kind == CollectiveKind::AllGather)
            }
            KernelKind::Gemm { .. } | KernelKind::GroupedGemm { .. } => {
                !selected.contains(&trace.forward[kernel.op].outputs[0])
            }
            // The gather of PyTorch's ring is a part of attention, whose result is kept.
            KernelKind::Comm(Collective { axis: Axis::Cp, .. })
                if lowering.has(Rewrite::RingInPytorch) =>
            {
                reruns_attention(lowering, recompute)
            }
            KernelKind::Comm(c) => c.kind == CollectiveKind::AllGather,
            KernelKind::BatchedGemm { .. } | KernelKind::Attention(_) => {
                reruns_attention(lowering, recompute)
            }
        },
    };
    let covered = checkpoint::covered(trace);
    let end = if lowering.has(Rewrite::EarlyStopRecompute) {
        last_needed(lowering, trace, lowered, covered)
    } else {
        lowered.forward.len()
    };
    let again = |kernel: &Kernel| kernel.op < covered && chosen(kernel) || of_norm(kernel);
    (0..end).filter(|&i| again(&lowered.forward[i])).collect()
}

/// Number of forward kernels up to and including the last one whose result the backward pass of the first `covered` operators
/// needs. A recomputation that stops early leaves out all kernels after that one.
fn last_needed(lowering: &Lowering<'_>, trace: &Trace, lowered: &Lowered, covered: usize) -> usize {
    let saved = |op| saved_by(lowering, trace, op, Recompute::None);
    let saved = trace.forward[..covered].iter().flat_map(saved);
    let read = TensorSet::of(trace, saved.map(|id| trace.tensor(id).storage));
    lowered
        .forward
        .iter()
        .rposition(|kernel| {
            kernel
                .writes
                .iter()
                .any(|&id| read.contains(trace.tensor(id).storage))
        })
        .map_or(0, |last| last + 1)
}

#[cfg(test)]
mod tests {
    use catalog::{DType, RecomputeModule};
    use dtensor::Operator;
    use models::BlockLayout;

    use super::*;
    use crate::lower::testing::layer;

    /// The number of activations (such as GELU or SwiGLU) that are computed a second time when `module` is recomputed.
    fn activations(json: &str, module: RecomputeModule) -> usize {
        let model = catalog::hf::decode(json, "test", "test").expect("a model");
        let runtime = catalog::load::runtime("megatron-core").expect("a preset");
        let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
        let trace = layer(&model, &BlockLayout::alone(1, 64, DType::Bf16));
        let lowered = lowering.lower(&trace);
        let recompute = Recompute::Modules([module].into_iter().collect());
        let results = trace.forward.iter().filter(
            |op| matches!(op.operator, Operator::Pointwise(of) if modules::is_activation(of)),
        );
        let results: Vec<_> = results.flat_map(|op| &op.outputs).collect();
        let again = recomputed(&lowering, &trace, &lowered, recompute);
        let writes = |index: &usize| &lowered.forward[*index].writes;
        let of_activation = |index: &usize| writes(index).iter().any(|id| results.contains(&id));
        again.iter().filter(|index| of_activation(index)).count()
    }

    /// Backward of a layer of Llama reads no result of the last product, the down projection.
    #[test]
    fn checkpoints_that_stop_early_leave_out_the_last_product() {
        let model = catalog::load::model("llama3-8b").expect("a preset");
        for (runtime, stops_early) in [
            ("fsdp2", true),
            ("hf-trainer", true),
            ("hf-trainer-2021", false),
            ("deepspeed", false),
            ("hf-deepspeed", true),
            ("hf-deepspeed-2021", false),
            ("torchtitan", false),
            ("torchtitan-2026", false),
            ("torchtitan-compile", true),
            ("torchtitan-compile-2025", true),
            ("torchtitan-compile-2026", true),
        ] {
            let of = catalog::load::runtime(runtime).expect("a preset");
            let lowering = Lowering::new(&of, of.fp8_recipe);
            let trace = layer(&model, &BlockLayout::alone(1, 64, DType::Bf16));
            let lowered = lowering.lower(&trace);
            let is_product =
                |index: &usize| matches!(lowered.forward[*index].kind, KernelKind::Gemm { .. });
            let last = (0..lowered.forward.len()).rev().find(is_product);
            let again = recomputed(&lowering, &trace, &lowered, Recompute::Full);
            let repeated = last.is_some_and(|last| again.contains(&last));
            assert_eq!(repeated, !stops_early, "{runtime}");
        }
    }

    /// GPT-OSS and GPT-2 add a bias before the activation, and one fused kernel does both. Llama has no bias.
    #[test]
    fn a_selected_activation_runs_again_with_the_bias_in_its_kernel() {
        use RecomputeModule::{ExpertActivation, Mlp, Norms};
        let gpt_oss = r#"{"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 8,
            "num_experts_per_tok": 2, "vocab_size": 128, "max_position_embeddings": 64, "sliding_window": 32}"#;
        let gpt2 = r#"{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128}"#;
        let llama = r#"{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128, "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5}"#;
        for (json, module) in [(gpt_oss, ExpertActivation), (gpt2, Mlp), (llama, Mlp)] {
            assert_eq!(activations(json, module), 1, "{json}");
            assert_eq!(activations(json, Norms), 0, "{json}");
        }
    }
}
