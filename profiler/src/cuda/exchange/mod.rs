//! Measures messages between GPUs: collectives and point to point, by size and number of ranks.
//!
//! Every GPU has a rank: a thread, or with several hosts a process. All groups of a size run at the
//! same time, as those of a mesh axis do in training. A group has consecutive ranks of one host, or
//! equally many consecutive ranks on each of several hosts. Ranks beyond the last whole group wait.
//! Rank 0 decides how often to repeat; times are collected from all ranks.

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
