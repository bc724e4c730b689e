//! Clusters: devices in nodes, joined by a scale-up and a scale-out network.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::calibration::{Calibration, TimeFactors};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Wrong, above_zero, in_range};
use crate::host::Host;
use crate::profile::Profile;
use crate::provenance::Sourced;
use crate::units::{Bandwidth, FlopRate, Seconds};
use crate::workload::MAX_GPUS;

/// Most devices in a node or in a scale-up domain.
const MAX_DOMAIN: u64 = 1 << 16;
/// Largest bandwidth of a link, far above any that is made.
const MAX_BANDWIDTH: Bandwidth = Bandwidth(1e15);
/// Largest latency of a link: a signal crosses the world in a tenth of it.
const MAX_LATENCY: Seconds = Seconds(1.0);
/// Largest price of a device, in dollars per hour.
const MAX_PRICE: f64 = 1e6;

/// A resolved cluster.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Cluster {
    /// Preset name, such as `dgx-h100`.
    pub name: String,
    /// The accelerator in every node.
    pub device: Device,
    /// Devices per host.
    pub gpus_per_node: u64,
    /// Devices in a scale-up (NVLink, xGMI) domain; more than `gpus_per_node` on NVL72 racks.
    pub scale_up_domain: u64,
    /// Network inside a domain, per device and direction.
    pub scale_up: Link,
    /// Whether the devices of a node reach each other over PCI Express alone.
    pub pci_express: bool,
    /// Network between domains, per device and direction.
    pub scale_out: Link,
    /// The host of every node, if it is known.
    pub host: Option<Host>,
    /// Whether switches reduce in the scale-up domain (NVLS).
    pub in_switch_reduction: bool,
    /// Family of collective tuning: which measured tables and latencies apply.
    pub fabric: Fabric,
    /// Algorithms that collectives between domains may use.
    pub algorithms: Vec<Algorithm>,
    /// On-demand price of one device, dollars per hour, if known.
    pub dollars_per_gpu_hour: Option<Sourced<f64>>,
    /// Devices available; `None` means as many as asked.
    pub max_gpus: Option<u64>,
    /// Measurements of this very machine; if present, all prices come from them.
    pub profile: Option<Arc<Profile>>,
    /// Measured kernels of such GPUs and messages within a host; they replace the built-in tables.
    pub gpu_profile: Option<Arc<Profile>>,
    /// Time factors learned from measured steps on this cluster.
    pub calibration: Option<Calibration>,
    /// Compute speed of its devices relative to their tables, above 0 and up to 1; `None` means 1.
    pub speed: Option<Sourced<f64>>,
    /// Spread of pass times between ranks: standard deviation of the time of a pass, as a share of
    /// that time, from 0 to below 1; `None` means 0.
    pub jitter: Option<Sourced<f64>>,
    /// The pools, if not all nodes are alike. Name, `max_gpus`, mean price and common sizes are
    /// then the whole cluster's; the device, networks and host are the first pool's.
    pub pools: Option<Arc<Pools>>,
}

/// The parts of a cluster whose nodes are not all alike, and the link between them.
#[derive(Clone, Debug, PartialEq)]
pub struct Pools {
    /// The pools, in the order in which a pipeline passes through them; at least two.
    pub parts: Vec<Pool>,
    /// The link that all traffic between two pools shares, with its bandwidth in each direction.
    /// `None` if all are on one network: transfers then run at the slower node's network rate.
    pub between: Option<Link>,
}

/// Nodes of a cluster that are alike: same devices, same networks.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    /// The cluster as it was named: a preset or a file.
    pub arg: String,
    /// A cluster made of such nodes.
    pub cluster: Cluster,
    /// Number of devices.
    pub gpus: u64,
}

impl Pools {
    /// Number of devices of all pools.
    #[must_use]
    pub fn gpus(&self) -> u64 {
        self.parts.iter().map(|pool| pool.gpus).sum()
    }

    /// Devices per node; `None` if they differ between pools.
    #[must_use]
    pub fn gpus_per_node(&self) -> Option<u64> {
        let mut sizes = self.parts.iter().map(|pool| pool.cluster.gpus_per_node);
        let first = sizes.next()?;
        sizes.all(|size| size == first).then_some(first)
    }

    /// Index of each pipeline rank's pool; `None` if ranks differ in size or lie in two pools.
    #[must_use]
    pub fn of_pipeline(&self, ranks: u64) -> Option<Vec<usize>> {
        let total = self.gpus();
        let each = total
            .checked_div(ranks)
            .filter(|each| each * ranks == total)?;
        let mut pools = Vec::with_capacity(ranks as usize);
        for (index, pool) in self.parts.iter().enumerate() {
            if !pool.gpus.is_multiple_of(each) {
                return None;
            }
            pools.extend((0..pool.gpus / each).map(|_| index));
        }
        Some(pools)
    }
}

impl Cluster {
    /// Whether the cluster's hosts are known; with pools, those of every pool.
    #[must_use]
    pub fn has_hosts(&self) -> bool {
        match &self.pools {
            Some(pools) => (pools.parts.iter()).all(|pool| pool.cluster.host.is_some()),
            None => self.host.is_some(),
        }
    }

    /// Checks the cluster's values, except its device, which was checked when it was read.
    ///
    /// # Errors
    /// The field, and what is wrong with it.
    pub(crate) fn check(&self) -> Result<(), Wrong> {
        let (node, domain) = (self.gpus_per_node, self.scale_up_domain);
        for (field, size) in [("gpus_per_node", node), ("scale_up_domain", domain)] {
            in_range(size, 1..=MAX_DOMAIN).map_err(|wrong| (field, wrong))?;
        }
        if !domain.is_multiple_of(node) && !node.is_multiple_of(domain) {
            let message = format!(
                "{domain} and nodes of {node} GPUs do not fill each other; expected a divisor or a \
                 multiple of {node}"
            );
            return Err(("scale_up_domain", message));
        }
        let between = self.pools.as_ref().and_then(|pools| pools.between.as_ref());
        let links = [("scale_up", &self.scale_up), ("scale_out", &self.scale_out)];
        for (field, link) in links
            .into_iter()
            .chain(between.map(|link| ("between", link)))
        {
            above_zero(link.bandwidth.value, MAX_BANDWIDTH)
                .map_err(|wrong| (field, format!("bandwidth {wrong}")))?;
            let latency = link.latency.value;
            if !(latency.0 >= 0.0 && latency <= MAX_LATENCY) {
                let message =
                    format!("latency {latency} is out of range; expected 0 to {MAX_LATENCY}");
                return Err((field, message));
            }
        }
        if let Some(host) = &self.host {
            host.check().map_err(|message| ("host", message))?;
        }
        if let Some(price) = &self.dollars_per_gpu_hour {
            in_range(price.value, 0.0..=MAX_PRICE)
                .map_err(|wrong| ("dollars_per_gpu_hour", wrong))?;
        }
        self.check_condition()?;
        let most = self.max_gpus.unwrap_or(MAX_GPUS);
        in_range(most, 1..=MAX_GPUS).map_err(|wrong| ("max_gpus", wrong))
    }

    /// Checks that speed and jitter are in range.
    fn check_condition(&self) -> Result<(), Wrong> {
        if let Some(speed) = &self.speed {
            above_zero(speed.value, 1.0).map_err(|wrong| ("speed", wrong))?;
        }
        if let Some(jitter) = &self.jitter
            && !(0.0..1.0).contains(&jitter.value)
        {
            let message = format!(
                "{} is out of range; expected from 0 to below 1",
                jitter.value
            );
            return Err(("jitter", message));
        }
        Ok(())
    }

    /// Calibration factors under a runtime; all 1 if the cluster is not calibrated.
    #[must_use]
    pub fn time_factors(&self, runtime: &str) -> TimeFactors {
        let learned = self.calibration.as_ref();
        learned.map_or_else(TimeFactors::default, |c| c.factors(runtime))
    }

    /// The calibrations whose factors multiply its prices: its own, or those of its pools, equal ones once.
    #[must_use]
    pub fn calibrations(&self) -> Vec<&Calibration> {
        let Some(pools) = &self.pools else {
            return self.calibration.iter().collect();
        };
        let mut found: Vec<&Calibration> = Vec::new();
        for own in pools
            .parts
            .iter()
            .filter_map(|pool| pool.cluster.calibration.as_ref())
        {
            if !found.contains(&own) {
                found.push(own);
            }
        }
        found
    }

    /// The cluster with these factors in place of those of a calibration, in every pool that has it.
    #[must_use]
    pub fn with_factors(&self, of: &Calibration, factors: TimeFactors) -> Self {
        let changed = |calibration: &Option<Calibration>| {
            let own = calibration.clone();
            own.map(|own| match own == *of {
                true => Calibration {
                    time_factors: factors,
                    ..own
                },
                false => own,
            })
        };
        let pools = self.pools.as_ref().map(|pools| {
            let parts = pools.parts.iter().map(|pool| Pool {
                cluster: pool.cluster.with_factors(of, factors),
                ..pool.clone()
            });
            Arc::new(Pools {
                parts: parts.collect(),
                between: pools.between.clone(),
            })
        });
        Self {
            calibration: changed(&self.calibration),
            pools,
            ..self.clone()
        }
    }

    /// Checks a job's number of devices: whole nodes if it spans several; of pools, all devices.
    ///
    /// # Errors
    /// What is wrong, and which numbers nearby are right.
    pub fn check_devices(&self, gpus: u64) -> Result<(), String> {
        if gpus == 0 || gpus > MAX_GPUS {
            return Err(format!(
                "{gpus} GPUs are out of range; expected 1 to {MAX_GPUS}"
            ));
        }
        if let Some(pools) = &self.pools {
            let total = pools.gpus();
            return match gpus == total {
                true => Ok(()),
                false => Err(format!(
                    "{} has {total} GPUs, and all of them are planned for",
                    self.name
                )),
            };
        }
        let node = self.gpus_per_node;
        if gpus > node && !gpus.is_multiple_of(node) {
            let (below, above) = (gpus / node * node, gpus.div_ceil(node) * node);
            return Err(format!(
                "{} has {node} GPUs per node; the nearest numbers of GPUs in whole nodes are {below} and {above}",
                self.name
            ));
        }
        let counted = |most: u64| match most {
            1 => "1 GPU".to_owned(),
            _ => format!("{most} GPUs"),
        };
        let most = self.max_gpus.filter(|&most| gpus > most).map(counted);
        match most {
            Some(most) if self.profile.is_some() => Err(format!(
                "{} was measured on {most}; `vescale-plan profile --device cuda --gpus {gpus}` measures more",
                self.name
            )),
            Some(most) => Err(format!("{} has {most}", self.name)),
            None => Ok(()),
        }
    }

    /// `gpus` of its devices in words: `64 × A100-80GB`; for pools, all their devices.
    #[must_use]
    pub fn devices(&self, gpus: u64) -> String {
        let Some(pools) = &self.pools else {
            return format!("{gpus} × {}", self.device.name);
        };
        let parts = pools.parts.iter();
        let parts: Vec<String> = parts.map(|pool| pool.cluster.devices(pool.gpus)).collect();
        parts.join(" + ")
    }

    /// Dense peak for operands of a type ([`Device::peak_rate`]), averaged over all devices.
    #[must_use]
    pub fn peak_rate(&self, dtype: DType) -> Option<FlopRate> {
        let Some(pools) = &self.pools else {
            return self.device.peak_rate(dtype);
        };
        let mut sum = 0.0;
        for pool in &pools.parts {
            sum += pool.cluster.peak_rate(dtype)?.0 * pool.gpus as f64;
        }
        Some(FlopRate(sum / pools.gpus() as f64))
    }

    /// Number of `ranks` that compute at the same time: on a CPU, at most its number of cores.
    #[must_use]
    pub fn at_once(&self, ranks: u64) -> u64 {
        match &self.profile {
            Some(profile) if profile.machine.gpu.is_none() => ranks.min(profile.machine.cores),
            _ => ranks,
        }
    }
}

/// One level of the network.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    /// Peak per device and direction.
    pub bandwidth: Sourced<Bandwidth>,
    /// Extra latency of one step on top of the collective library's own.
    pub latency: Sourced<Seconds>,
}

/// Bandwidth of a PCI Express 5.0 link of 16 lanes, bytes per second.
const PCI_EXPRESS: f64 = 64e9;

impl Link {
    /// Whether a link between devices of a node is PCI Express, by its bandwidth: all NVLinks of a GPU together are faster than
    /// PCI Express 5.0.
    pub(crate) fn is_pci_express(&self) -> bool {
        self.bandwidth.value.0 <= PCI_EXPRESS
    }
}

/// How a collective library sends between scale-up domains (NCCL's `NCCL_ALGO`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Algorithm {
    /// Every rank sends to the next.
    Ring,
    /// Two trees over the nodes, up and down: all-reduce.
    Tree,
    /// Every rank sends to every other: all-to-all.
    Pairwise,
    /// Parallel aggregated trees, for one rank per domain: all-gather and reduce-scatter in a logarithmic
    /// number of steps (NCCL 2.23). Its price is not measured yet.
    Pat,
}

impl Algorithm {
    /// Algorithms with measured prices, which clusters use by default.
    pub const MEASURED: [Self; 3] = [Self::Ring, Self::Tree, Self::Pairwise];
}

/// Kind of scale-out network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Fabric {
    /// InfiniBand, rail-optimised.
    InfiniBand,
    /// RDMA over converged Ethernet.
    Roce,
    /// AWS elastic fabric adapter.
    Efa,
    /// GPUDirect-TCPX(O).
    Tcpx,
    /// Ordinary Ethernet sockets.
    Ethernet,
    /// Threads or processes of one host.
    Local,
}
