//! How often runs fit to which a probability to fit was given, runs out of memory included.

use catalog::residuals::Quantity;
use serde::Serialize;

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

/// Sorts all runs, predicted with constants fitted without their source, into bands by their probability to fit. The
/// errors that give the probability are those of other sources, too.
pub(crate) fn bands(left_out: &[Scored]) -> Vec<Band> {
    let others = FromOthers::new(left_out, Quantity::Memory);
    let given: Vec<(f64, bool)> = left_out
        .iter()
        .filter(|run| is_complete(run))
        .filter_map(|run| {
            let predicted = run.predicted.as_ref()?;
            let error = others.interval(run.kind.as_ref()?, &run.file)?;
            let room = predicted.capacity_bytes / predicted.counters.device;
            Some((error.probability_below(room.ln()), run.status != "oom"))
        })
        .collect();
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
