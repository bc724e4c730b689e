//! Costs of the blocks of one scenario, each priced once.

use std::sync::Arc;

use catalog::{CudaGraphs, LayerClass};
use models::{BlockClass, BlockLayout};
use plans::Decisions;

use crate::block::Siblings;
use crate::block_cost::{BlockCost, BlockDetail, BlockKey};
use crate::book::PriceBook;
use crate::memo::Memo;
use crate::states::Weights;
use crate::{CostError, Scenario, block, block_cost};

/// A scenario with its prices and a cache of block costs, keyed by local shape.
#[derive(Debug)]
pub(crate) struct BlockCosts {
    scenario: Scenario,
    book: Arc<dyn PriceBook>,
    layer_classes: Vec<LayerClass>,
    /// For every layer, the index of its class.
    class_of_layer: Vec<u8>,
    blocks: Arc<Memo<BlockKey, BlockCost>>,
    /// Elements of the whole model on the ranks of a pipeline together, by tensor and expert sizes.
    weights: Arc<Memo<[u64; 3], Weights>>,
}

impl BlockCosts {
    /// Starts with an empty cache.
    pub(crate) fn new(scenario: Scenario, book: Box<dyn PriceBook>) -> Self {
        let of = |layer| scenario.model.layer_class(layer);
        let layers = 0..scenario.model.layers;
        let mut layer_classes: Vec<LayerClass> = layers.clone().map(of).collect();
        layer_classes.sort_unstable();
        layer_classes.dedup();
        let index = |class| layer_classes.iter().position(|other| *other == class);
        let class_of_layer = layers.map(|layer| index(of(layer)).unwrap_or(0) as u8);
        Self {
            class_of_layer: class_of_layer.collect(),
            scenario,
            book: book.into(),
            layer_classes,
            blocks: Arc::default(),
            weights: Arc::default(),
        }
    }

    /// The same for a scenario with another workload, sharing the cache. `None` if that may change what a block costs:
    /// another precision or sequence length is part of a block's key, but attention depends on documents, and a profile of
    /// ranks that share cores prices kernels by how many ranks there are.
    pub(crate) fn with_workload_of(&self, scenario: &Scenario) -> Option<Self> {
        let documents = self.scenario.workload.documents();
        if scenario.cluster.profile.is_some() || documents != scenario.workload.documents() {
            return None;
        }
        Some(Self {
            scenario: scenario.clone(),
            book: Arc::clone(&self.book),
            layer_classes: self.layer_classes.clone(),
            class_of_layer: self.class_of_layer.clone(),
            blocks: Arc::clone(&self.blocks),
            weights: Arc::clone(&self.weights),
        })
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

    /// For every layer, the index of its class.
    pub(crate) fn class_of_layer(&self) -> &[u8] {
        &self.class_of_layer
    }

    /// The cost of a block; each local shape is priced only once.
    ///
    /// # Errors
    /// When the block cannot be traced.
    pub(crate) fn block(&self, key: &BlockKey) -> Result<Arc<BlockCost>, CostError> {
        self.with_siblings(key, Siblings::offered)
    }

    /// The same, without pricing what else the block may recompute, and other types of gradients.
    ///
    /// # Errors
    /// When the block cannot be traced.
    pub(crate) fn block_alone(&self, key: &BlockKey) -> Result<Arc<BlockCost>, CostError> {
        self.with_siblings(key, Siblings::executed)
    }

    /// The cost of a block if so much of a step is captured in CUDA graphs; `cost` gives that without any.
    ///
    /// # Errors
    /// When `cost` fails.
    pub(crate) fn captured(
        &self,
        key: &BlockKey,
        graphs: CudaGraphs,
        cost: impl FnOnce() -> Result<Arc<BlockCost>, CostError>,
    ) -> Result<Arc<BlockCost>, CostError> {
        if graphs == CudaGraphs::None {
            return cost();
        }
        let mut key = *key;
        key.execution.graphs = graphs;
        self.blocks.get(&key, || Ok(cost()?.captured(graphs)))
    }

    fn with_siblings(
        &self,
        key: &BlockKey,
        siblings: impl Fn(&Scenario, &BlockKey) -> Siblings,
    ) -> Result<Arc<BlockCost>, CostError> {
        if let Some(found) = self.blocks.find(key) {
            return Ok(found);
        }
        let siblings = siblings(&self.scenario, key);
        for cost in block::price(&self.scenario, self.book(), key, &siblings)? {
            self.blocks.insert(cost.key, cost);
        }
        let found = self.blocks.find(key);
        Ok(found.expect("a block is priced for its key"))
    }

    /// Elements that the ranks of a pipeline hold together, before ZeRO shards them.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub(crate) fn weights(&self, d: &Decisions) -> Result<Weights, CostError> {
        let scenario = &self.scenario;
        // Only these sizes decide how parameters are divided.
        let layout = |class| {
            let whole = block_cost::layout(scenario, d, class);
            BlockLayout {
                tp: whole.tp,
                sequence_parallel: whole.sequence_parallel,
                ep: d.ep,
                etp: d.etp,
                ..BlockLayout::alone(1, whole.seq_len, whole.dtype)
            }
        };
        let found = self.weights.get(&[d.tp, d.ep, d.etp], || {
            let mut counted: Vec<(BlockClass, Weights)> = Vec::new();
            let mut all = Weights::default();
            for class in models::blocks(&scenario.model) {
                let known = counted.iter().find(|(other, _)| *other == class);
                let weights = match known {
                    Some(&(_, weights)) => weights,
                    None => {
                        let trace = models::trace_block(&scenario.model, class, &layout(class))
                            .map_err(|e| CostError::Trace(e.to_string()))?;
                        let weights = block_cost::weights(&trace);
                        counted.push((class, weights));
                        weights
                    }
                };
                all += weights;
            }
            Ok(all)
        })?;
        Ok(*found)
    }

    /// What a block's cost consists of, by name.
    ///
    /// # Errors
    /// When the block cannot be traced.
    pub(crate) fn detail(&self, key: &BlockKey) -> Result<BlockDetail, CostError> {
        block::detail(&self.scenario, self.book(), key)
    }
}
