//! Time that a pass over a block, or an action of a stage, takes on one rank, apart from when it runs.

use std::ops::{Add, AddAssign, Mul};

use catalog::Seconds;

/// Time of a piece of work on the compute stream, by category: kernels, and communication that other streams leave
/// exposed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Time of kernels.
    pub compute: Seconds,
    /// Tensor- and sequence-parallel collectives left exposed.
    pub tp: Seconds,
    /// Context-parallel communication left exposed.
    pub cp: Seconds,
    /// Expert-parallel all-to-all left exposed.
    pub ep: Seconds,
    /// Data-parallel gathers and reductions that block the host.
    pub dp: Seconds,
    /// Time that the host takes to issue kernels and collectives; it runs in parallel to the device.
    pub host: Seconds,
}

impl Work {
    /// Time on the device: kernels and exposed communication.
    #[must_use]
    pub fn device(&self) -> Seconds {
        self.compute + self.tp + self.cp + self.ep + self.dp
    }

    /// Duration of the work: the larger of the device's and the host's time.
    #[must_use]
    pub fn duration(&self) -> Seconds {
        self.device().max(self.host)
    }

    /// Time for which the device waits for the host.
    #[must_use]
    pub fn host_wait(&self) -> Seconds {
        self.duration() - self.device()
    }
}

/// Work of backward, both in one pass and split into two. In one pass it may be shorter than the sum of both halves,
/// because messages of one half overlap with kernels of the other.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
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

impl Add for Work {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            compute: self.compute + other.compute,
            tp: self.tp + other.tp,
            cp: self.cp + other.cp,
            ep: self.ep + other.ep,
            dp: self.dp + other.dp,
            host: self.host + other.host,
        }
    }
}

impl AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Mul<f64> for Work {
    type Output = Self;
    fn mul(self, factor: f64) -> Self {
        Self {
            compute: self.compute * factor,
            tp: self.tp * factor,
            cp: self.cp * factor,
            ep: self.ep * factor,
            dp: self.dp * factor,
            host: self.host * factor,
        }
    }
}

impl AddAssign for Backward {
    fn add_assign(&mut self, other: Self) {
        self.whole += other.whole;
        self.input += other.input;
        self.weight += other.weight;
    }
}

impl Mul<f64> for Backward {
    type Output = Self;
    fn mul(self, factor: f64) -> Self {
        Self {
            whole: self.whole * factor,
            input: self.input * factor,
            weight: self.weight * factor,
        }
    }
}
