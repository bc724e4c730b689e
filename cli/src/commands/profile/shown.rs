//! Prints a profile that has just been measured: a summary, or all of it as JSON.

use std::path::Path;

use answers::SCHEMA_VERSION;
use catalog::profile::{self, Machine, Measured, Profile};
use serde::Serialize;

use crate::args::OutputArgs;
use crate::error::CliError;
use crate::output;

#[derive(Serialize)]
struct ProfileJson {
    schema_version: u32,
    machine: Machine,
    path: String,
    measured: Vec<Measured>,
}

/// Prints the profile that was written to `path`.
pub(super) fn show(args: OutputArgs, profile: Profile, path: &Path) -> Result<(), CliError> {
    if args.json {
        return output::json(&ProfileJson {
            schema_version: SCHEMA_VERSION,
            machine: profile.machine,
            path: path.display().to_string(),
            measured: profile.measured,
        });
    }
    output::print(&summary(&profile, path));
    Ok(())
}

fn summary(profile: &Profile, path: &Path) -> String {
    let noisy = profile.measured.iter().filter(|m| m.spread > 0.1).count();
    format!(
        "{}: {} kernels, matrix products up to {}\n{} of them vary by more than 10% from run to run\nwrote {}; plan for it with --cluster {}\n",
        profile.machine.described(),
        profile.measured.len(),
        profile.peak(),
        noisy,
        path.display(),
        if path == Path::new(profile::DEFAULT_PATH) {
            "local".to_owned()
        } else {
            path.display().to_string()
        }
    )
}
