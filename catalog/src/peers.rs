//! How the GPUs of a node reach each other's memory, which decides whether tensor-parallel messages can run beside matrix products.

use crate::cluster::Cluster;
use crate::device::Architecture;
use crate::runtime::Runtime;

impl Cluster {
    /// Whether every GPU reads and writes the memory of the others of its node.
    #[must_use]
    pub fn reaches_peers(&self) -> bool {
        self.each_pool(|pool| !pool.pci_express || pool.device.peers_over_pci_express)
    }

    /// Whether every GPU can write to all others of its node at once (CUDA multicast), as NVSwitch does from Hopper on.
    #[must_use]
    pub fn has_multicast(&self) -> bool {
        self.each_pool(|pool| {
            let architecture = pool.device.architecture;
            let has = matches!(architecture, Architecture::Hopper | Architecture::Blackwell);
            has && !pool.pci_express
        })
    }

    /// Whether a condition holds for the cluster, or for each of its pools.
    fn each_pool(&self, is: impl Fn(&Self) -> bool) -> bool {
        match &self.pools {
            Some(pools) => pools.parts.iter().all(|pool| is(&pool.cluster)),
            None => is(self),
        }
    }
}

impl Runtime {
    /// Whether this runtime can overlap tensor-parallel messages with matrix products on a cluster.
    /// Both ways to overlap them write into the memory of other GPUs: Transformer Engine's
    /// userbuffers (NVIDIA/TransformerEngine@d0067d0, `userbuffers-host.cpp`, "No peer-to-peer
    /// access available between GPUs") and PyTorch's symmetric memory.
    #[must_use]
    pub fn overlaps_tensor_parallel_on(&self, cluster: &Cluster) -> bool {
        self.space.tensor_parallel_overlap && cluster.reaches_peers()
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn old_gpus_have_no_multicast_and_game_cards_reach_no_other() {
        for (cluster, multicast, peers) in [
            ("dgx-h100", true, true),
            ("gb200-nvl72", true, true),
            ("h100-pcie-node", false, true),
            ("dgx-a100", false, true),
            ("l40s-node", false, true),
            ("rtx-6000-ada-node", false, true),
            ("rtx-4090-node", false, false),
            ("rtx-5090-node", false, false),
            ("rtx-3090 x 2 per node, nvlink 56 GB/s", false, true),
            ("8 x dgx-h100 + 8 x dgx-a100", false, true),
        ] {
            let found = crate::load::cluster(cluster).expect(cluster);
            assert_eq!(found.has_multicast(), multicast, "{cluster}");
            assert_eq!(found.reaches_peers(), peers, "{cluster}");
        }
    }
}
