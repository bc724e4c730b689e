//! Ranking: would the plan that we choose have been a good one in a published sweep?
//!
//! A sweep is what one source measured of one model on one number of devices, with the same software, sequence length,
//! precision and state of the hardware; its members differ in strategy, whichever runtime predicts each. Times are per
//! token, so that strategies with different batches compare.

use std::collections::BTreeMap;

use catalog::runs::{Run, Status};
use serde::Serialize;

use super::score::Scored;
use super::summary::is_complete;

/// Pairs of strategies whose times differ by less than this share are not ranked: repeats of one strategy differ as
/// much. Median spread of repeated strategies in the BLOOM prequel and NeMo's tables: 2–4%.
const NOISE: f64 = 0.02;

/// One sweep, and how well its order was predicted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Sweep {
    pub(crate) name: String,
    pub(crate) strategies: usize,
    /// Number of pairs that differ by more than the noise.
    pub(crate) pairs: usize,
    /// Kendall's τ over those pairs.
    pub(crate) kendall_tau: Option<f64>,
    /// Time of the strategy predicted fastest over the fastest measured, less one.
    pub(crate) regret: f64,
    pub(crate) fastest: String,
    pub(crate) chosen: String,
    /// For every pair, `ln` of the measured over the predicted ratio of its times.
    #[serde(skip)]
    pub(crate) ratio_residuals: Vec<f64>,
}

/// Kendall's τ and regret over all sweeps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Ranking {
    pub(crate) sweeps: usize,
    pub(crate) mean_tau: Option<f64>,
    pub(crate) mean_regret: Option<f64>,
    pub(crate) median_tau: Option<f64>,
    /// Number of sweeps whose chosen strategy is within 3% of the fastest.
    pub(crate) within_3_percent: usize,
    pub(crate) median_regret: Option<f64>,
    pub(crate) largest_regret: Option<f64>,
}

/// A strategy of a sweep: seconds per token, measured (mean of repeats) and predicted.
struct Member {
    strategy: String,
    measured: f64,
    predicted: f64,
}

/// Seconds per token, measured and predicted.
type Times = (f64, f64);

/// Keeps only runs at the batch that most strategies of the sweep share, for strategies that were
/// measured at it: runs of one strategy at several batches are not repeats.
fn at_common_batch(
    strategies: BTreeMap<String, Vec<(u64, Times)>>,
) -> BTreeMap<String, Vec<Times>> {
    let mut users: BTreeMap<u64, usize> = BTreeMap::new();
    for runs in strategies.values() {
        let mut batches: Vec<u64> = runs.iter().map(|run| run.0).collect();
        batches.dedup();
        for batch in batches {
            *users.entry(batch).or_default() += 1;
        }
    }
    let common = users.iter().max_by_key(|&(_, count)| count).map(|u| *u.0);
    strategies
        .into_iter()
        .map(|(strategy, mut runs)| {
            if runs.iter().any(|run| Some(run.0) == common) {
                runs.retain(|run| Some(run.0) == common);
            }
            (strategy, runs.into_iter().map(|run| run.1).collect())
        })
        .collect()
}

/// The sweeps with at least two strategies.
pub(crate) fn sweeps(runs: &[(Run, String)], scored: &[Scored]) -> Vec<Sweep> {
    let mut groups: BTreeMap<String, BTreeMap<String, Vec<(u64, Times)>>> = BTreeMap::new();
    for ((run, _), s) in runs.iter().zip(scored) {
        if let Some((strategy, times)) = member(run, s) {
            let strategies = groups.entry(name(run, s)).or_default();
            let batch = run.global_batch.unwrap_or(0);
            strategies.entry(strategy).or_default().push((batch, times));
        }
    }
    groups
        .into_iter()
        .map(|(name, strategies)| (name, at_common_batch(strategies)))
        .filter(|(_, strategies)| strategies.len() > 1)
        .map(|(name, strategies)| sweep(name, strategies))
        .collect()
}

/// Summarises how well the order of all sweeps was predicted.
pub(crate) fn ranking(sweeps: &[Sweep]) -> Ranking {
    let sorted = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values
    };
    let taus = sorted(sweeps.iter().filter_map(|s| s.kendall_tau).collect());
    let regrets = sorted(sweeps.iter().map(|s| s.regret).collect());
    let median = |values: &[f64]| (!values.is_empty()).then(|| values[values.len() / 2]);
    let mean = |values: &[f64]| {
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    Ranking {
        sweeps: sweeps.len(),
        mean_tau: mean(&taus),
        mean_regret: mean(&regrets),
        median_tau: median(&taus),
        within_3_percent: regrets.iter().filter(|&&r| r <= 0.03).count(),
        median_regret: median(&regrets),
        largest_regret: regrets.last().copied(),
    }
}

/// A run's strategy with its times; `None` unless it has a measured and a predicted time.
fn member(run: &Run, s: &Scored) -> Option<(String, Times)> {
    if !is_complete(s) || run.status != Status::Ok {
        return None;
    }
    let tokens = (run.global_batch? * run.seq_len?) as f64;
    let measured = s.measured.step_time_s? / tokens;
    let predicted = s.predicted.as_ref()?.step_time_s / tokens;
    let overlaps = run.is_on("async_tp") || run.is_on("tp_comm_overlap");
    let strategy = format!(
        "{}{}",
        s.strategy.as_ref()?,
        if overlaps { " overlapped" } else { "" }
    );
    Some((strategy, (measured, predicted)))
}

/// Key of a sweep: everything that must be equal within it.
fn name(run: &Run, s: &Scored) -> String {
    let m = &run.model;
    let shape = [m.hidden, m.layers, m.heads, m.ffn, m.vocab, m.experts]
        .map(|size| size.map_or_else(|| "?".to_owned(), |v| v.to_string()))
        .join("/");
    // The release is part of the source up to the file (repository and commit).
    let release = run.source.split([':', '#']).next().unwrap_or("");
    let text = |flag: &str| {
        let value = run.flag(flag).map(ToString::to_string);
        value.unwrap_or_default().trim_matches('"').to_owned()
    };
    let state = [text("hw_state"), text("framework"), text("compile")].join(" ");
    let parts = [
        s.file.clone(),
        release.to_owned(),
        s.framework.clone(),
        s.model.clone(),
        shape,
        s.gpu.clone().unwrap_or_default(),
        format!("{} GPUs", run.num_gpus.unwrap_or(0)),
        format!("{} tokens", run.seq_len.unwrap_or(0)),
        s.precision.clone().unwrap_or_default(),
        state,
    ];
    parts
        .iter()
        .map(|part| part.trim())
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join(" · ")
}

fn sweep(name: String, strategies: BTreeMap<String, Vec<Times>>) -> Sweep {
    let members: Vec<Member> = strategies
        .into_iter()
        .map(|(strategy, times)| {
            let count = times.len() as f64;
            Member {
                strategy,
                measured: times.iter().map(|t| t.0).sum::<f64>() / count,
                predicted: times.iter().map(|t| t.1).sum::<f64>() / count,
            }
        })
        .collect();
    let mut score = 0i64;
    let mut pairs = 0;
    let mut ratio_residuals = Vec::new();
    for (index, a) in members.iter().enumerate() {
        for b in &members[index + 1..] {
            let measured = (a.measured / b.measured).ln();
            let predicted = (a.predicted / b.predicted).ln();
            ratio_residuals.push(measured - predicted);
            if measured.abs() > NOISE {
                pairs += 1;
                score += if measured * predicted > 0.0 { 1 } else { -1 };
            }
        }
    }
    let least = |time: fn(&Member) -> f64| {
        members
            .iter()
            .min_by(|a, b| time(a).total_cmp(&time(b)))
            .expect("a sweep has members")
    };
    let fastest = least(|m| m.measured);
    let chosen = least(|m| m.predicted);
    Sweep {
        name,
        strategies: members.len(),
        pairs,
        kendall_tau: (pairs > 0).then(|| score as f64 / pairs as f64),
        regret: chosen.measured / fastest.measured - 1.0,
        fastest: fastest.strategy.clone(),
        chosen: chosen.strategy.clone(),
        ratio_residuals,
    }
}
