//! A tensor that is kept for backward, as lists of memory show it.

use catalog::Bytes;
use dtensor::TensorId;

/// A tensor kept for backward.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SavedTensor<'t> {
    pub(super) name: SavedName<'t>,
    /// Size of the tensor on one rank.
    pub(super) bytes: Bytes,
    /// Whether the weight half of a split backward still needs it.
    pub(super) for_weight: bool,
    /// The traced tensor; `None` if only the runtime's kernels make it.
    pub(super) storage: Option<TensorId>,
}

impl<'t> SavedTensor<'t> {
    /// A tensor that only the runtime's kernels make. No gradient of a weight needs it.
    pub(super) fn beside(of: &'t str, ending: &'static str, bytes: Bytes) -> Self {
        Self {
            name: SavedName { of, ending },
            bytes,
            for_weight: false,
            storage: None,
        }
    }
}

/// Name of a tensor, with its scope; written out only where it is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SavedName<'t> {
    of: &'t str,
    /// What follows the name of the traced tensor or operator.
    pub(super) ending: &'static str,
}

impl std::fmt::Display for SavedName<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.of, self.ending)
    }
}
