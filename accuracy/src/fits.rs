//! How often runs fit to which a probability to fit was given, runs out of memory included.

use std::collections::BTreeSet;

use catalog::residuals::{Chance, Quantity};
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

/// The probability to fit by the outcomes of all runs.
pub(crate) fn chance(left_out: &[Scored]) -> Option<Chance> {
    chance::fit(outcomes(left_out).into_iter())
}

/// The outcomes of all complete runs. Room is in units of the interval that errors of other sources give.
fn outcomes(left_out: &[Scored]) -> Vec<Outcome<'_>> {
    let errors = FromOthers::new(left_out, Quantity::Memory);
    let outcome = |run: &'_ Scored| -> Option<(f64, bool)> {
        let predicted = run.predicted.as_ref()?;
        let error = errors.interval(run.kind.as_ref()?, &run.file)?;
        let counters = predicted.counters;
        let needed = counters.allocated + counters.device - counters.reserved;
        let room = (predicted.capacity_bytes / needed).ln() / error.high;
        Some((room, run.status != "oom"))
    };
    let complete = left_out.iter().filter(|run| is_complete(run));
    complete
        .filter_map(|run| {
            let (room, fitted) = outcome(run)?;
            Some(Outcome {
                source: &run.file,
                room,
                fitted,
            })
        })
        .collect()
}

/// Sorts all runs, predicted with constants fitted without their source, into bands by their probability to fit. It is
/// given by outcomes and errors of other sources.
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
