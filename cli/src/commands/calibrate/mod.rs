//! `calibrate`: learns factors from measured steps of the user's own system and writes them into a cluster file.

mod file;
mod measured;
mod warnings;

use std::process::ExitCode;

use accuracy::alternatives;
use accuracy::own_runs::{self, Explained, Learned, OwnRun};
use answers::SCHEMA_VERSION;
use catalog::Mistake;
use catalog::calibration::{Calibration, Rate, Unexplained};
use catalog::extension::ExtensionFile;
use catalog::files::Kind;
use catalog::paths::from_everywhere;
use serde::Serialize;

use crate::args::CalibrateArgs;
use crate::commands::logged_run;
use crate::commands::plan;
use crate::destinations::Target;
use crate::error::CliError;
use crate::output;

pub(crate) use self::measured::Measured;

/// A run whose measured step time over the predicted one lies outside this range is refused: it is of another plan.
const PLAUSIBLE: std::ops::RangeInclusive<f64> = 0.1..=10.0;

/// A measured step may be shorter by this factor than the step at peak rates: real clocks may be a little higher than those of datasheets.
const FASTEST: f64 = 0.9;

/// What was learned from runs and written.
pub(crate) struct Saved {
    calibration: Calibration,
    /// The runs: first those that the calibrated cluster of the plans was learned from, then the new ones.
    runs: Vec<Measured>,
    learned: Learned,
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
    /// The step time as it was predicted before this calibration: without the factors.
    predicted_step_time_before_s: f64,
    /// The step time with the factors.
    predicted_step_time_after_s: f64,
    /// Relative change of the predicted step time when only one factor is applied, by the factor's name.
    change_by_rate: std::collections::BTreeMap<&'static str, f64>,
}

/// Runs `calibrate`.
pub(crate) fn run(args: &CalibrateArgs) -> Result<ExitCode, CliError> {
    // Without logs, one plan says which job was measured.
    if args.plans.len() != args.logs.len().max(1) {
        let given = format!("{} logs and {} plans", args.logs.len(), args.plans.len());
        let wrong = Mistake::new(given).at("--plan");
        return Err(CliError::Input(wrong.expected("one --plan for each log")));
    }
    let to = Target::named(&args.output, Kind::Cluster, args.force)?;
    let mut runs = Vec::new();
    for (log, plan) in args.logs.iter().zip(&args.plans) {
        let run = logged_run::read(log, plan, args.warmup)?;
        for note in run.notes() {
            let note = format!("note: {}: {note}", log.display());
            output::note(args.format.quiet, &note);
        }
        for warning in run.warnings() {
            output::warning(&format!("{}: {warning}", log.display()));
        }
        runs.push(Measured::of_log(&run, log, plan)?);
    }
    for text in &args.measured {
        let job = plan::load(&args.plans[0])?;
        runs.push(Measured::parse(text, &job, &args.plans[0])?);
    }
    let saved = write(&to, runs, args.format.quiet)?;
    if args.format.json {
        let runs = saved.runs.iter().zip(&saved.learned.runs);
        output::json(&CalibrateJson {
            schema_version: SCHEMA_VERSION,
            path: to.text(),
            calibration: &saved.calibration,
            runs: runs.map(json).collect(),
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    output::print(&shown(&saved.runs, &saved.learned));
    to.say(args.format.quiet, "cluster");
    Ok(ExitCode::SUCCESS)
}

/// Checks that a run can be of its plan.
fn check(run: &Measured, explained: &Explained) -> Result<(), CliError> {
    let step = run.step_time();
    let within = |ratio: f64, what: &str| {
        if PLAUSIBLE.contains(&ratio) {
            return Ok(());
        }
        let [least, most] = [PLAUSIBLE.start(), PLAUSIBLE.end()];
        let wrong = Mistake::new(format!("the steps take {ratio:.3} times {what}"));
        let wrong = wrong.at(&run.record.about);
        Err(CliError::Input(
            wrong.expected(format!("{least} to {most} times")),
        ))
    };
    within(
        step / explained.before,
        "what is predicted; is it a run of this plan?",
    )?;
    let (step, least) = (run.least, explained.shortest);
    if step < least * FASTEST {
        let cluster = &run.cluster;
        let wrong = format!(
            "the steps take {step} and can take no less than {least} on {cluster}, whose peak rates bound them; is it a run of this model \
             and batch?"
        );
        return Err(CliError::wrong(&run.record.about, wrong));
    }
    within(
        run.step_time() / explained.after,
        "what the factors that suit all runs best give; are all of this cluster?",
    )
}

/// Checks that factors can be learned from the runs together: they are of one cluster, priced by tables, and of one runtime.
fn check_alike(first: &Measured, runs: &[Measured]) -> Result<(), CliError> {
    if first.scenario.cluster.profile.is_some() {
        let what = format!(
            "cluster {} is a profile: its times are measured, and no factors are learned for them",
            first.cluster
        );
        let wrong = Mistake::new(what).at("--plan");
        return Err(CliError::Input(wrong.expected(
            "a plan for a preset of `vescale-plan clusters`, or for a file that extends one",
        )));
    }
    if first.scenario.cluster.pools.is_some() {
        let what = format!(
            "cluster {} has several pools: which of them a step waits for, its time does not say",
            first.cluster
        );
        return Err(CliError::Input(Mistake::new(what).at("--plan").expected(
            "a plan for one pool's cluster alone; the file learned from it may be a pool, as in '16 x ours.yaml + 8 x dgx-a100'",
        )));
    }
    let differ = |what: &str, own: &str, other: &str| {
        let wrong = Mistake::new(format!("runs are of different {what}s, {own} and {other}"));
        wrong
            .at("--plan")
            .expected(format!("runs of the same {what}"))
    };
    let runtime = &first.scenario.runtime.name;
    for run in runs {
        let theirs = &run.scenario.runtime.name;
        if from_everywhere(&first.cluster) != from_everywhere(&run.cluster) {
            return Err(CliError::Input(differ(
                "cluster",
                &first.cluster,
                &run.cluster,
            )));
        }
        if runtime != theirs {
            return Err(CliError::Input(differ("runtime", runtime, theirs)));
        }
    }
    let known = first.scenario.cluster.calibration.as_ref();
    if let Some(known) = known.filter(|known| known.runtime != *runtime) {
        let wrong = differ("runtime", &known.runtime, runtime);
        return Err(CliError::Input(wrong.expected(format!(
            "a plan for a cluster without what {} learned under {}: factors are those of one runtime",
            first.cluster, known.runtime
        ))));
    }
    Ok(())
}

/// Checks that no run is given twice.
fn check_once(runs: &[Measured]) -> Result<(), CliError> {
    for (number, run) in runs.iter().enumerate() {
        let twin = runs[..number].iter().position(|other| {
            other.record.repeats(&run.record) && other.step_time() == run.step_time()
        });
        if let Some(twin) = twin {
            let same = format!("runs {} and {} are the same", twin + 1, number + 1);
            let wrong = Mistake::new(same).at(&run.record.about);
            return Err(CliError::Input(wrong.expected("every run once")));
        }
    }
    Ok(())
}

/// Learns the factors from the runs, and from those that their cluster was learned from before, and writes them into the cluster file. A
/// run that is measured again replaces the one that the cluster has; runs that repeat each other count as one, with their mean.
pub(crate) fn write(to: &Target, new: Vec<Measured>, quiet: bool) -> Result<Saved, CliError> {
    let Some(first) = new.first() else {
        return Err(CliError::wrong("--plan", "no run to learn from"));
    };
    check_alike(first, &new)?;
    check_once(&new)?;
    let file = file::extension(to.path(), &first.cluster)?;
    let runtime = first.scenario.runtime.name.clone();
    let mut runs = Measured::known(first)?;
    runs.retain(|old| !new.iter().any(|run| run.record.repeats(&old.record)));
    warnings::of_known(first, &runs, quiet);
    let lost = warnings::lost(to.path(), first, &runs);
    runs.extend(new);
    let runs = Measured::merged(runs);
    let own: Vec<OwnRun<'_>> = runs.iter().map(Measured::own).collect();
    let learned = own_runs::learn(&own)?;
    for (run, explained) in runs.iter().zip(&learned.runs) {
        check(run, explained)?;
    }
    let others = alternatives::alternatives(&own, &learned)?;
    warnings::of_learned(&runs, &learned, &others)?;
    let about: Vec<&str> = runs.iter().map(|run| run.record.about.as_str()).collect();
    let explained = own.iter().zip(&learned.runs);
    let calibration = Calibration {
        runtime,
        runs: runs.len() as u64,
        time_factors: learned.factors,
        unexplained: Unexplained::of(
            explained.map(|(run, explained)| run.step_time / explained.after),
        ),
        covariance: learned.covariance,
        alternatives: others.into_iter().map(|(_, factors)| factors).collect(),
        source: about.join("; "),
        measured: runs.iter().map(|run| run.record.clone()).collect(),
    };
    let file = ExtensionFile {
        calibration: Some(calibration.clone()),
        ..file
    };
    to.write(&file.to_yaml()?)?;
    warnings::of_lost(to.path(), lost, quiet);
    Ok(Saved {
        calibration,
        runs,
        learned,
    })
}

/// Text of the factors, and of how well they explain each run.
fn shown(runs: &[Measured], learned: &Learned) -> String {
    let style = output::style();
    let factors = Rate::ALL.iter().map(|&rate| {
        let factor = learned.factors.of(rate);
        format!(
            "{} takes {factor:.3} times the predicted time\n",
            rate.name()
        )
    });
    let mut text = format!("{}\n", factors.collect::<String>());
    for (number, run) in runs.iter().enumerate() {
        text.push_str(&style.paragraph("  ", &format!("run {}: {}", number + 1, run.record.about)));
    }
    let header = [
        "run",
        "measured",
        "without factors",
        "learned",
        "compute",
        "memory",
        "network",
        "host",
    ];
    let numbered = runs.iter().zip(&learned.runs).enumerate();
    let rows: Vec<Vec<String>> = numbered
        .map(|(number, (run, explained))| {
            let times = [run.step_time(), explained.before, explained.after];
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
        run: &run.record.about,
        measured_step_time_s: run.record.step_time_s,
        predicted_step_time_before_s: explained.before.0,
        predicted_step_time_after_s: explained.after.0,
        change_by_rate: changes
            .map(|(rate, change)| (rate.name(), *change))
            .collect(),
    }
}
