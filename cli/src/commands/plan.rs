//! Reads plan files.

use std::path::Path;

use answers::{Opened, opened};

use crate::error::CliError;

/// Reads a plan and rebuilds its scenario.
pub(crate) fn load(path: &Path) -> Result<Opened, CliError> {
    Ok(Opened::of(opened::read(path)?, path)?)
}
