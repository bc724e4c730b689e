//! Groups of replicas of one training on different pools, as plan files and answers write them.

use catalog::paths::from_everywhere;
use catalog::{Runtime, Workload};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::grammar::written;
use crate::json::{PredictedJson, StrategyJson};
use crate::prediction::Prediction;
use crate::sharding_file::ShardingFile;
use crate::strategy::Strategy;

/// A group of replicas with its plan.
#[derive(Clone, Copy, Debug)]
pub struct ReplicaGroup<'a> {
    /// The cluster made of its pools, as an argument of a command.
    pub cluster: &'a str,
    /// Its number of GPUs and its share of the batch.
    pub workload: &'a Workload,
    /// Its strategy.
    pub strategy: &'a Strategy,
    /// Its predicted time and memory if it trains alone.
    pub prediction: &'a Prediction,
}

/// A group of replicas in a plan file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GroupFile {
    /// The cluster made of its pools.
    pub cluster: String,
    /// Number of its devices.
    pub gpus: u64,
    /// Its share of the batch: sequences per step.
    pub global_batch: u64,
    /// Its decisions.
    pub strategy: StrategyJson,
    /// The strategy on one line, as `--strategy` takes it.
    pub strategy_text: String,
    /// Placements by name pattern.
    pub sharding: ShardingFile,
    /// What was predicted for this group alone when the plan was made.
    pub prediction: PredictedJson,
}

impl GroupFile {
    /// The form of a group in a plan file.
    #[must_use]
    pub fn of(group: ReplicaGroup<'_>, sharding: ShardingFile) -> Self {
        let (workload, strategy) = (group.workload, group.strategy);
        Self {
            cluster: from_everywhere(group.cluster),
            gpus: workload.gpus,
            global_batch: workload.global_batch,
            strategy: StrategyJson::new(strategy.decisions(), workload.precision),
            strategy_text: strategy.to_string(),
            sharding,
            prediction: PredictedJson::from(group.prediction),
        }
    }
}

/// A group of replicas in an answer.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct GroupJson {
    /// The cluster made of its pools.
    pub cluster: String,
    /// Number of its devices.
    pub gpus: u64,
    /// Its share of the batch: sequences per step.
    pub global_batch: u64,
    /// Number of its replicas.
    pub replicas: u64,
    /// Micro-batches of each replica per step.
    pub micro_batches: u64,
    /// Its decisions.
    pub strategy: StrategyJson,
    /// The decisions on one line, as `--strategy` takes them.
    pub strategy_text: String,
    /// The strategy in short form.
    pub summary: String,
    /// Predicted time and memory if it trains alone.
    pub predicted: PredictedJson,
}

impl GroupJson {
    /// The JSON form of a group; the summary leaves out what is the default of `runtime`.
    #[must_use]
    pub fn new(group: ReplicaGroup<'_>, runtime: &Runtime) -> Self {
        let (workload, strategy) = (group.workload, group.strategy);
        Self {
            cluster: group.cluster.to_owned(),
            gpus: workload.gpus,
            global_batch: workload.global_batch,
            replicas: strategy.dp(),
            micro_batches: strategy.num_micro_batches,
            strategy: StrategyJson::new(strategy.decisions(), workload.precision),
            strategy_text: strategy.to_string(),
            summary: written(strategy, runtime),
            predicted: PredictedJson::from(group.prediction),
        }
    }
}
