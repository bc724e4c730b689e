//! Memory that a rank of our own executor holds, counted by running its step on tensor sizes only (`dtensor::train`).
//! Not counted: the driver's context, library workspaces, rounding of sizes, message buffers.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;

use catalog::runtime::AttentionKernel;
use catalog::{Axis, Bytes, Zero};
use dtensor::block::{Attention, Block, Keep};
use dtensor::placement::shard_size;
use dtensor::train::{
    self, Counting, Device, Made, Sharing, Stage, Stages, StateBytes, States, StatesPlan, Tokens,
};
use dtensor::{BlockMesh, BlockPosition, Placement, RoutedRows, Routing};
use models::stage::Recipe;
use models::{BlockClass, BlockLayout, ModelError};
use plans::program::Program;
use plans::{ActionKind, Strategy};
use rustc_hash::FxHashMap;

use crate::{CostError, Scenario, block_cost};

/// Memory that a rank of our own executor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Parameters, gradients and optimizer states, held for the whole step.
    pub states: StateBytes,
    /// Activations kept for backward: the largest sum at the end of any action.
    pub peak_saved: Bytes,
    /// GPU memory in use: the largest sum at any moment, also inside actions. Buffers count at their requested size.
    pub peak: Bytes,
}

/// Says whose memory is counted: of the ranks at this place in the mesh, the one with the largest shards of states.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Member {
    /// Pipeline rank.
    pub pp: u64,
    /// Tensor-parallel rank; if `tp` does not divide the vocabulary, the last ones hold less.
    pub tp: u64,
    /// Rows that the rank's experts receive, by micro-batch and layer; where there is no entry, as many as its own
    /// tokens send out.
    pub rows: BTreeMap<(u32, u64), RoutedRows>,
}

/// A strategy's step as one rank runs it.
pub(crate) struct Counted<'c> {
    pub(crate) scenario: &'c Scenario,
    pub(crate) strategy: &'c Strategy,
    pub(crate) rank_of_stage: &'c [u32],
    pub(crate) program: &'c Program,
    pub(crate) member: &'c Member,
}

/// Cache of blocks: those of a class that keep the same tensors and receive equally many rows are equal.
type Known = FxHashMap<(BlockClass, Keep, Routing), Arc<Block>>;

/// Unwraps a result that cannot be an error.
fn sure<T>(result: Result<T, Infallible>) -> T {
    let Ok(value) = result;
    value
}

impl Counted<'_> {
    /// Runs two steps; the peak is the second's, when all that outlives a step exists.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub(crate) fn held(&self) -> Result<Held, CostError> {
        let actions = &self.program.ranks[self.member.pp as usize];
        let device = self.device();
        let mut stages = self
            .stages(&device)
            .map_err(|e| CostError::Trace(e.to_string()))?;
        let mut held = Held {
            states: stages.state_bytes(),
            peak_saved: Bytes(0),
            peak: Bytes(0),
        };
        for _ in 0..2 {
            let _ = device.take_peak();
            for (index, &action) in actions.iter().enumerate() {
                sure(stages.prefetch(&device, index));
                if action.kind.is_pass() {
                    sure(stages.pass(&device, action, &()));
                    held.peak_saved = held.peak_saved.max(Bytes(stages.saved_bytes()));
                } else if action.kind == ActionKind::Optim {
                    sure(stages.end_sends(&device));
                    sure(stages.update(&device));
                } else {
                    sure(stages.exchange(&device, action));
                }
            }
            held.peak = Bytes(device.take_peak());
        }
        Ok(held)
    }

    fn device(&self) -> Counting {
        let s = self.strategy;
        let of_micro_batch = s.micro_batch * self.scenario.workload.seq_len / s.cp;
        let tokens = Tokens {
            count: of_micro_batch * s.num_micro_batches,
            embeds: self.rank_of_stage.first() == Some(&(self.member.pp as u32)),
        };
        let attention = self.scenario.runtime.attention;
        Counting::new(attention == AttentionKernel::CudnnElseTwoPass, tokens)
    }

    fn stages(&self, device: &Counting) -> Result<Stages<'_, Counting>, ModelError> {
        let s = self.strategy;
        let pp = self.member.pp as usize;
        let model = &self.scenario.model;
        let position = BlockPosition {
            mesh: BlockMesh {
                tp: s.tp,
                cp: s.cp,
                ep: s.ep,
                etp: s.etp,
            },
            at: [self.member.tp, 0, 0, 0],
        };
        let layout = self.layout();
        let mut known = Known::default();
        let mut all = Vec::new();
        for (stage, &owner) in (0u32..).zip(self.rank_of_stage) {
            if owner as usize == pp {
                all.push((stage, self.stage(device, &mut known, &position, stage)?));
            }
        }
        let plan = train::Plan {
            actions: &self.program.ranks[pp],
            peers: self.rank_of_stage.iter().map(|&pp| pp as usize).collect(),
            arrived: self.program.arrived(self.rank_of_stage).swap_remove(pp),
            hidden: (
                models::stage::hidden(model, &layout, &position)?,
                layout.dtype,
            ),
            zero: s.zero,
            reduces_beside: s.overlap.grad_reduce,
            keeps_losses: self.member.tp == 0,
            micro_batches: s.num_micro_batches as usize,
        };
        Ok(Stages::new(plan, all))
    }

    fn stage(
        &self,
        device: &Counting,
        known: &mut Known,
        position: &BlockPosition,
        stage: u32,
    ) -> Result<Stage<Counting>, ModelError> {
        let model = &self.scenario.model;
        let recipes = Recipe::of_stage(model, self.strategy, u64::from(stage));
        let mut block = |recipe: &Recipe, routing| self.block(known, recipe, routing);
        let balanced = recipes.iter().map(|r| block(r, Routing::Balanced));
        let blocks = balanced.collect::<Result<Vec<_>, _>>()?;
        let mut recorded = FxHashMap::default();
        for (&(micro_batch, layer), &rows) in &self.member.rows {
            let index = recipes.iter().position(|r| r.layer == Some(layer));
            if let Some(index) = index {
                let block = block(&recipes[index], Routing::Recorded(rows))?;
                recorded.insert((micro_batch, index), block);
            }
        }
        let slots = models::stage::slots(model, &recipes, &blocks, position);
        let plan = StatesPlan {
            zero: self.strategy.zero,
            dtype: self.layout().dtype,
            exact: false,
            bucket: StatesPlan::BUCKET,
            seed: 0,
        };
        let states = sure(States::new(device, slots, self.sharing(), plan));
        let whole = blocks.clone();
        let made: Made<Infallible> = Box::new(move |micro_batch, index| {
            let recorded = recorded.get(&(micro_batch, index));
            Ok(Arc::clone(recorded.unwrap_or(&whole[index])))
        });
        Ok(Stage::new(blocks, Some(made), states))
    }

    fn block(
        &self,
        known: &mut Known,
        recipe: &Recipe,
        routing: Routing,
    ) -> Result<Arc<Block>, ModelError> {
        let key = (recipe.class, recipe.keep, routing);
        if let Some(block) = known.get(&key) {
            return Ok(Arc::clone(block));
        }
        let attention = match self.scenario.runtime.attention {
            AttentionKernel::Unfused => Attention::Pieces,
            _ => Attention::Fused,
        };
        let layout = BlockLayout {
            routing,
            ..block_cost::layout(self.scenario, self.strategy, recipe.class)
        };
        let mut block = recipe.block(&self.scenario.model, &layout, attention)?;
        // Traces are of the first rank, which has the largest part of what cannot be divided evenly.
        let ranks = self.strategy.tp;
        for tensor in &mut block.trace.tensors {
            if let Placement::Shard(dim) = tensor.placements.on(Axis::Tp)
                && !tensor.global[dim].is_multiple_of(ranks)
            {
                tensor.shape[dim] = shard_size(tensor.global[dim], ranks, self.member.tp);
            }
        }
        let block = Arc::new(block);
        known.insert(key, Arc::clone(&block));
        Ok(block)
    }

    fn layout(&self) -> BlockLayout {
        let workload = &self.scenario.workload;
        BlockLayout::of(self.strategy, workload.seq_len, workload.precision)
    }

    /// How the ranks share states: first those of dense parameters, then those of experts.
    fn sharing(&self) -> [Sharing<<Counting as Device>::Group>; 2] {
        let s = self.strategy;
        let sharded = s.zero != Zero::Z0;
        let kinds = [
            (s.dp_shard * s.cp, s.dp() * s.cp),
            ((s.edp() / s.dp_replicate).max(1), s.edp()),
        ];
        let tp = s.tp as usize;
        kinds.map(|(shard, all)| {
            let (shard, all) = (if sharded { shard } else { 1 } as usize, all as usize);
            Sharing {
                shard,
                gather: shard,
                replicate: all / shard,
                all,
                all_with_tp: all * tp,
                tp,
                speaks: true,
            }
        })
    }
}
