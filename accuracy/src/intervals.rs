//! 80% intervals of predictions, made from the errors on published runs, and how many runs lie inside them.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use catalog::residuals::{self, Quantity, Residual};
use serde::Serialize;

use super::score::Scored;
use super::summary::is_complete;
use super::sweeps::Sweep;

/// How many runs lie inside their 80% interval.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Coverage {
    pub(crate) quantity: &'static str,
    pub(crate) runs: usize,
    /// Share inside, with the interval that the tool ships.
    pub(crate) inside: f64,
    /// Runs whose kind other sources know, and their share inside intervals made from those alone.
    pub(crate) left_out_runs: usize,
    pub(crate) left_out_inside: f64,
}

/// The error of one published run, `ln(measured / predicted)`, with its runtime, precision and source.
struct Sample {
    runtime: String,
    precision: &'static str,
    source: String,
    value: f64,
}

fn samples(scored: &[Scored], quantity: Quantity) -> Vec<Sample> {
    scored
        .iter()
        .filter(|s| is_complete(s))
        .filter_map(|s| {
            let error = match quantity {
                Quantity::Time => s.error.step_time,
                Quantity::Memory => s.error.peak_memory,
                Quantity::Ratio => None,
            }?;
            Some(Sample {
                runtime: s.runtime.clone()?,
                precision: s.precision_kind?,
                source: s.file.clone(),
                value: -(1.0 + error).ln(),
            })
        })
        .collect()
}

/// The 80% interval of the errors for every pair of runtime and precision that has enough runs. `*` stands for all
/// runtimes, or all precisions.
fn kinds<'a>(samples: impl Iterator<Item = &'a Sample>) -> BTreeMap<(String, String), Residual> {
    let mut values: BTreeMap<(String, String), Vec<f64>> = BTreeMap::new();
    for sample in samples {
        for runtime in [sample.runtime.as_str(), "*"] {
            for precision in [sample.precision, "*"] {
                let key = (runtime.to_owned(), precision.to_owned());
                values.entry(key).or_default().push(sample.value);
            }
        }
    }
    values
        .into_iter()
        .filter_map(|(kind, values)| Some((kind, residuals::interval(&values)?)))
        .collect()
}

/// The 80% intervals as CSV: what `catalog/presets/runs/residuals.csv` holds, and predictions read.
pub(crate) fn table(scored: &[Scored], sweeps: &[Sweep]) -> String {
    let mut text = String::from(
        "# ln(measured / predicted) of the published runs, by kind: 10% and 90% order statistics.\n\
         # Made by `vescale-plan validate --residuals catalog/presets/runs/residuals.csv`.\n\
         # quantity,runtime,precision,runs,low,high; ratio: pairs of strategies inside a sweep.\n",
    );
    for quantity in [Quantity::Time, Quantity::Memory] {
        let samples = samples(scored, quantity);
        for ((runtime, precision), r) in kinds(samples.iter()) {
            line(&mut text, quantity, &runtime, &precision, r);
        }
    }
    let pairs: Vec<f64> = sweeps
        .iter()
        .flat_map(|sweep| sweep.ratio_residuals.iter().copied())
        .flat_map(|value| [value, -value])
        .collect();
    if let Some(ratio) = residuals::interval(&pairs) {
        line(&mut text, Quantity::Ratio, "*", "*", ratio);
    }
    text
}

fn line(text: &mut String, quantity: Quantity, runtime: &str, precision: &str, r: Residual) {
    let _ = writeln!(
        text,
        "{},{runtime},{precision},{},{:.4},{:.4}",
        quantity.name(),
        r.runs,
        r.low,
        r.high
    );
}

/// How many published runs lie inside their intervals of step time, and of memory.
pub(crate) fn coverage(scored: &[Scored]) -> Vec<Coverage> {
    [Quantity::Time, Quantity::Memory]
        .into_iter()
        .map(|quantity| {
            let samples = samples(scored, quantity);
            let all = kinds(samples.iter());
            let inside = samples
                .iter()
                .filter(|s| holds(&all, s) == Some(true))
                .count();
            let mut others = BTreeMap::new();
            for source in samples.iter().map(|s| &s.source) {
                others.entry(source.as_str()).or_insert_with(|| {
                    kinds(samples.iter().filter(|other| other.source != *source))
                });
            }
            let left_out: Vec<bool> = samples
                .iter()
                .filter_map(|s| holds(&others[s.source.as_str()], s))
                .collect();
            Coverage {
                quantity: quantity.name(),
                runs: samples.len(),
                inside: share(inside, samples.len()),
                left_out_runs: left_out.len(),
                left_out_inside: share(left_out.iter().filter(|&&i| i).count(), left_out.len()),
            }
        })
        .collect()
}

/// Whether a sample lies in its kind's interval; `None` when no kind has enough runs.
fn holds(kinds: &BTreeMap<(String, String), Residual>, sample: &Sample) -> Option<bool> {
    let any = "*".to_owned();
    let precision = sample.precision.to_owned();
    let residual = [
        (sample.runtime.clone(), precision.clone()),
        (sample.runtime.clone(), any.clone()),
        (any.clone(), precision),
        (any.clone(), any),
    ]
    .into_iter()
    .find_map(|kind| kinds.get(&kind))?;
    Some(residual.low <= sample.value && sample.value <= residual.high)
}

fn share(part: usize, whole: usize) -> f64 {
    part as f64 / whole.max(1) as f64
}
