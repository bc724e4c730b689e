//! Published training runs: the `runs-v1` schema. Unknown values are null, never guessed.

mod compact;
mod frameworks;
mod recipes;
mod sizes;

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::SpecError;

pub use compact::{embedded, to_compact};
pub use frameworks::Framework;
pub use recipes::{MemoryCounter, OwnOptimizer, Recipe};

/// One source's runs.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
pub struct RunsFile {
    /// `runs-v1`.
    pub schema: String,
    /// The runs.
    pub runs: Vec<Run>,
}

/// One published run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[allow(missing_docs, reason = "the names are the schema's")]
pub struct Run {
    pub id: String,
    pub source: String,
    pub date: Option<String>,
    pub sw_version: Option<String>,
    pub model: RunModel,
    pub gpu: Option<String>,
    pub num_gpus: Option<u64>,
    pub gpus_per_node: Option<u64>,
    pub interconnect: Option<String>,
    pub precision: Option<String>,
    pub tp: Option<u64>,
    pub pp: Option<u64>,
    pub vpp: Option<u64>,
    pub cp: Option<u64>,
    pub ep: Option<u64>,
    pub etp: Option<u64>,
    pub dp: Option<u64>,
    pub zero: Option<String>,
    pub sequence_parallel: Option<bool>,
    pub recompute: Option<String>,
    pub micro_batch: Option<u64>,
    pub global_batch: Option<u64>,
    pub grad_accum: Option<u64>,
    pub seq_len: Option<u64>,
    pub flags: Option<BTreeMap<String, Value>>,
    pub assumed: Option<BTreeMap<String, Value>>,
    pub status: String,
    pub metrics: Option<BTreeMap<String, Value>>,
    pub derived: Option<BTreeMap<String, Value>>,
    pub tier: Option<String>,
}

/// A run's model block.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[allow(missing_docs, reason = "the names are the schema's")]
pub struct RunModel {
    pub name: Option<String>,
    pub hidden: Option<u64>,
    pub layers: Option<u64>,
    pub heads: Option<u64>,
    pub kv_heads: Option<u64>,
    pub ffn: Option<u64>,
    pub vocab: Option<u64>,
    pub head_dim: Option<u64>,
    pub mlp: Option<String>,
    pub attn: Option<String>,
    pub tied_embeddings: Option<bool>,
    pub experts: Option<u64>,
    pub topk: Option<u64>,
    pub moe_ffn: Option<u64>,
    pub shared_experts: Option<u64>,
    pub dense_layers: Option<u64>,
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
    pub fn metric(&self, name: &str) -> Option<f64> {
        self.metrics.as_ref()?.get(name)?.as_f64()
    }

    /// A number derived from published ones; `None` if there is none.
    #[must_use]
    pub fn derived_metric(&self, name: &str) -> Option<f64> {
        self.derived.as_ref()?.get(name)?.as_f64()
    }
}
