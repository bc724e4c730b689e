//! Explains why a measured step differs from the predicted one. First come explanations from
//! numbers in the log itself, then what-ifs: scenarios with one change that the cost model predicts
//! again, those nearest to the measurement first. Slower or faster kernels come last: they explain a gap of any size.

use catalog::model::{ModelConfig, WindowPattern};
use catalog::runtime::AttentionKernel;
use catalog::{Bandwidth, Bytes, Flops, Seconds};
use costmodel::{CostModel, Scenario, flops};
use interop::training_log::{Steady, TrainingLog};
use planner::PlannerError;
use plans::{Decisions, Overlap, Prediction, Recompute, Strategy, Zero};

/// A possible explanation of the difference between measured and predicted step time.
#[derive(Clone, Debug, PartialEq)]
pub struct Hypothesis {
    /// What may be the cause.
    pub cause: String,
    /// The evidence for it.
    pub evidence: String,
    /// Step time if this were the cause; `None` if the cause gives none.
    pub step_time: Option<Seconds>,
    /// Share of the gap that a what-if closes, or an estimate for other causes; at most 1.
    pub share: f64,
}

/// The measurement to explain.
#[derive(Clone, Copy, Debug)]
pub struct Measured<'a> {
    /// The training log.
    pub log: &'a TrainingLog,
    /// Statistics of its steps after warm-up.
    pub steady: &'a Steady,
}

/// A cause that explains less than this share of the gap is not reported.
const LEAST_SHARE: f64 = 0.1;
/// A cause that moves the step by more than so many times the gap is not reported. One of degree, such as half the bandwidth, may
/// move it by more than the gap, because the true degree is smaller.
const MOST_OF_GAP: f64 = 3.0;

/// A gap of no more than this share of the step is not explained: predictions are not that exact.
const LEAST_GAP: f64 = 0.02;
/// A what-if that fits into memory with a lower probability is not reported: the run did fit.
const LEAST_FIT: f64 = 0.05;
/// A what-if whose memory is farther from the logged one than the unchanged prediction's, by more than this share, is not reported.
const FARTHER_MEMORY: f64 = 0.1;
/// What-ifs whose step times differ by no more than this share are one.
const SAME_TIME: f64 = 1e-6;

/// Explanations of the gap between measurement and prediction, in the order described above.
///
/// # Errors
/// When a changed scenario cannot be priced.
pub fn diagnose(
    costs: &CostModel,
    strategy: &Strategy,
    predicted: &Prediction,
    measured: &Measured<'_>,
) -> Result<Vec<Hypothesis>, PlannerError> {
    let mut found = of_the_log(costs, predicted, measured);
    let gap = measured.steady.median() - predicted.step_time.0;
    let small = small(predicted, measured.steady);
    if let Some(evidence) = small.clone().or_else(|| usual(predicted, measured.steady)) {
        found.push(hypothesis("nothing need be wrong", evidence, 0.0));
    }
    if small.is_some() {
        return Ok(found);
    }
    let mut what_ifs: Vec<Hypothesis> = Vec::new();
    for (cause, scenario, decisions) in changes(costs, strategy, gap > 0.0) {
        let Ok(strategy) = Strategy::new(decisions, &scenario.model, &scenario.workload) else {
            continue;
        };
        let prediction = CostModel::new(scenario)?.predict(&strategy)?;
        let what_if = compared(cause, predicted, &prediction, measured);
        let known = |new: &Hypothesis| what_ifs.iter().any(|old| same_time(old, new));
        what_ifs.extend(what_if.filter(|new| !known(new)));
    }
    what_ifs.sort_by(|a, b| b.share.total_cmp(&a.share).then(a.cause.cmp(&b.cause)));
    found.extend(what_ifs);
    // No kernel is faster than the hardware allows, so such steps are not explained by faster kernels.
    if let Some(kernels) =
        speed(predicted, gap).filter(|_| !beyond_peak(predicted, measured.steady))
    {
        found.push(kernels);
    }
    Ok(found)
}

/// The time that GPUs would need for the FLOPs of a step if they always computed at their peak rate.
#[must_use]
pub fn at_peak(predicted: &Prediction) -> Seconds {
    Seconds(predicted.mfu * predicted.step_time.0)
}

/// Whether the measured steps are too short for the planned training: shorter than [`at_peak`].
#[must_use]
pub fn beyond_peak(predicted: &Prediction, steady: &Steady) -> bool {
    steady.median() < at_peak(predicted).0
}

/// Says that the gap is too small to be explained.
fn small(predicted: &Prediction, steady: &Steady) -> Option<String> {
    let gap = (steady.median() - predicted.step_time.0).abs();
    let share = |of: f64| of / predicted.step_time.0 * 100.0;
    if gap <= LEAST_GAP * predicted.step_time.0 {
        let (gap, least) = (share(gap), LEAST_GAP * 100.0);
        return Some(format!(
            "the gap is {gap:.1}% of the step, and no prediction is surer than {least:.0}%"
        ));
    }
    (gap <= steady.median_error()).then(|| {
        format!(
            "the gap is {:.0}% of the step, and steps vary so much that their median is known to {:.0}% only",
            share(gap),
            share(steady.median_error())
        )
    })
}

/// Says that predictions are usually no nearer.
fn usual(predicted: &Prediction, steady: &Steady) -> Option<String> {
    let (shortest, longest) = predicted.step_time_interval;
    let within = (shortest.0..=longest.0).contains(&steady.median());
    within.then(|| {
        format!(
            "the measurement lies within the prediction's 80% interval, {shortest} to {longest}"
        )
    })
}

fn same_time(a: &Hypothesis, b: &Hypothesis) -> bool {
    let times = a.step_time.zip(b.step_time);
    times.is_some_and(|(a, b)| (a.0 / b.0 - 1.0).abs() < SAME_TIME)
}

/// Whether memory tells that the run was not the changed scenario: it would not fit, or its memory is farther from the logged one.
fn ruled_out(base: &Prediction, changed: &Prediction, log: &TrainingLog) -> bool {
    let short = changed.p_fits < LEAST_FIT && base.p_fits >= LEAST_FIT;
    let farther = log.reserved.is_some_and(|logged| {
        let off = |of: &Prediction| (logged as f64 / reserved_by(of).as_f64()).ln().abs();
        off(changed) > off(base) + FARTHER_MEMORY
    });
    short || farther
}

/// The share of the gap that a changed scenario explains; `None` if it moves the wrong way, explains too little,
/// moves it much too far, or has other memory than the run.
fn compared(
    cause: &str,
    base: &Prediction,
    changed: &Prediction,
    measured: &Measured<'_>,
) -> Option<Hypothesis> {
    let gap = measured.steady.median() - base.step_time.0;
    let moved = changed.step_time.0 - base.step_time.0;
    let ratio = moved / gap;
    let explains = gap != 0.0 && (LEAST_SHARE..=MOST_OF_GAP).contains(&ratio);
    if !explains || ruled_out(base, changed, measured.log) {
        return None;
    }
    // An explanation that overshoots the measurement is less likely than one that reaches it.
    let share = if ratio <= 1.0 { ratio } else { 1.0 / ratio };
    let memory = measured.log.reserved.map(|reserved| {
        let gib = |bytes: f64| bytes / 1024f64.powi(3);
        format!(
            "; {:.1} GiB would be reserved, the log has {:.1} GiB",
            gib(reserved_by(changed).as_f64()),
            gib(reserved as f64)
        )
    });
    Some(Hypothesis {
        cause: cause.to_owned(),
        evidence: format!(
            "predicted with this change, a step takes {} ({:+.0}% of the gap){}",
            changed.step_time,
            ratio * 100.0,
            memory.unwrap_or_default()
        ),
        step_time: Some(changed.step_time),
        share,
    })
}

/// The part of the predicted peak that the framework's allocator holds: logs report no other memory.
#[must_use]
pub fn reserved_by(prediction: &Prediction) -> Bytes {
    let outside = ["context", "workspaces and communicators"];
    let held: u64 = prediction
        .memory
        .iter()
        .filter(|item| outside.contains(&item.name.as_str()))
        .map(|item| item.bytes)
        .sum();
    prediction.peak_memory.saturating_sub(Bytes(held))
}

/// A what-if: its cause, the changed scenario, and the decisions.
type Change = (&'static str, Scenario, Decisions);

/// What-ifs with one thing changed: slower ones for a run slower than predicted, faster ones for a faster run.
fn changes(costs: &CostModel, strategy: &Strategy, slower: bool) -> Vec<Change> {
    let base = Base {
        scenario: costs.scenario(),
        decisions: strategy.decisions(),
    };
    if slower {
        slowing(&base)
    } else {
        speeding(&base)
    }
}

/// The unchanged scenario and strategy that what-ifs start from.
struct Base<'a> {
    scenario: &'a Scenario,
    decisions: &'a Decisions,
}

impl Base<'_> {
    /// A what-if with other decisions; `None` if the edit changes none.
    fn decided(&self, cause: &'static str, edit: impl Fn(&mut Decisions)) -> Option<Change> {
        let mut changed = self.decisions.clone();
        edit(&mut changed);
        (changed != *self.decisions).then(|| (cause, self.scenario.clone(), changed))
    }

    /// A what-if with the same strategy in a scenario that `edit` changes.
    fn given(&self, cause: &'static str, edit: impl Fn(&mut Scenario)) -> Change {
        let mut changed = self.scenario.clone();
        edit(&mut changed);
        (cause, changed, self.decisions.clone())
    }
}

fn speeding(base: &Base<'_>) -> Vec<Change> {
    let overlaps = base.decided("communication overlaps more than the plan says", |d| {
        d.overlap = Overlap::ALL;
    });
    let kept = base.decided("nothing is recomputed, though the plan says so", |d| {
        d.recompute = Recompute::None;
    });
    overlaps.into_iter().chain(kept).collect()
}

fn slowing(base: &Base<'_>) -> Vec<Change> {
    let mut list = Vec::new();
    list.extend(
        base.decided("communication does not overlap with compute", |d| {
            d.overlap = Overlap::NONE;
        }),
    );
    list.extend(base.decided("gradients and parameters move unhidden", |d| {
        d.overlap.grad_reduce = false;
        d.overlap.param_gather = false;
    }));
    list.extend(base.decided("every layer is recomputed", |d| {
        d.recompute = Recompute::Full;
    }));
    list.extend(
        base.decided("parameters are gathered again in backward", |d| {
            d.reshard_after_forward = d.zero == Zero::Z3;
        }),
    );
    if base.scenario.cluster.profile.is_none() {
        list.push(
            base.given("the network between nodes gives half its bandwidth", |s| {
                s.cluster.scale_out.bandwidth.value = half(s.cluster.scale_out.bandwidth.value)
            }),
        );
        list.push(
            base.given("the network inside nodes gives half its bandwidth", |s| {
                s.cluster.scale_up.bandwidth.value = half(s.cluster.scale_up.bandwidth.value)
            }),
        );
        list.push(base.given("attention is not fused", |s| {
            s.runtime.attention = AttentionKernel::Unfused;
        }));
    }
    list.push(
        base.given("the host takes twice as long to issue a kernel", |s| {
            s.runtime.overheads.launch.value = Seconds(s.runtime.overheads.launch.value.0 * 2.0);
        }),
    );
    list
}

fn half(bandwidth: Bandwidth) -> Bandwidth {
    Bandwidth(bandwidth.0 / 2.0)
}

/// Explanations from numbers in the log, compared with the plan and its prediction.
fn of_the_log(
    costs: &CostModel,
    predicted: &Prediction,
    measured: &Measured<'_>,
) -> Vec<Hypothesis> {
    let (log, scenario) = (measured.log, costs.scenario());
    let capacity = scenario.cluster.device.memory.value.as_f64();
    [
        another_count(scenario, measured, predicted),
        retries(log),
        full_memory(log, capacity),
        another_memory(log, predicted),
        slow_steps(measured.steady),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn hypothesis(cause: &str, evidence: String, share: f64) -> Hypothesis {
    Hypothesis {
        cause: cause.to_owned(),
        evidence,
        step_time: None,
        share,
    }
}

/// That the run has another global batch than the plan; its steps are predicted at that batch if it is `predicted`.
pub(crate) fn another_batch(logged: u64, planned: u64, predicted: bool) -> Hypothesis {
    let then = match predicted {
        true => format!("predicted is a step of {logged}"),
        false => format!(
            "the plan's strategy cannot run {logged}, so that step times cannot be compared"
        ),
    };
    let cause = "the run does not follow the plan: its global batch differs";
    let evidence = format!("the log has {logged} sequences per step, the plan {planned}; {then}");
    hypothesis(cause, evidence, 0.0)
}

/// Model FLOPs of a step on one GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepFlops {
    /// Model FLOPs of the step as the log counts them.
    pub(crate) logged: Flops,
    /// Model FLOPs of the plan's step, with attention counted as the log's system counts it.
    pub(crate) planned: Flops,
}

impl StepFlops {
    /// The FLOPs of a step of a scenario; `None` if the log states no TFLOP/s. If it is not known how the log's system counts attention,
    /// the plan's count is the nearer one of both.
    pub(crate) fn of(
        scenario: &Scenario,
        measured: &Measured<'_>,
        predicted: &Prediction,
    ) -> Option<Self> {
        let logged = tflops(measured.steady)? * 1e12 * measured.steady.median();
        let counted = |mfu: f64| mfu * predicted.peak_flop_rate.0 * predicted.step_time.0;
        let [once, all] = [predicted.mfu, predicted.mfu_palm].map(counted);
        let off = |planned: f64| (logged / planned).ln().abs();
        let planned = match measured.log.system.counts_all_keys() {
            true => all * beyond_windows(scenario),
            false if off(all) < off(once) => all,
            false => once,
        };
        Some(Self {
            logged: Flops(logged),
            planned: Flops(planned),
        })
    }
}

/// How many times as many FLOPs a scenario has if no window limits attention.
fn beyond_windows(scenario: &Scenario) -> f64 {
    let own: &ModelConfig = &scenario.model;
    let mut full = own.clone();
    full.attention.window = WindowPattern::Full;
    let count = |model| flops::per_token(model, &scenario.workload).palm.0;
    count(&full) / count(own)
}

/// The median of the TFLOP/s per GPU that a log states; `None` if it states none.
pub(crate) fn tflops(steady: &Steady) -> Option<f64> {
    let steps = steady.steps.iter();
    let mut values: Vec<f64> = steps.filter_map(|s| s.tflops_per_gpu).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().filter(|&t| t > 0.0)
}

/// Whether the log counts another amount of work per step than the plan has.
fn another_count(
    scenario: &Scenario,
    measured: &Measured<'_>,
    predicted: &Prediction,
) -> Option<Hypothesis> {
    let StepFlops { logged, planned } = StepFlops::of(scenario, measured, predicted)?;
    if (0.8..=1.25).contains(&(logged.0 / planned.0)) {
        return None;
    }
    let evidence = format!(
        "the log counts {:.1} TFLOP per GPU and step, the plan has {:.1}: another model, sequence or way of counting",
        logged.0 / 1e12,
        planned.0 / 1e12
    );
    Some(hypothesis("the run may not follow the plan", evidence, 0.5))
}

fn retries(log: &TrainingLog) -> Option<Hypothesis> {
    let evidence = format!(
        "the log reports {} allocation retries, each of which waits for the device",
        log.retries
    );
    (log.retries > 0).then(|| hypothesis("memory is short", evidence, 0.5))
}

fn full_memory(log: &TrainingLog, capacity: f64) -> Option<Hypothesis> {
    let reserved = log.reserved.filter(|&r| r as f64 > 0.95 * capacity)?;
    let share = reserved as f64 / capacity * 100.0;
    let evidence = format!(
        "{share:.0}% of device memory is reserved; the allocator may free and reallocate in every step"
    );
    Some(hypothesis("memory is short", evidence, 0.4))
}

/// Whether the log reports another amount of memory than the plan needs.
fn another_memory(log: &TrainingLog, predicted: &Prediction) -> Option<Hypothesis> {
    let reserved = log.reserved?;
    let planned = reserved_by(predicted);
    if (0.67..=1.5).contains(&(reserved as f64 / planned.as_f64())) {
        return None;
    }
    let evidence = format!(
        "{} are reserved where {planned} are predicted: another micro-batch, sequence, sharding or recomputation, or an allocator that keeps more than it uses",
        Bytes(reserved),
    );
    let cause = "the run may not follow the plan: its memory differs";
    Some(hypothesis(cause, evidence, 0.5))
}

fn slow_steps(steady: &Steady) -> Option<Hypothesis> {
    let lost = steady.mean() - steady.median();
    let above = format!(
        "the mean is {:.0}% above the median",
        lost / steady.median() * 100.0
    );
    let (cause, evidence) = match steady.slow() {
        0 => (
            "steps vary",
            format!("{above}, though no step takes more than 1.5 times as long"),
        ),
        slow => (
            "some steps are much slower",
            format!(
                "{slow} of {} steps take more than 1.5 times the median; {above}",
                steady.seconds.len()
            ),
        ),
    };
    let evidence = evidence + " (checkpoints, data loading, stragglers)";
    (lost > 0.02 * steady.median()).then(|| Hypothesis {
        step_time: Some(Seconds(steady.median())),
        ..hypothesis(cause, evidence, 0.3)
    })
}

/// The explanation that kernels are slower or faster; `None` if the gap is too small or large.
fn speed(predicted: &Prediction, gap: f64) -> Option<Hypothesis> {
    let compute = predicted.breakdown.compute_s + predicted.breakdown.recompute_s;
    let share = gap / compute;
    if compute <= 0.0 || share.abs() < 0.02 || share < -0.9 {
        return None;
    }
    let (way, reasons) = if gap > 0.0 {
        (
            "slower",
            "clocks (power, heat), kernels other than the runtime's usual ones",
        )
    } else {
        ("faster", "newer kernels than the measured tables")
    };
    let evidence = format!(
        "the whole gap is {:.0}% of the {} of compute: {reasons}",
        share.abs() * 100.0,
        Seconds(compute)
    );
    let cause = format!("kernels are {way} than predicted");
    Some(hypothesis(&cause, evidence, 0.0))
}
