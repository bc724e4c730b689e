//! How a target stands to each rewrite that a prediction may assume, as a table, and what of it differs.

use catalog::Precision;
use catalog::runtime::Rewrite;

use super::assumptions::Assumption;
use super::job::Job;
use plans::decisions::Recompute;

/// How a target stands to a rewrite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stance {
    /// The file says it, either way.
    Written,
    /// It always performs it.
    Always(&'static str),
    /// It never performs it.
    Never(&'static str),
    /// The user's own model code performs it or not.
    Yours,
}

/// Whether a plan has what a row is about.
pub(crate) type When = fn(&Job<'_>) -> bool;

/// A target's rows: the first row of a rewrite whose condition holds counts; where none does, nothing in the plan could
/// be rewritten so.
pub(crate) type Table = [(Rewrite, When, Stance)];

/// Whether linear layers run in 8 bits.
pub(crate) fn fp8(job: &Job<'_>) -> bool {
    job.workload.precision == Precision::Fp8
}

/// Whether layers are run again in backward.
pub(crate) fn recomputes(job: &Job<'_>) -> bool {
    let nothing = [Recompute::None, Recompute::Layers(0)];
    !nothing.contains(&job.decisions.recompute)
}

/// Whether tensor-parallel ranks hold whole activations between pipeline stages.
pub(crate) fn sends_whole(job: &Job<'_>) -> bool {
    let d = job.decisions;
    d.pp > 1 && d.tp > 1 && !d.sequence_parallel
}

fn stance(table: &Table, rewrite: Rewrite, job: &Job<'_>) -> Option<Stance> {
    let row = table
        .iter()
        .find(|(of, when, _)| *of == rewrite && when(job));
    row.map(|(_, _, stance)| *stance)
}

/// The assumptions that a target does not meet.
pub(crate) fn unmet(table: &Table, job: &Job<'_>) -> Vec<Assumption> {
    let differs = |rewrite: Rewrite| {
        let (performed, why) = match stance(table, rewrite, job)? {
            Stance::Written | Stance::Yours => return None,
            Stance::Always(why) => (true, why),
            Stance::Never(why) => (false, why),
        };
        let differs = performed != job.assumes(rewrite);
        differs.then(|| Assumption {
            rewrite,
            performed,
            why: why.to_owned(),
        })
    };
    Rewrite::ALL.into_iter().filter_map(differs).collect()
}

/// What the prediction assumed and only the user's own model code can do, as one sentence; none where it assumed nothing.
pub(crate) fn yours(table: &Table, job: &Job<'_>) -> Option<String> {
    let assumed = job.runtime.rewrites.iter();
    let names: Vec<String> = assumed
        .filter(|rewrite| stance(table, **rewrite, job) == Some(Stance::Yours))
        .map(|rewrite| rewrite.name())
        .collect();
    let list = names.join(", ");
    (!names.is_empty()).then(|| format!("the prediction assumed of your model's code: {list}"))
}

#[cfg(test)]
mod tests {
    use catalog::runtime::Rewrite;

    use super::Table;
    use crate::export::{core_rewrites, nanotron, script_rewrites, torchtitan};

    #[test]
    fn every_table_knows_every_rewrite() {
        let tables: [&Table; 6] = [
            core_rewrites::TABLE,
            script_rewrites::DEEPSPEED,
            script_rewrites::FSDP2,
            script_rewrites::VESCALE,
            nanotron::REWRITES,
            torchtitan::REWRITES,
        ];
        for (at, table) in tables.iter().enumerate() {
            for rewrite in Rewrite::ALL {
                let known = table.iter().any(|(of, ..)| *of == rewrite);
                assert!(known, "table {at} does not know {}", rewrite.name());
            }
        }
    }
}
