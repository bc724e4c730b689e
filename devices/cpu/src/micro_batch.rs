//! The input of one pass: a micro-batch.

/// The tokens that one pass works on.
#[derive(Clone, Copy, Debug)]
pub struct MicroBatch<'d> {
    /// This rank's tokens, `[sequences, tokens of this context-parallel rank]`.
    pub ids: &'d [u32],
    /// Labels: for every token, the one that follows it.
    pub labels: &'d [u32],
    /// Index of its first sequence in the global batch.
    pub first_sequence: u64,
    /// Tokens per sequence, over all ranks.
    pub seq_len: u64,
    /// Training step, counted over the run.
    pub step: u32,
    /// Derivative of the batch's loss with respect to one token's loss.
    pub loss_scale: f32,
}
