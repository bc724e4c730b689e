//! How targets treat sequences made of documents. By default every target attends across documents;
//! attention within them, and padding, need a switch or the user's own script.

use catalog::Packing;

use super::dialect::Dialect;
use super::job::Job;
use super::refusal::Limits;

/// How the plan packs documents; `None` if it packs none, or across, as targets do by default.
pub(crate) fn packing(job: &Job<'_>) -> Option<Packing> {
    let packing = job.workload.documents()?.packing();
    (packing != Packing::Across).then_some(packing)
}

/// Whether attention stays within documents.
pub(crate) fn within(job: &Job<'_>) -> bool {
    packing(job) == Some(Packing::Within)
}

/// Refuses what a target cannot do with documents, and notes what is left to the user.
pub(crate) fn collect(job: &Job<'_>, dialect: Dialect, limits: &mut Limits) {
    let Some(packing) = packing(job) else { return };
    let mut refuse = |refused: bool, why: &str| {
        limits.refuse_as(refused, format!("packing={packing}"), why, None);
    };
    let padded = packing == Packing::Padded;
    match dialect {
        Dialect::MegatronLm => refuse(padded, "its pre-training dataset fills every sequence"),
        Dialect::MegatronBridge => {
            refuse(padded, "its recipes pad to the longest sequence of a batch");
            refuse(
                job.decisions.micro_batch > 1,
                "its fine-tuning packs into micro-batches of one sequence: plan with --fix mbs=1",
            );
            limits.note(
                true,
                "RECIPE must be a fine-tuning recipe that packs sequences",
            );
        }
        Dialect::Torchtitan02 | Dialect::Torchtitan03 | Dialect::TorchtitanMain => {
            refuse(
                true,
                "the model of its registry decides what attention masks",
            );
        }
        Dialect::Nanotron => refuse(true, "its files have no switch for it"),
        Dialect::Axolotl => refuse(
            !padded && job.decisions.cp > 1 && job.decisions.micro_batch > 1,
            "sample_packing with context parallelism takes micro-batches of one sequence: plan with --fix mbs=1",
        ),
        Dialect::LlamaFactory => refuse(padded, "it pads to the longest sequence of a batch"),
        Dialect::DeepSpeed
        | Dialect::Accelerate
        | Dialect::Transformers
        | Dialect::TransformersDeepSpeed
        | Dialect::VeScale => limits.note(
            true,
            match padded {
                true => "your training script must pad every document to the sequence length",
                false => "your training script must pack documents and keep attention within them",
            },
        ),
    }
}
