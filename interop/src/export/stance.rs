//! A target's stance on each rewrite that a prediction may assume, and where it differs from the prediction.

use catalog::runtime::Rewrite;
use catalog::{CpKind, Precision, Zero};

use super::assumptions::{Assumption, Differs};
use super::job::Job;
use plans::decisions::Recompute;
use strum::VariantArray;

/// Whether a target performs a rewrite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stance {
    /// The exported file switches it on or off, as the prediction assumed.
    Written,
    /// The target always performs the rewrite, for this reason.
    Always(&'static str),
    /// The target never performs the rewrite, for this reason.
    Never(&'static str),
    /// The user's own model code decides whether the rewrite is performed.
    Yours,
    /// The rewrite has nothing to change in the plan.
    Nothing,
}

/// Whether the model has experts.
pub(crate) fn experts(job: &Job<'_>) -> bool {
    job.model.moe.is_some()
}

/// Whether linear layers run in FP8.
pub(crate) fn fp8(job: &Job<'_>) -> bool {
    job.workload.precision == Precision::Fp8
}

/// Whether layers are recomputed in backward.
pub(crate) fn recomputes(job: &Job<'_>) -> bool {
    let nothing = [Recompute::None, Recompute::Layers(0)];
    !nothing.contains(&job.decisions.recompute)
}

/// Whether FSDP can free the embedding after forward: blocks are freed, and the head has a table of its own.
pub(crate) fn can_free_embedding(job: &Job<'_>) -> bool {
    let d = job.decisions;
    d.zero == Zero::Z3 && d.reshard_after_forward && !job.model.tied_embeddings
}

/// Whether gradients are reduced beside backward in every micro-batch, and another micro-batch follows.
pub(crate) fn reduces_every_time(job: &Job<'_>) -> bool {
    let d = job.decisions;
    let shards = matches!(d.zero, Zero::Z2 | Zero::Z3) && d.dp() > 1;
    shards && d.overlap.grad_reduce && d.num_micro_batches > 1
}

/// Whether ranks run no pass while they send a message to another pipeline stage.
pub(crate) fn waits_for_messages(job: &Job<'_>) -> bool {
    let d = job.decisions;
    let blocking = &job.runtime.space.blocking_schedules;
    d.pp > 1 && (!d.overlap.pipeline || blocking.contains(&d.schedule))
}

/// Whether context parallelism gathers keys and values.
pub(crate) fn gathers_keys(job: &Job<'_>) -> bool {
    job.decisions.cp > 1 && job.decisions.cp_kind == CpKind::AllGather
}

/// Whether every tensor-parallel rank holds whole activations between pipeline stages.
pub(crate) fn sends_whole(job: &Job<'_>) -> bool {
    let d = job.decisions;
    d.pp > 1 && d.tp > 1 && !d.sequence_parallel
}

/// Whether padding the vocabulary would change anything: without it, a rank's rows of 16-bit logits do not all start at multiples
/// of 16 bytes, as matrix units need.
pub(crate) fn unpadded(job: &Job<'_>) -> bool {
    !job.model.vocab.is_multiple_of(8 * job.decisions.tp)
}

/// Whether a target that runs PyTorch's operators does what a rewrite of XLA says.
pub(crate) fn of_xla(rewrite: Rewrite, job: &Job<'_>) -> Stance {
    match rewrite {
        Rewrite::EmbedByProduct => Stance::Never("tokens read their rows of the table"),
        Rewrite::GatherNarrowWeights if fp8(job) && job.decisions.zero == Zero::Z3 => {
            Stance::Never("parameters are gathered in 16 bits")
        }
        Rewrite::WideForwardProducts if fp8(job) => {
            Stance::Never("linear layers multiply in 8 bits in every pass")
        }
        _ => Stance::Nothing,
    }
}

/// The assumptions that a target does not meet.
pub(crate) fn unmet(stance: impl Fn(Rewrite) -> Stance, job: &Job<'_>) -> Vec<Assumption> {
    let differs = |rewrite: Rewrite| {
        let assumed = job.assumes(rewrite);
        let (differs, why) = match stance(rewrite) {
            Stance::Always(why) if !assumed => (Differs::Performed(rewrite), why),
            Stance::Never(why) if assumed => (Differs::NotPerformed(rewrite), why),
            Stance::Written
            | Stance::Yours
            | Stance::Nothing
            | Stance::Always(_)
            | Stance::Never(_) => return None,
        };
        let why = why.to_owned();
        Some(Assumption { differs, why })
    };
    (Rewrite::VARIANTS.iter().copied())
        .filter_map(differs)
        .collect()
}

/// A note on the rewrites that the prediction assumed and only the user's model code can perform;
/// `None` if there are none.
pub(crate) fn yours(stance: impl Fn(Rewrite) -> Stance, job: &Job<'_>) -> Option<String> {
    let assumed = job.runtime.rewrites.iter();
    let names: Vec<String> = assumed
        .filter(|rewrite| stance(*rewrite) == Stance::Yours)
        .map(|rewrite| rewrite.name())
        .collect();
    let list = names.join(", ");
    (!names.is_empty()).then(|| format!("the prediction assumed of your model's code: {list}"))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use catalog::runtime::Rewrite;
    use strum::VariantArray;

    /// The sources of exporters that say how a target stands to each rewrite, by their paths.
    fn stances(folder: &Path, found: &mut Vec<(String, String)>) {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                stances(&path, found);
                continue;
            }
            let text = fs::read_to_string(&path).unwrap_or_default();
            let answers = text.split_once("fn stance(").map(|(_, answers)| answers);
            if let Some(answers) = answers.filter(|_| !path.ends_with("export/stance.rs")) {
                found.push((path.display().to_string(), answers.to_owned()));
            }
        }
    }

    #[test]
    fn every_target_names_every_rewrite() {
        let mut targets = Vec::new();
        let exporters = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/export");
        stances(&exporters, &mut targets);
        assert!(targets.len() >= 4, "{targets:?}");
        for (path, answers) in targets {
            let named: Vec<&str> = answers.split(|c: char| !c.is_alphanumeric()).collect();
            for rewrite in Rewrite::VARIANTS
                .iter()
                .map(|rewrite| format!("{rewrite:?}"))
            {
                assert!(named.contains(&rewrite.as_str()), "{path}: {rewrite}");
            }
        }
    }
}
