//! Clusters of several pools in one line: `64 x dgx-a100 + 32 x v100-node, 100 Gb/s between`.

use std::sync::Arc;

use crate::cluster::{Cluster, Link, Pool, Pools};
use crate::device::Architecture;
use crate::elementary::greatest_common_divisor;
use crate::error::SpecError;
use crate::mistake::Mistake;
use crate::provenance::{Origin, Sourced};
use crate::units::{Bandwidth, Seconds};
use crate::workload::MAX_GPUS;

const EXAMPLE: &str = "--cluster '64 x dgx-a100 + 32 x dgx2-v100, 100 Gb/s between, 20 ms away'";
/// Most pools of a cluster: a search tries them in every order.
const MOST: usize = 4;

/// Whether a text lists pools, rather than names a cluster.
pub(crate) fn lists_pools(text: &str) -> bool {
    text.contains(" + ")
}

/// A line that lists pools with other names of their clusters; `named` gives the name for each. Links stay as they are.
pub(crate) fn with_names(line: &str, named: impl Fn(&str) -> String) -> String {
    let (parts, links) = match line.find(',') {
        Some(at) => line.split_at(at),
        None => (line, ""),
    };
    let pool = |part: &str| match part.split_once(" x ") {
        Some((count, name)) => format!("{} x {}", count.trim(), named(name.trim())),
        None => part.trim().to_owned(),
    };
    let parts: Vec<String> = parts.split(" + ").map(pool).collect();
    parts.join(" + ") + links
}

/// Reads a cluster of pools from a line. `load` finds the cluster of a pool's nodes by name.
///
/// # Errors
/// When a part is neither GPUs of a cluster nor a link, or a pool is larger than its cluster.
pub(crate) fn read(
    line: &str,
    load: impl Fn(&str) -> Result<Cluster, SpecError>,
) -> Result<Cluster, SpecError> {
    let mut parts = line.split(',').map(str::trim);
    let pools = parts.next().unwrap_or_default();
    let pools: Vec<Pool> = (pools.split('+'))
        .map(|part| pool(line, part.trim(), &load))
        .collect::<Result<_, _>>()?;
    if pools.len() > MOST {
        let message = format!("{} pools; expected at most {MOST}", pools.len());
        return Err(wrong(line, Mistake::new(message)));
    }
    if let Some(part) = pools.iter().find(|pool| is_amd(pool) != is_amd(&pools[0])) {
        let message = format!(
            "`{}` and `{}` cannot train together: NCCL and RCCL share no communicator",
            pools[0].arg, part.arg
        );
        let expected = "pools of GPUs of one vendor";
        return Err(wrong(line, Mistake::new(message).expected(expected)));
    }
    let between = link(line, parts)?;
    let cluster = joined(Pools {
        parts: pools,
        between,
    });
    cluster
        .check()
        .map_err(|(field, message)| wrong(line, Mistake::new(format!("{field}: {message}"))))?;
    Ok(cluster)
}

/// Reads the link between pools from the parts of a line after the pools; `None` if there are none.
fn link<'a>(line: &str, parts: impl Iterator<Item = &'a str>) -> Result<Option<Link>, SpecError> {
    let mut bandwidth = None;
    let mut latency = None;
    for part in parts {
        let unknown = || wrong(line, Mistake::new(format!("`{part}` is not understood")));
        let again = || {
            let again = Mistake::new(format!("`{part}` says again what was said before it"));
            wrong(
                line,
                again.expected("the bandwidth and the distance once each"),
            )
        };
        if let Some(rate) = part.strip_suffix("between") {
            if bandwidth.is_some() {
                return Err(again());
            }
            bandwidth = Some(rate.trim().parse::<Bandwidth>().map_err(|_| unknown())?);
        } else if let Some(time) = part.strip_suffix("away") {
            if latency.is_some() {
                return Err(again());
            }
            latency = Some(time.trim().parse::<Seconds>().map_err(|_| unknown())?);
        } else {
            return Err(unknown());
        }
    }
    match (bandwidth, latency) {
        (Some(bandwidth), latency) => Ok(Some(Link {
            bandwidth: Sourced::given(bandwidth),
            latency: Sourced::given(latency.unwrap_or_default()),
        })),
        (None, None) => Ok(None),
        (None, Some(_)) => {
            let message = "a distance without the bandwidth of the link between pools";
            Err(wrong(line, Mistake::new(message)))
        }
    }
}

/// Whether its GPUs are AMD's, whose collective library is RCCL; all others are NVIDIA's.
fn is_amd(pool: &Pool) -> bool {
    pool.cluster.device.architecture == Architecture::Cdna3
}

/// Parses one pool: `64 x dgx-a100`, or `8 nodes x dgx-a100`.
fn pool(
    line: &str,
    part: &str,
    load: impl Fn(&str) -> Result<Cluster, SpecError>,
) -> Result<Pool, SpecError> {
    let unknown = || wrong(line, Mistake::new(format!("`{part}` is not a pool")));
    let (count, arg) = part.split_once(" x ").ok_or_else(unknown)?;
    let count = count.trim();
    let nodes = count
        .strip_suffix("nodes")
        .or_else(|| count.strip_suffix("node"));
    let number: u64 = (nodes.unwrap_or(count).trim().parse()).map_err(|_| unknown())?;
    let cluster = load(arg.trim())?;
    let each = nodes.map_or(1, |_| cluster.gpus_per_node);
    let gpus = number.saturating_mul(each);
    let of = |message: String| wrong(line, Mistake::new(format!("`{part}`: {message}")));
    if cluster.pools.is_some() || cluster.profile.is_some() {
        let message = "a pool is a cluster whose nodes are alike and whose prices are in tables";
        return Err(of(message.to_owned()));
    }
    cluster.check_devices(gpus).map_err(of)?;
    Ok(Pool {
        arg: arg.trim().to_owned(),
        cluster,
        gpus,
    })
}

/// Makes one cluster of pools. Its node and domain sizes are the greatest common divisors of
/// theirs, its price is their average per GPU (if all have one), and fields not set here are the
/// first pool's.
fn joined(pools: Pools) -> Cluster {
    let common = |size: fn(&Cluster) -> u64| {
        let sizes = pools.parts.iter().map(|pool| size(&pool.cluster));
        sizes.reduce(greatest_common_divisor).unwrap_or(1)
    };
    let price = |pool: &Pool| {
        let each = pool.cluster.dollars_per_gpu_hour.as_ref()?;
        Some(each.value * pool.gpus as f64)
    };
    let dollars: Option<f64> = pools.parts.iter().map(price).sum();
    let gpus = pools.gpus();
    let first = &pools.parts[0].cluster;
    Cluster {
        name: line(&pools),
        gpus_per_node: common(|cluster| cluster.gpus_per_node),
        scale_up_domain: common(|cluster| cluster.scale_up_domain),
        max_gpus: Some(gpus),
        dollars_per_gpu_hour: dollars.map(|all| Sourced {
            value: all / gpus as f64,
            origin: Origin::Assumed,
            source: "the average over the pools' own prices".to_owned(),
        }),
        calibration: None,
        speed: None,
        jitter: None,
        pools: Some(Arc::new(pools.clone())),
        ..first.clone()
    }
}

/// The line that describes pools, which [`read`] reads back.
fn line(pools: &Pools) -> String {
    parts_of(&pools.parts) + &link_of(pools)
}

/// Lists pools: `64 x dgx-a100 + 32 x dgx2-v100`.
fn parts_of(pools: &[Pool]) -> String {
    let part = |pool: &Pool| format!("{} x {}", pool.gpus, pool.arg);
    let parts: Vec<String> = pools.iter().map(part).collect();
    parts.join(" + ")
}

/// Describes the link: `, 100 Gb/s between, 20 ms away`; empty if the pools are on one network.
fn link_of(pools: &Pools) -> String {
    let Some(link) = &pools.between else {
        return String::new();
    };
    let gigabits = link.bandwidth.value.0 / 0.125e9;
    let mut text = format!(", {gigabits} Gb/s between");
    if link.latency.value > Seconds(0.0) {
        text.push_str(&format!(", {} ms away", link.latency.value.0 * 1e3));
    }
    text
}

impl Cluster {
    /// The same cluster with neighbouring pools that are alike and on one network as one pool; without pools if all of them are.
    #[must_use]
    pub fn with_alike_pools_as_one(self) -> Self {
        let Some(pools) = &self.pools else {
            return self;
        };
        let joined = pools.arranged(pools.parts.clone()).cluster;
        if joined
            .pools
            .as_ref()
            .is_some_and(|of| of.parts.len() == pools.parts.len())
        {
            return self;
        }
        Self {
            calibration: self.calibration.or(joined.calibration.clone()),
            ..joined
        }
    }
}

impl Pools {
    /// The clusters of every subset of the pools in every order, those of all pools first. Alike
    /// neighbours on one network count as one pool.
    #[must_use]
    pub fn arrangements(&self) -> Vec<Pool> {
        let mut orders: Vec<Vec<usize>> = vec![Vec::new()];
        let mut all = Vec::new();
        while let Some(order) = orders.pop() {
            for next in (0..self.parts.len()).filter(|next| !order.contains(next)) {
                let longer: Vec<usize> = order.iter().copied().chain([next]).collect();
                orders.push(longer.clone());
                all.push(longer);
            }
        }
        all.sort_by_key(|order| (self.parts.len() - order.len(), order.clone()));
        let mut found: Vec<Pool> = Vec::with_capacity(all.len());
        for order in all {
            let arrangement = self.in_order(&order);
            // Pools that are alike make the same cluster in either order.
            if !found.contains(&arrangement) {
                found.push(arrangement);
            }
        }
        found
    }

    /// The cluster of the pools with these indices, in this order.
    #[must_use]
    pub fn in_order(&self, order: &[usize]) -> Pool {
        self.arranged(order.iter().map(|&at| self.parts[at].clone()).collect())
    }

    /// The ways to divide some of the pools into at least two groups, each a cluster of its own, in every order within
    /// groups. Pools that are alike and on one network are one pool.
    #[must_use]
    pub fn divisions(&self) -> Vec<Vec<Pool>> {
        let parts = self.distinct();
        let mut all: Vec<Vec<Vec<usize>>> = vec![Vec::new()];
        for next in 0..parts.len() {
            let with_next = |division: &Vec<Vec<usize>>| {
                let mut with: Vec<Vec<Vec<usize>>> = Vec::new();
                for group in 0..division.len() {
                    for place in 0..=division[group].len() {
                        let mut longer = division.clone();
                        longer[group].insert(place, next);
                        with.push(longer);
                    }
                }
                let alone = division.iter().cloned().chain([vec![next]]).collect();
                with.push(alone);
                with
            };
            let more: Vec<_> = all.iter().flat_map(with_next).collect();
            all.extend(more);
        }
        all.retain(|division| division.len() > 1);
        let used = |division: &Vec<Vec<usize>>| division.iter().map(Vec::len).sum::<usize>();
        all.sort_by_key(|division| (parts.len() - used(division), division.clone()));
        let cluster =
            |group: &Vec<usize>| self.arranged(group.iter().map(|&at| parts[at].clone()).collect());
        let mut found: Vec<Vec<Pool>> = Vec::with_capacity(all.len());
        for division in &all {
            let groups: Vec<Pool> = division.iter().map(cluster).collect();
            if !found.contains(&groups) {
                found.push(groups);
            }
        }
        found
    }

    /// The cluster of all pools of these groups, in their order.
    #[must_use]
    pub fn together(&self, groups: &[Pool]) -> Pool {
        let pools = groups.iter().flat_map(|group| match &group.cluster.pools {
            Some(pools) => pools.parts.clone(),
            None => vec![group.clone()],
        });
        self.arranged(pools.collect())
    }

    /// The cluster of the first `gpus` devices: a pool is taken whole before the next one.
    ///
    /// # Errors
    /// When the pools have fewer devices, or `gpus` devices are not whole nodes. The message then names
    /// the nearest numbers that are.
    pub fn first(&self, gpus: u64) -> Result<Pool, String> {
        let mut parts: Vec<Pool> = Vec::with_capacity(self.parts.len());
        let mut before = 0;
        for pool in &self.parts {
            let taken = pool.gpus.min(gpus - before);
            if taken == 0 {
                break;
            }
            let node = pool.cluster.gpus_per_node;
            if taken < pool.gpus && taken > node && !taken.is_multiple_of(node) {
                let below = before + taken / node * node;
                let above = before + (taken.div_ceil(node) * node).min(pool.gpus);
                return Err(format!(
                    "{taken} GPUs of {} do not fill nodes of {node}; the nearest numbers that do are {below} and {above}",
                    pool.arg
                ));
            }
            parts.push(Pool {
                gpus: taken,
                ..pool.clone()
            });
            before += taken;
        }
        match before == gpus && gpus > 0 {
            true => Ok(self.arranged(parts)),
            false => Err(format!("the pools have 1 to {}", self.gpus())),
        }
    }

    /// The cluster that is left when each pool loses its number of GPUs in `lost`; `None` if a pool
    /// has fewer, or if no GPU is left.
    #[must_use]
    pub fn without(&self, lost: &[u64]) -> Option<Pool> {
        let mut parts: Vec<Pool> = Vec::with_capacity(self.parts.len());
        for (pool, lost) in self.parts.iter().zip(lost) {
            let gpus = pool.gpus.checked_sub(*lost)?;
            let left = (gpus > 0).then(|| Pool {
                gpus,
                ..pool.clone()
            });
            parts.extend(left);
        }
        (!parts.is_empty()).then(|| self.arranged(parts))
    }

    /// Groups on one line: `16 x dgx-a100 | 8 x dgx-h100 + 16 x dgx2-v100, 100 Gb/s between`. A pipeline passes through the
    /// pools of a group one after the other.
    #[must_use]
    pub fn side_by_side(&self, groups: &[Pool]) -> String {
        let name = |group: &Pool| match &group.cluster.pools {
            Some(pools) => parts_of(&pools.parts),
            None => parts_of(std::slice::from_ref(group)),
        };
        let groups: Vec<String> = groups.iter().map(name).collect();
        groups.join(" | ") + &link_of(self)
    }

    /// The pools, with alike pools on one network merged.
    fn distinct(&self) -> Vec<Pool> {
        let mut parts: Vec<Pool> = Vec::with_capacity(self.parts.len());
        for pool in &self.parts {
            match parts.iter_mut().find(|known| self.joins(known, pool)) {
                Some(known) => known.gpus += pool.gpus,
                None => parts.push(pool.clone()),
            }
        }
        parts
    }

    /// Whether two pools are alike and on one network, and so count as one.
    fn joins(&self, one: &Pool, other: &Pool) -> bool {
        self.between.is_none() && one.arg == other.arg && one.cluster == other.cluster
    }

    fn arranged(&self, apart: Vec<Pool>) -> Pool {
        let mut parts: Vec<Pool> = Vec::with_capacity(apart.len());
        for pool in apart {
            match parts.last_mut().filter(|last| self.joins(last, &pool)) {
                Some(last) => last.gpus += pool.gpus,
                None => parts.push(pool),
            }
        }
        if parts.len() == 1 {
            return parts.remove(0);
        }
        let pools = Self {
            parts,
            between: self.between.clone(),
        };
        Pool {
            arg: line(&pools),
            gpus: pools.gpus(),
            cluster: joined(pools),
        }
    }
}

fn wrong(line: &str, mistake: Mistake) -> SpecError {
    SpecError::Wrong(
        mistake
            .at(format!("cluster `{line}`"))
            .expected(format!(
                "GPUs x CLUSTER + GPUs x CLUSTER (or nodes x), at most {MOST} of them and {MAX_GPUS} GPUs, then if needed RATE \
                 between, TIME away"
            ))
            .example(EXAMPLE),
    )
}
