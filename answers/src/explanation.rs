//! Explains a plan: where its time and memory go, and what would change them.

use catalog::Seconds;
use costmodel::CostModel;
use planner::constraints::{CHOICES, DIMENSIONS};
use planner::explain::differences;
use planner::nearby::{best_of_each, risk_of};
use planner::{Constraints, SearchOptions, SearchSpace};
use plans::json::{CandidateJson, DetailJson, PredictedJson};
use plans::{Candidate, GroupJson, PlanFile, Prediction};
use reports::format;
use reports::lines::Style;
use serde::Serialize;

use crate::SCHEMA_VERSION;
use crate::error::AnswerError;
use crate::inputs::InputsJson;
use crate::opened::Opened;
use crate::plan;
use crate::together::Together;

#[derive(Serialize)]
struct ExplainJson<'a> {
    schema_version: u32,
    inputs: &'a InputsJson,
    plan_id: &'a str,
    predicted: PredictedJson,
    binds: String,
    detail: DetailJson,
    replicated_parameters: &'a [String],
    neighbours: Vec<CandidateJson>,
    why_not: Option<CandidateJson>,
    /// The best plan with the decisions that `why_not` names.
    #[serde(skip_serializing_if = "Option::is_none")]
    why_not_best: Option<CandidateJson>,
}

/// An explained plan.
#[derive(Debug)]
pub struct Explanation<'a> {
    plan: &'a Opened,
    prediction: Prediction,
    near: Vec<Candidate>,
    why_not: Option<Expected>,
}

/// Another strategy that was expected in place of a plan.
#[derive(Debug)]
struct Expected {
    /// The strategy as it was written, with the runtime's defaults for what the text leaves out.
    asked: Candidate,
    /// The decisions that the text names, with their values.
    named: String,
    /// The best plan with these decisions, if one fits at the plan's own risk.
    best: Option<Candidate>,
}

/// Explains a plan; `why_not` is another strategy to compare it with.
///
/// # Errors
/// When the other strategy is not legal, or a strategy cannot be priced.
pub fn explain<'a>(
    plan: &'a Opened,
    why_not: Option<&str>,
) -> Result<Explanation<'a>, AnswerError> {
    let prediction = plan.costs.predict(&plan.strategy)?;
    let near = best_of_each(&plan.costs, &plan.strategy)?;
    let why_not = why_not.map(|text| expected(&plan.costs, text, &prediction));
    Ok(Explanation {
        why_not: why_not.transpose()?,
        plan,
        prediction,
        near,
    })
}

/// An explained plan of several groups of replicas.
pub struct OfGroups<'a> {
    /// The plan file.
    pub file: &'a PlanFile,
    /// Its groups.
    pub together: &'a Together,
}

#[derive(Serialize)]
struct GroupsJson<'a> {
    schema_version: u32,
    inputs: &'a InputsJson,
    plan_id: &'a str,
    predicted: PredictedJson,
    binds: String,
    detail: DetailJson,
    groups: Vec<GroupJson>,
}

impl OfGroups<'_> {
    /// The explanation for programs.
    #[must_use]
    pub fn document(&self) -> impl Serialize + '_ {
        let together = self.together;
        GroupsJson {
            schema_version: SCHEMA_VERSION,
            inputs: &together.inputs.json,
            plan_id: &self.file.id,
            predicted: PredictedJson::from(&together.prediction),
            binds: binds(&together.prediction),
            detail: DetailJson::from(&together.prediction),
            groups: together.json(),
        }
    }

    /// The explanation for people.
    #[must_use]
    pub fn text(&self, style: Style) -> String {
        let together = self.together;
        let prediction = &together.prediction;
        let groups = together.shown();
        let ground = plan::ground(&together.slowest().costs);
        let mut text = reports::terminal::prediction_of_groups(&groups, prediction, ground, style);
        text.push_str(&style.heading("What binds"));
        text.push_str(&style.paragraph("  ", &binds(prediction)));
        text + &reports::terminal::kernels(prediction, 12, style)
    }
}

impl Explanation<'_> {
    /// The explanation for programs.
    #[must_use]
    pub fn document(&self) -> impl Serialize + '_ {
        let scenario = self.plan.costs.scenario();
        let json = |c| CandidateJson::new(c, &scenario.runtime, scenario.workload.precision);
        ExplainJson {
            schema_version: SCHEMA_VERSION,
            inputs: &self.plan.inputs,
            plan_id: &self.plan.file.id,
            predicted: PredictedJson::from(&self.prediction),
            binds: binds(&self.prediction),
            detail: DetailJson::from(&self.prediction),
            replicated_parameters: &self.plan.file.sharding.replicated,
            neighbours: self.near.iter().map(json).collect(),
            why_not: self.why_not.as_ref().map(|other| json(&other.asked)),
            why_not_best: (self.why_not.as_ref())
                .and_then(|other| Some(json(other.best.as_ref()?))),
        }
    }

    /// The explanation for people.
    #[must_use]
    pub fn text(&self, style: Style) -> String {
        let Self {
            plan, prediction, ..
        } = self;
        let ground = plan::ground(&self.plan.costs);
        let mut text = reports::terminal::prediction(&plan.strategy, prediction, ground, style);
        text.push_str(&style.heading("What binds"));
        text.push_str(&style.paragraph("  ", &binds(prediction)));
        text.push_str(&reports::terminal::kernels(prediction, 12, style));
        text.push_str(&style.heading("One decision away"));
        let runtime = ground.runtime;
        let this = Candidate::alone(plan.strategy.clone(), prediction.clone());
        let near = reports::terminal::candidates(&self.near, 1, &this, runtime, style);
        text.push_str(&near);
        let whole = &plan.file.sharding.replicated;
        if !whole.is_empty() {
            text.push_str(&style.heading("Parameters that every rank of a block holds whole"));
            text.push_str(&style.paragraph("  ", &whole.join(", ")));
        }
        if let Some(other) = &self.why_not {
            let asked = plans::grammar::written(&other.asked.strategy, runtime);
            text.push_str(&style.heading(&format!("Why not {asked}")));
            text.push_str(&why_not_text(prediction, &other.asked, style));
            text.push_str(&style.heading(&format!("Best plan with {}", other.named)));
            let best = other.best.as_slice();
            text.push_str(&reports::terminal::candidates(
                best, 1, &this, runtime, style,
            ));
            if best.is_empty() {
                text.push_str(&style.paragraph("  ", "none fits"));
            }
        }
        text
    }
}

/// Another strategy for the plan's scenario, why it is not first, and the best plan with the decisions that it names.
fn expected(costs: &CostModel, text: &str, first: &Prediction) -> Result<Expected, AnswerError> {
    let asked = candidate(costs, text, first)?;
    let mut constraints = Constraints::default();
    let mut named = plans::grammar::keys(text)?;
    named.retain(|key| DIMENSIONS.contains(key) || CHOICES.contains(key));
    let named: Vec<String> = named.into_iter().map(str::to_owned).collect();
    planner::present::keep(&named, &asked.strategy, &mut constraints, costs.scenario())?;
    let options = SearchOptions {
        top: 1,
        risk: Some(risk_of(first)),
        ..SearchOptions::default()
    };
    let space = SearchSpace::new(costs.scenario(), &constraints);
    let found = planner::search(costs, &space, &options, &|_| {})?;
    let best = found.top.into_iter().next().map(|best| Candidate {
        why_not_first: planner::explain::why_not_first(first, &best.prediction, ""),
        ..best
    });
    let fixed = constraints.fix.iter();
    let fixed: Vec<String> = fixed
        .map(|(key, values)| format!("{key}={}", values.join("|")))
        .collect();
    Ok(Expected {
        asked,
        named: fixed.join(" "),
        best,
    })
}

/// A strategy for the plan's scenario, and why it is not first.
fn candidate(costs: &CostModel, text: &str, first: &Prediction) -> Result<Candidate, AnswerError> {
    let s = costs.scenario();
    let strategy = plans::grammar::parse(text, &s.model, &s.workload, &s.runtime)?;
    plans::support::allowed_by(&strategy, &s.model, &s.runtime, s.workload.precision)?;
    let prediction = costs.predict(&strategy)?;
    Ok(Candidate {
        strategy,
        why_not_first: planner::explain::why_not_first(first, &prediction, ""),
        prediction,
    })
}

fn why_not_text(first: &Prediction, other: &Candidate, style: Style) -> String {
    let text = match &other.prediction.fit {
        plans::Fit::Fits { .. } => other.why_not_first.clone(),
        plans::Fit::TooLarge { over, largest } => {
            format!("does not fit: {over} too large; its largest part is {largest}")
        }
    };
    let mut text = style.paragraph("  ", &text);
    for d in differences(&first.breakdown, &other.prediction.breakdown)
        .into_iter()
        .take(5)
    {
        let change = (d.second_s - d.first_s) * 1e3;
        if change.abs() >= 0.05 {
            let sign = if change < 0.0 { '-' } else { '+' };
            let time = format::seconds(Seconds(change.abs() / 1e3));
            text.push_str(&format!("  {:<40} {sign}{time}\n", d.name));
        }
    }
    text
}

/// The largest part of the step time that is not compute, and how close memory is to its limit.
fn binds(p: &Prediction) -> String {
    let worst = planner::explain::parts(&p.breakdown)
        .into_iter()
        .skip(1)
        .max_by(|a, b| a.1.total_cmp(&b.1));
    let (name, seconds) = worst.unwrap_or(("compute", 0.0));
    let share = seconds / p.step_time.0 * 100.0;
    let memory = match &p.fit {
        plans::Fit::Fits { spare } => format!("{spare} of memory to spare"),
        plans::Fit::TooLarge { over, .. } => format!("memory, by {over}"),
    };
    format!(
        "compute takes {:.0}% of the step; after it {name}, {share:.1}%; {memory}",
        p.breakdown.compute_s / p.step_time.0 * 100.0
    )
}
