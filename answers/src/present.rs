//! The strategy that a team trains with now, as it was read, and as JSON with the ways from it to the best plan.

use catalog::Precision;
use plans::json::{PredictedJson, StrategyJson};
use plans::present::Change;
use plans::{Candidate, Present, Strategy};
use serde::Serialize;

/// A strategy in use, as it was read.
#[derive(Clone, Debug)]
pub struct Read {
    /// Where it was read from: a path, or the strategy's text.
    pub from: String,
    /// The strategy.
    pub strategy: Strategy,
    /// Names of decisions that the best plan must share with the strategy in use.
    pub kept: Vec<String>,
    /// Sentences on what the strategy expresses only approximately, or what was assumed.
    pub notes: Vec<String>,
    /// Path of a plan file of the strategy.
    pub plan: String,
    /// The command that writes this plan file, if it is not there.
    pub writes_plan: Option<String>,
}

/// A strategy in use, as it was read and as it compares with the best plan.
#[derive(Clone, Copy)]
pub struct InUse<'a> {
    /// The strategy as it was read.
    pub read: &'a Read,
    /// Its prediction, what changes gain, and the path to the best plan.
    pub compared: &'a Present,
}

/// The strategy in use, as JSON.
#[derive(Serialize)]
pub struct PresentJson {
    from: String,
    strategy: StrategyJson,
    strategy_text: String,
    predicted: PredictedJson,
    /// Whether it fits with the probability that was asked for.
    fits: bool,
    /// Decisions that changes leave as they are.
    kept: Vec<String>,
    /// Half-width of the 80% interval of `ln` of the ratio of two step times.
    comparison_error: f64,
    /// The gain of the best plan; null if no plan fits.
    best_gain: Option<GainJson>,
    /// Every change of one decision. Those that fit come first; each group is sorted with the fastest first.
    changes: Vec<ChangeJson>,
    /// Successive changes to the best plan. Gains are against the present strategy.
    path: Vec<ChangeJson>,
    /// Where the strategy runs, on a cluster of several pools.
    #[serde(skip_serializing_if = "Option::is_none")]
    pools: Option<PoolsJson>,
    notes: Vec<String>,
}

/// Where a strategy in use runs on a cluster of several pools.
#[derive(Serialize)]
struct PoolsJson {
    /// Its devices; those of groups of replicas are separated by ` | `.
    devices: String,
    /// Its groups of replicas in words; empty if all are alike. With groups, `changes` is empty.
    groups: Vec<String>,
    /// The devices of the best plan, if no changes of single decisions lead to it.
    best_elsewhere: Option<String>,
}

/// The gain of a strategy against the one in use.
#[derive(Serialize)]
struct GainJson {
    seconds: f64,
    share: f64,
    /// Whether the difference is within the error of such comparisons.
    within_error: bool,
}

#[derive(Serialize)]
struct ChangeJson {
    decision: &'static str,
    change: String,
    strategy_text: String,
    step_time_s: f64,
    peak_memory_bytes: u64,
    p_fits: f64,
    fits: bool,
    /// Whether training gives other results than with the unchanged strategy.
    changes_results: bool,
    gain: GainJson,
}

impl PresentJson {
    /// The strategy in use against the best plan.
    #[must_use]
    pub fn new(in_use: InUse<'_>, precision: Precision, best: Option<&Candidate>) -> Self {
        let InUse { read, compared } = in_use;
        let gain = |step_time| GainJson {
            seconds: compared.gain(step_time).0,
            share: compared.share(step_time),
            within_error: compared.within_error(step_time),
        };
        let change = |change: &Change| ChangeJson {
            decision: change.decision,
            change: change.words.clone(),
            strategy_text: change.strategy.to_string(),
            step_time_s: change.step_time.0,
            peak_memory_bytes: change.peak_memory.0,
            p_fits: change.p_fits,
            fits: change.fits,
            changes_results: change.changes_results,
            gain: gain(change.step_time),
        };
        let Candidate {
            strategy,
            prediction,
            ..
        } = &compared.candidate;
        Self {
            from: read.from.clone(),
            strategy: StrategyJson::new(strategy.decisions(), precision),
            strategy_text: strategy.to_string(),
            predicted: PredictedJson::from(prediction),
            fits: compared.fits,
            kept: read.kept.clone(),
            comparison_error: compared.error,
            best_gain: best.map(|best| gain(best.prediction.step_time)),
            changes: compared.changes.iter().map(change).collect(),
            path: compared.path.iter().map(change).collect(),
            pools: compared.on_pools.as_ref().map(|on| PoolsJson {
                devices: on.devices.clone(),
                groups: on.groups.clone(),
                best_elsewhere: on.best_elsewhere.clone(),
            }),
            notes: read.notes.clone(),
        }
    }
}
