//! Pipeline schedules as data: per rank, the order of forward and backward actions.

/// What an action does. Letters are PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
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
    /// All-gather a stage's parameters (ZeRO-3, or ZeRO-1 after the step).
    Unshard,
    /// Free a stage's gathered parameters.
    Reshard,
    /// Reduce a stage's gradients over data parallelism.
    ReduceGrad,
    /// Gradient norm, clipping and the optimizer step of the rank (stage and micro-batch are 0).
    Optim,
}

/// One entry of a rank's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// What to do.
    pub kind: ActionKind,
    /// Virtual stage in model order, `0..pp · vpp`.
    pub stage: u32,
    /// Micro-batch, `0..num_micro_batches`.
    pub micro_batch: u32,
}

/// Per-rank action lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Which rank holds each virtual stage, in model order.
    pub rank_of_stage: Vec<u32>,
    /// Action order of every pipeline rank.
    pub ranks: Vec<Vec<Action>>,
}
