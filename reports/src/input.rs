//! What a report shows, gathered by the caller.

use catalog::{Bytes, Domain, Pools, Runtime, Seconds};
use plans::{Decisions, Prediction, Present, SpaceReport, Timeline};

/// Everything one report shows. The caller fills it; the sections only read it.
#[derive(Clone, Debug)]
pub struct ReportInput<'a> {
    /// Name of the model.
    pub model: String,
    /// Devices, such as `512 × h100-sxm`.
    pub devices: String,
    /// Number of devices.
    pub gpus: u64,
    /// Name of the cluster.
    pub cluster: String,
    /// The training system.
    pub runtime: &'a Runtime,
    /// The strategy in the short form of the `--strategy` grammar.
    pub strategy: String,
    /// The strategy with every decision, in the same grammar.
    pub strategy_in_full: String,
    /// The strategy.
    pub decisions: &'a Decisions,
    /// Number of devices in a node.
    pub gpus_per_node: u64,
    /// The pools of the cluster, if not all of its nodes are alike.
    pub pools: Option<&'a Pools>,
    /// The domain of fast links (the scale-up network) that devices are in.
    pub domain: Domain,
    /// Commands that start training under the plan, one entry per target; the first is shown, the others are folded.
    pub launches: Vec<Launch>,
    /// The strategy that is in use now, if the plan was compared with it.
    pub present: Option<&'a Present>,
    /// The single change that would gain most, in words; `None` if none gains enough.
    pub next_change: Option<String>,
    /// Content hash of the plan.
    pub plan_id: String,
    /// The command that makes the same prediction again.
    pub command: String,
    /// The prediction for this plan.
    pub prediction: &'a Prediction,
    /// The simulated step, if it is to be drawn.
    pub timeline: Option<&'a Timeline>,
    /// Memory capacity of the device that the heaviest rank runs on.
    pub capacity: Bytes,
    /// Fraction of device memory to leave free.
    pub headroom: f64,
    /// Length and cost of the whole training, if asked.
    pub budget: Option<Budget>,
    /// Strategies to list, this one first: the best of a search, or those one decision away.
    pub alternatives: Vec<Alternative>,
    /// Strategies that are best by another measure than step time, each with that measure in words, such as `least memory`.
    pub wishes: Vec<(String, Alternative)>,
    /// Strategies to draw by time and memory.
    pub points: Vec<Point>,
    /// How many strategies of the search space were simulated or left out, if there was a search.
    pub space: Option<&'a SpaceReport>,
    /// The ways to use the pools of the cluster that were searched, each with its step time or why it has no plan.
    pub ways: &'a [(&'a str, String)],
    /// Every input and where its value came from.
    pub inputs: Vec<InputFact>,
    /// Version of the tool.
    pub version: String,
}

/// The commands that launch a plan under one training system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Name of the export target, such as `megatron-lm`.
    pub target: String,
    /// Lines of shell, in order.
    pub commands: Vec<String>,
}

/// Length and cost of a whole training run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    /// Number of tokens to train on.
    pub tokens: f64,
    /// Time for all of them at the predicted rate, with failures if they are counted.
    pub time: Seconds,
    /// Price in dollars per device-hour, if known.
    pub price: Option<f64>,
    /// Cost of the whole run in dollars, if the price is known.
    pub dollars: Option<f64>,
    /// Share of the time that is spent on steps which are kept, if failures are counted.
    pub goodput: Option<f64>,
}

/// One point of the chart of step time against memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// The strategy as decisions.
    pub decisions: Decisions,
    /// Time of one step.
    pub step_time: Seconds,
    /// Memory of the heaviest rank.
    pub peak_memory: Bytes,
    /// Whether it is the plan of the report, or one of its alternatives.
    pub found: bool,
}

/// One row of the table of strategies.
#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    /// The strategy as one line.
    pub strategy: String,
    /// Time of one step.
    pub step_time: Seconds,
    /// Tokens per second and device.
    pub tokens_per_s_per_gpu: f64,
    /// Model FLOPs utilisation, causal attention counted once.
    pub mfu: f64,
    /// Memory of the heaviest rank.
    pub peak_memory: Bytes,
    /// Whether it fits in memory.
    pub fits: bool,
    /// Why it is not the first choice; empty for the first.
    pub why_not_first: String,
}

/// One input and where its value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputFact {
    /// What it is.
    pub name: &'static str,
    /// Its value, with the unit.
    pub value: String,
    /// Where the value came from, such as `asked`, `default` or `plan file`.
    pub origin: String,
}
