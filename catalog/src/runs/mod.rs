//! Published training runs: the `runs-v1` schema. Unknown values are null, never guessed.

mod compact;
mod frameworks;
mod metrics;
mod recipes;
mod sizes;

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::SpecError;

pub use compact::{embedded, to_compact};
pub use frameworks::Framework;
pub use metrics::{Derived, Measure, Metrics, Status, Tier};
pub use recipes::{MemoryCounter, OwnOptimizer, Recipe};

/// One source's runs.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RunsFile {
    /// `runs-v1`.
    #[schemars(extend("const" = "runs-v1"))]
    pub schema: String,
    /// The runs.
    pub runs: Vec<Run>,
}

/// One run that was measured. What is not known is left out, or null.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Run {
    /// Name of the run, by which answers show it.
    pub id: String,
    /// Where it is published, such as `owner/repository@commit:path`. Recipes of known sources fill in what their runs leave out.
    pub source: String,
    /// When it was measured or published.
    pub date: Option<String>,
    /// The framework and its version; it selects the runtime.
    pub sw_version: Option<String>,
    /// The model.
    pub model: RunModel,
    /// The GPU, such as `H100 SXM` or `A100-80GB`.
    pub gpu: Option<String>,
    /// GPUs of the job.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub num_gpus: Option<u64>,
    /// GPUs in one host.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub gpus_per_node: Option<u64>,
    /// The network between hosts, such as `400 Gb/s per GPU`.
    pub interconnect: Option<String>,
    /// Precision of linear layers: `bf16`, `fp16`, `fp8` or `fp32`, in words of the source.
    pub precision: Option<String>,
    /// Tensor-parallel size.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub tp: Option<u64>,
    /// Pipeline-parallel size.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub pp: Option<u64>,
    /// Virtual stages per pipeline rank.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub vpp: Option<u64>,
    /// Context-parallel size.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub cp: Option<u64>,
    /// Expert-parallel size.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub ep: Option<u64>,
    /// Tensor-parallel size inside experts.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub etp: Option<u64>,
    /// Data-parallel size.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub dp: Option<u64>,
    /// How states are sharded: a text with `zero0` to `zero3`, `fsdp`, `hsdp`, `distopt`, `ddp` or `none` in it.
    pub zero: Option<String>,
    /// Whether Megatron's sequence parallelism is on.
    pub sequence_parallel: Option<bool>,
    /// What backward computes again: `none`, `full`, `selective`, `selective:MODULES` or `block:LAYERS`.
    pub recompute: Option<String>,
    /// Sequences per micro-batch and data-parallel rank.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub micro_batch: Option<u64>,
    /// Sequences per step.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub global_batch: Option<u64>,
    /// Micro-batches per step.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub grad_accum: Option<u64>,
    /// Tokens per sequence.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub seq_len: Option<u64>,
    /// What else the source says, under names of its own.
    pub flags: Option<BTreeMap<String, Value>>,
    /// Values of fields above that the source leaves to defaults.
    pub assumed: Option<BTreeMap<String, Value>>,
    /// How it ended; it trained if this is absent.
    pub status: Status,
    /// What was measured.
    pub metrics: Option<Metrics>,
    /// What follows from it.
    pub derived: Option<Derived>,
    /// How complete the facts are. Only runs of tiers A and B are counted.
    pub tier: Option<Tier>,
}

/// The sizes of a run's model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RunModel {
    /// Name to show.
    pub name: Option<String>,
    /// Width of a token's hidden state.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub hidden: Option<u64>,
    /// Decoder layers.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub layers: Option<u64>,
    /// Attention heads.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub heads: Option<u64>,
    /// Heads of keys and values.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub kv_heads: Option<u64>,
    /// Width of the feed-forward part.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub ffn: Option<u64>,
    /// Rows of the vocabulary.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub vocab: Option<u64>,
    /// Width of a head.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub head_dim: Option<u64>,
    /// Kind of the feed-forward part: `gelu_2mat` or `swiglu_3mat`.
    pub mlp: Option<String>,
    /// Kind of attention: `mha`, `gqa`, `mqa` or `mla`.
    pub attn: Option<String>,
    /// Whether the embedding is the output layer too.
    pub tied_embeddings: Option<bool>,
    /// Experts of a layer.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub experts: Option<u64>,
    /// Experts that each token is sent to.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub topk: Option<u64>,
    /// Width of an expert.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub moe_ffn: Option<u64>,
    /// Experts that every token passes.
    #[schemars(range(min = 0, max = 16_777_216))]
    pub shared_experts: Option<u64>,
    /// First layers without experts.
    #[schemars(range(min = 0, max = 16_777_216))]
    pub dense_layers: Option<u64>,
    /// Where the sizes come from. After `official`, what a published model of these sizes has is taken from its preset.
    pub arch_source: Option<String>,
}

impl RunsFile {
    /// Parses a file; `path` is for messages.
    ///
    /// # Errors
    /// With line and field when it is malformed or of another schema; with run and field when a size is out of range.
    pub fn parse(text: &str, path: &str) -> Result<Self, SpecError> {
        let file: Self = crate::text::yaml(text, path)?;
        if file.schema != "runs-v1" {
            let message = format!("`{}`; expected `runs-v1`", file.schema);
            return Err(SpecError::field(path, "schema", message));
        }
        file.check_sizes(path)?;
        file.check_products(path)?;
        Ok(file)
    }
}

impl Run {
    /// A stated or assumed whole number.
    #[must_use]
    pub fn size(&self, field: &str, stated: Option<u64>) -> Option<u64> {
        stated.or_else(|| self.assumed.as_ref()?.get(field)?.as_u64())
    }

    /// A stated or assumed text.
    #[must_use]
    pub fn text<'a>(&'a self, field: &str, stated: Option<&'a str>) -> Option<&'a str> {
        stated.or_else(|| self.assumed.as_ref()?.get(field)?.as_str())
    }

    /// The repository that the run is published in: `owner/name`, or what the source names as `(repository …,`. Text without
    /// either is returned as it is.
    pub(crate) fn repository(&self) -> &str {
        let (_, named) = self.source.split_once("(repository ").unwrap_or_default();
        let named = named.split(',').next().filter(|name| !name.is_empty());
        named.unwrap_or_else(|| self.source.split(['@', ':']).next().unwrap_or(""))
    }

    /// The value of a flag of the run: what its row states, or else what the recipe that made it sets.
    #[must_use]
    pub fn flag(&self, name: &str) -> Option<&Value> {
        self.stated(name).or_else(|| Recipe::of(self)?.sets(name))
    }

    /// The value of a flag, if the row itself states it.
    fn stated(&self, name: &str) -> Option<&Value> {
        self.flags.as_ref()?.get(name).filter(|v| !v.is_null())
    }

    /// The value of a flag that is a text.
    #[must_use]
    pub fn text_flag(&self, name: &str) -> Option<&str> {
        self.flag(name)?.as_str()
    }

    /// The value of a flag that is a whole number.
    #[must_use]
    pub fn size_flag(&self, name: &str) -> Option<u64> {
        self.flag(name)?.as_u64()
    }

    /// Whether a switch is on or off, if that is known.
    #[must_use]
    pub fn switch(&self, name: &str) -> Option<bool> {
        self.flag(name)?.as_bool()
    }

    /// Whether a switch is on.
    #[must_use]
    pub fn is_on(&self, name: &str) -> bool {
        self.switch(name).unwrap_or(false)
    }

    /// A measured number; `None` if the run does not state it.
    #[must_use]
    pub fn metric(&self, of: impl Fn(&Metrics) -> &Option<Measure>) -> Option<f64> {
        of(self.metrics.as_ref()?).as_ref().map(Measure::get)
    }

    /// A number derived from published ones; `None` if there is none.
    #[must_use]
    pub fn derived_metric(&self, of: impl Fn(&Derived) -> &Option<Measure>) -> Option<f64> {
        of(self.derived.as_ref()?).as_ref().map(Measure::get)
    }
}
