//! Explains why one strategy beats another, and what changing one decision does.

use catalog::{ScheduleKind, elementary};
use costmodel::{CostModel, Scenario};
use plans::{Breakdown, Candidate, Decisions, Prediction, Recompute, Strategy};

use crate::PlannerError;

/// One part of the step time, in each of two strategies.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Name of the part.
    pub name: &'static str,
    /// Seconds it takes in the first strategy.
    pub first_s: f64,
    /// Seconds it takes in the second strategy.
    pub second_s: f64,
}

/// The parts of a breakdown, with their names, in seconds.
#[must_use]
pub fn parts(b: &Breakdown) -> [(&'static str, f64); 10] {
    [
        ("compute", b.compute_s),
        ("recomputation", b.recompute_s),
        ("exposed tensor-parallel communication", b.tp_exposed_s),
        ("exposed context-parallel communication", b.cp_exposed_s),
        ("exposed expert-parallel communication", b.ep_exposed_s),
        ("exposed data-parallel communication", b.dp_exposed_s),
        ("exposed pipeline transfers", b.pp_exposed_s),
        ("pipeline bubble", b.bubble_s),
        ("optimizer", b.optimizer_s),
        ("host", b.host_s),
    ]
}

/// Compares two breakdowns part by part, largest change first.
#[must_use]
pub fn differences(first: &Breakdown, second: &Breakdown) -> Vec<Difference> {
    let mut list: Vec<Difference> = parts(first)
        .into_iter()
        .zip(parts(second))
        .map(|((name, first_s), (_, second_s))| Difference {
            name,
            first_s,
            second_s,
        })
        .collect();
    list.sort_by(|a, b| {
        (b.second_s - b.first_s)
            .abs()
            .total_cmp(&(a.second_s - a.first_s).abs())
    });
    list
}

/// One line: how much slower a strategy is, and which part grew most. If the 80% interval of the ratio of their times
/// holds 1, the two are a tie. `more` is what the strategy has that the first does without, in words.
#[must_use]
pub fn why_not_first(first: &Prediction, other: &Prediction, more: &str) -> String {
    let ratio = other.step_time.0 / first.step_time.0 - 1.0;
    if ratio < -5e-4 && !more.is_empty() {
        return format!("{:+.1}% step time, for {more}", ratio * 100.0);
    }
    let grown = differences(&first.breakdown, &other.breakdown)
        .into_iter()
        .filter(|d| d.second_s > d.first_s)
        .max_by(|a, b| (a.second_s - a.first_s).total_cmp(&(b.second_s - b.first_s)));
    let cause = grown.map_or_else(String::new, |d| {
        format!(": {} +{:.0} ms", d.name, (d.second_s - d.first_s) * 1e3)
    });
    if ratio.abs() < 5e-4 {
        let memory = other.peak_memory.as_f64() - first.peak_memory.as_f64();
        return format!(
            "same time within 0.05%, {:+.1} GiB memory",
            memory / 1024f64.powi(3)
        );
    }
    let slower = format!("+{:.1}% step time{cause}", ratio * 100.0);
    if elementary::ln_1p(ratio) <= first.ratio_error {
        return format!("tie within the error of such comparisons: {slower}");
    }
    slower
}

/// Strategies that differ from `base` in one decision, each with its prediction, fastest first; those that do not fit
/// in memory come last.
///
/// # Errors
/// When a block cannot be priced.
pub fn neighbours(costs: &CostModel, base: &Strategy) -> Result<Vec<Candidate>, PlannerError> {
    let scenario = costs.scenario();
    let first = costs.predict(base)?;
    let mut found: Vec<Candidate> = Vec::new();
    for decisions in one_step(base, scenario) {
        let Ok(strategy) = Strategy::new(decisions, &scenario.model, &scenario.workload) else {
            continue;
        };
        let allowed = plans::legality::allowed_by(
            &strategy,
            &scenario.model,
            &scenario.runtime,
            scenario.workload.precision,
        );
        if allowed.is_err() || strategy == *base || found.iter().any(|c| c.strategy == strategy) {
            continue;
        }
        let prediction = costs.predict(&strategy)?;
        let why_not_first = why_not_first(&first, &prediction, "");
        found.push(Candidate {
            strategy,
            prediction,
            why_not_first,
        });
    }
    found.sort_by(|a, b| {
        let fits = b.prediction.fit.fits().cmp(&a.prediction.fit.fits());
        fits.then(
            a.prediction
                .step_time
                .0
                .total_cmp(&b.prediction.step_time.0),
        )
    });
    Ok(found)
}

/// Decisions one step away from `base`: one size doubled or halved at the expense of another, or one choice changed.
fn one_step(base: &Strategy, scenario: &Scenario) -> Vec<Decisions> {
    let d = base.decisions();
    let recompute = [Recompute::None, Recompute::Selective, Recompute::Full];
    let selections = scenario.runtime.selections_of(&scenario.model).into_iter();
    let recompute = recompute
        .into_iter()
        .chain(selections.map(Recompute::Modules));
    let recompute = recompute.map(|recompute| Decisions {
        recompute,
        ..d.clone()
    });
    let mut list = micro_batch_against_their_number(d);
    list.extend(ranks_moved(d));
    list.extend(virtual_stages(d));
    list.extend(recompute);
    let others = scenario
        .runtime
        .other_gradients(scenario.workload.precision);
    let types = [None].into_iter().chain(others.map(Some));
    list.extend(types.map(|gradients| Decisions {
        gradients,
        ..d.clone()
    }));
    let others = scenario
        .runtime
        .other_optimizers(scenario.workload.precision);
    let states = [None].into_iter().chain(others.iter().copied().map(Some));
    list.extend(states.map(|optimizer_states| Decisions {
        optimizer_states,
        ..d.clone()
    }));
    list
}

/// Divides the layers evenly among the changed number of stages.
fn restage(n: &mut Decisions) {
    n.stages = plans::StagePartition::even(n.stages.layers(), n.pp * n.vpp);
    if n.vpp == 1 && n.schedule == ScheduleKind::Interleaved {
        n.schedule = ScheduleKind::OneFOneB;
    }
}

fn micro_batch_against_their_number(d: &Decisions) -> Vec<Decisions> {
    let mut list = Vec::new();
    for (grow, shrink) in [(2, 1), (1, 2)] {
        if d.num_micro_batches.is_multiple_of(grow) && d.micro_batch.is_multiple_of(shrink) {
            list.push(Decisions {
                micro_batch: d.micro_batch * grow / shrink,
                num_micro_batches: d.num_micro_batches * shrink / grow,
                ..d.clone()
            });
        }
    }
    list
}

/// Variants of the decisions with ranks moved between tensor, pipeline and data parallelism.
fn ranks_moved(d: &Decisions) -> Vec<Decisions> {
    let sequences = d.dp() * d.num_micro_batches * d.micro_batch;
    let sized = |tp: Option<u64>, pp: Option<u64>, dp: Option<u64>| {
        let (tp, pp, dp) = (tp?, pp?, dp?);
        let mut n = d.clone();
        n.tp = tp;
        n.pp = pp;
        n.sequence_parallel = tp > 1 && (d.sequence_parallel || d.tp == 1);
        if n.dp_shard > 1 || n.zero != plans::Zero::Z0 {
            n.dp_shard = (dp / n.dp_replicate).max(1);
        } else {
            n.dp_replicate = dp;
        }
        n.num_micro_batches = (sequences / n.dp() / n.micro_batch).max(1);
        if pp == 1 {
            n.vpp = 1;
        }
        restage(&mut n);
        Some(n)
    };
    let (tp, pp, dp) = (d.tp, d.pp, d.dp());
    let twice = |size: u64| Some(size * 2);
    let half = |size: u64| size.is_multiple_of(2).then_some(size / 2);
    let moved = [
        sized(twice(tp), Some(pp), half(dp)),
        sized(twice(tp), half(pp), Some(dp)),
        sized(half(tp), Some(pp), twice(dp)),
        sized(half(tp), twice(pp), Some(dp)),
        sized(Some(tp), twice(pp), half(dp)),
        sized(Some(tp), half(pp), twice(dp)),
    ];
    moved.into_iter().flatten().collect()
}

fn virtual_stages(d: &Decisions) -> Vec<Decisions> {
    let mut list = Vec::new();
    for vpp in [d.vpp * 2, d.vpp / 2, 1] {
        if vpp >= 1 && d.pp > 1 {
            let mut n = d.clone();
            n.vpp = vpp;
            n.schedule = if vpp > 1 {
                ScheduleKind::Interleaved
            } else {
                ScheduleKind::OneFOneB
            };
            restage(&mut n);
            list.push(n);
        }
    }
    list
}
