//! Cost models of the same job on other clusters, which share block costs that are already priced;
//! and a bound on the pace of all strategies of a layout.

use catalog::{Fitted, Seconds};
use plans::Decisions;

use crate::blocks::BlockCosts;
use crate::cost_model::{CostModel, priced};
use crate::pools::PoolCosts;
use crate::{CostError, Scenario, pace, quantities};

impl CostModel {
    /// A cost model for a scenario. It shares block costs with those of `known` that price the same
    /// job on pools of the same kind, whatever their numbers of GPUs and batches.
    ///
    /// # Errors
    /// When a device has no prices for the workload's precision.
    pub fn sharing(scenario: Scenario, known: &[&Self]) -> Result<Self, CostError> {
        quantities::check(&scenario)?;
        let scenario = scenario.with_alike_pools_as_one();
        let fitted = Fitted::default();
        let shared = |wanted: &Scenario| -> Option<BlockCosts> {
            let pools = known.iter().filter(|known| known.is_of_job(wanted));
            let mut pools = pools.flat_map(|known| known.pools());
            let of_kind = |costs: &&BlockCosts| costs.scenario().cluster == wanted.cluster;
            let costs = pools.find(of_kind)?;
            // Pricing adapts the model and the runtime.
            costs.with_workload_of(&Scenario {
                workload: wanted.workload.clone(),
                headroom: wanted.headroom,
                ..costs.scenario().clone()
            })
        };
        let of_pool = |wanted: Scenario| match shared(&wanted) {
            Some(costs) => Ok(costs),
            None => priced(wanted, &fitted),
        };
        let pools = PoolCosts::new(&scenario, of_pool)?;
        Ok(Self::of_pools(scenario, pools))
    }

    /// Whether it prices the same job: equal model, adapters, runtime, precision, sequence length
    /// and documents.
    fn is_of_job(&self, other: &Scenario) -> bool {
        let own = self.scenario();
        let documents = |of: &Scenario| of.workload.documents().cloned();
        own.model.name == other.model.name
            && own.model.adapters == other.model.adapters
            && own.runtime.name == other.runtime.name
            && own.workload.precision == other.workload.precision
            && own.workload.seq_len == other.workload.seq_len
            && documents(own) == documents(other)
    }

    /// The least time for which the busiest pipeline rank works on one micro-batch, under any
    /// strategy with the sizes and pipeline ranks of `among`, which differ in how they issue
    /// kernels and messages. `n` micro-batches take at least `n` times as long.
    ///
    /// # Errors
    /// When a block cannot be traced, or a pipeline rank has GPUs of several pools.
    pub fn pace(&self, among: &[Decisions]) -> Result<Seconds, CostError> {
        pace::least(&self.pools, self.scenario(), among)
    }
}
