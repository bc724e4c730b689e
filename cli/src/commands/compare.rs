//! `compare`: compares two plans, part by part.

use std::path::PathBuf;
use std::process::ExitCode;

use answers::SCHEMA_VERSION;
use catalog::Seconds;
use catalog::files::Kind;
use planner::explain::differences;
use plans::StagePartition;
use plans::json::PredictedJson;
use reports::html::compare::Compared;
use reports::{format, lines::of, words};
use serde::Serialize;

use crate::args::CompareArgs;
use crate::commands::next;
use crate::commands::plan::{self, Loaded};
use crate::destinations::Target;
use crate::error::CliError;
use crate::output;

#[derive(Serialize)]
struct CompareJson {
    schema_version: u32,
    first: PredictedJson,
    second: PredictedJson,
    changed: Vec<(String, String, String)>,
    differences: Vec<(String, f64, f64)>,
}

/// Runs `compare`.
pub(crate) fn run(args: &CompareArgs) -> Result<ExitCode, CliError> {
    let first = plan::load(&args.first)?;
    let second = plan::load(&args.second)?;
    let a = first.costs.predict(&first.strategy)?;
    let b = second.costs.predict(&second.strategy)?;
    if let Some(path) = &args.report {
        let to = Target::named(path, Kind::Report, args.force)?;
        let paths = [&args.first, &args.second].into_iter().chain(&args.others);
        let plans = paths.map(|path| Ok((path, plan::load(path)?)));
        let plans = plans.collect::<Result<Vec<_>, CliError>>()?;
        to.write(&page(&plans)?)?;
        to.say(args.output.quiet, "report");
    }
    let changed = changed(&first.file.strategy_text, &second.file.strategy_text);
    let parts = differences(&a.breakdown, &b.breakdown);
    if args.output.json {
        output::json(&CompareJson {
            schema_version: SCHEMA_VERSION,
            first: PredictedJson::from(&a),
            second: PredictedJson::from(&b),
            changed,
            differences: parts
                .into_iter()
                .map(|d| (d.name.to_owned(), d.first_s, d.second_s))
                .collect(),
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows = vec![
        [
            "step time".to_owned(),
            format::seconds(a.step_time),
            format::seconds(b.step_time),
        ],
        ["MFU".to_owned(), of(a.mfu), of(b.mfu)],
        [
            "MFU, PaLM convention".to_owned(),
            of(a.mfu_palm),
            of(b.mfu_palm),
        ],
        [
            "peak memory".to_owned(),
            format::bytes(a.peak_memory),
            format::bytes(b.peak_memory),
        ],
        [
            "fits".to_owned(),
            a.fit.fits().to_string(),
            b.fit.fits().to_string(),
        ],
    ];
    for d in parts.iter().filter(|d| d.first_s.max(d.second_s) > 1e-6) {
        let time = |s: f64| format::seconds(Seconds(s));
        rows.push([d.name.to_owned(), time(d.first_s), time(d.second_s)]);
    }
    rows.extend(changed.into_iter().map(|(key, x, y)| {
        let [x, y] = [x, y].map(|value| shown(&key, value));
        [key, x, y]
    }));
    let names = [&args.first, &args.second].map(|path| path.display().to_string());
    let rows: Vec<Vec<String>> = rows.into_iter().map(Vec::from).collect();
    output::print(&output::style().columns(&["", &names[0], &names[1]], &rows));
    next::terms(args.output);
    Ok(ExitCode::SUCCESS)
}

/// A decision's value as strategies are written; consecutive equal stages become a count, such as `4x20/18`.
fn shown(key: &str, value: String) -> String {
    match key {
        "stages" => StagePartition::read(&value).map_or(value, |stages| stages.runs()),
        _ => value,
    }
}

/// The plans side by side, as HTML.
fn page(plans: &[(&PathBuf, Loaded)]) -> Result<String, CliError> {
    let predictions = plans.iter().map(|(_, p)| p.costs.predict(&p.strategy));
    let predictions = predictions.collect::<Result<Vec<_>, _>>()?;
    let compared = plans
        .iter()
        .zip(&predictions)
        .map(|((path, p), prediction)| {
            let s = p.costs.scenario();
            Compared {
                name: path.display().to_string(),
                job: format!(
                    "{} on {} × {}, {}",
                    s.model.name, s.workload.gpus, s.cluster.device.name, s.runtime.name
                ),
                strategy: plans::grammar::written(&p.strategy, &s.runtime),
                said: words::plan(&p.strategy, s.cluster.gpus_per_node),
                prediction,
            }
        });
    let compared: Vec<Compared<'_>> = compared.collect();
    Ok(reports::html::compare::report(
        &compared,
        env!("CARGO_PKG_VERSION"),
    ))
}

/// Decisions that differ.
fn changed(first: &str, second: &str) -> Vec<(String, String, String)> {
    first
        .split(',')
        .zip(second.split(','))
        .filter(|(a, b)| a != b)
        .filter_map(|(a, b)| {
            let (key, x) = a.split_once('=')?;
            let (_, y) = b.split_once('=')?;
            Some((key.to_owned(), x.to_owned(), y.to_owned()))
        })
        .collect()
}
