//! How long a step waits for replicas whose sequences hold longer documents.
//!
//! Sequences have equally many tokens, but attention within documents takes a time that grows with the squares of their
//! lengths. So micro-batches take different times, and whatever waits for several of them waits for the longest. The times
//! of micro-batches are taken as normally distributed with the mean and deviation of their price, and the longest of `n`
//! as the expected largest of `n` normal variables.
//!
//! - *Within a pipeline* a stage waits for its neighbours, so the `p` micro-batches that are at work at one time advance
//!   at the pace of the longest. Simulated 1F1B pipelines of 4 to 16 ranks with 4 to 8 micro-batches per rank lose 0.75 to
//!   0.94 of what this says, and several replicas of them 0.92 to 1.02.
//! - *Within a micro-batch*, ranks that exchange experts' tokens, gather parameters for every pass or reduce gradients
//!   after it wait for each other.
//! - *At the end of a step* the other replicas wait for the slowest.

use catalog::{Seconds, elementary};
use plans::{Decisions, Zero};

use crate::assemble::Assembled;
use crate::memo::Memo;
use crate::spread::Spread;

/// Expected value and variance of the largest of several normal variables of mean 0 and deviation 1, by their number.
pub(crate) type Largest = Memo<u64, [f64; 2]>;

/// The expected time for which a step waits. 0 where all micro-batches take the same time.
pub(crate) fn waiting(d: &Decisions, assembled: &Assembled, largest: &Largest) -> Seconds {
    let mut runs = assembled.classes.iter().flat_map(|class| &class.runs);
    if runs.all(|run| run.cost.spread.deviation.0 == 0.0) {
        return Seconds(0.0);
    }
    let mut of_rank = vec![Spread::default(); d.pp as usize];
    for (stage, &rank) in assembled.rank_of_stage().iter().enumerate() {
        for run in assembled.runs(stage) {
            of_rank[rank as usize] += run.cost.spread * run.count as f64;
        }
    }
    let most = |of: fn(&Spread) -> Seconds| of_rank.iter().map(of).fold(Seconds(0.0), Seconds::max);
    let deviation = most(|spread| spread.deviation);
    let of = |count| of_count(count, largest);
    let micro_batches = d.num_micro_batches as f64;
    let at_once = d.pp.min(d.num_micro_batches);
    let together = replicas_in_step(d);
    let [mean, variance] = of(at_once * together);
    let [slowest, _] = of(d.dp() / together);
    let of_step = (micro_batches * at_once as f64 * variance).sqrt();
    let waits = deviation * (micro_batches * mean + of_step * slowest);
    waits.min(most(|spread| spread.most) * micro_batches)
}

/// Expected value and variance of the largest of `count` normal variables, from a cache.
pub(crate) fn of_count(count: u64, largest: &Largest) -> [f64; 2] {
    match largest.find(&count) {
        Some(known) => *known,
        None => *largest.insert(count, largest_of(count)),
    }
}

/// How many replicas wait for each other in every micro-batch.
pub(crate) fn replicas_in_step(d: &Decisions) -> u64 {
    let sharded = match d.zero {
        Zero::Z2 | Zero::Z3 => d.dp_shard,
        Zero::Z0 | Zero::Z1 => 1,
    };
    // Ranks that exchange tokens; those of one replica have the same documents.
    let exchanging = (d.ep * d.etp).div_ceil(d.tp * d.cp);
    sharded.max(exchanging).clamp(1, d.dp())
}

/// Expected value and variance of the largest of `count` normal variables, by Simpson's rule.
fn largest_of(count: u64) -> [f64; 2] {
    // The density beyond this many deviations does not matter, even for the most ranks possible.
    const END: u32 = 8;
    const STEPS: u32 = 512;
    let end = f64::from(END);
    let width = 2.0 * end / f64::from(STEPS);
    let others = count.saturating_sub(1) as f64;
    let mut moments = [0.0; 3];
    for step in 0..=STEPS {
        let weight = f64::from(match step {
            0 | STEPS => 1,
            odd if odd % 2 == 1 => 4,
            _ => 2,
        });
        let x = width * f64::from(step) - end;
        let density = elementary::exp(-x * x / 2.0)
            * elementary::powf(elementary::normal_below(x), others)
            * weight;
        for (moment, power) in moments.iter_mut().zip([1.0, x, x * x]) {
            *moment += density * power;
        }
    }
    let [all, first, second] = moments;
    let mean = first / all;
    [mean, (second / all - mean * mean).max(0.0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn largest_of_normal_variables() {
        // Harter 1961, table of expected values of normal order statistics; variances from Teichroew 1956.
        for (count, mean, variance) in [
            (1, 0.0, 1.0),
            (2, 0.564_189_583_5, 0.681_690_113_8),
            (3, 0.846_284_375_3, 0.559_467_203_8),
            (10, 1.538_752_73, 0.344_343_8),
            (100, 2.507_59, 0.184_1),
        ] {
            let [found, spread] = largest_of(count);
            assert!((found - mean).abs() < 1e-4, "{count}: {found}");
            assert!((spread - variance).abs() < 1e-3, "{count}: {spread}");
        }
        let [mean, variance] = largest_of(1 << 21);
        assert!(
            (5.0..5.4).contains(&mean) && variance > 0.0,
            "{mean} {variance}"
        );
    }
}
