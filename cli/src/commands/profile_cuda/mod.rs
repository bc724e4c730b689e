//! `profile --device cuda`: measures a GPU.

mod grid;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use dtensor::cuda::EIGHT_BITS;
use profiler::cuda::{Budget, Request, Target, complete};
use spec::profile;

use super::profile::{self as host, ProfileJson, What, before, effort, of_plan, summary};
use crate::args::{ProfileArgs, SuiteArg};
use crate::error::CliError;
use crate::output::{self, Progress, SCHEMA_VERSION};

/// Time for all measurements of a suite. Starting the device, compiling kernels, making operands and checking
/// results come on top.
fn budget(suite: SuiteArg) -> Duration {
    match suite {
        SuiteArg::Quick => Duration::from_secs(35),
        SuiteArg::Full => Duration::from_secs(480),
    }
}

/// Runs `profile --device cuda`. Every measurement is written as soon as it is there, and what a file holds
/// already is not measured again.
pub(crate) fn run(args: &ProfileArgs) -> Result<ExitCode, CliError> {
    let path = args.output_profile.as_deref();
    let path = path.unwrap_or(Path::new(profile::DEFAULT_PATH));
    let mut target = Target::new(0)?;
    let mut profile = before(path, &target.machine)?;
    let requests = requests(args)?;
    let progress = Progress::new(args.output.quiet, "measuring");
    target.warm_up()?;
    let time = (
        Budget::new(budget(args.suite)),
        effort(args.suite).at_once(),
    );
    let too_large = complete(
        &mut target,
        &mut profile,
        &requests,
        time,
        |done, profile| {
            progress.update(done);
            output::write(path, &profile.to_yaml())
        },
    )?;
    progress.finish();
    if !too_large.is_empty() {
        let text = format!(
            "left out, for the GPU's memory does not hold their operands: {}",
            too_large.join(", ")
        );
        output::note(args.output.quiet, &text);
    }
    if args.output.json {
        output::json(&ProfileJson {
            schema_version: SCHEMA_VERSION,
            machine: profile.machine.clone(),
            path: path.display().to_string(),
            measured: profile.measured,
        })?;
    } else {
        output::print(&summary(&profile, path));
        if let Some(gpu) = &profile.machine.gpu {
            output::print(&format!("{}\n", gpu.described()));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What to measure: the plans' shapes, or grids.
fn requests(args: &ProfileArgs) -> Result<Vec<Request>, CliError> {
    if args.plans.is_empty() {
        let facts = dtensor::cuda::ready()?;
        let eight_bits = facts
            .first()
            .is_some_and(|gpu| gpu.capability >= EIGHT_BITS);
        return grid::requests(args.suite, eight_bits);
    }
    let mut requests = Vec::new();
    for path in &args.plans {
        requests.extend(requests_of(of_plan(path, 1)?));
    }
    Ok(requests)
}

/// What of a rank's work one GPU does alone.
fn requests_of(requests: Vec<host::Request>) -> impl Iterator<Item = Request> {
    requests
        .into_iter()
        .filter_map(|request| match request.what {
            What::Block(block) => Some(Request::Block(block)),
            What::States(elements) => Some(Request::States(elements)),
            What::Messages(_) => None,
        })
}
