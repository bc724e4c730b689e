//! Sets of strategies that the search has yet to open, ordered by what their best member can reach.

use std::cmp::Ordering as Order;

use catalog::Seconds;
use costmodel::Score;
use plans::Strategy;

/// A set of strategies.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Lower bound on what is minimised.
    pub(crate) bound: f64,
    /// Where it stands in the order of enumeration, which breaks ties.
    pub(crate) place: [u32; 4],
    pub(crate) of: Set,
}

#[derive(Debug)]
pub(crate) enum Set {
    /// All strategies of a layout.
    Layout,
    /// All strategies of a layout with one pipeline and recomputation.
    Pipeline,
    /// The same, after the time at which passes end was simulated.
    Simulated(Option<Seconds>),
    /// One strategy.
    Single(Box<Strategy>),
}

/// What an entry turned out to be.
pub(crate) enum Opened {
    /// Smaller sets.
    Entries(Bounded),
    /// A simulated strategy.
    Score(Score),
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
    /// A heap gives its greatest entry: the one with the least bound.
    fn cmp(&self, other: &Self) -> Order {
        let bounds = other.bound.total_cmp(&self.bound);
        bounds.then_with(|| other.place.cmp(&self.place))
    }
}

/// What a set consists of, less what is left out.
#[derive(Default)]
pub(crate) struct Bounded {
    pub(crate) entries: Vec<Entry>,
    /// Number of strategies whose memory floor does not fit.
    pub(crate) too_large: u64,
    /// Number of strategies of which another holds its optimizer states in less memory.
    pub(crate) larger: u64,
}

impl Bounded {
    pub(crate) fn of(entry: Entry) -> Self {
        Self {
            entries: vec![entry],
            ..Self::default()
        }
    }
}
