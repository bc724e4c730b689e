//! One file per subcommand.

mod assumptions;
mod calibrate;
mod checkpoint;
mod compare;
mod config;
mod device;
mod diagnose;
mod doc;
mod estimate;
mod explain;
mod export;
mod follow;
mod import;
mod keep;
mod lists;
mod logged_run;
mod next;
mod plan;
mod present;
mod present_source;
mod profile;
mod replan;
mod report;
mod run;
mod search;
mod size;
mod stale_launchers;
mod trace;
mod under_target;
mod validate;

use std::process::ExitCode;

use answers::origins::Asked;

use crate::args::{Cli, Command};
use crate::error::CliError;
use crate::settings::Settings;

/// Runs a subcommand.
pub(crate) fn run(cli: Cli, asked: &Asked, settings: &Settings) -> Result<ExitCode, CliError> {
    match cli.command {
        Command::Search(args) => search::run(&args, asked),
        Command::Estimate(args) => estimate::run(&args, asked),
        Command::Explain(args) => explain::run(&args),
        Command::Compare(args) => compare::run(&args),
        Command::Size(args) => size::run(&args),
        Command::Replan(args) => replan::run(&args),
        Command::Validate(args) => validate::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Profile(args) => profile::run(&args),
        Command::Checkpoint(args) => checkpoint::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Import(args) => import::run(&args),
        Command::Diagnose(args) => diagnose::run(&args),
        Command::Calibrate(args) => calibrate::run(&args),
        Command::Models(args) => lists::models(&args),
        Command::Clusters(args) => lists::clusters(&args),
        Command::Runtimes(args) => lists::runtimes(&args),
        Command::Config(args) => config::run(&args, settings),
        Command::Doc(args) => doc::run(&args),
        Command::Schema(args) => lists::schema(&args),
        Command::Completions(args) => lists::completions(&args),
        Command::Man(args) => lists::man(&args),
    }
}
