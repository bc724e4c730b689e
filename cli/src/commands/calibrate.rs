//! `calibrate`: learns factors from measured steps of the user's own system and writes them into a cluster file.

use std::path::Path;
use std::process::ExitCode;

use accuracy::logged_run::LoggedRun;
use accuracy::own_runs::{self, Explained, Learned, OwnRun};
use answers::Opened;
use answers::SCHEMA_VERSION;
use catalog::calibration::{Calibration, Rate, Unexplained};
use catalog::extension::ExtensionFile;
use catalog::files::Kind;
use catalog::residuals::{self, Evidence, Quantity};
use catalog::{Mistake, Seconds, names};
use costmodel::Scenario;
use plans::Strategy;
use serde::Serialize;

use crate::args::CalibrateArgs;
use crate::commands::logged_run;
use crate::commands::plan;
use crate::destinations::Target;
use crate::error::CliError;
use crate::output;

/// A run whose measured step time over the predicted one lies outside this range is refused: it is of another plan.
const PLAUSIBLE: std::ops::RangeInclusive<f64> = 0.1..=10.0;

/// Smallest accepted ratio of a measured step time to the calibrated one. Below it, the run
/// contradicts the device's peak rates, below which no price falls.
const FASTEST: f64 = 0.7;

/// A measured run, from a log or from `--measured`.
pub(crate) struct Measured {
    /// The cluster, as the user named it.
    cluster: String,
    scenario: Scenario,
    strategy: Strategy,
    step_time: Seconds,
    about: String,
}

#[derive(Serialize)]
struct CalibrateJson<'a> {
    schema_version: u32,
    path: String,
    calibration: &'a Calibration,
    runs: Vec<RunJson<'a>>,
}

#[derive(Serialize)]
struct RunJson<'a> {
    run: &'a str,
    measured_step_time_s: f64,
    /// Predicted step times: first without the factors, then with them.
    predicted_step_time_s: [f64; 2],
    /// Relative change of the predicted step time when only one factor is applied, by the factor's name.
    change_by_rate: std::collections::BTreeMap<&'static str, f64>,
}

/// Runs `calibrate`.
pub(crate) fn run(args: &CalibrateArgs) -> Result<ExitCode, CliError> {
    // Without logs, one plan says which job was measured.
    if args.plans.len() != args.logs.len().max(1) {
        let given = format!("{} logs and {} plans", args.logs.len(), args.plans.len());
        let expected = "one --plan for each log";
        return Err(CliError::unexpected("--plan", given, expected));
    }
    let to = Target::named(&args.output, Kind::Cluster, args.force)?;
    let mut runs = Vec::new();
    for (log, plan) in args.logs.iter().zip(&args.plans) {
        let run = logged_run::read(log, plan, args.warmup)?;
        for note in run.notes() {
            let note = format!("note: {}: {note}", log.display());
            output::note(args.format.quiet, &note);
        }
        runs.push(Measured::of_log(&run, log)?);
    }
    for text in &args.measured {
        let job = plan::load(&args.plans[0])?;
        runs.push(Measured::parse(text, &job)?);
    }
    let (calibration, learned) = write(&to, &runs)?;
    if args.format.json {
        output::json(&CalibrateJson {
            schema_version: SCHEMA_VERSION,
            path: to.text(),
            calibration: &calibration,
            runs: runs.iter().zip(&learned.runs).map(json).collect(),
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    output::print(&shown(&runs, &learned));
    to.say(args.format.quiet, "cluster");
    Ok(ExitCode::SUCCESS)
}

impl Measured {
    /// The run that a log and its plan describe; its step time is the median of the steps after warm-up.
    pub(crate) fn of_log(run: &LoggedRun, log: &Path) -> Result<Self, CliError> {
        let scenario = run.plan.costs.scenario();
        let planned = scenario.workload.global_batch;
        if let Some(batch) = run.steady.global_batch().filter(|batch| *batch != planned) {
            let what = format!("the log has {batch} sequences per step, the plan {planned}");
            let expected = format!("steps of the plan's global batch, {planned} sequences");
            return Err(CliError::unexpected(log.display(), what, expected));
        }
        let name = log.file_name().map_or_else(
            || log.display().to_string(),
            |n| n.to_string_lossy().into_owned(),
        );
        Ok(Self {
            cluster: run.plan.file.cluster.clone(),
            strategy: run.plan.strategy.clone(),
            step_time: Seconds(run.steady.median()),
            about: format!(
                "{name} of plan {} ({} on {} devices): median of {} steps {:.4} s",
                run.plan.file.id,
                scenario.model.name,
                scenario.workload.gpus,
                run.steady.seconds.len(),
                run.steady.median(),
            ),
            scenario: scenario.clone(),
        })
    }

    /// Parses a strategy with its step time in s or ms, such as `tp=8,pp=4:8.1s`.
    fn parse(text: &str, job: &Opened) -> Result<Self, CliError> {
        let wrong = || {
            let wrong = Mistake::new(format!("`{text}` is not a measured strategy"))
                .at(format!("--measured {text}"))
                .expected("a strategy, a colon and a time in s or ms");
            CliError::Input(wrong.example("--measured tp=8,pp=4:8.1s"))
        };
        let (strategy, time) = text.rsplit_once(':').ok_or_else(wrong)?;
        let (number, unit) = match time.strip_suffix("ms") {
            Some(number) => (number, 1e-3),
            None => (time.strip_suffix('s').unwrap_or(time), 1.0),
        };
        let number: f64 = number.trim().parse().map_err(|_| wrong())?;
        if !(number > 0.0 && number.is_finite()) {
            return Err(wrong());
        }
        let s = job.costs.scenario();
        let strategy = plans::grammar::parse(strategy, &s.model, &s.workload, &s.runtime)?;
        Ok(Self {
            cluster: job.file.cluster.clone(),
            about: format!(
                "{} on {} devices, {}: {:.4} s",
                s.model.name,
                s.workload.gpus,
                plans::grammar::written(&strategy, &s.runtime),
                number * unit
            ),
            strategy,
            step_time: Seconds(number * unit),
            scenario: s.clone(),
        })
    }
}

/// Checks that every run can be one of its plan.
fn check(runs: &[Measured], learned: &Learned) -> Result<(), CliError> {
    for (run, explained) in runs.iter().zip(&learned.runs) {
        let ratio = run.step_time.0 / explained.before.0;
        if !PLAUSIBLE.contains(&ratio) {
            let what = format!(
                "the steps take {ratio:.3} times what is predicted; is it a run of this plan?"
            );
            let expected = format!("{} to {} times", PLAUSIBLE.start(), PLAUSIBLE.end());
            return Err(CliError::unexpected(&run.about, what, expected));
        }
        let left = run.step_time.0 / explained.after.0;
        if left < FASTEST {
            return Err(CliError::wrong(
                &run.about,
                format!(
                    "the steps take {left:.2} times the shortest that the factors allow on {}, whose peak rates bound \
                     them; is it a run of this model and batch?",
                    run.cluster
                ),
            ));
        }
    }
    Ok(())
}

/// Checks that factors can be learned from the runs together: they are of one cluster, priced by tables, and of one runtime.
fn check_alike(first: &Measured, runs: &[Measured]) -> Result<(), CliError> {
    if first.scenario.cluster.profile.is_some() {
        let what = format!(
            "cluster {} is a profile: its times are measured, and no factors are learned for them",
            first.cluster
        );
        let expected =
            "a plan for a preset of `vescale-plan clusters`, or for a file that extends one";
        return Err(CliError::unexpected("--plan", what, expected));
    }
    let runtime = &first.scenario.runtime.name;
    for (what, own, other) in runs.iter().flat_map(|run| {
        let theirs = &run.scenario.runtime.name;
        [
            ("clusters", &first.cluster, &run.cluster),
            ("runtimes", runtime, theirs),
        ]
    }) {
        if own != other {
            let wrong = format!("runs are of different {what}, {own} and {other}");
            let expected = format!("runs of one of the {what}");
            return Err(CliError::unexpected("--plan", wrong, expected));
        }
    }
    Ok(())
}

/// Warns of factors at their bounds, and of runs outside the usual interval of calibrated runs.
fn warn(runs: &[Measured], learned: &Learned) {
    for rate in learned.at_bounds() {
        let (name, factor) = (rate.name(), learned.factors.of(rate));
        let most = if factor > 1.0 { "most" } else { "least" };
        output::warning(&format!(
            "{name} takes {factor:.3} times the predicted time, the {most} that can be learned: the runs may differ from their \
             plans in something else"
        ));
    }
    let measured = Evidence::Calibrated { runs: runs.len() };
    let usual = residuals::of(Quantity::Time, measured);
    for (run, explained) in runs.iter().zip(&learned.runs) {
        let (least, most) = usual.around(explained.after.0);
        if !(least..=most).contains(&run.step_time.0) {
            let left = run.step_time.0 / explained.after.0;
            output::warning(&format!(
                "{}: the steps take {left:.2} times what the factors explain; is it a run of this model and batch? intervals of \
                 step times on this cluster are wider for it",
                run.about
            ));
        }
    }
}

/// Learns the factors from the runs and writes them into the cluster file.
pub(crate) fn write(to: &Target, runs: &[Measured]) -> Result<(Calibration, Learned), CliError> {
    let Some(first) = runs.first() else {
        return Err(CliError::wrong("--plan", "no run to learn from"));
    };
    check_alike(first, runs)?;
    let own = runs.iter().map(|run| OwnRun {
        scenario: &run.scenario,
        strategy: &run.strategy,
        step_time: run.step_time,
    });
    let learned = own_runs::learn(&own.collect::<Vec<_>>())?;
    check(runs, &learned)?;
    let about: Vec<&str> = runs.iter().map(|run| run.about.as_str()).collect();
    let explained = runs.iter().zip(&learned.runs);
    let unexplained = explained.map(|(run, explained)| run.step_time.0 / explained.after.0);
    let calibration = Calibration {
        runtime: first.scenario.runtime.name.clone(),
        runs: runs.len() as u64,
        time_factors: learned.factors,
        unexplained: Unexplained::of(unexplained),
        source: about.join("; "),
    };
    let path = to.path();
    let older = extended(path, &first.cluster);
    let name = path.file_stem().map_or_else(
        || "calibrated".to_owned(),
        |s| s.to_string_lossy().into_owned(),
    );
    let shown = path.display().to_string();
    let file = ExtensionFile {
        name: names::checked(&name, &shown, "name")?.to_owned(),
        calibration: Some(calibration.clone()),
        ..older
    };
    to.write(&file.to_yaml()?)?;
    warn(runs, &learned);
    Ok((calibration, learned))
}

/// The factors as text, and how far they explain each run.
fn shown(runs: &[Measured], learned: &Learned) -> String {
    let style = output::style();
    let factors = Rate::ALL.iter().map(|&rate| {
        let (name, factor) = (rate.name(), learned.factors.of(rate));
        format!("{name} takes {factor:.3} times the predicted time\n")
    });
    let mut text = format!("{}\n", factors.collect::<String>());
    for (number, run) in runs.iter().enumerate() {
        text.push_str(&style.paragraph("  ", &format!("run {}: {}", number + 1, run.about)));
    }
    let times = ["run", "measured", "predicted", "learned"];
    let header = [times, ["compute", "memory", "network", "host"]].concat();
    let numbered = runs.iter().zip(&learned.runs).enumerate();
    let rows: Vec<Vec<String>> = numbered
        .map(|(number, (run, explained))| {
            let times = [run.step_time, explained.before, explained.after];
            let changes = explained.by_rate.iter();
            std::iter::once((number + 1).to_string())
                .chain(times.map(reports::format::seconds))
                .chain(changes.map(|(_, change)| format!("{:+.1}%", change * 100.0)))
                .collect()
        })
        .collect();
    format!("{text}\n{}", style.columns(&header, &rows))
}

fn json<'a>((run, explained): (&'a Measured, &'a Explained)) -> RunJson<'a> {
    let changes = explained.by_rate.iter();
    RunJson {
        run: &run.about,
        measured_step_time_s: run.step_time.0,
        predicted_step_time_s: [explained.before.0, explained.after.0],
        change_by_rate: changes
            .map(|(rate, change)| (rate.name(), *change))
            .collect(),
    }
}

/// The cluster extension to which a calibration is added. If the file to write is the cluster
/// itself, it is that file's content, so that no file extends itself.
fn extended(path: &Path, cluster: &str) -> ExtensionFile {
    let same = Path::new(cluster) == path;
    let text = same.then(|| catalog::text::read(path).ok()).flatten();
    let older = text.and_then(|text| ExtensionFile::from_yaml(&text, cluster).ok());
    older.unwrap_or_else(|| ExtensionFile {
        schema_version: 1,
        name: String::new(),
        extends: absolute(cluster),
        profile: None,
        calibration: None,
        speed: None,
        jitter: None,
    })
}

/// Presets by name; files by their full path, because the written file may be elsewhere.
fn absolute(cluster: &str) -> String {
    let path = Path::new(cluster);
    if !path.is_file() {
        return cluster.to_owned();
    }
    std::fs::canonicalize(path).map_or_else(|_| cluster.to_owned(), |p| p.display().to_string())
}
