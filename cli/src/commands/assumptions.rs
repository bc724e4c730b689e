//! The price of assumptions: what a prediction assumed and an export target does otherwise, in seconds and bytes.

use answers::Opened;
use catalog::{Bytes, Seconds};
use costmodel::{CostModel, Scenario};
use interop::export::{Assumption, Differs};
use plans::Strategy;
use plans::grammar::overlap_name;
use serde::Serialize;

/// An assumption that the target does not meet, with its price.
#[derive(Serialize)]
pub(crate) struct AssumptionJson {
    /// The rewrite of the operator graph in which prediction and target differ; absent where they differ in something else.
    #[serde(skip_serializing_if = "Option::is_none")]
    rewrite: Option<String>,
    /// Whether the target performs that rewrite.
    #[serde(skip_serializing_if = "Option::is_none")]
    performed: Option<bool>,
    /// The types in which the target holds and reduces gradients, where the prediction assumed others.
    #[serde(skip_serializing_if = "Option::is_none")]
    grad_dtype: Option<String>,
    /// The messages that overlap under the target, where the prediction assumed others.
    #[serde(skip_serializing_if = "Option::is_none")]
    overlap: Option<String>,
    why: String,
    /// Step time under the target less the predicted one, in seconds; absent where it cannot be predicted.
    step_time_difference_s: Option<f64>,
    /// Peak memory under the target less the predicted one, in bytes; absent where it cannot be predicted.
    peak_memory_difference_bytes: Option<f64>,
}

/// Assumptions of a plan that a target does not meet, each priced alone.
pub(crate) fn priced(loaded: &Opened, unmet: &[Assumption]) -> Vec<AssumptionJson> {
    let usual = predicted(loaded, &[]);
    let difference = |assumption: &Assumption| {
        let (time, memory) = usual?;
        let (other_time, other_memory) = predicted(loaded, std::slice::from_ref(assumption))?;
        Some((
            other_time.0 - time.0,
            other_memory.as_f64() - memory.as_f64(),
        ))
    };
    let json = |assumption: &Assumption| {
        let difference = difference(assumption);
        let mut json = AssumptionJson {
            rewrite: None,
            performed: None,
            grad_dtype: None,
            overlap: None,
            why: assumption.why.clone(),
            step_time_difference_s: difference.map(|(time, _)| time),
            peak_memory_difference_bytes: difference.map(|(_, memory)| memory),
        };
        match assumption.differs {
            Differs::Performed(rewrite) | Differs::NotPerformed(rewrite) => {
                json.rewrite = Some(rewrite.name());
                json.performed = Some(assumption.differs == Differs::Performed(rewrite));
            }
            Differs::Gradients { has, .. } => json.grad_dtype = Some(has.name()),
            Differs::Overlap { has, .. } => json.overlap = Some(overlap_name(has)),
        }
        json
    };
    unmet.iter().map(json).collect()
}

/// One sentence for each assumption that matters, and one for their sum.
pub(crate) fn sentences(
    loaded: &Opened,
    unmet: &[Assumption],
    priced: &[AssumptionJson],
) -> Vec<String> {
    let Some((usual, _)) = predicted(loaded, &[]) else {
        return Vec::new();
    };
    let least = usual.0 * 1e-4;
    let matters = |(_, a): &(&Assumption, &AssumptionJson)| {
        a.step_time_difference_s.is_none_or(|s| s.abs() > least)
            || a.peak_memory_difference_bytes.is_none_or(|b| b.abs() > 1e6)
    };
    let mut sentences: Vec<String> = (unmet.iter().zip(priced))
        .filter(matters)
        .map(|(assumption, price)| sentence(assumption, price))
        .collect();
    if sentences.len() > 1
        && let Some((time, _)) = predicted(loaded, unmet)
    {
        sentences.push(format!(
            "with all that the prediction assumed otherwise a step takes {time} instead of {usual}"
        ));
    }
    sentences
}

fn sentence(of: &Assumption, a: &AssumptionJson) -> String {
    let assumed = match of.differs {
        Differs::Performed(rewrite) => format!("without {}", rewrite.name()),
        Differs::NotPerformed(rewrite) => format!("with {}", rewrite.name()),
        Differs::Gradients { assumed, .. } => format!("with grad_dtype={}", assumed.name()),
        Differs::Overlap { assumed, .. } => format!("with overlap={}", overlap_name(assumed)),
    };
    let cost = match (a.step_time_difference_s, a.peak_memory_difference_bytes) {
        (Some(seconds), Some(bytes)) => {
            let sign = |value: f64| if value < 0.0 { '−' } else { '+' };
            let time = reports::format::seconds(Seconds(seconds.abs()));
            let memory = reports::format::bytes(Bytes(bytes.abs() as u64));
            format!("{}{time} a step, {}{memory}", sign(seconds), sign(bytes))
        }
        _ => "not predicted".to_owned(),
    };
    format!("predicted {assumed}, but {} ({cost})", a.why)
}

/// Step time and peak memory with these rewrites, types of gradients and overlaps as the target has them.
fn predicted(loaded: &Opened, unmet: &[Assumption]) -> Option<(Seconds, Bytes)> {
    let scenario = loaded.costs.scenario();
    let mut runtime = scenario.runtime.clone();
    let mut decisions = loaded.strategy.decisions().clone();
    for assumption in unmet {
        match assumption.differs {
            Differs::Performed(rewrite) => {
                runtime.rewrites.insert(rewrite);
            }
            Differs::NotPerformed(rewrite) => {
                runtime.rewrites.remove(&rewrite);
            }
            Differs::Gradients { has, .. } => {
                runtime.states = runtime.states.with_gradients(has);
                runtime.fp16_gradients = None;
            }
            Differs::Overlap { has, .. } => decisions.overlap = has,
        }
    }
    let other = Scenario {
        runtime,
        ..scenario.clone()
    };
    let strategy = Strategy::new(decisions, &other.model, &other.workload).ok()?;
    let costs = CostModel::new(other).ok()?;
    let prediction = costs.predict(&strategy).ok()?;
    Some((prediction.step_time, prediction.peak_memory))
}
