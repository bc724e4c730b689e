//! Prices of messages between devices, and lookup of measured ones between GPUs.

use catalog::runtime::Rewrite;
use catalog::{Bytes, Seconds};
use dtensor::CollectiveKind;
use plans::{Decisions, Group};

use crate::price::{ProfilePrices, between_gpus};
use crate::{CostError, Scenario};

/// A function that prices a message. Bytes are counted as in [`dtensor::Collective`].
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
    let time = prices.messages.time(kind, bytes, ranks);
    let time = time.ok_or_else(|| CostError::MessageNotMeasured {
        message: between_gpus::name(kind).to_owned(),
        ranks,
    })?;
    Ok(time * steps as f64)
}

/// Whether messages to other stages are sent beside the passes of a rank.
pub(crate) fn overlap_passes(scenario: &Scenario, d: &Decisions) -> bool {
    let blocking = &scenario.runtime.space.blocking_schedules;
    d.overlap.pipeline && !blocking.contains(&d.schedule) && !scenario.shares_cores()
}

/// Whether tensor-parallel ranks that hold the same activation each send a part of it to the next stage, whose ranks then
/// gather it.
pub(crate) fn scatters_transfers(scenario: &Scenario, d: &Decisions) -> bool {
    let rewrites = &scenario.runtime.rewrites;
    rewrites.contains(&Rewrite::ScatterGatherTransfer) && !d.sequence_parallel && d.tp > 1
}

/// Bytes that a rank with `output` bytes of an activation sends to the next stage.
pub(crate) fn sent_to_next_stage(scenario: &Scenario, d: &Decisions, output: Bytes) -> Bytes {
    match scatters_transfers(scenario, d) {
        true => Bytes(output.0 / d.tp),
        false => output,
    }
}
