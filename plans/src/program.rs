//! The program of a step: a schedule plus everything else that the runtime must do, added by passes.

use std::collections::BTreeMap;

use catalog::Zero;

use crate::schedule::{Action, ActionKind, Schedule, action};

/// The complete action lists of all pipeline ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Actions of every rank in execution order.
    pub ranks: Vec<Vec<Action>>,
}

/// For every receive of a rank: the rank's earlier sends that have arrived when it completes.
pub type Arrived = BTreeMap<Action, Vec<Action>>;

impl Program {
    /// For every rank, the sends that each receive proves to have arrived: the peer received them
    /// before it sent. Sends that no receive proves are complete only at the end of the step.
    #[must_use]
    pub fn arrived(&self, rank_of_stage: &[u32]) -> Vec<Arrived> {
        // The rank that receives a message, and the action that receives it.
        let taken = |send: &Action| {
            let (kind, stage) = match send.kind {
                ActionKind::SendF => (ActionKind::RecvF, send.stage + 1),
                ActionKind::SendB => (ActionKind::RecvB, send.stage - 1),
                _ => return None,
            };
            let peer = rank_of_stage[stage as usize];
            Some((peer, action(kind, stage, send.micro_batch)))
        };
        let ranks = (0u32..).zip(&self.ranks);
        ranks
            .map(|(rank, actions)| {
                let mut arrived = Arrived::new();
                for send in actions {
                    let Some((peer, take)) = taken(send) else {
                        continue;
                    };
                    let theirs = self.ranks[peer as usize].iter();
                    let mut after = theirs.skip_while(|&a| *a != take).filter_map(&taken);
                    if let Some((_, answer)) = after.find(|&(to, _)| to == rank) {
                        arrived.entry(answer).or_default().push(*send);
                    }
                }
                arrived
            })
            .collect()
    }
}

/// Adds transfers, parameter gathering, gradient reduction and the optimizer to a schedule. `reshards` says whether ZeRO-3 frees
/// parameters after every pass.
///
/// Parameters sharded by ZeRO-1/2 are gathered at the start of the step, as if the previous
/// optimizer had just run; a steady step costs the same. Under ZeRO-3 they are gathered for every
/// pass, or once per step when kept after forward.
#[must_use]
pub fn lower(schedule: &Schedule, zero: Zero, reshards: bool) -> Program {
    let ranks = schedule
        .ranks
        .iter()
        .enumerate()
        .map(|(rank, actions)| {
            let actions = transfers(schedule, rank as u32, actions);
            let mut actions = data_parallel(schedule, (zero, reshards), rank as u32, actions);
            actions.push(action(ActionKind::Optim, 0, 0));
            actions
        })
        .collect();
    Program { ranks }
}

/// Adds a receive before every pass whose input comes from another rank, and a send after every pass whose output goes
/// to one. Neighbouring stages on the same rank (the turn of a V) hand over in place.
fn transfers(schedule: &Schedule, rank: u32, actions: &[Action]) -> Vec<Action> {
    let owner = &schedule.rank_of_stage;
    let elsewhere = |stage: u32| {
        owner
            .get(stage as usize)
            .is_some_and(|&other| other != rank)
    };
    let mut with = Vec::with_capacity(actions.len() * 3);
    for &a in actions {
        let add = |with: &mut Vec<Action>, kind| with.push(action(kind, a.stage, a.micro_batch));
        match a.kind {
            ActionKind::F => {
                if a.stage > 0 && elsewhere(a.stage - 1) {
                    add(&mut with, ActionKind::RecvF);
                }
                with.push(a);
                if elsewhere(a.stage + 1) {
                    add(&mut with, ActionKind::SendF);
                }
            }
            ActionKind::B | ActionKind::I => {
                if elsewhere(a.stage + 1) {
                    add(&mut with, ActionKind::RecvB);
                }
                with.push(a);
                if a.stage > 0 && elsewhere(a.stage - 1) {
                    add(&mut with, ActionKind::SendB);
                }
            }
            _ => with.push(a),
        }
    }
    with
}

fn data_parallel(
    schedule: &Schedule,
    (zero, reshards): (Zero, bool),
    rank: u32,
    actions: Vec<Action>,
) -> Vec<Action> {
    let mut with = Vec::with_capacity(actions.len() + 8);
    let each_pass = zero == Zero::Z3 && reshards;
    if zero != Zero::Z0 && !each_pass {
        let own = (0u32..)
            .zip(&schedule.rank_of_stage)
            .filter(|&(_, &owner)| owner == rank);
        with.extend(own.map(|(stage, _)| action(ActionKind::Unshard, stage, 0)));
    }
    let mut last_backward = vec![None; schedule.rank_of_stage.len()];
    for (index, a) in actions.iter().enumerate() {
        if matches!(a.kind, ActionKind::B | ActionKind::W) {
            last_backward[a.stage as usize] = Some(index);
        }
    }
    // The input gradient is sent first: reducing weight gradients can wait, the pipeline cannot.
    let mut pending = None;
    for (index, &a) in actions.iter().enumerate() {
        if a.kind != ActionKind::SendB {
            with.extend(pending.take());
        }
        let gathers = each_pass && matches!(a.kind, ActionKind::F | ActionKind::B | ActionKind::I);
        if gathers {
            with.push(action(ActionKind::Unshard, a.stage, a.micro_batch));
        }
        with.push(a);
        if gathers {
            with.push(action(ActionKind::Reshard, a.stage, a.micro_batch));
        }
        if matches!(a.kind, ActionKind::B | ActionKind::W) {
            let each = matches!(zero, Zero::Z2 | Zero::Z3);
            if each || last_backward[a.stage as usize] == Some(index) {
                pending = Some(action(ActionKind::ReduceGrad, a.stage, a.micro_batch));
            }
        }
    }
    with.extend(pending);
    with
}
