//! Training systems under which a plan fits, where none fits under the one asked for.

use catalog::Bytes;
use costmodel::{CostModel, Scenario};
use interop::export::Dialect;
use planner::{Constraints, PlannerError, SearchOptions, SearchSpace};
use plans::grammar::written;
use plans::{Candidate, Relaxation};

use crate::inputs::EXECUTOR;
use crate::launch::{Launchable, launches};

/// Most systems that are advised.
const MOST: usize = 2;

/// Advice on other systems: those to which the fastest plans that fit can be exported.
pub(crate) fn fitting(
    asked: &Scenario,
    constraints: &Constraints,
    options: &SearchOptions<'_>,
) -> Vec<Relaxation> {
    let mut names: Vec<&str> = Dialect::ALL.iter().map(|d| d.runtime()).collect();
    names.sort_unstable();
    names.dedup();
    names.retain(|name| *name != asked.runtime.name && *name != EXECUTOR);
    let runtimes = names.into_iter().map(catalog::load::runtime);
    let scenarios = runtimes.flatten().map(|runtime| Scenario {
        model: asked.model.clone().trained_under(&runtime),
        runtime,
        ..asked.clone()
    });
    // A system that cannot train the model at all is no advice.
    let best = |of: Scenario| best(&of, constraints, options).ok()?.map(|best| (of, best));
    let mut found: Vec<(Scenario, Candidate)> = scenarios.filter_map(best).collect();
    found.sort_by(|(_, a), (_, b)| (a.prediction.step_time.0).total_cmp(&b.prediction.step_time.0));
    let advice = found.iter().take(MOST).map(|(of, best)| Relaxation {
        says: format!(
            "under {} {} would fit",
            of.runtime.name,
            written(&best.strategy, &of.runtime)
        ),
        instead: Some(("runtime", of.runtime.name.clone())),
    });
    advice.collect()
}

/// The best plan under a scenario's runtime, if one fits that can be exported.
fn best(
    of: &Scenario,
    constraints: &Constraints,
    options: &SearchOptions<'_>,
) -> Result<Option<Candidate>, PlannerError> {
    let limit = options.risk.map_or(Bytes(u64::MAX), |risk| of.limit(risk));
    if costmodel::least_states(of)?.0 / of.workload.gpus > limit.0 {
        return Ok(None);
    }
    let costs = CostModel::new(of.clone())?;
    let space = SearchSpace::new(of, constraints);
    let options = SearchOptions { top: 1, ..*options };
    let found = planner::search(&costs, &space, &options, &|_| {})?;
    let best = found.top.into_iter().next();
    Ok(best.filter(|best| {
        let plan = Launchable {
            scenario: of,
            strategy: &best.strategy,
            plan: "",
        };
        !launches(plan).is_empty()
    }))
}
