//! How many layers a virtual stage recomputes where later pipeline ranks recompute fewer.
//!
//! Under 1F1B an earlier pipeline rank has more micro-batches in flight. If the first rank recomputes some layers to fit,
//! the others need not recompute as many: each may keep what as many passes of single layers save as the first rank keeps.
//! To balance ranks in this way is what AdaPipe does by dynamic programming (Sun et al., ASPLOS 2024).

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

/// Why the first stage, with so many layers, cannot recompute `of_first` and later ones fewer; `falls` says whether later ranks
/// have fewer micro-batches in flight.
pub(crate) fn conflict(of_first: u64, layers: u64, falls: bool) -> Option<&'static str> {
    match of_first {
        _ if !falls => Some(
            "recompute=falling:N needs pp of at least 2 and a schedule whose later ranks have fewer micro-batches in \
             flight (1f1b, interleaved or zb-h1); use recompute=layers:N",
        ),
        n if n == 0 || n >= layers => Some(
            "recompute=falling:N is of at least one layer of the first stage, and not of all; use recompute=none or full",
        ),
        _ => None,
    }
}
