//! The plan file of a strategy.

use costmodel::{CostModel, Scenario};
use plans::plan_file::{PlannedFor, ShardingFile};
use plans::{PlanFile, Prediction, Strategy};
use reports::terminal::Ground;

use catalog::Mistake;

use crate::error::AnswerError;
use crate::inputs::Inputs;

/// Makes the plan file of a strategy.
pub fn file(
    inputs: &Inputs,
    strategy: &Strategy,
    prediction: &Prediction,
) -> Result<PlanFile, AnswerError> {
    let scenario = &inputs.scenario;
    let planned = PlannedFor {
        model: &inputs.model_arg,
        model_config: scenario.model.definition(),
        adapters: scenario.model.adapters,
        cluster: &inputs.cluster_arg,
        runtime: &scenario.runtime.name,
        workload: &scenario.workload,
        headroom: scenario.headroom,
    };
    let sharding = sharding(scenario, strategy)?;
    Ok(PlanFile::of(planned, strategy, sharding, prediction))
}

/// The sharding plan of a strategy as text, with the parameters that match no pattern.
pub fn sharding(scenario: &Scenario, strategy: &Strategy) -> Result<ShardingFile, AnswerError> {
    models::sharding_section(&scenario.model, strategy, &scenario.workload)
        .map_err(|e| AnswerError::from(Mistake::new(e.to_string())))
}

/// The context in which a scenario's strategies are shown.
pub fn ground(costs: &CostModel) -> Ground<'_> {
    let scenario = costs.scenario();
    Ground {
        runtime: &scenario.runtime,
        gpus_per_node: scenario.cluster.gpus_per_node,
        adapters: scenario.model.adapters,
        pools: scenario.cluster.pools.as_deref(),
        documents: scenario.workload.documents(),
        groups: &[],
    }
}
