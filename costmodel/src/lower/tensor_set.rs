//! Sets of the tensors of a trace.

use dtensor::{TensorId, Trace};

/// A set of tensors of one trace: a flag for each tensor, which takes less time than hashing.
#[derive(Clone, Debug)]
pub(super) struct TensorSet(Vec<bool>);

impl TensorSet {
    /// An empty set.
    pub(super) fn new(trace: &Trace) -> Self {
        Self(vec![false; trace.tensors.len()])
    }

    /// The set of these tensors.
    pub(super) fn of(trace: &Trace, tensors: impl IntoIterator<Item = TensorId>) -> Self {
        let mut set = Self::new(trace);
        for id in tensors {
            set.insert(id);
        }
        set
    }

    /// Adds a tensor; returns whether it is new.
    pub(super) fn insert(&mut self, id: TensorId) -> bool {
        !std::mem::replace(&mut self.0[id.0 as usize], true)
    }

    /// Takes a tensor out; returns whether it was there.
    pub(super) fn remove(&mut self, id: TensorId) -> bool {
        std::mem::take(&mut self.0[id.0 as usize])
    }

    pub(super) fn contains(&self, id: TensorId) -> bool {
        self.0[id.0 as usize]
    }
}
