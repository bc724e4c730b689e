//! How often the ranks of a space's pipelines run and hold each kind of block, from which lower bounds follow.

use std::collections::BTreeMap;
use std::sync::Arc;

use catalog::Seconds;
use costmodel::{CostModel, Shape};
use rayon::prelude::*;

use crate::PlannerError;
use crate::choices::PipelineChoice;
use crate::executions::Allows;
use crate::layouts::Layout;
use crate::space::{SearchSpace, with_pipeline};

/// The shapes of all pipelines of a space, by pipeline ranks and micro-batches.
#[derive(Debug, Default)]
pub(crate) struct Shapes(BTreeMap<(u64, u64), Vec<Vec<Arc<Shape>>>>);

impl Shapes {
    /// Counts for every pipeline of the space, with each choice for its activations.
    pub(crate) fn new(costs: &CostModel, space: &SearchSpace) -> Result<Self, PlannerError> {
        let Some(&any) = space.layouts().first() else {
            return Ok(Self::default());
        };
        let of_sizes = |(pp, num_micro_batches): (u64, u64), pipelines: &[PipelineChoice]| {
            let layout = Layout {
                pp,
                num_micro_batches,
                ..any
            };
            let base = space.decisions(&layout);
            let of_pipeline = |pipeline: &PipelineChoice| {
                let shape =
                    |&activations: &_| costs.shape(&with_pipeline(&base, pipeline, activations));
                pipeline.activations.iter().map(shape).collect()
            };
            let shapes: Result<Vec<Vec<Arc<Shape>>>, _> =
                pipelines.iter().map(of_pipeline).collect();
            Ok(((pp, num_micro_batches), shapes?))
        };
        let all: Vec<_> = space.all_pipelines().iter().collect();
        let all = all.into_par_iter();
        let all = all.map(|(&sizes, pipelines)| of_sizes(sizes, pipelines));
        Ok(Self(all.collect::<Result<_, PlannerError>>()?))
    }

    /// For every pipeline of a layout, its shape with each choice for its activations.
    pub(crate) fn of(&self, layout: &Layout) -> &[Vec<Arc<Shape>>] {
        &self.0[&(layout.pp, layout.num_micro_batches)]
    }

    /// A lower bound on the time of all strategies of a layout.
    pub(crate) fn least_time(
        &self,
        costs: &CostModel,
        space: &SearchSpace,
        layout: &Layout,
    ) -> Result<Seconds, PlannerError> {
        // In this bound no layer is run again, so the first shape of a pipeline stands for all.
        let mut by: BTreeMap<Allows, Vec<&Arc<Shape>>> = BTreeMap::new();
        for (pipeline, shapes) in space.pipelines(layout).iter().zip(self.of(layout)) {
            let modes = pipeline.activations.iter();
            let mut allowed: Vec<Allows> = modes
                .map(|&mode| space.allows(layout, pipeline, mode))
                .collect();
            allowed.sort_unstable();
            allowed.dedup();
            for allows in allowed {
                by.entry(allows).or_default().push(&shapes[0]);
            }
        }
        let mut least = Seconds(f64::INFINITY);
        for (allows, shapes) in by {
            let among = space.executed(layout, allows);
            if !among.is_empty() {
                let shapes = shapes.into_iter().map(Arc::as_ref);
                least = least.min(costs.least_time(&among, space.orders(layout), shapes)?);
            }
        }
        Ok(least)
    }
}
