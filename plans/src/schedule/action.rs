//! The actions of a rank in a step: passes, messages, and work on its states.

/// The kind of an action. Letters are PyTorch's.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub enum ActionKind {
    /// Forward.
    F,
    /// Full backward: gradients of inputs and weights.
    B,
    /// Gradients of inputs only.
    I,
    /// Gradients of weights only.
    W,
    /// Receive a forward activation from the previous stage.
    RecvF,
    /// Send a forward activation to the next stage.
    SendF,
    /// Receive an output gradient from the next stage.
    RecvB,
    /// Send an input gradient to the previous stage.
    SendB,
    /// All-gather a stage's parameters: for passes under ZeRO-3, once a step under ZeRO-1 and 2.
    Unshard,
    /// Free a stage's gathered parameters.
    Reshard,
    /// Reduce a stage's gradients over data parallelism.
    ReduceGrad,
    /// Gradient norm, clipping and the optimizer step of the rank (stage and micro-batch are 0).
    Optim,
}

/// One entry of a rank's action list.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub struct Action {
    /// The kind of the action.
    pub kind: ActionKind,
    /// Virtual stage in model order, `0..pp · vpp`.
    pub stage: u32,
    /// Micro-batch, `0..num_micro_batches`.
    pub micro_batch: u32,
}

impl ActionKind {
    /// Whether it computes: a forward, a backward, or half of a backward.
    #[must_use]
    pub fn is_pass(self) -> bool {
        matches!(self, Self::F | Self::B | Self::I | Self::W)
    }

    /// Name of the kind in timelines and explanations.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F => "F",
            Self::B => "B",
            Self::I => "I",
            Self::W => "W",
            Self::RecvF => "recv F",
            Self::SendF => "send F",
            Self::RecvB => "recv B",
            Self::SendB => "send B",
            Self::Unshard => "gather parameters",
            Self::Reshard => "free parameters",
            Self::ReduceGrad => "reduce gradients",
            Self::Optim => "optimizer",
        }
    }
}

impl std::fmt::Display for Action {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = self.kind.name();
        if self.kind == ActionKind::Optim {
            return f.write_str(name);
        }
        write!(f, "{name} s{} m{}", self.stage, self.micro_batch)
    }
}

/// Shorthand to make an action.
pub(crate) fn action(kind: ActionKind, stage: u32, micro_batch: u32) -> Action {
    Action {
        kind,
        stage,
        micro_batch,
    }
}
