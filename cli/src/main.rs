//! `vescale-plan`: plans how to shard LLM training, predicts its speed and memory, and says why.

mod args;
mod commands;
mod error;
mod exchange_args;
mod inputs;
mod memory;
mod output;
mod validate;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    memory::keep();
    let cli = args::Cli::parse();
    match commands::run(cli) {
        Ok(code) => code,
        Err(error) => {
            if !matches!(error, error::CliError::Said(_)) {
                eprintln!("error: {error}");
            }
            ExitCode::from(error.exit_code())
        }
    }
}
