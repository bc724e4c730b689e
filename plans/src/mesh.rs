//! The device mesh: named axes, their order, and the communication groups of an axis.

use catalog::Domain;
use catalog::elementary::greatest_common_divisor;

/// The communication groups of an axis: axes are contiguous in rank order, so all groups are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group {
    /// Ranks in the group.
    pub size: u64,
    /// Distance in rank order between neighbours of the group.
    pub stride: u64,
}

impl Group {
    /// The fewest ranks that a group has in any domain where it has some: groups of 12 neighbours
    /// in domains of 8 have 8 ranks in one domain and 4 in the next, so it is 4.
    #[must_use]
    pub fn ranks_per_domain(self, domain: Domain) -> u64 {
        if domain.is_whole_job {
            return self.size;
        }
        // Relative to groups, domains end at every multiple of this number.
        let ends = greatest_common_divisor(domain.gpus, self.size * self.stride);
        (ends / self.stride).clamp(1, self.size)
    }

    /// The most domains over which any group of the axis spreads, in a job of this many ranks.
    #[must_use]
    pub fn most_domains(self, domain: Domain, ranks: u64) -> u64 {
        if domain.is_whole_job {
            return 1;
        }
        let first = (0..ranks).filter(|rank| (rank / self.stride).is_multiple_of(self.size));
        let domains = first.map(|first| {
            let mut of_ranks: Vec<u64> = (0..self.size)
                .map(|place| (first + place * self.stride) / domain.gpus)
                .collect();
            of_ranks.dedup();
            of_ranks.len() as u64
        });
        domains.max().unwrap_or(1)
    }

    /// Whether some groups have ranks in several domains.
    #[must_use]
    pub fn lies_across(self, domain: Domain) -> bool {
        self.ranks_per_domain(domain) < self.size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_part_of_a_group_counts() {
        let domain = |gpus, is_whole_job| Domain { gpus, is_whole_job };
        for ([size, stride], domain, ranks) in [
            ([8, 1], domain(8, false), 8),
            ([16, 1], domain(8, false), 8),
            ([12, 1], domain(8, false), 4),
            ([6, 1], domain(8, false), 2),
            ([6, 1], domain(8, true), 6),
            ([16, 1], domain(72, false), 8),
            ([4, 4], domain(8, false), 2),
            ([4, 16], domain(8, false), 1),
            ([2, 3], domain(8, false), 1),
            ([3, 2], domain(8, false), 1),
        ] {
            let found = Group { size, stride }.ranks_per_domain(domain);
            assert_eq!(found, ranks, "{size} ranks, {stride} apart, {domain:?}");
        }
    }

    #[test]
    fn ranks_of_a_group_may_share_a_domain() {
        let domain = |gpus, is_whole_job| Domain { gpus, is_whole_job };
        for ([size, stride], domain, job, most) in [
            ([8, 1], domain(8, false), 16, 1),
            ([16, 1], domain(8, false), 32, 2),
            // Eight in one domain and four in the next, or four and eight.
            ([12, 1], domain(8, false), 24, 2),
            ([6, 1], domain(8, true), 6, 1),
            ([4, 16], domain(8, false), 64, 4),
            // Ranks 0 and 48 share the first domain.
            ([3, 48], domain(72, false), 144, 2),
            ([17, 8], domain(68, false), 136, 2),
        ] {
            let found = Group { size, stride }.most_domains(domain, job);
            assert_eq!(found, most, "{size} ranks, {stride} apart, {domain:?}");
        }
    }
}
