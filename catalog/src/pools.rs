//! Clusters of several pools in one line: `64 x dgx-a100 + 32 x v100-node, 100 Gb/s between`.

use std::sync::Arc;

use crate::cluster::{Cluster, Link, Pool, Pools};
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

/// The cluster of a line. `load` finds the cluster that a pool's nodes are of.
///
/// # Errors
/// A part that is neither a number of GPUs of a cluster nor a link between pools; a pool that has not as many GPUs.
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
    let mut bandwidth = None;
    let mut latency = None;
    for part in parts {
        let unknown = || wrong(line, Mistake::new(format!("`{part}` is not understood")));
        if let Some(rate) = part.strip_suffix("between") {
            bandwidth = Some(rate.trim().parse::<Bandwidth>().map_err(|_| unknown())?);
        } else if let Some(time) = part.strip_suffix("away") {
            latency = Some(time.trim().parse::<Seconds>().map_err(|_| unknown())?);
        } else {
            return Err(unknown());
        }
    }
    let between = match (bandwidth, latency) {
        (Some(bandwidth), latency) => Some(Link {
            bandwidth: Sourced::given(bandwidth),
            latency: Sourced::given(latency.unwrap_or_default()),
        }),
        (None, None) => None,
        (None, Some(_)) => {
            let message = "a distance without the bandwidth of the link between pools";
            return Err(wrong(line, Mistake::new(message)));
        }
    };
    let cluster = joined(Pools {
        parts: pools,
        between,
    });
    cluster
        .check()
        .map_err(|(field, message)| wrong(line, Mistake::new(format!("{field}: {message}"))))?;
    Ok(cluster)
}

/// `64 x dgx-a100`.
fn pool(
    line: &str,
    part: &str,
    load: impl Fn(&str) -> Result<Cluster, SpecError>,
) -> Result<Pool, SpecError> {
    let unknown = || wrong(line, Mistake::new(format!("`{part}` is not a pool")));
    let (count, arg) = part.split_once(" x ").ok_or_else(unknown)?;
    let gpus: u64 = count.trim().parse().map_err(|_| unknown())?;
    let cluster = load(arg.trim())?;
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

/// The cluster that pools make together.
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

/// The line that pools are written as, which [`read`] reads back.
fn line(pools: &Pools) -> String {
    let part = |pool: &Pool| format!("{} x {}", pool.gpus, pool.arg);
    let parts: Vec<String> = pools.parts.iter().map(part).collect();
    let mut line = parts.join(" + ");
    if let Some(link) = &pools.between {
        let gigabits = link.bandwidth.value.0 / 0.125e9;
        line.push_str(&format!(", {gigabits} Gb/s between"));
        if link.latency.value > Seconds(0.0) {
            line.push_str(&format!(", {} ms away", link.latency.value.0 * 1e3));
        }
    }
    line
}

impl Pools {
    /// The clusters that some of the pools make, in every order: first those of all pools.
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
            let parts = order.iter().map(|&at| self.parts[at].clone()).collect();
            let arrangement = self.arranged(parts);
            // Pools that are alike make the same cluster in either order.
            if !found.contains(&arrangement) {
                found.push(arrangement);
            }
        }
        found
    }

    fn arranged(&self, mut parts: Vec<Pool>) -> Pool {
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

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    match b {
        0 => a,
        _ => greatest_common_divisor(b, a % b),
    }
}

fn wrong(line: &str, mistake: Mistake) -> SpecError {
    SpecError::Wrong(
        mistake
            .at(format!("cluster `{line}`"))
            .expected(format!(
                "GPUs x CLUSTER + GPUs x CLUSTER, at most {MOST} of them and {MAX_GPUS} GPUs, then if needed RATE between, \
                 TIME away"
            ))
            .example(EXAMPLE),
    )
}
