//! Reads plan files.

use std::path::Path;

use answers::{Opened, Planned, opened};
use catalog::Mistake;

use crate::error::CliError;

/// Reads a plan and rebuilds its scenario.
pub(crate) fn load(path: &Path) -> Result<Opened, CliError> {
    Ok(Opened::of(opened::read(path)?, path)?)
}

/// Reads the plan of a run that has a log. A log has the steps of the whole job, so the plan must not be one of several groups, nor
/// have any.
pub(crate) fn of_log(path: &Path) -> Result<Opened, CliError> {
    let whole = opened::group(path).map_or_else(|| path.to_owned(), |(file, _)| file);
    let groups = opened::read(&whole)?.groups.len();
    if groups > 0 {
        let wrong = Mistake::new(format!(
            "the plan has {groups} groups of replicas, each with a strategy of its own: a log has the steps of all groups together, \
             and which of them it waits for, it does not say"
        ));
        let expected = "a plan whose replicas are all alike, as `search --fix groups=1` finds it";
        return Err(CliError::Input(
            wrong.at(path.display().to_string()).expected(expected),
        ));
    }
    load(path)
}

/// Reads a plan whose replicas may differ from group to group, and rebuilds its scenario.
pub(crate) fn planned(path: &Path) -> Result<Planned, CliError> {
    Ok(Planned::of(opened::read(path)?, path)?)
}
