//! Memory held between actions, without prices: states, and activations from forward to backward.

use std::collections::BTreeMap;

use dtensor::{RoutedRows, Routing};
use models::BlockClass;
use plans::program::Program;
use plans::{Action, ActionKind, Strategy};
use spec::Bytes;

use crate::CostError;
use crate::assemble::{Assembled, key};
use crate::cost_model::CostModel;
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

/// The most that a rank keeps when its experts get `rows`, by micro-batch and layer.
pub(crate) fn with_routing(
    costs: &CostModel,
    strategy: &Strategy,
    assembled: &Assembled,
    actions: &[Action],
    rows: &BTreeMap<(u32, u64), RoutedRows>,
) -> Result<Bytes, CostError> {
    peak(actions, |stage, micro_batch| {
        let mut kept = of_stage(assembled, stage);
        let first: u64 = strategy.stages.0[..stage as usize].iter().sum();
        for offset in 0..strategy.stages.0[stage as usize] {
            let Some(&rows) = rows.get(&(micro_batch, first + offset)) else {
                continue;
            };
            let class = BlockClass::Layer(costs.scenario().model.layer_class(first + offset));
            let recompute = strategy.recompute.of_layer(offset);
            let mut key = key(costs, strategy, class, recompute);
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
