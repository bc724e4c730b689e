//! Compares predicted probabilities to fit with the share of runs that fitted.

use std::collections::BTreeSet;

use catalog::residuals::{Chance, Quantity};
use catalog::runs::Status;
use serde::Serialize;

use super::chance::{self, Outcome};
use super::intervals::FromOthers;
use super::score::Scored;
use super::summary::is_complete;

/// Lower ends of the bands of probability; the last band ends at 1.
const BANDS: [f64; 5] = [0.0, 0.1, 0.5, 0.8, 0.97];

/// The runs whose probability to fit lies in a band.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Band {
    /// Lower end of the band, which belongs to it.
    pub(crate) from: f64,
    /// Upper end of the band, which belongs to the next one (1 belongs to the last).
    pub(crate) to: f64,
    /// Number of runs that fitted or ran out of memory.
    pub(crate) runs: usize,
    /// Number of those runs that fitted.
    pub(crate) fitted: usize,
    /// Mean of their probabilities.
    pub(crate) mean: f64,
}

/// The probability to fit, found from the runs of all sources.
pub(crate) fn chance(left_out: &[Scored]) -> Option<Chance> {
    chance::fit(outcomes(left_out).into_iter())
}

/// Outcomes of all complete runs; room is relative to an interval from other sources' errors.
fn outcomes(left_out: &[Scored]) -> Vec<Outcome<'_>> {
    let errors = FromOthers::new(left_out, Quantity::Memory);
    let mut outcomes = Vec::new();
    for run in left_out.iter().filter(|run| is_complete(run)) {
        let error = (run.kind.as_ref()).and_then(|kind| errors.interval(kind, &run.file));
        if let (Some(predicted), Some(error)) = (&run.predicted, error) {
            outcomes.push(Outcome {
                source: &run.file,
                room: error.room(predicted.capacity_bytes, predicted.counters.needed()),
                fitted: run.status != Status::Oom,
            });
        }
    }
    outcomes
}

/// Sorts runs into bands by their probability to fit. The probability, like the predictions themselves, is found without the
/// run's own source.
pub(crate) fn bands(left_out: &[Scored]) -> Vec<Band> {
    let outcomes = outcomes(left_out);
    let sources: BTreeSet<&str> = outcomes.iter().map(|outcome| outcome.source).collect();
    let of_source = |source: &&str| {
        let others = outcomes.iter().filter(|outcome| outcome.source != *source);
        let chance = chance::fit(others.copied())?;
        let own = outcomes.iter().filter(|outcome| outcome.source == *source);
        Some(
            own.map(|outcome| (chance.at(outcome.room), outcome.fitted))
                .collect::<Vec<_>>(),
        )
    };
    let given: Vec<(f64, bool)> = sources.iter().filter_map(of_source).flatten().collect();
    let ends = BANDS.iter().skip(1).copied().chain([f64::INFINITY]);
    BANDS
        .iter()
        .zip(ends)
        .map(|(&from, to)| {
            let inside: Vec<&(f64, bool)> = given
                .iter()
                .filter(|(p, _)| (from..to).contains(p))
                .collect();
            Band {
                from,
                to: to.min(1.0),
                runs: inside.len(),
                fitted: inside.iter().filter(|(_, fitted)| *fitted).count(),
                mean: inside.iter().map(|(p, _)| p).sum::<f64>() / inside.len().max(1) as f64,
            }
        })
        .collect()
}
