//! Collectives: fits of one-node measurements in a scale-up domain; NCCL's algorithms beyond.
//!
//! Bytes follow nccl-tests: the whole tensor for all-gather and reduce-scatter, one rank's for
//! all-reduce and all-to-all. With `n` ranks, `r` of them per domain, and every rank its own network
//! card, a ring crosses each node boundary on `r` cards at once: its rate is
//! `min(rate in the domain, r · card)` (rail-optimised fabrics). Inside a domain, messages that a profile measured
//! between as many GPUs of one host replace the fits; between hosts, the ratio of measured to modelled time scales the
//! model.

use catalog::tables::{self, CollectiveFit, CollectiveOp};
use catalog::{Algorithm, Architecture, Bytes, Cluster, Domain, Fabric, Origin, Seconds};
use dtensor::CollectiveKind;
use plans::{Group, UsedConstant};

use super::algorithms::Crossing;
use super::between_gpus::{self, BetweenGpus};
use super::measured::{self, OfGpus};
use super::ratios::Ratios;
use crate::known::{self, constant};

#[derive(Clone, Debug)]
pub(super) struct NetworkPrices {
    fits: Vec<CollectiveFit>,
    /// Rate of this scale-up network over that of the network which the fits were measured on.
    scale: f64,
    /// GPUs of a scale-up domain.
    domain: u64,
    /// How many GPUs of each scale-up domain (such as a node, or an NVL72 rack) the job uses.
    placed: Domain,
    near: f64,
    far: f64,
    far_latency: f64,
    algorithms: Vec<Algorithm>,
    in_switch: bool,
    direct_links: bool,
    pci_express: bool,
    measured: BetweenGpus,
    /// Measured over modelled time between hosts, by ranks, ranks per host and bytes.
    over_hosts: [Ratios<3>; OVER_HOSTS.len()],
    source: Option<String>,
}

/// Kinds of messages that are measured between hosts; the last is from one rank to another.
const OVER_HOSTS: [CollectiveKind; 5] = [
    CollectiveKind::AllReduce,
    CollectiveKind::AllGather,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllToAll,
    CollectiveKind::SendRecv,
];

impl NetworkPrices {
    pub(super) fn new(cluster: &Cluster, ranks: u64, profile: Option<OfGpus<'_>>) -> Self {
        let table = table_of(cluster);
        let near = cluster.scale_up.bandwidth.value.0;
        let reference = tables::measured_on(table).map_or(near, |part| part.scale_up.value.0);
        let model = Self {
            fits: tables::one_node_collectives(table),
            scale: near / reference,
            domain: cluster.scale_up_domain.max(1),
            placed: cluster.domain(ranks),
            near,
            far: cluster.scale_out.bandwidth.value.0,
            far_latency: cluster.scale_out.latency.value.0 + fabric_latency(cluster.fabric),
            algorithms: cluster.algorithms.clone(),
            in_switch: cluster.in_switch_reduction,
            direct_links: cluster.device.architecture == Architecture::Cdna3,
            pci_express: cluster.pci_express,
            measured: profile.map_or_else(BetweenGpus::default, |of| BetweenGpus::of(of.0)),
            over_hosts: Default::default(),
            source: profile.map(|profile| profile.source()),
        };
        let over_hosts = OVER_HOSTS.map(|kind| {
            let measured = profile.map_or_else(Vec::new, |of| of.over_hosts(kind));
            Ratios::new(measured, |[ranks, together, bytes]| {
                let time = match operation(kind) {
                    Some(op) => model.across(op, Bytes(bytes), ranks, together),
                    None => model.far_transfer(Bytes(bytes)),
                };
                time.0
            })
        });
        Self {
            over_hosts,
            ..model
        }
    }

    /// Measured over modelled time of a message that crosses hosts; 1 if its kind was not measured.
    fn ratio(&self, kind: CollectiveKind, sizes: [u64; 3]) -> f64 {
        let at = OVER_HOSTS.iter().position(|&other| other == kind);
        at.and_then(|at| self.over_hosts[at].at(sizes))
            .unwrap_or(1.0)
    }

    pub(super) fn collective(&self, kind: CollectiveKind, bytes: Bytes, group: Group) -> Seconds {
        if group.size <= 1 || bytes.0 == 0 {
            return Seconds(0.0);
        }
        let Some(op) = operation(kind) else {
            return self.point_to_point(bytes, group);
        };
        let (ranks, together) = (group.size, group.ranks_per_domain(self.placed));
        if together >= ranks {
            let measured = self.measured.time(kind, bytes, ranks);
            return measured.unwrap_or_else(|| self.inside(op, bytes, ranks));
        }
        let ratio = self.ratio(kind, [ranks, together, bytes.0]);
        self.across(op, bytes, ranks, together) * ratio
    }

    /// Time for which a collective occupies the network card of each of its ranks; none if all ranks share a scale-up domain.
    pub(super) fn on_card(&self, kind: CollectiveKind, bytes: Bytes, group: Group) -> Seconds {
        if group.size <= 1 || !group.lies_across(self.placed) {
            return Seconds(0.0);
        }
        let (ranks, together) = (group.size, group.ranks_per_domain(self.placed));
        let card = self.far * known::CARD_SHARE.factor();
        let sent = match operation(kind) {
            None => bytes.as_f64(),
            // Every rank sends by its own card to all ranks of other domains.
            Some(CollectiveOp::AllToAll) => {
                bytes.as_f64() * (ranks - together) as f64 / ranks as f64
            }
            // The ranks of a domain share what crosses its boundary.
            Some(op) => bytes.as_f64() * bus(op, ranks) / together as f64,
        };
        Seconds(sent / card)
    }

    /// Modelled time of a collective over `ranks` ranks in several scale-up (NVLink) domains, with
    /// `together` of them in each: that of the fastest algorithm that the cluster has.
    fn across(&self, op: CollectiveOp, bytes: Bytes, ranks: u64, together: u64) -> Seconds {
        // A rank that is alone in its domain has no links inside it.
        let inside_rate = match together {
            1 => f64::INFINITY,
            _ => self.inside_rate(op, together),
        };
        let cards = together as f64 * self.far * known::CARD_SHARE.factor();
        let crossing = Crossing {
            op,
            bytes: bytes.as_f64(),
            ranks,
            together,
            moved: bytes.as_f64() * bus(op, ranks) / cards.min(inside_rate),
            inside: bytes.as_f64() * bus(op, ranks) / inside_rate,
            cards,
            far_latency: self.far_latency,
            far: self.far,
            inside_rate,
        };
        let fastest = |among: &[Algorithm]| {
            let times = among.iter().filter_map(|a| crossing.time(*a));
            times.reduce(Seconds::min)
        };
        fastest(&self.algorithms)
            .or_else(|| fastest(&Algorithm::MEASURED))
            .expect("every operation has a measured algorithm, a test shows")
    }

    /// The fit for the largest measured number of ranks up to `ranks` (at least the smallest).
    fn fit(&self, op: CollectiveOp, ranks: u64) -> Option<&CollectiveFit> {
        let of_op = || self.fits.iter().filter(|f| f.op == op);
        of_op()
            .filter(|f| f.ranks <= ranks)
            .max_by_key(|f| f.ranks)
            .or_else(|| of_op().min_by_key(|f| f.ranks))
    }

    /// Bus bandwidth inside a domain, bytes per second.
    fn inside_rate(&self, op: CollectiveOp, ranks: u64) -> f64 {
        let measured = self
            .fit(op, ranks)
            .map_or(known::UNMEASURED_SHARE.factor() * self.near, |f| {
                f.rate * 1e9 * self.scale
            });
        // Without in-switch reduction a ring bounds all-reduce like the other collectives.
        let rate = if op == CollectiveOp::AllReduce && !self.in_switch {
            measured.min(known::RING_SHARE.factor() * self.near)
        } else {
            measured
        };
        // A full mesh of direct links gives a small group only the links among its members.
        if self.direct_links {
            rate * (ranks.min(self.domain) - 1) as f64 / (self.domain - 1) as f64
        } else {
            rate
        }
    }

    fn inside(&self, op: CollectiveOp, bytes: Bytes, ranks: u64) -> Seconds {
        let unmeasured = (
            known::UNMEASURED_START.factor() * 1e6,
            known::UNMEASURED_RAMP.factor() * 1e6,
            8,
        );
        let (a, b, measured) = self
            .fit(op, ranks)
            .map_or(unmeasured, |f| (f.a, f.b, f.ranks));
        // Larger groups than measured add steps in proportion.
        let steps = (ranks as f64 / measured as f64).max(1.0);
        let megabytes = bytes.as_f64() / 1e6;
        let start = (a * steps + b * megabytes.sqrt()) * 1e-6;
        Seconds(start + bytes.as_f64() * bus(op, ranks) / self.inside_rate(op, ranks))
    }

    pub(super) fn point_to_point(&self, bytes: Bytes, group: Group) -> Seconds {
        // If a group spans domains, neighbours in different domains are the slowest.
        if group.lies_across(self.placed) {
            let ratio = self.ratio(CollectiveKind::SendRecv, [2, 1, bytes.0]);
            return self.far_transfer(bytes) * ratio;
        }
        if let Some(time) = self.measured.time(CollectiveKind::SendRecv, bytes, 2) {
            return time;
        }
        let links = if self.direct_links {
            (self.domain - 1) as f64
        } else {
            1.0
        };
        let alone = self.near * known::NEAR_SHARE.factor() / links;
        // The ranks of a group send at the same time, and over PCI Express they share the host's links, as in an all-gather.
        let rate = match self.pci_express {
            true => alone.min(self.inside_rate(CollectiveOp::AllGather, group.size)),
            false => alone,
        };
        Seconds(known::NEAR_TRANSFER.factor() + bytes.as_f64() / rate)
    }

    /// Time from one rank to another in a different domain.
    fn far_transfer(&self, bytes: Bytes) -> Seconds {
        Seconds(
            known::FAR_TRANSFER.factor()
                + self.far_latency
                + bytes.as_f64() / (self.far * known::CARD_SHARE.factor()),
        )
    }

    pub(super) fn provenance(&self) -> Vec<UsedConstant> {
        let mut used: Vec<UsedConstant> = self
            .fits
            .iter()
            .filter(|f| f.ranks == 8)
            .map(|f| {
                let name = format!("one-node {:?}, {} ranks", f.op, f.ranks);
                let [fixed, of_root] = [f.a, f.b].map(|micro| Seconds(micro * 1e-6));
                let value = format!("{fixed} + {of_root}/√MB, {} GB/s", f.rate);
                let source = format!(
                    "nccl-tests tables of ai-dynamo/aiconfigurator@095f58a; fit error {:.1}%",
                    f.error * 100.0
                );
                constant(&name, value, Origin::Fitted, &source)
            })
            .collect();
        used.extend(self.measurements());
        used
    }

    /// Provenance rows of what the profile measured.
    fn measurements(&self) -> Vec<UsedConstant> {
        let Some(source) = &self.source else {
            return Vec::new();
        };
        let groups: Vec<String> = self.measured.groups().iter().map(u64::to_string).collect();
        let inside = (!groups.is_empty()).then(|| {
            let count = self.measured.count();
            let value = format!("{count} measured between {} GPUs", groups.join(", "));
            constant("messages inside a node", value, Origin::Measured, source)
        });
        let between = OVER_HOSTS.iter().zip(&self.over_hosts);
        let between = between.filter_map(|(&kind, ratios)| {
            let name = format!("{} between nodes", between_gpus::name(kind));
            let value = measured::beside(ratios.summary()?, "the model");
            Some(constant(&name, value, Origin::Measured, source))
        });
        inside.into_iter().chain(between).collect()
    }
}

/// The table of collectives in a node: the device's own, or one over PCI Express without NVLink.
fn table_of(cluster: &Cluster) -> &str {
    match cluster.device.architecture {
        Architecture::Cpu | Architecture::Cdna3 => &cluster.device.kernels,
        _ if cluster.pci_express => tables::OVER_PCI_EXPRESS,
        _ => &cluster.device.kernels,
    }
}

/// The collective operation of a message; `None` for messages from one rank to another.
fn operation(kind: CollectiveKind) -> Option<CollectiveOp> {
    match kind {
        CollectiveKind::SendRecv | CollectiveKind::RingExchange => None,
        CollectiveKind::AllReduce => Some(CollectiveOp::AllReduce),
        CollectiveKind::AllGather => Some(CollectiveOp::AllGather),
        CollectiveKind::ReduceScatter => Some(CollectiveOp::ReduceScatter),
        CollectiveKind::AllToAll => Some(CollectiveOp::AllToAll),
    }
}

/// Bytes on the busiest link over the collective's size (nccl-tests `PERFORMANCE.md`).
fn bus(op: CollectiveOp, ranks: u64) -> f64 {
    let n = ranks as f64;
    match op {
        CollectiveOp::AllReduce => 2.0 * (n - 1.0) / n,
        CollectiveOp::AllGather | CollectiveOp::ReduceScatter | CollectiveOp::AllToAll => {
            (n - 1.0) / n
        }
    }
}

/// Latency of one step of a collective beyond what it is on InfiniBand, in seconds.
fn fabric_latency(fabric: Fabric) -> f64 {
    match fabric {
        Fabric::InfiniBand | Fabric::Local => 0.0,
        Fabric::Roce => known::ROCE.factor(),
        Fabric::Efa => known::EFA.factor(),
        Fabric::Tcpx => known::TCPX.factor(),
        Fabric::Ethernet => known::ETHERNET.factor(),
    }
}
