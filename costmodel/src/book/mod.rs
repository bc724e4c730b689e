//! Price books: the times of a strategy's blocks, collectives, transfers and optimizer, either from tables and models
//! of a cluster or from measurements of this machine.

mod block_times;
mod dispatch;
mod entry;
mod host_times;
mod profile;
mod tables;
mod uncaptured;

use catalog::{Cluster, Fitted};

use crate::CostError;
use crate::price::{ProfilePrices, TablePrices};

pub(crate) use entry::{BlockToPrice, CountsRead, PriceBook, PricedBlock, PricedKernel, Update};
pub(crate) use profile::adapted;

/// Opens the price book of a cluster, for jobs of that many ranks.
///
/// # Errors
/// When the device names a table that does not exist.
pub(crate) fn open(
    cluster: &Cluster,
    ranks: u64,
    fitted: &Fitted,
) -> Result<Box<dyn PriceBook>, CostError> {
    match &cluster.profile {
        Some(profile) => {
            let at_once = cluster.at_once(ranks);
            Ok(Box::new(ProfilePrices::new(profile, at_once)))
        }
        None => Ok(Box::new(TablePrices::new(cluster, ranks, fitted)?)),
    }
}
