//! Costs of the blocks of one scenario, each priced once.

use std::sync::Arc;

use catalog::{AxisOrder, Bytes, CudaGraphs, LayerClass, Seconds};
use models::{BlockClass, BlockLayout};
use plans::{Decisions, Recompute};

use crate::block::Siblings;
use crate::block_cost::{BlockCost, BlockDetail, BlockKey};
use crate::block_set::{Blocks, BlocksKey, passes_alone};
use crate::book::PriceBook;
use crate::execution::Execution;
use crate::memo::Memo;
use crate::states::Weights;
use crate::{CostError, Scenario, block, block_cost};

/// A scenario with its prices and a cache of block costs, keyed by local shape.
#[derive(Debug)]
pub(crate) struct BlockCosts {
    scenario: Scenario,
    /// Prices of kernels, messages and the optimizer.
    pub(crate) book: Arc<dyn PriceBook>,
    /// The distinct decoder layers of the model.
    pub(crate) layer_classes: Vec<LayerClass>,
    /// For every layer, the index of its class.
    pub(crate) class_of_layer: Vec<u8>,
    blocks: Arc<Memo<BlockKey, BlockCost>>,
    sets: Arc<Memo<BlocksKey, Blocks>>,
    /// Number of parameters on all ranks of a pipeline together, by `[tp, ep, etp]`.
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
            sets: Arc::default(),
            weights: Arc::default(),
        }
    }

    /// These costs for another workload, with the same cache. `None` if the workload may change
    /// what a block costs: a block's key has precision and sequence length, but attention depends
    /// on documents, and a profile of ranks that share cores prices kernels by the number of ranks.
    pub(crate) fn with_workload_of(&self, scenario: &Scenario) -> Option<Self> {
        let own = &self.scenario.workload;
        let alike = own.documents() == scenario.workload.documents()
            && own.has_alike_tokens() == scenario.workload.has_alike_tokens()
            && self.scenario.domain() == scenario.domain();
        if scenario.cluster.profile.is_some() || !alike {
            return None;
        }
        Some(Self {
            scenario: scenario.clone(),
            book: Arc::clone(&self.book),
            layer_classes: self.layer_classes.clone(),
            class_of_layer: self.class_of_layer.clone(),
            blocks: Arc::clone(&self.blocks),
            sets: Arc::clone(&self.sets),
            weights: Arc::clone(&self.weights),
        })
    }

    /// The scenario whose blocks these are.
    pub(crate) fn scenario(&self) -> &Scenario {
        &self.scenario
    }

    /// The cost of a block; each local shape is priced only once.
    ///
    /// # Errors
    /// When the block cannot be traced.
    pub(crate) fn block(&self, key: &BlockKey) -> Result<Arc<BlockCost>, CostError> {
        self.with_siblings(key, Siblings::offered)
    }

    /// The cost of a block if CUDA graphs capture this part of a step; `cost` is without graphs.
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
        siblings: fn(&Scenario, &BlockKey) -> Siblings,
    ) -> Result<Arc<BlockCost>, CostError> {
        if let Some(found) = self.blocks.find(key) {
            return Ok(found);
        }
        let siblings = siblings(&self.scenario, key);
        for cost in block::price(&self.scenario, &*self.book, key, &siblings)? {
            self.blocks.insert(cost.key, cost);
        }
        let found = self.blocks.find(key);
        Ok(found.expect("a block is priced for its key"))
    }

    /// The blocks of a strategy.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub(crate) fn blocks_of(&self, d: &Decisions) -> Result<Arc<Blocks>, CostError> {
        self.executed(d, Execution::of(&self.scenario, d))
    }

    /// The blocks of a strategy whose passes run in a given way.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub(crate) fn executed(
        &self,
        d: &Decisions,
        execution: Execution,
    ) -> Result<Arc<Blocks>, CostError> {
        let key = BlocksKey::new(&self.scenario, d, execution);
        let predicts = self.scenario.model.mtp_layers > 0;
        (self.sets).get(&key, || self.by(d, execution, predicts, Siblings::offered))
    }

    /// The blocks of a strategy without the prediction module. New ones are priced for these
    /// decisions only, not for others that a search may ask for next.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub(crate) fn fewest(&self, d: &Decisions, execution: Execution) -> Result<Blocks, CostError> {
        self.by(d, execution, false, Siblings::executed)
    }

    fn by(
        &self,
        d: &Decisions,
        execution: Execution,
        predicts: bool,
        siblings: fn(&Scenario, &BlockKey) -> Siblings,
    ) -> Result<Blocks, CostError> {
        let cost = |key: &BlockKey| self.with_siblings(key, siblings);
        let block = |class: BlockClass, recompute: Recompute| {
            let key = BlockKey::of(&self.scenario, d, class, recompute);
            let key = key.executed(&self.scenario.runtime, execution);
            match key.alone() {
                None => self.captured(&key, execution.graphs, || cost(&key)),
                Some(alone) => {
                    let mean = cost(&key)?.mixed(&*cost(&alone)?, passes_alone(d));
                    Ok(Arc::new(mean.captured(execution.graphs)))
                }
            }
        };
        let [as_first, mode] = d.recompute.of_first_and_others();
        let layer = |&class: &LayerClass| {
            let as_asked = block(BlockClass::Layer(class), mode)?;
            let first = match as_first {
                same if same == mode => Arc::clone(&as_asked),
                other => block(BlockClass::Layer(class), other)?,
            };
            Ok([as_asked, first])
        };
        // Runtimes do not recompute the embedding or the head.
        Ok(Blocks {
            embedding: block(BlockClass::Embedding, Recompute::None)?,
            head: block(BlockClass::Head, Recompute::None)?,
            mtp: predicts.then(|| block(BlockClass::Mtp, mode)).transpose()?,
            layers: (self.layer_classes.iter().map(layer)).collect::<Result<_, CostError>>()?,
        })
    }

    /// Time to send one micro-batch's activation of `output` bytes to the next pipeline rank.
    ///
    /// # Errors
    /// When the book has no measurement of it.
    pub(crate) fn transfer(&self, d: &Decisions, output: Bytes) -> Result<Seconds, CostError> {
        match d.pp {
            1 => Ok(Seconds(0.0)),
            _ => self.book.transfer(&self.scenario, d, output),
        }
    }

    /// The shortest time of [`Self::transfer`] under any of these axis orders.
    ///
    /// # Errors
    /// When the book has no measurement of it.
    pub(crate) fn least_transfer(
        &self,
        d: &Decisions,
        output: Bytes,
        orders: &[AxisOrder],
    ) -> Result<Seconds, CostError> {
        let mut least: Option<Seconds> = None;
        for &axis_order in orders {
            let d = Decisions {
                axis_order,
                ..d.clone()
            };
            let time = self.transfer(&d, output)?;
            least = Some(least.map_or(time, |least| least.min(time)));
        }
        Ok(least.unwrap_or_default())
    }

    /// Number of parameters on all ranks of a pipeline together, before ZeRO shards them.
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

    /// Breaks a block's cost down by name: times of kernels, and bytes of saved tensors.
    ///
    /// # Errors
    /// When the block cannot be traced.
    pub(crate) fn detail(&self, key: &BlockKey) -> Result<BlockDetail, CostError> {
        block::detail(&self.scenario, &*self.book, key)
    }
}
