//! What a layout leaves to decide about sharding states: over how many ranks that is possible.

/// Numbers of ranks over which states can be sharded, which decide the ways to shard them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Holders {
    pub(crate) dp: u64,
    pub(crate) cp: u64,
    /// The greatest common divisor of the data-parallel ranks and the replicas of experts.
    pub(crate) groups: u64,
    /// Whether there are several pipeline ranks, beside which a runtime may lack some ZeRO levels.
    pub(crate) pipelined: bool,
    /// Whether a ZeRO level shards nothing.
    pub(crate) alone: bool,
}
