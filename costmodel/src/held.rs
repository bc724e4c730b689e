//! Memory held between actions, without prices: states, and activations from forward to backward.

use std::collections::BTreeMap;

use catalog::{Axis, Bytes};
use dtensor::placement::shard_size;
use dtensor::{Placement, RoutedRows, Routing, Trace};
use models::BlockClass;
use plans::program::Program;
use plans::{Action, ActionKind, Recompute, Strategy};

use crate::CostError;
use crate::assemble::Assembled;
use crate::block_cost::BlockKey;
use crate::blocks::BlockCosts;
use crate::lower::{Lowering, kept_bytes};
use crate::states::StateBytes;

/// What a rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// For the whole step.
    pub states: StateBytes,
    /// Kept for backward: the most at the end of any action.
    pub peak_saved: Bytes,
}

/// What a forward leaves for backward.
#[derive(Clone, Copy, Debug, Default)]
struct Kept {
    /// For all of it.
    all: Bytes,
    /// For its weight half, between the halves.
    for_weight: Bytes,
}

/// What every pipeline rank holds over a program.
pub(crate) fn held(assembled: &Assembled, program: &Program) -> Result<Vec<Held>, CostError> {
    let kept = |stage: u32, _| Ok(of_stage(assembled, stage));
    let ranks = program.ranks.iter().zip(&assembled.states);
    ranks
        .map(|(actions, &states)| {
            Ok(Held {
                states,
                peak_saved: peak(actions, kept)?,
            })
        })
        .collect()
}

/// The most that the `tp`-th tensor-parallel rank keeps when its experts get `rows`, by micro-batch and
/// layer.
pub(crate) fn of_rank(
    costs: &BlockCosts,
    strategy: &Strategy,
    assembled: &Assembled,
    (actions, tp): (&[Action], u64),
    rows: &BTreeMap<(u32, u64), RoutedRows>,
) -> Result<Bytes, CostError> {
    let last = strategy.stages.0.len() - 1;
    let embedding = less(costs, strategy, BlockClass::Embedding, tp)?;
    let head = less(costs, strategy, BlockClass::Head, tp)?;
    peak(actions, |stage, micro_batch| {
        let mut kept = of_stage(assembled, stage);
        let ends = [(0, embedding), (last, head)];
        for (_, less) in ends.iter().filter(|(at, _)| *at == stage as usize) {
            kept.all -= less.all;
            kept.for_weight -= less.for_weight;
        }
        let first: u64 = strategy.stages.0[..stage as usize].iter().sum();
        for offset in 0..strategy.stages.0[stage as usize] {
            let Some(&rows) = rows.get(&(micro_batch, first + offset)) else {
                continue;
            };
            let class = BlockClass::Layer(costs.scenario().model.layer_class(first + offset));
            let recompute = strategy.recompute.of_layer(offset);
            let mut key = BlockKey::of(costs.scenario(), strategy, class, recompute);
            let balanced = costs.block(&key)?;
            key.layout.routing = Routing::Recorded(rows);
            let recorded = costs.block(&key)?;
            kept.all = kept.all + recorded.saved_bytes - balanced.saved_bytes;
            kept.for_weight =
                kept.for_weight + recorded.saved_for_weight - balanced.saved_for_weight;
        }
        Ok(kept)
    })
}

/// What the `tp`-th tensor-parallel rank keeps less of a block than the first, which has the most: where
/// ranks do not divide the vocabulary, the last ones have fewer rows of it.
fn less(
    costs: &BlockCosts,
    strategy: &Strategy,
    class: BlockClass,
    tp: u64,
) -> Result<Kept, CostError> {
    let scenario = costs.scenario();
    if scenario.model.vocab.is_multiple_of(strategy.tp) {
        return Ok(Kept::default());
    }
    let key = BlockKey::of(scenario, strategy, class, Recompute::None);
    let mut trace = models::trace_block(&scenario.model, class, &key.layout)
        .map_err(|e| CostError::Trace(e.to_string()))?;
    let lowering = Lowering {
        runtime: &scenario.runtime,
    };
    let kept = |trace: &Trace| {
        let [all, for_weight] = kept_bytes(&lowering, trace, Recompute::None);
        Kept { all, for_weight }
    };
    let most = kept(&trace);
    for tensor in &mut trace.tensors {
        let Placement::Shard(dim) = tensor.placements.on(Axis::Tp) else {
            continue;
        };
        if tensor.global[dim] == scenario.model.vocab {
            tensor.shape[dim] = shard_size(scenario.model.vocab, strategy.tp, tp);
        }
    }
    let own = kept(&trace);
    Ok(Kept {
        all: most.all - own.all,
        for_weight: most.for_weight - own.for_weight,
    })
}

fn of_stage(assembled: &Assembled, stage: u32) -> Kept {
    let stage = &assembled.stages[stage as usize];
    Kept {
        all: stage.saved,
        for_weight: stage.saved_for_weight,
    }
}

/// The most held at the end of any action; `kept` by stage and micro-batch.
fn peak(
    actions: &[Action],
    kept: impl Fn(u32, u32) -> Result<Kept, CostError>,
) -> Result<Bytes, CostError> {
    let mut now = Bytes(0);
    let mut most = Bytes(0);
    for action in actions {
        let passes = matches!(
            action.kind,
            ActionKind::F | ActionKind::B | ActionKind::I | ActionKind::W
        );
        if !passes {
            continue;
        }
        let kept = kept(action.stage, action.micro_batch)?;
        match action.kind {
            ActionKind::F => now += kept.all,
            ActionKind::B => now -= kept.all,
            ActionKind::I => {
                now += kept.for_weight;
                now -= kept.all;
            }
            _ => now -= kept.for_weight,
        }
        most = most.max(now);
    }
    Ok(most)
}
