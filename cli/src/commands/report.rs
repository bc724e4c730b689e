//! `report`: the HTML report of a plan file.

use std::process::ExitCode;

use costmodel::Scenario;
use plans::{Candidate, PlanFile, SpaceReport, Timeline};
use reports::{Alternative, InputFact, ReportInput};

use crate::args::ReportArgs;
use crate::commands::{plan, search};
use crate::error::CliError;
use crate::inputs::{self, Budget, InputsJson};
use crate::output;

/// What a report is made from.
pub(crate) struct ReportSource<'a> {
    pub(crate) inputs: &'a InputsJson,
    pub(crate) scenario: &'a Scenario,
    pub(crate) plan: &'a PlanFile,
    pub(crate) best: &'a Candidate,
    pub(crate) top: &'a [Candidate],
    pub(crate) space: Option<&'a SpaceReport>,
    pub(crate) timeline: &'a Timeline,
    pub(crate) budget: Option<Budget>,
}

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
    let scenario = loaded.costs.scenario();
    let rate = best.prediction.tokens_per_s_per_gpu;
    let budget =
        inputs::training(&args.budget, &scenario.cluster)?.budget(loaded.inputs.gpus, rate);
    let text = html(&ReportSource {
        inputs: &loaded.inputs,
        scenario,
        plan: &loaded.file,
        best: &best,
        top: &top,
        space: None,
        timeline: &timeline,
        budget,
    });
    let path = args
        .output
        .clone()
        .unwrap_or_else(|| plan::derived(&args.plan, "report.html"));
    output::write(&path, &text)?;
    output::note(false, &format!("report {}", path.display()));
    Ok(ExitCode::SUCCESS)
}

/// The report's text.
pub(crate) fn html(source: &ReportSource<'_>) -> String {
    let cluster = &source.scenario.cluster;
    let alternative = |c: &Candidate| Alternative {
        strategy: plans::grammar::short(&c.strategy),
        step_time: c.prediction.step_time,
        tokens_per_s_per_gpu: c.prediction.tokens_per_s_per_gpu,
        mfu: c.prediction.mfu,
        peak_memory: c.prediction.peak_memory,
        why_not_first: c.why_not_first.clone(),
    };
    let facts = search::input_rows(source.inputs)
        .into_iter()
        .map(|(name, value)| InputFact {
            name,
            value,
            origin: "plan".to_owned(),
        });
    let w = &source.plan.workload;
    reports::html::report(&ReportInput {
        model: source.inputs.model.clone(),
        devices: format!("{} × {}", source.inputs.gpus, cluster.device.name),
        gpus: source.inputs.gpus,
        cluster: cluster.name.clone(),
        runtime: source.inputs.runtime.clone(),
        strategy: source.best.strategy.to_string(),
        plan_id: source.plan.id.clone(),
        command: format!(
            "vescale-plan estimate --model {} --cluster {} --runtime {} --gpus {} --seq {} --global-batch {} --strategy {}",
            source.plan.model,
            source.plan.cluster,
            source.plan.runtime,
            w.gpus,
            w.seq_len,
            w.global_batch,
            source.best.strategy,
        ),
        prediction: &source.best.prediction,
        timeline: Some(source.timeline),
        capacity: cluster.device.memory.value,
        headroom: source.scenario.headroom,
        budget: source.budget.map(|b| reports::Budget {
            tokens: b.tokens,
            time: spec::Seconds(b.days * 86400.0),
            price: b.price,
            dollars: b.dollars,
        }),
        alternatives: source.top.iter().map(alternative).collect(),
        space: source.space,
        inputs: facts.collect(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    })
}
