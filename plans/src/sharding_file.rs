//! The sharding plan as plan files hold it.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A sharding plan: from patterns, which must match a whole name, to placements per axis.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ShardingFile {
    /// Placements of parameters.
    pub parameter: BTreeMap<String, Vec<String>>,
    /// Placements of module inputs and outputs.
    pub forward: BTreeMap<String, Vec<String>>,
    /// Parameters that no pattern matches: every rank of the block holds them whole.
    pub replicated: Vec<String>,
}
