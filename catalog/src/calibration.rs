//! Ratios of measured to predicted step time from runs on a cluster, for one runtime and precision. A cluster can be
//! extended by such ratios (`extension`); predictions for it are multiplied by them, and say so. A ratio does not say
//! why a prediction is off: it is right for runs like those it was measured on, and scales all strategies alike, so it
//! never changes which plan is best.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::dtype::Precision;
use crate::provenance::Sourced;

/// Ratios outside this range come from a wrong plan or log, not from a cluster.
const PLAUSIBLE: std::ops::RangeInclusive<f64> = 0.1..=10.0;

/// Measured over predicted step time of some runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// Runtime of the runs; others are left alone.
    pub runtime: String,
    /// Precision of the runs; others are left alone.
    pub precision: Precision,
    /// Measured over predicted step time.
    pub step_time: Sourced<f64>,
}

/// Checks that ratios are plausible.
///
/// # Errors
/// The field, and what is wrong with it.
pub(crate) fn check(entries: &[Calibration]) -> Result<(), (&'static str, String)> {
    for (i, entry) in entries.iter().enumerate() {
        if !PLAUSIBLE.contains(&entry.step_time.value) {
            let message = format!(
                "{} is not from {} to {}",
                entry.step_time.value,
                PLAUSIBLE.start(),
                PLAUSIBLE.end()
            );
            return Err(("step_time", message));
        }
        let same = |other: &Calibration| {
            other.runtime == entry.runtime && other.precision == entry.precision
        };
        if entries[..i].iter().any(same) {
            let message = format!("{} {:?} is there twice", entry.runtime, entry.precision);
            return Err(("calibration", message));
        }
    }
    Ok(())
}
