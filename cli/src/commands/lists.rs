//! Lists of presets, JSON schemas and shell completions.

use std::process::ExitCode;

use catalog::load::PresetInfo;
use clap::CommandFactory;
use serde::Serialize;

use crate::args::{Cli, CompletionsArgs, ListArgs, SchemaArgs, SchemaFormat};
use crate::error::CliError;
use crate::output::{self, SCHEMA_VERSION};

#[derive(Serialize)]
struct ListJson {
    schema_version: u32,
    items: Vec<ItemJson>,
}

#[derive(Serialize)]
struct ItemJson {
    name: String,
    aliases: Vec<String>,
    summary: String,
}

/// Runs `models`.
pub(crate) fn models(args: &ListArgs) -> Result<ExitCode, CliError> {
    let mut presets = catalog::load::model_names();
    for preset in &mut presets {
        let model = catalog::load::model(&preset.name)?;
        if let Ok(count) = models::parameter_count(&model) {
            preset.summary = format!("{:.2} B, {}", count as f64 / 1e9, preset.summary);
        }
    }
    list(args, presets)
}

/// Runs `clusters`.
pub(crate) fn clusters(args: &ListArgs) -> Result<ExitCode, CliError> {
    list(args, catalog::load::cluster_names()?)
}

/// Runs `runtimes`.
pub(crate) fn runtimes(args: &ListArgs) -> Result<ExitCode, CliError> {
    list(args, catalog::load::runtime_names())
}

fn list(args: &ListArgs, presets: Vec<PresetInfo>) -> Result<ExitCode, CliError> {
    if args.output.json {
        let items = presets
            .into_iter()
            .map(|p| ItemJson {
                name: p.name,
                aliases: p.aliases,
                summary: p.summary,
            })
            .collect();
        output::json(&ListJson {
            schema_version: SCHEMA_VERSION,
            items,
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<[String; 3]> = presets
        .into_iter()
        .map(|p| [p.name, p.aliases.join(", "), p.summary])
        .collect();
    output::print(&reports::terminal::three(["name", "also", ""], &rows));
    Ok(ExitCode::SUCCESS)
}

/// Runs `schema`.
pub(crate) fn schema(args: &SchemaArgs) -> Result<ExitCode, CliError> {
    let schema = match args.format {
        SchemaFormat::Plan => schemars::schema_for!(plans::PlanFile),
        SchemaFormat::Cluster => schemars::schema_for!(catalog::cluster_file::ClusterFile),
        SchemaFormat::ClusterExtension => {
            schemars::schema_for!(catalog::extension::ExtensionFile)
        }
        SchemaFormat::Device => schemars::schema_for!(catalog::cluster_file::DeviceFile),
        SchemaFormat::Runtime => schemars::schema_for!(catalog::runtime_file::RuntimeFile),
        SchemaFormat::Constraints => schemars::schema_for!(planner::Constraints),
        SchemaFormat::Profile => schemars::schema_for!(catalog::Profile),
        SchemaFormat::Runs => schemars::schema_for!(catalog::runs::RunsFile),
    };
    output::json(&schema)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs `completions`.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<ExitCode, CliError> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "vescale-plan", &mut text);
    output::document(&String::from_utf8_lossy(&text));
    Ok(ExitCode::SUCCESS)
}
