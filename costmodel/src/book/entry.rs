//! What a price book is asked for.

use std::fmt::Debug;

use catalog::{Bytes, Seconds};
use dtensor::Trace;
use plans::{Strategy, UsedConstant};

use crate::block_cost::BlockKey;
use crate::issue::Launch;
use crate::lower::{Lowered, Lowering};
use crate::stage::{Run, StageWork};
use crate::states::Elements;
use crate::traffic::DataParallel;
use crate::{CostError, Scenario};

/// Prices of what a strategy runs. There are two: by tables and models of a cluster, and by measurements of
/// this very machine.
pub(crate) trait PriceBook: Debug + Send + Sync {
    /// Prices the kernels and messages of a block.
    ///
    /// # Errors
    /// When nothing like one of its operators was measured.
    fn block(&self, of: &BlockToPrice<'_>) -> Result<PricedBlock, CostError>;

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

/// A kernel or message of a block.
#[derive(Clone, Debug)]
pub(crate) struct PricedKernel {
    pub(crate) name: String,
    /// How long it takes with nothing beside it.
    pub(crate) time: Seconds,
    /// How long a part of it takes, where that is not its share of the time: a smaller product is less efficient.
    pub(crate) part: Option<Seconds>,
    /// How long the host takes to issue it, or each part of it.
    pub(crate) host: Seconds,
}

/// Kernels and messages of a block, and the order in which each pass issues them.
#[derive(Clone, Debug)]
pub(crate) struct PricedBlock {
    pub(crate) kernels: Vec<PricedKernel>,
    pub(crate) forward: Vec<Launch>,
    /// Run again before backward.
    pub(crate) recompute: Vec<Launch>,
    pub(crate) backward: Vec<Launch>,
    /// Backward towards inputs, where it is a pass of its own.
    pub(crate) backward_input: Vec<Launch>,
    /// Backward towards weights, where it is a pass of its own.
    pub(crate) backward_weight: Vec<Launch>,
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
