//! Groups of replicas side by side on different pools, in words.

use catalog::{Pools, Runtime};
use plans::grammar::written;
use plans::{Decisions, Prediction};

use crate::format;
use crate::lines::{Shade, Style};
use crate::words;

/// A group of replicas, as answers show it.
#[derive(Clone, Debug)]
pub struct Group<'a> {
    /// Its devices, such as `16 × A100`.
    pub devices: String,
    /// Its share of the batch, in sequences per step.
    pub sequences: u64,
    /// Its strategy.
    pub strategy: &'a Decisions,
    /// Number of devices in a node.
    pub gpus_per_node: u64,
    /// Its pools, if a pipeline passes through several of them.
    pub pools: Option<&'a Pools>,
    /// Its predicted time and memory if it trains alone.
    pub prediction: &'a Prediction,
}

impl Group<'_> {
    /// What the group does, in a phrase: `48 of 64 sequences on 16 × A100: 16 replicas with 3 micro-batches each`.
    #[must_use]
    pub fn said(&self, all: u64) -> String {
        let d = self.strategy;
        let replicas = format::counted(d.dp(), "replica");
        let batches = match d.num_micro_batches {
            1 => "1 micro-batch".to_owned(),
            many => format!("{} micro-batches", format::count(many)),
        };
        let each = if d.dp() == 1 { "" } else { " each" };
        let of = match d.micro_batch {
            1 => String::new(),
            many => format!(" of {many} sequences"),
        };
        format!(
            "{} of {} sequences on {}: {replicas} with {batches}{of}{each}",
            format::count(self.sequences),
            format::count(all),
            self.devices,
        )
    }

    /// Its time alone and the memory of its heaviest rank, in a phrase.
    #[must_use]
    pub fn figures(&self) -> String {
        let p = self.prediction;
        format!(
            "{} alone, {} of {}",
            format::seconds(p.step_time),
            format::bytes(p.peak_memory),
            format::bytes(p.usable())
        )
    }

    /// Its layout in phrases.
    #[must_use]
    pub fn plan(&self) -> Vec<String> {
        let pools = self.pools.map(|pools| words::pools(pools, self.strategy));
        words::plan(self.strategy, self.gpus_per_node)
            .into_iter()
            .chain(pools)
            .collect()
    }
}

/// All sequences of a step.
#[must_use]
pub fn sequences(groups: &[Group<'_>]) -> u64 {
    groups.iter().map(|group| group.sequences).sum()
}

/// Names a pipeline rank, such as `pipeline rank 1 of group 2`. In a plan with several groups
/// `rank` counts the ranks of all groups one after the other.
#[must_use]
pub fn rank(groups: &[Group<'_>], rank: u32) -> String {
    match place(groups, rank) {
        Some((number, rank)) => format!("pipeline rank {rank} of group {number}"),
        None => format!("pipeline rank {rank}"),
    }
}

/// The number of the group that a rank is in, and its pipeline rank there, where `rank` counts the
/// ranks of all groups one after the other; `None` without groups.
pub(crate) fn place(groups: &[Group<'_>], rank: u32) -> Option<(usize, u32)> {
    let mut first = 0;
    for (number, group) in (1..).zip(groups) {
        let ranks = group.prediction.memory_by_rank.len() as u32;
        if rank < first + ranks {
            return Some((number, rank - first));
        }
        first += ranks;
    }
    None
}

/// The groups as lines for people.
pub(crate) fn lines(groups: &[Group<'_>], runtime: &Runtime, style: Style) -> String {
    let all = sequences(groups);
    let head = format!(
        "{} groups of replicas side by side, which add up their gradients",
        groups.len()
    );
    let mut text = style.paragraph("", &head);
    for (number, group) in (1..).zip(groups) {
        let said = format!("group {number}: {}; {}", group.said(all), group.figures());
        text.push_str(&style.paragraph("  ", &said));
        let strategy = written(group.strategy, runtime);
        text.push_str(&style.painted(Shade::Strong, "    ", &strategy));
        text.push_str(&style.paragraph("      ", &group.plan().join("; ")));
    }
    text
}
