//! Megatron-LM options that set the precision of matrix products and of the weights they read.

use catalog::runtime::Rewrite;
use catalog::{Fp8Recipe, Precision, Zero};
use plans::support::recipe_cannot_recompute;

use super::flag::Flag;
use super::job::Job;
use super::refusal::Limits;

/// Megatron-LM's command-line option for the way to scale FP8 tensors.
pub(crate) const RECIPE: &str = "--fp8-recipe";

/// The ways to scale FP8 tensors that Megatron-Core offers (`core/enums.py`). The first is its default.
pub(crate) const RECIPES: [Fp8Recipe; 4] = [
    Fp8Recipe::Delayed,
    Fp8Recipe::Tensorwise,
    Fp8Recipe::Blockwise,
    Fp8Recipe::Mxfp8,
];

/// The precision options of an exported job. Refuses scalings that Megatron-Core lacks or cannot combine with recomputation.
pub(crate) fn flags(job: &Job<'_>, limits: &mut Limits) -> Vec<Flag> {
    limits.refuse_recipe(job, &RECIPES);
    let recipe = job.fp8_recipe();
    let again = recipe_cannot_recompute(recipe, job.decisions.recompute, job.runtime);
    limits.refuse_as(
        job.workload.precision == Precision::Fp8 && again.is_some(),
        format!("fp8_recipe={}", recipe.name()),
        format!(
            "it does not recompute {} with it",
            again.unwrap_or_default().name()
        ),
        Some(("fp8_recipe", Fp8Recipe::Tensorwise.name().to_owned())),
    );
    match job.workload.precision {
        Precision::Fp32 => Vec::new(),
        Precision::Fp16 => vec![Flag::switch("--fp16")],
        Precision::Bf16 => vec![Flag::switch("--bf16")],
        Precision::Fp8 => {
            let mut flags = vec![
                Flag::switch("--bf16"),
                Flag::value("--fp8-format", format(recipe)),
                Flag::value(RECIPE, recipe.name()),
            ];
            if holds_eight_bits(job) {
                flags.push(Flag::switch("--fp8-param-gather"));
                if recipe == Fp8Recipe::Mxfp8 {
                    flags.push(Flag::switch("--reuse-grad-buf-for-mxfp8-param-ag"));
                }
            }
            flags
        }
    }
}

/// Whether the exported job stores its weights in 8 bits (`--fp8-param-gather`). It does if the prediction counts no extra 8-bit
/// copies of 16-bit weights, and Megatron-LM allows it.
pub(crate) fn holds_eight_bits(job: &Job<'_>) -> bool {
    job.workload.precision == Precision::Fp8
        && !job.assumes(Rewrite::KeepQuantisedWeights)
        && can_hold_eight_bits(job)
}

/// Whether Megatron-LM accepts a job that stores its weights in 8 bits. It requires the distributed optimizer, and delayed
/// scaling if the optimizer's states are in host memory (`megatron/training/arguments.py`).
pub(crate) fn can_hold_eight_bits(job: &Job<'_>) -> bool {
    let on_device = job.decisions.offload.is_none();
    job.decisions.zero != Zero::Z0 && (on_device || job.fp8_recipe() == Fp8Recipe::Delayed)
}

/// The value of `--fp8-format`. With MXFP8, gradients use the same number format as weights and activations (Megatron Bridge's
/// `training/mixed_precision.py`); otherwise they have a wider exponent.
fn format(recipe: Fp8Recipe) -> &'static str {
    match recipe {
        Fp8Recipe::Mxfp8 => "e4m3",
        _ => "hybrid",
    }
}
