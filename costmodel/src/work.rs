//! What a pass over a block, or an action of a stage, costs on one rank, apart from when it runs.

use std::ops::{Add, AddAssign, Mul};

use catalog::Seconds;

/// Time of a piece of work on the compute stream, by what it is spent on: kernels, and what communication streams
/// leave exposed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Kernels.
    pub compute: Seconds,
    /// Tensor- and sequence-parallel collectives left exposed.
    pub tp: Seconds,
    /// Context-parallel communication left exposed.
    pub cp: Seconds,
    /// Expert-parallel all-to-all left exposed.
    pub ep: Seconds,
    /// Data-parallel gathers and reductions that the host waits for.
    pub dp: Seconds,
    /// Host time to issue the kernels and collectives; runs beside the device.
    pub host: Seconds,
}

impl Work {
    /// Time on the device.
    #[must_use]
    pub fn device(&self) -> Seconds {
        self.compute + self.tp + self.cp + self.ep + self.dp
    }

    /// Duration: the later of the device's and the host's clock.
    #[must_use]
    pub fn duration(&self) -> Seconds {
        self.device().max(self.host)
    }

    /// How long the device waits for the host.
    #[must_use]
    pub fn host_wait(&self) -> Seconds {
        self.duration() - self.device()
    }
}

/// Work of backward: whole, and as two passes of their own. Whole it may be shorter than both, because messages of the
/// one half run beside kernels of the other.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Backward {
    /// Both halves together.
    pub whole: Work,
    /// Towards inputs.
    pub input: Work,
    /// Towards weights.
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
