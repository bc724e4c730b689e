//! The interface of a price book, and the types it is asked with and answers with.

use std::fmt::Debug;

use catalog::{Bytes, Seconds};
use dtensor::{CollectiveKind, Trace};
use plans::{Decisions, Group, Recompute, UsedConstant};

use crate::block_cost::BlockKey;
use crate::launches::Launch;
use crate::lower::{Lowered, Lowering};
use crate::spread::Spread;
use crate::stage::{Run, StageWork};
use crate::stage_traffic::Traffic;
use crate::states::Elements;
use crate::traffic::DataParallel;
use crate::{CostError, Scenario};

/// Prices everything that a strategy runs. There are two implementations: tables and models of a cluster, and
/// measurements of this very machine.
pub(crate) trait PriceBook: Debug + Send + Sync {
    /// Prices the kernels and messages of a block.
    ///
    /// # Errors
    /// If an operator of the block was not measured.
    fn block(&self, of: &BlockToPrice<'_>) -> Result<PricedBlock, CostError>;

    /// Prices a block that the runtime is told to issue in another way than when it was priced `before`. Our executor issues a
    /// block in one way.
    ///
    /// # Errors
    /// As for [`PriceBook::block`].
    fn reissued(
        &self,
        of: &BlockToPrice<'_>,
        _before: &PricedBlock,
    ) -> Result<PricedBlock, CostError> {
        self.block(of)
    }

    /// The names of the kernels that [`PriceBook::block`] lists, in the same order.
    fn names(&self, of: &BlockToPrice<'_>) -> Vec<String>;

    /// Adds the parameter gathers and gradient reductions of a stage over its data-parallel ranks.
    ///
    /// # Errors
    /// When a message was not measured.
    fn data_parallel(
        &self,
        traffic: &mut Traffic<'_>,
        runs: &[Run],
        stage: &mut StageWork,
    ) -> Result<(), CostError>;

    /// Time that a rank spends on gradient norm, clipping and the optimizer update.
    ///
    /// # Errors
    /// When it was not measured.
    fn optimizer(&self, of: &Update<'_>) -> Result<Seconds, CostError>;

    /// Time that a rank spends on copies of gradients to the buffers in which they are reduced.
    fn gradient_copies(&self, of: &Update<'_>) -> Seconds;

    /// Time in which the first and the last pipeline rank sum up the gradients of a table that both hold.
    ///
    /// # Errors
    /// When it was not measured.
    fn sum_over_ends(&self, strategy: &Decisions, table: Bytes) -> Result<Seconds, CostError>;

    /// Time to send an activation of `output` bytes to the next pipeline rank.
    ///
    /// # Errors
    /// When it was not measured.
    fn transfer(
        &self,
        scenario: &Scenario,
        strategy: &Decisions,
        output: Bytes,
    ) -> Result<Seconds, CostError>;

    /// Time of an all-reduce of `bytes` between one rank of each of several domains, while all
    /// other ranks of these domains do the same.
    ///
    /// # Errors
    /// When it was not measured.
    fn across_domains(
        &self,
        scenario: &Scenario,
        bytes: Bytes,
        domains: u64,
    ) -> Result<Seconds, CostError>;

    /// The constants that these prices rest on, with their evidence.
    fn provenance(&self) -> Vec<UsedConstant>;
}

/// A traced block to be priced, with the runtime that lowers it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockToPrice<'a> {
    pub(crate) scenario: &'a Scenario,
    pub(crate) key: &'a BlockKey,
    /// What may be recomputed: the block is priced for each of these.
    pub(crate) modes: &'a [Recompute],
    pub(crate) trace: &'a Trace,
    pub(crate) lowering: Lowering<'a>,
    pub(crate) lowered: &'a Lowered,
}

/// A priced kernel or collective of a block.
#[derive(Clone, Debug, Default)]
pub(crate) struct PricedKernel {
    /// Its time when nothing runs beside it.
    pub(crate) time: Seconds,
    /// Time of one part, for a product that is split: more than an equal share, because smaller products are less
    /// efficient.
    pub(crate) part: Option<Seconds>,
    /// Time that the host takes to issue it, or to issue each of its parts.
    pub(crate) host: Seconds,
    /// The same if layers are captured in CUDA graphs.
    pub(crate) graphed: Seconds,
    /// Time for which it occupies the rank's network card; none if it is a kernel.
    pub(crate) card: Seconds,
    /// How its time differs between micro-batches.
    pub(crate) spread: Spread,
}

/// The priced kernels and collectives of a block, and the order in which each pass issues them.
#[derive(Clone, Debug)]
pub(crate) struct PricedBlock {
    pub(crate) kernels: Vec<PricedKernel>,
    pub(crate) forward: Vec<Launch>,
    /// For every mode asked for: the forward kernels that run again before backward.
    pub(crate) recompute: Vec<Vec<Launch>>,
    pub(crate) backward: Vec<Launch>,
    /// The launches of a backward pass that is split in two: of the half that computes gradients of inputs, and of that which
    /// computes gradients of weights. `None` if no schedule of the runtime splits it.
    pub(crate) halves: Option<[Vec<Launch>; 2]>,
    /// Where the host waits for the device to learn how many tokens each expert gets; `None` if it does not wait.
    pub(crate) counts: Option<CountsRead>,
}

/// A point in a list of forward kernels at which the host waits for the device, to read how many tokens each expert gets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CountsRead {
    /// The kernel or message that sends tokens to experts.
    pub(crate) sends: usize,
    /// Whether the host waits after it, rather than before.
    pub(crate) after: bool,
    /// A kernel that is listed earlier, but runs after the wait: it orders tokens that have arrived.
    pub(crate) orders: Option<usize>,
    /// Host time to issue `sends`, apart from what is issued before the wait.
    pub(crate) host: Seconds,
}

/// What the optimizer of a rank updates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Update<'a> {
    pub(crate) scenario: &'a Scenario,
    pub(crate) strategy: &'a Decisions,
    pub(crate) parallel: &'a DataParallel,
    /// Trained elements that the rank holds before ZeRO shards them.
    pub(crate) elements: Elements,
    /// Bytes of the gradients that the rank holds.
    pub(crate) gradients: Bytes,
    /// Number of trained parameter tensors of the rank's stages; it may hold only a part of each.
    pub(crate) tensors: u64,
    /// Trained parameters on the rank in blocks that tensor parallelism splits, before ZeRO.
    pub(crate) divided: u64,
}

/// A message between ranks that share experts.
pub(super) struct Message {
    pub(super) kind: CollectiveKind,
    /// By the convention of [`dtensor::Collective`].
    pub(super) bytes: Bytes,
    pub(super) group: Group,
}
