//! A price with its evidence, and provenance rows.

use catalog::{Origin, Seconds};
use plans::UsedConstant;

/// A price and the evidence behind it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Priced {
    /// Time when it runs alone on the device or network.
    pub time: Seconds,
    /// Origin of the weakest evidence that the price rests on.
    pub origin: Origin,
}

impl std::ops::Mul<f64> for Priced {
    type Output = Self;
    fn mul(self, factor: f64) -> Self {
        Self {
            time: self.time * factor,
            ..self
        }
    }
}

impl Priced {
    /// Raises the price to the least time that physics allows.
    pub(crate) fn at_least(self, bound: Seconds) -> Self {
        Self {
            time: self.time.max(bound),
            ..self
        }
    }
}

/// Why a cluster has no prices.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PriceError {
    /// The device names a table that does not exist.
    #[error("unknown kernel table {0}")]
    UnknownTable(String),
}

/// Builds a provenance row.
pub(crate) fn constant(name: &str, value: String, origin: Origin, source: &str) -> UsedConstant {
    UsedConstant {
        name: name.to_owned(),
        value,
        origin,
        source: source.to_owned(),
    }
}
