//! Costs of the blocks of one scenario, each priced once.

use std::sync::Arc;

use catalog::LayerClass;

use crate::block::BlockPricing;
use crate::block_cost::{BlockCost, BlockKey};
use crate::local::Local;
use crate::memo::Memo;
use crate::price::{Prices, ProfilePrices};
use crate::{CostError, Scenario};

/// A scenario, its prices, and the blocks that were priced by local shape.
#[derive(Debug)]
pub(crate) struct BlockCosts {
    scenario: Scenario,
    prices: Prices,
    layer_classes: Vec<LayerClass>,
    blocks: Memo<BlockKey, BlockCost>,
}

impl BlockCosts {
    /// No block is priced yet.
    pub(crate) fn new(scenario: Scenario, prices: Prices) -> Self {
        let layers = 0..scenario.model.layers;
        let mut layer_classes: Vec<LayerClass> =
            layers.map(|i| scenario.model.layer_class(i)).collect();
        layer_classes.sort_unstable();
        layer_classes.dedup();
        Self {
            scenario,
            prices,
            layer_classes,
            blocks: Memo::default(),
        }
    }

    /// What the blocks are of.
    pub(crate) fn scenario(&self) -> &Scenario {
        &self.scenario
    }

    /// Device and network prices.
    pub(crate) fn prices(&self) -> &Prices {
        &self.prices
    }

    /// The distinct decoder layers of the model.
    pub(crate) fn layer_classes(&self) -> &[LayerClass] {
        &self.layer_classes
    }

    /// The cost of a block, from memory when its local shape was priced before.
    ///
    /// # Errors
    /// When the block cannot be traced.
    pub(crate) fn block(&self, key: &BlockKey) -> Result<Arc<BlockCost>, CostError> {
        self.blocks.get(key, || {
            let pricing = BlockPricing {
                model: &self.scenario.model,
                runtime: &self.scenario.runtime,
                prices: &self.prices,
                precision: self.scenario.workload.precision,
            };
            pricing.cost(key)
        })
    }

    /// Prices of our executor on this machine.
    pub(crate) fn local<'p>(&self, prices: &'p ProfilePrices) -> Local<'p> {
        Local {
            prices,
            precision: self.scenario.workload.precision,
        }
    }
}
