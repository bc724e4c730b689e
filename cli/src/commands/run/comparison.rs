//! Compares what a run measured with what was predicted.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use answers::Opened;
use catalog::{Cluster, Mistake, Seconds, profile};
use costmodel::{CostModel, Member, Scenario};
use dtensor::train::StateBytes;
use executor::{Job, Outcome};
use plans::Timeline;
use reports::html::run::{Held, Phase, RunReport};
use serde::Serialize;

use crate::args::{DeviceArg, NumericsArg, RunArgs};
use crate::commands::device;
use crate::error::CliError;
use crate::output;

/// Row of the peak bytes in use on a GPU, which are predicted to a few parts in a thousand.
const MOST: &str = "most in use of all";

/// A kind of bytes: its name, and how many of a rank's states are of it.
type OfStates = (&'static str, fn(&StateBytes) -> u64);

/// What is held for the whole step.
const STATES: [OfStates; 4] = [
    ("parameters", |states| states.parameters),
    ("gradients", |states| states.gradients),
    ("optimizer: master parameters", |states| states.master),
    ("optimizer: moments", |states| states.moments),
];

/// Share of a step from which a kind of action is mentioned in the headline.
const PART_OF_STEP: f64 = 0.05;
/// Seconds from which the relative error of a prediction is shown.
const TOLD: f64 = 1e-6;

/// The cost model's prediction for a plan on this machine.
pub(crate) struct Predicted {
    /// The cost model, for what ranks hold.
    costs: CostModel,
    /// Predicted times, where this machine has a profile.
    pub(crate) times: Option<Times>,
}

/// Predicted times.
pub(crate) struct Times {
    /// Seconds of one step.
    pub(crate) step_time_s: f64,
    /// When every action runs.
    pub(crate) timeline: Timeline,
    /// Seconds that the model FLOPs of a step take at the machine's peak.
    pub(crate) at_peak: f64,
}

/// Predicts the run of a plan by our executor on this machine.
pub(crate) fn predict(args: &RunArgs, loaded: &Opened) -> Result<Predicted, CliError> {
    let scenario = Scenario {
        runtime: device::runtime(args)?,
        ..loaded.costs.scenario().clone()
    };
    let costs = CostModel::new(scenario.clone())?;
    let predicted = Predicted { costs, times: None };
    let Some((path, cluster)) = measured(args, loaded)? else {
        return Ok(predicted);
    };
    // A profile measures the kernels of fast mode only.
    if args.numerics == NumericsArg::Exact {
        return Ok(predicted);
    }
    if let Some(profile) = &cluster.profile {
        device::measured_as_run(args.attention, profile, &path)?;
    }
    let scenario = Scenario {
        cluster,
        ..scenario
    };
    match times(scenario, loaded) {
        Ok(times) => Ok(Predicted {
            times: Some(times),
            ..predicted
        }),
        // A profile that was found, not asked for, may not cover this plan.
        Err(CliError::Cost(costmodel::CostError::NotMeasured { kernel }))
            if args.profile.is_none() =>
        {
            let note = format!(
                "times are not predicted: {} has no `{kernel}`",
                path.display()
            );
            output::note(args.output.quiet, &note);
            Ok(predicted)
        }
        Err(error) => Err(error),
    }
}

/// The profile by which times are predicted, and its path: that of the command, else the plan's own cluster if it is a profile of
/// this kind of device, else the one in this folder. `None` if there is none.
fn measured(args: &RunArgs, loaded: &Opened) -> Result<Option<(PathBuf, Cluster)>, CliError> {
    let own = &loaded.scenario.cluster;
    let of_gpus = (own.profile.as_ref()).map(|profile| profile.machine.gpu.is_some());
    let path = match &args.profile {
        Some(path) if !path.is_file() => {
            let place = format!("--profile {}", path.display());
            let wrong = Mistake::new("there is no such file").at(place);
            let wrong = wrong.expected("a profile that `vescale-plan profile` wrote");
            return Err(CliError::Input(wrong));
        }
        Some(path) => path.as_path(),
        None if of_gpus == Some(args.device == DeviceArg::Cuda) => {
            return Ok(Some((PathBuf::from(&loaded.file.cluster), own.clone())));
        }
        None if Path::new(profile::DEFAULT_PATH).exists() => Path::new(profile::DEFAULT_PATH),
        None => return Ok(None),
    };
    let cluster = catalog::load::cluster(&path.display().to_string())?;
    Ok(Some((path.to_owned(), cluster)))
}

fn times(scenario: Scenario, loaded: &Opened) -> Result<Times, CliError> {
    let costs = CostModel::new(scenario)?;
    let prediction = costs.predict(&loaded.strategy)?;
    Ok(Times {
        step_time_s: prediction.step_time.0,
        timeline: costs.timeline(&loaded.strategy)?,
        at_peak: prediction.mfu * prediction.step_time.0,
    })
}

/// The predicted over the measured time of actions, less one.
fn error_of(phase: &Phase) -> Option<f64> {
    let predicted = phase.predicted_s.filter(|_| phase.measured_s > 0.0)?;
    Some(relative(predicted, phase.measured_s))
}

/// The error as text; empty for times so short that it is noise.
fn shown_error(phase: &Phase) -> String {
    let told = error_of(phase).filter(|_| phase.predicted_s > Some(TOLD));
    told.map_or_else(String::new, |error| format!("{:+.1}%", 100.0 * error))
}

fn relative(predicted: f64, measured: f64) -> f64 {
    predicted / measured - 1.0
}

/// A run beside its prediction: step time, memory of every rank, time of every kind of action.
#[derive(Serialize)]
pub(crate) struct Comparison {
    /// Median step time in seconds, without the first step.
    pub(crate) step_time_s: f64,
    /// Absent without a profile of this machine.
    pub(crate) predicted_step_time_s: Option<f64>,
    pub(crate) tokens_per_s: f64,
    /// Median time of a captured step's passes on the GPU that took longest; absent where steps are not captured.
    pub(crate) captured_time_s: Option<f64>,
    pub(crate) phases: Vec<Phase>,
    pub(crate) memory: Vec<Held>,
    /// Most bytes that a rank reserved on its GPU, including rounding and free pieces; absent where they are not
    /// counted.
    pub(crate) reserved_bytes: Option<u64>,
    /// Name and version of the library that ran core attention; absent where the project's own code did.
    pub(crate) attention_library: Option<String>,
    /// Why no library ran core attention; absent if one did, or none was asked for.
    pub(crate) without_library: Option<String>,
}

impl Comparison {
    pub(crate) fn new(
        job: &Job,
        outcome: &Outcome,
        predicted: &Predicted,
    ) -> Result<Self, CliError> {
        let step_time_s = median(outcome.step_times.get(1..).unwrap_or(&[]))
            .or(outcome.step_times.first().copied())
            .unwrap_or(f64::NAN);
        let times = predicted.times.as_ref();
        let ranks = || outcome.ranks.iter();
        let asked = || ranks().filter_map(|rank| rank.attention_library.clone());
        Ok(Self {
            step_time_s,
            predicted_step_time_s: times.map(|t| t.step_time_s),
            tokens_per_s: (job.global_batch * job.seq_len) as f64 / step_time_s,
            captured_time_s: ranks()
                .filter_map(|rank| median(&rank.captured_times))
                .reduce(f64::max),
            phases: phases(&outcome.timeline(), times.map(|t| &t.timeline)),
            memory: memory(job, outcome, predicted)?,
            attention_library: asked().find_map(Result::ok),
            without_library: asked().find_map(Result::err),
            reserved_bytes: {
                let counted = outcome.ranks.iter().filter_map(|rank| rank.memory);
                counted.map(|memory| memory.reserved).max()
            },
        })
    }

    /// The comparison as an HTML page.
    pub(crate) fn page(&self, job: &Job, outcome: &Outcome, predicted: &Predicted) -> String {
        reports::html::run::report(&RunReport {
            model: &job.model.name,
            strategy: &plans::grammar::short(&job.strategy),
            ranks: outcome.ranks.len(),
            losses: &outcome.losses,
            step_time: Seconds(self.step_time_s),
            predicted_step_time: self.predicted_step_time_s.map(Seconds),
            tokens_per_s: self.tokens_per_s,
            phases: &self.phases,
            memory: &self.memory,
            measured: &outcome.timeline(),
            predicted: predicted.times.as_ref().map(|t| &t.timeline),
            version: env!("CARGO_PKG_VERSION"),
        })
    }

    /// The error of the predicted step time, and of the parts of a step, because errors of parts may cancel.
    fn verdict(&self, predicted: f64) -> String {
        let error = relative(predicted, self.step_time_s) * 100.0;
        let large = |p: &&Phase| p.measured_s >= PART_OF_STEP * self.step_time_s;
        let errors = self.phases.iter().filter(large).filter_map(error_of);
        let (least, most) = errors.fold((f64::MAX, f64::MIN), |(least, most), error| {
            (least.min(error), most.max(error))
        });
        let parts = if least > most {
            String::new()
        } else {
            let [least, most] = [least, most].map(|error| 100.0 * error);
            format!("; its actions {least:+.1}% to {most:+.1}%")
        };
        format!("predicted {:.1} ms, {error:+.1}%{parts}", predicted * 1e3)
    }

    /// Table of the time of every kind of action beside the predicted time.
    fn actions(&self) -> String {
        let mut text = String::from(
            "\ntime of the last step, by action              measured      predicted\n",
        );
        for phase in &self.phases {
            let predicted = phase.predicted_s.map_or_else(
                || format!("{:>14}", "–"),
                |p| format!("{:>11.3} ms{:>9}", p * 1e3, shown_error(phase)),
            );
            text.push_str(&format!(
                "  pp{:<3} {:<18} × {:<4} {:>12.3} ms {}\n",
                phase.rank,
                phase.name,
                phase.count,
                phase.measured_s * 1e3,
                predicted,
            ));
        }
        text
    }

    /// The comparison as text for a terminal.
    pub(crate) fn text(&self, job: &Job, outcome: &Outcome) -> String {
        let last = outcome.losses.last().copied().unwrap_or(f64::NAN);
        let first = outcome.losses.first().copied().unwrap_or(f64::NAN);
        let mut text = format!(
            "{} on {} ranks: {}\n\nloss      {first:.6} → {last:.6} in {} steps\nstep      {:.1} ms{}, {:.0} tokens/s\nweights   sha256 {}\n\n",
            job.model.name,
            outcome.ranks.len(),
            plans::grammar::short(&job.strategy),
            outcome.losses.len(),
            self.step_time_s * 1e3,
            self.predicted_step_time_s
                .map_or_else(String::new, |p| format!(" ({})", self.verdict(p))),
            self.tokens_per_s,
            outcome.weights_sha256(),
        );
        // GPUs count the bytes that are in use.
        if self.reserved_bytes.is_some() {
            let by = self.attention_library.clone();
            let by = by.unwrap_or_else(|| device::own_kernels(self.without_library.as_deref()));
            text.push_str(&format!("core attention by {by}\n\n"));
        }
        text.push_str("memory per rank (heaviest peer)          measured      predicted\n");
        if job.model.moe.is_some() {
            text.push_str("  (saved activations are predicted from the routing that this run recorded; `estimate` takes routing as balanced)\n");
        }
        for line in &self.memory {
            let error = line.predicted_bytes as f64 / line.measured_bytes as f64 - 1.0;
            let differs = if line.measured_bytes == line.predicted_bytes {
                String::new()
            } else if line.name == MOST {
                format!("   {:+.2}%", 100.0 * error)
            } else {
                "   differs".to_owned()
            };
            text.push_str(&format!(
                "  pp{:<3} {:<30} {:>12}   {:>12}{differs}\n",
                line.rank, line.name, line.measured_bytes, line.predicted_bytes,
            ));
        }
        if let Some(reserved) = self.reserved_bytes {
            text.push_str(&format!(
                "  taken from the GPU, with rounding and free pieces: {reserved}\n"
            ));
        }
        if let Some(captured) = self.captured_time_s {
            text.push_str(&format!(
                "\nCaptured passes are one call: their actions are not timed. The GPU takes {:.1} ms of a step for them.\n",
                captured * 1e3
            ));
            return text;
        }
        text.push_str(&self.actions());
        if self.predicted_step_time_s.is_none() {
            text.push_str("  `vescale-plan profile PLAN` measures what predicting these takes\n");
        }
        text
    }
}

fn memory(job: &Job, outcome: &Outcome, predicted: &Predicted) -> Result<Vec<Held>, CliError> {
    let mut lines = Vec::new();
    for rank in 0..job.strategy.pp {
        let peers = || outcome.ranks.iter().filter(|r| r.pp == rank);
        // What experts keep depends on how many tokens were routed to them.
        let members: BTreeSet<Member> = peers()
            .map(|peer| Member {
                pp: rank,
                tp: peer.tp,
                rows: peer.routed_rows(),
            })
            .collect();
        let held = members
            .iter()
            .map(|member| predicted.costs.held_by(&job.strategy, member))
            .collect::<Result<Vec<_>, _>>()?;
        let mut line = |name, measured: Option<u64>, predicted: Option<u64>| {
            lines.push(Held {
                rank,
                name,
                measured_bytes: measured.unwrap_or(0),
                predicted_bytes: predicted.unwrap_or(0),
            });
        };
        for (name, of) in STATES {
            let measured = peers().map(|peer| of(&peer.states));
            let predicted = held.iter().map(|held| of(&held.states));
            line(name, measured.max(), predicted.max());
        }
        let saved = held.iter().map(|held| held.peak_saved.0);
        let measured = peers().map(|peer| peer.peak_saved);
        line("saved activations", measured.max(), saved.max());
        let counted = || peers().filter_map(|peer| peer.memory);
        if counted().next().is_some() {
            let most = held.iter().map(|held| held.peak.0);
            line(MOST, counted().map(|memory| memory.peak).max(), most.max());
        }
    }
    Ok(lines)
}

/// Count and seconds of every kind of action, per pipeline rank.
fn sums(timeline: &Timeline) -> BTreeMap<(u64, &str), (usize, f64)> {
    let mut sums: BTreeMap<(u64, &str), (usize, f64)> = BTreeMap::new();
    for event in &timeline.events {
        let sum = sums
            .entry((u64::from(event.rank), event.action.kind.name()))
            .or_default();
        sum.0 += 1;
        sum.1 += (event.end - event.start).0;
    }
    sums
}

fn phases(measured: &Timeline, predicted: Option<&Timeline>) -> Vec<Phase> {
    let predicted = predicted.map(sums).unwrap_or_default();
    sums(measured)
        .into_iter()
        .map(|(key, (count, measured_s))| Phase {
            rank: key.0,
            name: key.1.to_owned(),
            count,
            measured_s,
            predicted_s: predicted.get(&key).map(|sum| sum.1),
        })
        .collect()
}

fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}
