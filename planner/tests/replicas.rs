//! Data parallelism across pools: the search over shares is exact, every rank fits, and shares add
//! up to the batch.

use catalog::{Cluster, DType, Link, Pool, Pools, Precision, Workload, WorkloadSizes};
use costmodel::{CostModel, Scenario, Side};
use planner::replicas::{Groups, Shared};
use planner::{Constraints, Objective, SearchOptions, SearchSpace};
use plans::{Prediction, Strategy};

fn scenario(cluster: &Cluster, gpus: u64, batch: u64) -> Scenario {
    let sizes = WorkloadSizes {
        gpus,
        seq_len: 2048,
        global_batch: batch,
        precision: Precision::Fp16,
    };
    Scenario {
        model: catalog::load::model("llama2-7b").expect("a preset"),
        cluster: cluster.clone(),
        runtime: catalog::load::runtime("megatron-core").expect("a preset"),
        workload: Workload::new(sizes).expect("a workload"),
        headroom: 0.05,
    }
}

fn costs(pool: &Pool, batch: u64) -> CostModel {
    CostModel::new(scenario(&pool.cluster, pool.gpus, batch)).expect("priced")
}

fn fixed(texts: &[&str]) -> Constraints {
    let mut constraints = Constraints::default();
    for text in texts {
        constraints.fix(text).expect("a constraint");
    }
    constraints
}

fn pools(line: &str) -> std::sync::Arc<Pools> {
    let cluster = catalog::load::cluster(line).expect("a cluster");
    cluster.pools.expect("pools")
}

/// The best shares of the groups of a division.
fn shared(
    division: &[CostModel],
    link: Option<&Link>,
    constraints: &Constraints,
) -> Option<Shared> {
    let batch = division[0].scenario().workload.global_batch;
    let all: Vec<usize> = (0..division.len()).collect();
    let options = SearchOptions::default();
    let mut groups = Groups::new(division, batch, constraints, &options);
    let found = groups.best(&all, link, f64::INFINITY).expect("searched");
    let report = groups.report();
    assert_eq!(
        report.strategies,
        report.simulated + report.pruned.values().sum::<u64>()
    );
    found
}

fn models(division: &[Pool], batch: u64) -> Vec<CostModel> {
    division.iter().map(|pool| costs(pool, batch)).collect()
}

/// The time of the fastest plan for a share, by brute force.
fn fastest(whole: &CostModel, share: u64, constraints: &Constraints) -> Option<(f64, Strategy)> {
    let workload = whole
        .scenario()
        .workload
        .with_batch(share)
        .expect("a batch");
    let costs = whole.with_workload(workload).expect("priced");
    let space = SearchSpace::new(costs.scenario(), constraints);
    let options = SearchOptions {
        top: 1,
        tie: Some(0.0),
        exhaustive: true,
        ..SearchOptions::default()
    };
    let outcome = planner::search(&costs, &space, &options, &|_| {}).expect("searched");
    let best = outcome.top.into_iter().next()?;
    Some((best.prediction.step_time.0, best.strategy))
}

#[test]
fn the_shares_found_are_those_of_brute_force() {
    let base = [
        "cp=1",
        "mbs=1",
        "vpp=1",
        "schedule=1f1b",
        "recompute=none|full",
        "zero=1",
    ];
    for (line, batch) in [
        ("8 x dgx-a100 + 16 x dgx2-v100", 24),
        (
            "8 x dgx-h100 + 16 x dgx-a100 at 0.7, 100 Gb/s between, 5 ms away",
            20,
        ),
        ("8 x dgx-h100 + 8 x dgx-a100 + 16 x dgx2-v100", 10),
    ] {
        let pools = pools(line);
        for division in pools.divisions() {
            let models = models(&division, batch);
            let mut best = f64::INFINITY;
            // All groups have the same gradient types.
            for gradients in ["fp32", "fp16"] {
                let mut constraints = fixed(&base);
                constraints
                    .fix(&format!("grad_dtype={gradients}"))
                    .expect("known");
                let times: Vec<Vec<Option<(f64, Strategy)>>> = (models.iter())
                    .map(|whole| {
                        let time = |share| match share {
                            0 => None,
                            share => fastest(whole, share, &constraints),
                        };
                        (0..=batch).map(time).collect()
                    })
                    .collect();
                let reduced = if gradients == "fp32" {
                    DType::F32
                } else {
                    DType::F16
                };
                let groups: Vec<&CostModel> = models.iter().collect();
                let link = pools.between.as_ref();
                let exchange = costmodel::exchange(&groups, reduced, link)
                    .expect("priced")
                    .0;
                for_each_division(batch, models.len(), &mut Vec::new(), &mut |shares| {
                    let taken = shares.iter().zip(&times);
                    let taken = taken.map(|(&n, times)| times[n as usize].as_ref());
                    let slowest = taken
                        .map(|time| time.map_or(f64::INFINITY, |(time, _)| *time))
                        .fold(0.0, f64::max);
                    best = best.min(slowest + exchange);
                });
            }
            let found = shared(&models, pools.between.as_ref(), &fixed(&base));
            let time = found
                .as_ref()
                .map_or(f64::INFINITY, |found| found.step_time);
            // The times of a pass's blocks are rounded to picoseconds one by one, so plans that take equally long differ by as many.
            let alike = time == best || (time / best - 1.0).abs() < 1e-9;
            assert!(alike, "{line}: {time} {best} {found:?}");
        }
    }
}

/// Peak, as a share of a GPU's memory, and step time.
type Plan = (f64, f64);
/// Picks a number from all plans of a group for a share, such as the least peak.
type Least<'a> = &'a dyn Fn(&[Plan]) -> f64;

/// For every strategy that fits with a share: its peak as a part of a GPU's memory, and its time.
fn that_fit(whole: &CostModel, share: u64, constraints: &Constraints) -> Vec<Plan> {
    let workload = whole.scenario().workload.with_batch(share);
    let costs = (whole.with_workload(workload.expect("a batch"))).expect("priced");
    let limit = costs.scenario().limit(0.1);
    let space = SearchSpace::new(costs.scenario(), constraints);
    let all = space
        .layouts()
        .iter()
        .flat_map(|layout| space.strategies(layout));
    let scores = all.map(|strategy| costs.score(&strategy).expect("scored"));
    let fit = scores.filter(|score| score.peak_memory <= limit && score.fits_host);
    let memory = costs.capacity().as_f64();
    fit.map(|score| (score.peak_memory.as_f64() / memory, score.step_time.0))
        .collect()
}

/// The least part of its memory that the fullest GPU uses over all divisions of the batch, and the
/// least step time with no GPU fuller.
fn lightest_division(models: &[CostModel], link: Option<&Link>, base: &[&str]) -> (f64, f64) {
    let batch = models[0].scenario().workload.global_batch;
    let mut least = (f64::INFINITY, f64::INFINITY);
    for (gradients, reduced) in [("fp32", DType::F32), ("fp16", DType::F16)] {
        let mut constraints = fixed(base);
        let fix = format!("grad_dtype={gradients}");
        constraints.fix(&fix).expect("known");
        let plans: Vec<Vec<Vec<Plan>>> = (models.iter())
            .map(|whole| {
                let of = |share| match share {
                    0 => Vec::new(),
                    share => that_fit(whole, share, &constraints),
                };
                (0..=batch).map(of).collect()
            })
            .collect();
        let groups: Vec<&CostModel> = models.iter().collect();
        let exchange = costmodel::exchange(&groups, reduced, link).expect("priced");
        let most = |shares: &[u64], of: Least<'_>| {
            let taken = shares.iter().zip(&plans);
            let taken = taken.map(|(&n, plans)| of(&plans[n as usize]));
            taken.fold(0.0, f64::max)
        };
        let memory = |plans: &[Plan]| plans.iter().map(|p| p.0).fold(f64::INFINITY, f64::min);
        let mut fullest = f64::INFINITY;
        for_each_division(batch, models.len(), &mut Vec::new(), &mut |shares| {
            fullest = fullest.min(most(shares, &memory));
        });
        let time = |plans: &[Plan]| {
            let light = plans.iter().filter(|plan| plan.0 <= fullest);
            light.map(|plan| plan.1).fold(f64::INFINITY, f64::min)
        };
        let mut fastest = f64::INFINITY;
        for_each_division(batch, models.len(), &mut Vec::new(), &mut |shares| {
            fastest = fastest.min(most(shares, &time) + exchange.0);
        });
        if (fullest, fastest) < least {
            least = (fullest, fastest);
        }
    }
    least
}

/// Where memory is minimised, the fullest GPU is as empty as possible, and the plans are the
/// fastest that keep it so.
#[test]
fn the_lightest_groups_are_those_of_brute_force() {
    let base = [
        "cp=1",
        "mbs=1|2",
        "schedule=1f1b",
        "recompute=none|full",
        "offload=none",
    ];
    for (line, batch) in [
        ("8 x dgx-a100 + 16 x dgx2-v100", 12),
        (
            "8 x dgx-h100 + 16 x dgx-a100 at 0.7, 100 Gb/s between, 5 ms away",
            15,
        ),
        ("8 x dgx-h100 + 8 x dgx-a100 + 16 x dgx2-v100", 7),
    ] {
        let pools = pools(line);
        let link = pools.between.as_ref();
        for division in pools.divisions() {
            let models = models(&division, batch);
            let all: Vec<usize> = (0..models.len()).collect();
            let options = SearchOptions {
                objective: Objective::Memory,
                ..SearchOptions::default()
            };
            let constraints = fixed(&base);
            let mut groups = Groups::new(&models, batch, &constraints, &options);
            let found = groups.best(&all, link, f64::INFINITY).expect("searched");
            let found_as = found
                .as_ref()
                .map(|found| (found.fullest.expect("a share"), found.step_time));
            let least = lightest_division(&models, link, &base);
            assert_eq!(
                found_as.unwrap_or((f64::INFINITY, f64::INFINITY)),
                least,
                "{line}"
            );
            // A plan as light counts as no better, and the plans shown are as light.
            let Some(shared) = found else { continue };
            let again = groups.best(&all, link, least.0).expect("searched");
            assert!(again.is_none(), "{again:?}");
            for share in groups.plans(&all, &shared).expect("plans") {
                let p = &share.best.prediction;
                let full = p.peak_memory.as_f64() / p.usable().as_f64();
                assert!(full <= least.0 && p.fit.fits(), "{line}: {full}, {least:?}");
            }
        }
    }
}

/// Calls `then` with all divisions of `left` sequences over groups, each with at least one.
fn for_each_division(
    left: u64,
    groups: usize,
    shares: &mut Vec<u64>,
    then: &mut dyn FnMut(&[u64]),
) {
    if groups == 1 {
        shares.push(left);
        then(shares);
        shares.pop();
        return;
    }
    for share in 1..left {
        shares.push(share);
        for_each_division(left - share, groups - 1, shares, then);
        shares.pop();
    }
}

/// Shares by speed beat each pool alone, and equal shares for every GPU.
#[test]
fn shares_by_speed_beat_the_best_pool_and_an_even_split() {
    for line in [
        "16 x dgx-a100 + 16 x dgx2-v100",
        "16 x dgx-a100 + 16 x dgx-a100, 400 Gb/s between, 5 ms away",
        "24 x dgx-h100 + 8 x dgx-h100 at 0.8",
    ] {
        let pools = pools(line);
        let batch = 512;
        let division = pools.divisions().remove(0);
        let models = models(&division, batch);
        let link = pools.between.as_ref();
        let none = Constraints::default();
        let found = shared(&models, link, &none).expect("plans fit");
        assert_eq!(found.shares.iter().sum::<u64>(), batch);
        for (whole, strategy) in models.iter().zip(&found.strategies) {
            let share = strategy.dp() * strategy.micro_batch * strategy.num_micro_batches;
            assert!(found.shares.contains(&share));
            assert_eq!(strategy.world(), whole.scenario().workload.gpus);
            let alone = best_of(whole, batch);
            assert!(found.step_time < alone, "{line}: {found:?}, {alone} alone");
        }
        let gpus = pools.gpus();
        let even: Vec<f64> = (models.iter())
            .map(|whole| best_of(whole, batch * whole.scenario().workload.gpus / gpus))
            .collect();
        let slowest = even.iter().copied().fold(0.0, f64::max);
        let groups: Vec<&CostModel> = models.iter().collect();
        let exchange = costmodel::exchange(&groups, DType::F16, link).expect("priced");
        let even = slowest + exchange.0;
        // If all GPUs are equally fast, the even split is the best.
        let alike = |pool: &Pool| pool.cluster == pools.parts[0].cluster;
        match pools.parts.iter().all(alike) {
            true => assert!(
                found.step_time <= even * (1.0 + 1e-9),
                "{line}: {found:?}, {even}"
            ),
            false => assert!(found.step_time < even, "{line}: {found:?}, {even}"),
        }
    }
}

fn best_of(whole: &CostModel, share: u64) -> f64 {
    let workload = whole
        .scenario()
        .workload
        .with_batch(share)
        .expect("a batch");
    let costs = whole.with_workload(workload).expect("priced");
    let space = SearchSpace::new(costs.scenario(), &Constraints::default());
    let options = SearchOptions {
        top: 1,
        ..SearchOptions::default()
    };
    let outcome = planner::search(&costs, &space, &options, &|_| {}).expect("searched");
    outcome.top[0].prediction.step_time.0
}

/// The prediction for all groups follows from those of each.
#[test]
fn a_step_is_that_of_the_slowest_group_and_the_addition_of_gradients() {
    let line = "8 x dgx-h100 + 16 x dgx2-v100, 100 Gb/s between";
    let pools = pools(line);
    let division = pools.divisions().remove(0);
    let models = models(&division, 256);
    let found = shared(&models, pools.between.as_ref(), &Constraints::default());
    let found = found.expect("plans fit");
    let shares = models.iter().zip(&found.shares).map(|(whole, &share)| {
        let workload = whole
            .scenario()
            .workload
            .with_batch(share)
            .expect("a batch");
        whole.with_workload(workload).expect("priced")
    });
    let shares: Vec<CostModel> = shares.collect();
    let predictions: Vec<Prediction> = (shares.iter().zip(&found.strategies))
        .map(|(costs, strategy)| costs.predict(strategy).expect("priced"))
        .collect();
    let sides: Vec<Side<'_>> = (0..shares.len())
        .map(|at| Side {
            costs: &shares[at],
            strategy: &found.strategies[at],
            prediction: &predictions[at],
        })
        .collect();
    let cluster = catalog::load::cluster(line).expect("a cluster");
    let whole = scenario(&cluster, pools.gpus(), 256);
    let together = costmodel::side_by_side(&whole, &sides).expect("priced");
    assert!((together.step_time.0 - found.step_time).abs() < 1e-9 * found.step_time);
    let b = &together.breakdown;
    let slowest = predictions
        .iter()
        .map(|p| p.step_time.0)
        .fold(0.0, f64::max);
    let exchange = together.step_time.0 - slowest;
    assert!((b.pools_exposed_s - exchange).abs() < 1e-9 * slowest);
    assert!(together.fit.fits() && predictions.iter().all(|p| p.fit.fits()));
    assert_eq!(
        together.memory_by_rank.len(),
        predictions
            .iter()
            .map(|p| p.memory_by_rank.len())
            .sum::<usize>()
    );
    // Together they process the tokens of the whole batch in one step.
    let tokens = together.tokens_per_s_per_gpu * together.step_time.0 * pools.gpus() as f64;
    assert!((tokens / (256.0 * 2048.0) - 1.0).abs() < 1e-9, "{tokens}");
    let flops: f64 = (predictions.iter().zip(&shares))
        .map(|(p, costs)| {
            p.mfu * p.step_time.0 * p.peak_flop_rate.0 * costs.scenario().workload.gpus as f64
        })
        .sum();
    let peak = together.peak_flop_rate.0 * pools.gpus() as f64 * together.step_time.0;
    assert!((together.mfu / (flops / peak) - 1.0).abs() < 1e-9);
    let bandwidth = together
        .provenance
        .iter()
        .filter(|c| c.name == "bandwidth between pools");
    assert_eq!(bandwidth.count(), 1);
}

/// A slower link, or more bytes of gradients, never makes the addition faster.
#[test]
fn adding_up_gradients_takes_longer_over_slower_links() {
    let times = |link: &str, dtype: DType| {
        let pools = pools(&format!("8 x dgx-h100 + 8 x dgx-a100{link}"));
        let models = models(&pools.divisions().remove(0), 64);
        let groups: Vec<&CostModel> = models.iter().collect();
        costmodel::exchange(&groups, dtype, pools.between.as_ref())
            .expect("priced")
            .0
    };
    let mut before = 0.0;
    for link in [
        "",
        ", 200 Gb/s between",
        ", 50 Gb/s between",
        ", 50 Gb/s between, 20 ms away",
    ] {
        let [half, full] = [DType::F16, DType::F32].map(|dtype| times(link, dtype));
        assert!(half < full && before <= half, "{link}: {half} {full}");
        before = half;
    }
    assert_eq!(
        costmodel::exchange(
            &[&models(&pools("8 x dgx-h100 + 8 x dgx-a100").divisions()[0], 64)[0]],
            DType::F32,
            None
        )
        .expect("priced")
        .0,
        0.0
    );
}
