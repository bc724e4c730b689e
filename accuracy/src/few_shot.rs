//! Accuracy when a few of a source's own runs are known: constants are fitted without that source,
//! the time factors of `own_runs` to its known runs only, and its other runs are predicted.

use std::collections::{BTreeMap, BTreeSet};

use catalog::Fitted;
use catalog::runs::Run;
use costmodel::CostModel;
use rayon::prelude::*;
use serde::Serialize;

use super::mapping::Mapped;
use super::own_runs::{self, Logs};
use super::score::{self, Scored};
use super::weighed::Weighed;

/// Number of random draws of the known runs, for every source.
const DRAWS: u64 = 50;

/// Logarithms of a time factor at which every run is predicted; step times between these points are interpolated.
const GRID: [f64; 5] = [-0.4, 0.0, 0.3, 0.8, 1.6];

/// Index in [`GRID`] of logarithm 0, the factor that changes nothing.
const UNCHANGED: usize = 1;

/// Errors on the remaining runs of all sources, once the factors are fitted to `known` runs of each source.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct FewShot {
    /// Number of runs known of each source.
    pub(crate) known: usize,
    /// Quantiles of the absolute relative errors, as means over the draws; every source weighs the same.
    pub(crate) median: f64,
    pub(crate) p90: f64,
    pub(crate) sources: Vec<Source>,
    /// `ln(measured / predicted)` of the remaining runs in all draws, each with its source.
    #[serde(skip)]
    pub(crate) residuals: Vec<(String, f64)>,
}

/// Errors on the remaining runs of one source: quantiles of the absolute relative errors, as means over the draws.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Source {
    pub(crate) name: String,
    /// Number of distinct configurations among the source's runs. A draw picks `known` of them, and takes one run of
    /// each as known; the runs of all other configurations are then predicted.
    pub(crate) configurations: usize,
    pub(crate) median: f64,
    pub(crate) p90: f64,
}

/// How the predicted step time of one run responds to the four time factors.
pub(crate) struct Response {
    source: String,
    /// Model, GPU, precision, workload and strategy as text: runs with the same text are one configuration.
    configuration: String,
    /// Logarithm of the measured step time.
    measured: f64,
    /// Logarithm of the predicted step time when all factors are 1.
    unchanged: f64,
    /// For every factor, how much each point of [`GRID`] changes the logarithm of the step time when the others are 1.
    along: [[f64; GRID.len()]; 4],
    /// Whether the run's steps have costs that it does not state.
    pub(crate) hides_costs: bool,
}

impl Response {
    /// Predicts a run at every point of [`GRID`], one factor at a time; `None` if it cannot be predicted, or does not
    /// state its step time.
    pub(crate) fn new(
        run: &Run,
        scored: &Scored,
        Mapped {
            scenario, strategy, ..
        }: &Mapped,
        fitted: &Fitted,
    ) -> Option<Self> {
        let measured = score::step_time(run)?;
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
            hides_costs: score::hides_costs(run),
        })
    }

    /// `ln(measured / predicted)` of the step time, predicted with all factors 1.
    pub(crate) fn off(&self) -> f64 {
        self.measured - self.unchanged
    }

    /// For each factor, how fast the logarithm of the step time grows with the factor's logarithm, from 1 upward.
    pub(crate) fn slopes(&self) -> Logs {
        self.along
            .map(|row| row[UNCHANGED + 1] / GRID[UNCHANGED + 1])
    }

    /// Logarithm of the step time under these factors: the changes that each makes alone are added up.
    fn time(&self, logs: Logs) -> f64 {
        let changes = self
            .along
            .iter()
            .zip(logs)
            .map(|(row, log)| along(row, log));
        self.unchanged + changes.sum::<f64>()
    }
}

/// Interpolates between the points of the grid, and extends the first and last piece beyond its ends.
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

/// Errors once `known` runs of every source are known; `None` if no source has enough configurations.
pub(crate) fn after<'r>(
    responses: impl Iterator<Item = &'r Response>,
    known: usize,
) -> Option<FewShot> {
    let drawn: Vec<(Source, Vec<Vec<f64>>)> = by_source(responses)
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

/// Residuals of one source's remaining runs in every draw; `None` if it has no more than `known` configurations.
fn of_source(name: &str, runs: &[&Response], known: usize) -> Option<(Source, Vec<Vec<f64>>)> {
    let configurations = configurations(runs);
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

/// Residuals of the remaining runs in one draw: the factors are fitted to one run of each of `known` configurations,
/// and the runs of the other configurations are predicted with them.
fn remaining(runs: &[&Response], configurations: &[&str], known: usize, seed: u64) -> Vec<f64> {
    let (chosen, own) = draw(runs, configurations, known, seed);
    let measured: Vec<f64> = own.iter().map(|run| run.measured).collect();
    let time = |run: usize, logs: Logs| Ok::<f64, std::convert::Infallible>(own[run].time(logs));
    let Ok(logs) = own_runs::fit(&measured, &time);
    let others = runs
        .iter()
        .filter(|r| !chosen.contains(&r.configuration.as_str()));
    others.map(|run| run.measured - run.time(logs)).collect()
}

/// Draws `known` of the configurations, and one run of each.
fn draw<'r, 'c>(
    runs: &[&'r Response],
    configurations: &[&'c str],
    known: usize,
    seed: u64,
) -> (Vec<&'c str>, Vec<&'r Response>) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut chosen = configurations.to_vec();
    rng.shuffle(&mut chosen);
    chosen.truncate(known);
    let own = chosen.iter().filter_map(|&configuration| {
        let same = runs.iter().filter(|r| r.configuration == configuration);
        let same: Vec<&Response> = same.copied().collect();
        rng.choice(same)
    });
    let own = own.collect();
    (chosen, own)
}

/// All draws of `known` runs, [`DRAWS`] for each source. Sources without further configurations are left out.
pub(crate) fn draws(responses: &[Response], known: usize) -> Vec<Vec<&Response>> {
    let mut drawn = Vec::new();
    for (_, runs) in by_source(responses.iter()) {
        let configurations = configurations(&runs);
        if configurations.len() > known {
            drawn.extend((0..DRAWS).map(|seed| draw(&runs, &configurations, known, seed).1));
        }
    }
    drawn
}

fn by_source<'r>(
    responses: impl Iterator<Item = &'r Response>,
) -> BTreeMap<&'r str, Vec<&'r Response>> {
    let mut by_source: BTreeMap<&str, Vec<&Response>> = BTreeMap::new();
    for response in responses {
        let runs = by_source.entry(&response.source).or_default();
        runs.push(response);
    }
    by_source
}

/// The distinct configurations of some runs.
fn configurations<'r>(runs: &[&'r Response]) -> Vec<&'r str> {
    let all: BTreeSet<&str> = runs.iter().map(|r| r.configuration.as_str()).collect();
    all.into_iter().collect()
}

/// Absolute relative error, `|predicted / measured - 1|`, of a residual `ln(measured / predicted)`.
pub(crate) fn error(residual: f64) -> f64 {
    ((-residual).exp() - 1.0).abs()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}
