//! Which exchanges are measured, and what their ranks send and receive.

use catalog::DType;
use catalog::profile::Kernel;
use strum::VariantArray;

/// Most ranks per group: up to here the sums of what they send are exact in bf16.
pub const MOST_RANKS: u64 = 512;

/// Kind of exchange, named as in NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, VariantArray)]
pub enum Collective {
    /// Every rank ends with the sum over ranks.
    AllReduce,
    /// Every rank ends with the parts of all ranks.
    AllGather,
    /// Every rank ends with its part of the sum.
    ReduceScatter,
    /// Every rank sends a part to every other.
    AllToAll,
    /// The first rank sends to all others.
    Broadcast,
    /// Every rank sends to the next and receives from the one before.
    SendAndReceive,
}

/// Every kind of exchange.
pub const COLLECTIVES: &[Collective] = Collective::VARIANTS;

/// An exchange to measure: its kind, group and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// Kind of exchange.
    pub collective: Collective,
    /// Number of ranks in a group.
    pub ranks: u64,
    /// Number of the group's ranks on each host.
    pub together: u64,
    /// Bytes by the convention of [`dtensor::Collective`]: of the whole for all-gather and reduce-scatter, of one
    /// rank's tensor for the others.
    pub bytes: u64,
}

impl Collective {
    fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "nccl all-reduce",
            Self::AllGather => "nccl all-gather",
            Self::ReduceScatter => "nccl reduce-scatter",
            Self::AllToAll => "nccl all-to-all",
            Self::Broadcast => "nccl broadcast",
            Self::SendAndReceive => "nccl send and receive",
        }
    }
}

impl Exchange {
    /// An exchange between this many GPUs of one host.
    #[must_use]
    pub fn inside(collective: Collective, ranks: u64, bytes: u64) -> Self {
        Self {
            collective,
            ranks,
            together: ranks,
            bytes,
        }
    }

    pub(super) fn kernel(&self) -> Kernel {
        let name = self.collective.name();
        if self.together == self.ranks {
            return Kernel::new(name, [self.ranks, self.bytes]);
        }
        let sizes = [self.ranks, self.together, self.bytes];
        Kernel::new(format!("{name} over hosts"), sizes)
    }

    /// The test value at place `at` of what rank `index` sends: 0 to 3, or 0 to 1 above 64 ranks, so that sums in bf16 are exact.
    pub(super) fn sent(&self, index: usize, at: usize) -> f64 {
        let numbers = if self.ranks <= 64 { 4 } else { 2 };
        ((index + at) % numbers) as f64
    }

    /// Elements of one rank's part, and of all parts together.
    fn elements(&self) -> [usize; 2] {
        let part = (self.bytes / DType::Bf16.size())
            .div_ceil(self.ranks)
            .max(1);
        [part, part * self.ranks].map(|n| n as usize)
    }

    /// Elements that a rank sends and receives.
    pub(super) fn lengths(&self) -> [usize; 2] {
        let [part, whole] = self.elements();
        match self.collective {
            Collective::AllGather => [part, whole],
            Collective::ReduceScatter => [whole, part],
            _ => [whole, whole],
        }
    }

    /// The element that a rank should receive.
    pub(super) fn wanted(&self, index: usize, at: usize) -> f64 {
        let [part, _] = self.elements();
        let ranks = self.ranks as usize;
        let sent = |index: usize, at: usize| self.sent(index, at);
        let sum = |at: usize| (0..ranks).map(|rank| sent(rank, at)).sum();
        match self.collective {
            Collective::AllReduce => sum(at),
            Collective::ReduceScatter => sum(index * part + at),
            Collective::AllGather => sent(at / part, at % part),
            Collective::AllToAll => sent(at / part, index * part + at % part),
            Collective::Broadcast => sent(0, at),
            Collective::SendAndReceive => sent((index + ranks - 1) % ranks, at),
        }
    }
}

/// Group sizes to measure among this many GPUs or hosts: powers of two and divisors of the number, the sizes that a
/// plan's axes have.
#[must_use]
pub fn group_sizes(gpus: u64) -> Vec<u64> {
    let sizes = 2..=gpus;
    sizes
        .filter(|&size| size.is_power_of_two() || gpus.is_multiple_of(size))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_those_of_plans() {
        for (gpus, sizes) in [(1, &[][..]), (2, &[2]), (6, &[2, 3, 4, 6]), (8, &[2, 4, 8])] {
            assert_eq!(group_sizes(gpus), sizes, "{gpus}");
        }
    }
}
