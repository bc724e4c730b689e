//! What to do after an answer: the commands that launch the plan, say why it is best, and compare it.

use std::borrow::Cow;

use catalog::Packing;
use catalog::residuals::framework;
use costmodel::Scenario;
use interop::config::escape;
use interop::export::{Dialect, ExportError, Exported, Job};
use planner::Constraints;
use plans::Strategy;
use plans::grammar::written;
use plans::plan_file::ShardingFile;

use crate::inputs::Inputs;
use crate::plan;

/// A purpose, with the commands that serve it.
pub type Step = (Cow<'static, str>, Vec<String>);

/// A plan that may be launched, and the path of its file.
#[derive(Clone, Copy)]
pub struct Launchable<'a> {
    /// The scenario that it was planned for.
    pub scenario: &'a Scenario,
    /// Its decisions.
    pub strategy: &'a Strategy,
    /// Path of its file.
    pub plan: &'a str,
}

/// Commands that launch a plan: for each target that can express it, the export, then the start.
pub fn launches(of: Launchable<'_>) -> Vec<(String, Vec<String>)> {
    let (found, _) = targets(of);
    let command = |target: &str| (target.to_owned(), commands(of, target));
    found.into_iter().map(command).collect()
}

/// The targets of a plan's own framework that can express it. If there is none: the first other target, and why.
fn targets(of: Launchable<'_>) -> (Vec<&'static str>, Option<String>) {
    let sharding = match plan::sharding(of.scenario, of.strategy) {
        Ok(sharding) => sharding,
        Err(error) => return (Vec::new(), Some(error.to_string())),
    };
    let planned = framework(&of.scenario.runtime.name);
    let own = |dialect: &Dialect| framework(dialect.runtime()) == planned;
    let (own, others): (Vec<Dialect>, Vec<Dialect>) =
        Dialect::ALL.iter().partition(|dialect| own(dialect));
    let taken = |dialect: &&Dialect| exported(**dialect, of, &sharding, None).is_ok();
    let mut found: Vec<&str> = own.iter().filter(taken).map(|d| d.target()).collect();
    found.dedup();
    if !found.is_empty() {
        return (found, None);
    }
    // Megatron Bridge takes some models by their names on the hub alone.
    let refused = |dialect: &Dialect| exported(*dialect, of, &sharding, Some("")).err();
    let refused: Vec<ExportError> = own.iter().filter_map(refused).collect();
    let all =
        |lack: fn(&ExportError) -> bool| refused.len() == own.len() && refused.iter().all(lack);
    let why = if own.is_empty() {
        format!("there is no export to {planned}")
    } else if all(ExportError::refuses_adapters_alone) {
        format!("the export to {planned} has no adapters")
    } else if all(ExportError::refuses_the_model) {
        format!("{planned} has no model like this")
    } else {
        format!("as it is, it cannot be exported to {planned}")
    };
    match others.iter().find(taken) {
        Some(other) => (vec![other.target()], Some(why)),
        None => (
            Vec::new(),
            Some(format!("{why}, and no other system takes it")),
        ),
    }
}

fn exported(
    dialect: Dialect,
    of: Launchable<'_>,
    sharding: &ShardingFile,
    hf_id: Option<&str>,
) -> Result<Exported, ExportError> {
    let job = Job {
        model: &of.scenario.model,
        decisions: of.strategy.decisions(),
        workload: &of.scenario.workload,
        runtime: &of.scenario.runtime,
        sharding,
        id: "",
        cluster: &of.scenario.cluster,
        inputs: interop::export::Inputs {
            hf_id,
            ..Default::default()
        },
    };
    interop::export::export(&job, dialect, None)
}

fn commands(of: Launchable<'_>, target: &str) -> Vec<String> {
    let plan = escape::path(of.plan);
    if target == "vescale" {
        return vec![format!("vescale-plan run {plan} --data YOUR_TOKENS.bin")];
    }
    let pools = of.scenario.cluster.pools.as_ref();
    if pools.is_some_and(|pools| pools.gpus_per_node().is_none()) {
        // A launch script has one number of GPUs per node.
        return vec![format!(
            "vescale-plan export {plan} --to {target} -o launch"
        )];
    }
    let several = of.scenario.workload.gpus > of.scenario.cluster.gpus_per_node;
    let (launcher, start) = match several {
        true => ("slurm", "sbatch launch/launch.sbatch"),
        false => ("torchrun", "bash launch/launch.sh"),
    };
    vec![
        format!("vescale-plan export {plan} --to {target} --launcher {launcher} -o launch"),
        start.to_owned(),
    ]
}

/// The command that predicts a strategy for the same inputs.
pub fn estimate(inputs: &Inputs, strategy: &str) -> String {
    format!(
        "vescale-plan estimate {} --strategy {}",
        flags(inputs),
        escape::shell(strategy)
    )
}

/// Flags that repeat a scenario: model and GPUs always, others where they differ from the defaults.
pub fn flags(inputs: &Inputs) -> String {
    joined(options(inputs))
}

/// Flags as text on a command line.
pub fn joined(options: impl IntoIterator<Item = (&'static str, String)>) -> String {
    options
        .into_iter()
        .map(|(name, value)| escape::option(name, &value))
        .collect::<Vec<_>>()
        .join(" ")
}

/// The flags of [`flags`], without their dashes, with their values.
pub fn options(inputs: &Inputs) -> Vec<(&'static str, String)> {
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
    unusual("precision", w.precision.name().to_owned(), usual.precision);
    unusual("headroom", inputs.json.headroom.to_string(), usual.headroom);
    let lengths = &inputs.json.lengths;
    unusual(
        "lengths",
        lengths.clone().unwrap_or_default(),
        lengths.is_none(),
    );
    let packing = inputs.json.packing.unwrap_or_default();
    unusual(
        "packing",
        packing.to_string(),
        packing == Packing::default(),
    );
    let adapters = &inputs.json.adapters;
    unusual(
        "lora",
        adapters.clone().unwrap_or_default(),
        adapters.is_none(),
    );
    options
}

/// The flags of a search, without their dashes, with their values: its scenario, its constraints, and the risk where it is not the usual
/// one.
#[must_use]
pub fn search_options(
    inputs: &Inputs,
    constraints: &Constraints,
    risk: f64,
) -> Vec<(&'static str, String)> {
    let mut options = options(inputs);
    options.extend(constraints.flags());
    if risk != planner::RISK {
        options.push(("risk", risk.to_string()));
    }
    options
}

/// Commands to suggest after a plan was written: launch it, explain it, and `compare` if given.
pub fn after_plan(of: Launchable<'_>, compare: Option<Step>) -> Vec<Step> {
    let (found, why) = targets(of);
    let quoted = escape::path(of.plan);
    let mut steps: Vec<Step> = Vec::new();
    let purpose = match (found.first(), why) {
        (_, None) => "launch it".into(),
        (Some(target), Some(why)) => format!("launch it with {target}: {why}").into(),
        (None, Some(why)) => format!("nothing launches it: {why}").into(),
    };
    let launch = found.first().map(|target| commands(of, target));
    steps.push((purpose, launch.unwrap_or_default()));
    let explain = format!("vescale-plan explain {quoted}");
    steps.push(("see why".into(), vec![explain]));
    steps.extend(compare);
    steps
}

/// Commands to suggest after a plan with groups of replicas that differ was written: explain it, and each of its groups.
#[must_use]
pub fn of_groups(plan: &str, groups: usize) -> Vec<Step> {
    let explain = |path: &str| format!("vescale-plan explain {}", escape::path(path));
    let groups = (1..=groups).map(|number| explain(&format!("{plan}#{number}")));
    vec![
        ("see why".into(), vec![explain(plan)]),
        ("look at one group".into(), groups.collect()),
    ]
}

/// Commands that compare a plan with another strategy, the runner-up.
#[must_use]
pub fn runner_up(inputs: &Inputs, of: Launchable<'_>, other: &Strategy) -> Step {
    let other = written(other, &inputs.scenario.runtime);
    (
        "compare it with the runner-up".into(),
        vec![
            format!("{} -o runner-up.plan.yaml", estimate(inputs, &other)),
            comparing(of.plan, "runner-up.plan.yaml"),
        ],
    )
}

/// The command that compares two plan files.
#[must_use]
pub fn comparing(plan: &str, other: &str) -> String {
    let (plan, other) = (escape::path(plan), escape::path(other));
    format!("vescale-plan compare {plan} {other}")
}
