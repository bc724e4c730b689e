//! The least time that a cluster takes for a batch of any size, without searching each.

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
use crate::space::{decisions, lightest};

/// More micro-batches than any pipeline has ranks.
const MANY: u64 = 1 << 40;

/// Lower bounds on the step time of a cluster, by how many sequences its replicas take at once. The default is no bound.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rates {
    /// For every number of sequences that some layout has in one micro-batch of all replicas: the least seconds for them.
    pace: Option<BTreeMap<u64, f64>>,
}

impl Rates {
    /// Bounds for all layouts whose states alone stay within `limit`.
    pub(crate) fn new(
        costs: &CostModel,
        constraints: &Constraints,
        limit: Bytes,
    ) -> Result<Self, PlannerError> {
        let asked = Asked {
            scenario: costs.scenario(),
            constraints,
            present: None,
        };
        let mut found = Vec::new();
        meshes(asked, &mut BTreeMap::new(), &mut |mesh| found.push(mesh));
        let layouts: Vec<Layout> = found
            .into_iter()
            .flat_map(|mesh| of_any_batch(asked, mesh))
            .collect();
        let paces: Vec<Option<(u64, f64)>> = layouts
            .par_iter()
            .map(|layout| pace(costs, asked, layout, limit))
            .collect::<Result<_, _>>()?;
        let mut pace: BTreeMap<u64, f64> = BTreeMap::new();
        for (sequences, seconds) in paces.into_iter().flatten() {
            let known = pace.entry(sequences).or_insert(seconds);
            *known = known.min(seconds);
        }
        Ok(Self { pace: Some(pace) })
    }

    /// A lower bound on the step time for a batch; infinite if no layout divides it.
    pub(crate) fn least_time(&self, batch: u64) -> f64 {
        let Some(pace) = &self.pace else {
            return 0.0;
        };
        let whole = pace.iter().filter(|(size, _)| batch.is_multiple_of(**size));
        let times = whole.map(|(&size, &pace)| pace * (batch / size) as f64);
        times.fold(f64::INFINITY, f64::min)
    }
}

/// The sequences of one micro-batch of all replicas under a layout, and the least time for them; `None` if no strategy has
/// the layout.
fn pace(
    costs: &CostModel,
    asked: Asked<'_>,
    layout: &Layout,
    limit: Bytes,
) -> Result<Option<(u64, f64)>, PlannerError> {
    let Scenario {
        model, workload, ..
    } = asked.scenario;
    let shardings = asked.shardings(layout.dp, layout.cp);
    let Some(any) = shardings.first() else {
        return Ok(None);
    };
    let base = decisions(asked, layout);
    if check_layout(&any.of(&base), model, workload).is_err() {
        return Ok(None);
    }
    if costs.states_floor(&base, &lightest(asked, &shardings, &base))? > limit {
        return Ok(None);
    }
    let sequences = layout.dp * layout.micro_batch;
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
