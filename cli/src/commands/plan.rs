//! Reads plan files.

use std::path::Path;

use answers::{Opened, Planned, opened};

use crate::error::CliError;

/// Reads a plan and rebuilds its scenario.
pub(crate) fn load(path: &Path) -> Result<Opened, CliError> {
    Ok(Opened::of(opened::read(path)?, path)?)
}

/// Reads a plan whose replicas may differ from group to group, and rebuilds its scenario.
pub(crate) fn planned(path: &Path) -> Result<Planned, CliError> {
    Ok(Planned::of(opened::read(path)?, path)?)
}
