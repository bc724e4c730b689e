//! Resharding: which states each rank lacks when a job goes on under another strategy.
//!
//! States are what a checkpoint holds: weights and both moments, in the types of the new strategy.
//! A virtual stage's states are a rectangle for each kind of parameters: depth is the parameters in
//! model order, width is what tensor parallelism divides (for experts, expert and expert-tensor
//! parallelism). ZeRO divides the depth: rank `r` of `d` holds the `r`-th part, as in our own
//! executor (`dtensor::train::States`); systems that shard each parameter hold other parts of the
//! same size. Norms and other parameters without tensor parallelism count as divided: they are few.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use catalog::{Bytes, DType};
use models::{BlockClass, BlockLayout};
use plans::place::Place;
use plans::{Decisions, Zero};

use crate::pipeline::Pipeline;
use crate::{CostError, Scenario};

/// How many bytes of states ranks hold and receive when a job goes on under a new strategy.
#[derive(Clone, Debug, PartialEq)]
pub struct Resharding {
    /// One copy of all states: the size of a checkpoint.
    pub whole: Bytes,
    /// What all ranks of the new strategy hold together, with copies.
    pub held: Bytes,
    /// The most that one rank of the new strategy holds.
    pub most_held: Bytes,
    /// The part of `held` that is not on its rank's device already.
    pub moved: Bytes,
    /// The most that one rank receives, for each pool.
    pub most: Vec<Bytes>,
    /// Least number of nodes that hold any one state under the old strategies.
    pub nodes: u64,
    /// Whether every state still exists, whichever nodes of the pools were lost.
    pub all_left: bool,
}

/// A device: its pool, and its number among the pool's devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Device {
    /// Index of its pool among the pools of the old strategy.
    pub pool: usize,
    /// Its number in the pool. Devices that were lost have the last numbers.
    pub number: u64,
}

/// Nodes that a pool has lost, and how large they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// Devices of a node.
    pub gpus_per_node: u64,
    /// Nodes that lost devices.
    pub nodes: u64,
}

/// The ranks of a strategy, or of one group of replicas, each with its device.
#[derive(Clone, Debug)]
pub struct Placed<'a> {
    /// The strategy.
    pub decisions: &'a Decisions,
    /// The device of every rank.
    pub devices: Vec<Device>,
}

/// Trained elements before each block, and of all blocks at the end: `[dense, expert]`.
type Depth = Vec<[u64; 2]>;

/// Ranks under a strategy with the pipeline rank of each of its virtual stages.
#[derive(Clone, Debug)]
pub(crate) struct Staged<'a> {
    pub(crate) placed: &'a Placed<'a>,
    pub(crate) pipeline: Arc<Pipeline>,
}

/// States of a virtual stage that a rank holds: ranges of depth, in elements, and of width, as shares.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Piece {
    kind: usize,
    depth: [f64; 2],
    width: [f64; 2],
}

impl Piece {
    fn elements(&self) -> f64 {
        (self.depth[1] - self.depth[0]) * (self.width[1] - self.width[0])
    }

    fn common(&self, other: &Self) -> f64 {
        let overlap = |a: [f64; 2], b: [f64; 2]| (a[1].min(b[1]) - a[0].max(b[0])).max(0.0);
        match self.kind == other.kind {
            true => overlap(self.depth, other.depth) * overlap(self.width, other.width),
            false => 0.0,
        }
    }
}

/// Computes what moves when a job goes on from `old` to `new`: one strategy each, or one per group
/// of replicas, which all hold every state. Devices keep what they hold under `old`.
pub(crate) fn resharding(
    scenario: &Scenario,
    old: &[Staged<'_>],
    new: &[Staged<'_>],
    lost: &[Lost],
) -> Result<Resharding, CostError> {
    let depth = depth(scenario)?;
    let mut before: BTreeMap<Device, (&Staged<'_>, u64)> = BTreeMap::new();
    for group in old {
        let devices = (0..).zip(&group.placed.devices);
        before.extend(devices.map(|(rank, &device)| (device, (group, rank))));
    }
    let of = |elements: f64, bytes: f64| Bytes((elements * bytes).round() as u64);
    let mut found = Resharding {
        whole: Bytes(0),
        held: Bytes(0),
        most_held: Bytes(0),
        moved: Bytes(0),
        most: vec![Bytes(0); lost.len()],
        nodes: old.iter().map(|group| nodes(group.placed, lost)).sum(),
        all_left: old.iter().any(|group| all_left(group.placed, lost)),
    };
    for group in new {
        let bytes = crate::states::checkpoint_bytes(scenario, group.placed.decisions);
        let [dense, expert] = depth.last().copied().unwrap_or_default();
        found.whole = of((dense + expert) as f64, bytes);
        let (mut held, mut moved) = (0.0, 0.0);
        for (rank, device) in (0..).zip(&group.placed.devices) {
            let wanted = pieces(&depth, group, rank);
            let known = before.get(device);
            let known = known.map_or_else(Vec::new, |&(group, rank)| pieces(&depth, group, rank));
            let all: f64 = wanted.iter().map(Piece::elements).sum();
            let common = |piece: &Piece| known.iter().map(|own| piece.common(own)).sum::<f64>();
            let missing = (all - wanted.iter().map(common).sum::<f64>()).max(0.0);
            held += all;
            moved += missing;
            found.most_held = found.most_held.max(of(all, bytes));
            let most = &mut found.most[device.pool];
            *most = (*most).max(of(missing, bytes));
        }
        found.held += of(held, bytes);
        found.moved += of(moved, bytes);
    }
    Ok(found)
}

/// Trained elements of every block, summed up in the order of the model. A table that several blocks read belongs to the first of them.
fn depth(scenario: &Scenario) -> Result<Depth, CostError> {
    let mut known: BTreeMap<BlockClass, [u64; 2]> = BTreeMap::new();
    let mut counted = BTreeSet::new();
    let mut sums = vec![[0, 0]];
    for class in models::blocks(&scenario.model) {
        let own = match known.get(&class) {
            Some(own) => *own,
            None => {
                let own = elements(scenario, class, &mut counted)?;
                if matches!(class, BlockClass::Layer(_)) {
                    known.insert(class, own);
                }
                own
            }
        };
        let [dense, expert] = sums[sums.len() - 1];
        sums.push([dense + own[0], expert + own[1]]);
    }
    Ok(sums)
}

/// Trained elements of a block, without shared parameters in `counted`, to which its own are added. Parameters of layers belong to one
/// block alone.
fn elements(
    scenario: &Scenario,
    class: BlockClass,
    counted: &mut BTreeSet<String>,
) -> Result<[u64; 2], CostError> {
    let layout = BlockLayout::alone(1, 16, DType::Bf16);
    let trace = models::trace_block(&scenario.model, class, &layout);
    let trace = trace.map_err(|e| CostError::Trace(e.to_string()))?;
    let mut sums = [0, 0];
    for parameter in trace
        .parameters
        .iter()
        .filter(|parameter| parameter.trained)
    {
        let may_be_shared = !parameter.name.contains("{layer}");
        if !may_be_shared || counted.insert(parameter.name.clone()) {
            sums[usize::from(parameter.expert)] += parameter.global_elements;
        }
    }
    Ok(sums)
}

/// For each kind of parameters the number of ranks that divide a stage's depth, the index of a rank among them, and its
/// range of the width.
fn shares(d: &Decisions, place: &Place) -> [(u64, u64, [f64; 2]); 2] {
    let experts = (d.edp() / d.dp_replicate).max(1);
    let (dense, expert) = match d.zero {
        Zero::Z0 => ((1, 0), (1, 0)),
        Zero::Z1 | Zero::Z2 | Zero::Z3 => (
            (d.dp_shard * d.cp, place.dp_shard * d.cp + place.cp),
            (experts, place.edp % experts),
        ),
    };
    let part = |at: f64, of: u64| [at / of as f64, (at + 1.0) / of as f64];
    let etp = part(place.etp as f64, d.etp);
    let expert_width = etp.map(|within| (place.ep as f64 + within) / d.ep as f64);
    [
        (dense.0, dense.1, part(place.tp as f64, d.tp)),
        (expert.0, expert.1, expert_width),
    ]
}

fn pieces(depth: &Depth, of: &Staged<'_>, rank: u64) -> Vec<Piece> {
    let d = of.placed.decisions;
    let place = Place::of(d, rank);
    let shares = shares(d, &place);
    let mut found = Vec::new();
    let mut layers = 0;
    let last = d.stages.0.len() - 1;
    for (stage, (&size, &owner)) in d
        .stages
        .0
        .iter()
        .zip(of.pipeline.rank_of_stage.iter())
        .enumerate()
    {
        // The embedding comes before the first layer; prediction modules and head after the last.
        let from = if stage == 0 { 0 } else { 1 + layers };
        layers += size;
        let to = if stage == last {
            depth.len() as u64 - 1
        } else {
            1 + layers
        };
        if u64::from(owner) != place.pp {
            continue;
        }
        for (kind, (ranks, index, width)) in shares.into_iter().enumerate() {
            let [from, to] = [from, to].map(|block| depth[block as usize][kind] as f64);
            let each = (to - from) / ranks as f64;
            let start = from + each * index as f64;
            found.push(Piece {
                kind,
                depth: [start, start + each],
                width,
            });
        }
    }
    found
}

/// For each distinct part of the states, the nodes that hold it, as `(pool, node)`. Ranks with the
/// same shares of the same stages hold the same part.
fn holders(placed: &Placed<'_>, lost: &[Lost]) -> Vec<BTreeSet<(usize, u64)>> {
    let d = placed.decisions;
    let mut holders: BTreeMap<[u64; 5], BTreeSet<(usize, u64)>> = BTreeMap::new();
    for (rank, device) in (0..).zip(&placed.devices) {
        let place = Place::of(d, rank);
        let [(_, dense, _), (_, expert, _)] = shares(d, &place);
        let node = (device.pool, device.number / lost[device.pool].gpus_per_node);
        let mut keys = vec![[0, place.pp, place.tp, 0, dense]];
        if d.ep * d.etp > 1 || expert > 0 {
            keys.push([1, place.pp, place.ep, place.etp, expert]);
        }
        for key in keys {
            holders.entry(key).or_default().insert(node);
        }
    }
    holders.into_values().collect()
}

/// The least number of nodes that hold any one part of the states.
fn nodes(placed: &Placed<'_>, lost: &[Lost]) -> u64 {
    let holders = holders(placed, lost).into_iter();
    let counts = holders.map(|nodes| nodes.len() as u64);
    counts.min().unwrap_or(1)
}

/// Whether these ranks hold every state on more nodes of some pool than it lost.
fn all_left(placed: &Placed<'_>, lost: &[Lost]) -> bool {
    let is_left = |nodes: &BTreeSet<(usize, u64)>| {
        let mut pools = (0..).zip(lost);
        pools.any(|(at, lost)| {
            let own = nodes.iter().filter(|(pool, _)| *pool == at);
            own.count() as u64 > lost.nodes
        })
    };
    holders(placed, lost).iter().all(is_left)
}

#[cfg(test)]
mod tests {
    use catalog::{Model, Precision, WorkloadSizes};
    use plans::Strategy;

    use super::*;
    use crate::{CostModel, testing};

    fn scenario(model: &str, gpus: u64) -> Scenario {
        let sizes = WorkloadSizes {
            gpus,
            seq_len: 1024,
            global_batch: 960,
            precision: Precision::Bf16,
        };
        testing::scenario([model, "dgx-h100", "vescale"], sizes)
    }

    fn strategy(model: &str, gpus: u64, text: &str) -> Strategy {
        testing::strategy(&scenario(model, gpus), text)
    }

    fn between(model: &str, old: (u64, &str), new: (u64, &str)) -> Resharding {
        let costs = CostModel::new(scenario(model, new.0)).expect("priced");
        let plans = [old, new].map(|(gpus, text)| (gpus, strategy(model, gpus, text)));
        let [old, new] = plans.each_ref().map(|(gpus, of)| placed(0, of, *gpus));
        costs.resharding(&[old], &[new], &LOST).expect("counted")
    }

    /// One pool of nodes with 8 GPUs each; one node is lost.
    const LOST: [Lost; 1] = [Lost {
        gpus_per_node: 8,
        nodes: 1,
    }];

    fn placed(pool: usize, strategy: &Strategy, gpus: u64) -> Placed<'_> {
        Placed {
            decisions: strategy,
            devices: (0..gpus).map(|number| Device { pool, number }).collect(),
        }
    }

    /// GPUs and strategy of a plan.
    type Plan = (u64, &'static str);
    type Row = (&'static str, Plan, Plan, Option<f64>, f64, u64);

    /// Old and new plan, the share of all states that is held with copies (if it is checked), the share that moves, and
    /// the nodes that hold each state.
    #[rustfmt::skip]
    const ROWS: [Row; 8] = [
        ("llama3-8b", (16, "tp8 dp2 zero1"), (16, "tp8 dp2 zero1"), Some(1.0), 0.0, 1),
        // Both replicas of ZeRO-0 hold all: what is left needs nothing.
        ("llama3-8b", (16, "tp8 dp2 zero0"), (8, "tp8 dp1 zero0"), Some(1.0), 0.0, 2),
        ("llama3-8b", (16, "tp8 dp2 zero0"), (16, "tp8 dp2 zero0"), Some(2.0), 0.0, 2),
        // The first of 8 ranks has half of the 8th that it needs; the others have none of theirs.
        ("llama3-8b", (16, "dp16 zero1"), (8, "dp8 zero1"), Some(1.0), 15.0 / 16.0, 1),
        ("llama3-8b", (16, "dp8x2 zero3"), (8, "dp8 zero3"), Some(1.0), 0.0, 2),
        // Depth instead of width: a rank keeps an 8th of what it had.
        ("llama3-8b", (8, "tp8"), (8, "dp8 zero1"), Some(1.0), 7.0 / 8.0, 1),
        ("mixtral-8x7b", (16, "ep8 dp16 zero1"), (16, "ep8 dp16 zero1"), Some(1.0), 0.0, 1),
        ("mixtral-8x7b", (16, "ep8 dp16 zero0"), (8, "ep8 dp8 zero0"), None, 0.0, 2),
    ];

    #[test]
    fn what_moves_is_what_a_rank_does_not_hold() {
        for (model, old, new, held, moved, nodes) in ROWS {
            let found = between(model, old, new);
            let is = |bytes: Bytes, share: f64| {
                (bytes.as_f64() / found.whole.as_f64() - share).abs() < 1e-6
            };
            assert!(is(found.moved, moved), "{old:?} {new:?}: {found:?}");
            assert!(
                held.is_none_or(|held| is(found.held, held)),
                "{old:?}: {found:?}"
            );
            assert_eq!(found.nodes, nodes, "{old:?}");
            assert!(found.most[0] <= found.moved);
            assert!(found.most_held.0 * new.0 >= found.held.0);
            assert_eq!(found.all_left, nodes > 1, "{old:?}");
        }
    }

    /// Old strategies, nodes lost of each pool, new strategies with their pools, whether all is left, and the share that moves.
    type GroupsRow = (
        [&'static str; 2],
        [u64; 2],
        &'static [(usize, &'static str)],
        bool,
        f64,
    );

    /// Groups of replicas on two pools of 8 GPUs.
    #[rustfmt::skip]
    const GROUPS: [GroupsRow; 6] = [
        // Whatever one group loses, the other holds all states.
        (["dp8 zero1", "dp8 zero1"], [1, 0], &[(1, "dp8 zero1")], true, 0.0),
        (["dp8 zero1", "dp8 zero1"], [0, 1], &[(0, "tp8")], true, 7.0 / 8.0),
        (["dp8 zero1", "tp8"], [1, 0], &[(1, "tp8")], true, 0.0),
        (["dp8 zero1", "tp8"], [1, 1], &[], false, 0.0),
        (["dp8 zero1", "tp8"], [0, 0], &[(1, "tp8"), (0, "dp8 zero1")], true, 0.0),
        // Groups that change places send all that they hold, except what a rank held before too.
        (["dp8 zero1", "tp8"], [0, 0], &[(0, "tp8"), (1, "dp8 zero1")], true, 14.0 / 8.0),
    ];

    #[test]
    fn every_group_holds_every_state() {
        let costs = CostModel::new(scenario("llama3-8b", 8)).expect("priced");
        for (old, nodes, new, all_left, moved) in GROUPS {
            let old = old.map(|text| strategy("llama3-8b", 8, text));
            let old: Vec<Placed<'_>> = (0..)
                .zip(&old)
                .map(|(pool, of)| placed(pool, of, 8))
                .collect();
            let strategies: Vec<(usize, Strategy)> = (new.iter())
                .map(|&(pool, text)| (pool, strategy("llama3-8b", 8, text)))
                .collect();
            let placed: Vec<Placed<'_>> = (strategies.iter())
                .map(|(pool, of)| placed(*pool, of, 8))
                .collect();
            let lost = nodes.map(|nodes| Lost {
                gpus_per_node: 8,
                nodes,
            });
            let found = costs.resharding(&old, &placed, &lost).expect("counted");
            assert_eq!((found.all_left, found.nodes), (all_left, 2), "{new:?}");
            let share = found.moved.as_f64() / found.whole.as_f64().max(1.0);
            assert!((share - moved).abs() < 1e-6, "{new:?}: {found:?}");
            let most = found.most.iter().map(|most| most.0 * 8).sum::<u64>();
            assert!(most.abs_diff(found.moved.0) < 64, "{new:?}: {found:?}");
        }
    }

    #[test]
    fn every_trained_parameter_is_counted_once() {
        for (name, modules) in [
            ("llama3-8b", 0),
            ("qwen2.5-0.5b", 0),
            ("deepseek-v3", 1),
            ("deepseek-v3", 2),
        ] {
            let mut s = scenario(name, 8);
            let mut config = (*s.model).clone();
            config.mtp_layers = modules;
            s.model = Model::new(config, "changed").expect("a model");
            let all = models::parameters(&s.model).expect("a model");
            let elements: u64 = all.iter().map(|parameter| parameter.global_elements).sum();
            let sums = depth(&s).expect("counted");
            assert_eq!(sums[sums.len() - 1].iter().sum::<u64>(), elements, "{name}");
            // A checkpoint and an exchange of gradients hold what goes on.
            let trained = models::trained_and_frozen(&s.model).expect("counted");
            assert_eq!(trained, [elements, 0], "{name}, {modules} modules");
        }
    }

    #[test]
    fn adapters_are_saved_without_the_models_weights() {
        let mut s = scenario("llama3-8b", 8);
        let d = strategy("llama3-8b", 8, "dp8 zero1");
        let adapters = Some("rank=16".parse().expect("adapters"));
        s.model = s.model.with_adapters(adapters).expect("a model");
        // 41.9 million trained parameters of 12 bytes each.
        let [trained, _] = models::trained_and_frozen(&s.model).expect("counted");
        let bytes = crate::states::checkpoint(&s, &d, trained);
        assert_eq!(bytes.0, 12 * 41_943_040);
        let sums = depth(&s).expect("counted");
        assert_eq!(sums[sums.len() - 1], [41_943_040, 0]);
    }

    /// A split master weight is read with the parameter that holds its other half.
    #[test]
    fn a_checkpoint_holds_whole_weights() {
        let s = scenario("llama3-8b", 8);
        let s = Scenario {
            runtime: catalog::load::runtime("megatron-core").expect("a preset"),
            ..s
        };
        for (text, bytes) in [
            ("dp8 zero1", 12.0),
            ("dp8 zero1 optim_states=split_master", 12.0),
            ("dp8 zero1 optim_states=bf16_moments", 8.0),
        ] {
            let d = testing::strategy(&s, text);
            assert_eq!(crate::states::checkpoint_bytes(&s, &d), bytes, "{text}");
        }
    }

    /// However stages, experts and shards are laid, all ranks together hold everything once under ZeRO.
    #[test]
    fn every_state_is_held_once_under_zero() {
        for (model, text) in [
            ("llama3-8b", "tp2 pp4 vpp2 dp2 zero1"),
            ("llama3-8b", "tp2 cp2 pp2 dp2 zero3"),
            ("mixtral-8x7b", "tp2 ep4 pp2 dp4 zero1"),
            ("mixtral-8x7b", "tp2 ep2 etp2 pp2 dp4 zero1"),
            ("mixtral-8x7b", "ep8 pp2 dp8 zero3"),
        ] {
            let same = between(model, (16, text), (16, text));
            assert_eq!((same.held, same.moved), (same.whole, Bytes(0)), "{text}");
            let other = between(model, (16, text), (8, "tp4 dp2 zero1"));
            assert!(
                other.moved <= other.held && other.held >= other.whole,
                "{text}: {other:?}"
            );
        }
    }
}
