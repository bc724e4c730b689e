//! What messages between devices cost: by a network's model, or as they were measured between GPUs.

use catalog::{Bytes, Seconds};
use dtensor::CollectiveKind;
use plans::Group;

use crate::CostError;
use crate::price::{ProfilePrices, TablePrices, between_gpus};

/// Prices of messages.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Messages<'p> {
    /// Of a network.
    Network(&'p TablePrices),
    /// Between the GPUs of a profile.
    Measured(&'p ProfilePrices),
}

impl Messages<'_> {
    /// A collective; bytes by the convention of [`dtensor::Collective`].
    ///
    /// # Errors
    /// When it was not measured between so many GPUs.
    pub(crate) fn collective(
        &self,
        kind: CollectiveKind,
        bytes: Bytes,
        group: Group,
    ) -> Result<Seconds, CostError> {
        match self {
            Self::Network(prices) => Ok(prices.collective(kind, bytes, group).time),
            Self::Measured(prices) => measured(prices, kind, bytes, group.size),
        }
    }
}

/// A message between GPUs as it was measured.
///
/// # Errors
/// When it was not measured between so many.
pub(crate) fn measured(
    prices: &ProfilePrices,
    kind: CollectiveKind,
    bytes: Bytes,
    ranks: u64,
) -> Result<Seconds, CostError> {
    if ranks == 1 {
        return Ok(Seconds(0.0));
    }
    let steps = match kind {
        CollectiveKind::RingExchange => ranks - 1,
        _ => 1,
    };
    let time = prices.between_gpus().time(kind, bytes, ranks);
    let time = time.ok_or_else(|| CostError::MessageNotMeasured {
        message: between_gpus::name(kind).to_owned(),
        ranks,
    })?;
    Ok(time * steps as f64)
}
