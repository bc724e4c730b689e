//! Every strategy that a search may meet has a price, for every model that the project knows, and holds at
//! least its share of the states.

use std::collections::BTreeMap;

use catalog::load::PresetInfo;
use catalog::{Precision, Workload};
use costmodel::{CostModel, Scenario};
use planner::{Constraints, SearchSpace};
use plans::Recompute;

#[test]
fn legal_strategies_of_every_model_are_priced() {
    for PresetInfo { name, .. } in catalog::load::model_names() {
        let scenario = Scenario {
            model: catalog::load::model(&name).expect("preset"),
            cluster: catalog::load::cluster("dgx-h200").expect("preset"),
            // Its space has those of the others in it.
            runtime: catalog::load::runtime("vescale-cuda").expect("preset"),
            workload: Workload::new(catalog::WorkloadSizes {
                gpus: 4,
                seq_len: 2048,
                global_batch: 4,
                precision: Precision::Bf16,
            })
            .expect("a workload"),
            headroom: 0.05,
        };
        let costs = CostModel::new(scenario.clone()).expect("priced");
        let space = SearchSpace::new(&scenario, &Constraints::default());
        // What an operator's price depends on: how its tensors are placed.
        let placed: BTreeMap<_, _> = space
            .layouts()
            .iter()
            .map(|layout| {
                let sizes = [layout.tp, layout.cp, layout.ep, layout.etp];
                let kind = layout.cp_kind.name();
                ((sizes, kind, layout.sequence_parallel), layout)
            })
            .collect();
        let states = costmodel::least_states(&scenario).expect("traced");
        for layout in placed.values() {
            let strategies = space.strategies(layout);
            let wanted = [Recompute::None, Recompute::Full];
            let of = |mode| strategies.iter().find(|s| s.recompute == mode);
            for strategy in wanted.into_iter().filter_map(of) {
                let floors = costs.floors(strategy, None, None);
                let floors = floors.unwrap_or_else(|e| panic!("{name}: {strategy}: {e}"));
                assert!(
                    floors.memory.0 >= states.0 / 4,
                    "{name}: {strategy}: {floors:?}"
                );
            }
        }
    }
}
