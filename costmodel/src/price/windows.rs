//! The work of causal attention with a window, as a share of the work without one.

use catalog::Window;
use dtensor::AttentionShape;

/// The work of causal attention with a window, divided by its work without one. Work is counted in pairs of a query and a key that the
/// query attends to. The result is 1 for attention without a window.
///
/// Context parallelism cuts the queries of a sequence into `2·cp` equal parts. Rank `r` has two of them: part `r` counted from the front
/// and part `r` counted from the back (zig-zag). With a window, queries near the front attend to fewer keys than a window holds and all
/// others to a whole window, so ranks have unequal work. The slowest rank decides, so the result is that rank's.
#[must_use]
pub(crate) fn share(shape: &AttentionShape) -> f64 {
    let Some(window) = shape.window else {
        return 1.0;
    };
    // Parts of documents are rounded up.
    let queries = shape.q_len.max(1);
    let ranks = (shape.kv_len + queries / 2) / queries;
    let most = |window: Window| {
        if ranks <= 1 {
            return of_first(window, shape.kv_len);
        }
        let parts = 2 * ranks;
        let at = |part: u64| of_first(window, part * shape.kv_len / parts);
        let of_part = |part: u64| at(part + 1) - at(part);
        let of_rank = |rank: u64| of_part(rank) + of_part(parts - 1 - rank);
        (0..ranks).map(of_rank).fold(0.0, f64::max)
    };
    (most(window) / most(Window::Sliding(shape.kv_len))).min(1.0)
}

/// Number of pairs of a query and a key that the query attends to, over the first `queries` queries of a sequence.
fn of_first(window: Window, queries: u64) -> f64 {
    queries as f64 * window.mean(queries)
}

#[cfg(test)]
mod tests {
    use Window::{Chunk, Sliding};

    use super::*;

    /// The same share, found by counting the keys of every query.
    fn counted(shape: &AttentionShape, window: Window) -> f64 {
        let part = (shape.q_len / 2) as usize;
        let pairs = |window: Window| {
            let seen = |query: u64| query + 1 - window.first(query);
            let all: Vec<u64> = (0..shape.kv_len).map(seen).collect();
            let of_parts: Vec<u64> = all.chunks(part).map(|part| part.iter().sum()).collect();
            let opposite = of_parts.iter().zip(of_parts.iter().rev());
            opposite.map(|(front, back)| front + back).max()
        };
        let [some, all] = [window, Sliding(shape.kv_len)].map(pairs);
        some.expect("parts") as f64 / all.expect("parts") as f64
    }

    #[test]
    fn the_share_is_that_of_the_rank_with_most_pairs() {
        for ranks in [1, 2, 4] {
            for window in [1, 3, 8, 20, 24, 47, 48, 100].map(|n| [Sliding(n), Chunk(n)]) {
                for window in window {
                    let shape = AttentionShape {
                        batch: 1,
                        heads: 1,
                        kv_heads: 1,
                        q_len: 48 / ranks,
                        kv_len: 48,
                        qk_dim: 64,
                        v_dim: 64,
                        causal: true,
                        window: Some(window),
                    };
                    let [ours, theirs] = [share(&shape), counted(&shape, window)];
                    assert!(
                        (ours - theirs).abs() < 1e-12,
                        "{window:?} on {ranks} ranks: {ours}, not {theirs}"
                    );
                }
            }
        }
    }
}
