//! `config`: shows every default, and where it was set.

use std::process::ExitCode;

use answers::SCHEMA_VERSION;
use serde::Serialize;

use crate::args::{self, ListArgs};
use crate::error::CliError;
use crate::output;
use crate::settings::{self, KEYS, Settings};
use crate::usage;

#[derive(Serialize)]
struct ConfigJson {
    schema_version: u32,
    defaults: Vec<DefaultJson>,
}

#[derive(Serialize)]
struct DefaultJson {
    name: &'static str,
    value: String,
    origin: String,
    variable: String,
}

/// Runs `config`.
pub(crate) fn run(args: &ListArgs, settings: &Settings) -> Result<ExitCode, CliError> {
    let rows = KEYS.map(|(name, usual)| {
        let set = settings.get(name);
        DefaultJson {
            name,
            value: set.map_or_else(|| usual.to_owned(), |s| s.value.clone()),
            origin: set.map_or_else(|| "built in".to_owned(), |s| s.origin.clone()),
            variable: settings::variable(name),
        }
    });
    if args.output.json {
        output::json(&ConfigJson {
            schema_version: SCHEMA_VERSION,
            defaults: rows.into(),
        })?;
        return Ok(ended(settings));
    }
    let cells = rows.map(|r| vec![r.name.to_owned(), r.value, r.origin, r.variable]);
    let header = ["flag", "default", "set by", "variable"];
    output::print(&output::style().columns(&header, &cells));
    let own = settings::own_file().map_or_else(String::new, |p| format!(", {}", p.display()));
    output::print(&output::style().paragraph(
        "",
        &format!(
            "The first of these counts: a flag, its variable, vescale-plan.toml in this folder{own}, the built-in default. `vescale-plan doc settings` has an example."
        ),
    ));
    Ok(ended(settings))
}

/// The exit code after all defaults were shown. Reports a default that its flag refuses, if any.
fn ended(settings: &Settings) -> ExitCode {
    let refused = settings.refused(&args::command());
    refused.map_or(ExitCode::SUCCESS, |message| usage::say(&message, settings))
}
