//! The strategy in use against the best plan: single changes are what they say, none is missed, and the path ends at the
//! best.

use std::collections::BTreeSet;

use catalog::model::ModelConfig;
use catalog::{Mistake, Precision, Workload, WorkloadSizes};
use costmodel::{CostModel, Scenario};
use planner::{Constraints, PlannerError, SearchOptions, SearchSpace, present, search};
use plans::{Decisions, Present, Strategy};

fn scenario(model: &str, gpus: u64, runtime: &str) -> Scenario {
    let sizes = WorkloadSizes {
        gpus,
        seq_len: 4096,
        global_batch: 96,
        precision: Precision::Bf16,
    };
    Scenario {
        model: catalog::load::model(model).expect("preset"),
        cluster: catalog::load::cluster("dgx-h100").expect("preset"),
        runtime: catalog::load::runtime(runtime).expect("preset"),
        workload: Workload::new(sizes).expect("a workload"),
        headroom: 0.05,
    }
}

fn parse(s: &Scenario, text: &str) -> Strategy {
    plans::grammar::parse(text, &s.model, &s.workload, &s.runtime).expect(text)
}

/// Model, GPUs, runtime and the strategy in use; some are outside of what a search tries by itself.
const CASES: [(&str, u64, &str, &str); 9] = [
    ("llama3-8b", 16, "megatron-core", "tp8 dp2 recompute=full"),
    ("llama3-8b", 16, "megatron-core", "tp16 mbs3 overlap=none"),
    ("llama3-8b", 16, "torchtitan", "tp2 pp2 zero3 stages=15/17"),
    ("llama3-8b", 16, "deepspeed", "zero3 mbs1 recompute=full"),
    (
        "llama3-8b",
        32,
        "megatron-core",
        "tp2 pp4 vpp4 mbs1 recompute=layers:1",
    ),
    (
        "mixtral-8x7b",
        32,
        "megatron-core",
        "tp4 ep2 pp4 recompute=full",
    ),
    (
        "llama2-13b",
        32,
        "megatron-core",
        "tp2 cp2 pp2 zero0 recompute=full",
    ),
    ("gpt2-xl", 8, "fsdp2", "dp8 zero3"),
    ("gpt2-xl", 8, "fsdp2", "dp8 zero3 prefetch=2"),
];

fn compared(s: &Scenario, constraints: &Constraints, now: &Strategy) -> (CostModel, Present) {
    let costs = CostModel::new(s.clone()).expect("priced");
    let options = SearchOptions::default();
    let space = SearchSpace::with_present(s, constraints, now);
    let found = search(&costs, &space, &options, &|_| {}).expect("searched");
    let best = found.top.first().map(|best| &best.strategy);
    let present = present::compare(&costs, constraints, &options, now, best);
    if let Some(best) = best {
        let path = &present.as_ref().expect("priced").path;
        let last = path.last().map_or(now, |step| &step.strategy);
        assert_eq!(
            last.canonical(&s.model),
            best.canonical(&s.model),
            "the path ends elsewhere"
        );
    }
    (costs, present.expect("priced"))
}

/// The decisions in which two strategies differ, found without the planner's own code.
fn differ(model: &ModelConfig, a: &Decisions, b: &Decisions) -> BTreeSet<&'static str> {
    let overlap = a.overlap != b.overlap;
    let (a, b) = (a.canonical(model), b.canonical(model));
    let states = |d: &Decisions| (d.zero, d.reshard_after_forward, d.dp_replicate);
    let all = [
        ("tp", a.tp != b.tp),
        ("pp", a.pp != b.pp),
        ("cp", a.cp != b.cp),
        ("dp", a.dp() != b.dp()),
        ("ep", a.ep != b.ep),
        ("etp", a.etp != b.etp),
        ("mbs", a.micro_batch != b.micro_batch),
        ("sp", a.sequence_parallel != b.sequence_parallel),
        ("cp_kind", a.cp_kind != b.cp_kind),
        ("schedule", (a.schedule, a.vpp) != (b.schedule, b.vpp)),
        ("stages", a.stages != b.stages),
        ("recompute", a.recompute != b.recompute),
        ("zero", states(&a) != states(&b)),
        ("grad_dtype", a.gradients != b.gradients),
        ("optim_states", a.optimizer_states != b.optimizer_states),
        ("offload", a.offload != b.offload),
        ("prefetch", a.prefetch != b.prefetch),
        ("offload_layers", a.offload_layers != b.offload_layers),
        ("order", a.axis_order != b.axis_order),
        ("overlap", overlap && a.overlap != b.overlap),
        ("dispatcher", a.dispatcher != b.dispatcher),
        ("graphs", a.graphs != b.graphs),
    ];
    all.into_iter()
        .filter_map(|(name, is)| is.then_some(name))
        .collect()
}

#[test]
fn changes_are_what_they_say() {
    for (model, gpus, runtime, text) in CASES {
        let s = scenario(model, gpus, runtime);
        let now = parse(&s, text);
        let (costs, present) = compared(&s, &Constraints::default(), &now);
        assert!(
            present.changes.len() > 4,
            "{text}: {}",
            present.changes.len()
        );
        for change in &present.changes {
            let d = &change.strategy;
            plans::support::allowed_by(d, &s.model, &s.runtime, s.workload.precision).expect(text);
            assert!(
                change
                    .decision
                    .split(" and ")
                    .all(|name| differ(&s.model, &now, d).contains(name)),
                "{text}: {} is `{}`",
                change.words,
                change.decision
            );
            let score = costs.score(d).expect("priced");
            assert_eq!(change.step_time, score.step_time);
            assert_eq!(change.peak_memory, score.peak_memory);
            assert_eq!(change.fits, score.peak_memory <= s.limit(planner::RISK));
        }
        let order = |c: &plans::Change| (!c.fits, c.step_time.0);
        assert!(
            present
                .changes
                .windows(2)
                .all(|pair| order(&pair[0]) <= order(&pair[1]))
        );
    }
}

/// Every strategy of the space that differs in one decision, and in nothing that has to follow, is among the changes.
#[test]
fn no_single_change_is_missed() {
    for (model, gpus, runtime, text) in CASES {
        let s = scenario(model, gpus, runtime);
        let now = parse(&s, text);
        let (_, present) = compared(&s, &Constraints::default(), &now);
        let space = SearchSpace::with_present(&s, &Constraints::default(), &now);
        let mut known = 0;
        for layout in space.layouts() {
            for strategy in space.strategies(layout) {
                let overlap = now.overlap;
                let d = Decisions {
                    overlap,
                    ..strategy.decisions().clone()
                };
                let differs: Vec<&str> = differ(&s.model, &now, &d).into_iter().collect();
                let alone = match differs[..] {
                    ["dp", axis] | [axis, "dp"] => axis == "tp" || axis == "cp",
                    ["cp", "tp"] => true,
                    [_] => true,
                    _ => false,
                };
                if alone {
                    known += 1;
                    let found = present
                        .changes
                        .iter()
                        .any(|c| c.strategy.canonical(&s.model) == d.canonical(&s.model));
                    assert!(found, "{text}: {differs:?} {}", plans::grammar::short(&d));
                }
            }
        }
        assert!(known > 2, "{text}: {known}");
    }
}

/// Each step of a path gives at least one decision its value in the best plan.
#[test]
fn paths_are_short() {
    for (model, gpus, runtime, text) in CASES {
        let s = scenario(model, gpus, runtime);
        let now = parse(&s, text);
        let (_, present) = compared(&s, &Constraints::default(), &now);
        let Some(best) = present.path.last().map(|step| step.strategy.clone()) else {
            continue;
        };
        assert!(
            present.path.len() <= differ(&s.model, &now, &best).len(),
            "{text}"
        );
    }
}

/// Model, GPUs, the strategy in use, and decisions that are kept.
const KEPT: [(&str, u64, &str, &[&str]); 2] = [
    (
        "llama3-8b",
        16,
        "tp8 dp2 mbs2 recompute=full overlap=none",
        &[
            "tp",
            "pp",
            "cp",
            "dp",
            "sp",
            "mbs",
            "zero",
            "recompute",
            "schedule",
            "grad_dtype",
            "optim_states",
            "overlap",
        ],
    ),
    (
        "mixtral-8x7b",
        32,
        "tp4 ep2 pp4 recompute=full",
        &["ep", "etp"],
    ),
];

#[test]
fn kept_decisions_stay() {
    let rows = KEPT.into_iter();
    for (s, now, kept) in rows.flat_map(|(model, gpus, text, keys)| {
        let s = scenario(model, gpus, "megatron-core");
        let now = parse(&s, text);
        keys.iter().map(move |key| (s.clone(), now.clone(), *key))
    }) {
        let mut constraints = Constraints::default();
        let keys = [kept.to_owned()];
        present::keep(&keys, &now, &mut constraints, &s).expect(kept);
        planner::legal_values::check(&s, &[s.workload.gpus], &constraints).expect(kept);
        let (_, present) = compared(&s, &constraints, &now);
        assert!(!present.changes.is_empty(), "{kept}");
        for change in present.changes.iter().chain(&present.path) {
            assert!(
                !differ(&s.model, &now, &change.strategy).contains(kept),
                "{kept}: {}",
                change.words
            );
        }
    }
}

#[test]
fn what_cannot_be_kept_is_refused() {
    let s = scenario("llama3-8b", 16, "megatron-core");
    let now = parse(&s, "tp8 dp2");
    let refused = |key: &str, fix: &str| -> Mistake {
        let mut constraints = Constraints::default();
        if !fix.is_empty() {
            constraints.fix(fix).expect("a constraint");
        }
        let keys = [key.to_owned()];
        let kept = present::keep(&keys, &now, &mut constraints, &s);
        match kept.expect_err(key) {
            PlannerError::Constraint(mistake) => mistake,
            other => panic!("{other}"),
        }
    };
    let unknown = refused("recomput", "");
    assert_eq!(unknown.nearest.as_deref(), Some("recompute"));
    assert_eq!(unknown.place.as_deref(), Some("--keep recomput"));
    assert_eq!(refused("overlaps", "").nearest.as_deref(), Some("overlap"));
    assert!(
        refused("tp", "tp=4")
            .what
            .contains("`tp` is 8 now, and --fix asks for 4")
    );
}

/// Without peer access between GPUs no change keeps the overlap of tensor-parallel messages, which does not run there: also not of a
/// strategy that says it and has no such messages.
#[test]
fn changes_run_on_the_cluster() {
    let mut s = scenario("llama3-8b", 32, "megatron-core");
    s.cluster = catalog::load::cluster("rtx-4090-node").expect("preset");
    let now = parse(&s, "tp1 overlap=grad+param+tp+pp");
    let (_, present) = compared(&s, &Constraints::default(), &now);
    let mut splits = (present.changes.iter()).filter(|change| change.strategy.tp > 1);
    assert!(splits.clone().count() > 0);
    assert!(splits.all(|change| !change.strategy.overlap.tensor_parallel));
}
