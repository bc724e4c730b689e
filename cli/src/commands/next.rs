//! What to do after an answer: the commands that launch the plan, say why it is best, and compare it.

use interop::config::escape;
use interop::export::Dialect;
use plans::Strategy;
use plans::grammar::written;

use crate::inputs::Inputs;
use crate::output;

/// A purpose, with the commands that serve it.
pub(crate) type Step = (&'static str, Vec<String>);

/// Commands that launch the plan of a file: for each target that runs it, the export, then the start.
pub(crate) fn launches(
    runtime: &str,
    plan: &str,
    gpus: u64,
    per_node: u64,
) -> Vec<(String, Vec<String>)> {
    let mut targets: Vec<&str> = Vec::new();
    for dialect in Dialect::ALL.into_iter().filter(|d| d.runtime() == runtime) {
        if !targets.contains(&dialect.target()) {
            targets.push(dialect.target());
        }
    }
    let plan = escape::shell(plan);
    let several = gpus > per_node;
    let (launcher, start) = match several {
        true => ("slurm", "sbatch launch/launch.sbatch"),
        false => ("torchrun", "bash launch/launch.sh"),
    };
    let commands = |target: &str| {
        if target == "vescale" {
            return vec![format!("vescale-plan run {plan}")];
        }
        vec![
            format!("vescale-plan export {plan} --to {target} --launcher {launcher} -o launch"),
            start.to_owned(),
        ]
    };
    targets
        .into_iter()
        .map(|target| (target.to_owned(), commands(target)))
        .collect()
}

/// The command that predicts a strategy for the same inputs.
pub(crate) fn estimate(inputs: &Inputs, strategy: &str) -> String {
    format!(
        "vescale-plan estimate {} --strategy {}",
        flags(inputs),
        escape::shell(strategy)
    )
}

/// The flags of a scenario: those that every prediction needs, and others where they are not the usual.
pub(crate) fn flags(inputs: &Inputs) -> String {
    let w = &inputs.scenario.workload;
    let mut options = vec![
        ("model", inputs.model_arg.clone()),
        ("gpus", w.gpus.to_string()),
    ];
    let usual = inputs.usual();
    let mut unusual = |name, value: String, is_usual: bool| {
        if !is_usual {
            options.push((name, value));
        }
    };
    unusual("cluster", inputs.cluster_arg.clone(), usual.cluster);
    unusual("runtime", inputs.json.runtime.clone(), usual.runtime);
    unusual("seq", w.seq_len.to_string(), usual.seq);
    unusual("global-batch", w.global_batch.to_string(), usual.batch);
    let precision = format!("{:?}", w.precision).to_lowercase();
    unusual("precision", precision, usual.precision);
    unusual("headroom", inputs.json.headroom.to_string(), usual.headroom);
    options
        .into_iter()
        .map(|(name, value)| format!("--{name} {}", escape::shell(&value)))
        .collect::<Vec<_>>()
        .join(" ")
}

/// What to do with a plan that was written to a file.
pub(crate) fn after_plan(inputs: &Inputs, plan: &str, other: Option<&Strategy>) -> Vec<Step> {
    let scenario = &inputs.scenario;
    let launches = launches(
        &scenario.runtime.name,
        plan,
        scenario.workload.gpus,
        scenario.cluster.gpus_per_node,
    );
    let quoted = escape::shell(plan);
    let mut steps: Vec<Step> = Vec::new();
    if let Some((_, commands)) = launches.into_iter().next() {
        steps.push(("launch it", commands));
    }
    steps.push(("see why", vec![format!("vescale-plan explain {quoted}")]));
    if let Some(other) = other {
        let other = written(other, &scenario.runtime);
        steps.push((
            "compare it with the runner-up",
            vec![
                format!("{} -o runner-up.plan.yaml", estimate(inputs, &other)),
                format!("vescale-plan compare {quoted} runner-up.plan.yaml"),
            ],
        ));
    }
    steps
}

/// Prints steps, unless notes are off, and the meaning of abbreviations where asked for.
pub(crate) fn print(steps: &[Step], format: crate::args::OutputArgs) {
    if !format.quiet {
        output::print(&reports::terminal::next(steps, output::style()));
    }
    terms(format);
}

/// Prints the meaning of abbreviations where asked for.
pub(crate) fn terms(format: crate::args::OutputArgs) {
    if format.explain_terms {
        output::print(&reports::terminal::terms(output::style()));
    }
}
