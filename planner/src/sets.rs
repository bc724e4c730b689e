//! Sets of strategies that the search has yet to open, ordered by what their best member can reach.

use std::cmp::Ordering as Order;

use catalog::Seconds;
use costmodel::{Score, Senders};
use plans::Strategy;

use crate::executions::ExecutionChoice;

/// A set of strategies.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Lower bound on what is minimised.
    pub(crate) bound: f64,
    /// Place in the order of enumeration, which breaks ties: layout, pipeline, activations, way to
    /// run passes, strategy.
    pub(crate) place: [u32; 5],
    /// Number of its strategies.
    pub(crate) members: u64,
    pub(crate) of: Set,
}

/// Which strategies are in a set.
#[derive(Debug)]
pub(crate) enum Set {
    /// All strategies of a layout.
    Layout,
    /// All strategies of a layout with one pipeline and recomputation.
    Pipeline {
        /// Time that updates on hosts add to the bound.
        on_host: Seconds,
        /// The data-parallel messages that strategies which fit may send.
        senders: Senders,
    },
    /// The strategies of a pipeline that run passes in one way and send these data-parallel messages.
    Execution {
        /// Time that updates on hosts add to the bound.
        on_host: Seconds,
        /// How the strategies of the set run passes.
        way: ExecutionChoice,
        /// Data-parallel messages that the strategies send.
        sent: Sent,
    },
    /// Strategies that run passes alike, after these passes and their messages were simulated.
    Simulated {
        /// How the strategies of the set run passes.
        way: ExecutionChoice,
        /// Data-parallel messages that the strategies send.
        sent: Sent,
        /// Earliest end of passes and messages of any of them; `None` if not known.
        end: Option<Seconds>,
    },
    /// One strategy, and those that need not be tried where it fits.
    Chain(Box<Chained>),
}

/// Which data-parallel messages the strategies of a set send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// Any that the layout may have.
    Any,
    /// The messages of one way to shard states, under one axis order.
    One {
        /// Which of the layout's data-parallel messages, by index.
        traffic: u32,
        /// Which of the layout's axis orders, by index.
        order: u32,
    },
}

/// A strategy, and those that differ from it only in keeping more optimizer states in host memory,
/// each slower than the one before.
#[derive(Debug)]
pub(crate) struct Chained {
    pub(crate) first: Strategy,
    /// The ways to shard states of the later strategies, by index.
    pub(crate) later: Vec<u32>,
    /// The time at which their passes end, if it was simulated.
    pub(crate) passes: Option<Seconds>,
}

/// The result of opening an entry.
pub(crate) struct Opened {
    /// The score, if the entry's first strategy was simulated.
    pub(crate) score: Option<Score>,
    /// The smaller sets that are left.
    pub(crate) sets: Bounded,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Order::Equal
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Order> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    /// A heap returns its greatest entry, so the entry with the least bound is the greatest.
    fn cmp(&self, other: &Self) -> Order {
        let bounds = other.bound.total_cmp(&self.bound);
        bounds.then_with(|| other.place.cmp(&self.place))
    }
}

/// The parts of an opened set, and how many strategies were left out.
#[derive(Default)]
pub(crate) struct Bounded {
    pub(crate) entries: Vec<Entry>,
    /// Number of strategies whose memory floor does not fit.
    pub(crate) too_large: u64,
    /// Number of strategies that are certainly worse than the best found.
    pub(crate) beyond: u64,
    /// Number of strategies left out because another has smaller optimizer states.
    pub(crate) larger: u64,
    /// Number of strategies that capture CUDA graphs which spare no time.
    pub(crate) captured: u64,
    /// Number of strategies left out because another that fits keeps less in host memory.
    pub(crate) more_on_host: u64,
}

impl Bounded {
    pub(crate) fn of(entry: Entry) -> Self {
        Self {
            entries: vec![entry],
            ..Self::default()
        }
    }
}
