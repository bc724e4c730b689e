//! What a prediction is of: model, cluster, training system and workload.

use catalog::residuals::Kind;
use catalog::{Bytes, Cluster, Model, Runtime, Workload};

/// Everything a prediction depends on, beside the strategy.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// The model.
    pub model: Model,
    /// The cluster.
    pub cluster: Cluster,
    /// The training system.
    pub runtime: Runtime,
    /// Sequence, batch, precision, devices.
    pub workload: Workload,
    /// Fraction of device memory to leave free, in `[0, 1)`.
    pub headroom: f64,
}

impl Scenario {
    /// Device memory that a strategy may use.
    #[must_use]
    pub fn capacity(&self) -> Bytes {
        let total = self.cluster.device.memory.value.as_f64();
        Bytes((total * (1.0 - self.headroom)) as u64)
    }

    /// Allocated memory as the allocator reserves it.
    #[must_use]
    pub fn with_fragmentation(&self, peak: Bytes) -> Bytes {
        let overheads = &self.runtime.overheads;
        let outside = overheads.context.value;
        let inside = peak.saturating_sub(outside);
        Bytes((inside.as_f64() * overheads.fragmentation.value) as u64) + outside
    }

    /// What decides how much published runs say of it.
    #[must_use]
    pub fn kind(&self) -> Kind {
        Kind {
            runtime: self.runtime.name.clone(),
            architecture: self.cluster.device.architecture,
            precision: self.workload.precision,
            experts: self.model.moe.is_some(),
        }
    }

    /// Cores that ranks share, where they do.
    pub(crate) fn cores(&self) -> Option<u64> {
        let machine = &self.cluster.profile.as_ref()?.machine;
        machine.gpu.is_none().then_some(machine.cores)
    }

    /// Whether communication is work of the ranks' own cores.
    pub(crate) fn shares_cores(&self) -> bool {
        self.cores().is_some()
    }
}
