//! What messages between devices cost: by a network's model, or as they were measured between GPUs.
//!
//! Measured times hold for a kind of message between a number of ranks, of one host: any ranks of it. Between two
//! measured sizes the logarithm of time is linear in that of size; below the smallest, time is the smallest's; beyond
//! the largest it grows with size, at the largest's bandwidth.

use dtensor::CollectiveKind;
use plans::Group;
use spec::{Bytes, Seconds};

use crate::CostError;
use crate::price::{ProfilePrices, TablePrices};

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
    let (name, times) = match kind {
        CollectiveKind::AllReduce => ("nccl all-reduce", 1),
        CollectiveKind::AllGather => ("nccl all-gather", 1),
        CollectiveKind::ReduceScatter => ("nccl reduce-scatter", 1),
        CollectiveKind::AllToAll => ("nccl all-to-all", 1),
        CollectiveKind::Broadcast => ("nccl broadcast", 1),
        CollectiveKind::SendRecv => ("nccl send and receive", 1),
        CollectiveKind::RingExchange => ("nccl send and receive", ranks - 1),
    };
    let time = between(prices.sizes(name, ranks), bytes.0);
    let time = time.ok_or_else(|| CostError::MessageNotMeasured {
        message: name.to_owned(),
        ranks,
    })?;
    Ok(Seconds(time) * times as f64)
}

/// The time of a size between measured `(size, seconds)` in ascending order.
fn between(points: &[(u64, f64)], bytes: u64) -> Option<f64> {
    let after = points.partition_point(|point| point.0 < bytes);
    let (first, last) = (points.first()?, points.last()?);
    let (Some(upper), true) = (points.get(after), after > 0) else {
        let beyond = bytes as f64 / last.0 as f64;
        return Some(if after == 0 { first.1 } else { last.1 * beyond });
    };
    let lower = points[after - 1];
    let log = |a: u64, b: u64| (a as f64 / b as f64).ln();
    let share = log(bytes, lower.0) / log(upper.0, lower.0);
    Some(lower.1 * (upper.1 / lower.1).powf(share))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_lie_between_what_was_measured() {
        let points = [(1 << 10, 1e-5), (1 << 20, 2e-5), (1 << 24, 32e-5)];
        for (bytes, wanted) in [
            (1, 1e-5),
            (1 << 10, 1e-5),
            (1 << 15, 1e-5 * 2f64.sqrt()),
            (1 << 20, 2e-5),
            // Sixteen times the time at sixteen times the size: linear.
            (1 << 22, 8e-5),
            (1 << 24, 32e-5),
            (1 << 26, 128e-5),
        ] {
            let time = between(&points, bytes).expect("measured");
            assert!((time / wanted - 1.0).abs() < 1e-9, "{bytes}: {time}");
        }
        assert_eq!(between(&[], 1), None);
    }
}
