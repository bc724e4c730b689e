//! `vescale-plan`: plans how to shard LLM training, predicts its speed and memory, and says why.

mod args;
mod commands;
mod destinations;
mod error;
mod inputs;
mod memory;
mod origins;
mod output;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};

fn main() -> ExitCode {
    memory::keep();
    let parsed = args::Cli::command().try_get_matches().and_then(|matches| {
        let cli = args::Cli::from_arg_matches(&matches)?;
        Ok((cli, origins::Asked::on(&matches)))
    });
    let (cli, asked) = match parsed {
        Ok(parsed) => parsed,
        Err(message) => return output::ended(output::usage(&message)),
    };
    let code = commands::run(cli, &asked).unwrap_or_else(|error| {
        if !matches!(error, error::CliError::Said(_)) {
            output::error(&error.to_string());
        }
        ExitCode::from(error.exit_code())
    });
    output::ended(code)
}
