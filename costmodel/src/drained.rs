//! How long a GPU idles in the passes of a stage if the host waits for it before and after each pass.
//!
//! Such a host issues no kernels of the next pass while the GPU still works on this one. So the long kernels of a head at the end of a
//! pass come on top of the time that the host takes to issue the layers before them.

use catalog::Seconds;

use crate::block_cost::BlockCost;
use crate::stage::{Run, StageWork};
use crate::work::Work;

/// Adds to a stage's passes the time for which the GPU idles in them ([`Work::starved`]).
pub(crate) fn wait(runs: &[Run], stage: &mut StageWork) {
    let all = |run: &Run, work: Work| work * run.count as f64;
    let backward = |of: fn(&BlockCost) -> Work| {
        let blocks = runs.iter().rev();
        idle(blocks.map(|run| all(run, of(&run.cost))))
    };
    let halves = &mut stage.backward;
    halves.whole.starved += backward(|cost| cost.recompute + cost.backward.whole);
    halves.input.starved += backward(|cost| cost.recompute + cost.backward.input);
    halves.weight.starved += backward(|cost| cost.backward.weight);
    stage.forward.starved += idle(runs.iter().map(|run| all(run, run.cost.forward)));
}

/// Time for which the GPU idles while it runs these pieces of work in order, if host and GPU begin at the same time. The kernels of one
/// piece are alike: the GPU ends with the host's last kernel or later.
fn idle(pieces: impl Iterator<Item = Work>) -> Seconds {
    let [mut issued, mut busy, mut end] = [Seconds(0.0); 3];
    for work in pieces {
        let device = work.device() + work.starved;
        end = (end + device).max(issued + work.duration());
        issued += work.host;
        busy += device;
    }
    end - busy
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(host: f64, device: f64) -> Work {
        Work {
            compute: Seconds(device),
            host: Seconds(host),
            ..Work::default()
        }
    }

    #[test]
    fn a_gpu_idles_until_long_kernels_are_issued() {
        for (pieces, expected) in [
            // The GPU has always more to do than the host has issued.
            (vec![work(1.0, 3.0), work(2.0, 4.0)], 0.0),
            // The host takes longer throughout.
            (vec![work(3.0, 1.0), work(4.0, 2.0)], 4.0),
            // Long kernels at the end begin only when they are issued.
            (vec![work(6.0, 2.0), work(1.0, 5.0)], 4.0),
            // At the start they give the host a lead, which later kernels use.
            (vec![work(1.0, 5.0), work(6.0, 2.0)], 0.0),
        ] {
            let idle = idle(pieces.iter().copied());
            assert_eq!(idle, Seconds(expected), "{pieces:?}");
        }
    }
}
