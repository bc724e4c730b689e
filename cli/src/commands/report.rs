//! `report`: the HTML report of a plan file.

use std::process::ExitCode;

use plans::Candidate;
use reports::html::ReportInput;

use crate::args::ReportArgs;
use crate::commands::{plan, search};
use crate::error::CliError;
use crate::{inputs, output};

/// Runs `report`.
pub(crate) fn run(args: &ReportArgs) -> Result<ExitCode, CliError> {
    let loaded = plan::load(&args.plan)?;
    let prediction = loaded.costs.predict(&loaded.strategy)?;
    let timeline = loaded.costs.timeline(&loaded.strategy)?;
    let near = planner::explain::neighbours(&loaded.costs, &loaded.strategy)?;
    let best = Candidate {
        strategy: loaded.strategy,
        prediction,
        why_not_first: String::new(),
    };
    let mut top = vec![best.clone()];
    top.extend(near.into_iter().filter(|c| c.prediction.fit.fits()).take(9));
    let cluster = &loaded.costs.scenario().cluster;
    let budget = inputs::budget(
        &args.budget,
        cluster,
        loaded.inputs.gpus,
        best.prediction.tokens_per_s_per_gpu,
    )?;
    let html = reports::html::report(&ReportInput {
        title: format!(
            "{} on {} × {}",
            loaded.inputs.model, loaded.inputs.gpus, cluster.device.name
        ),
        inputs: search::input_rows(&loaded.inputs),
        plan_id: loaded.file.id.clone(),
        best: &best,
        top: &top,
        space: None,
        timeline: &timeline,
        capacity: loaded.costs.capacity(),
        device_memory: cluster.device.memory.value,
        budget: budget.map(|b| (b.tokens, b.days, b.dollars)),
    });
    let path = args
        .output
        .clone()
        .unwrap_or_else(|| args.plan.with_extension("report.html"));
    output::write(&path, &html)?;
    output::note(false, &format!("report {}", path.display()));
    Ok(ExitCode::SUCCESS)
}
