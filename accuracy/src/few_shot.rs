//! How right predictions are once a few of a source's own runs are known: its constants are fitted without it, the
//! factors of `own_runs` on the known runs alone, and the other runs are predicted with them.

use std::collections::{BTreeMap, BTreeSet};

use catalog::Fitted;
use costmodel::CostModel;
use rayon::prelude::*;
use serde::Serialize;

use super::mapping::Mapped;
use super::own_runs::{self, Logs};
use super::score::Scored;
use super::weighed::Weighed;

/// Draws of the known runs of every source.
const DRAWS: u64 = 50;

/// Logarithms of a factor at which every run is predicted; between them its time is interpolated.
const GRID: [f64; 5] = [-0.4, 0.0, 0.3, 0.8, 1.6];

/// Place of no change in [`GRID`].
const UNCHANGED: usize = 1;

/// Errors on the remaining runs of all sources after some runs of each are known.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct FewShot {
    /// Number of known runs.
    pub(crate) known: usize,
    /// Means over the draws, every source weighing the same.
    pub(crate) median: f64,
    pub(crate) p90: f64,
    pub(crate) sources: Vec<Source>,
    /// `ln(measured / predicted)` of remaining runs in all draws, with their source.
    #[serde(skip)]
    pub(crate) residuals: Vec<(String, f64)>,
}

/// Errors on the remaining runs of a source: means over the draws.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Source {
    pub(crate) name: String,
    /// Number of its configurations; runs of one configuration are drawn together.
    pub(crate) configurations: usize,
    pub(crate) median: f64,
    pub(crate) p90: f64,
}

/// A run of a source, predicted with factors.
pub(crate) struct Response {
    source: String,
    /// Runs with the same text are one configuration.
    configuration: String,
    /// Logarithm of the measured step time.
    measured: f64,
    /// Logarithm of the predicted step time without factors.
    unchanged: f64,
    /// For every factor, by how much each of [`GRID`] changes the logarithm of the step time.
    along: [[f64; GRID.len()]; 4],
}

impl Response {
    /// Predicts a run along every factor; `None` if it cannot be predicted.
    pub(crate) fn new(
        scored: &Scored,
        Mapped {
            scenario, strategy, ..
        }: &Mapped,
        fitted: &Fitted,
        measured: f64,
    ) -> Option<Self> {
        let time = |logs: Logs| -> Option<f64> {
            let scenario = own_runs::with_factors(scenario, logs);
            let costs = CostModel::with_constants(scenario, fitted).ok()?;
            Some(costs.score(strategy).ok()?.step_time.0.ln())
        };
        let unchanged = time([0.0; 4])?;
        let mut along = [[0.0; GRID.len()]; 4];
        for (at, row) in along.iter_mut().enumerate() {
            for (cell, &log) in row.iter_mut().zip(&GRID) {
                if log != 0.0 {
                    let mut logs = [0.0; 4];
                    logs[at] = log;
                    *cell = time(logs)? - unchanged;
                }
            }
        }
        let gpu = scored.gpu.as_deref().unwrap_or("");
        let precision = scored.precision.as_deref().unwrap_or("");
        let strategy = plans::grammar::short(strategy);
        let w = &scenario.workload;
        Some(Self {
            source: scored.file.clone(),
            configuration: format!(
                "{} {gpu} {precision} {} {} {} {strategy}",
                scored.model, w.gpus, w.seq_len, w.global_batch
            ),
            measured: measured.ln(),
            unchanged,
            along,
        })
    }

    /// Logarithm of the step time: every factor changes it as if it were the only one.
    fn time(&self, logs: Logs) -> f64 {
        let changes = self
            .along
            .iter()
            .zip(logs)
            .map(|(row, log)| along(row, log));
        self.unchanged + changes.sum::<f64>()
    }
}

/// Interpolates between the points of the grid, and beyond its ends along the last piece.
fn along(row: &[f64; GRID.len()], log: f64) -> f64 {
    if log == 0.0 {
        return row[UNCHANGED];
    }
    let after = GRID.iter().position(|&point| point > log);
    let right = after.unwrap_or(GRID.len() - 1).max(1);
    let [from, to] = [right - 1, right];
    let share = (log - GRID[from]) / (GRID[to] - GRID[from]);
    row[from] + share * (row[to] - row[from])
}

/// The errors after `known` runs of every source.
pub(crate) fn after(responses: &[Response], known: usize) -> Option<FewShot> {
    let mut by_source: BTreeMap<&str, Vec<&Response>> = BTreeMap::new();
    for response in responses {
        by_source
            .entry(&response.source)
            .or_default()
            .push(response);
    }
    let drawn: Vec<(Source, Vec<Vec<f64>>)> = by_source
        .into_par_iter()
        .filter_map(|(name, runs)| of_source(name, &runs, known))
        .collect();
    let mut medians = Vec::new();
    let mut p90s = Vec::new();
    for draw in 0..DRAWS as usize {
        let of_draw = drawn.iter().flat_map(|(source, draws)| {
            let errors = draws[draw].iter();
            errors.map(|&residual| (source.name.as_str(), error(residual)))
        });
        let errors = Weighed::new(of_draw);
        medians.push(errors.quantile(0.5)?);
        p90s.push(errors.quantile(0.9)?);
    }
    let residuals = drawn.iter().flat_map(|(source, draws)| {
        let all = draws.iter().flatten();
        all.map(|&residual| (source.name.clone(), residual))
    });
    Some(FewShot {
        known,
        median: mean(&medians),
        p90: mean(&p90s),
        residuals: residuals.collect(),
        sources: drawn.into_iter().map(|(source, _)| source).collect(),
    })
}

/// The residuals of a source's remaining runs in every draw; `None` if it has too few configurations.
fn of_source(name: &str, runs: &[&Response], known: usize) -> Option<(Source, Vec<Vec<f64>>)> {
    let configurations: BTreeSet<&str> = runs.iter().map(|r| r.configuration.as_str()).collect();
    let configurations: Vec<&str> = configurations.into_iter().collect();
    if configurations.len() <= known {
        return None;
    }
    let draws: Vec<Vec<f64>> = (0..DRAWS)
        .map(|seed| remaining(runs, &configurations, known, seed))
        .collect();
    let errors: Vec<Weighed> = draws
        .iter()
        .map(|residuals| Weighed::new(residuals.iter().map(|&r| ((), error(r)))))
        .collect();
    let over_draws = |share: f64| {
        let all: Vec<f64> = errors.iter().filter_map(|e| e.quantile(share)).collect();
        mean(&all)
    };
    let source = Source {
        name: name.to_owned(),
        configurations: configurations.len(),
        median: over_draws(0.5),
        p90: over_draws(0.9),
    };
    Some((source, draws))
}

/// Fits the factors to runs of `known` configurations, one of each, and predicts the runs of the others.
fn remaining(runs: &[&Response], configurations: &[&str], known: usize, seed: u64) -> Vec<f64> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut order: Vec<&str> = configurations.to_vec();
    rng.shuffle(&mut order);
    let chosen = &order[..known];
    let own: Vec<&Response> = chosen
        .iter()
        .filter_map(|&configuration| {
            let same = runs.iter().filter(|r| r.configuration == configuration);
            let same: Vec<&Response> = same.copied().collect();
            rng.choice(same)
        })
        .collect();
    let measured: Vec<f64> = own.iter().map(|run| run.measured).collect();
    let time = |run: usize, logs: Logs| Ok::<f64, std::convert::Infallible>(own[run].time(logs));
    let Ok(logs) = own_runs::fit(&measured, &time);
    let others = runs
        .iter()
        .filter(|r| !chosen.contains(&r.configuration.as_str()));
    others.map(|run| run.measured - run.time(logs)).collect()
}

/// The size of the relative error, predicted over measured, of a residual `ln(measured / predicted)`.
fn error(residual: f64) -> f64 {
    ((-residual).exp() - 1.0).abs()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}
