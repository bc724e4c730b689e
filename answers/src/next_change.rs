//! The single change to a plan that would gain most, sought first among changes that leave every step's result as it
//! is, then among changes of precision and batch.

use catalog::{DType, Precision, Workload};
use costmodel::{CostModel, Scenario};
use plans::grammar::written;
use plans::{Candidate, Prediction, Strategy};
use reports::format;

use crate::error::AnswerError;

/// Smallest relative gain in tokens per second that makes a change worth suggesting.
const WORTH: f64 = 0.01;

/// Advice for a plan that does not fit and that no single change makes fit.
const NONE_NEAR: &str = "No change of one decision makes it fit. `vescale-plan search` with the same model and GPUs finds the \
                         plans that do, or says how many GPUs would.";

/// A change in words, with the prediction under it.
struct Change {
    what: String,
    prediction: Prediction,
}

/// The best change to a plan, in words; for a plan that does not fit, the first of `near` that fits. `near` are
/// predicted strategies one decision away, and may be empty.
pub fn best(
    costs: &CostModel,
    strategy: &Strategy,
    prediction: &Prediction,
    near: &[Candidate],
) -> Result<Option<String>, AnswerError> {
    if !prediction.fit.fits() {
        let nearest = nearest_that_fits(costs, near);
        return Ok(Some(nearest.unwrap_or_else(|| NONE_NEAR.to_owned())));
    }
    let rate = |p: &Prediction| p.tokens_per_s_per_gpu;
    let gain = |change: &Change| rate(&change.prediction) / rate(prediction) - 1.0;
    let worth = |change: &Change| change.prediction.fit.fits() && gain(change) >= WORTH;
    let best = |changes: Vec<Change>| {
        let changes = changes.into_iter().filter(worth);
        changes.max_by(|a, b| gain(a).total_cmp(&gain(b)))
    };
    let same_training = best(free(costs, strategy, near)?);
    let change = match same_training {
        Some(change) => Some(change),
        None => best(changing(costs, strategy)?),
    };
    Ok(change.map(|change| {
        format!(
            "{}: {:+.1} % tokens/s, {} a step, {} of memory.",
            change.what,
            gain(&change) * 100.0,
            format::seconds(change.prediction.step_time),
            format::bytes(change.prediction.peak_memory)
        )
    }))
}

fn nearest_that_fits(costs: &CostModel, near: &[Candidate]) -> Option<String> {
    let fitting = near.iter().find(|c| c.prediction.fit.fits())?;
    Some(format!(
        "{} fits: {} of memory, {} a step.",
        written(&fitting.strategy, &costs.scenario().runtime),
        format::bytes(fitting.prediction.peak_memory),
        format::seconds(fitting.prediction.step_time)
    ))
}

/// Changes to a strategy that do not change the training's results: other layouts, and tensor-parallel messages that overlap
/// with compute.
fn free(
    costs: &CostModel,
    strategy: &Strategy,
    near: &[Candidate],
) -> Result<Vec<Change>, AnswerError> {
    let s = costs.scenario();
    let mut changes: Vec<Change> = near
        .iter()
        .map(|c| Change {
            what: format!("Another layout, {}", written(&c.strategy, &s.runtime)),
            prediction: c.prediction.clone(),
        })
        .collect();
    let mut overlapped = strategy.decisions().clone();
    overlapped.overlap.tensor_parallel = true;
    if overlapped != *strategy.decisions()
        && strategy.tp > 1
        && !s.runtime.space.tensor_parallel_overlap
        && s.cluster.reaches_peers()
        && let Ok(strategy) = Strategy::new(overlapped, &s.model, &s.workload)
    {
        changes.push(Change {
            what: format!(
                "Overlap tensor-parallel messages with matrix products, if your {} can",
                s.runtime.name
            ),
            prediction: costs.predict(&strategy)?,
        });
    }
    Ok(changes)
}

/// Changes of the training itself: linear layers in fp8, or a global batch twice as large.
fn changing(costs: &CostModel, strategy: &Strategy) -> Result<Vec<Change>, AnswerError> {
    let s = costs.scenario();
    let w = &s.workload;
    let mut changes = Vec::new();
    let eighths = s.cluster.device.peak.contains_key(&DType::F8);
    if w.precision == Precision::Bf16 && eighths {
        let fp8 = w.clone().with_precision(Precision::Fp8);
        let what = "Linear layers in fp8, which changes the numbers".to_owned();
        changes.extend(other(s, strategy, fp8, strategy.num_micro_batches, what));
    }
    if let Ok(twice) = w.with_batch(w.global_batch.saturating_mul(2)) {
        let what = format!(
            "A global batch of {} sequences, which changes the training",
            format::count(twice.global_batch)
        );
        let micro_batches = strategy.num_micro_batches * 2;
        changes.extend(other(s, strategy, twice, micro_batches, what));
    }
    Ok(changes)
}

/// The same layout for another workload; `None` where it is not legal or cannot be predicted.
fn other(
    scenario: &Scenario,
    strategy: &Strategy,
    workload: Workload,
    micro_batches: u64,
    what: String,
) -> Option<Change> {
    let mut decisions = strategy.decisions().clone();
    decisions.num_micro_batches = micro_batches;
    let strategy = Strategy::new(decisions, &scenario.model, &workload).ok()?;
    plans::support::allowed_by(
        &strategy,
        &scenario.model,
        &scenario.runtime,
        workload.precision,
    )
    .ok()?;
    let costs = CostModel::new(Scenario {
        workload,
        ..scenario.clone()
    });
    let prediction = costs.ok()?.predict(&strategy).ok()?;
    Some(Change { what, prediction })
}
