//! What a logged number measures.

use super::log::LoggedStep;

/// What a number of a step measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quantity {
    Step,
    Seconds,
    Milliseconds,
    /// Milliseconds since the run began.
    Elapsed,
    TokensPerGpu,
    SequencesPerGpu,
    Sequences,
    Tflops,
    GlobalBatch,
    ReservedBytes,
    ReservedGib,
    /// Wall time in seconds, from any origin: it is of no step alone.
    WallTime,
}

impl Quantity {
    /// Notes a number as what a step measured.
    pub(super) fn set(self, step: &mut LoggedStep, value: f64) {
        match self {
            Self::Step => step.step = value as u64,
            Self::Seconds => step.seconds = Some(value),
            Self::Milliseconds => step.seconds = Some(value / 1e3),
            Self::Elapsed => step.elapsed = Some(value / 1e3),
            Self::TokensPerGpu => step.tokens_per_s_per_gpu = Some(value),
            Self::SequencesPerGpu => step.sequences_per_s_per_gpu = Some(value),
            Self::Sequences => step.sequences_per_s = Some(value),
            Self::Tflops => step.tflops_per_gpu = Some(value),
            Self::GlobalBatch => step.global_batch = Some(value as u64),
            Self::ReservedBytes => step.reserved = Some(value as u64),
            Self::ReservedGib => step.reserved = Some((value * 1024f64.powi(3)) as u64),
            Self::WallTime => {}
        }
    }
}
