//! Decisions for which a system's file has no key.

use catalog::{Overlap, Zero};
use interop::export::Dialect;
use plans::Strategy as Plan;
use plans::decisions::Decisions;

/// The decisions to expect of an import: the plan's, but the import's own where the file has no key for them.
pub(crate) fn as_the_file_says(
    strategy: &Plan,
    dialect: Dialect,
    imported: &Decisions,
) -> Decisions {
    let mut expected = strategy.decisions().clone();
    // Without ZeRO, DeepSpeed's gradients have the type of the weights.
    let unsharded = dialect.runtime().ends_with("deepspeed") && expected.zero == Zero::Z0;
    if unsharded || matches!(dialect, Dialect::Axolotl | Dialect::Transformers) {
        expected.gradients = imported.gradients;
    }
    match dialect {
        Dialect::Nanotron => {
            let tensor_parallel = expected.overlap.tensor_parallel;
            expected.overlap = Overlap {
                tensor_parallel,
                ..imported.overlap
            };
            expected.stages = imported.stages.clone();
        }
        // 1F1B overlaps no sends between stages, whatever the field says.
        Dialect::MegatronBridge if expected.vpp == 1 => {
            expected.overlap.pipeline = imported.overlap.pipeline;
        }
        // ZeRO 1 and 2 of DeepSpeed gather updated parameters beside nothing, whatever the plan says.
        Dialect::DeepSpeed | Dialect::TransformersDeepSpeed | Dialect::LlamaFactory
            if matches!(expected.zero, Zero::Z1 | Zero::Z2) =>
        {
            expected.overlap.param_gather = imported.overlap.param_gather;
        }
        _ => {}
    }
    expected
}
