//! Every plan that a search finds satisfies the constraints given; constraints that cannot be satisfied are errors.

use std::collections::BTreeSet;

use catalog::{Precision, Workload, WorkloadSizes};
use costmodel::{CostModel, Scenario};
use planner::{Constraints, PlannerError, SearchOptions, SearchSpace, legal_values, search};
use plans::support::allowed_by;
use proptest::prelude::*;

fn scenario(model: &str, gpus: u64, runtime: &str) -> Scenario {
    Scenario {
        model: catalog::load::model(model).expect("preset"),
        cluster: catalog::load::cluster("dgx-h100").expect("preset"),
        runtime: catalog::load::runtime(runtime).expect("preset"),
        workload: Workload::new(WorkloadSizes {
            gpus,
            seq_len: 2048,
            global_batch: 64,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom: 0.05,
    }
}

fn parse(
    fix: &[&str],
    min: &[&str],
    max: &[&str],
    forbid: &[&str],
) -> Result<Constraints, PlannerError> {
    let texts = |list: &[&str]| list.iter().map(|t| (*t).to_owned()).collect::<Vec<_>>();
    Constraints::parse(&texts(fix), &texts(min), &texts(max), &texts(forbid))
}

fn refusal(scenario: &Scenario, constraints: Result<Constraints, PlannerError>) -> String {
    let counts = [scenario.workload.gpus];
    let checked = constraints.and_then(|c| legal_values::check(scenario, &counts, &c));
    checked.expect_err("refused").to_string()
}

/// What is asked, and what the refusal names: the legal values and the nearest of them.
#[test]
fn values_that_nothing_has_are_refused_with_those_there_are() {
    let megatron = scenario("llama3-8b", 8, "megatron-core");
    let cases: [(&[&str], &str, &str); 14] = [
        (&["zero=9"], "`zero` from 0, 1", "did you mean `1`?"),
        (&["zero=3"], "`zero` from 0, 1", "did you mean `1`?"),
        (
            &["schedule=zbv"],
            "`schedule` from 1f1b, interleaved",
            "other runtimes have `zb-v`",
        ),
        (
            &["schedule=zerobubble"],
            "`schedule` from 1f1b, interleaved",
            "",
        ),
        (&["tp=3"], "`tp` from 1, 2, 4, 8", "did you mean"),
        (&["pp=5"], "`pp` from 1, 2, 4, 8", "did you mean `4`?"),
        (&["ep=2"], "`ep` from 1", "did you mean `1`?"),
        (&["sp=yes"], "`sp` from on, off", ""),
        (
            &["recompute=selective:mpl"],
            "`recompute` from",
            "did you mean `selective:mlp`?",
        ),
        (&["grad_dtype=fp16"], "`grad_dtype` from fp32, bf16", ""),
        (&["cp_kind=rings"], "`cp_kind` from", "did you mean `ring`?"),
        (
            &["recompute=ful"],
            "`recompute` from",
            "did you mean `full`?",
        ),
        (&["dp=16"], "`dp` from 1, 2, 4, 8", "did you mean `8`?"),
        (&["zero=1|2"], "zero=2", "`zero` from 0, 1"),
    ];
    for (fix, values, near) in cases {
        let message = refusal(&megatron, parse(fix, &[], &[], &[]));
        assert!(
            message.contains(values) && message.contains(near),
            "{fix:?}: {message}"
        );
    }
    // How far ahead each runtime can be told to gather parameters.
    for (runtime, fix, values, near) in [
        (
            "fsdp2",
            "prefetch=5",
            "`prefetch` from 1, 2",
            "did you mean `2`?",
        ),
        (
            "fsdp2",
            "prefetch=0",
            "`prefetch` from 1, 2",
            "did you mean `1`?",
        ),
        ("deepspeed", "prefetch=3", "`prefetch` from 0, 1, 2", ""),
        ("torchtitan", "prefetch=2", "`prefetch` from 1", ""),
        ("deepspeed", "prefetch=next", "`next` is not a number", ""),
    ] {
        let s = scenario("llama3-8b", 8, runtime);
        let message = refusal(&s, parse(&[fix], &[], &[], &[]));
        assert!(
            message.contains(values) && message.contains(near),
            "{runtime} {fix}: {message}"
        );
    }
    let message = refusal(&megatron, parse(&[], &["pp=64"], &[], &[]));
    assert!(
        message.contains("pp at least 64") && message.contains("did you mean `8`?"),
        "{message}"
    );
}

#[test]
fn constraints_that_contradict_each_other_are_refused() {
    let s = scenario("llama3-8b", 8, "megatron-core");
    type Texts<'a> = &'a [&'a str];
    let cases: [(Texts<'_>, Texts<'_>, Texts<'_>, Texts<'_>, &str); 8] = [
        (
            &[],
            &["tp=4"],
            &["tp=2"],
            &[],
            "lower bound is above the upper",
        ),
        (&["tp=8"], &[], &[], &["tp"], "contradicts"),
        (
            &["tp=8"],
            &[],
            &["tp=4"],
            &[],
            "contradicts that `tp` is at most 4",
        ),
        (
            &["tp=2"],
            &["tp=4"],
            &[],
            &[],
            "contradicts that `tp` is at least 4",
        ),
        (&["tp=2", "tp=4"], &[], &[], &[], "fixed twice"),
        (&["tp=2,tp=4"], &[], &[], &[], "fixed twice"),
        (&[], &[], &["tp=4", "tp=2"], &[], "bounded twice"),
        (&["tp"], &[], &[], &[], "expected key=value"),
    ];
    for (fix, min, max, forbid, expected) in cases {
        let message = refusal(&s, parse(fix, min, max, forbid));
        assert!(message.contains(expected), "{fix:?}: {message}");
    }
    let narrowed = parse(&["tp=2|8"], &[], &["tp=4"], &[]).expect("read");
    legal_values::check(&s, &[8], &narrowed).expect("2 is left");
}

#[test]
fn a_file_of_constraints_is_held_to_the_same() {
    let read = |yaml: &str| -> Constraints { catalog::text::yaml(yaml, "c.yaml").expect("read") };
    let s = scenario("llama3-8b", 8, "megatron-core");
    for yaml in [
        "fix: {zero: ['9']}",
        "uneven: 18446744073709551615",
        "min: {tp: 4}\nmax: {tp: 2}",
        "max: {tp: 0}",
        "fix: {tp: []}",
        "fix: {tpp: ['8']}",
    ] {
        assert!(
            legal_values::check(&s, &[8], &read(yaml)).is_err(),
            "{yaml}"
        );
    }
}

#[test]
fn a_file_says_what_flags_say() {
    let read = |yaml: &str| catalog::text::yaml::<Constraints>(yaml, "c.yaml");
    let flags = |fix: &[&str], forbid: &[&str]| {
        let texts = |given: &[&str]| {
            given
                .iter()
                .map(|text| (*text).to_owned())
                .collect::<Vec<_>>()
        };
        Constraints::parse(&texts(fix), &[], &[], &texts(forbid)).expect("constraints")
    };
    for (yaml, same) in [
        ("fix: {tp: 8}", flags(&["tp=8"], &[])),
        ("fix: {tp: [1, 8]}", flags(&["tp=1|8"], &[])),
        (
            "fix: {recompute: none, zero: 1}",
            flags(&["recompute=none,zero=1"], &[]),
        ),
        ("fix: {sp: true}", flags(&["sp=on"], &[])),
        ("fix: {zero: ['1', 3]}", flags(&["zero=1|3"], &[])),
        ("forbid: cp", flags(&[], &["cp"])),
        ("forbid: [cp, pp]", flags(&[], &["cp,pp"])),
    ] {
        assert_eq!(read(yaml).expect(yaml), same, "{yaml}");
    }
    for (yaml, says) in [
        (
            "fix: {tp: {a: 1}}",
            "expected a value, such as 8 or none, or a list of values",
        ),
        ("forbit: [cp]", "unknown field `forbit`"),
    ] {
        let error = read(yaml).expect_err(yaml).to_string();
        assert!(error.contains(says), "{yaml}: {error}");
    }
}

/// Values outside the usual space are tried if a constraint names them.
#[test]
fn what_is_fixed_is_tried() {
    let s = scenario("llama3-8b", 8, "megatron-core");
    for fix in ["mbs=32", "recompute=layers:3", "vpp=16,pp=2"] {
        let constraints = parse(&[fix], &[], &[], &[]).expect("read");
        legal_values::check(&s, &[8], &constraints).expect(fix);
    }
    let space = SearchSpace::new(&s, &parse(&["mbs=32"], &[], &[], &[]).expect("read"));
    assert!(!space.is_empty());
    assert!(
        space
            .layouts()
            .iter()
            .all(|layout| layout.micro_batch == 32)
    );
}

/// Where a runtime can do without sequence parallelism but hardly anyone does, a search does so if it is asked to.
#[test]
fn sequence_parallelism_is_off_where_it_is_asked_for() {
    for (runtime, fix, wanted) in [
        ("megatron-core", "tp=2", &[true][..]),
        ("megatron-core", "tp=2,sp=on", &[true]),
        ("megatron-core", "tp=2,sp=off", &[false]),
        ("megatron-core", "tp=2,sp=on|off", &[false, true]),
        ("torchtitan-2026", "tp=2,sp=off", &[false]),
        ("torchtitan", "tp=2,sp=off", &[]),
        ("megatron-2022", "tp=2", &[false, true]),
    ] {
        let s = scenario("llama3-8b", 8, runtime);
        let space = SearchSpace::new(&s, &parse(&[fix], &[], &[], &[]).expect("read"));
        let layouts = space.layouts().iter();
        let found: BTreeSet<bool> = layouts.map(|of| of.sequence_parallel).collect();
        assert_eq!(found, wanted.iter().copied().collect(), "{runtime}, {fix}");
    }
}

/// Three nodes of eight GPUs allow three groups of replicas, each sharded over a node, and rings of three.
#[test]
fn sizes_that_are_no_powers_of_two_are_tried() {
    for (runtime, key) in [("fsdp2", "dp_replicate"), ("torchtitan", "cp")] {
        let mut s = scenario("llama3-8b", 24, runtime);
        let sizes = WorkloadSizes {
            gpus: 24,
            seq_len: 6144,
            global_batch: 24,
            precision: Precision::Bf16,
        };
        s.workload = Workload::new(sizes).expect("a workload");
        let space = SearchSpace::new(&s, &Constraints::default());
        let mut layouts = space.layouts().iter();
        let three = |d: &plans::Strategy| match key {
            "cp" => d.cp == 3,
            _ => d.dp_replicate == 3,
        };
        let tried = layouts.any(|of| space.strategies(of).iter().any(three));
        assert!(tried, "{runtime}, {key}");
    }
}

/// A fixed decision is tried only at ZeRO levels at which the runtime supports it.
#[test]
fn what_is_fixed_is_tried_where_it_runs() {
    for (runtime, fix, levels) in [
        ("deepspeed", "grad_dtype=fp32,mbs=1", &[2, 3][..]),
        ("deepspeed", "overlap=none,mbs=1", &[0, 1, 2]),
        ("deepspeed", "overlap=param,mbs=1", &[0, 1, 2, 3]),
        ("paddle", "pp=1,mbs=1", &[0, 1, 2, 3]),
        ("paddle", "pp=2,mbs=1", &[0, 1]),
        ("colossalai", "pp=1,mbs=1", &[0, 1, 2]),
        ("colossalai", "pp=2,mbs=1", &[0, 1]),
        ("fsdp2", "overlap=param+pp,mbs=1", &[]),
        ("fsdp2", "overlap=grad+pp,mbs=1", &[0]),
        ("megatron-core", "overlap=none,mbs=1,pp=1,tp=1", &[0, 1]),
    ] {
        let s = scenario("llama3-8b", 8, runtime);
        let constraints = parse(&[fix], &[], &[], &[]).expect("read");
        let space = SearchSpace::new(&s, &constraints);
        let layouts = space.layouts().iter();
        let all: Vec<_> = layouts.flat_map(|of| space.strategies(of)).collect();
        assert_eq!(all.len() as u64, space.len(), "{runtime}, {fix}");
        let found: BTreeSet<u8> = all.iter().map(|d| u8::from(d.zero)).collect();
        assert_eq!(found, levels.iter().copied().collect(), "{runtime}, {fix}");
        for d in all {
            let allowed = allowed_by(&d, &s.model, &s.runtime, s.workload.precision);
            allowed.expect(fix);
        }
    }
}

/// Experts are split over the numbers of ranks that the runtime has, and DeepEP is tried only where the runtime carries tokens with it.
#[test]
fn experts_are_split_as_the_runtime_can() {
    let split = |ep: &str, etp| (ep.to_owned(), etp);
    let both = [
        split("alone", 1),
        split("alone", 2),
        split("spread", 1),
        split("spread", 2),
    ];
    for (runtime, wanted) in [
        ("megatron-core", both.to_vec()),
        ("torchtitan", both[1..].to_vec()),
        ("torchtitan-2026", both[1..3].to_vec()),
    ] {
        let s = scenario("mixtral-8x7b", 8, runtime);
        let constraints = parse(&["tp=2,pp=1,cp=1,mbs=1,recompute=full"], &[], &[], &[]);
        let space = SearchSpace::new(&s, &constraints.expect("read"));
        let layouts = space.layouts().iter();
        let all: Vec<_> = layouts.flat_map(|of| space.strategies(of)).collect();
        let of = |d: &plans::Strategy| split(if d.ep == 1 { "alone" } else { "spread" }, d.etp);
        let found: BTreeSet<_> = all.iter().map(of).collect();
        assert_eq!(found, wanted.into_iter().collect(), "{runtime}");
        for d in all {
            let allowed = allowed_by(&d, &s.model, &s.runtime, s.workload.precision);
            allowed.expect(runtime);
        }
    }
}

/// PyTorch's 1F1B needs a micro-batch for every pipeline rank, Megatron-LM's does not: 64 sequences on 2 replicas are 2 micro-batches
/// of 16, or 4 of 8, on 4 ranks.
#[test]
fn schedules_are_tried_with_the_micro_batches_that_they_need() {
    for (runtime, micro_batch, tried) in [
        ("torchtitan", 16, false),
        ("torchtitan", 8, true),
        ("megatron-core", 16, true),
    ] {
        let s = scenario("llama3-8b", 8, runtime);
        let fix = format!("tp=1,pp=4,cp=1,mbs={micro_batch},recompute=full");
        let space = SearchSpace::new(&s, &parse(&[&fix], &[], &[], &[]).expect("read"));
        let mut layouts = space.layouts().iter();
        let in_turn = |d: &plans::Strategy| d.schedule == catalog::ScheduleKind::OneFOneB;
        let found = layouts.any(|of| space.strategies(of).iter().any(in_turn));
        assert_eq!(found, tried, "{runtime}, {fix}");
    }
}

/// A search tries every dispatcher: HybridEP too, whose kernels order rows beside another micro-batch, where DeepEP's leave that to
/// the experts.
#[test]
fn no_dispatcher_that_is_asked_for_beats_the_search() {
    let mut s = scenario("qwen3-30b-a3b", 32, "megatron-core");
    let sizes = WorkloadSizes {
        gpus: 32,
        seq_len: 8192,
        global_batch: 512,
        precision: Precision::Bf16,
    };
    s.workload = Workload::new(sizes).expect("a workload");
    let costs = CostModel::new(s.clone()).expect("priced");
    let best = |more: &str| {
        let states = "zero=1,grad_dtype=bf16,optim_states=bf16_moments,offload=none,graphs=none";
        let fix = format!("tp=1,pp=1,cp=1,mbs=1,ep=16,recompute=none,{states}{more}");
        let space = SearchSpace::new(&s, &parse(&[&fix], &[], &[], &[]).expect("read"));
        let found = search(&costs, &space, &SearchOptions::default(), &|_| {}).expect("searched");
        let best = found.top.into_iter().next().expect("a plan");
        (best.strategy.dispatcher, best.prediction.step_time.0)
    };
    let (dispatcher, free) = best("");
    assert_eq!(dispatcher, Some(catalog::Dispatcher::HybridEp));
    for name in ["all_to_all", "all_gather", "deepep", "hybridep"] {
        let (_, asked) = best(&format!(",dispatcher={name}"));
        assert!(free <= asked, "{name}: {free} {asked}");
        assert_eq!(free == asked, name == "hybridep", "{name}: {free} {asked}");
    }
}

fn some_constraint() -> impl Strategy<Value = Constraints> {
    let size = prop::sample::select(vec![1u64, 2, 4, 8]);
    let key = prop::sample::select(planner::constraints::DIMENSIONS.to_vec());
    let choice = prop::sample::select(vec![
        "zero=0",
        "zero=1",
        "zero=3",
        "schedule=1f1b",
        "schedule=interleaved",
        "schedule=zb-v",
        "sp=on",
        "sp=off",
        "cp_kind=ring",
        "cp_kind=all_gather",
        "recompute=full",
        "recompute=none",
        "recompute=layers",
        "recompute=selective|full",
    ]);
    (
        prop::collection::vec((key.clone(), size.clone()), 0..2),
        prop::option::of((key.clone(), size.clone())),
        prop::option::of((key, size)),
        prop::collection::vec(choice, 0..3),
    )
        .prop_map(|(fix, min, max, choices)| {
            let mut constraints = Constraints::default();
            for (key, size) in fix {
                constraints
                    .fix
                    .insert(key.to_owned(), vec![size.to_string()]);
            }
            for text in choices {
                // A second value of the same choice is refused: the first stands.
                let _ = constraints.fix(text);
            }
            constraints
                .min
                .extend(min.map(|(key, size)| (key.to_owned(), size)));
            constraints
                .max
                .extend(max.map(|(key, size)| (key.to_owned(), size)));
            constraints
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Every plan that a search returns satisfies every constraint it was given.
    #[test]
    fn every_plan_found_satisfies_every_constraint(
        constraints in some_constraint(),
        model in prop::sample::select(vec!["gpt2", "llama3-8b", "mixtral-8x7b"]),
        gpus in prop::sample::select(vec![1u64, 4, 8, 16]),
        runtime in prop::sample::select(vec!["megatron-core", "torchtitan", "deepspeed"]),
    ) {
        let s = scenario(model, gpus, runtime);
        if legal_values::check(&s, &[gpus], &constraints).is_ok() {
            let space = SearchSpace::new(&s, &constraints);
            prop_assert_eq!(SearchSpace::has_any(&s, &constraints), !space.is_empty());
            let (runtime, precision) = (s.runtime.clone(), s.workload.precision);
            let costs = CostModel::new(s).expect("priced");
            let found = search(&costs, &space, &SearchOptions::default(), &|_| {}).expect("searched");
            for candidate in found.top {
                let allowed = constraints.allow(&candidate.strategy, &runtime, precision);
                prop_assert!(allowed, "{}", candidate.strategy);
            }
        }
    }
}

/// Tensor-parallel messages overlap with matrix products only where GPUs can reach each other's
/// memory.
#[test]
fn overlap_of_tensor_parallel_messages_needs_peers() {
    for (cluster, has) in [("l40s-node", true), ("rtx-4090-node", false)] {
        let mut s = scenario("llama3-8b", 8, "megatron-core");
        s.cluster = catalog::load::cluster(cluster).expect("preset");
        let asked = parse(&["tp=2", "overlap=grad+param+tp+pp"], &[], &[], &[]);
        let found = SearchSpace::has_any(&s, &asked.expect("constraints"));
        assert_eq!(found, has, "{cluster}");

        let text = "tp=2,zero=1,sp,overlap=grad+param+tp";
        let strategy = plans::grammar::parse(text, &s.model, &s.workload, &s.runtime);
        let costs = CostModel::new(s).expect("priced");
        let predicted = costs.predict(&strategy.expect("legal"));
        let refusal = predicted.err().map(|error| error.to_string());
        assert_eq!(refusal.is_none(), has, "{cluster}: {refusal:?}");
        let says = refusal.is_none_or(|text| text.contains("expected overlap=grad+param"));
        assert!(says, "{cluster}");
    }
}
