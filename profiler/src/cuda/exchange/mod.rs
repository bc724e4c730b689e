//! Messages between GPUs: collectives and point to point, by size and number of ranks.
//!
//! Every GPU has a rank: a thread, or where there are several hosts a process. All groups of a size run at the same time,
//! as those of an axis do in training: of consecutive ranks of a host, or of as many of each of some hosts one after the
//! other. Ranks beyond the last whole group wait. Rank 0 says how often; times are of all ranks.

mod collective;
mod fleet;
mod nccl;
mod peers;
mod rank;

use catalog::profile::Kernel;

use super::Asked;

pub use collective::{COLLECTIVES, Collective, Exchange, MOST_RANKS, group_sizes};
pub use fleet::{Fleet, follow, with_fleet};
pub use nccl::GpuRank;
pub use peers::{Peers, Rank};

impl Asked for Exchange {
    fn kernels(&self) -> Vec<Kernel> {
        vec![self.kernel()]
    }

    fn parts(&self) -> usize {
        1
    }

    fn described(&self) -> String {
        let kernel = self.kernel();
        format!("{} {:?}", kernel.name, kernel.sizes)
    }
}
