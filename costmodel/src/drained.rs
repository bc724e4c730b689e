//! How long a GPU idles in the passes of a stage if the host waits for it before them.
//!
//! Such a host issues no kernels of the next pass while the GPU still works on this one. So the long kernels of a head at the end of a
//! pass come on top of the time that the host takes to issue the layers before them.

use catalog::Seconds;
use catalog::runtime::Rewrite;
use models::BlockClass;
use plans::Decisions;

use crate::Scenario;
use crate::block_cost::BlockCost;
use crate::messages;
use crate::stage::{Run, StageWork};
use crate::work::Work;

/// When the host waits until the GPU has done all that was issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waits {
    /// Before every pass.
    Passes,
    /// Before every forward pass. The backward pass of the same micro-batch follows at once.
    MicroBatches,
}

impl Waits {
    /// When the host of a stage waits; `None` if it never does. `last` tells whether the stage ends with the head.
    fn of(scenario: &Scenario, d: &Decisions, last: bool) -> Option<Self> {
        let has = |rewrite| scenario.runtime.rewrites.contains(&rewrite);
        let pipelined = d.pp > 1;
        if has(Rewrite::WaitAfterPasses) {
            Some(Self::Passes)
        } else if pipelined {
            let transfers = has(Rewrite::WaitAfterTransfers);
            let sends = transfers && !messages::overlap_passes(scenario, d);
            // The last stage sends nothing between its passes of a micro-batch.
            sends.then_some(if last {
                Self::MicroBatches
            } else {
                Self::Passes
            })
        } else {
            has(Rewrite::WaitAfterMicroBatches).then_some(Self::MicroBatches)
        }
    }
}

/// Adds to a stage's passes the time for which the GPU idles in them ([`Work::starved`]).
pub(crate) fn wait(scenario: &Scenario, d: &Decisions, runs: &[Run], stage: &mut StageWork) {
    let has_head = |run: &Run| run.cost.key.class == BlockClass::Head;
    let Some(waits) = Waits::of(scenario, d, runs.iter().any(has_head)) else {
        return;
    };
    let all = |run: &Run, work: Work| work * run.count as f64;
    let forward = Issued::default().then(runs.iter().map(|run| all(run, run.cost.forward)));
    stage.forward.starved += forward.idle();
    let before = match waits {
        Waits::Passes => Seconds(0.0),
        Waits::MicroBatches => forward.lead(),
    };
    let backward = |of: fn(&BlockCost) -> Work| {
        let blocks = runs.iter().rev().map(|run| all(run, of(&run.cost)));
        Issued::ahead(before).then(blocks)
    };
    let halves = &mut stage.backward;
    for (half, passed) in [
        (
            &mut halves.whole,
            backward(|cost| cost.recompute + cost.backward.whole),
        ),
        (
            &mut halves.input,
            backward(|cost| cost.recompute + cost.backward.input),
        ),
    ] {
        half.starved += passed.idle();
        half.host = Seconds(0.0).max(half.host - before);
    }
}

/// What host and GPU have done since a pass began on the GPU.
#[derive(Clone, Copy, Debug, Default)]
struct Issued {
    /// When the host has issued everything. Negative if it has issued it before the pass began.
    host: Seconds,
    /// Time for which the GPU has worked.
    busy: Seconds,
    /// When the GPU has done everything.
    end: Seconds,
}

impl Issued {
    /// A pass before which the host has this lead.
    fn ahead(lead: Seconds) -> Self {
        Self {
            host: Seconds(0.0) - lead,
            ..Self::default()
        }
    }

    /// After these pieces of work, in order. The kernels of one piece are alike, so the GPU ends with the host's last of them or later.
    fn then(self, pieces: impl Iterator<Item = Work>) -> Self {
        pieces.fold(self, |before, work| {
            let device = work.device() + work.starved;
            Self {
                host: before.host + work.host,
                busy: before.busy + device,
                end: (before.end + device).max(before.host + work.duration()),
            }
        })
    }

    /// Time for which the GPU has idled.
    fn idle(self) -> Seconds {
        self.end - self.busy
    }

    /// By how much the host is ahead of the GPU.
    fn lead(self) -> Seconds {
        self.end - self.host
    }
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
        for (lead, pieces, idle, ahead) in [
            // The GPU has always more to do than the host has issued.
            (0.0, [work(1.0, 3.0), work(2.0, 4.0)], 0.0, 4.0),
            // The host takes longer throughout.
            (0.0, [work(3.0, 1.0), work(4.0, 2.0)], 4.0, 0.0),
            // Long kernels at the end begin only when they are issued.
            (0.0, [work(6.0, 2.0), work(1.0, 5.0)], 4.0, 4.0),
            // At the start they give the host a lead, which later kernels use.
            (0.0, [work(1.0, 5.0), work(6.0, 2.0)], 0.0, 0.0),
            // So does a lead from the pass before.
            (3.0, [work(3.0, 1.0), work(4.0, 2.0)], 1.0, 0.0),
            (9.0, [work(3.0, 1.0), work(4.0, 2.0)], 0.0, 5.0),
        ] {
            let passed = Issued::ahead(Seconds(lead)).then(pieces.into_iter());
            let found = (passed.idle(), passed.lead());
            assert_eq!(found, (Seconds(idle), Seconds(ahead)), "{lead} {pieces:?}");
        }
    }
}
