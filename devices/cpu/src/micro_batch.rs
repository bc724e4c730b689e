//! What one pass works on.

/// The tokens that one pass works on.
#[derive(Clone, Copy, Debug)]
pub struct MicroBatch<'d> {
    /// This rank's tokens, `[sequences, tokens of this context-parallel rank]`.
    pub ids: &'d [u32],
    /// The tokens that follow them.
    pub labels: &'d [u32],
    /// Index of its first sequence in the global batch.
    pub first_sequence: u64,
    /// Tokens per sequence, over all ranks.
    pub seq_len: u64,
    /// Step of training.
    pub step: u32,
    /// Gradient of the batch's loss by one token's loss.
    pub loss_scale: f32,
}
