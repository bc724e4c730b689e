//! 80% intervals of predictions, made from the errors on published runs of sources that were left out of the fit, and
//! how many runs lie inside their intervals.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use catalog::Reach;
use catalog::residuals::{self, Chance, Evidence, FEWEST, Kind, Quantity, Residual};
use serde::Serialize;

use super::few_shot::FewShot;
use super::score::Scored;
use super::summary::is_complete;
use super::sweeps::Sweep;
use super::weighed::Weighed;

/// Coverage: how many runs lie inside their 80% interval.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Coverage {
    pub(crate) quantity: &'static str,
    pub(crate) runs: usize,
    /// Share of runs inside the interval that a prediction prints.
    pub(crate) inside: f64,
    /// Share of runs inside an interval made from other sources only, every source weighing the same.
    pub(crate) left_out_inside: f64,
}

/// The error of one published run, `ln(measured / predicted)`.
struct Sample<'a> {
    kind: &'a Kind,
    reach: Reach,
    source: &'a str,
    value: f64,
}

fn samples(scored: &[Scored], quantity: Quantity) -> Vec<Sample<'_>> {
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
                kind: s.kind.as_ref()?,
                reach: s.reach,
                source: &s.file,
                value: -(1.0 + error).ln(),
            })
        })
        .collect()
}

/// The evidence for a kind of run from all sources but `without`.
fn evidence(samples: &[Sample<'_>], kind: &Kind, without: &str) -> Evidence {
    let like = || {
        let others = samples.iter().filter(|s| s.source != without);
        others.filter(|s| s.kind.is_like(kind))
    };
    let of_kind = like().filter(|s| s.kind.is_of_framework(kind)).count();
    Evidence::new(of_kind, like().count())
}

/// The interval for each amount of evidence, made from all sources, or from all but `without`.
fn intervals(
    quantity: Quantity,
    samples: &[Sample<'_>],
    without: Option<&str>,
) -> BTreeMap<&'static str, Residual> {
    let mut pools: BTreeMap<&'static str, Vec<(&str, f64)>> = BTreeMap::new();
    for sample in samples.iter().filter(|s| Some(s.source) != without) {
        let evidence = evidence(samples, sample.kind, sample.source);
        for name in [evidence.name(), "any"] {
            let pool = pools.entry(name).or_default();
            pool.push((sample.source, sample.value));
        }
    }
    pools
        .into_iter()
        .filter_map(|(name, pool)| Some((name, interval(quantity, &Weighed::new(pool))?)))
        .collect()
}

/// The assumed share of an unknown source's errors that lie below the upper end of a step-time interval: two of three thirds.
const UNKNOWN_BELOW: f64 = 2.0 / 3.0;

/// Which quantile `q` of the known errors is the upper end of an 80% interval; the lower end is the quantile `1 - q`.
///
/// From the quantile 0.1 to 0.9 lie 80% of the errors of the sources that we know. A user's system is a source that we do
/// not know, and may err more. So intervals of the step time are wider: one unknown source is added, with the weight of a
/// known one, and a third of its errors are assumed to lie above the interval, a third inside, a third below. Dunn,
/// Wasserman and Ramdas ("Distribution-Free Prediction Sets for Two-Layer Hierarchical Models", JASA 2023) are more cautious:
/// for the upper end they assume that all errors of the unknown source lie above it, for the lower end that all lie below.
///
/// To test this, each source's runs are compared with intervals made from all other sources (`ACCURACY.md` has the share that
/// lies inside). When this was chosen, the intervals held 84% of the runs. They would have held about 72% if no unknown source were
/// added, and about 89% if half of its errors were assumed to lie above the interval and half below.
///
/// For memory the quantile is 0.9 itself, and the intervals hold 76% of the runs. It is 0.9 for ratios, too: there a sweep is the
/// source, and many sweeps are known.
fn upper_quantile(quantity: Quantity, errors: &Weighed) -> f64 {
    match quantity {
        Quantity::Time => {
            let known = errors.sources();
            ((0.9 * (known + 1.0) - UNKNOWN_BELOW) / known).min(1.0)
        }
        Quantity::Memory | Quantity::Ratio => 0.9,
    }
}

/// The 80% interval of errors, widened to include the prediction itself; `None` below [`FEWEST`] runs.
fn interval(quantity: Quantity, errors: &Weighed) -> Option<Residual> {
    let upper = upper_quantile(quantity, errors);
    let enough = errors.len() >= FEWEST;
    Some(Residual {
        low: errors.quantile(1.0 - upper).filter(|_| enough)?.min(0.0),
        high: errors.quantile(upper)?.max(0.0),
        runs: errors.len(),
    })
}

/// The 80% intervals as CSV, the content of `catalog/presets/runs/residuals.csv`, which predictions read.
pub(crate) fn table(
    left_out: &[Scored],
    sweeps: &[Sweep],
    few_shot: &[FewShot],
    chance: Option<Chance>,
) -> String {
    let mut text = String::from(
        "# ln(measured / predicted) of published runs, each predicted by the constants of all other sources: ends of\n\
         # 80% intervals, every source weighing the same, by how much the others say of the run's kind.\n\
         # Made by `vescale-plan validate --leave-source-out --few-shot 0,1,3 --residuals catalog/presets/runs/residuals.csv`.\n\
         # quantity,evidence,runs,low,high; ratio: pairs of strategies inside a sweep.\n",
    );
    for quantity in [Quantity::Time, Quantity::Memory] {
        for (evidence, residual) in intervals(quantity, &samples(left_out, quantity), None) {
            line(&mut text, quantity, evidence, residual);
        }
    }
    let after = few_shot.iter().filter(|few| few.known > 0);
    for FewShot {
        known, residuals, ..
    } in after
    {
        let evidence = Evidence::Calibrated { runs: *known };
        if let Some(residual) = interval(Quantity::Time, &Weighed::new(residuals.iter().cloned())) {
            line(&mut text, Quantity::Time, evidence.name(), residual);
        }
    }
    if let Some(ratio) = ratio(sweeps) {
        line(&mut text, Quantity::Ratio, "any", ratio);
    }
    if let Some(chance) = chance {
        let _ = writeln!(
            text,
            "# fits,runs,even,slope: logarithm of the odds to fit = even + slope * room, of sources that list what did not \
             fit\n{}",
            chance.row()
        );
    }
    text.push_str(
        "# runs,runtime,architecture,precision,model,tokens per sequence,experts within or across fast links,number of runs\n",
    );
    let mut kinds: BTreeMap<(&Kind, Reach), usize> = BTreeMap::new();
    for sample in samples(left_out, Quantity::Time) {
        *kinds.entry((sample.kind, sample.reach)).or_default() += 1;
    }
    for ((kind, reach), runs) in kinds {
        let _ = writeln!(text, "{}", kind.row(reach, runs));
    }
    text
}

/// The interval of the ratio of two step times of one sweep.
fn ratio(sweeps: &[Sweep]) -> Option<Residual> {
    let pairs = sweeps.iter().enumerate().flat_map(|(index, sweep)| {
        let both = move |&value: &f64| [(index, value), (index, -value)];
        sweep.ratio_residuals.iter().flat_map(both)
    });
    interval(Quantity::Ratio, &Weighed::new(pairs))
}

fn line(text: &mut String, quantity: Quantity, evidence: &str, r: Residual) {
    let _ = writeln!(
        text,
        "{},{evidence},{},{:.4},{:.4}",
        quantity.name(),
        r.runs,
        r.low,
        r.high
    );
}

/// The intervals that each source's runs get from the errors of all other sources.
pub(crate) struct FromOthers<'a> {
    samples: Vec<Sample<'a>>,
    /// For each source, the interval for each amount of evidence.
    by_source: BTreeMap<&'a str, BTreeMap<&'static str, Residual>>,
}

impl<'a> FromOthers<'a> {
    pub(crate) fn new(scored: &'a [Scored], quantity: Quantity) -> Self {
        let samples = samples(scored, quantity);
        let sources: BTreeSet<&str> = scored.iter().map(|s| s.file.as_str()).collect();
        let of = |source| (source, intervals(quantity, &samples, Some(source)));
        Self {
            by_source: sources.into_iter().map(of).collect(),
            samples,
        }
    }

    /// The interval for a run of this kind and source; `None` if the other sources have too few runs.
    pub(crate) fn interval(&self, kind: &Kind, source: &str) -> Option<Residual> {
        let made = self.by_source.get(source)?;
        let evidence = evidence(&self.samples, kind, source);
        made.get(evidence.name()).or(made.get("any")).copied()
    }
}

/// How many published runs lie inside their interval of step time, and of memory.
pub(crate) fn coverage(scored: &[Scored]) -> Vec<Coverage> {
    [Quantity::Time, Quantity::Memory]
        .into_iter()
        .map(|quantity| {
            let holds = |r: Residual, s: &Sample<'_>| r.low <= s.value && s.value <= r.high;
            let others = FromOthers::new(scored, quantity);
            let mut by_source: BTreeMap<&str, Vec<bool>> = BTreeMap::new();
            for sample in &others.samples {
                let found = others.interval(sample.kind, sample.source);
                let held = found.is_some_and(|r| holds(r, sample));
                by_source.entry(sample.source).or_default().push(held);
            }
            let shares: Vec<f64> = by_source.values().map(|held| share(held)).collect();
            let printed = |s: &Sample<'_>| {
                let evidence = match quantity {
                    Quantity::Time => s.kind.evidence_for(s.reach).0,
                    Quantity::Memory | Quantity::Ratio => s.kind.evidence(),
                };
                holds(residuals::of(quantity, evidence), s)
            };
            let held: Vec<bool> = others.samples.iter().map(printed).collect();
            Coverage {
                quantity: quantity.name(),
                runs: held.len(),
                inside: share(&held),
                left_out_inside: shares.iter().sum::<f64>() / shares.len().max(1) as f64,
            }
        })
        .collect()
}

fn share(held: &[bool]) -> f64 {
    held.iter().filter(|&&h| h).count() as f64 / held.len().max(1) as f64
}
