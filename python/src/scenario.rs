//! From what Python passes to a scenario.

use catalog::{Precision, Workload, WorkloadSizes};
use costmodel::Scenario;
use pyo3::FromPyObject;

use crate::error::PlanError;

/// What to plan for, as the Python side collected it.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Given {
    /// Preset, path, or the name to record for `config`.
    pub(crate) model: String,
    /// A `config.json`'s text, when the model is in memory.
    pub(crate) config: Option<String>,
    cluster: String,
    gpus: u64,
    runtime: String,
    seq_len: u64,
    global_batch: u64,
    precision: String,
    headroom: f64,
}

/// A scenario with the words it was made from.
pub(crate) struct Inputs {
    pub(crate) scenario: Scenario,
    pub(crate) model: String,
    pub(crate) cluster: String,
}

impl Inputs {
    pub(crate) fn resolve(given: Given) -> Result<Self, PlanError> {
        let model = match &given.config {
            Some(json) => catalog::hf::decode(json, &given.model, &given.model)?,
            None => catalog::load::model(&given.model)?,
        };
        let cluster = catalog::load::cluster(&given.cluster)?;
        let runtime = catalog::load::runtime(&given.runtime)?;
        if let Err(wrong) = cluster.check_devices(given.gpus) {
            return usage(format!("gpus {}: {wrong}", given.gpus));
        }
        if !(0.0..1.0).contains(&given.headroom) {
            return usage(format!(
                "headroom {}: expected a share in [0, 1)",
                given.headroom
            ));
        }
        let workload = Workload::new(WorkloadSizes {
            gpus: given.gpus,
            seq_len: given.seq_len,
            global_batch: given.global_batch,
            precision: precision(&given.precision)?,
        })
        .map_err(|e| PlanError::Usage(e.to_string()))?;
        Ok(Self {
            scenario: Scenario {
                model,
                cluster,
                runtime,
                workload,
                headroom: given.headroom,
            },
            model: given.model,
            cluster: given.cluster,
        })
    }
}

fn precision(name: &str) -> Result<Precision, PlanError> {
    match name {
        "fp32" => Ok(Precision::Fp32),
        "fp16" => Ok(Precision::Fp16),
        "bf16" => Ok(Precision::Bf16),
        "fp8" => Ok(Precision::Fp8),
        other => usage(format!(
            "precision {other}: expected fp32, fp16, bf16 or fp8"
        )),
    }
}

fn usage<T>(message: String) -> Result<T, PlanError> {
    Err(PlanError::Usage(message))
}
