//! Compares the search with a solver of mixed-integer linear programs (`good_lp` with `microlp`),
//! which knows neither how strategies are enumerated nor how they are simulated. Given the costs of
//! a layer, it finds the best spread of layers over pipeline stages, and how few must be recomputed
//! to fit.

use catalog::{Precision, Workload, WorkloadSizes};
use costmodel::{CostModel, Scenario};
use good_lp::{Expression, ProblemVariables, Solution, SolverModel, constraint, microlp, variable};
use planner::{Constraints, SearchOptions, SearchSpace, search};
use plans::{Recompute, Strategy};
use proptest::prelude::*;

fn scenario(model: &str, pp: u64, seq_len: u64, global_batch: u64, headroom: f64) -> Scenario {
    Scenario {
        model: catalog::load::model(model).expect("preset"),
        cluster: catalog::load::cluster("dgx-h100").expect("preset"),
        runtime: catalog::load::runtime("megatron-core").expect("preset"),
        workload: Workload::new(WorkloadSizes {
            gpus: pp,
            seq_len,
            global_batch,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom,
    }
}

/// The fastest strategy of a pipeline without other parallelism; `None` where none fits.
fn best(costs: &CostModel, fixed: &str, uneven: u64) -> Option<Strategy> {
    let mut constraints = Constraints::default();
    constraints
        .fix(&format!("tp=1,cp=1,dp=1,vpp=1,mbs=1,schedule=1f1b,{fixed}"))
        .expect("well-formed");
    constraints.uneven = Some(uneven);
    let space = SearchSpace::new(costs.scenario(), &constraints);
    // The fastest of all that fit, even if a simpler one ties with it.
    let options = SearchOptions {
        tie: Some(0.0),
        risk: Some(0.5),
        ..SearchOptions::default()
    };
    let found = search(costs, &space, &options, &|_| {}).expect("searched");
    Some(found.top.into_iter().next()?.strategy)
}

/// Seconds that every stage computes for one micro-batch.
fn stage_seconds(costs: &CostModel, strategy: &Strategy) -> Vec<f64> {
    let mut seconds = vec![0.0; strategy.stages.0.len()];
    for event in costs.timeline(strategy).expect("priced").events {
        if let (Some([stage, 0]), plans::Stream::Compute) = (event.of(), event.stream) {
            seconds[stage as usize] += (event.end - event.start).0;
        }
    }
    seconds
}

/// The least time of the slowest stage over all ways to spread `layers` over stages. A layer takes
/// `layer` seconds; a stage takes its `ends` seconds in addition.
fn least_bottleneck(layers: u64, layer: f64, ends: &[f64]) -> f64 {
    let mut problem = ProblemVariables::new();
    let slowest = problem.add(variable().min(0));
    let counts = problem.add_vector(variable().integer().min(0).max(layers as f64), ends.len());
    let mut model = problem.minimise(slowest).using(microlp);
    model.add_constraint(constraint!(
        counts.iter().sum::<Expression>() == layers as f64
    ));
    for (&count, &end) in counts.iter().zip(ends) {
        model.add_constraint(constraint!(slowest >= layer * count + end));
    }
    model
        .solve()
        .expect("any spread is a solution")
        .value(slowest)
}

/// The fewest layers of every stage that must be recomputed so that all stages fit. `kept[stage]`
/// has the bytes that one layer keeps, `rest[stage]` all others.
fn fewest_recomputed(layers: u64, kept: &[f64], rest: &[f64], capacity: f64) -> Option<u64> {
    let mut problem = ProblemVariables::new();
    let recomputed = problem.add_vector(variable().binary(), layers as usize);
    let count: Expression = recomputed.iter().sum();
    let mut model = problem.minimise(count.clone()).using(microlp);
    for (&kept, &rest) in kept.iter().zip(rest) {
        let left = layers as f64 - count.clone();
        model.add_constraint(constraint!(
            left * (kept / capacity) + rest / capacity <= 1.0
        ));
    }
    let solution = model.solve().ok()?;
    Some(solution.eval(count).round() as u64)
}

/// Bytes in use on every pipeline rank with these decisions fixed; `None` if that does not fit.
fn bytes_by_rank(costs: &CostModel, fixed: &str) -> Option<Vec<f64>> {
    let strategy = best(costs, fixed, 0)?;
    let prediction = costs.predict(&strategy).expect("priced");
    Some(
        prediction
            .memory_by_rank
            .iter()
            .map(|b| b.as_f64())
            .collect(),
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_slowest_stage_is_nearly_as_fast_as_any_partition_makes_it(
        model in prop::sample::select(vec!["gpt2", "gpt2-xl", "tinyllama-1.1b", "llama3.2-3b", "llama2-7b", "opt-6.7b"]),
        pp in 3u64..=8,
        seq_len in prop::sample::select(vec![256, 512, 1024]),
    ) {
        let costs = CostModel::new(scenario(model, pp, seq_len, 128, 0.0)).expect("priced");
        let layers = costs.scenario().model.layers;
        let Some(found) = best(&costs, &format!("pp={pp},recompute=none"), layers) else {
            return Ok(());
        };
        let ours = stage_seconds(&costs, &found);
        // Stages between the ends hold nothing but layers.
        let layer = ours[1] / found.stages.0[1] as f64;
        let beside = |(seconds, &count): (&f64, &u64)| seconds - layer * count as f64;
        let ends: Vec<f64> = ours.iter().zip(&found.stages.0).map(beside).collect();
        let slowest = ours.iter().copied().fold(0.0, f64::max);
        let least = least_bottleneck(layers, layer, &ends);
        // The space holds even stages and some with fewer layers at the ends, not every partition: where the head is
        // heavy it misses the best by a fraction of a percent (0.55% seen, Llama 3.2 3B in 6 stages).
        prop_assert!(slowest / least > 1.0 - 1e-6, "{model} {found}: {slowest} s beats the solver's {least} s");
        prop_assert!(slowest / least < 1.01, "{model} {found}: {slowest} s, the solver's {least} s");
    }

    #[test]
    fn no_layer_is_recomputed_that_need_not_be(
        (model, pp) in prop::sample::select(vec![("llama3.2-1b", 2), ("llama3.2-3b", 4), ("llama2-7b", 4), ("gpt2-xl", 6)]),
        micro_batches in 2u64..24,
        tightness in 0.0..1.0f64,
    ) {
        let of = |headroom| CostModel::new(scenario(model, pp, 1024, micro_batches, headroom)).expect("priced");
        let roomy = of(0.0);
        let fixed = |recompute: &str| format!("pp={pp},recompute={recompute},grad_dtype=fp32,optim_states=own,offload=none,graphs=none");
        let bytes = |recompute: &str| bytes_by_rank(&roomy, &fixed(recompute)).expect("fits");
        let layers = roomy.scenario().model.layers / pp;
        let (none, one, full) = (bytes("none"), bytes("layers:1"), bytes("full"));
        let most = |bytes: &[f64]| bytes.iter().copied().fold(0.0, f64::max);
        let capacity = most(&full) + tightness * (most(&none) - most(&full));
        let costs = of(1.0 - capacity / roomy.capacity().as_f64());
        let kept: Vec<f64> = none.iter().zip(&one).map(|(none, one)| none - one).collect();
        let rest: Vec<f64> = none.iter().zip(&kept).map(|(none, kept)| none - kept * layers as f64).collect();
        let wanted = fewest_recomputed(layers, &kept, &rest, costs.capacity().as_f64());
        let choices: Vec<String> = (1..layers).map(|n| format!("layers:{n}")).collect();
        let found = best(&costs, &fixed(&format!("none|full|{}", choices.join("|"))), 0);
        let ours = found.map(|found| match found.recompute {
            Recompute::Layers(n) => n,
            Recompute::Full => layers,
            _ => 0,
        });
        prop_assert_eq!(ours, wanted);
    }
}
