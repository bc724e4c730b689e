//! Time that a pass over a block, or an action of a stage, takes on one rank, apart from when it runs.

use catalog::Seconds;
use derive_more::{Add, AddAssign, Mul};

/// Time of a piece of work on the compute stream, by category: kernels, and communication that other streams leave
/// exposed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Add, AddAssign, Mul)]
pub struct Work {
    /// Time of kernels.
    pub compute: Seconds,
    /// Exposed time of tensor- and sequence-parallel collectives.
    pub tp: Seconds,
    /// Exposed time of context-parallel communication.
    pub cp: Seconds,
    /// Exposed time of messages to experts and back.
    pub ep: Seconds,
    /// Data-parallel gathers and reductions that block the host.
    pub dp: Seconds,
    /// Time that the host takes to issue kernels and collectives; it runs in parallel to the device.
    pub host: Seconds,
    /// Time for which the device idles because the host has waited for it, and must first issue the next kernels.
    pub starved: Seconds,
    /// Time for which the rank's network card is busy with messages of tensor, context and expert parallelism. It runs in parallel to
    /// the device.
    pub card: Seconds,
}

impl Work {
    /// Time of kernels and exposed communication.
    #[must_use]
    pub fn device(&self) -> Seconds {
        self.compute + self.tp + self.cp + self.ep + self.dp
    }

    /// Duration of the work: the host's time, or the device's with [`Self::starved`], whichever is larger.
    #[must_use]
    pub fn duration(&self) -> Seconds {
        (self.device() + self.starved).max(self.host)
    }

    /// Time for which the device waits for the host.
    #[must_use]
    pub fn host_wait(&self) -> Seconds {
        self.duration() - self.device()
    }
}

/// Work of backward, both in one pass and split into two. In one pass it may be shorter than the sum of both halves,
/// because messages of one half overlap with kernels of the other. If the runtime has no schedule that splits backward,
/// `input` is all of it and `weight` takes no time.
#[derive(Clone, Copy, Debug, Default, PartialEq, AddAssign, Mul)]
pub struct Backward {
    /// Backward in one pass.
    pub whole: Work,
    /// The half that computes gradients of inputs.
    pub input: Work,
    /// The half that computes gradients of weights.
    pub weight: Work,
}

impl Backward {
    /// Adds work that belongs to the input half.
    pub(crate) fn add_input(&mut self, work: Work) {
        self.whole += work;
        self.input += work;
    }

    /// Adds work that belongs to the weight half.
    pub(crate) fn add_weight(&mut self, work: Work) {
        self.whole += work;
        self.weight += work;
    }
}
