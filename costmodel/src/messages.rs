//! Prices of messages between devices, and lookup of measured ones between GPUs.

use catalog::{Bytes, Seconds};
use dtensor::CollectiveKind;
use plans::Group;

use crate::CostError;
use crate::price::{ProfilePrices, between_gpus};

/// A function that prices a message; bytes by the convention of [`dtensor::Collective`].
pub(crate) type Message<'p> =
    &'p dyn Fn(CollectiveKind, Bytes, Group) -> Result<Seconds, CostError>;

/// The measured time of a message between GPUs.
///
/// # Errors
/// When it was not measured between that many GPUs.
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
