//! How the GPUs of a job lie in scale-up domains.

use crate::Cluster;

/// The scale-up domains that a job uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Domain {
    /// GPUs of a domain that the job uses; of the last domain it may use fewer.
    pub gpus: u64,
    /// Whether the whole job lies in one domain.
    pub is_whole_job: bool,
}

impl Cluster {
    /// How a job of so many GPUs lies in scale-up domains. Whole nodes are spread evenly over domains, if fewer than twice the fewest
    /// possible suffice: 128 GPUs of NVL72 racks are 64 of each of two. Otherwise it fills one domain after the other.
    #[must_use]
    pub fn domain(&self, gpus: u64) -> Domain {
        let whole = self.scale_up_domain.max(1);
        let needed = gpus.div_ceil(whole).max(1);
        let even = |domains: &u64| gpus.is_multiple_of(domains * self.gpus_per_node);
        let domains = (needed..2 * needed).find(even);
        Domain {
            gpus: domains.map_or(whole, |domains| gpus / domains),
            is_whole_job: needed == 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Domain;

    #[test]
    fn jobs_use_as_many_gpus_of_each_domain_if_whole_nodes_allow_it() {
        for (cluster, job, gpus) in [
            ("gb200-nvl72", 128, 64),
            ("gb200-nvl72", 144, 72),
            ("gb200-nvl72", 1024, 64),
            ("gb200-nvl72", 76, 72),
            ("dgx-h100", 12, 8),
            ("dgx-h100", 24, 8),
        ] {
            let cluster = crate::load::cluster(cluster).expect("a preset");
            let is_whole_job = false;
            assert_eq!(cluster.domain(job), Domain { gpus, is_whole_job }, "{job}");
        }
    }
}
