//! The flags on length, cost and failures of a whole training, and which of them belong together.

use answers::Training;
use answers::budget::Facts;
use catalog::{Cluster, Mistake};
use costmodel::Scenario;

use crate::args::{BudgetArgs, ObjectiveArg};
use crate::error::CliError;

/// The training of a scenario that the flags ask for.
pub(crate) fn training(args: &BudgetArgs, scenario: &Scenario) -> Result<Training, CliError> {
    let Scenario { model, cluster, .. } = scenario;
    let any = args.mtbf.is_some() || args.checkpoint.is_some() || args.restart.is_some();
    if any {
        needs("a prediction with failures", &with_failures(args))?;
    }
    let training = Training::on(cluster, args.tokens, args.price);
    let Some((checkpoint, restart)) = args.checkpoint.zip(args.restart) else {
        return Ok(training);
    };
    let [trained, _] = models::trained_and_frozen(model)
        .map_err(|e| CliError::wrong(&model.name, e.to_string()))?;
    Ok(training.with_failures(Some(Facts {
        mtbf: args.mtbf,
        checkpoint,
        restart,
        trained,
    })))
}

/// Refuses an objective if a flag that it needs is missing.
pub(crate) fn check(
    objective: ObjectiveArg,
    args: &BudgetArgs,
    cluster: &Cluster,
) -> Result<(), CliError> {
    let known = args.price.is_some() || cluster.dollars_per_gpu_hour.is_some();
    match objective {
        ObjectiveArg::Time | ObjectiveArg::Memory => Ok(()),
        ObjectiveArg::Cost => needs("--objective cost", &[("--price", known)]),
        ObjectiveArg::TimeToTrain => needs("--objective time-to-train", &with_failures(args)),
    }
}

/// Facts that a prediction with failures needs, and whether each is given.
fn with_failures(args: &BudgetArgs) -> [(&'static str, bool); 3] {
    [
        ("--tokens", args.tokens.is_some()),
        ("--checkpoint", args.checkpoint.is_some()),
        ("--restart", args.restart.is_some()),
    ]
}

fn needs(what: &str, facts: &[(&str, bool)]) -> Result<(), CliError> {
    let missing = facts.iter().filter(|(_, given)| !given);
    let missing: Vec<&str> = missing.map(|(flag, _)| *flag).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let wrong = Mistake::new(format!("{what} also needs {}", missing.join(", ")));
    let example = match missing[..] {
        ["--price"] => "--price 2.5",
        _ => "--tokens 15T --checkpoint 200GB/s --restart 10min",
    };
    let wrong = wrong.at(what).expected(missing.join(", "));
    Err(wrong.example(example).into())
}
