//! How a runtime may be told to run the passes of a layout: which messages overlap with compute.
//!
//! These choices change what a pass takes, and nothing that a rank holds; a layout is therefore bounded by the least that its
//! blocks take under any of them.

use catalog::Overlap;
use plans::Decisions;

use crate::choices::Asked;
use crate::layouts::Layout;

/// A way to run the passes of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExecutionChoice {
    /// Which messages overlap with compute.
    pub overlap: Overlap,
}

impl ExecutionChoice {
    /// The decisions with passes run in this way.
    #[must_use]
    pub fn of(self, d: &Decisions) -> Decisions {
        Decisions {
            overlap: self.overlap,
            ..d.clone()
        }
    }
}

impl Asked<'_> {
    /// All ways to run the passes of a layout, the runtime's own first unless a constraint forbids it.
    pub(crate) fn executions(&self, layout: &Layout) -> Vec<ExecutionChoice> {
        let overlaps = self.overlaps(layout).into_iter();
        overlaps
            .map(|overlap| ExecutionChoice { overlap })
            .collect()
    }

    /// The overlaps to try in a layout: those that a constraint lists; without one the runtime's own, then the same with
    /// tensor-parallel overlap switched, where the runtime can switch it. Messages that the layout never sends keep the
    /// runtime's own value, so that no strategy counts twice.
    fn overlaps(&self, layout: &Layout) -> Vec<Overlap> {
        let runtime = &self.scenario.runtime;
        let own = runtime.overlap;
        let mut all: Vec<Overlap> = self.constraints.fixed_overlaps().collect();
        if all.is_empty() {
            all.push(own);
            if runtime.space.tensor_parallel_overlap && layout.sequence_parallel {
                let tensor_parallel = !own.tensor_parallel;
                all.push(Overlap {
                    tensor_parallel,
                    ..own
                });
            }
        }
        let sent = |sends: bool, fixed: bool, own: bool| if sends { fixed } else { own };
        for overlap in &mut all {
            let Layout { tp, pp, dp, cp, .. } = *layout;
            overlap.tensor_parallel = sent(tp > 1, overlap.tensor_parallel, own.tensor_parallel);
            overlap.pipeline = sent(pp > 1, overlap.pipeline, own.pipeline);
            overlap.grad_reduce = sent(dp * cp > 1, overlap.grad_reduce, own.grad_reduce);
        }
        let mut distinct: Vec<Overlap> = Vec::with_capacity(all.len());
        for overlap in all {
            if !distinct.contains(&overlap) {
                distinct.push(overlap);
            }
        }
        distinct
    }
}
