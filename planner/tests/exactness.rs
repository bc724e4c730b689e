//! The pruned search equals brute force, whatever the threads.

use catalog::{AxisOrder, Bytes, CpKind, Overlap, Packing, Precision, ScheduleKind, Workload};
use costmodel::{CostModel, Scenario};
use planner::{Constraints, Objective, SearchOptions, SearchSpace, search, simplicity};
use plans::{Decisions, SearchOutcome, StagePartition, Strategy};

fn scenario(model: &str, cluster: &str, gpus: u64, runtime: &str, headroom: f64) -> Scenario {
    Scenario {
        model: catalog::load::model(model).expect("preset"),
        cluster: catalog::load::cluster(cluster).expect("preset"),
        runtime: catalog::load::runtime(runtime).expect("preset"),
        workload: Workload::new(catalog::WorkloadSizes {
            gpus,
            seq_len: 2048,
            global_batch: 64,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom,
    }
}

fn run(s: &Scenario, constraints: &Constraints, options: &SearchOptions<'_>) -> SearchOutcome {
    let costs = CostModel::new(s.clone()).expect("priced");
    let space = SearchSpace::new(s, constraints);
    search(&costs, &space, options, &|_| {}).expect("searched")
}

fn names(outcome: &SearchOutcome) -> Vec<(String, f64, u64)> {
    outcome
        .top
        .iter()
        .map(|c| {
            (
                c.strategy.to_string(),
                c.prediction.step_time.0,
                c.prediction.peak_memory.0,
            )
        })
        .collect()
}

/// Most strategies of a random space: brute force simulates all of them.
const MOST: u64 = 1500;
/// Number of random spaces.
const SPACES: usize = 72;

/// Numbers that are the same in every run (`splitmix64`).
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }
}

/// Random spaces under every runtime: models dense and with experts, windows, tied tables and prediction modules;
/// clusters, sizes, memory that is plenty or scarce, constraints.
fn spaces() -> Vec<(Scenario, Constraints)> {
    let runtimes = catalog::load::runtime_names().into_iter();
    let runtimes: Vec<String> = runtimes.map(|runtime| runtime.name).collect();
    spaces_of(SPACES, &mut Dice(22), &runtimes, &[])
}

/// Random spaces in which states or activations may lie in host memory, moments have 8 bits, or parameters are gathered more or
/// fewer blocks ahead, under runtimes that can do that.
fn spaces_with_what_is_asked_for() -> Vec<(Scenario, Constraints)> {
    let of = |runtime: &str, offload: &'static [&'static str], seed: u64| {
        spaces_of(6, &mut Dice(seed), &[runtime.to_owned()], offload)
    };
    let some = &[
        "offload=none|optimizer",
        "offload=optimizer",
        "offload=parameters|none|optimizer",
    ];
    let all = &["offload=none|parameters", "offload=parameters"];
    let partly = &[
        "offload=none|optimizer:50|optimizer",
        "offload=optimizer:25",
    ];
    let narrow = &["optim_states=own|8bit_moments", "optim_states=8bit_moments"];
    let activations = &["offload_layers=8", "offload_layers=20|0", "pp=1"];
    let ahead = &["prefetch=0|1", "prefetch=0", "prefetch=2", "prefetch=1|2"];
    let mut spaces = of("deepspeed", some, 1);
    spaces.extend(of("hf-trainer", narrow, 5));
    spaces.extend(of("megatron-core", activations, 6));
    spaces.extend(of("fsdp2", all, 2));
    spaces.extend(of("torchtitan", all, 3));
    spaces.extend(of("megatron-core", partly, 4));
    for (seed, runtime) in (7..).zip(["deepspeed", "fsdp1", "fsdp2"]) {
        spaces.extend(of(runtime, ahead, seed));
    }
    spaces
}

/// Random spaces of jobs with 8-bit products, whose operands may be scaled in several ways.
fn spaces_of_eight_bits() -> Vec<(Scenario, Constraints)> {
    let runtimes = ["megatron-core", "torchtitan", "nemo"].map(str::to_owned);
    let recipes = [
        "fp8_recipe=delayed|tensorwise",
        "fp8_recipe=tensorwise|rowwise",
        "fp8_recipe=tensorwise|blockwise|mxfp8",
        "recompute=selective:norms+mlp|none",
        "recompute=selective|selective:norms+mlp",
    ];
    let mut spaces = spaces_of(60, &mut Dice(12), &runtimes, &recipes);
    for (s, _) in &mut spaces {
        s.workload = s.workload.clone().with_precision(Precision::Fp8);
    }
    let possible = |(s, constraints): &(Scenario, Constraints)| {
        let strategies = SearchSpace::new(s, constraints).len();
        (1..=MOST).contains(&strategies) && CostModel::new(s.clone()).is_ok()
    };
    spaces.retain(possible);
    spaces
}

/// So many random spaces, each with one of the constraints of `also` if there are any.
fn spaces_of(
    count: usize,
    dice: &mut Dice,
    runtimes: &[String],
    also: &[&str],
) -> Vec<(Scenario, Constraints)> {
    let models = [
        "gpt2-xl",
        "llama3-8b",
        "llama2-13b",
        "qwen2.5-7b",
        "gemma2-9b",
        "mixtral-8x7b",
        "deepseek-v2-lite",
        "deepseek-v3",
        "qwen3-30b-a3b",
        "llama3-70b",
        "gpt-oss-20b",
        "falcon-7b",
    ];
    let clusters = [
        "dgx-h100",
        "dgx-a100",
        "aws-p4d",
        "gb200-nvl72",
        "mi300x",
        "dgx2-v100",
    ];
    let fixes = [
        "mbs=1",
        "mbs=1|2",
        "pp=2",
        "pp=4",
        "pp=1|2",
        "tp=1",
        "tp=2",
        "tp=4|8",
        "cp=1",
        "cp=2",
        "zero=1|3",
        "zero=0",
        "recompute=full",
        "recompute=none|full",
        "recompute=selective",
        "recompute=selective:norms+mlp|none",
        "vpp=1",
        "vpp=2",
        "ep=1|4",
        "dp_replicate=1|2",
        "grad_dtype=fp32",
        "optim_states=own",
        "optim_states=split_master|bf16_moments",
        "grad_dtype=bf16|fp32",
        "offload=none",
        "offload=none|optimizer:50",
        "offload_layers=0",
        "prefetch=1",
        "overlap=grad+param+pp",
        "overlap=grad+param+pp|grad+param+tp+ep+pp",
        "dispatcher=all_to_all",
        "graphs=none",
        "graphs=layers|step",
        "dispatcher=all_gather|deepep|hybridep",
    ];
    let mut spaces = Vec::new();
    while spaces.len() < count {
        let runtime = &runtimes[spaces.len() % runtimes.len()];
        let gpus = dice.of(&[1, 2, 4, 8, 16, 24, 32, 64, 128, 256]);
        let headroom = dice.of(&[0.0, 0.05, 0.05, 0.3, 0.6]);
        let mut s = scenario(
            dice.of(&models),
            dice.of(&clusters),
            gpus,
            runtime,
            headroom,
        );
        // Some of the workloads are packed: documents of different lengths make ranks wait.
        if spaces.len() % 3 == 1 {
            let lengths = ["128:9,2k:1", "lognormal:mean=300,sigma=1.2"][spaces.len() % 2];
            let lengths = lengths.parse().expect(lengths);
            let packed = s.workload.of_documents(lengths, Packing::Within);
            s.workload = packed.expect("documents");
        }
        // Some of the clusters have ranks that differ from pass to pass.
        if spaces.len() % 4 == 2 {
            let jittering = format!("{} with 3% jitter", s.cluster.name);
            s.cluster = catalog::load::cluster(&jittering).expect("a cluster");
        }
        let mut constraints = Constraints::default();
        if !also.is_empty() {
            let _ = constraints.fix(dice.of(also));
        }
        for _ in 0..dice.below(6) {
            // A dimension that is fixed already is left as it is.
            let _ = constraints.fix(dice.of(&fixes));
        }
        let strategies = SearchSpace::new(&s, &constraints).len();
        let wanted = if dice.below(4) == 0 { 1 } else { 100 };
        if (wanted..=MOST).contains(&strategies) && CostModel::new(s.clone()).is_ok() {
            spaces.push((s, constraints));
        }
    }
    spaces
}

#[test]
fn pruned_search_equals_brute_force() {
    let Found { fit, offloaded, .. } = compared(&spaces());
    assert!(
        fit > SPACES,
        "only {fit} of {} searches found a plan",
        2 * SPACES
    );
    assert!(
        offloaded > SPACES / 10,
        "only {offloaded} plans keep states in host memory"
    );
}

#[test]
fn pruned_search_equals_brute_force_with_what_is_asked_for() {
    let spaces = spaces_with_what_is_asked_for();
    let Found {
        fit, copied, ahead, ..
    } = compared(&spaces);
    assert!(fit > spaces.len(), "only {fit} searches found a plan");
    assert!(copied > 0, "no plan keeps activations in host memory");
    assert!(ahead > 0, "no plan gathers another number of blocks ahead");
}

#[test]
fn pruned_search_equals_brute_force_in_eight_bits() {
    let spaces = spaces_of_eight_bits();
    let found = compared(&spaces);
    assert!(spaces.len() > 12, "only {} spaces", spaces.len());
    assert!(
        found.fit > spaces.len() / 2,
        "only {} searches found a plan",
        found.fit
    );
    assert!(
        found.scaled > 0,
        "no plan has other scales than the runtime's own"
    );
}

/// With one data-parallel rank, experts that are spread over fewer ranks than tensor parallelism has are sharded by ZeRO: this model
/// fits in no other way.
#[test]
fn experts_are_sharded_without_data_parallelism() {
    let mut s = scenario("mixtral-8x7b", "dgx-h200", 16, "megatron-core", 0.05);
    let sizes = catalog::WorkloadSizes {
        gpus: 16,
        seq_len: 4096,
        global_batch: 32,
        precision: Precision::Bf16,
    };
    s.workload = Workload::new(sizes).expect("a workload");
    let mut constraints = Constraints::default();
    for fix in ["tp=8", "pp=2", "ep=1|2", "etp=1", "mbs=1", "vpp=1"] {
        constraints.fix(fix).expect(fix);
    }
    let best = run(&s, &constraints, &SearchOptions::default());
    let best = best.top.first().expect("a plan fits");
    assert_eq!(best.strategy.zero, catalog::Zero::Z1);
    constraints
        .fix("recompute=full|selective")
        .expect("a constraint");
    let found = compared(&[(s, constraints)]);
    assert_eq!(found.fit, 2);
}

/// Statistics of what searches found.
#[derive(Default)]
struct Found {
    /// Number of searches that found a plan.
    fit: usize,
    /// Number of those whose first plan keeps states in host memory.
    offloaded: usize,
    /// Number of those whose first plan keeps activations there.
    copied: usize,
    /// Number of those whose first plan gathers parameters another number of blocks ahead than one.
    ahead: usize,
    /// Number of those whose first plan scales operands of 8-bit products in another way than the runtime does by itself.
    scaled: usize,
}

/// Compares searches of spaces with brute force.
fn compared(spaces: &[(Scenario, Constraints)]) -> Found {
    let mut found = Found::default();
    for (index, (s, constraints)) in spaces.iter().enumerate() {
        for objective in [Objective::Time, Objective::Memory] {
            let options = SearchOptions {
                objective,
                top: [1, 3, 10][index % 3],
                risk: [Some(0.1), Some(0.5), None, Some(0.01)][index % 4],
                ..SearchOptions::default()
            };
            let all = SearchOptions {
                exhaustive: true,
                ..options
            };
            let pruned = run(s, constraints, &options);
            let brute = run(s, constraints, &all);
            let what = format!(
                "space {index}: {} on {} {} under {}, {constraints:?}, {objective:?}",
                s.model.name, s.workload.gpus, s.cluster.name, s.runtime.name
            );
            assert_eq!(names(&pruned), names(&brute), "{what}");
            let counted = pruned.space.simulated + pruned.space.pruned.values().sum::<u64>();
            assert_eq!(counted, pruned.space.strategies, "{what}: counts");
            assert_eq!(
                brute.space.simulated, pruned.space.strategies,
                "{what}: all"
            );
            let best = brute.top.first();
            found.fit += usize::from(best.is_some());
            found.offloaded += usize::from(best.is_some_and(|c| c.strategy.offload.is_some()));
            found.ahead += usize::from(best.is_some_and(|c| c.strategy.prefetch.is_some()));
            found.scaled += usize::from(best.is_some_and(|c| c.strategy.fp8_recipe.is_some()));
            found.copied += usize::from(best.is_some_and(|c| c.strategy.offload_layers > 0));
        }
    }
    found
}

/// The decisions that all variants of a plan share. Those in which variants may differ are set to fixed values:
/// - axis order, kind of context parallelism, and virtual stages with their schedule and partition;
/// - whether tensor-parallel and expert-parallel messages overlap with compute, the token dispatcher, and CUDA graphs;
/// - how FP8 tensors are scaled, and the element types of gradients and optimizer states;
/// - which states lie in host memory, and how far ahead parameters are gathered;
/// - the number of layers that are recomputed, or whose activations lie in host memory, as long as it is not 0.
fn shared(d: &Decisions) -> Decisions {
    Decisions {
        axis_order: AxisOrder::TP_CP_DP_PP,
        cp_kind: CpKind::Ring,
        overlap: Overlap {
            tensor_parallel: false,
            expert_parallel: false,
            ..d.overlap
        },
        dispatcher: None,
        graphs: None,
        fp8_recipe: None,
        gradients: None,
        optimizer_states: None,
        offload: None,
        prefetch: None,
        vpp: 1,
        schedule: ScheduleKind::OneFOneB,
        stages: StagePartition(Vec::new()),
        recompute: simplicity::kind(d.recompute),
        offload_layers: d.offload_layers.min(1),
        ..d.clone()
    }
}

/// The plans of a search as they are stated to be ranked, from the scores of all strategies.
fn stated(s: &Scenario, constraints: &Constraints, options: &SearchOptions<'_>) -> Vec<String> {
    let costs = CostModel::new(s.clone()).expect("priced");
    let space = SearchSpace::new(s, constraints);
    let limit = options.risk.map_or(Bytes(u64::MAX), |risk| s.limit(risk));
    let scored = |space: &SearchSpace| {
        let all = space.layouts().iter().flat_map(|l| space.strategies(l));
        let mut scored: Vec<(f64, u64, Strategy)> = all
            .map(|strategy| (costs.score(&strategy).expect("priced"), strategy))
            .filter(|(score, _)| score.peak_memory <= limit && score.fits_host)
            .map(|(score, strategy)| (score.step_time.0, score.peak_memory.0, strategy))
            .collect();
        scored.sort_by(|a, b| a.partial_cmp(b).expect("no time is NaN"));
        scored
    };
    let (mut best, mut plans) = (Vec::new(), Vec::new());
    let mut scored_by_eighths = scored(&space);
    for (.., strategy) in scored_by_eighths.clone() {
        let layout = simplicity::layout(&strategy);
        if !best.contains(&layout) && best.len() < options.top.max(10) {
            best.push(layout);
            plans.push(strategy);
        }
    }
    let plans: Vec<&Decisions> = plans.iter().map(|plan| &**plan).collect();
    scored_by_eighths.retain(|(.., strategy)| best.contains(&simplicity::layout(strategy)));
    let scored = (space.finer(&plans)).map_or(scored_by_eighths, |finer| scored(&finer));
    let Some(fastest) = scored.first().map(|first| first.0) else {
        return Vec::new();
    };
    let tie = 1.0 + options.tie.expect("given");
    let complexity = |strategy: &Strategy| simplicity::complexity(strategy, &s.runtime);
    let mut layouts = Vec::new();
    let mut plans = Vec::new();
    for (time, _, strategy) in &scored {
        let layout = simplicity::layout(strategy);
        if layouts.contains(&layout) {
            continue;
        }
        let own = shared(strategy);
        let variants = scored
            .iter()
            .filter(|(other, _, variant)| *other <= time * tie && shared(variant) == own);
        // Of equally simple ones, the first is the best.
        plans.extend(variants.min_by_key(|(_, _, variant)| complexity(variant)));
        layouts.push(layout);
    }
    plans.truncate(options.top.max(10));
    let tied = (0..plans.len()).filter(|&at| plans[at].0 <= fastest * tie);
    let first = tied
        .min_by_key(|&at| complexity(&plans[at].2))
        .expect("the fastest");
    let first = plans.remove(first);
    plans.sort_by(|a, b| a.partial_cmp(b).expect("no time is NaN"));
    plans.insert(0, first);
    plans.truncate(options.top);
    plans.iter().map(|plan| plan.2.to_string()).collect()
}

#[test]
fn plans_are_ranked_as_stated() {
    for (index, (s, constraints)) in spaces().iter().enumerate().step_by(3) {
        for (tie, risk) in [
            (0.0, Some(0.5)),
            (0.01, Some(0.1)),
            (0.1, Some(0.02)),
            (0.05, None),
        ] {
            let options = SearchOptions {
                tie: Some(tie),
                risk,
                top: [1, 5, 12][index / 3 % 3],
                ..SearchOptions::default()
            };
            let found: Vec<String> = names(&run(s, constraints, &options))
                .into_iter()
                .map(|(name, ..)| name)
                .collect();
            let what = format!("space {index}, tie {tie}, risk {risk:?}");
            assert_eq!(found, stated(s, constraints, &options), "{what}");
        }
    }
}

#[test]
fn a_plan_is_chosen_by_the_bound_of_its_memory() {
    let s = scenario("llama3-8b", "dgx-h100", 16, "megatron-core", 0.05);
    for risk in [0.01, 0.1, 0.3, 0.5, 0.7] {
        let options = SearchOptions {
            risk: Some(risk),
            ..SearchOptions::default()
        };
        let outcome = run(&s, &Constraints::default(), &options);
        assert!(!outcome.top.is_empty());
        for plan in outcome
            .top
            .iter()
            .chain(outcome.wishes.iter().map(|(_, plan)| plan))
        {
            assert!(plan.prediction.p_fits >= 1.0 - risk, "{}", plan.strategy);
        }
        let layouts: Vec<_> = outcome
            .top
            .iter()
            .map(|c| simplicity::layout(&c.strategy))
            .collect();
        assert!((1..layouts.len()).all(|at| !layouts[..at].contains(&layouts[at])));
    }
    assert_eq!(s.limit(0.5), s.capacity());
}

#[test]
fn threads_do_not_change_the_result() {
    for (s, constraints) in spaces().into_iter().step_by(6) {
        let outcomes: Vec<SearchOutcome> = [1, 2, 8]
            .into_iter()
            .map(|threads| {
                let pool = rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .build()
                    .expect("starts");
                pool.install(|| run(&s, &constraints, &SearchOptions::default()))
            })
            .collect();
        assert!(outcomes.windows(2).all(|pair| pair[0] == pair[1]));
    }
}

#[test]
fn less_memory_never_adds_plans() {
    let mut fastest = 0.0f64;
    let mut found = usize::MAX;
    for headroom in [0.0, 0.2, 0.4, 0.6, 0.8, 0.95] {
        let s = scenario("llama3-8b", "dgx-h100", 8, "megatron-core", headroom);
        let options = SearchOptions {
            top: 1000,
            // Simpler plans that tie with the best of their layout may take longer, and need memory that is there no more.
            tie: Some(0.0),
            exhaustive: true,
            ..SearchOptions::default()
        };
        let outcome = run(&s, &Constraints::default(), &options);
        assert!(outcome.top.len() <= found);
        found = outcome.top.len();
        let times = outcome.top.iter().map(|c| c.prediction.step_time.0);
        let least = times.fold(f64::INFINITY, f64::min);
        assert!(least >= fastest);
        fastest = least;
    }
}

#[test]
fn constraints_name_the_nearest_dimension() {
    let mut constraints = Constraints::default();
    let error = constraints.fix("tpp=8").expect_err("unknown");
    let said = error.to_string();
    let begins = "constraint `tpp=8`: unknown dimension `tpp`; expected one of tp, ";
    assert!(said.starts_with(begins), "{said}");
    assert!(said.ends_with("; did you mean `tp`?"), "{said}");
    assert!(constraints.fix("tp=0").is_err());
    assert!(constraints.at_most("pp").is_err());
}

#[test]
fn what_does_not_fit_says_what_to_relax() {
    let s = scenario("llama3-70b", "dgx-h100", 8, "megatron-core", 0.05);
    let costs = CostModel::new(s).expect("priced");
    let options = SearchOptions::default();
    let advice = planner::size::relaxations(&costs, &Constraints::default(), &options);
    let advice = advice.expect("priced");
    assert!(
        advice.iter().any(|a| a.says.contains("GPUs would fit")),
        "{advice:?}"
    );
    let lightest = advice
        .iter()
        .find(|a| a.says.contains("lightest strategy needs"));
    let says = &lightest.expect("the memory needed").says;
    // 95 % of the GPU's memory.
    let has = "h100-sxm has 75.1 GiB usable of 79.1 GiB";
    assert!(says.ends_with(has), "{says}");
}
