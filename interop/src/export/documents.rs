//! Packing: how targets train on sequences that hold several documents. In most targets tokens attend to all documents of their
//! sequence, unless a switch or the user's script masks the others. torchtitan 0.3 always masks them, and axolotl packs only with
//! such a mask.

use catalog::Packing;
use catalog::model::{Family, ModelConfig};

use super::dialect::Dialect;
use super::job::Job;
use super::refusal::Limits;

/// How the plan packs documents, if that needs a switch; `None` if it packs none, or across.
pub(crate) fn packing(job: &Job<'_>) -> Option<Packing> {
    let packing = job.workload.documents()?.packing();
    (packing != Packing::Across).then_some(packing)
}

/// Whether attention stays within documents.
pub(crate) fn within(job: &Job<'_>) -> bool {
    packing(job) == Some(Packing::Within)
}

/// Whether every model of this kind keeps attention within documents: all decoders of torchtitan 0.3 and main
/// (`get_attention_config` in its models/common/config_utils.py), and those of 0.2 whose `attn_mask_type` is `block_causal`.
fn masks_documents(dialect: Dialect, model: &ModelConfig) -> bool {
    match dialect {
        Dialect::Torchtitan03 | Dialect::TorchtitanMain => true,
        Dialect::Torchtitan02 => model.family == Family::DeepSeek,
        _ => false,
    }
}

/// The packing that a target can do, to be advised where it refuses the one that was asked for.
#[must_use]
pub fn packing_instead(dialect: Dialect, model: &ModelConfig) -> Packing {
    match dialect == Dialect::Axolotl || masks_documents(dialect, model) {
        true => Packing::Within,
        false => Packing::Across,
    }
}

/// Refuses what a target cannot do with documents, and notes what is left to the user.
pub(crate) fn collect(job: &Job<'_>, dialect: Dialect, limits: &mut Limits) {
    let Some(documents) = job.workload.documents() else {
        return;
    };
    let packing = documents.packing();
    let mut refuse = |refused: bool, why: &str| {
        limits.refuse_as(refused, format!("packing={packing}"), why, None);
    };
    let [across, within, padded] =
        [Packing::Across, Packing::Within, Packing::Padded].map(|of| of == packing);
    match dialect {
        Dialect::MegatronLm => refuse(padded, "its pre-training dataset fills every sequence"),
        Dialect::MegatronBridge => {
            refuse(padded, "its recipes pad to the longest sequence of a batch");
            refuse(
                within && job.decisions.micro_batch > 1,
                "its fine-tuning packs into micro-batches of one sequence: plan with --fix mbs=1",
            );
            limits.note(
                within,
                "RECIPE must be a fine-tuning recipe that packs sequences",
            );
        }
        Dialect::Torchtitan02 | Dialect::Torchtitan03 | Dialect::TorchtitanMain => {
            let masks = masks_documents(dialect, job.model);
            refuse(padded, "its data loader fills every sequence");
            refuse(
                across && masks,
                "its attention stays within documents: plan with --packing within",
            );
            refuse(
                within && !masks,
                "its attention to this model crosses documents in 0.2: plan with --packing across",
            );
        }
        Dialect::Nanotron => refuse(!across, "its files have no switch for it"),
        Dialect::Axolotl => {
            refuse(
                across,
                "it joins no documents without sample_packing, which keeps attention within them: plan with --packing within",
            );
            refuse(
                within && job.decisions.cp > 1 && job.decisions.micro_batch > 1,
                "sample_packing with context parallelism takes micro-batches of one sequence: plan with --fix mbs=1",
            );
        }
        Dialect::LlamaFactory => refuse(padded, "it pads to the longest sequence of a batch"),
        Dialect::DeepSpeed
        | Dialect::Accelerate
        | Dialect::Transformers
        | Dialect::TransformersDeepSpeed
        | Dialect::VeScale => {
            limits.note(
                padded,
                "your training script must pad every document to the sequence length",
            );
            limits.note(
                within,
                "your training script must pack documents and keep attention within them",
            );
        }
    }
}
