//! What a price book is asked for.

use std::fmt::Debug;

use catalog::{Bytes, Seconds};
use dtensor::Trace;
use plans::{Strategy, UsedConstant};

use crate::block_cost::{BlockCost, BlockKey};
use crate::lower::{Lowered, Lowering};
use crate::stage::{Run, StageWork};
use crate::states::Elements;
use crate::traffic::DataParallel;
use crate::{CostError, Scenario};

/// Prices of what a strategy runs. There are two: by tables and models of a cluster, and by measurements of
/// this very machine.
pub(crate) trait PriceBook: Debug + Send + Sync {
    /// Adds the times of a block's passes to its cost.
    ///
    /// # Errors
    /// When nothing like one of its operators was measured.
    fn block(&self, of: &BlockToPrice<'_>, cost: &mut BlockCost) -> Result<(), CostError>;

    /// Adds what a stage gathers and reduces over its data-parallel ranks.
    ///
    /// # Errors
    /// When a message was not measured.
    fn data_parallel(
        &self,
        scenario: &Scenario,
        strategy: &Strategy,
        parallel: &DataParallel,
        runs: &[Run],
        stage: &mut StageWork,
    ) -> Result<(), CostError>;

    /// Gradient norm, clipping and update of a rank.
    ///
    /// # Errors
    /// When it was not measured.
    fn optimizer(
        &self,
        scenario: &Scenario,
        strategy: &Strategy,
        of: &Update<'_>,
    ) -> Result<Seconds, CostError>;

    /// Sending an activation of `output` bytes to the next pipeline rank.
    ///
    /// # Errors
    /// When it was not measured.
    fn transfer(
        &self,
        scenario: &Scenario,
        strategy: &Strategy,
        output: Bytes,
    ) -> Result<Seconds, CostError>;

    /// The constants behind these prices.
    fn provenance(&self) -> Vec<UsedConstant>;
}

/// A traced block, and how the runtime executes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockToPrice<'a> {
    pub(crate) scenario: &'a Scenario,
    pub(crate) key: &'a BlockKey,
    pub(crate) trace: &'a Trace,
    pub(crate) lowering: Lowering<'a>,
    pub(crate) lowered: &'a Lowered,
}

/// What a rank's optimizer updates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Update<'a> {
    pub(crate) parallel: &'a DataParallel,
    /// What the rank holds before sharding.
    pub(crate) elements: Elements,
    /// The gradients it holds.
    pub(crate) gradients: Bytes,
}
