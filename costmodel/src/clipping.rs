//! What the optimizer step does to gradients before it updates weights.

use catalog::Precision;
use catalog::runtime::Rewrite;

use crate::{Scenario, states};

/// How many times gradients are read or written to clip them: once to find their norm, and twice to multiply them. PyTorch's
/// `clip_grad_norm_` multiplies them whatever the norm is (torch/nn/utils/clip_grad.py, `_clip_grads_with_norm_`), and so does DeepSpeed
/// (zero/stage_1_and_2.py, `unscale_and_clip_grads`). Systems with gradient buffers of their own, as Megatron-LM, do so only for
/// a norm that is too large (core/optimizer/clip_grads.py).
///
/// In fp16 PyTorch's `GradScaler` first reads and writes them to divide them by the loss's factor (torch/amp/grad_scaler.py,
/// `_unscale_grads_`). DeepSpeed divides by this factor and clips in one multiplication.
pub(crate) fn passes(scenario: &Scenario) -> u64 {
    if !(scenario.runtime.rewrites).contains(&Rewrite::ReleaseGradients) {
        return 1;
    }
    let scales = scenario.workload.precision == Precision::Fp16;
    match scales && !states::is_deepspeed(&scenario.runtime) {
        true => 5,
        false => 3,
    }
}

#[cfg(test)]
mod tests {
    use catalog::WorkloadSizes;

    use super::*;
    use crate::testing::scenario;

    #[test]
    fn gradients_are_divided_by_the_factor_of_the_loss_in_fp16() {
        for (runtime, in_bf16, in_fp16) in [
            ("hf-trainer", 3, 5),
            ("fsdp2", 3, 5),
            // One multiplication divides and clips.
            ("deepspeed", 3, 3),
            ("hf-deepspeed", 3, 3),
            ("megatron-core", 1, 1),
        ] {
            let found = [Precision::Bf16, Precision::Fp16].map(|precision| {
                let sizes = WorkloadSizes {
                    gpus: 8,
                    seq_len: 1024,
                    global_batch: 8,
                    precision,
                };
                passes(&scenario(["gpt2", "dgx-a100", runtime], sizes))
            });
            assert_eq!(found, [in_bf16, in_fp16], "{runtime}");
        }
    }
}
