//! Lists of presets, JSON schemas, shell completions and manual pages.

use std::process::ExitCode;

use answers::SCHEMA_VERSION;
use catalog::Mistake;
use catalog::load::PresetInfo;
use catalog::suggest::nearest;
use clap::builder::PossibleValuesParser;
use interop::export::Dialect;
use serde::Serialize;

use crate::args::{self, CompletionsArgs, ListArgs, ManArgs, SchemaArgs, SchemaFormat};
use crate::error::CliError;
use crate::output;

#[derive(Serialize)]
struct ListJson {
    schema_version: u32,
    items: Vec<PresetInfo>,
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
        output::json(&ListJson {
            schema_version: SCHEMA_VERSION,
            items: presets,
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<Vec<String>> = presets
        .into_iter()
        .map(|p| vec![p.name, p.aliases.join(", "), p.summary])
        .collect();
    output::print(&output::list_style().columns(&["name", "also", ""], &rows));
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

/// The command line's definition with the known models, clusters, runtimes and targets as values, so that shells
/// complete them.
fn with_names(mut command: clap::Command) -> Result<clap::Command, CliError> {
    let names = |presets: Vec<PresetInfo>| -> Vec<String> {
        let all = presets
            .into_iter()
            .flat_map(|p| p.aliases.into_iter().chain([p.name]));
        all.collect()
    };
    let targets = Dialect::ALL.iter().map(|d| d.target().to_owned());
    let known = [
        ("model", names(catalog::load::model_names())),
        ("cluster", names(catalog::load::cluster_names()?)),
        ("runtime", names(catalog::load::runtime_names())),
        ("to", targets.collect()),
    ];
    for name in args::names_below(&command) {
        command = command.mut_subcommand(name, |mut sub| {
            for (flag, values) in &known {
                let takes_names = |arg: &clap::Arg| arg.get_long() == Some(flag);
                if sub.get_arguments().any(takes_names)
                    && (*flag != "to" || sub.get_name() == "export")
                {
                    let mut values = values.clone();
                    values.sort();
                    values.dedup();
                    let names = PossibleValuesParser::new(values);
                    sub = sub.mut_arg(flag, |arg| arg.value_parser(names));
                }
            }
            sub
        });
    }
    Ok(command)
}

/// Runs `completions`.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<ExitCode, CliError> {
    let mut text = Vec::new();
    let mut command = with_names(args::command())?;
    clap_complete::generate(args.shell, &mut command, "vescale-plan", &mut text);
    output::document(&String::from_utf8_lossy(&text));
    Ok(ExitCode::SUCCESS)
}

/// Runs `man`.
pub(crate) fn man(args: &ManArgs) -> Result<ExitCode, CliError> {
    let mut command = args::command();
    // Names of pages: vescale-plan-search.
    command.build();
    for word in &args.command {
        let below = command.find_subcommand(word).cloned();
        command = below.ok_or_else(|| {
            let known = command.get_subcommands().map(clap::Command::get_name);
            Mistake::new(format!("unknown command `{word}`"))
                .expected("a command that `vescale-plan --help` lists")
                .nearest(nearest(word, known))
                .example("vescale-plan man search")
        })?;
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command)
        .source(concat!("vescale-plan ", env!("CARGO_PKG_VERSION")))
        .render(&mut page)
        .map_err(|e| CliError::wrong("stdout", format!("cannot write the page: {e}")))?;
    output::document(&String::from_utf8_lossy(&page));
    Ok(ExitCode::SUCCESS)
}
