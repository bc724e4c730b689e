//! Lower bounds on step time or memory for every batch size at once, without a search for each.

use std::collections::BTreeMap;

use catalog::Bytes;
use costmodel::{CostModel, Scenario};
use plans::Decisions;
use plans::legality::check_layout;
use rayon::prelude::*;

use crate::PlannerError;
use crate::choices::Asked;
use crate::constraints::Constraints;
use crate::layouts::{Layout, meshes, of_any_batch};
use crate::options::{Objective, SearchOptions, limit, share_of};
use crate::space::{decisions, lightest};

/// More micro-batches than any pipeline has ranks.
const MANY: u64 = 1 << 40;

/// Lower bounds of the objective on a cluster, for any batch. The default bounds nothing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rates {
    /// Keys are numbers of sequences that all replicas of some layout take in one micro-batch. Values are lower bounds over such
    /// layouts: on the seconds for these sequences or, where memory is minimised, on the share of memory that states take.
    least: Option<BTreeMap<u64, f64>>,
    objective: Objective,
}

impl Rates {
    /// Bounds for all layouts whose states alone fit.
    pub(crate) fn new(
        costs: &CostModel,
        constraints: &Constraints,
        options: &SearchOptions<'_>,
    ) -> Result<Self, PlannerError> {
        let limit = limit(costs, options);
        let objective = options.objective;
        let asked = Asked::new(costs.scenario(), constraints);
        let mut found = Vec::new();
        meshes(asked, &mut BTreeMap::new(), &mut |mesh| found.push(mesh));
        let layouts: Vec<Layout> = found
            .into_iter()
            .flat_map(|mesh| of_any_batch(asked, mesh))
            .collect();
        let bounds: Vec<Option<(u64, f64)>> = layouts
            .par_iter()
            .map(|layout| bound(costs, asked, layout, limit, objective))
            .collect::<Result<_, _>>()?;
        let mut least: BTreeMap<u64, f64> = BTreeMap::new();
        for (sequences, bound) in bounds.into_iter().flatten() {
            let known = least.entry(sequences).or_insert(bound);
            *known = known.min(bound);
        }
        Ok(Self {
            least: Some(least),
            objective,
        })
    }

    /// A lower bound on the step time, or the share of memory, for a batch; infinite if no layout divides it.
    pub(crate) fn least(&self, batch: u64) -> f64 {
        let Some(least) = &self.least else {
            return 0.0;
        };
        let whole = least
            .iter()
            .filter(|(size, _)| batch.is_multiple_of(**size));
        let bounds = whole.map(|(&size, &bound)| match self.objective {
            Objective::Time => bound * (batch / size) as f64,
            // States are as large for any number of micro-batches.
            Objective::Memory => bound,
        });
        bounds.fold(f64::INFINITY, f64::min)
    }
}

/// Sequences that all replicas of a layout take in one micro-batch, with a lower bound on the
/// seconds (or share of memory) for them. `None` if the layout is illegal or too large.
fn bound(
    costs: &CostModel,
    asked: Asked<'_>,
    layout: &Layout,
    limit: Bytes,
    objective: Objective,
) -> Result<Option<(u64, f64)>, PlannerError> {
    let Scenario {
        model, workload, ..
    } = asked.scenario;
    let shardings = asked.shardings(layout.sharded_over(model));
    let Some(any) = shardings.first() else {
        return Ok(None);
    };
    let base = decisions(asked, layout);
    if check_layout(&any.of(&base), model, workload).is_err() {
        return Ok(None);
    }
    let states = costs.states_floor(&base, &lightest(asked, &shardings, &base))?;
    if states > limit {
        return Ok(None);
    }
    let sequences = layout.dp * layout.micro_batch;
    if objective == Objective::Memory {
        return Ok(Some((sequences, share_of(states, costs.capacity()))));
    }
    // With many micro-batches, passes may run in all ways that a layout has.
    let many = Layout {
        num_micro_batches: MANY,
        ..*layout
    };
    let base = decisions(asked, &many);
    let among = asked.executions(&many).into_iter();
    let among: Vec<Decisions> = among.map(|execution| execution.of(&base)).collect();
    if among.is_empty() {
        return Ok(None);
    }
    Ok(Some((sequences, costs.pace(&among)?.0)))
}
