//! Leave-one-source-out validation: the fitted constants are fitted again on the runs of all sources but one, and the
//! runs of that one are predicted with them.
//!
//! A fit minimises the mean of `min(|ln(predicted / measured)|, CLIP)` over at most [`MOST`] runs
//! of each source, every source weighing the same, for step time plus memory, plus [`PULL`] times
//! the squared distances of the constants from their priors, which benchmarks give. It is a pattern
//! search from the priors: each constant in turn takes a step up or down if that lowers the sum; if
//! none does, two move at a time, which helps where one alone cannot, as with a rate and its cap;
//! then steps halve. A constant that affects no run of the other sources stays at its prior.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use catalog::fitted::{self, Constant, Fitted};
use catalog::runs::{Run, Status, Tier};
use catalog::runtime::Overheads;
use catalog::{Architecture, Origin, Precision, Seconds};
use costmodel::{CostModel, Scenario};
use rayon::prelude::*;
use serde::Serialize;

use super::assumptions::{self, Tested};
use super::few_shot::{self, FewShot, Response};
use super::fits::{self, Band};
use super::intervals::{self, Coverage};
use super::mapping::{self, Mapped};
use super::score::{self, Measured, Scored};
use super::summary::{self, Stats, is_complete};
use super::sweeps::{self, Ranking, Sweep};
use super::weighed::Weighed;

/// Upper limit of one run's error in the mean, so that a run no constant explains cannot dominate.
const CLIP: f64 = 0.3;

/// Added to the mean for a constant a whole range from its prior; grows with the square of the
/// distance. Where runs tell two sets of values apart by less than this, benchmarks decide.
const PULL: f64 = 1e-3;

/// Largest number of runs of one source in a fit, spread evenly over its list, so that a large source does not
/// dominate.
const MOST: usize = 16;

/// First step, as a share of a constant's range ([`Parameter::position`]); the last is a sixty-fourth.
const FIRST_STEP: f64 = 0.25;
const LAST_STEP: f64 = 1.0 / 64.0;

/// Two constants move at a time while steps are at least this large; with finer steps only one moves.
const PAIRS_FROM: f64 = 1.0 / 16.0;

/// Steps halve when a round lowers the mean by less than this.
const SMALLEST_GAIN: f64 = 1e-4;

/// A constant that is fitted again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Price(Constant),
    Transfer,
    Launch,
    Slowdown,
}

/// A constant with its bounds and its prior, the value known without runs.
#[derive(Clone, Debug)]
struct Parameter {
    kind: Kind,
    name: String,
    prior: f64,
    range: (f64, f64),
    shipped: f64,
}

impl Parameter {
    /// Position of a value in the range, 0 to 1; on a logarithmic scale if the range is positive.
    fn position(&self, value: f64) -> f64 {
        let (low, high) = self.range;
        if low > 0.0 {
            (value / low).ln() / (high / low).ln()
        } else {
            (value - low) / (high - low)
        }
    }

    /// The value at a position of the range.
    fn at(&self, position: f64) -> f64 {
        let (low, high) = self.range;
        let position = position.clamp(0.0, 1.0);
        if low > 0.0 {
            low * (high / low).powf(position)
        } else {
            low + position * (high - low)
        }
    }
}

/// Errors on the runs of one published source, with constants fitted on all other sources and with the shipped constants.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Source {
    pub(crate) name: String,
    pub(crate) shipped: Option<Stats>,
    pub(crate) left_out: Option<Stats>,
    pub(crate) memory_shipped: Option<Stats>,
    pub(crate) memory_left_out: Option<Stats>,
    /// The constants found without this source, in the order of [`LeftOut::constants`].
    pub(crate) constants: Vec<f64>,
}

/// A constant's values: from benchmarks, as shipped, and fitted on all sources.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Found {
    pub(crate) name: String,
    pub(crate) prior: f64,
    pub(crate) shipped: f64,
    pub(crate) all: f64,
    /// Number of sources with a run that depends on it.
    pub(crate) sources: usize,
}

/// Quantiles of the absolute errors over all sources, each weighing the same.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Equal {
    pub(crate) median: f64,
    pub(crate) p90: f64,
}

/// Results of leaving out every source in turn.
#[derive(Debug, Serialize)]
pub(crate) struct LeftOut {
    /// Errors of step time; those of sources whose runs hide costs ([`score::hides_costs`]) after one of their own runs
    /// is known, of all others without any.
    pub(crate) step_time: Option<Equal>,
    pub(crate) peak_memory: Option<Equal>,
    pub(crate) sources: Vec<Source>,
    pub(crate) constants: Vec<Found>,
    pub(crate) ranking: Ranking,
    pub(crate) intervals: Vec<Coverage>,
    /// How often runs fitted, by their predicted probability to fit.
    pub(crate) fits: Vec<Band>,
    /// Number of runs that did run but are predicted not to fit.
    pub(crate) wrongly_too_large: usize,
    /// Errors on a source's remaining runs once some of its runs are known, one entry per number of known runs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) few_shot: Vec<FewShot>,
    /// What `calibrate` assumes about systems, tested on these runs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) assumptions: Vec<Tested>,
    #[serde(skip)]
    pub(crate) runs: Vec<Scored>,
    #[serde(skip)]
    pub(crate) sweeps: Vec<Sweep>,
}

/// A published run, prepared to be predicted with any constants.
struct Sample {
    source: String,
    mapped: Mapped,
    measured: Measured,
    /// For every parameter, whether the run's prediction depends on it.
    touched: Vec<bool>,
    memo: Mutex<BTreeMap<Vec<u64>, Residuals>>,
}

/// The errors of one run, as `ln(predicted / measured)`.
#[derive(Clone, Copy, Debug, Default)]
struct Residuals {
    time: Option<f64>,
    memory: Option<f64>,
}

/// Leaves each source out in turn; `scored` are the runs as predicted with the shipped constants.
/// For each number in `known`, the source is predicted once more with that number of its runs
/// known.
pub(crate) fn leave_source_out(
    runs: &[(Run, String)],
    scored: &[Scored],
    known: &[usize],
    progress: &dyn Fn(f64),
) -> LeftOut {
    let parameters = parameters();
    let samples = samples(runs, &parameters);
    let mut names: Vec<&str> = samples.iter().map(|s| s.source.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let all = fit(&parameters, &chosen(&samples, None));
    let mut sources = Vec::new();
    let mut responses = Vec::new();
    let mut predicted = scored.to_vec();
    // The fit on all runs is one more step.
    let steps = (names.len() + 1) as f64;
    for (done, &name) in names.iter().enumerate() {
        progress((done + 1) as f64 / steps);
        let found = fit(&parameters, &chosen(&samples, Some(name)));
        let own = runs.par_iter().zip(&mut predicted);
        let own = own.filter(|((_, source), _)| source == name);
        own.for_each(|((run, source), scored)| {
            let constants = |scenario: &mut Scenario| apply(&parameters, &found, scenario);
            let left_out = scored.predicted.as_ref().and(scored.skipped.clone());
            *scored = score::score(run, source, &constants, left_out);
        });
        let wanted = |run: &Run| !known.is_empty() || score::hides_costs(run);
        let own = runs.par_iter().zip(&predicted);
        let own = own.filter(|((run, source), _)| source == name && wanted(run));
        responses.par_extend(own.filter_map(|((run, _), scored)| {
            response(run, scored, &|scenario| {
                apply(&parameters, &found, scenario)
            })
        }));
        sources.push(Source::new(name, scored, &predicted, found));
    }
    let sweeps = sweeps::sweeps(runs, &predicted);
    LeftOut {
        step_time: equal(
            errors(&predicted, |s| s.error.step_time).chain(after_one_run(&responses)),
        ),
        peak_memory: equal(errors(&predicted, |s| s.error.peak_memory)),
        sources,
        constants: constants(&parameters, &all, &samples),
        ranking: sweeps::ranking(&sweeps),
        intervals: intervals::coverage(&predicted),
        fits: fits::bands(&predicted),
        few_shot: known
            .iter()
            .filter_map(|&known| few_shot::after(responses.iter(), known))
            .collect(),
        assumptions: assumptions::tested(&responses, known),
        wrongly_too_large: summary::wrongly_too_large(predicted.iter().filter(|s| is_complete(s))),
        runs: predicted,
        sweeps,
    }
}

impl Source {
    /// The errors of a source's runs as predicted with the shipped constants, and with these, which were fitted without
    /// it.
    fn new(name: &str, shipped: &[Scored], left_out: &[Scored], constants: Vec<f64>) -> Self {
        let errors = |runs: &[Scored], error: fn(&Scored) -> Option<f64>| {
            let own = runs.iter().filter(|s| s.file == name && is_complete(s));
            summary::stats(&own.filter_map(error).collect::<Vec<f64>>())
        };
        Self {
            name: name.to_owned(),
            shipped: errors(shipped, |s| s.error.step_time),
            left_out: errors(left_out, |s| s.error.step_time),
            memory_shipped: errors(shipped, |s| s.error.peak_memory),
            memory_left_out: errors(left_out, |s| s.error.peak_memory),
            constants,
        }
    }
}

/// How a run's predicted time responds to time factors; `None` unless the run succeeded and its facts are complete.
fn response(
    run: &Run,
    scored: &Scored,
    constants: &dyn Fn(&mut Scenario) -> Fitted,
) -> Option<Response> {
    if !is_complete(scored) || scored.status != Status::Ok || scored.predicted.is_none() {
        return None;
    }
    let mut mapped = mapping::map(run).ok()?;
    let fitted = constants(&mut mapped.scenario);
    Response::new(run, scored, &mapped, &fitted)
}

fn constants(parameters: &[Parameter], all: &[f64], samples: &[Sample]) -> Vec<Found> {
    let found = parameters.iter().zip(all).enumerate();
    found
        .map(|(index, (parameter, &all))| {
            let touched = samples.iter().filter(|s| s.touched[index]);
            let sources: BTreeSet<&str> = touched.map(|s| s.source.as_str()).collect();
            Found {
                name: parameter.name.clone(),
                prior: parameter.prior,
                shipped: parameter.shipped,
                all,
                sources: sources.len(),
            }
        })
        .collect()
}

/// The absolute errors of all runs with complete facts, each with its source.
fn errors(
    runs: &[Scored],
    error: fn(&Scored) -> Option<f64>,
) -> impl Iterator<Item = (String, f64)> {
    let complete = runs.iter().filter(|run| is_complete(run));
    complete.filter_map(move |run| Some((run.file.clone(), error(run)?.abs())))
}

/// The absolute errors of step times of runs that hide costs, each with its source, after one run of the source is
/// known.
fn after_one_run(responses: &[Response]) -> Vec<(String, f64)> {
    let hidden = responses.iter().filter(|response| response.hides_costs);
    let found = few_shot::after(hidden, 1);
    let residuals = found.map(|found| found.residuals).unwrap_or_default();
    let error = |(source, residual)| (source, few_shot::error(residual));
    residuals.into_iter().map(error).collect()
}

/// Quantiles of errors, each given with its source, with every source weighing the same.
fn equal(errors: impl Iterator<Item = (String, f64)>) -> Option<Equal> {
    let errors = Weighed::new(errors);
    Some(Equal {
        median: errors.quantile(0.5)?,
        p90: errors.quantile(0.9)?,
    })
}

/// Sets a scenario's runtime constants to these values, and returns the constants of prices.
fn apply(parameters: &[Parameter], values: &[f64], scenario: &mut Scenario) -> Fitted {
    let mut constants = Fitted::default();
    let overheads = &mut scenario.runtime.overheads;
    let fitted = |origin: Origin| origin == Origin::Fitted;
    for (parameter, &value) in parameters.iter().zip(values) {
        match parameter.kind {
            Kind::Price(constant) => constants = constants.with(constant, value),
            Kind::Transfer if fitted(overheads.transfer.origin) => {
                overheads.transfer.value = Seconds(value * 1e-3);
            }
            Kind::Launch if fitted(overheads.launch.origin) => {
                overheads.launch.value = Seconds(value * 1e-6);
            }
            Kind::Slowdown if fitted(overheads.overlap_slowdown.origin) => {
                overheads.overlap_slowdown.value = value;
            }
            Kind::Transfer | Kind::Launch | Kind::Slowdown => {}
        }
    }
    constants
}

/// The runs that a fit uses.
fn chosen<'s>(samples: &'s [Sample], without: Option<&str>) -> Vec<&'s Sample> {
    let mut by_source: BTreeMap<&str, Vec<&Sample>> = BTreeMap::new();
    for sample in samples
        .iter()
        .filter(|s| Some(s.source.as_str()) != without)
    {
        by_source.entry(&sample.source).or_default().push(sample);
    }
    by_source
        .into_values()
        .flat_map(|list| {
            let count = list.len().min(MOST);
            let every = list.len() as f64 / count as f64;
            (0..count).map(move |i| list[(i as f64 * every) as usize])
        })
        .collect()
}

fn fit(parameters: &[Parameter], samples: &[&Sample]) -> Vec<f64> {
    let mut values: Vec<f64> = parameters.iter().map(|p| p.prior).collect();
    let mut least = objective(parameters, samples, &values);
    let mut step = FIRST_STEP;
    while step >= LAST_STEP {
        let before = least;
        let count = parameters.len();
        let singles = (0..count).map(|i| (i, i));
        for (i, j) in singles {
            try_moves(parameters, samples, step, (i, j), &mut values, &mut least);
        }
        if step >= PAIRS_FROM && least > before - SMALLEST_GAIN {
            let pairs = (0..count).flat_map(|i| (i + 1..count).map(move |j| (i, j)));
            for (i, j) in pairs.filter(|&(i, j)| together(samples, i, j)) {
                try_moves(parameters, samples, step, (i, j), &mut values, &mut least);
            }
        }
        if least > before - SMALLEST_GAIN {
            step /= 2.0;
        }
    }
    values
}

/// Whether some run's prediction depends on both parameters.
fn together(samples: &[&Sample], i: usize, j: usize) -> bool {
    samples.iter().any(|s| s.touched[i] && s.touched[j])
}

/// Moves one constant (`i = j`) or two by a step each, up or down, and keeps the first move that lowers the mean.
fn try_moves(
    parameters: &[Parameter],
    samples: &[&Sample],
    step: f64,
    (i, j): (usize, usize),
    values: &mut Vec<f64>,
    least: &mut f64,
) {
    let moved = |value: f64, index: usize, direction: f64| {
        parameters[index].at(parameters[index].position(value) + direction * step)
    };
    let second: &[f64] = if i == j { &[0.0] } else { &[1.0, -1.0] };
    for direction in [1.0, -1.0] {
        for &other in second {
            let mut candidate = values.clone();
            candidate[i] = moved(candidate[i], i, direction);
            candidate[j] = moved(candidate[j], j, other);
            let mean = objective(parameters, samples, &candidate);
            if mean < *least - 1e-6 {
                *least = mean;
                *values = candidate;
                return;
            }
        }
    }
}

fn objective(parameters: &[Parameter], samples: &[&Sample], values: &[f64]) -> f64 {
    let residuals = predict_all(parameters, samples, values);
    let mut by_source: BTreeMap<&str, [Vec<f64>; 2]> = BTreeMap::new();
    for (sample, residuals) in samples.iter().zip(&residuals) {
        let [times, memories] = by_source.entry(&sample.source).or_default();
        times.extend(residuals.time.map(|r| r.abs().min(CLIP)));
        memories.extend(residuals.memory.map(|r| r.abs().min(CLIP)));
    }
    let mean = |list: &[f64]| list.iter().sum::<f64>() / list.len().max(1) as f64;
    let of_source = |quantity: usize| {
        let means: Vec<f64> = by_source
            .values()
            .map(|lists| &lists[quantity])
            .filter(|list| !list.is_empty())
            .map(|list| mean(list))
            .collect();
        mean(&means)
    };
    let distance = |(parameter, &value): (&Parameter, &f64)| {
        (parameter.position(value) - parameter.position(parameter.prior)).powi(2)
    };
    let from_priors: f64 = parameters.iter().zip(values).map(distance).sum();
    of_source(0) + of_source(1) + PULL * from_priors
}

fn predict_all(parameters: &[Parameter], samples: &[&Sample], values: &[f64]) -> Vec<Residuals> {
    samples
        .par_iter()
        .map(|sample| sample.residuals(parameters, values))
        .collect()
}

impl Sample {
    fn residuals(&self, parameters: &[Parameter], values: &[f64]) -> Residuals {
        let key: Vec<u64> = values
            .iter()
            .zip(&self.touched)
            .filter(|(_, touched)| **touched)
            .map(|(value, _)| value.to_bits())
            .collect();
        let poisoned = "no thread panics while holding the memo";
        if let Some(found) = self.memo.lock().expect(poisoned).get(&key) {
            return *found;
        }
        let residuals = self.predict(parameters, values);
        self.memo.lock().expect(poisoned).insert(key, residuals);
        residuals
    }

    fn predict(&self, parameters: &[Parameter], values: &[f64]) -> Residuals {
        let mut scenario = self.mapped.scenario.clone();
        let constants = apply(parameters, values, &mut scenario);
        let Ok(costs) = CostModel::with_constants(scenario, &constants) else {
            return Residuals::default();
        };
        let ratio = |predicted: f64, measured: Option<f64>| {
            measured.filter(|m| *m > 0.0).map(|m| (predicted / m).ln())
        };
        let Some(counter) = self.measured.memory_counter else {
            let time = costs.score(&self.mapped.strategy).ok();
            return Residuals {
                time: time.and_then(|s| ratio(s.step_time.0, self.measured.step_time_s)),
                memory: None,
            };
        };
        let Ok(prediction) = costs.predict(&self.mapped.strategy) else {
            return Residuals::default();
        };
        let memory = score::like_counter(&prediction, counter);
        Residuals {
            time: ratio(prediction.step_time.0, self.measured.step_time_s),
            memory: ratio(memory, self.measured.peak_memory_bytes),
        }
    }
}

fn samples(runs: &[(Run, String)], parameters: &[Parameter]) -> Vec<Sample> {
    runs.iter()
        .enumerate()
        .filter(|(_, (run, _))| {
            run.status == Status::Ok && matches!(run.tier, Some(Tier::A | Tier::B))
        })
        .filter(|(index, _)| super::contradictions::contradicted(runs, *index).is_none())
        .filter_map(|(_, (run, source))| {
            let mapped = mapping::map(run).ok()?;
            let touched = parameters
                .iter()
                .map(|parameter| touches(parameter.kind, &mapped))
                .collect();
            Some(Sample {
                source: source.clone(),
                measured: score::measured(run),
                mapped,
                touched,
                memo: Mutex::default(),
            })
        })
        .collect()
}

/// Whether a run's prediction depends on a constant.
fn touches(kind: Kind, mapped: &Mapped) -> bool {
    let scenario = &mapped.scenario;
    let overheads = &scenario.runtime.overheads;
    let architecture = scenario.cluster.device.architecture;
    let throttled = matches!(architecture, Architecture::Hopper | Architecture::Blackwell);
    let eight_bits = scenario.workload.precision == Precision::Fp8;
    match kind {
        Kind::Price(Constant::TrainingTime) => throttled,
        Kind::Price(Constant::SustainedShare8) => throttled && eight_bits,
        Kind::Transfer => overheads.transfer.origin == Origin::Fitted,
        Kind::Launch => overheads.launch.origin == Origin::Fitted,
        Kind::Slowdown => {
            let fitted = overheads.overlap_slowdown.origin == Origin::Fitted;
            fitted && scenario.workload.gpus > 1 && !scenario.power_limits_products()
        }
    }
}

/// The parameters to fit: constants of the price tables, and overheads that runtime presets mark as fitted.
fn parameters() -> Vec<Parameter> {
    let prices = fitted::entries().iter().map(|entry| Parameter {
        kind: Kind::Price(entry.name),
        name: entry.what.clone(),
        prior: entry.prior,
        range: entry.range,
        shipped: entry.value,
    });
    let overhead = |kind, name: &str, prior, range, value: fn(&Overheads) -> (Origin, f64)| {
        let shipped = catalog::load::runtime_names()
            .iter()
            .filter_map(|preset| catalog::load::runtime(&preset.name).ok())
            .map(|runtime| value(&runtime.overheads))
            .find(|(origin, _)| *origin == Origin::Fitted)
            .map_or(prior, |(_, value)| value);
        Parameter {
            kind,
            name: name.to_owned(),
            prior,
            range,
            shipped,
        }
    };
    prices
        .chain([
            // The prior is the value of the parent runtime.
            overhead(
                Kind::Transfer,
                "DeepSpeed's pipeline engine, time per transfer beside its bytes, ms",
                0.0,
                (0.0, 16.0),
                |o| (o.transfer.origin, o.transfer.value.0 * 1e3),
            ),
            // The prior is from traces of two systems.
            overhead(
                Kind::Launch,
                "time in which Python launches a kernel, us",
                45.0,
                (10.0, 100.0),
                |o| (o.launch.origin, o.launch.value.0 * 1e6),
            ),
            // The prior is the slow-down if NCCL takes 24 of 132 multiprocessors.
            overhead(
                Kind::Slowdown,
                "slow-down of kernels beside NCCL's collectives",
                1.22,
                (1.15, 1.8),
                |o| (o.overlap_slowdown.origin, o.overlap_slowdown.value),
            ),
        ])
        .collect()
}
