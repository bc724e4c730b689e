//! Hybrid models are searched like others: plans split their recurrences over tensor-parallel ranks and put layers of
//! unequal cost into stages; a split sequence is refused by name.

use catalog::{Precision, Workload, WorkloadSizes};
use costmodel::{CostModel, Scenario};
use planner::{Constraints, SearchOptions, SearchSpace, legal_values, search};

fn scenario(model: &str, gpus: u64) -> Scenario {
    Scenario {
        model: catalog::load::model(model).expect("preset"),
        cluster: catalog::load::cluster("dgx-h100").expect("preset"),
        runtime: catalog::load::runtime("megatron-core").expect("preset"),
        workload: Workload::new(WorkloadSizes {
            gpus,
            seq_len: 4096,
            global_batch: 64,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom: 0.05,
    }
}

fn fixed(values: &[&str]) -> Constraints {
    let fix: Vec<String> = values.iter().map(|&value| value.to_owned()).collect();
    Constraints::parse(&fix, &[], &[], &[]).expect("constraints")
}

#[test]
fn plans_split_heads_and_stages() {
    for (model, gpus, values) in [
        ("nemotron-h-8b", 16, ["tp=4", "pp=4"]),
        ("nemotron-3-nano-30b-a3b", 16, ["tp=2", "pp=2"]),
        ("qwen3-next-80b-a3b", 32, ["tp=2", "pp=4"]),
    ] {
        let scenario = scenario(model, gpus);
        let constraints = fixed(&values);
        let space = SearchSpace::new(&scenario, &constraints);
        let layers = scenario.model.layers;
        let costs = CostModel::new(scenario).expect("priced");
        let options = SearchOptions::default();
        let found = search(&costs, &space, &options, &|_| {}).expect("searched");
        let best = &found.top.first().expect("a plan").strategy;
        let stages = &best.stages.0;
        assert!(best.tp > 1 && best.pp > 1, "{model}: {best}");
        assert_eq!(stages.iter().sum::<u64>(), layers, "{model}: {best}");
        assert_eq!(stages.len() as u64, best.pp * best.vpp, "{model}: {best}");
    }
}

#[test]
fn a_split_sequence_is_refused_by_name() {
    let scenario = scenario("nemotron-h-8b", 8);
    let refused = legal_values::check(&scenario, &[8], &fixed(&["cp=2"])).expect_err("refused");
    assert!(refused.to_string().contains("`cp`"), "{refused}");
    for (strategy, rule) in [
        (
            "tp1 cp2 dp4 zero1 mbs1",
            "which carry a state along the sequence, is not modelled",
        ),
        ("tp16 dp1 zero1 mbs1", "not divisible"),
    ] {
        let gpus = if strategy.starts_with("tp16") { 16 } else { 8 };
        let scenario = self::scenario("nemotron-h-8b", gpus);
        let (model, workload, runtime) = (&scenario.model, &scenario.workload, &scenario.runtime);
        let error = plans::grammar::parse(strategy, model, workload, runtime).expect_err(strategy);
        assert!(error.to_string().contains(rule), "{strategy}: {error}");
    }
}
