//! How tokens travel to the ranks of their experts and back, and on which clusters each way exists.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr, VariantArray};

use crate::cluster::{Cluster, Fabric};
use crate::device::Architecture;

/// A way to send tokens to the expert-parallel ranks that hold their experts, and to bring back what these return.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
#[derive(EnumString, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Dispatcher {
    /// NCCL's all-to-all: a token is sent once for every expert that it chose.
    AllToAll,
    /// Every rank gathers the tokens of all ranks, and what its experts return is summed by a reduce-scatter.
    AllGather,
    /// DeepEP's kernels: a token is sent once to every rank, or once to every node which passes it on, however many experts
    /// it chose there.
    #[serde(rename = "deepep")]
    #[strum(serialize = "deepep")]
    DeepEp,
    /// NVIDIA's kernels of the same kind, which also reach over the NVLink of several nodes.
    #[serde(rename = "hybridep")]
    #[strum(serialize = "hybridep")]
    HybridEp,
}

impl Dispatcher {
    /// Every dispatcher.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Its name in strategies and files.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Whether a token that chose several experts of one rank, or of one node, is sent there once.
    #[must_use]
    pub fn deduplicates(self) -> bool {
        match self {
            Self::AllToAll | Self::AllGather => false,
            Self::DeepEp | Self::HybridEp => true,
        }
    }

    /// Whether a cluster can run it, in groups inside one scale-up domain or `across` several.
    ///
    /// DeepEP and HybridEP need NVLink between all GPUs of a node and RDMA between nodes (deepseek-ai/DeepEP@0297fc8,
    /// README.md, Requirements). DeepEP runs on Ampere, Hopper, B200 and B300, HybridEP on GB200 and GB300 too
    /// (NVIDIA-NeMo/Megatron-Bridge@067f987, training/flex_dispatcher_backend.py).
    #[must_use]
    pub fn exists_on(self, cluster: &Cluster, across: bool) -> bool {
        if let Some(pools) = &cluster.pools {
            let mut clusters = pools.parts.iter().map(|pool| &pool.cluster);
            return clusters.all(|cluster| self.exists_on(cluster, across));
        }
        if !self.deduplicates() {
            return true;
        }
        let device = &cluster.device;
        let is = |names: &[&str]| names.iter().any(|name| device.name.starts_with(name));
        let of_device = match device.architecture {
            Architecture::Ampere | Architecture::Hopper => true,
            Architecture::Blackwell => {
                is(&["b200", "b300"]) || self == Self::HybridEp && is(&["gb200", "gb300"])
            }
            Architecture::Volta
            | Architecture::Ada
            | Architecture::BlackwellRtx
            | Architecture::Cdna3
            | Architecture::Cpu => false,
        };
        let rdma = matches!(cluster.fabric, Fabric::InfiniBand | Fabric::Roce);
        of_device && !cluster.pci_express && (rdma || !across)
    }
}

/// When a runtime orders rows a second time around [`Dispatcher::AllToAll`]. Every rank sends its rows in the order of the experts, so
/// the rows that arrive are ordered by sender, and one more kernel orders them by expert; another one restores the order by sender
/// before the rows return.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SecondSort {
    /// Never.
    Never,
    /// Where rows are exchanged between ranks.
    AfterExchange,
    /// Where a rank has several experts, even if all rows are its own and in order already.
    SeveralExperts,
    /// Everywhere: the kernel that orders rows also pads those of every expert.
    Always,
}

/// Which tokens each tensor-parallel rank routes in a layer with experts.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum RoutedTokens {
    /// Its own: sequence parallelism has divided them (Megatron-Core).
    Own,
    /// All tokens of the group, gathered before the layer. Ranks share the experts' work, by rows or by columns of their weights, and
    /// what they computed is added up and divided again after it. In backward, ranks with columns add up gradients of rows.
    Gathered,
    /// All without expert parallelism, its own with it. In backward, ranks with columns add up gradients of tokens.
    GatheredUnlessSpread,
}

impl RoutedTokens {
    /// Whether ranks gather all tokens under this size of expert parallelism.
    #[must_use]
    pub const fn are_gathered(self, expert_parallel: u64) -> bool {
        match self {
            Self::Own => false,
            Self::Gathered => true,
            Self::GatheredUnlessSpread => expert_parallel == 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Dispatcher;

    #[test]
    fn libraries_need_gpus_that_they_are_written_for() {
        use Dispatcher::{AllGather, AllToAll, DeepEp, HybridEp};
        let everywhere = vec![AllToAll, AllGather];
        let deduplicating = Dispatcher::ALL.to_vec();
        for (name, across, has) in [
            ("dgx-h100", true, &deduplicating),
            ("dgx-a100", true, &deduplicating),
            ("dgx-b200", true, &deduplicating),
            ("gb200-nvl72", true, &vec![AllToAll, AllGather, HybridEp]),
            // Without RDMA between nodes, NVLink, or NVIDIA's GPUs.
            ("aws-p5", true, &everywhere),
            ("aws-p5", false, &deduplicating),
            ("l40s-node", false, &everywhere),
            ("h100-pcie-node", false, &everywhere),
            ("dgx2-v100", false, &everywhere),
            ("mi300x", true, &everywhere),
            ("rtx-5090-node", false, &everywhere),
        ] {
            let cluster = crate::load::cluster(name).expect("a preset");
            let found: Vec<Dispatcher> = Dispatcher::ALL
                .iter()
                .copied()
                .filter(|dispatcher| dispatcher.exists_on(&cluster, across))
                .collect();
            assert_eq!(found, *has, "{name}, across nodes: {across}");
        }
        assert!(DeepEp.deduplicates());
    }
}
