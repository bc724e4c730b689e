//! `calibrate`: writes a cluster file that carries what training logs have shown.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

use catalog::calibration::Calibration;
use catalog::extension::ExtensionFile;
use catalog::files::Kind;
use catalog::{Origin, Precision, Sourced};
use serde::Serialize;

use crate::args::CalibrateArgs;
use crate::commands::logged_run::{self, LoggedRun};
use crate::destinations::Target;
use crate::error::CliError;
use crate::inputs;
use crate::output::{self, SCHEMA_VERSION};

/// One run's contribution to a calibration.
pub(crate) struct Source {
    cluster: String,
    runtime: String,
    precision: Precision,
    /// Measured step time over the one predicted without calibration.
    ratio: f64,
    about: String,
}

#[derive(Serialize)]
struct CalibrateJson {
    schema_version: u32,
    path: String,
    calibration: Vec<Calibration>,
}

/// Runs `calibrate`.
pub(crate) fn run(args: &CalibrateArgs) -> Result<ExitCode, CliError> {
    if args.logs.len() != args.plans.len() {
        return inputs::usage(format!(
            "{} logs and {} plans: give one --plan for each log",
            args.logs.len(),
            args.plans.len()
        ));
    }
    let to = Target::named(&args.output, Kind::Cluster, args.force)?;
    let mut sources = Vec::new();
    for (log, plan) in args.logs.iter().zip(&args.plans) {
        let run = logged_run::read(log, plan, args.warmup)?;
        sources.push(Source::of(&run, log));
    }
    let file = write(&to, &sources)?;
    if args.format.json {
        output::json(&CalibrateJson {
            schema_version: SCHEMA_VERSION,
            path: to.text(),
            calibration: file.calibration,
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    for c in &file.calibration {
        output::print(&format!(
            "{} {}: steps take {:.3} times the prediction ({})\n",
            c.runtime,
            format!("{:?}", c.precision).to_lowercase(),
            c.step_time.value,
            c.step_time.source
        ));
    }
    to.say(args.format.quiet, "cluster");
    Ok(ExitCode::SUCCESS)
}

impl Source {
    /// The contribution of one run.
    pub(crate) fn of(run: &LoggedRun, log: &Path) -> Self {
        let scenario = run.loaded.costs.scenario();
        let precision = scenario.workload.precision;
        let runtime = scenario.runtime.name.clone();
        // The prediction for a calibrated cluster includes its ratio already.
        let known = scenario.cluster.step_time_ratio(&runtime, precision);
        let before = run.prediction.step_time.0 / known.map_or(1.0, |ratio| ratio.value);
        let name = log.file_name().map_or_else(
            || log.display().to_string(),
            |n| n.to_string_lossy().into_owned(),
        );
        Self {
            cluster: run.loaded.file.cluster.clone(),
            runtime,
            precision,
            ratio: run.steady.median() / before,
            about: format!(
                "{name} of plan {} ({} on {} devices): median of {} steps {:.4} s, predicted {before:.4} s",
                run.loaded.file.id,
                scenario.model.name,
                scenario.workload.gpus,
                run.steady.seconds.len(),
                run.steady.median(),
            ),
        }
    }
}

/// Writes the calibration; runs of one runtime and precision are combined by their geometric mean, because errors of
/// prices are factors.
pub(crate) fn write(to: &Target, sources: &[Source]) -> Result<ExtensionFile, CliError> {
    let Some(first) = sources.first() else {
        return inputs::usage("no run to learn from".to_owned());
    };
    let path = to.path();
    if let Some(other) = sources.iter().find(|s| s.cluster != first.cluster) {
        return inputs::usage(format!(
            "plans are for different clusters, {} and {}; calibrate each by itself",
            first.cluster, other.cluster
        ));
    }
    let mut groups: BTreeMap<(String, Precision), Vec<&Source>> = BTreeMap::new();
    for source in sources {
        let key = (source.runtime.clone(), source.precision);
        groups.entry(key).or_default().push(source);
    }
    let calibration = groups.into_iter().map(|((runtime, precision), runs)| {
        let logs: f64 = runs.iter().map(|s| s.ratio.ln()).sum();
        let about: Vec<&str> = runs.iter().map(|s| s.about.as_str()).collect();
        Calibration {
            runtime,
            precision,
            step_time: Sourced {
                value: (logs / runs.len() as f64).exp(),
                origin: Origin::Measured,
                source: about.join("; "),
            },
        }
    });
    let (extends, profile) = extended(path, &first.cluster);
    let name = path.file_stem().map_or_else(
        || "calibrated".to_owned(),
        |s| s.to_string_lossy().into_owned(),
    );
    let file = ExtensionFile {
        schema_version: 1,
        name,
        extends,
        profile,
        calibration: calibration.collect(),
    };
    let text = file.to_yaml()?;
    // A ratio beyond what cluster files may hold is refused here, not when the file is read.
    ExtensionFile::from_yaml(&text, &path.display().to_string())?;
    to.write(&text)?;
    Ok(file)
}

/// The cluster to extend, with its profile. It is never the file being written: then it is the cluster that file
/// extends.
fn extended(path: &Path, cluster: &str) -> (String, Option<String>) {
    let same = Path::new(cluster) == path;
    let text = same.then(|| catalog::text::read(path).ok()).flatten();
    let older = text.and_then(|text| ExtensionFile::from_yaml(&text, cluster).ok());
    match older {
        Some(older) => (older.extends, older.profile),
        None => (absolute(cluster), None),
    }
}

/// Presets by name; files by their full path, because the written file may be elsewhere.
fn absolute(cluster: &str) -> String {
    let path = Path::new(cluster);
    if !path.is_file() {
        return cluster.to_owned();
    }
    std::fs::canonicalize(path).map_or_else(|_| cluster.to_owned(), |p| p.display().to_string())
}
