//! Measured runs: from logs, from `--measured`, and from the cluster file that their plans are for.

use std::path::Path;

use accuracy::logged_run::LoggedRun;
use accuracy::own_runs::OwnRun;
use answers::Opened;
use catalog::calibration::{Calibration, MeasuredRun};
use catalog::paths::beside;
use catalog::{Mistake, Seconds};
use costmodel::Scenario;
use plans::plan_file::WorkloadFile;
use plans::{PlanFile, Strategy};

use crate::error::CliError;

/// A measured run.
pub(crate) struct Measured {
    /// The cluster: a preset or a file, as it is found from here.
    pub(super) cluster: String,
    pub(super) scenario: Scenario,
    pub(super) strategy: Strategy,
    /// The run as the cluster file keeps it.
    pub(super) record: MeasuredRun,
    /// Measured time of one step; the least one of runs that repeat each other.
    pub(super) least: Seconds,
}

/// The plan that a run was of.
struct Of<'a> {
    plan: &'a Path,
    opened: &'a Opened,
}

impl Measured {
    /// The run that a log and its plan, read from `plan`, describe; its step time is the median of the steps after warm-up.
    pub(crate) fn of_log(run: &LoggedRun, log: &Path, plan: &Path) -> Result<Self, CliError> {
        let workload = &run.plan.scenario.workload;
        let planned = workload.global_batch;
        if let Some(batch) = run.other_batch() {
            let what = format!("the log has {batch} sequences per step, the plan {planned}");
            let wrong = Mistake::new(what).at(log.display().to_string());
            let expected = format!("steps of the plan's global batch, {planned} sequences");
            return Err(CliError::Input(wrong.expected(expected)));
        }
        let name = log.file_name().map_or_else(
            || log.display().to_string(),
            |n| n.to_string_lossy().into_owned(),
        );
        let about = format!(
            "{name} of plan {} ({} on {} devices): {} {:.4} s",
            run.plan.file.id,
            run.plan.scenario.model.name,
            workload.gpus,
            run.time_in_words(),
            run.steady.median(),
        );
        let of = Of {
            plan,
            opened: &run.plan,
        };
        Ok(of.measured(run.plan.strategy.clone(), run.steady.median(), about))
    }

    /// Parses a strategy of the plan's job with its step time in s or ms, such as `tp=8,pp=4:8.1s`.
    pub(super) fn parse(text: &str, opened: &Opened, plan: &Path) -> Result<Self, CliError> {
        let wrong = || {
            let wrong = Mistake::new(format!("`{text}` is not a measured strategy"))
                .at(format!("--measured {text}"))
                .expected("a strategy, a colon and a time in s or ms");
            CliError::Input(wrong.example("--measured tp=8,pp=4:8.1s"))
        };
        let (strategy, time) = text.rsplit_once(':').ok_or_else(wrong)?;
        if strategy.trim().is_empty() {
            return Err(wrong());
        }
        let (number, unit) = match time.strip_suffix("ms") {
            Some(number) => (number, 1e-3),
            None => (time.strip_suffix('s').unwrap_or(time), 1.0),
        };
        let number: f64 = number.trim().parse().map_err(|_| wrong())?;
        if !(number > 0.0 && number.is_finite()) {
            return Err(wrong());
        }
        let s = &opened.scenario;
        let strategy = plans::grammar::parse(strategy, &s.model, &s.workload, &s.runtime)?;
        let about = format!(
            "{} on {} devices, {}: {:.4} s",
            s.model.name,
            s.workload.gpus,
            plans::grammar::written(&strategy, &s.runtime),
            number * unit
        );
        Ok(Of { plan, opened }.measured(strategy, number * unit, about))
    }

    /// The runs that a calibrated cluster was learned from; `first` is a new run on it.
    pub(super) fn known(first: &Self) -> Result<Vec<Self>, CliError> {
        let known = first.scenario.cluster.calibration.as_ref();
        let Some(known) = known.filter(|known| !known.measured.is_empty()) else {
            return Ok(Vec::new());
        };
        let again = |record| Self::again(record, known, first);
        known.measured.iter().map(again).collect()
    }

    /// A run that a cluster file keeps, on that cluster.
    fn again(record: &MeasuredRun, known: &Calibration, first: &Self) -> Result<Self, CliError> {
        let place = &first.cluster;
        let wrong =
            |what: String| CliError::wrong(place.as_str(), format!("{}: {what}", record.about));
        let model = match &record.model_config {
            Some(config) => catalog::load::model_defined(config, &record.model, place)?,
            None => catalog::load::model(&record.model)?,
        };
        let runtime = catalog::load::runtime(&known.runtime)?;
        let model = model
            .trained_under(&runtime)
            .with_adapters(record.adapters)?;
        let workload = WorkloadFile {
            gpus: record.gpus,
            seq_len: record.seq_len,
            global_batch: record.global_batch,
            precision: record.precision,
            lengths: record.lengths.clone(),
            packing: record.packing,
        };
        let workload = workload.read().map_err(wrong)?;
        let strategy = plans::grammar::parse(&record.strategy, &model, &workload, &runtime)?;
        Ok(Self {
            cluster: first.cluster.clone(),
            scenario: Scenario {
                model,
                cluster: first.scenario.cluster.clone(),
                runtime,
                workload,
                headroom: first.scenario.headroom,
            },
            strategy,
            record: record.clone(),
            least: Seconds(record.step_time_s),
        })
    }

    /// The runs with one in place of those that repeat each other. They tell how much one job varies, not how far predictions of several
    /// jobs are off.
    pub(super) fn merged(runs: Vec<Self>) -> Vec<Self> {
        let mut alike: Vec<Vec<Self>> = Vec::new();
        for run in runs {
            match alike
                .iter_mut()
                .find(|of| of[0].record.repeats(&run.record))
            {
                Some(of) => of.push(run),
                None => alike.push(vec![run]),
            }
        }
        alike.into_iter().filter_map(Self::mean).collect()
    }

    /// One run in place of runs that repeat each other: with their mean time.
    fn mean(runs: Vec<Self>) -> Option<Self> {
        let count = runs.len();
        let seconds = runs.iter().map(|run| run.record.step_time_s).sum::<f64>() / count as f64;
        let about: Vec<&str> = runs.iter().map(|run| run.record.about.as_str()).collect();
        let about = format!("mean of {count} runs {seconds:.4} s: {}", about.join("; "));
        let least = runs.iter().map(|run| run.least.0).reduce(f64::min)?;
        let mut first = runs.into_iter().next()?;
        first.least = Seconds(least);
        if count > 1 {
            first.record.about = about;
            first.record.step_time_s = seconds;
        }
        Some(first)
    }

    /// Measured time of one step.
    pub(super) fn step_time(&self) -> Seconds {
        Seconds(self.record.step_time_s)
    }

    /// The run, as factors are learned from it.
    pub(super) fn own(&self) -> OwnRun<'_> {
        OwnRun {
            scenario: &self.scenario,
            strategy: &self.strategy,
            step_time: self.step_time(),
        }
    }
}

impl Of<'_> {
    /// A run of a strategy of the plan's job.
    fn measured(&self, strategy: Strategy, seconds: f64, about: String) -> Measured {
        let (file, scenario): (&PlanFile, _) = (&self.opened.file, &self.opened.scenario);
        let workload = WorkloadFile::of(&scenario.workload);
        let record = MeasuredRun {
            about,
            step_time_s: seconds,
            model: file.model.clone(),
            model_config: file.model_config.clone(),
            adapters: file.adapters,
            model_kind: scenario.kind().model,
            precision: workload.precision,
            gpus: workload.gpus,
            seq_len: workload.seq_len,
            global_batch: workload.global_batch,
            lengths: workload.lengths,
            packing: workload.packing,
            experts_across: scenario.reach(&strategy).experts_across,
            strategy: strategy.to_string(),
        };
        Measured {
            cluster: beside(self.plan, &file.cluster),
            scenario: scenario.clone(),
            strategy,
            record,
            least: Seconds(seconds),
        }
    }
}
