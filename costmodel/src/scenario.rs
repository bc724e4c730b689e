//! The subject of a prediction: model, cluster, training system and workload.

use catalog::calibration::Calibration;
use catalog::residuals::{self, Evidence, Kind, ModelKind, Quantity, Residual};
use catalog::{
    Architecture, Bytes, Cluster, Domain, Model, Reach, Runtime, Seconds, Sourced, Workload,
};
use plans::Decisions;

use crate::known;

/// Everything that a prediction depends on, apart from the strategy.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// The model to train.
    pub model: Model,
    /// The cluster to train on.
    pub cluster: Cluster,
    /// The training system.
    pub runtime: Runtime,
    /// Sequence length, batch, precision and number of devices.
    pub workload: Workload,
    /// Fraction of device memory to leave free, in `[0, 1)`.
    pub headroom: f64,
}

impl Scenario {
    /// Bytes of device memory that a strategy may use: capacity less headroom; of the first pool's devices, if there are
    /// several pools.
    #[must_use]
    pub fn capacity(&self) -> Bytes {
        let total = self.cluster.device.memory.value.as_f64();
        Bytes((total * (1.0 - self.headroom)) as u64)
    }

    /// Device memory of a rank for workspaces of libraries and, in jobs of several GPUs, for buffers of communicators.
    #[must_use]
    pub(crate) fn libraries(&self) -> Bytes {
        let overheads = &self.runtime.overheads;
        let several = self.workload.gpus > 1;
        let communicators = several.then_some(overheads.communicators.value);
        overheads.workspace.value + communicators.unwrap_or(Bytes(0))
    }

    /// Device memory of a rank outside its tensors: the driver's context and [`Scenario::libraries`].
    #[must_use]
    pub(crate) fn outside(&self) -> Bytes {
        self.runtime.overheads.context.value + self.libraries()
    }

    /// The probability that a plan with this predicted peak fits.
    #[must_use]
    pub fn p_fits(&self, peak: Bytes) -> f64 {
        self.probability(self.memory_error(), peak)
    }

    /// Largest predicted peak of a plan that may be chosen at this risk, which lies in `(0, 1)`.
    #[must_use]
    pub fn limit(&self, risk: f64) -> Bytes {
        let (capacity, error) = (self.capacity(), self.memory_error());
        let may =
            |peak: Bytes| plans::may_choose(self.probability(error, peak), peak <= capacity, risk);
        // No prediction errs by more than a factor of 64.
        let mut least = 0;
        let mut most = capacity.0.saturating_mul(64);
        while least + 1 < most {
            let middle = least + (most - least) / 2;
            match may(Bytes(middle)) {
                true => least = middle,
                false => most = middle,
            }
        }
        Bytes(least)
    }

    /// The 80% interval of the errors of predicted memory.
    pub(crate) fn memory_error(&self) -> Residual {
        residuals::of(Quantity::Memory, self.evidence())
    }

    fn probability(&self, error: Residual, peak: Bytes) -> f64 {
        let room = error.room(self.capacity().as_f64(), self.needed(peak).max(1.0));
        residuals::chance_to_fit().at(room)
    }

    /// A peak of allocated memory as the allocator reserves it; the device's context does not fragment.
    #[must_use]
    pub fn with_fragmentation(&self, peak: Bytes) -> Bytes {
        let overheads = &self.runtime.overheads;
        let outside = overheads.context.value;
        let inside = peak.saturating_sub(outside);
        Bytes((inside.as_f64() * overheads.fragmentation.value) as u64) + outside
    }

    /// The bytes of a predicted peak without those that the allocator caches: the inverse of [`Self::with_fragmentation`].
    fn needed(&self, peak: Bytes) -> f64 {
        let overheads = &self.runtime.overheads;
        let outside = overheads.context.value.min(peak);
        (peak - outside).as_f64() / overheads.fragmentation.value + outside.as_f64()
    }

    /// Error of a predicted ratio of two step times: upper end of the 80% interval of its `ln`.
    #[must_use]
    pub fn comparison_error(&self) -> f64 {
        residuals::of(Quantity::Ratio, self.evidence()).high
    }

    /// The kind of this question, by which published runs that resemble it are counted as evidence.
    #[must_use]
    pub fn kind(&self) -> Kind {
        Kind {
            runtime: self.runtime.name.clone(),
            architecture: self.cluster.device.architecture,
            precision: self.workload.precision,
            model: match (&self.model.hybrid, &self.model.moe) {
                (Some(_), _) => ModelKind::Recurrent,
                (None, Some(_)) => ModelKind::Experts,
                (None, None) => ModelKind::Dense,
            },
        }
    }

    /// A time of the host, times the factor that measured steps of this system gave, if any.
    pub(crate) fn by_host(&self, time: &Sourced<Seconds>) -> Seconds {
        time.value * self.cluster.time_factors(&self.runtime.name).host
    }

    /// The same question, in which neighbouring pools that are alike and on one network are one.
    pub(crate) fn with_alike_pools_as_one(self) -> Self {
        Self {
            cluster: self.cluster.with_alike_pools_as_one(),
            ..self
        }
    }

    /// What predictions of memory, and of ratios of step times, rest on: published runs that resemble the question.
    pub(crate) fn evidence(&self) -> Evidence {
        match &self.cluster.pools {
            Some(_) => Evidence::SeveralPools,
            None => self.kind().evidence(),
        }
    }

    /// The 80% interval of the errors of a strategy's predicted step time, but for what a calibration leaves open.
    pub(crate) fn time_residual(&self, d: &Decisions) -> Residual {
        residuals::of(Quantity::Time, self.time_evidence(d).0)
    }

    /// The strategy's sequence length, and whether its experts lie across the network.
    #[must_use]
    pub fn reach(&self, d: &Decisions) -> Reach {
        Reach {
            seq_len: self.workload.seq_len,
            experts_across: self.model.moe.is_some() && d.experts_lie_across(&self.cluster),
        }
    }

    /// What the predicted step time of a strategy rests on, in words.
    #[must_use]
    pub fn evidence_in_words(&self, d: &Decisions) -> String {
        let (evidence, beyond) = self.time_evidence(d);
        let words = evidence.words(&self.kind(), beyond);
        match (evidence, &self.cluster.calibration) {
            (Evidence::Calibrated { runs }, Some(own)) if own.runs as usize > runs => {
                format!("{words}, and {} of other jobs", own.runs as usize - runs)
            }
            (Evidence::Calibrated { .. }, _) => words,
            _ => self.with_factors_in_words(words),
        }
    }

    /// Describes, in words, what a prediction rests on: `evidence`, which is from other systems
    /// than this one, and the calibrations of the cluster whose factors multiply its times.
    pub(crate) fn with_factors_in_words(&self, evidence: String) -> String {
        let applied = self
            .cluster
            .calibrations()
            .into_iter()
            .map(Calibration::words);
        std::iter::once(evidence)
            .chain(applied)
            .collect::<Vec<_>>()
            .join("; ")
    }

    /// The evidence for a strategy's predicted step time, and the part of its reach that too few published runs have. Measured runs
    /// of this system count if they are of the same kind and go as far.
    pub(crate) fn time_evidence(&self, d: &Decisions) -> (Evidence, Reach) {
        let (kind, reach) = (self.kind(), self.reach(d));
        let own = self.cluster.calibration.as_ref();
        let runs = own.map_or(0, |own| own.runs_like(&kind, reach));
        match (runs, &self.cluster.pools) {
            (0, Some(_)) => (Evidence::SeveralPools, Reach::default()),
            (0, None) => kind.evidence_for(reach),
            (runs, _) => (Evidence::Calibrated { runs }, Reach::default()),
        }
    }

    /// Whether the runtime has a schedule that splits backward passes in two halves.
    pub(crate) fn splits_backward(&self) -> bool {
        let schedules = &self.runtime.space.schedules;
        schedules.iter().any(|schedule| schedule.splits_backward())
    }

    /// The jitter of ranks: the standard deviation of the time of a rank's pass, as a share of it.
    pub(crate) fn jitter(&self) -> f64 {
        let jitter = self.cluster.jitter.as_ref();
        jitter.map_or(0.0, |jitter| jitter.value)
    }

    /// Whether matrix products run as fast as the device's power limit lets them. If not, the number of multiprocessors sets their
    /// speed, as it does where all rows of a product are alike: these need less power. The answer for MI300 and CPUs is assumed.
    #[must_use]
    pub fn power_limits_products(&self) -> bool {
        if self.workload.has_alike_tokens() {
            return false;
        }
        match self.cluster.device.architecture {
            Architecture::Volta
            | Architecture::Ampere
            | Architecture::Ada
            | Architecture::BlackwellRtx => false,
            Architecture::Hopper
            | Architecture::Blackwell
            | Architecture::Cdna3
            | Architecture::Cpu => true,
        }
    }

    /// The factor by which kernels take longer while NCCL sends messages within a node. It is small in two cases. On GPUs whose
    /// power limit sets the speed of matrix products, the multiprocessors that NCCL does not take can run at higher clocks. Over
    /// PCI Express, NCCL opens fewer channels than over NVLink; each channel takes one multiprocessor.
    pub(crate) fn slowdown_beside_nccl(&self) -> f64 {
        let slowdown = self.runtime.overheads.overlap_slowdown.value;
        let by_device = match self.power_limits_products() {
            true => slowdown.min(known::POWER_LIMITED_SLOWDOWN.factor()),
            false => slowdown,
        };
        match self.cluster.pci_express {
            true => 1.0 + (by_device - 1.0) * known::PCI_EXPRESS_CHANNELS.factor(),
            false => by_device,
        }
    }

    /// How many GPUs of each scale-up domain (such as a node, or an NVL72 rack) the job uses.
    pub(crate) fn domain(&self) -> Domain {
        self.cluster.domain(self.workload.gpus)
    }

    /// Number of cores that ranks share; `None` if each has a device.
    pub(crate) fn cores(&self) -> Option<u64> {
        let machine = &self.cluster.profile.as_ref()?.machine;
        machine.gpu.is_none().then_some(machine.cores)
    }

    /// Whether ranks share cores, so that communication is work of those cores.
    pub(crate) fn shares_cores(&self) -> bool {
        self.cores().is_some()
    }
}

#[cfg(test)]
mod tests {
    use crate::testing;

    #[test]
    fn kernels_lose_most_to_nccl_where_nothing_else_limits_them() {
        let slowdown = |cluster: &str, of_runtime: f64| {
            let sizes = catalog::WorkloadSizes {
                gpus: 8,
                seq_len: 1024,
                global_batch: 8,
                precision: catalog::Precision::Bf16,
            };
            let mut scenario = testing::scenario(["llama3-8b", cluster, "fsdp2"], sizes);
            scenario.runtime.overheads.overlap_slowdown.value = of_runtime;
            scenario.slowdown_beside_nccl()
        };
        for (cluster, of_runtime, found) in [
            ("dgx-a100", 1.7, 1.7),
            ("dgx-h100", 1.7, 1.15),
            ("dgx-b200", 1.7, 1.15),
            ("dgx-h100", 1.0, 1.0),
            ("a100-pcie-node", 1.72, 1.06),
        ] {
            let slowdown = slowdown(cluster, of_runtime);
            assert!((slowdown - found).abs() < 1e-9, "{cluster}: {slowdown}");
        }
    }
}
