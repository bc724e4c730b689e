//! `explain`: shows where a plan's time and memory go, and what would change them.

use std::process::ExitCode;

use answers::InputsJson;
use answers::SCHEMA_VERSION;
use catalog::Seconds;
use costmodel::CostModel;
use planner::explain::differences;
use planner::nearby::best_of_each;
use plans::json::{CandidateJson, DetailJson, PredictedJson};
use plans::{Candidate, Prediction};
use reports::format;
use serde::Serialize;

use crate::args::ExplainArgs;
use crate::commands::next;
use crate::commands::plan::{self, Loaded};
use crate::error::CliError;
use crate::output;

#[derive(Serialize)]
struct ExplainJson {
    schema_version: u32,
    inputs: InputsJson,
    plan_id: String,
    predicted: PredictedJson,
    binds: String,
    detail: DetailJson,
    replicated_parameters: Vec<String>,
    neighbours: Vec<CandidateJson>,
    why_not: Option<CandidateJson>,
}

/// Runs `explain`.
pub(crate) fn run(args: &ExplainArgs) -> Result<ExitCode, CliError> {
    let loaded = plan::load(&args.plan)?;
    let prediction = loaded.costs.predict(&loaded.strategy)?;
    let near = best_of_each(&loaded.costs, &loaded.strategy)?;
    let scenario = loaded.costs.scenario();
    let expected = args.why_not.as_deref();
    let why_not = expected.map(|text| candidate(&loaded.costs, text, &prediction));
    let why_not = why_not.transpose()?;
    if args.output.json {
        let json = |c| CandidateJson::new(c, scenario.workload.precision);
        output::json(&ExplainJson {
            schema_version: SCHEMA_VERSION,
            plan_id: loaded.file.id.clone(),
            predicted: PredictedJson::from(&prediction),
            binds: binds(&prediction),
            detail: DetailJson::from(&prediction),
            replicated_parameters: loaded.file.sharding.replicated.clone(),
            neighbours: near.iter().map(json).collect(),
            why_not: why_not.as_ref().map(json),
            inputs: loaded.inputs,
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    let shown = Shown {
        loaded: &loaded,
        prediction: &prediction,
        near: &near,
        why_not: why_not.as_ref(),
    };
    print(&shown);
    next::terms(args.output);
    Ok(ExitCode::SUCCESS)
}

/// Everything that the text of `explain` is made from.
struct Shown<'a> {
    loaded: &'a Loaded,
    prediction: &'a Prediction,
    near: &'a [Candidate],
    why_not: Option<&'a Candidate>,
}

fn print(shown: &Shown<'_>) {
    let Shown {
        loaded, prediction, ..
    } = shown;
    let style = output::style();
    let ground = answers::plan::ground(&loaded.costs);
    let text = reports::terminal::prediction(&loaded.strategy, prediction, ground, style);
    output::print(&text);
    output::print(&style.heading("What binds"));
    output::print(&style.paragraph("  ", &binds(prediction)));
    output::print(&reports::terminal::kernels(prediction, 12, style));
    output::print(&style.heading("One decision away"));
    let runtime = ground.runtime;
    let this = Candidate {
        strategy: loaded.strategy.clone(),
        prediction: (*prediction).clone(),
        why_not_first: String::new(),
    };
    let near = reports::terminal::candidates(shown.near, 1, &this, runtime, style);
    output::print(&near);
    let whole = &loaded.file.sharding.replicated;
    if !whole.is_empty() {
        output::print(&style.heading("Parameters that every rank of a block holds whole"));
        output::print(&style.paragraph("  ", &whole.join(", ")));
    }
    if let Some(other) = shown.why_not {
        let asked = plans::grammar::written(&other.strategy, runtime);
        output::print(&style.heading(&format!("Why not {asked}")));
        output::print(&why_not_text(prediction, other));
    }
}

/// Another strategy for the plan's scenario, and why it is not first.
fn candidate(costs: &CostModel, text: &str, first: &Prediction) -> Result<Candidate, CliError> {
    let s = costs.scenario();
    let strategy = plans::grammar::parse(text, &s.model, &s.workload, &s.runtime)?;
    plans::legality::allowed_by(&strategy, &s.model, &s.runtime, s.workload.precision)?;
    let prediction = costs.predict(&strategy)?;
    Ok(Candidate {
        strategy,
        why_not_first: planner::explain::why_not_first(first, &prediction, ""),
        prediction,
    })
}

fn why_not_text(first: &Prediction, other: &Candidate) -> String {
    let text = match &other.prediction.fit {
        plans::Fit::Fits { .. } => other.why_not_first.clone(),
        plans::Fit::TooLarge { over, largest } => {
            format!("does not fit: {over} too large; its largest part is {largest}")
        }
    };
    let mut text = output::style().paragraph("  ", &text);
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
