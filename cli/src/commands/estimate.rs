//! `estimate`: predicts one strategy.

use std::process::ExitCode;

use answers::SCHEMA_VERSION;
use answers::launch::{self, Launchable, Step};
use answers::origins::{self, Asked};
use answers::report::{self, ReportSource};
use answers::{Budget, Inputs, InputsJson, next_change, plan};
use catalog::files::Kind;
use costmodel::CostModel;
use plans::grammar::written;
use plans::json::{DetailJson, PredictedJson, StrategyJson};
use plans::{Candidate, MemoryItem, Strategy};
use serde::Serialize;

use crate::args::EstimateArgs;
use crate::budget;
use crate::commands::next;
use crate::destinations::{Target, distinct};
use crate::error::{CliError, code};
use crate::inputs;
use crate::output;

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
pub(crate) fn run(args: &EstimateArgs, asked: &Asked) -> Result<ExitCode, CliError> {
    let resolved = resolved(args)?;
    let plan_path = Target::optional(args.output_plan.as_ref(), Kind::Plan, args.force)?;
    let page = Target::optional(args.report.as_ref(), Kind::Report, args.force)?;
    distinct(&[
        ("the plan (-o)", args.output_plan.as_deref()),
        ("its report (--report)", args.report.as_deref()),
    ])?;
    let s = &resolved.scenario;
    let training = budget::training(&args.budget, s)?;
    let strategy = plans::grammar::parse(&args.strategy, &s.model, &s.workload, &s.runtime)?;
    plans::support::allowed_by(&strategy, &s.model, &s.runtime, s.workload.precision)?;
    let costs = CostModel::new(s.clone())?;
    let prediction = costs.predict(&strategy)?;
    let (rate, fits) = (prediction.tokens_per_s_per_gpu, prediction.fit.fits());
    let budget = training.budget(s, resolved.json.gpus, &strategy, rate);
    let budget = budget.filter(|_| fits); // A plan that does not fit cannot run: it has no cost.
    let steps = steps(&resolved, &strategy, fits, plan_path.as_ref());
    // If the plan cannot be written, the answer is still printed.
    let saved = plan_path.map(|to| {
        to.write(&plan::file(&resolved, &strategy, &prediction)?.to_yaml()?)?;
        to.say(args.output.quiet, "plan");
        Ok::<_, CliError>(())
    });
    let reported = page.map(|to| {
        let candidate = Candidate {
            strategy: strategy.clone(),
            prediction: prediction.clone(),
            why_not_first: String::new(),
        };
        let plan = args.output_plan.as_ref().map(|p| p.display().to_string());
        to.write(&html(&resolved, &costs, &candidate, budget, plan, asked)?)?;
        to.say(args.output.quiet, "report");
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
        let ground = plan::ground(&costs);
        let text = reports::terminal::prediction(&strategy, &prediction, ground, output::style());
        output::print(&text);
        if let Some(budget) = budget {
            output::print(&answers::budget::lines(&budget, output::style()));
        }
        next::print(&steps, args.output);
    }
    saved.transpose()?;
    reported.transpose()?;
    Ok(code::unless(fits, code::DOES_NOT_FIT))
}

/// Resolves the question. Prints a note if sequences are longer than the model declares, and one if a part of it is not trained.
fn resolved(args: &EstimateArgs) -> Result<Inputs, CliError> {
    let resolved = inputs::resolve(&args.scenario)?;
    if resolved.json.longest_declared.is_some() {
        let longer = format!("note: sequences of {}", resolved.json.sequence());
        output::note(args.output.quiet, &longer);
    }
    if let Some(what) = resolved.json.left_out() {
        let without = format!("note: {} is predicted {what}", resolved.json.model);
        output::note(args.output.quiet, &without);
    }
    Ok(resolved)
}

/// The HTML report of the strategy; alternatives are the strategies one decision away that fit.
fn html(
    resolved: &Inputs,
    costs: &CostModel,
    candidate: &Candidate,
    budget: Option<Budget>,
    plan_path: Option<String>,
    asked: &Asked,
) -> Result<String, CliError> {
    let Candidate {
        strategy,
        prediction,
        ..
    } = candidate;
    let near = planner::nearby::best_of_each(costs, strategy)?;
    let shown = written(strategy, &resolved.scenario.runtime);
    let keep = format!("{} -o this.plan.yaml", launch::estimate(resolved, &shown));
    Ok(report::html(&ReportSource {
        inputs: origins::rows(&resolved.json, asked),
        model: &resolved.json.model,
        model_arg: &resolved.model_arg,
        cluster_arg: &resolved.cluster_arg,
        scenario: &resolved.scenario,
        plan: &plan::file(resolved, strategy, prediction)?,
        best: candidate,
        top: &report::shown_beside(candidate, &near),
        wishes: &[],
        sampled: &[],
        space: None,
        ways: Vec::new(),
        timeline: &costs.timeline(strategy)?,
        budget,
        keep: plan_path.is_none().then_some(keep),
        plan_path: plan_path.as_deref().unwrap_or("this.plan.yaml"),
        present: None,
        next_change: next_change::best(costs, strategy, prediction, &near)?,
    }))
}

/// Commands to suggest after the estimate: keep the strategy as a plan (unless it was written) and launch it, or search
/// for one that fits.
fn steps(resolved: &Inputs, strategy: &Strategy, fits: bool, plan: Option<&Target>) -> Vec<Step> {
    let flags = launch::flags(resolved);
    if !fits {
        let search = format!("vescale-plan search {flags}");
        return vec![("find the best strategy that fits".into(), vec![search])];
    }
    let path = plan.map_or_else(|| "this.plan.yaml".to_owned(), Target::text);
    let of = Launchable {
        scenario: &resolved.scenario,
        strategy,
        plan: &path,
    };
    match plan {
        Some(_) => launch::after_plan(of, None),
        None => {
            let shown = written(strategy, &resolved.scenario.runtime);
            let keep = format!("{} -o this.plan.yaml", launch::estimate(resolved, &shown));
            let mut steps = vec![("keep it as a plan".into(), vec![keep])];
            steps.extend(launch::after_plan(of, None));
            steps.push((
                "find a faster one".into(),
                vec![format!("vescale-plan search {flags}")],
            ));
            steps
        }
    }
}
