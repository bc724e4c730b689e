//! The layouts of a search space: sizes of meshes, how experts are spread over their ranks, micro-batches, and how
//! sequences are divided. `space` states the ranges.

use std::collections::BTreeMap;

use catalog::CpKind;
use catalog::elementary::greatest_common_divisor;
use catalog::model::ModelConfig;
use catalog::runtime::SequenceParallelUse;
use plans::Decisions;
use plans::decisions::alone;

use crate::choices::{Asked, divisors};
use crate::constraints::switch_name;
use crate::holders::Holders;
use crate::simplicity;

/// Largest number of sequences in a micro-batch.
const MAX_MICRO_BATCH: u64 = 64;
/// Largest number of ranks over which one copy of the experts is spread, unless a constraint asks for more.
const MAX_EXPERT_RANKS: u64 = 64;

/// The part of a strategy that fixes the tensor shapes on each rank and the length of the pipeline: the sizes of the device
/// mesh, the micro-batch, and how sequences are split. Schedules, recomputation and sharding of states are chosen after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Tensor-parallel size.
    pub tp: u64,
    /// Pipeline-parallel size.
    pub pp: u64,
    /// Context-parallel size.
    pub cp: u64,
    /// Number of all data-parallel ranks.
    pub dp: u64,
    /// Expert-parallel size.
    pub ep: u64,
    /// Tensor-parallel size inside experts.
    pub etp: u64,
    /// Sequences per micro-batch.
    pub micro_batch: u64,
    /// Micro-batches per step and data-parallel rank.
    pub num_micro_batches: u64,
    /// How attention communicates under context parallelism.
    pub cp_kind: CpKind,
    /// Whether activations between tensor-parallel blocks are sharded on sequence.
    pub sequence_parallel: bool,
}

impl Layout {
    /// The numbers of ranks that decide how states can be sharded.
    pub(crate) fn sharded_over(&self, model: &ModelConfig) -> Holders {
        let Self {
            tp,
            cp,
            ep,
            etp,
            dp,
            ..
        } = *self;
        let replicas = tp * cp * dp / (ep * etp);
        Holders {
            dp,
            cp,
            pipelined: self.pp > 1,
            groups: greatest_common_divisor(dp, replicas),
            alone: alone([dp, cp, tp], [ep, etp], model),
        }
    }

    /// Number of mesh axes (TP, PP, CP, DP) whose size differs from that in `d`. Expert axes divide
    /// the same ranks and do not count.
    pub(crate) fn axes_unlike(&self, d: &Decisions) -> usize {
        let sizes = [
            (self.tp, d.tp),
            (self.pp, d.pp),
            (self.cp, d.cp),
            (self.dp, d.dp()),
        ];
        sizes.iter().filter(|(own, other)| own != other).count()
    }

    /// Whether all sizes, and sequence parallelism, are as in `d`.
    pub(crate) fn has_sizes_of(&self, d: &Decisions) -> bool {
        self.sizes() == simplicity::layout(d) && self.sequence_parallel == d.sequence_parallel
    }

    /// The sizes of the mesh and the micro-batch, in the order of [`simplicity::layout`].
    pub(crate) fn sizes(&self) -> [u64; 7] {
        let Self {
            tp,
            pp,
            cp,
            ep,
            etp,
            dp,
            micro_batch,
            ..
        } = *self;
        [tp, pp, cp, ep, etp, dp, micro_batch]
    }
}

/// Whether some pipeline rank would have GPUs of several pools, with `pp` pipeline ranks.
fn straddles_pools(scenario: &costmodel::Scenario, pp: u64) -> bool {
    let pools = scenario.cluster.pools.as_ref();
    pools.is_some_and(|pools| pools.of_pipeline(pp).is_none())
}

/// Calls `found` with every mesh, expert sizes included; other fields of the layout are preset.
pub(crate) fn meshes(
    asked: Asked<'_>,
    illegal: &mut BTreeMap<String, u64>,
    found: &mut dyn FnMut(Layout),
) {
    let (scenario, constraints) = (asked.scenario, asked.constraints);
    let runtime = &scenario.runtime.space;
    let allowed = |&mode| constraints.allows_mode(mode);
    // A strategy describes one group of replicas.
    if !constraints.allows("groups", 1) || !runtime.recompute.iter().any(allowed) {
        return;
    }
    let (gpus, model) = (scenario.workload.gpus, &scenario.model);
    let domain = scenario.cluster.scale_up_domain;
    // Powers of two are usual: if they do not split sequences evenly, the search says so. It skips other sizes.
    let splits_evenly =
        |cp: &u64| cp.is_power_of_two() || scenario.workload.seq_len.is_multiple_of(2 * cp);
    for tp in divisors(gpus).filter(|&tp| constraints.allows("tp", tp)) {
        let asked_for = constraints.fix.contains_key("tp")
            || constraints.min.get("tp").is_some_and(|&n| n > domain)
            || asked.present_size("tp") == Some(tp);
        if (tp > 1 && !runtime.tensor_parallel) || (tp > domain && !asked_for) {
            continue;
        }
        if !model.attention.heads.is_multiple_of(tp) {
            count(illegal, "tp does not divide the attention heads");
            continue;
        }
        for pp in divisors(gpus / tp).filter(|&pp| constraints.allows("pp", pp)) {
            if pp > model.layers || (pp > 1 && runtime.schedules.is_empty()) {
                continue;
            }
            if straddles_pools(scenario, pp) {
                count(illegal, "a pipeline rank would have GPUs of several pools");
                continue;
            }
            let rest = gpus / tp / pp;
            for cp in asked.with_fixed("cp", divisors(rest).filter(splits_evenly)) {
                let impossible =
                    (cp > 1 && runtime.cp_kinds.is_empty()) || !rest.is_multiple_of(cp);
                if impossible || !constraints.allows("dp", rest / cp) {
                    continue;
                }
                let mesh = Layout {
                    tp,
                    pp,
                    cp,
                    dp: rest / cp,
                    ep: 1,
                    etp: 1,
                    micro_batch: 1,
                    num_micro_batches: 1,
                    cp_kind: CpKind::Ring,
                    sequence_parallel: false,
                };
                experts(asked, mesh, found);
            }
        }
    }
}

/// Counts one more strategy that a rule refuses.
fn count(illegal: &mut BTreeMap<String, u64>, rule: &str) {
    *illegal.entry(rule.to_owned()).or_default() += 1;
}

/// Enumerates how experts are spread over the ranks of a mesh.
fn experts(asked: Asked<'_>, mesh: Layout, found: &mut dyn FnMut(Layout)) {
    let constraints = asked.constraints;
    let Some(moe) = asked.scenario.model.moe else {
        if constraints.allows("ep", 1) && constraints.allows("etp", 1) {
            found(mesh);
        }
        return;
    };
    let ranks = mesh.tp * mesh.cp * mesh.dp;
    let space = &asked.scenario.runtime.space;
    let (parallel, split) = (space.expert_parallel, space.expert_split);
    let is_asked =
        |&key: &&str| constraints.fix.contains_key(key) || constraints.min.contains_key(key);
    let asked_for = ["ep", "etp"].iter().any(is_asked);
    for ep in divisors(moe.experts).filter(|&ep| constraints.allows("ep", ep)) {
        let tensor = [1, mesh.tp]
            .into_iter()
            .take(if mesh.tp == 1 { 1 } else { 2 });
        for etp in asked.with_fixed("etp", tensor) {
            let spread = ep.saturating_mul(etp);
            let impossible = (spread > 1 && !parallel)
                || !ranks.is_multiple_of(spread)
                || !split.allows([ep, etp], mesh.tp);
            let in_use = asked.present.is_some_and(|d| (d.ep, d.etp) == (ep, etp));
            if !impossible && (spread <= MAX_EXPERT_RANKS || asked_for || in_use) {
                found(Layout { ep, etp, ..mesh });
            }
        }
    }
}

/// All layouts on one mesh: every legal combination of a micro-batch, a kind of context parallelism, and sequence parallelism
/// on or off.
/// `illegal` counts, by rule, those that are left out.
pub(crate) fn layouts(
    asked: Asked<'_>,
    mesh: Layout,
    illegal: &mut BTreeMap<String, u64>,
) -> Vec<Layout> {
    let batch = asked.scenario.workload.global_batch;
    if !batch.is_multiple_of(mesh.dp) {
        let rule = "data parallelism does not divide the global batch".to_owned();
        *illegal.entry(rule).or_default() += 1;
        return Vec::new();
    }
    let per_rank = batch / mesh.dp;
    let mut sizes = asked.with_fixed("mbs", micro_batches());
    let allowed = sizes.len() as u64;
    sizes.retain(|&b| per_rank.is_multiple_of(b));
    if sizes.is_empty() && allowed > 0 {
        let rule = "no micro-batch divides a replica's part of the global batch".to_owned();
        *illegal.entry(rule).or_default() += allowed;
    }
    let sizes = sizes.into_iter().map(|size| (size, per_rank / size));
    divided(asked, mesh, sizes)
}

/// Sizes of micro-batches that a search tries, if they divide what a replica takes: powers of two, and three times those.
pub(crate) fn micro_batches() -> impl Iterator<Item = u64> {
    (1..=MAX_MICRO_BATCH).filter(|size| [1, 3].contains(&(size >> size.trailing_zeros())))
}

/// All layouts on one mesh with a single micro-batch, of each size that some batch allows.
pub(crate) fn of_any_batch(asked: Asked<'_>, mesh: Layout) -> Vec<Layout> {
    let sizes = asked.with_fixed("mbs", micro_batches());
    divided(asked, mesh, sizes.into_iter().map(|size| (size, 1)))
}

/// The layouts on a mesh with these micro-batches: the sequences in each, and their number.
fn divided(
    asked: Asked<'_>,
    mesh: Layout,
    micro_batches: impl Iterator<Item = (u64, u64)>,
) -> Vec<Layout> {
    let space = &asked.scenario.runtime.space;
    let mut kinds: Vec<CpKind> = if mesh.cp == 1 {
        // Without context parallelism, this is the kind of a strategy that names none.
        vec![space.cp_kinds.first().copied().unwrap_or(CpKind::Ring)]
    } else {
        space.cp_kinds.clone()
    };
    kinds.retain(|k| asked.constraints.allows_name("cp_kind", k.name()));
    let mut listed = asked
        .constraints
        .read_fixed("sp", |value| Some(value == switch_name(false)));
    let off_is_asked = listed.any(|off| off);
    let mut sequence: Vec<bool> = match (mesh.tp, space.sequence_parallel) {
        (1, _) | (_, SequenceParallelUse::Never) => vec![false],
        (_, SequenceParallelUse::Usual) if off_is_asked => vec![true, false],
        (_, SequenceParallelUse::Always | SequenceParallelUse::Usual) => vec![true],
        (_, SequenceParallelUse::Choice) => vec![true, false],
    };
    sequence.retain(|&on| asked.constraints.allows_name("sp", switch_name(on)));
    let mut all = Vec::new();
    for (micro_batch, num_micro_batches) in micro_batches {
        for &cp_kind in &kinds {
            for &sequence_parallel in &sequence {
                all.push(Layout {
                    micro_batch,
                    num_micro_batches,
                    cp_kind,
                    sequence_parallel,
                    ..mesh
                });
            }
        }
    }
    all
}
