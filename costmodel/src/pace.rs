//! The least time for which the busiest rank of a pipeline works on a micro-batch, however layers are divided.
//!
//! Let block `k` take `c(p, k)` on pool `p`, where the pipeline has `n(p)` ranks; `W(p) = Σ_k c(p, k)`; the busiest rank takes
//! `M`. Weigh a rank on pool `p` by `1 / W(p)`. Block `k` costs at least `min_p c(p, k) / W(p)` wherever it runs. All ranks
//! together offer `M · Σ_p n(p) / W(p)`. So `M · Σ_p n(p) / W(p) ≥ Σ_k min_p c(p, k) / W(p)`.

use catalog::Seconds;
use plans::Decisions;

use crate::CostError;
use crate::Scenario;
use crate::block_cost::BlockCost;
use crate::blocks::BlockCosts;
use crate::execution::Execution;
use crate::floors::ROUNDING;
use crate::pools::PoolCosts;

/// The least time of the busiest rank for one micro-batch, under any pipeline with as many ranks as
/// `among`. These have one layout and issue kernels and messages in different ways.
pub(crate) fn least(
    pools: &PoolCosts,
    whole: &Scenario,
    among: &[Decisions],
) -> Result<Seconds, CostError> {
    let executions = Execution::least_of(whole, among).into_iter();
    let paces = executions.map(|execution| executed(pools, whole, &among[0], execution));
    let paces: Vec<Seconds> = paces.collect::<Result<_, _>>()?;
    Ok(paces.into_iter().reduce(Seconds::min).unwrap_or_default())
}

/// The least time of the busiest rank for one way to issue kernels and messages.
fn executed(
    pools: &PoolCosts,
    whole: &Scenario,
    d: &Decisions,
    execution: Execution,
) -> Result<Seconds, CostError> {
    let owners = pools.of_ranks(whole, d)?;
    let blocks: Vec<Vec<f64>> = (pools.all().iter())
        .map(|costs| of_blocks(costs, d, execution))
        .collect::<Result<_, CostError>>()?;
    let works: Vec<f64> = blocks.iter().map(|blocks| blocks.iter().sum()).collect();
    let ranks: f64 = owners.iter().map(|&pool| 1.0 / works[pool]).sum();
    let least_of = |block: usize| {
        let shares = blocks.iter().zip(&works);
        let shares = shares.map(|(blocks, work)| blocks[block] / work);
        shares.fold(f64::INFINITY, f64::min)
    };
    let all: f64 = (0..blocks[0].len()).map(least_of).sum();
    Ok(Seconds(all / ranks) * ROUNDING)
}

/// Seconds that all blocks of each kind take in both passes together, without recomputation.
fn of_blocks(
    costs: &BlockCosts,
    d: &Decisions,
    execution: Execution,
) -> Result<Vec<f64>, CostError> {
    let blocks = costs.fewest(d, execution)?;
    let mut times = vec![passes(&blocks.embedding), passes(&blocks.head)];
    for (class, layers) in blocks.layers.iter().enumerate() {
        let of_class = |&&of: &&u8| usize::from(of) == class;
        let count = costs.class_of_layer.iter().filter(of_class).count();
        let [asked, first] = layers.each_ref().map(|block| passes(block));
        times.push(asked.min(first) * count as f64);
    }
    Ok(times)
}

fn passes(block: &BlockCost) -> f64 {
    let backward = &block.backward;
    let halves = (backward.input + backward.weight).device();
    (block.forward.device() + backward.whole.device().min(halves)).0
}
