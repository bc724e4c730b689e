//! Which decoder layers each virtual stage holds.

use serde::{Deserialize, Serialize};

/// Decoder layers per virtual stage, in model order: `pp · vpp` entries. The embedding is on the
/// first stage, final norm, head and loss on the last; an entry may be 0.
#[derive(
    Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(transparent)]
pub struct StagePartition(pub Vec<u64>);
