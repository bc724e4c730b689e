//! What `calibrate` warns of: earlier runs that are lost, runs that the factors do not explain, factors that the runs do not fix.

use std::path::Path;

use accuracy::alternatives;
use accuracy::own_runs::Learned;
use catalog::calibration::{MeasuredRun, Rate, TimeFactors};
use catalog::extension::ExtensionFile;
use catalog::residuals::{self, Evidence, Quantity};

use super::measured::Measured;
use crate::error::CliError;
use crate::output;

/// Tells the user which earlier runs the new calibration uses again. Earlier runs that the cluster file does not list cannot be used; the
/// user is warned of these.
pub(super) fn of_known(first: &Measured, kept: &[Measured], quiet: bool) {
    let known = first.scenario.cluster.calibration.as_ref();
    if let Some(known) = known.filter(|known| known.measured.is_empty()) {
        output::warning(&format!(
            "{} does not list the {} that an older version learned from: the new factors replace what it had learned",
            first.cluster,
            count(known.runs)
        ));
    }
    if !kept.is_empty() {
        output::note(
            quiet,
            &format!(
                "note: {} of {} learned from again, beside the new",
                count(kept.len() as u64),
                match kept.len() {
                    1 => format!("{} is", first.cluster),
                    _ => format!("{} are", first.cluster),
                }
            ),
        );
    }
    let again = known.map_or(0, |known| known.measured.len()) - kept.len();
    if again > 0 {
        let (runs, is) = (count(again as u64), if again == 1 { "is" } else { "are" });
        output::note(
            quiet,
            &format!(
                "note: {runs} of {} {is} measured again: the new time replaces the old",
                first.cluster
            ),
        );
    }
}

/// The number of runs that replacing the file at `path` would lose: its calibration was made from them, and the new one is not.
pub(super) fn lost(path: &Path, first: &Measured, kept: &[Measured]) -> u64 {
    let known = first.scenario.cluster.calibration.as_ref();
    let text = catalog::text::read(path).unwrap_or_default();
    let replaced = ExtensionFile::is(&text)
        .then(|| ExtensionFile::from_yaml(&text, "").ok()?.calibration)
        .flatten();
    replaced
        .filter(|replaced| Some(replaced) != known)
        .map_or(0, |replaced| {
            let again = |of: &&MeasuredRun| kept.iter().any(|run| run.record.repeats(of));
            let again = replaced.measured.iter().filter(again).count() as u64;
            replaced.runs.saturating_sub(again)
        })
}

/// Tells the user that replacing the file at `path` lost the calibration from `lost` runs. Says nothing if none are lost.
pub(super) fn of_lost(path: &Path, lost: u64, quiet: bool) {
    if lost > 0 {
        let (path, runs) = (path.display(), count(lost));
        output::note(
            quiet,
            &format!(
                "note: {path} is replaced, with what {runs} had told; plans for --cluster {path} would have kept it"
            ),
        );
    }
}

fn count(runs: u64) -> String {
    match runs {
        1 => "1 run".to_owned(),
        runs => format!("{runs} runs"),
    }
}

/// Warns of factors that went as far as they may, of factors far from 1 that the runs do not fix, and of runs outside the interval that
/// is usual after as many runs.
///
/// # Errors
/// When a strategy to measure next cannot be predicted.
pub(super) fn of_learned(
    runs: &[Measured],
    learned: &Learned,
    others: &[(Rate, TimeFactors)],
) -> Result<(), CliError> {
    for rate in learned.at_bounds() {
        let (name, factor) = (rate.name(), learned.factors.of(rate));
        let most = if factor > 1.0 { "most" } else { "least" };
        output::warning(&format!(
            "{name} takes {factor:.3} times the predicted time, the {most} that can be learned: the runs may differ from their \
             plans in something else"
        ));
    }
    open(runs, learned, others)?;
    unexplained(runs, learned);
    Ok(())
}

/// Warns if other factors explain the runs as well, and names a strategy to measure next.
fn open(
    runs: &[Measured],
    learned: &Learned,
    others: &[(Rate, TimeFactors)],
) -> Result<(), CliError> {
    let (Some(last), false) = (runs.last(), others.is_empty()) else {
        return Ok(());
    };
    let takes = |rate: Rate, factors: &TimeFactors| {
        format!("{} takes {:.2} times", rate.name(), factors.of(rate))
    };
    let far = alternatives::far(learned);
    let far: Vec<String> = far
        .into_iter()
        .map(|rate| takes(rate, &learned.factors))
        .collect();
    let instead: Vec<String> = others
        .iter()
        .map(|(rate, factors)| takes(*rate, factors))
        .collect();
    let next = alternatives::telling_apart(&last.own(), learned, others)?;
    let next = next.map_or_else(String::new, |next| {
        let next = plans::grammar::written(&next, &last.scenario.runtime);
        format!("; a measured step of `{next}` would")
    });
    output::warning(&format!(
        "{} the predicted time, but the runs are explained as well if only {} it: they do not tell which{next}. Until then intervals of \
         step times hold both",
        far.join(" and "),
        instead.join(", or only ")
    ));
    Ok(())
}

/// Warns of runs that the factors do not explain: of all together if they contradict each other, or else of each.
fn unexplained(runs: &[Measured], learned: &Learned) {
    let usual = residuals::of(Quantity::Time, Evidence::Calibrated { runs: runs.len() });
    let left = |number: usize| runs[number].step_time() / learned.runs[number].after;
    let (short, long): (Vec<usize>, Vec<usize>) = (0..runs.len())
        .filter(|number| !(usual.low..=usual.high).contains(&left(*number).ln()))
        .partition(|number| left(*number) < 1.0);
    let said = |numbers: &[usize]| {
        let each = numbers.iter();
        let each = each.map(|number| format!("run {} {:.2} times", number + 1, left(*number)));
        each.collect::<Vec<_>>().join(", ")
    };
    if !short.is_empty() && !long.is_empty() {
        output::warning(&format!(
            "the runs contradict each other: beside what the factors that suit all of them best give, {} and {} as long was measured. One \
             factor stands for the networks inside nodes and between them. Intervals of step times on this cluster are wider for it",
            said(&short),
            said(&long)
        ));
        return;
    }
    for number in short.into_iter().chain(long) {
        output::warning(&format!(
            "{}: the steps take {:.2} times what the factors explain; is it a run of this model and batch? intervals of \
             step times on this cluster are wider for it",
            runs[number].record.about,
            left(number)
        ));
    }
}
