//! The plan file: decisions with everything needed to launch and to check them.

use catalog::paths::from_everywhere;
use catalog::{Adapters, SpecError, Workload, WorkloadSizes};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::groups::GroupFile;
use crate::json::{PredictedJson, StrategyJson};
use crate::prediction::Prediction;
use crate::strategy::Strategy;

pub use crate::sharding_file::ShardingFile;

/// Version of the format written and read.
pub const SCHEMA_VERSION: u32 = 1;

/// A plan as written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanFile {
    /// Version of this format.
    #[schemars(extend("const" = 1))]
    pub schema_version: u32,
    /// Content hash of the decisions.
    pub id: String,
    /// Version of the tool that wrote it.
    pub tool_version: String,
    /// Model preset or path.
    pub model: String,
    /// The fields of a `config.json`, if the model is no preset, so that the plan opens anywhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_config: Option<serde_json::Value>,
    /// Cluster preset or path; a path is relative to this file.
    pub cluster: String,
    /// Runtime preset.
    pub runtime: String,
    /// Batch, sequence, precision and devices.
    pub workload: WorkloadFile,
    /// Adapters that are trained in place of the weights; absent where all weights are trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapters: Option<Adapters>,
    /// Share of device memory to leave free. Not part of the id; absent in plans of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0, "exclusiveMaximum" = 1))]
    pub headroom: Option<f64>,
    /// The decisions; of a plan with several groups of replicas, those of the first.
    pub strategy: StrategyJson,
    /// The strategy on one line, as `--strategy` takes it.
    pub strategy_text: String,
    /// Placements by name pattern.
    pub sharding: ShardingFile,
    /// The groups of replicas that train side by side on different pools, each with its share of the batch; absent where all
    /// replicas are alike.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupFile>,
    /// How to train, for runtimes that start from this file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub train: Option<TrainFile>,
    /// What was predicted when the plan was made.
    pub prediction: PredictedJson,
}

/// Batch, sequence, precision, devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WorkloadFile {
    /// Devices.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub gpus: u64,
    /// Tokens per sequence.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub seq_len: u64,
    /// Sequences per step.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub global_batch: u64,
    /// Precision of linear layers.
    pub precision: catalog::Precision,
    /// Lengths of the documents that sequences are made of, as `--lengths` takes them; absent if each sequence is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lengths: Option<String>,
    /// How documents become sequences; present if `lengths` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packing: Option<catalog::Packing>,
}

impl WorkloadFile {
    /// The form of a workload in a plan file.
    #[must_use]
    pub fn of(workload: &Workload) -> Self {
        let documents = workload.documents();
        Self {
            gpus: workload.gpus,
            seq_len: workload.seq_len,
            global_batch: workload.global_batch,
            precision: workload.precision,
            lengths: documents.map(|of| of.lengths().to_string()),
            packing: documents.map(catalog::Documents::packing),
        }
    }

    /// The workload that these fields describe.
    ///
    /// # Errors
    /// Why they describe none, in a sentence.
    pub fn read(&self) -> Result<Workload, String> {
        let sizes = WorkloadSizes {
            gpus: self.gpus,
            seq_len: self.seq_len,
            global_batch: self.global_batch,
            precision: self.precision,
        };
        let workload = Workload::new(sizes).map_err(|wrong| wrong.to_string())?;
        match (&self.lengths, self.packing) {
            (None, None) => Ok(workload),
            (Some(lengths), Some(packing)) => {
                let lengths = lengths
                    .parse()
                    .map_err(|wrong| format!("lengths: {wrong}"))?;
                let made = workload.of_documents(lengths, packing);
                made.map_err(|wrong| format!("lengths: {wrong}"))
            }
            _ => Err("`lengths` and `packing` must be given together".to_owned()),
        }
    }
}

/// What a training run needs beside the plan. Not part of its id.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TrainFile {
    /// Text or token file, relative to the plan.
    pub data: String,
    /// Steps.
    pub steps: u64,
    /// Seed of every random number.
    #[serde(default = "defaults::seed")]
    pub seed: u64,
    /// Peak learning rate.
    #[serde(default = "defaults::learning_rate")]
    pub learning_rate: f64,
    /// Learning rate at the end of the cosine; absent: a tenth of the peak.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_learning_rate: Option<f64>,
    /// Steps of linear warm-up.
    #[serde(default)]
    pub warmup_steps: u64,
    /// Decoupled decay of weight matrices.
    #[serde(default = "defaults::weight_decay")]
    pub weight_decay: f64,
    /// Decays of the moments: beta1 and beta2.
    #[serde(default = "defaults::betas")]
    pub betas: [f64; 2],
    /// Largest gradient norm; absent: no clipping.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f64>,
    /// Gradients are reduced in buckets of at least this many MiB, while backward runs.
    #[serde(default = "defaults::gradient_bucket_mib")]
    pub gradient_bucket_mib: u64,
}

impl TrainFile {
    /// Learning rate at the end of the cosine.
    #[must_use]
    pub fn min_learning_rate(&self) -> f64 {
        self.min_learning_rate.unwrap_or(self.learning_rate / 10.0)
    }

    /// Checks that its numbers can be trained with; an error is a field and what is wrong with it.
    fn check(&self) -> Result<(), (&'static str, String)> {
        let is_size = |number: f64| number >= 0.0 && number.is_finite();
        let sizes = [
            ("train.learning_rate", self.learning_rate),
            ("train.min_learning_rate", self.min_learning_rate()),
            ("train.weight_decay", self.weight_decay),
        ];
        if let Some((field, number)) = sizes.into_iter().find(|(_, number)| !is_size(*number)) {
            return Err((field, format!("{number}; expected a number of at least 0")));
        }
        let (least, peak) = (self.min_learning_rate(), self.learning_rate);
        if least > peak {
            let message = format!("{least}; expected at most train.learning_rate, {peak}");
            return Err(("train.min_learning_rate", message));
        }
        if let Some(beta) = self.betas.iter().find(|beta| !(0.0..1.0).contains(*beta)) {
            let message = format!("{beta}; expected two numbers in [0, 1)");
            return Err(("train.betas", message));
        }
        let clips = |norm: &f64| is_size(*norm) && *norm > 0.0;
        if let Some(norm) = self.clip_norm.filter(|norm| !clips(norm)) {
            let message = format!("{norm}; expected a number above 0, or no field for no clipping");
            return Err(("train.clip_norm", message));
        }
        if self.steps == 0 {
            return Err(("train.steps", "0; expected at least 1".to_owned()));
        }
        Ok(())
    }
}

/// Defaults of the fields that a `train` section may leave out.
mod defaults {
    pub(super) fn seed() -> u64 {
        1234
    }
    pub(super) fn learning_rate() -> f64 {
        1e-3
    }
    pub(super) fn weight_decay() -> f64 {
        0.1
    }
    /// `bucket_cap_mb` of PyTorch's `DistributedDataParallel`.
    pub(super) fn gradient_bucket_mib() -> u64 {
        25
    }
    pub(super) fn betas() -> [f64; 2] {
        [0.9, 0.95]
    }
}

/// The question that a plan answers, with the names used to ask it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlannedFor<'a> {
    /// Model preset or path.
    pub model: &'a str,
    /// The fields that define the model, if it is no preset.
    pub model_config: Option<&'a serde_json::Value>,
    /// Adapters that are trained in place of the weights.
    pub adapters: Option<Adapters>,
    /// Cluster preset or path; the plan names a file by its full path.
    pub cluster: &'a str,
    /// Runtime.
    pub runtime: &'a str,
    /// Devices, sequence, batch, precision.
    pub workload: &'a Workload,
    /// Share of device memory to leave free.
    pub headroom: f64,
}

impl PlanFile {
    /// The plan of a strategy, with its id.
    #[must_use]
    pub fn of(
        planned: PlannedFor<'_>,
        strategy: &Strategy,
        sharding: ShardingFile,
        prediction: &Prediction,
    ) -> Self {
        let precision = planned.workload.precision;
        let file = Self {
            schema_version: SCHEMA_VERSION,
            id: String::new(),
            tool_version: env!("CARGO_PKG_VERSION").to_owned(),
            model: planned.model.to_owned(),
            model_config: planned.model_config.cloned(),
            cluster: from_everywhere(planned.cluster),
            runtime: planned.runtime.to_owned(),
            workload: WorkloadFile::of(planned.workload),
            adapters: planned.adapters,
            headroom: Some(planned.headroom),
            strategy: StrategyJson::new(strategy.decisions(), precision),
            strategy_text: strategy.to_string(),
            sharding,
            groups: Vec::new(),
            train: None,
            prediction: PredictedJson::from(prediction),
        };
        file.with_id()
    }

    /// Content hash of model, adapters, cluster, runtime, workload, strategies and sharding;
    /// without the prediction, the training section and the tool's version.
    #[must_use]
    pub fn content_id(&self) -> String {
        let mut decisions = serde_json::json!({
            "model": self.model,
            "cluster": self.cluster,
            "runtime": self.runtime,
            "workload": self.workload,
            "strategy": self.strategy,
            "sharding": self.sharding,
        });
        // Plans of presets, and those written before models were carried, keep their ids.
        if let Some(config) = &self.model_config {
            decisions["model_config"] = config.clone();
        }
        if let Some(adapters) = &self.adapters {
            decisions["adapters"] = serde_json::json!(adapters);
        }
        if !self.groups.is_empty() {
            let of = |group: &GroupFile| {
                serde_json::json!({
                    "cluster": group.cluster,
                    "gpus": group.gpus,
                    "global_batch": group.global_batch,
                    "strategy": group.strategy,
                    "sharding": group.sharding,
                })
            };
            decisions["groups"] = self.groups.iter().map(of).collect();
        }
        let digest = Sha256::digest(decisions.to_string().as_bytes());
        digest
            .iter()
            .take(8)
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }

    /// Sets the id from the content.
    #[must_use]
    pub fn with_id(mut self) -> Self {
        self.id = self.content_id();
        self
    }

    /// The file's text. Equal plans give equal bytes.
    ///
    /// # Errors
    /// When a value cannot be written as YAML.
    pub fn to_yaml(&self) -> Result<String, SpecError> {
        serde_saphyr::to_string(self).map_err(|e| SpecError::Malformed {
            path: "plan".to_owned(),
            message: e.to_string(),
        })
    }

    /// Reads a plan; `path` is for messages.
    ///
    /// # Errors
    /// With line and field when it is malformed; when its id does not match its content.
    pub fn from_yaml(text: &str, path: &str) -> Result<Self, SpecError> {
        let plan: Self = catalog::text::yaml(text, path)?;
        let field = |field: &str, message: String| SpecError::field(path, field, message);
        if plan.schema_version != SCHEMA_VERSION {
            let message = format!("{}; expected version {SCHEMA_VERSION}", plan.schema_version);
            return Err(field("schema_version", message));
        }
        if let Some(share) = plan.headroom.filter(|share| !(0.0..1.0).contains(share)) {
            let message = format!("{share}; expected a share in [0, 1)");
            return Err(field("headroom", message));
        }
        let predictions = plan.groups.iter().map(|group| &group.prediction);
        for prediction in predictions.chain([&plan.prediction]) {
            // JSON writes NaN and infinities as null.
            let numbers = serde_json::to_value(prediction);
            if !numbers.is_ok_and(|numbers| all_said(&numbers)) {
                let message = "holds what is not a finite number".to_owned();
                return Err(field("prediction", message));
            }
        }
        plan.check_groups()
            .map_err(|message| field("groups", message))?;
        if let Some(train) = &plan.train {
            train.check().map_err(|(of, message)| field(of, message))?;
        }
        let id = plan.content_id();
        if plan.id != id {
            let message = format!("{} does not match the decisions, whose id is {id}", plan.id);
            return Err(field("id", message));
        }
        Ok(plan)
    }
}

impl PlanFile {
    /// The same plan with these groups of replicas, of which the first has the plan's own strategy.
    #[must_use]
    pub fn with_groups(mut self, groups: Vec<GroupFile>) -> Self {
        self.groups = groups;
        self.with_id()
    }

    /// A plan file for one group alone: a job on the group's pools that trains the group's share of the batch. `number` counts
    /// from 1; `None` if there is no such group.
    #[must_use]
    pub fn of_group(&self, number: usize) -> Option<Self> {
        let group = self.groups.get(number.checked_sub(1)?)?.clone();
        let plan = Self {
            cluster: group.cluster,
            workload: WorkloadFile {
                gpus: group.gpus,
                global_batch: group.global_batch,
                ..self.workload.clone()
            },
            strategy: group.strategy,
            strategy_text: group.strategy_text,
            sharding: group.sharding,
            prediction: group.prediction,
            groups: Vec::new(),
            ..self.clone()
        };
        Some(plan.with_id())
    }

    /// Checks that its groups have all devices and sequences, and the first the plan's strategy.
    fn check_groups(&self) -> Result<(), String> {
        let Some(first) = self.groups.first() else {
            return Ok(());
        };
        if self.groups.len() == 1 {
            return Err("one group; expected at least two, or none".to_owned());
        }
        let sum = |of: fn(&GroupFile) -> u64| {
            let sizes = self.groups.iter().map(of);
            sizes.fold(0, u64::saturating_add)
        };
        let (gpus, batch) = (sum(|group| group.gpus), sum(|group| group.global_batch));
        let (all, whole) = (self.workload.gpus, self.workload.global_batch);
        if (gpus, batch) != (all, whole) {
            return Err(format!(
                "{gpus} GPUs and {batch} sequences; expected the workload's {all} and {whole}"
            ));
        }
        if first.strategy_text != self.strategy_text || first.strategy != self.strategy {
            return Err("the first has another strategy than `strategy` says".to_owned());
        }
        Ok(())
    }
}

/// Whether a value contains no null.
fn all_said(value: &serde_json::Value) -> bool {
    match value {
        serde_json::Value::Null => false,
        serde_json::Value::Array(items) => items.iter().all(all_said),
        serde_json::Value::Object(map) => map.values().all(all_said),
        _ => true,
    }
}
