//! The index of a rank on every axis of the dense and the expert mesh.

use catalog::Axis;

use crate::decisions::Decisions;

/// A rank's index on every axis of the dense and the expert mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Global rank.
    pub rank: usize,
    /// Pipeline-parallel rank.
    pub pp: u64,
    /// Index among replicas of sharded states (outer data parallelism).
    pub dp_replicate: u64,
    /// Index of the shard of states (ZeRO).
    pub dp_shard: u64,
    /// Context-parallel rank.
    pub cp: u64,
    /// Tensor-parallel rank.
    pub tp: u64,
    /// Expert-parallel rank.
    pub ep: u64,
    /// Expert-tensor-parallel rank.
    pub etp: u64,
    /// Expert-data-parallel rank.
    pub edp: u64,
}

impl Place {
    /// The place of a rank.
    #[must_use]
    pub fn of(d: &Decisions, rank: u64) -> Self {
        let on = |axis: Axis| {
            let group = d.group(axis);
            rank / group.stride % group.size
        };
        // The expert mesh regroups the ranks of one pipeline rank, in the order of the dense axes.
        let mut inner = 0;
        let mut stride = 1;
        for axis in d.axis_order.0 {
            if axis != Axis::Pp {
                inner += on(axis) * stride;
                stride *= d.size(axis);
            }
        }
        Self {
            rank: rank as usize,
            pp: on(Axis::Pp),
            dp_replicate: on(Axis::DpReplicate),
            dp_shard: on(Axis::DpShard),
            cp: on(Axis::Cp),
            tp: on(Axis::Tp),
            etp: inner % d.etp,
            ep: inner / d.etp % d.ep,
            edp: inner / (d.etp * d.ep),
        }
    }
}
