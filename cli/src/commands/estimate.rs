//! `estimate`: predicts one strategy.

use std::process::ExitCode;

use catalog::files::Kind;
use costmodel::CostModel;
use plans::MemoryItem;
use plans::json::{DetailJson, PredictedJson, StrategyJson};
use serde::Serialize;

use crate::args::EstimateArgs;
use crate::commands::plan;
use crate::destinations::Target;
use crate::error::{CliError, code};
use crate::inputs::{self, Budget, InputsJson};
use crate::output::{self, SCHEMA_VERSION};

#[derive(Serialize)]
struct EstimateJson {
    schema_version: u32,
    inputs: InputsJson,
    strategy: StrategyJson,
    strategy_text: String,
    predicted: PredictedJson,
    memory: Vec<MemoryItem>,
    fits: bool,
    detail: DetailJson,
    budget: Option<Budget>,
}

/// Runs `estimate`.
pub(crate) fn run(args: &EstimateArgs) -> Result<ExitCode, CliError> {
    let resolved = inputs::resolve(&args.scenario)?;
    let plan_path = Target::optional(args.output_plan.as_ref(), Kind::Plan, args.force)?;
    let s = &resolved.scenario;
    let training = inputs::training(&args.budget, &s.cluster)?;
    let strategy = plans::grammar::parse(&args.strategy, &s.model, &s.workload, &s.runtime)?;
    plans::legality::allowed_by(&strategy, &s.model, &s.runtime)?;
    let costs = CostModel::new(s.clone())?;
    let prediction = costs.predict(&strategy)?;
    let budget = training.budget(resolved.json.gpus, prediction.tokens_per_s_per_gpu);
    let fits = prediction.fit.fits();
    // A plan that does not fit cannot run: it has no cost.
    let budget = budget.filter(|_| fits);
    // If the plan cannot be written, the answer is still printed.
    let saved = plan_path.map(|to| {
        to.write(&plan::file(&resolved, &strategy, &prediction)?.to_yaml()?)?;
        to.say(args.output.quiet, "plan");
        Ok::<_, CliError>(())
    });
    if args.output.json {
        output::json(&EstimateJson {
            schema_version: SCHEMA_VERSION,
            inputs: resolved.json,
            strategy: StrategyJson::new(strategy.decisions(), s.workload.precision),
            strategy_text: strategy.to_string(),
            predicted: PredictedJson::from(&prediction),
            memory: prediction.memory.clone(),
            fits,
            detail: DetailJson::from(&prediction),
            budget,
        })?;
    } else {
        let text = reports::terminal::prediction(
            &strategy,
            &prediction,
            costs.capacity(),
            output::colour(),
        );
        output::print(&text);
        if let Some(budget) = budget {
            output::print(&budget_line(&budget));
        }
    }
    saved.transpose()?;
    Ok(if fits {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(code::DOES_NOT_FIT)
    })
}

/// Days and dollars of the training on one line.
pub(crate) fn budget_line(b: &Budget) -> String {
    let dollars = b
        .dollars
        .map_or_else(String::new, |d| format!(", {:.2} M$", d / 1e6));
    format!(
        "{:.2} T tokens: {:.1} days{dollars}\n",
        b.tokens / 1e12,
        b.days
    )
}
