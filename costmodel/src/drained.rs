//! How long a GPU idles in a pass of a stage if the host has waited for the GPU before that pass.
//!
//! A host that waits issues no kernels of a pass while the GPU still works on the pass before. So when the pass begins, the GPU has
//! nothing to do until the host issues its kernels. If the host takes longer to issue layers than the GPU to run them, the long kernels
//! of a head at the end of the pass come on top of the host's time.

use catalog::runtime::Rewrite;
use catalog::{ScheduleKind, Seconds, Zero};
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
        let reduces = matches!(d.zero, Zero::Z2 | Zero::Z3) && d.dp() > 1 && d.overlap.grad_reduce;
        if has(Rewrite::WaitAfterPasses) {
            Some(Self::Passes)
        } else if d.pp > 1 {
            let transfers = has(Rewrite::WaitAfterTransfers);
            let sends = transfers && !messages::overlap_passes(scenario, d);
            // The last stage sends nothing between its passes of a micro-batch, unless all forward passes come first.
            let follows = last && d.schedule != ScheduleKind::GPipe;
            sends.then_some(if follows {
                Self::MicroBatches
            } else {
                Self::Passes
            })
        } else {
            let waits = has(Rewrite::WaitAfterMicroBatches);
            let waits = waits || reduces && has(Rewrite::WaitForReductions);
            waits.then_some(Self::MicroBatches)
        }
    }
}

/// Adds to a stage's passes the time for which the GPU idles in them ([`Work::starved`]), and tells how it is divided among blocks.
pub(crate) fn wait(scenario: &Scenario, d: &Decisions, runs: &[Run], stage: &mut StageWork) {
    let has_head = |run: &Run| run.cost.key.class == BlockClass::Head;
    let Some(waits) = Waits::of(scenario, d, runs.iter().any(has_head)) else {
        return;
    };
    let pieces = pieces(runs, |cost| cost.forward, stage.forward);
    let forward = Issued::ahead(Seconds(0.0)).then(&pieces);
    stage.forward.starved += forward.idle();
    let lead = match waits {
        Waits::Passes => Seconds(0.0),
        Waits::MicroBatches => forward.lead(),
    };
    let (recompute, halves) = (stage.recompute, &mut stage.backward);
    let whole = in_backward(
        runs,
        |cost| cost.backward.whole,
        recompute,
        &mut halves.whole,
        lead,
    );
    in_backward(
        runs,
        |cost| cost.backward.input,
        recompute,
        &mut halves.input,
        lead,
    );
    let shares = forward.shares().zip(whole.shares().rev());
    for ((layer, run), (forward, backward)) in stage.layers.iter_mut().zip(runs).zip(shares) {
        layer.forward_share = forward / run.count as f64;
        layer.backward_share = backward / run.count as f64;
    }
}

/// Adds to a backward pass the time for which the GPU idles in it, if the host has this lead before it.
fn in_backward(
    runs: &[Run],
    of: fn(&BlockCost) -> Work,
    recompute: Work,
    pass: &mut Work,
    lead: Seconds,
) -> Issued {
    let again = pieces(runs, |cost| cost.recompute, recompute);
    let own = pieces(runs, of, *pass);
    let pieces: Vec<Work> = own
        .into_iter()
        .zip(again)
        .map(|(own, again)| again + own)
        .rev()
        .collect();
    let issued = Issued::ahead(lead).then(&pieces);
    pass.starved += issued.idle();
    pass.host = Seconds(0.0).max(pass.host - lead);
    issued
}

/// The work of each row of blocks in a pass that is `whole` in all. What a pass has in addition to
/// its blocks, such as casts of weights, is divided evenly among layers; in a stage without layers,
/// among all blocks.
fn pieces(runs: &[Run], of: fn(&BlockCost) -> Work, whole: Work) -> Vec<Work> {
    let is_layer = |run: &Run| matches!(run.cost.key.class, BlockClass::Layer(_));
    let any = runs.iter().any(is_layer);
    let shared = |run: &Run| if any && !is_layer(run) { 0 } else { run.count };
    let sharing: u64 = runs.iter().map(shared).sum();
    let blocks = |run: &Run| of(&run.cost) * run.count as f64;
    let alone = runs
        .iter()
        .fold(Work::default(), |sum, run| sum + blocks(run));
    let beside = whole + alone * -1.0;
    let piece = |run: &Run| blocks(run) + beside * (shared(run) as f64 / sharing as f64);
    runs.iter().map(piece).collect()
}

/// What host and GPU have done since a pass began on the GPU.
#[derive(Clone, Debug)]
struct Issued {
    /// When the host has issued everything. Negative if it has issued it before the pass began.
    host: Seconds,
    /// Time for which the GPU has worked.
    busy: Seconds,
    /// When the GPU has done each piece of work.
    ends: Vec<Seconds>,
}

impl Issued {
    /// A pass before which the host has this lead.
    fn ahead(lead: Seconds) -> Self {
        Self {
            host: Seconds(0.0) - lead,
            busy: Seconds(0.0),
            ends: Vec::new(),
        }
    }

    /// After these pieces of work, in order. The kernels of one piece are alike, so the GPU ends with the host's last of them or later.
    fn then(mut self, pieces: &[Work]) -> Self {
        for work in pieces {
            let device = work.device() + work.starved;
            let end = (self.end() + device).max(self.host + work.duration());
            self.ends.push(end);
            self.host += work.host;
            self.busy += device;
        }
        self
    }

    /// When the GPU has done everything.
    fn end(&self) -> Seconds {
        self.ends.last().copied().unwrap_or_default()
    }

    /// Time for which the GPU has idled.
    fn idle(&self) -> Seconds {
        self.end() - self.busy
    }

    /// By how much the host is ahead of the GPU.
    fn lead(&self) -> Seconds {
        self.end() - self.host
    }

    /// Of each piece of work, its share of the pass's time.
    fn shares(&self) -> impl DoubleEndedIterator<Item = f64> {
        let began = std::iter::once(Seconds(0.0)).chain(self.ends.iter().copied());
        let began: Vec<Seconds> = began.take(self.ends.len()).collect();
        let whole = self.end().0;
        let lasted = began.into_iter().zip(self.ends.clone());
        lasted.map(move |(began, end)| {
            if whole > 0.0 {
                (end - began).0 / whole
            } else {
                0.0
            }
        })
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
            let passed = Issued::ahead(Seconds(lead)).then(&pieces);
            let found = (passed.idle(), passed.lead());
            assert_eq!(found, (Seconds(idle), Seconds(ahead)), "{lead} {pieces:?}");
        }
    }
}
