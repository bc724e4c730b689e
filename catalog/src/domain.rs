//! How a job's GPUs are spread over scale-up domains.

use crate::Cluster;

/// The scale-up domains that a job uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Domain {
    /// GPUs that the job uses in each domain; in the last one it may use fewer.
    pub gpus: u64,
    /// Whether one domain is enough for the whole job.
    pub is_whole_job: bool,
}

impl Cluster {
    /// Spreads a job over domains: whole nodes evenly, over fewer than twice the fewest domains, if
    /// possible (128 GPUs of NVL72 racks: 64 in each of two); else it fills one after another.
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
