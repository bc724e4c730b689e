//! Costs of the blocks of one scenario, each priced once.

use std::sync::Arc;

use catalog::LayerClass;

use crate::block_cost::{BlockCost, BlockKey};
use crate::book::PriceBook;
use crate::memo::Memo;
use crate::{CostError, Scenario, block};

/// A scenario with its prices and a cache of block costs, keyed by local shape.
#[derive(Debug)]
pub(crate) struct BlockCosts {
    scenario: Scenario,
    book: Box<dyn PriceBook>,
    layer_classes: Vec<LayerClass>,
    blocks: Memo<BlockKey, BlockCost>,
}

impl BlockCosts {
    /// Starts with an empty cache.
    pub(crate) fn new(scenario: Scenario, book: Box<dyn PriceBook>) -> Self {
        let layers = 0..scenario.model.layers;
        let mut layer_classes: Vec<LayerClass> =
            layers.map(|i| scenario.model.layer_class(i)).collect();
        layer_classes.sort_unstable();
        layer_classes.dedup();
        Self {
            scenario,
            book,
            layer_classes,
            blocks: Memo::default(),
        }
    }

    /// The scenario whose blocks these are.
    pub(crate) fn scenario(&self) -> &Scenario {
        &self.scenario
    }

    /// Prices of kernels, messages and the optimizer.
    pub(crate) fn book(&self) -> &dyn PriceBook {
        &*self.book
    }

    /// The distinct decoder layers of the model.
    pub(crate) fn layer_classes(&self) -> &[LayerClass] {
        &self.layer_classes
    }

    /// The cost of a block; each local shape is priced only once.
    ///
    /// # Errors
    /// When the block cannot be traced.
    pub(crate) fn block(&self, key: &BlockKey) -> Result<Arc<BlockCost>, CostError> {
        let book = self.book();
        self.blocks
            .get(key, || block::price(&self.scenario, book, key))
    }
}
