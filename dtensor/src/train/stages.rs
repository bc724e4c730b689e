//! The virtual stages of a rank, tensors that wait between their passes, and transfers to and from neighbouring
//! stages: all actions of a step but the optimizer.

use std::collections::HashMap;

use catalog::{DType, Zero};
use plans::program::Arrived;
use plans::{Action, ActionKind};

use super::device::Device;
use super::stage::{Backward, Routed, Stage};
use super::states::StateBytes;
use crate::block::Half;

/// First channel number of pipeline transfers; each boundary between stages uses two.
const PIPELINE: u64 = 1000;

/// What a rank's actions depend on apart from its stages.
#[derive(Clone, Debug)]
pub struct Plan<'p> {
    /// The actions of a step, in order.
    pub actions: &'p [Action],
    /// The rank that runs each virtual stage of the model, as this rank's pipeline peer.
    pub peers: Vec<usize>,
    /// For every receive, the earlier sends of this rank that have arrived by then (free buffers).
    pub arrived: Arrived,
    /// Shape and type of the activation that one stage sends to the next.
    pub hidden: (Vec<usize>, DType),
    /// ZeRO level.
    pub zero: Zero,
    /// Whether reduction of gradients overlaps with backward.
    pub reduces_beside: bool,
    /// Whether this rank keeps the losses if it has the last stage: one rank per tensor-parallel group does.
    pub keeps_losses: bool,
    /// Number of micro-batches in a step.
    pub micro_batches: usize,
}

/// The virtual stages of a rank.
pub struct Stages<'p, D: Device> {
    plan: Plan<'p>,
    /// For each stage, the micro-batch of its last backward in a step.
    last_backward: HashMap<u32, u32>,
    /// This rank's stages, each with its number in the model.
    pub all: Vec<(u32, Stage<D>)>,
    /// Activations and gradients that wait for a stage, by `(backward, stage, micro-batch)`.
    waiting: HashMap<(bool, u32, u32), D::Tensor>,
    /// Sends under way, by the action that started them.
    sending: HashMap<Action, D::Sending>,
    /// The losses of the step's tokens, by micro-batch, if this rank keeps any.
    pub losses: Option<D::Flat>,
}

impl<'p, D: Device> Stages<'p, D> {
    /// Makes the stages, before any action has run.
    #[must_use]
    pub fn new(plan: Plan<'p>, all: Vec<(u32, Stage<D>)>) -> Self {
        let backward = |a: &&Action| matches!(a.kind, ActionKind::B | ActionKind::W);
        let done = plan.actions.iter().filter(backward);
        Self {
            last_backward: done.map(|a| (a.stage, a.micro_batch)).collect(),
            plan,
            all,
            waiting: HashMap::new(),
            sending: HashMap::new(),
            losses: None,
        }
    }

    /// Number of the model's last stage.
    #[must_use]
    pub fn last(&self) -> u32 {
        self.plan.peers.len() as u32 - 1
    }

    /// The stage with this number, if this rank has it.
    #[must_use]
    pub fn get(&self, stage: u32) -> Option<&Stage<D>> {
        let found = self.all.iter().find(|(s, _)| *s == stage);
        found.map(|(_, stage)| stage)
    }

    /// The stage with this number, which must be one of this rank's.
    ///
    /// # Panics
    /// When the rank does not have it.
    pub fn own(&mut self, stage: u32) -> &mut Stage<D> {
        let found = self.all.iter_mut().find(|(s, _)| *s == stage);
        let found = found.map(|(_, stage)| stage);
        found.expect("a rank's actions are of its own stages")
    }

    /// Peer rank and channel of every pipeline transfer.
    #[must_use]
    pub fn transfers(&self) -> Vec<(usize, u64)> {
        let transfers = self.plan.actions.iter().filter_map(|&a| transfer(a));
        transfers
            .map(|(_, other, channel)| (self.plan.peers[other as usize], channel))
            .collect()
    }

    /// Bytes kept for backward by all stages.
    #[must_use]
    pub fn saved_bytes(&self) -> u64 {
        self.all.iter().map(|(_, stage)| stage.saved_bytes()).sum()
    }

    /// Bytes of the states of all stages.
    #[must_use]
    pub fn state_bytes(&self) -> StateBytes {
        let mut sum = StateBytes::default();
        for (_, stage) in &self.all {
            sum += stage.states.bytes();
        }
        sum
    }

    /// Takes the row counts of this rank's experts recorded so far.
    pub fn take_routed(&mut self) -> Vec<Routed> {
        let routed = self.all.iter_mut().flat_map(|(_, s)| s.take_routed());
        routed.collect()
    }

    /// Before a pass, starts to gather the parameters that are needed next, so that they arrive while it runs. `at` is
    /// the index of the pass among the actions.
    pub fn prefetch(&mut self, device: &D, at: usize) -> Result<(), D::Error> {
        let actions = self.plan.actions;
        let mut later = actions[at + 1..].iter();
        let next = later.find(|a| a.kind == ActionKind::Unshard);
        match next.filter(|_| actions[at].kind.is_pass()) {
            Some(next) => self.own(next.stage).states.prefetch(device),
            None => Ok(()),
        }
    }

    /// Runs the forward or backward of a micro-batch that an action stands for.
    pub fn pass(&mut self, device: &D, a: Action, batch: &D::Batch<'_>) -> Result<(), D::Error> {
        match a.kind {
            ActionKind::F => self.forward(device, a, batch),
            ActionKind::I => self.backward(device, a, batch, Half::Input),
            ActionKind::W => self.backward(device, a, batch, Half::Weight),
            _ => self.backward(device, a, batch, Half::Both),
        }
    }

    /// Runs an action that moves tensors, parameters or gradients; ignores passes and the optimizer.
    pub fn exchange(&mut self, device: &D, a: Action) -> Result<(), D::Error> {
        match a.kind {
            ActionKind::RecvF | ActionKind::RecvB => self.receive(device, a),
            ActionKind::SendF | ActionKind::SendB => self.send(device, a),
            ActionKind::Unshard => self.own(a.stage).states.unshard(device),
            ActionKind::Reshard => {
                self.own(a.stage).states.reshard();
                Ok(())
            }
            ActionKind::ReduceGrad => {
                let last = self.is_last_backward(a);
                self.own(a.stage).states.reduce(device, last)
            }
            _ => Ok(()),
        }
    }

    /// Completes all sends still under way at the end of a step.
    pub fn end_sends(&mut self, device: &D) -> Result<(), D::Error> {
        for (_, sending) in self.sending.drain() {
            device.sent(sending)?;
        }
        Ok(())
    }

    /// The optimizer step of all stages.
    pub fn update(&mut self, device: &D) -> Result<(), D::Error> {
        for (_, stage) in &mut self.all {
            stage.states.step(device)?;
        }
        Ok(())
    }

    /// Whether the action's micro-batch is the last of the step that runs backward in its stage.
    fn is_last_backward(&self, a: Action) -> bool {
        self.last_backward.get(&a.stage) == Some(&a.micro_batch)
    }

    fn send(&mut self, device: &D, a: Action) -> Result<(), D::Error> {
        let (backward, to, channel) = transfer(a).expect("a send is a transfer");
        if let Some(x) = self.waiting.remove(&(backward, to, a.micro_batch)) {
            let parcel = device.parcel(&x)?;
            let peer = self.plan.peers[to as usize];
            let sending = device.send(peer, channel, "pipeline", &parcel)?;
            self.sending.insert(a, sending);
        }
        Ok(())
    }

    fn receive(&mut self, device: &D, a: Action) -> Result<(), D::Error> {
        let (backward, from, channel) = transfer(a).expect("a receive is a transfer");
        let peer = self.plan.peers[from as usize];
        let of = self.plan.hidden.clone();
        let x = device.receive(peer, channel, "pipeline", of)?;
        self.waiting.insert((backward, a.stage, a.micro_batch), x);
        for arrived in self.plan.arrived.get(&a).into_iter().flatten() {
            if let Some(sending) = self.sending.remove(arrived) {
                device.sent(sending)?;
            }
        }
        Ok(())
    }

    fn forward(&mut self, device: &D, a: Action, batch: &D::Batch<'_>) -> Result<(), D::Error> {
        let input = self.waiting.remove(&(false, a.stage, a.micro_batch));
        let stage = self.own(a.stage);
        let output = stage.forward(device, batch, a.micro_batch, input)?;
        if a.stage < self.last() {
            self.waiting
                .insert((false, a.stage + 1, a.micro_batch), output);
        } else if self.plan.keeps_losses {
            self.keep_losses(device, a.micro_batch, &output)?;
        }
        Ok(())
    }

    /// Copies the losses of a micro-batch's tokens into those of the step.
    fn keep_losses(
        &mut self,
        device: &D,
        micro_batch: u32,
        losses: &D::Tensor,
    ) -> Result<(), D::Error> {
        let tokens = D::elements(losses);
        let kept = match self.losses.take() {
            Some(kept) => kept,
            None => device.zeros(tokens * self.plan.micro_batches)?,
        };
        let kept = self.losses.insert(kept);
        device.put_tensor(kept, micro_batch as usize * tokens, losses)
    }

    fn backward(
        &mut self,
        device: &D,
        a: Action,
        batch: &D::Batch<'_>,
        half: Half,
    ) -> Result<(), D::Error> {
        let whole = self.is_last_backward(a) || self.plan.zero >= Zero::Z2;
        let pass = Backward {
            half,
            reduces: self.plan.reduces_beside && half != Half::Input && whole,
        };
        let gradient = match half {
            Half::Weight => None,
            _ if a.stage == self.last() => None,
            _ => self.waiting.remove(&(true, a.stage, a.micro_batch)),
        };
        let stage = self.own(a.stage);
        let gradient = stage.backward(device, batch, a.micro_batch, gradient, pass)?;
        if let Some(gradient) = gradient.filter(|_| a.stage > 0) {
            self.waiting
                .insert((true, a.stage - 1, a.micro_batch), gradient);
        }
        Ok(())
    }
}

/// Whether a transfer is of a gradient, the stage at its other end, and its channel; `None` for other actions.
fn transfer(a: Action) -> Option<(bool, u32, u64)> {
    let (backward, other) = match a.kind {
        ActionKind::SendF => (false, a.stage + 1),
        ActionKind::RecvF => (false, a.stage - 1),
        ActionKind::SendB => (true, a.stage - 1),
        ActionKind::RecvB => (true, a.stage + 1),
        _ => return None,
    };
    // The boundary of stages s and s + 1 uses channel 2s for forward and 2s + 1 for backward.
    let boundary = u64::from(a.stage.min(other));
    Some((
        backward,
        other,
        PIPELINE + 2 * boundary + u64::from(backward),
    ))
}
