//! How systems that run the user's own model code stand to each rewrite that a prediction may assume: kernels are the
//! model's, traffic and states are the system's.

use catalog::Zero;
use catalog::runtime::Rewrite;

use super::assumptions::{Stance, unmet, yours};
use super::job::Job;
use super::refusal::Limits;
use plans::decisions::Recompute;

/// What holds the states and reduces the gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum System {
    DeepSpeed,
    /// PyTorch's `fully_shard`, under accelerate and axolotl.
    Fsdp2,
    VeScale,
}

/// Collects what the system does otherwise than the prediction assumed, and says what the user's code must do.
pub(crate) fn collect(job: &Job<'_>, system: System, limits: &mut Limits) {
    let assumed = &job.runtime.rewrites;
    let stance = |rewrite| stance(rewrite, job, system);
    limits.unmet = unmet(assumed, stance);
    limits.notes.extend(yours(assumed, stance));
}

fn stance(rewrite: Rewrite, job: &Job<'_>, system: System) -> Stance {
    let d = job.decisions;
    let only = |here: bool, stance: Stance| if here { stance } else { Stance::Absent };
    let sharded = matches!(d.zero, Zero::Z2 | Zero::Z3);
    match rewrite {
        Rewrite::FuseBiasGelu
        | Rewrite::FuseProjections
        | Rewrite::FuseSwiglu
        | Rewrite::FuseBiasDropoutAdd
        | Rewrite::FuseScaledMaskedSoftmax
        | Rewrite::FuseNorm
        | Rewrite::FuseRope
        | Rewrite::FuseCrossEntropy
        | Rewrite::InPlaceCrossEntropy
        | Rewrite::FusePointwise
        | Rewrite::FuseBiasEpilogue
        | Rewrite::FuseGeluEpilogue
        | Rewrite::NormInF32
        | Rewrite::FusePermute
        | Rewrite::KeepRowIndices
        | Rewrite::SaveQuantisedInputs
        | Rewrite::GatherQuantised
        | Rewrite::ScaleDynamically
        | Rewrite::WideExperts
        | Rewrite::RowwiseScaling
        | Rewrite::CudaGraph
        | Rewrite::FusedOptimizer => Stance::Yours,
        Rewrite::FuseGradientAccumulation => {
            Stance::Never("gradients of weights are made by autograd and added afterwards")
        }
        Rewrite::AccumulateGradients => only(
            system == System::DeepSpeed && d.num_micro_batches > 1,
            Stance::Always("every micro-batch's gradients are added to a buffer"),
        ),
        Rewrite::EarlyStopRecompute => only(
            d.recompute == Recompute::Full,
            match system {
                System::Fsdp2 => Stance::Always("PyTorch's checkpoints stop early"),
                System::DeepSpeed | System::VeScale => {
                    Stance::Never("its checkpoints run the whole layer again")
                }
            },
        ),
        Rewrite::CopyShards => only(
            sharded,
            match system {
                System::Fsdp2 => Stance::Always("fully_shard copies into and out of its buffers"),
                System::DeepSpeed | System::VeScale => {
                    Stance::Never("gathered parameters are used where they lie")
                }
            },
        ),
        Rewrite::FlattenGradients => only(
            d.dp() > 1,
            match system {
                System::DeepSpeed => {
                    Stance::Always("gradients are copied into buckets before they are reduced")
                }
                System::Fsdp2 | System::VeScale => {
                    Stance::Never("gradients are reduced where they lie")
                }
            },
        ),
        Rewrite::CopyGradientsForStep => only(
            d.zero != Zero::Z0,
            match system {
                System::DeepSpeed => {
                    Stance::Always("its step makes a 32-bit copy of its gradients")
                }
                System::Fsdp2 | System::VeScale => {
                    Stance::Never("its step reads the gradients as they are")
                }
            },
        ),
        Rewrite::AllReduceGradients => only(
            d.zero == Zero::Z1,
            Stance::Never("gradients are reduced to the rank that updates them"),
        ),
        Rewrite::GatherTensorByTensor => only(
            d.zero == Zero::Z3,
            Stance::Never("parameters are gathered in groups"),
        ),
        Rewrite::AsyncTensorParallelBackward | Rewrite::RegatherSequenceParallelInput => only(
            d.tp > 1,
            Stance::Never(
                "tensor parallelism waits for its collectives and keeps what they gathered",
            ),
        ),
        Rewrite::KeepStageOutput | Rewrite::ScatterGatherTransfer => only(
            d.pp > 1,
            Stance::Never("stages send whole activations and free their outputs"),
        ),
        Rewrite::KeepAttentionProjections
        | Rewrite::KeepOutputProjection
        | Rewrite::KeepSelected => Stance::Absent,
    }
}
