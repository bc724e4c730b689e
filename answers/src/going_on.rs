//! The cost of continuing under a new plan after a loss of devices: which states move where.

use catalog::{Bandwidth, Bytes, Cluster, Pool, Seconds};
use costmodel::reshard::{Device, Lost, Placed};
use costmodel::{CostError, CostModel};
use plans::Strategy;
use reports::format;
use serde::Serialize;

use crate::failures::Checkpoint;
use crate::find::Answer;
use crate::inputs::Inputs;
use crate::losses::Left;
use crate::planned::Planned;

/// The cost of continuing a training under a new plan.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct GoingOn {
    states_bytes: u64,
    /// Smallest number of nodes that hold a copy of a state under the old plan.
    nodes_with_every_state: u64,
    from_checkpoint: bool,
    /// Bytes that ranks read from the checkpoint, or send to each other.
    bytes: u64,
    /// Most of `bytes` that one GPU receives.
    most_bytes: u64,
    /// Seconds at the rate of links or of `--checkpoint`; `None` if that is not given. If a link
    /// joins the pools in use, all bytes are taken to pass through it.
    seconds: Option<f64>,
    /// Whether a link between pools decides the time.
    #[serde(skip)]
    linked: bool,
}

/// The ranks of one strategy, with the pools that they use.
type Group<'a> = (&'a Strategy, Vec<Pool>);

impl GoingOn {
    /// The cost of continuing from a plan on what is left. `checkpoint`: how fast one is read.
    ///
    /// # Errors
    /// When the model cannot be traced.
    pub fn new(
        before: &Planned,
        left: &Left,
        answer: &Answer,
        strategy: &Strategy,
        checkpoint: Option<Checkpoint>,
    ) -> Result<Self, CostError> {
        let had: Vec<u64> = left.had.iter().map(|pool| pool.gpus).collect();
        let has = had.iter().zip(&left.lost);
        let has: Vec<u64> = has.map(|(had, lost)| had - lost).collect();
        let old_groups = groups_before(before, left);
        // Where the file of the old plan does not say which devices its groups have, nothing is known of what they hold.
        let old = placed(&old_groups, &left.had, &had).unwrap_or_default();
        let new_groups = groups_after(answer, strategy);
        let new = placed(&new_groups, &left.had, &has).unwrap_or_default();
        let lost: Vec<Lost> = (left.had.iter().zip(&left.lost))
            .map(|(pool, lost)| Lost {
                gpus_per_node: pool.cluster.gpus_per_node,
                nodes: lost.div_ceil(pool.cluster.gpus_per_node),
            })
            .collect();
        let costs: &CostModel = &answer.costs;
        let moves = costs.resharding(&old, &new, &lost)?;
        let at = |bytes: Bytes, rate: Bandwidth| (bytes / rate).0;
        if !moves.all_left {
            let seconds = checkpoint.map(|checkpoint| match checkpoint {
                Checkpoint::Rate(rate) => at(moves.held, rate),
                Checkpoint::Time(time) => time.0,
            });
            return Ok(Self {
                states_bytes: moves.whole.0,
                nodes_with_every_state: moves.nodes,
                from_checkpoint: true,
                bytes: moves.held.0,
                most_bytes: moves.most_held.0,
                seconds,
                linked: false,
            });
        }
        let cluster = &answer.inputs.scenario.cluster;
        let world = answer.inputs.json.gpus;
        let of_pools = (left.had.iter().zip(&moves.most))
            .map(|(pool, &most)| at(most, rate(&pool.cluster, world)));
        let own = of_pools.fold(0.0, f64::max);
        let between = cluster
            .pools
            .as_ref()
            .and_then(|pools| pools.between.as_ref());
        let through = between.map_or(0.0, |link| at(moves.moved, link.bandwidth.value));
        Ok(Self {
            states_bytes: moves.whole.0,
            nodes_with_every_state: moves.nodes,
            from_checkpoint: false,
            bytes: moves.moved.0,
            most_bytes: moves.most.iter().copied().max().unwrap_or_default().0,
            seconds: Some(own.max(through)),
            linked: through > own,
        })
    }

    /// The cost of continuing, in words.
    #[must_use]
    pub fn said(&self) -> String {
        let bytes = |n: u64| format::bytes(Bytes(n));
        let time = self.seconds.map(|s| format::duration(Seconds(s)));
        let whole = bytes(self.states_bytes);
        match (self.from_checkpoint, self.bytes) {
            (true, n) => {
                let took = time.map_or_else(
                    || "--checkpoint RATE says how long".to_owned(),
                    |time| format!("in {time}"),
                );
                format!(
                    "{whole}; some may have been on the lost GPUs alone, so all go back to the last checkpoint and read {} together ({took})",
                    bytes(n)
                )
            }
            (false, 0) => format!("{whole}; every rank that is left holds what it needs"),
            (false, n) => {
                let time = time.unwrap_or_default();
                let time = match self.linked {
                    true => format!("at most {time}, if all of it passes the link between pools"),
                    false => format!("{time} at the links' peak"),
                };
                let nodes = match self.nodes_with_every_state {
                    1 => "1 node".to_owned(),
                    nodes => format!("{nodes} nodes"),
                };
                format!(
                    "{whole}, each on {nodes} or more: ranks that are left send each other {}, at most {} to one GPU ({time})",
                    bytes(n),
                    bytes(self.most_bytes),
                )
            }
        }
    }
}

/// The bandwidth of the network that joins `world` devices of a cluster.
fn rate(cluster: &Cluster, world: u64) -> Bandwidth {
    match world > cluster.scale_up_domain {
        true => cluster.scale_out.bandwidth.value,
        false => cluster.scale_up.bandwidth.value,
    }
}

fn groups_before<'a>(before: &'a Planned, left: &Left) -> Vec<Group<'a>> {
    match before {
        Planned::Alike(plan) => vec![(&plan.strategy, left.had.clone())],
        Planned::Groups(_, together) => (together.parts.iter())
            .map(|part| (&part.strategy, pools_of(&part.inputs)))
            .collect(),
    }
}

fn groups_after<'a>(answer: &'a Answer, strategy: &'a Strategy) -> Vec<Group<'a>> {
    match &answer.together {
        None => vec![(strategy, pools_of(&answer.inputs))],
        Some(together) => (together.parts.iter())
            .map(|part| (&part.strategy, pools_of(&part.inputs)))
            .collect(),
    }
}

/// The pools of a question, one if all nodes are alike.
fn pools_of(inputs: &Inputs) -> Vec<Pool> {
    match &inputs.scenario.cluster.pools {
        Some(pools) => pools.parts.clone(),
        None => vec![Pool {
            arg: inputs.cluster_arg.clone(),
            cluster: inputs.scenario.cluster.clone(),
            gpus: inputs.json.gpus,
        }],
    }
}

/// Gives devices to groups: a pool of a group takes a whole unused one of `pools` that is alike,
/// else the first free devices of such pools. `sizes`: devices of each of `pools`. `None`: too few.
fn placed<'a>(groups: &[Group<'a>], pools: &[Pool], sizes: &[u64]) -> Option<Vec<Placed<'a>>> {
    let mut used = vec![0u64; pools.len()];
    let mut found = Vec::with_capacity(groups.len());
    for (strategy, own) in groups {
        let mut devices = Vec::with_capacity(strategy.world() as usize);
        for pool in own {
            let alike: Vec<usize> = (0..pools.len())
                .filter(|&at| pools[at].cluster == pool.cluster)
                .collect();
            let whole = alike
                .iter()
                .copied()
                .find(|&at| used[at] == 0 && sizes[at] == pool.gpus);
            let mut wanted = pool.gpus;
            for at in whole.map_or(alike, |at| vec![at]) {
                let taken = wanted.min(sizes[at] - used[at]);
                let numbers = used[at]..used[at] + taken;
                devices.extend(numbers.map(|number| Device { pool: at, number }));
                used[at] += taken;
                wanted -= taken;
            }
            if wanted > 0 {
                return None;
            }
        }
        found.push(Placed {
            decisions: strategy,
            devices,
        });
    }
    Some(found)
}
