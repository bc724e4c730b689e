//! The part of one rank in measuring exchanges. Rank 0 decides each next step, so that all do the same.

use std::sync::Arc;
use std::time::Instant;

use catalog::DType;
use catalog::profile::Measured;
use comm::{Communicator, Group};
use cuda_device::{Device, Tensor};

use super::collective::Exchange;
use super::peers::{Peers, Rank};
use crate::ProfilerError;
use crate::cuda::operands::{Wanted, check, repeated};
use crate::cuda::timing::NOTHING;
use crate::lanes::{Effort, Laps, summarised};

/// Channel on which all ranks agree on the next step.
const EVERYONE: u64 = 61;
/// Least time in seconds that exchanges repeat between two recorded events, so that the clock's resolution does not count.
const LAP: f64 = 1e-3;
/// Fewest and most exchanges between two events: differences in when ranks start the first must not count.
const CALLS: [u64; 2] = [4, 64];
/// Elements after which a message's pattern repeats.
const TILE: usize = 1 << 12;
/// Element type of messages.
const DTYPE: DType = DType::Bf16;

/// Rank 0's decision after every lap.
const STOP: u64 = 0;
const WARM_UP: u64 = 1;
const COUNT: u64 = 2;

/// A rank, with its group if that group is whole.
pub(super) struct Member<'m> {
    pub(super) rank: &'m dyn Rank,
    pub(super) comm: &'m dyn Communicator,
    pub(super) peers: Option<&'m dyn Peers>,
    /// This rank's index in its group.
    pub(super) index: usize,
}

/// The tensors that an exchange reads and writes.
struct Buffers {
    from: Tensor,
    to: Tensor,
}

impl Member<'_> {
    /// Checks and times an exchange together with all other ranks; rank 0 returns the times of all.
    pub(super) fn measure(
        &self,
        exchange: &Exchange,
        effort: Effort,
    ) -> Result<Vec<Measured>, ProfilerError> {
        self.everyone().barrier(self.comm)?;
        let buffers = match self.peers {
            Some(peers) => Some(self.checked(peers, exchange)?),
            None => None,
        };
        let lap = |calls: u64| match (self.peers, &buffers) {
            (Some(peers), Some(buffers)) => self.lap(peers, exchange, buffers, calls),
            _ => Ok(NOTHING),
        };
        let one = lap(1)?;
        let calls = self.agreed(((LAP / one) as u64).clamp(CALLS[0], CALLS[1]))?;
        let start = Instant::now();
        let mut warm = None;
        let mut seen = Vec::new();
        loop {
            let enough = seen.len() >= effort.least
                && (warm.is_some_and(|at: Instant| at.elapsed() >= effort.time)
                    || seen.len() >= effort.most);
            if warm.is_none() && start.elapsed() >= effort.time / 4 {
                warm = Some(Instant::now());
            }
            let next = match (enough, warm) {
                (true, _) => STOP,
                (false, None) => WARM_UP,
                (false, Some(_)) => COUNT,
            };
            let next = self.agreed(next)?;
            if next == STOP {
                break;
            }
            let seconds = lap(calls)?;
            if next == COUNT {
                seen.push(seconds);
            }
        }
        self.gathered(exchange, &seen, calls)
    }

    fn everyone(&self) -> Group {
        Group {
            ranks: (0..self.comm.world()).collect(),
            index: self.comm.rank(),
            channel: EVERYONE,
        }
    }

    /// Rank 0's value of `own`, on every rank.
    fn agreed(&self, own: u64) -> Result<u64, ProfilerError> {
        let own = (self.comm.rank() == 0).then(|| Arc::new(own.to_le_bytes().to_vec()));
        let said = self.everyone().broadcast(self.comm, "measuring", 0, own)?;
        Ok(said
            .iter()
            .rev()
            .fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    /// Lap times of all ranks that measured one, gathered on rank 0.
    fn gathered(
        &self,
        exchange: &Exchange,
        seen: &[f64],
        calls: u64,
    ) -> Result<Vec<Measured>, ProfilerError> {
        let own = if self.peers.is_some() { seen } else { &[] };
        let own = own.iter().flat_map(|lap| lap.to_le_bytes()).collect();
        let everyone = self.everyone();
        let all = everyone.all_gather(self.comm, "measuring", Arc::new(own))?;
        let all = all.wait(self.comm)?;
        if self.comm.rank() > 0 {
            return Ok(Vec::new());
        }
        let laps = all.iter().flat_map(|part| part.as_chunks::<8>().0);
        let laps: Vec<Laps> = laps
            .map(|&bytes| Laps::from([(exchange.kernel(), (f64::from_le_bytes(bytes), calls))]))
            .collect();
        Ok(summarised(&laps, 1))
    }

    /// Runs an exchange once into memory filled with NaNs, and checks the numbers received.
    fn checked(&self, peers: &dyn Peers, exchange: &Exchange) -> Result<Buffers, ProfilerError> {
        let device = self.rank.device();
        let [sends, receives] = exchange.lengths();
        let from = device.tensor(vec![sends], DTYPE)?;
        let own = (0..TILE)
            .map(|at| exchange.sent(self.index, at) as f32)
            .collect();
        repeated(
            device,
            &from,
            &cpu_device::Tensor::new(vec![TILE], own, DTYPE),
        )?;
        let to = device
            .memory
            .poisoned(|| device.tensor(vec![receives], DTYPE))?;
        peers.exchange(self.comm, exchange.collective, &from, &to)?;
        peers.finish(self.comm)?;
        check(device, &exchange.kernel(), &to, |at| Wanted {
            value: exchange.wanted(self.index, at),
            tolerance: 0.0,
        })?;
        Ok(Buffers { from, to })
    }

    /// Seconds of several exchanges, after one that synchronizes the ranks.
    fn lap(
        &self,
        peers: &dyn Peers,
        exchange: &Exchange,
        buffers: &Buffers,
        calls: u64,
    ) -> Result<f64, ProfilerError> {
        let device: &Device = self.rank.device();
        let Buffers { from, to } = buffers;
        let again = || peers.exchange(self.comm, exchange.collective, from, to);
        again()?;
        device.launcher.mark()?;
        for _ in 0..calls {
            again()?;
        }
        device.launcher.mark()?;
        peers.finish(self.comm)?;
        let laps = device.launcher.laps()?;
        Ok(laps.iter().sum::<f64>().max(NOTHING))
    }
}
