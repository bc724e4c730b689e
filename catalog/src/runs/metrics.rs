//! What was measured of a published run: numbers with their units, and whether the run ran at all.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Number, Value};

/// A measured number: finite and above 0. It is written again as its source wrote it, such as 67 or 67.0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "Value", into = "Number")]
#[schemars(!try_from, !into)]
pub struct Measure(#[schemars(range(min = 0))] Number);

impl Measure {
    /// The number.
    #[must_use]
    pub fn get(&self) -> f64 {
        self.0.as_f64().unwrap_or_default()
    }
}

impl TryFrom<Value> for Measure {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, String> {
        let measured = |number: &Number| number.as_f64().is_some_and(|x| x > 0.0 && x.is_finite());
        match value {
            Value::Number(number) if measured(&number) => Ok(Self(number)),
            other => Err(format!(
                "{other} is not measured; expected a number above 0"
            )),
        }
    }
}

impl From<Measure> for Number {
    fn from(measure: Measure) -> Self {
        measure.0
    }
}

/// What a source measured of a run. One of step time, rate or peak memory is compared with the prediction.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Metrics {
    /// Memory of activations on one GPU, in GiB.
    pub activation_mem_gib: Option<Measure>,
    /// Days to train on 300 billion tokens.
    #[serde(rename = "days_for_300B_tokens")]
    pub days_for_300b_tokens: Option<Measure>,
    /// Hardware FLOPs utilisation, which counts recomputation too, in percent.
    pub hfu_pct: Option<Measure>,
    /// Model FLOPs utilisation, in percent.
    pub mfu_pct: Option<Measure>,
    /// Memory of parameters, gradients and optimizer states on one GPU, in GiB.
    pub model_state_mem_gib: Option<Measure>,
    /// Peak memory in active blocks of PyTorch's allocator, in GiB per GPU.
    pub peak_mem_active_gib: Option<Measure>,
    /// Peak memory of tensors (`torch.cuda.max_memory_allocated`), in GiB per GPU.
    pub peak_mem_allocated_gib: Option<Measure>,
    /// Peak memory by a counter that is not named, in GB (10^9 bytes) per GPU.
    pub peak_mem_gb: Option<Measure>,
    /// Peak memory that nvidia-smi shows, in its GB, which are GiB, per GPU.
    pub peak_mem_gb_nvidia_smi: Option<Measure>,
    /// Peak memory by a counter that is not named, in GiB per GPU.
    pub peak_mem_gib: Option<Measure>,
    /// Peak memory of PyTorch's allocator (`torch.cuda.max_memory_reserved`), in GiB per GPU.
    pub peak_mem_reserved_gib: Option<Measure>,
    /// Sequences per second of the whole job.
    pub samples_per_s: Option<Measure>,
    /// Seconds of one optimizer step.
    pub step_time_s: Option<Measure>,
    /// TFLOP/s on each GPU, as the source counts them.
    pub tflops_per_gpu: Option<Measure>,
    /// Tokens per second of the whole job.
    pub tokens_per_s: Option<Measure>,
    /// Tokens per second and GPU.
    pub tokens_per_s_per_gpu: Option<Measure>,
}

/// Numbers that follow from those that the source measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Derived {
    /// How they follow, in words.
    pub how: Option<String>,
    /// Seconds of one optimizer step.
    pub step_time_s: Option<Measure>,
    /// Tokens per second and GPU.
    pub tokens_per_s_per_gpu: Option<Measure>,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// It trained.
    #[default]
    Ok,
    /// It ran out of GPU memory.
    Oom,
}

/// How much a source states of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Tier {
    /// Everything that a prediction needs.
    A,
    /// Nearly everything; the rest is `assumed`.
    B,
    /// Less: the run is not counted.
    C,
}
