//! Leave-one-source-out: the fitted constants are fitted again on the runs of all sources but one, and
//! the runs of that one are predicted with them.
//!
//! What is minimised over the constants is the mean of `min(|ln(predicted / measured)|, CLIP)` over at
//! most [`MOST`] runs of each source, step time and memory together. The search is a pattern search: from
//! what benchmarks alone say, each constant in turn takes a step up or down if that lowers the mean;
//! when none does, two at a time, which finds what one alone cannot, as where a rate and its cap trade;
//! then steps halve. A constant that no other source knows stays at its prior; a runtime's
//! own stays at its parent runtime's value.

use std::collections::BTreeMap;
use std::sync::Mutex;

use catalog::fitted::{self, Constant, Fitted};
use catalog::runs::Run;
use catalog::runtime::{AttentionKernel, Overheads, Rewrite};
use catalog::{Architecture, Origin, Precision, Seconds};
use costmodel::CostModel;
use rayon::prelude::*;
use serde::Serialize;

use super::mapping::{self, Mapped};
use super::score::{self, Measured};
use super::summary::{self, Stats};

/// Largest share of one run in the mean: a run that no constant explains pulls none.
const CLIP: f64 = 0.3;

/// Most runs of one source in a fit, spread evenly over its list, so that a large source does not
/// decide alone.
const MOST: usize = 60;

/// Steps: a quarter of the range first, a sixty-fourth last.
const FIRST_STEP: f64 = 0.25;
const LAST_STEP: f64 = 1.0 / 64.0;

/// Steps halve when a round lowers the mean by less than this.
const SMALLEST_GAIN: f64 = 1e-4;

/// A constant under refit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Price(Constant),
    GradientByte,
    Transfer,
    OverlapSlowdown,
    Fragmentation,
}

/// A constant with its bounds and what is known of it without runs.
#[derive(Clone, Debug)]
struct Parameter {
    kind: Kind,
    name: String,
    prior: f64,
    range: (f64, f64),
    shipped: f64,
}

/// Errors of one source with the shipped constants and with those of all other sources.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Fold {
    pub(crate) source: String,
    pub(crate) prior: Option<Stats>,
    pub(crate) shipped: Option<Stats>,
    /// With the constants found on all sources, its own among them.
    pub(crate) fitted: Option<Stats>,
    pub(crate) left_out: Option<Stats>,
    pub(crate) memory_shipped: Option<Stats>,
    pub(crate) memory_left_out: Option<Stats>,
    /// The constants found without this source, in the order of [`Refit::constants`].
    pub(crate) constants: Vec<f64>,
}

/// A constant: what benchmarks say, what is shipped, what a fit on all sources finds.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Found {
    pub(crate) name: String,
    pub(crate) prior: f64,
    pub(crate) shipped: f64,
    pub(crate) all: f64,
}

/// Everything the refits found.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Refit {
    pub(crate) constants: Vec<Found>,
    pub(crate) sources: Vec<Fold>,
    /// All runs, each predicted with the constants found without its source.
    pub(crate) all: Fold,
    /// Median over sources of a source's left-out median.
    pub(crate) median_of_medians: Option<f64>,
}

/// A run that can be predicted with any constants.
struct Sample {
    source: String,
    mapped: Mapped,
    measured: Measured,
    complete: bool,
    /// Which parameters its prediction can depend on.
    touched: Vec<bool>,
    memo: Mutex<BTreeMap<Vec<u64>, Residuals>>,
}

/// `ln(predicted / measured)` of one run.
#[derive(Clone, Copy, Debug, Default)]
struct Residuals {
    time: Option<f64>,
    memory: Option<f64>,
}

/// Leaves each source out in turn.
pub(crate) fn leave_one_out(runs: &[(Run, String)], progress: &dyn Fn(f64)) -> Refit {
    let parameters = parameters();
    let samples = samples(runs, &parameters);
    let shipped: Vec<f64> = parameters.iter().map(|p| p.shipped).collect();
    let priors: Vec<f64> = parameters.iter().map(|p| p.prior).collect();
    let mut sources: Vec<&str> = samples.iter().map(|s| s.source.as_str()).collect();
    sources.sort_unstable();
    sources.dedup();
    let all = fit(&parameters, &chosen(&samples, None));
    let mut folds = Vec::new();
    let mut together: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    // The fit of all runs is one step more.
    let steps = (sources.len() + 1) as f64;
    for (done, &source) in sources.iter().enumerate() {
        progress((done + 1) as f64 / steps);
        let found = fit(&parameters, &chosen(&samples, Some(source)));
        let own: Vec<&Sample> = samples
            .iter()
            .filter(|s| s.complete && s.source == source)
            .collect();
        if own.is_empty() {
            continue;
        }
        let fold = fold(
            source,
            &parameters,
            &own,
            [&priors, &shipped, &all, &found],
            &mut together,
        );
        folds.push(fold);
    }
    let mut medians: Vec<f64> = folds
        .iter()
        .filter_map(|f| f.left_out.map(|s| s.median))
        .collect();
    medians.sort_by(f64::total_cmp);
    let of = |name: &str| together.get(name).and_then(|errors| summary::stats(errors));
    Refit {
        all: Fold {
            source: "all".to_owned(),
            prior: of("prior"),
            shipped: of("shipped"),
            fitted: of("fitted"),
            left_out: of("left out"),
            memory_shipped: of("memory shipped"),
            memory_left_out: of("memory left out"),
            constants: all.clone(),
        },
        constants: parameters
            .iter()
            .zip(&all)
            .map(|(p, &all)| Found {
                name: p.name.clone(),
                prior: p.prior,
                shipped: p.shipped,
                all,
            })
            .collect(),
        sources: folds,
        median_of_medians: medians.get(medians.len() / 2).copied(),
    }
}

/// Errors of one source's runs under three sets of constants, also added to those of all sources.
fn fold(
    source: &str,
    parameters: &[Parameter],
    own: &[&Sample],
    [priors, shipped, all, found]: [&[f64]; 4],
    together: &mut BTreeMap<&'static str, Vec<f64>>,
) -> Fold {
    let mut errors = |name: &'static str, values: &[f64], memory: bool| {
        let list: Vec<f64> = predict_all(parameters, own, values)
            .into_iter()
            .filter_map(|r| if memory { r.memory } else { r.time })
            .map(f64::exp_m1)
            .collect();
        together.entry(name).or_default().extend(&list);
        summary::stats(&list)
    };
    Fold {
        source: source.to_owned(),
        prior: errors("prior", priors, false),
        shipped: errors("shipped", shipped, false),
        fitted: errors("fitted", all, false),
        left_out: errors("left out", found, false),
        memory_shipped: errors("memory shipped", shipped, true),
        memory_left_out: errors("memory left out", found, true),
        constants: found.to_vec(),
    }
}

/// Runs that a fit sees.
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
        if least > before - SMALLEST_GAIN {
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

/// Whether some run's prediction can depend on both.
fn together(samples: &[&Sample], i: usize, j: usize) -> bool {
    samples.iter().any(|s| s.touched[i] && s.touched[j])
}

/// Moves one constant (`i = j`) or two by a step each, up or down, and stays at the first better place.
fn try_moves(
    parameters: &[Parameter],
    samples: &[&Sample],
    step: f64,
    (i, j): (usize, usize),
    values: &mut Vec<f64>,
    least: &mut f64,
) {
    let moved = |value: f64, index: usize, direction: f64| {
        let (low, high) = parameters[index].range;
        (value + direction * step * (high - low)).clamp(low, high)
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
    let mean = |list: Vec<f64>| list.iter().sum::<f64>() / list.len().max(1) as f64;
    let clipped = |r: f64| r.abs().min(CLIP);
    let time = residuals.iter().filter_map(|r| r.time).map(clipped);
    let memory = residuals.iter().filter_map(|r| r.memory).map(clipped);
    mean(time.collect()) + mean(memory.collect())
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
        let mut constants = Fitted::default();
        let touched = self.touched.iter();
        for ((parameter, &value), _) in parameters.iter().zip(values).zip(touched).filter(|x| *x.1)
        {
            let overheads = &mut scenario.runtime.overheads;
            match parameter.kind {
                Kind::Price(constant) => constants = constants.with(constant, value),
                Kind::GradientByte => overheads.gradient_byte.value = Seconds(value * 1e-9),
                Kind::Transfer => overheads.transfer.value = Seconds(value * 1e-3),
                Kind::OverlapSlowdown => overheads.overlap_slowdown.value = value,
                Kind::Fragmentation => overheads.fragmentation.value = value,
            }
        }
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
        .filter(|(_, (run, _))| run.status == "ok")
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
                complete: matches!(run.tier.as_deref(), Some("A" | "B")),
                mapped,
                touched,
                memo: Mutex::default(),
            })
        })
        .collect()
}

/// Whether a run's prediction can depend on a constant.
fn touches(kind: Kind, mapped: &Mapped) -> bool {
    let scenario = &mapped.scenario;
    let overheads = &scenario.runtime.overheads;
    let hopper = scenario.cluster.device.architecture == Architecture::Hopper;
    let blackwell = scenario.cluster.device.architecture == Architecture::Blackwell;
    let eight_bits = scenario.workload.precision == Precision::Fp8;
    let unfused = scenario.runtime.attention == AttentionKernel::Unfused;
    let rewrites = &scenario.runtime.rewrites;
    match kind {
        Kind::Price(Constant::HopperSustained | Constant::HopperRate16) => hopper,
        Kind::Price(Constant::HopperRate8) => hopper && eight_bits,
        Kind::Price(Constant::BlackwellSustained | Constant::BlackwellRate16) => blackwell,
        Kind::Price(Constant::BlackwellRate8) => blackwell && eight_bits,
        Kind::Price(Constant::NarrowProducts) => eight_bits,
        Kind::Price(Constant::BatchedShare | Constant::UnalignedShare) => unfused,
        Kind::Price(Constant::ExposedEpilogue) => {
            rewrites.contains(&Rewrite::FuseGradientAccumulation)
        }
        Kind::Price(Constant::ClockExponent) => {
            hopper
                && scenario
                    .cluster
                    .device
                    .power_watts
                    .is_some_and(|w| w < 700.0)
        }
        Kind::GradientByte => overheads.gradient_byte.origin == Origin::Fitted,
        Kind::Transfer => overheads.transfer.origin == Origin::Fitted,
        Kind::OverlapSlowdown => overheads.overlap_slowdown.origin == Origin::Fitted,
        Kind::Fragmentation => overheads.fragmentation.origin == Origin::Fitted,
    }
}

/// The constants of the price tables, and the overheads that runtime presets mark as fitted.
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
            // The parent runtime's: gradients are reduced and read where they lie.
            overhead(
                Kind::GradientByte,
                "DeepSpeed's pipeline engine, time per byte of a rank's gradients, ns",
                0.0,
                (0.0, 2.0),
                |o| (o.gradient_byte.origin, o.gradient_byte.value.0 * 1e9),
            ),
            // The parent runtime's.
            overhead(
                Kind::Transfer,
                "DeepSpeed's pipeline engine, time per transfer beside its bytes, ms",
                0.0,
                (0.0, 16.0),
                |o| (o.transfer.origin, o.transfer.value.0 * 1e3),
            ),
            // NCCL's 16-24 channels of 132 multiprocessors, half of them idle in a memory-bound kernel.
            overhead(
                Kind::OverlapSlowdown,
                "slow-down of kernels beside data-parallel traffic",
                1.06,
                (1.0, 1.4),
                |o| (o.overlap_slowdown.origin, o.overlap_slowdown.value),
            ),
            // The parent runtime's, FSDP2 without tensor parallelism.
            overhead(
                Kind::Fragmentation,
                "torchtitan, reserved over allocated memory",
                1.03,
                (1.0, 1.2),
                |o| (o.fragmentation.origin, o.fragmentation.value),
            ),
        ])
        .collect()
}
