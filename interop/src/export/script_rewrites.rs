//! Which rewrites are performed by systems that run the user's own model code: kernels are up to the model,
//! communication and states to the system.

use catalog::Zero;
use catalog::runtime::Rewrite;

use super::job::Job;
use super::refusal::Limits;
use super::stance::Stance::{Always, Never, Written, Yours};
use super::stance::{Table, rings, sends_whole, unmet, unpadded, yours};
use plans::decisions::Recompute;

/// Records the assumptions that the system does not meet, and notes what the user's code must do.
pub(crate) fn collect(job: &Job<'_>, system: &Table, limits: &mut Limits) {
    limits.unmet = unmet(system, job);
    limits.notes.extend(yours(system, job));
}

fn sharded(job: &Job<'_>) -> bool {
    matches!(job.decisions.zero, Zero::Z2 | Zero::Z3)
}

fn whole_layers(job: &Job<'_>) -> bool {
    job.decisions.recompute == Recompute::Full
}

fn replicas(job: &Job<'_>) -> bool {
    job.decisions.dp() > 1
}

fn states(job: &Job<'_>) -> bool {
    job.decisions.zero != Zero::Z0
}

/// Makes a system's table. Most rows are the same for all systems; the arguments are the system's own answers: when its
/// checkpoints stop, whether gathered parameters are copied, whether gradients are copied into buckets, copied for the step and
/// added by a pass of their own, whether modules are gathered one by one, and when updated parameters are gathered.
macro_rules! table {
    ($checkpoints:expr, $shards:expr, $flattened:expr, $copied:expr, $accumulated:expr, $visited:expr, $updated:expr) => {
        &[
            (Rewrite::EarlyStopRecompute, whole_layers, $checkpoints),
            (Rewrite::CopyShards, sharded, $shards),
            (Rewrite::FlattenGradients, replicas, $flattened),
            (Rewrite::CopyGradientsForStep, states, $copied),
            (
                Rewrite::AccumulateGradients,
                |j| j.decisions.num_micro_batches > 1,
                $accumulated,
            ),
            (
                Rewrite::FuseGradientAccumulation,
                |_| true,
                Never("gradients of weights are made by autograd and added afterwards"),
            ),
            (
                Rewrite::AllReduceGradients,
                |j| j.decisions.zero == Zero::Z1,
                Never("gradients are reduced to the rank that updates them"),
            ),
            (
                Rewrite::GatherTensorByTensor,
                |j| j.decisions.zero == Zero::Z3,
                Never("parameters are gathered in groups"),
            ),
            (
                Rewrite::VisitModules,
                |j| j.decisions.zero == Zero::Z3,
                $visited,
            ),
            (
                Rewrite::AsyncTensorParallelBackward,
                |j| j.decisions.tp > 1,
                Never("tensor parallelism waits for its collectives"),
            ),
            (
                Rewrite::RegatherSequenceParallelInput,
                |j| j.decisions.sequence_parallel,
                Never("gathered inputs are kept for backward"),
            ),
            (
                Rewrite::KeepStageOutput,
                |j| j.decisions.pp > 1,
                Never("outputs of stages are freed"),
            ),
            (
                Rewrite::ScatterGatherTransfer,
                sends_whole,
                Never("whole activations are sent"),
            ),
            (Rewrite::FuseBiasGelu, |_| true, Yours),
            (Rewrite::FuseProjections, |_| true, Yours),
            (Rewrite::FuseQkv, |_| true, Yours),
            (Rewrite::FuseSwiglu, |_| true, Yours),
            (Rewrite::FuseBiasDropoutAdd, |_| true, Yours),
            (Rewrite::FuseScaledMaskedSoftmax, |_| true, Yours),
            (Rewrite::FuseNorm, |_| true, Yours),
            (Rewrite::FuseRope, |_| true, Yours),
            (Rewrite::FuseCrossEntropy, |_| true, Yours),
            (Rewrite::InPlaceCrossEntropy, |_| true, Yours),
            (Rewrite::ChunkLoss, |_| true, Yours),
            (Rewrite::VocabularyByOperators, |_| true, Yours),
            (Rewrite::WholeVocabulary, |_| true, Yours),
            (Rewrite::FusePointwise, |_| true, Yours),
            (Rewrite::FuseBiasEpilogue, |_| true, Yours),
            (Rewrite::FuseGeluEpilogue, |_| true, Yours),
            (Rewrite::NormInF32, |_| true, Yours),
            (Rewrite::NormOnCopy, |_| true, Yours),
            (Rewrite::ReducePerLinear, |_| true, Yours),
            (Rewrite::RopeByPairs, |_| true, Yours),
            (Rewrite::Autocast, |_| true, Yours),
            (Rewrite::GatherHeldType, |_| true, Yours),
            (Rewrite::GeluByOperators, |_| true, Yours),
            (Rewrite::BroadcastParameters, |_| false, Written),
            (
                Rewrite::GatherInStep,
                |j| matches!(j.decisions.zero, Zero::Z1 | Zero::Z2),
                $updated,
            ),
            (Rewrite::FusePermute, |_| true, Yours),
            (Rewrite::KeepRowIndices, |_| true, Yours),
            (Rewrite::LaunchExpertsApart, |_| true, Yours),
            (Rewrite::WeightActivations, |_| true, Yours),
            (Rewrite::PadVocabulary, unpadded, Yours),
            (Rewrite::PortableExperts, |_| true, Yours),
            (Rewrite::SaveQuantisedInputs, |_| true, Yours),
            (Rewrite::KeepQuantisedWeights, |_| true, Yours),
            (Rewrite::GatherQuantised, |_| true, Yours),
            (Rewrite::WideExperts, |_| true, Yours),
            (Rewrite::FusedOptimizer, |_| true, Yours),
            (Rewrite::OptimizerByTensor, |_| true, Yours),
            (Rewrite::ReleaseGradients, |_| true, Yours),
            // The choice of saved operators is fixed: plans that need another are refused.
            (Rewrite::KeepAttentionProjections, |_| false, Written),
            (Rewrite::KeepOutputProjection, |_| false, Written),
            (Rewrite::KeepSelected, |_| false, Written),
            (Rewrite::RingInPytorch, rings, Yours),
            (
                Rewrite::RearrangeSequences,
                |j| j.decisions.sequence_parallel,
                Yours,
            ),
        ]
    };
}

/// DeepSpeed's rewrites.
pub(crate) const DEEPSPEED: &Table = table!(
    Never("its checkpoints run the whole layer again"),
    Never("gathered parameters are used where they lie"),
    Always("gradients are copied into buckets before they are reduced"),
    Always("its step makes a 32-bit copy of its gradients"),
    Always("every micro-batch's gradients are added to a buffer"),
    Always("ZeRO-3 gathers and frees parameters module by module"),
    Always("updated parameters are gathered within the step, beside nothing")
);

/// Rewrites of PyTorch's `fully_shard`, under accelerate and axolotl.
pub(crate) const FSDP2: &Table = table!(
    Always("PyTorch's checkpoints stop early"),
    Always("fully_shard copies into and out of its buffers"),
    Never("gradients are reduced where they lie"),
    Never("its step reads the gradients as they are"),
    Never("gradients are added in place"),
    Never("parameters are gathered for a whole block"),
    Never("updated parameters are gathered beside forward passes")
);

/// veScale's rewrites.
pub(crate) const VESCALE: &Table = table!(
    Never("its checkpoints run the whole layer again"),
    Never("gathered parameters are used where they lie"),
    Never("gradients are reduced where they lie"),
    Never("its step reads the gradients as they are"),
    Never("gradients are added in place"),
    Never("parameters are gathered for a whole block"),
    Never("updated parameters are gathered beside forward passes")
);
