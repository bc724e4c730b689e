//! ZB-V: two chunks per rank in a V, no bubble at 1F1B's memory when F = I = W and `m ≥ 2p`
//! (Qi et al. 2024, "Pipeline parallelism with controllable memory", §4).

use super::Action;
use super::greedy::Greedy;

pub(super) fn ranks(p: u32, m: u32) -> Vec<Vec<Action>> {
    // A rank may hold 2p chunk passes: the memory of p micro-batches, 1F1B's. The first chunk
    // leaves room for the second, which must run before anything can be released.
    let limits = (0..2 * p)
        .map(|s| if s < p { 2 * p - s } else { u32::MAX })
        .collect();
    Greedy {
        rank_of_stage: (0..p).chain((0..p).rev()).collect(),
        ranks: p,
        micro_batches: m,
        memory_limit: vec![2 * p; p as usize],
        first_stage_limit: limits,
    }
    .schedule()
}
