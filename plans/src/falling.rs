//! How many layers a virtual stage recomputes where later pipeline ranks recompute fewer.
//!
//! Under 1F1B an earlier pipeline rank has more micro-batches in flight. If the first rank must
//! recompute layers to fit, later ones can recompute fewer: each may keep the activations of as
//! many single-layer passes. AdaPipe does so by dynamic programming (Sun et al., ASPLOS 2024).

/// Number of layers that a virtual stage recomputes if the first stage recomputes `of_first`. `stages` are the layers of all
/// stages, `in_flight` says how many passes of a stage's pipeline rank are in flight.
pub(crate) fn recomputed(
    of_first: u64,
    stages: &[u64],
    stage: usize,
    in_flight: impl Fn(usize) -> u64,
) -> u64 {
    // Passes of single layers whose activations the first rank keeps.
    let kept = stages[0].saturating_sub(of_first) * in_flight(0);
    stages[stage].saturating_sub(kept / in_flight(stage))
}
