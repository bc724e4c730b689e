//! `report`: writes the HTML report of a plan file.

use std::process::ExitCode;

use answers::origins::{self, Asked};
use answers::report::{self, ReportSource};
use answers::{file_names, next_change};
use catalog::files::Kind;
use plans::Candidate;

use crate::args::ReportArgs;
use crate::budget;
use crate::commands::plan;
use crate::destinations::Target;
use crate::error::CliError;

/// Runs `report`.
pub(crate) fn run(args: &ReportArgs) -> Result<ExitCode, CliError> {
    let loaded = plan::load(&args.plan)?;
    let path = args
        .output
        .clone()
        .unwrap_or_else(|| file_names::derived(&args.plan, file_names::REPORT));
    let to = Target::named(&path, Kind::Report, args.force)?;
    let prediction = loaded.costs.predict(&loaded.strategy)?;
    let timeline = loaded.costs.timeline(&loaded.strategy)?;
    let near = planner::nearby::best_of_each(&loaded.costs, &loaded.strategy)?;
    let best = Candidate {
        strategy: loaded.strategy,
        prediction,
        why_not_first: String::new(),
    };
    let next_change = next_change::best(&loaded.costs, &best.strategy, &best.prediction, &near)?;
    let mut top = vec![best.clone()];
    top.extend(near.into_iter().filter(|c| c.prediction.fit.fits()).take(9));
    let scenario = loaded.costs.scenario();
    let rate = best.prediction.tokens_per_s_per_gpu;
    let (gpus, parameters) = (loaded.inputs.gpus, loaded.inputs.parameters);
    let training = budget::training(&args.budget, &scenario.cluster, parameters)?;
    let budget = training.budget(scenario, gpus, &best.strategy, rate);
    let asked = Asked::in_plan(loaded.file.headroom.is_some());
    let text = report::html(&ReportSource {
        inputs: origins::rows(&loaded.inputs, &asked),
        model: &loaded.inputs.model,
        model_arg: &plan::beside(&args.plan, &loaded.file.model),
        cluster_arg: &plan::beside(&args.plan, &loaded.file.cluster),
        scenario,
        plan: &loaded.file,
        best: &best,
        top: &top,
        sampled: &[],
        space: None,
        timeline: &timeline,
        budget,
        plan_path: &args.plan.display().to_string(),
        keep: None,
        present: None,
        next_change,
    });
    to.write(&text)?;
    to.say(false, "report");
    Ok(ExitCode::SUCCESS)
}
