//! The ranks of several hosts, each with its own GPU, as a launcher started them.

use std::sync::Arc;
use std::time::Duration;

use comm::bootstrap::Place;
use comm::tcp::TcpCommunicator;
use comm::{Communicator, Group};
use profiler::ProfilerError;
use profiler::cuda::{GpuRank, follow};

use crate::commands::device;
use crate::error::CliError;

/// How long ranks wait for each other.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Channel on which ranks exchange their local ranks (their indices on their hosts).
const PLACES: u64 = 63;

/// This rank among those of all hosts.
pub(super) struct Hosts {
    pub(super) comm: TcpCommunicator,
    /// Number of GPUs per host.
    pub(super) per_host: usize,
    /// Ordinal of this rank's GPU.
    pub(super) gpu: u32,
}

impl Hosts {
    /// Connects with the ranks of all hosts.
    pub(super) fn join() -> Result<Self, CliError> {
        let place = Place::new(|name| std::env::var(name).ok());
        let place = place.map_err(|e| CliError::wrong("--all-hosts", e.to_string()))?;
        let failed = |e| CliError::from(ProfilerError::Comm(e));
        let comm = TcpCommunicator::join(&place, TIMEOUT).map_err(failed)?;
        let everyone = Group {
            ranks: (0..comm.world()).collect(),
            index: comm.rank(),
            channel: PLACES,
        };
        let own = Arc::new(place.local_rank.to_le_bytes().to_vec());
        let told = everyone.all_gather(&comm, "places on hosts", own);
        let told = told.and_then(|told| told.wait(&comm)).map_err(failed)?;
        let places: Vec<usize> = told
            .iter()
            .filter_map(|bytes| bytes[..].try_into().ok().map(usize::from_le_bytes))
            .collect();
        let per_host = per_host(&places).map_err(|e| CliError::wrong("--all-hosts", e))?;
        Ok(Self {
            comm,
            per_host,
            gpu: device::own_gpu(place.local_rank),
        })
    }

    /// Number of hosts.
    pub(super) fn count(&self) -> u64 {
        (self.comm.world() / self.per_host) as u64
    }

    /// Takes part in the measurements that rank 0 requests.
    pub(super) fn follow(&self) -> Result<(), CliError> {
        let rank = GpuRank::new(self.gpu);
        let followed = rank.and_then(|rank| follow(rank, &self.comm, self.per_host));
        Ok(followed.inspect_err(|error| self.comm.fail(&error.to_string()))?)
    }
}

/// Number of GPUs per host, from the index of every rank on its host.
fn per_host(places: &[usize]) -> Result<usize, String> {
    let most = places.iter().max().map_or(1, |most| most + 1);
    let in_order = places
        .iter()
        .enumerate()
        .all(|(rank, place)| rank % most == *place);
    if in_order && places.len().is_multiple_of(most) {
        return Ok(most);
    }
    Err(format!(
        "the local ranks, in order of global rank, are {places:?}: expected the same number of ranks on every host, numbered from 0, \
         one host after the other"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_full_and_in_order() {
        for (places, wanted) in [
            (&[0][..], Some(1)),
            (&[0, 1, 0, 1], Some(2)),
            (&[0, 0, 0], Some(1)),
            (&[0, 1, 2, 0, 1], None),
            (&[0, 0, 1, 1], None),
        ] {
            assert_eq!(per_host(places).ok(), wanted, "{places:?}");
        }
    }
}
