//! Memory that is kept around a recurrence where norms and gate are not part of its kernels.

use catalog::Bytes;
use catalog::runtime::Rewrite;
use dtensor::{Op, Operator, Recurrent, ScanRule, Trace};

use super::lowering::Lowering;

/// Bytes that an operator of a recurrent layer keeps for backward in addition to what the trace says. `None` if it keeps no more.
///
/// - Gate and norm of the recurrence's output are two kernels. The second keeps what the first returns (NVIDIA/Megatron-LM@d98e8a6,
///   `core/ssm/mamba_mixer.py`, `_ssm_training`, where the norm is second; `core/ssm/gated_delta_net/common.py`, `_apply_gated_norm`,
///   where the gate is).
/// - Queries and keys of the gated delta rule are normed before they are copied for every value head. The norm keeps its result
///   beside the copies, which the rule keeps (the same file, `_prepare_input_for_gated_delta_rule`; flash-linear-attention,
///   `modules/l2norm.py`).
pub(super) fn kept(lowering: &Lowering<'_>, trace: &Trace, op: &Op) -> Option<Bytes> {
    let Operator::Recurrent(of) = op.operator else {
        return None;
    };
    if !lowering.has(Rewrite::SplitRecurrence) {
        return None;
    }
    match of {
        Recurrent::GatedNorm(_) => Some(trace.tensor(op.outputs[0]).bytes()),
        Recurrent::Scan(scan) => match scan.rule {
            ScanRule::GatedDelta { .. } => {
                let [queries, keys] = [op.inputs[0], op.inputs[1]].map(|id| trace.tensor(id));
                Some(queries.bytes() + keys.bytes())
            }
            ScanRule::StateSpace { .. } => None,
        },
        Recurrent::Convolution(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use catalog::DType;
    use models::BlockLayout;
    use plans::Recompute;

    use super::*;
    use crate::lower::testing::{TOKENS, layer};

    /// Bytes for each token that the recurrences of a model's first layer keep around their kernels.
    fn around(preset: &str, tp: u64, runtime: &str) -> Vec<(String, u64)> {
        let model = catalog::load::model(preset).expect("a preset");
        let layout = BlockLayout {
            tp,
            ..BlockLayout::alone(1, TOKENS, DType::Bf16)
        };
        let trace = layer(&model, &layout);
        let runtime = catalog::load::runtime(runtime).expect("a preset");
        let saved = Lowering::new(&runtime, runtime.fp8_recipe).saved(&trace, Recompute::None);
        let around = saved
            .into_iter()
            .filter(|(name, _)| name.ends_with(".apart"));
        around
            .map(|(name, bytes)| (name, bytes.0 / TOKENS))
            .collect()
    }

    #[test]
    fn megatron_keeps_what_its_separate_norms_and_gates_read() {
        // Nemotron-H's recurrences are 8192 wide. Qwen3-Next's values are 4096 wide, its queries 2048 and its keys 2048.
        let [mamba, delta] = ["nemotron-h-8b", "qwen3-next-80b-a3b"];
        for (model, tp, runtime, expected) in [
            (mamba, 1, "megatron-core", vec![2 * 8192]),
            (mamba, 8, "nemo", vec![2 * 1024]),
            (mamba, 1, "hf-trainer", vec![]),
            (mamba, 1, "vescale", vec![]),
            (delta, 1, "megatron-core", vec![2 * 4096, 2 * 4096]),
            (delta, 2, "megatron-core", vec![2 * 2048, 2 * 2048]),
            (delta, 1, "hf-trainer", vec![]),
            (delta, 1, "vescale-cuda", vec![]),
        ] {
            let found = around(model, tp, runtime);
            let bytes: Vec<u64> = found.iter().map(|(_, bytes)| *bytes).collect();
            assert_eq!(bytes, expected, "{model} under {runtime}: {found:?}");
        }
    }
}
