//! Groups of replicas side by side on different pools: each group trains on its share of the batch, with sizes of its own,
//! then all groups add up their gradients.
//!
//! Gradients are added up within a group first, as in any training, after which every GPU of the group has an equal part of
//! the group's sum. These parts then go around a ring of the groups: each GPU sends `2 (n − 1) / n` of its part if there are
//! `n` groups, and takes as long as the network of its own pool needs for that. If one link joins the pools, all gradients
//! pass through it. The slowest of these decides. Nothing hides it, because it begins when the
//! slowest group has ended its passes.

use std::collections::BTreeSet;

use catalog::residuals::{self, Evidence, Quantity, Residual};
use catalog::{Bytes, DType, FlopRate, Link, Reach, Seconds};
use plans::{HostMemory, Prediction, Strategy, UsedConstant};

use crate::cost_model::CostModel;
use crate::predict::{Errors, constant, interval};
use crate::{CostError, Scenario};

/// A group of replicas with the plan that it trains under.
#[derive(Clone, Copy, Debug)]
pub struct Side<'a> {
    /// The cost model of the GPUs that the group runs on, and of the sequences that it trains in each step.
    pub costs: &'a CostModel,
    /// Strategy of the group.
    pub strategy: &'a Strategy,
    /// Prediction for the group if it trains alone.
    pub prediction: &'a Prediction,
}

/// Time to all-reduce gradients of type `reduced` between groups, after each has summed its own.
///
/// # Errors
/// When the model cannot be traced, or messages of a pool have no price.
pub fn exchange(
    groups: &[&CostModel],
    reduced: DType,
    between: Option<&Link>,
) -> Result<Seconds, CostError> {
    let (Some(first), count) = (groups.first(), groups.len() as u64) else {
        return Ok(Seconds(0.0));
    };
    if count == 1 {
        return Ok(Seconds(0.0));
    }
    let [trained, _] = models::trained_and_frozen(&first.scenario().model)
        .map_err(|e| CostError::Trace(e.to_string()))?;
    let mut longest = Seconds(0.0);
    for group in groups {
        let part = Bytes(trained.div_ceil(group.scenario().workload.gpus) * reduced.size());
        for pool in group.pools() {
            let time = pool.book.across_domains(pool.scenario(), part, count)?;
            longest = longest.max(time);
        }
    }
    if let Some(link) = between {
        let sent = (trained * reduced.size()) as f64;
        let steps = 2.0 * (count - 1) as f64;
        let time = sent * steps / count as f64 / link.bandwidth.value.0;
        longest = longest.max(Seconds(time) + link.latency.value * steps);
    }
    Ok(longest)
}

/// Prediction of a step on all groups together; `whole` is the job on all of their pools. Its
/// breakdown is that of the slowest group, and pipeline ranks are numbered through the groups.
///
/// # Errors
/// When gradients cannot be priced.
pub fn side_by_side(whole: &Scenario, sides: &[Side<'_>]) -> Result<Prediction, CostError> {
    let between = whole.cluster.pools.as_ref();
    let between = between.and_then(|pools| pools.between.as_ref());
    let slowest = slowest(sides);
    let reduced = (slowest.strategy)
        .state_types(&whole.runtime, whole.workload.precision)
        .reduce;
    let groups: Vec<&CostModel> = sides.iter().map(|side| side.costs).collect();
    let exchange = exchange(&groups, reduced, between)?;
    let step = slowest.prediction.step_time + exchange;
    let residual = |quantity| residuals::of(quantity, Evidence::SeveralPools);
    let errors = errors(&slowest)?;
    let (heaviest, before) = heaviest(sides);
    let held = heaviest.prediction;
    let (shortest, longest) = errors.time.around(step.0);
    let (least, most) = residual(Quantity::Memory).around(held.peak_memory.as_f64());
    let mut breakdown = slowest.prediction.breakdown;
    breakdown.pools_exposed_s = exchange.0;
    let gpus = whole.workload.gpus as f64;
    let peak = average_peak(sides);
    // FLOPs of a step over what the GPUs' peak does in it.
    let utilisation = |of: fn(&Prediction) -> f64| {
        let flops = |side: &Side<'_>| {
            let p = side.prediction;
            of(p) * p.step_time.0 * p.peak_flop_rate.0 * gpus_of(side)
        };
        sides.iter().map(flops).sum::<f64>() / (step.0 * peak.0 * gpus)
    };
    let through = |of: fn(&Prediction) -> &Vec<Bytes>| {
        let ranks = sides.iter().flat_map(|side| of(side.prediction));
        ranks.copied().collect::<Vec<Bytes>>()
    };
    Ok(Prediction {
        step_time: step,
        step_time_interval: (Seconds(shortest), Seconds(longest)),
        ratio_error: errors.ratio,
        tokens_per_s_per_gpu: whole.workload.real_tokens_per_step() / step.0 / gpus,
        mfu: utilisation(|p| p.mfu),
        mfu_palm: utilisation(|p| p.mfu_palm),
        peak_flop_rate: peak,
        peak_memory_interval: (Bytes(least as u64), Bytes(most as u64)),
        p_fits: sides
            .iter()
            .map(|side| side.prediction.p_fits)
            .fold(1.0, f64::min),
        evidence: evidence(whole),
        peak_rank: before + held.peak_rank,
        memory_by_rank: through(|p| &p.memory_by_rank),
        usable_by_rank: through(|p| &p.usable_by_rank),
        breakdown,
        kernels: slowest.prediction.kernels.clone(),
        host_memory: fullest_host(sides),
        provenance: provenance(whole, sides, errors.time),
        ..held.clone()
    })
}

/// Errors of the step time of groups side by side, of which `slowest` takes longest.
fn errors(slowest: &Side<'_>) -> Result<Errors, CostError> {
    let usual = |quantity| residuals::of(quantity, Evidence::SeveralPools);
    let usual = Errors {
        time: usual(Quantity::Time),
        ratio: usual(Quantity::Ratio).high,
    };
    let alone = slowest.prediction.step_time;
    (slowest.costs).with_factors_open(usual, slowest.strategy, alone)
}

/// The group whose step takes longest; the first of equals.
fn slowest<'a>(sides: &[Side<'a>]) -> Side<'a> {
    let longer = |a: Side<'a>, b: &Side<'a>| match b.prediction.step_time > a.prediction.step_time {
        true => *b,
        false => a,
    };
    sides[1..].iter().fold(sides[0], longer)
}

/// The group that does not fit, or else has the fullest rank; and the number of pipeline ranks in
/// groups before it.
fn heaviest<'a>(sides: &[Side<'a>]) -> (Side<'a>, u32) {
    let fullness = |p: &Prediction| {
        let share = p.peak_memory.as_f64() / p.usable().as_f64();
        (!p.fit.fits(), share)
    };
    let mut found = (sides[0], 0);
    let mut before = 0;
    for side in sides {
        let [own, known] = [side, &found.0].map(|side| fullness(side.prediction));
        if own > known {
            found = (*side, before);
        }
        before += side.prediction.memory_by_rank.len() as u32;
    }
    found
}

fn fullest_host(sides: &[Side<'_>]) -> HostMemory {
    let hosts = sides.iter().map(|side| side.prediction.host_memory);
    let least_left = |host: &HostMemory| match host.there {
        Some(there) => there.as_f64() - host.used.as_f64(),
        None => f64::INFINITY,
    };
    let fullest = hosts.min_by(|a, b| least_left(a).total_cmp(&least_left(b)));
    fullest.unwrap_or_default()
}

fn gpus_of(side: &Side<'_>) -> f64 {
    side.costs.scenario().workload.gpus as f64
}

fn average_peak(sides: &[Side<'_>]) -> FlopRate {
    let peaks = sides
        .iter()
        .map(|side| side.prediction.peak_flop_rate.0 * gpus_of(side));
    let gpus: f64 = sides.iter().map(gpus_of).sum();
    FlopRate(peaks.sum::<f64>() / gpus)
}

/// The constants of all groups. Those that groups share are listed once, others with the name of
/// their cluster.
fn provenance(whole: &Scenario, sides: &[Side<'_>], time: Residual) -> Vec<UsedConstant> {
    let in_all = |constant: &UsedConstant| {
        let has = |side: &Side<'_>| side.prediction.provenance.contains(constant);
        sides.iter().all(has)
    };
    let is_interval = |constant: &UsedConstant| constant.name.starts_with("80% interval");
    let mut used: Vec<UsedConstant> = Vec::new();
    let mut names = BTreeSet::new();
    for side in sides {
        let own = side.prediction.provenance.iter();
        for constant in own.filter(|constant| !is_interval(constant)) {
            let mut constant = constant.clone();
            if !in_all(&constant) {
                let cluster = &side.costs.scenario().cluster.name;
                constant.name = format!("{cluster}: {}", constant.name);
            }
            if names.insert(constant.name.clone()) {
                used.push(constant);
            }
        }
    }
    let between = whole.cluster.pools.as_ref();
    if let Some(link) = between.and_then(|pools| pools.between.as_ref())
        && names.insert("bandwidth between pools".to_owned())
    {
        used.push(constant("bandwidth between pools", &link.bandwidth));
        used.push(constant("latency between pools", &link.latency));
    }
    let memory = residuals::of(Quantity::Memory, Evidence::SeveralPools);
    for (name, found) in [
        ("80% interval of step time", time),
        ("80% interval of peak memory", memory),
    ] {
        let evidence = Evidence::SeveralPools;
        let words = self::evidence(whole);
        used.push(interval(name, found, evidence, &words));
    }
    used
}

/// What predictions for groups side by side rest on, in words.
fn evidence(whole: &Scenario) -> String {
    let words = Evidence::SeveralPools.words(&whole.kind(), Reach::default());
    whole.with_factors_in_words(words)
}
