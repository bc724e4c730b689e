//! Scenarios and strategies for tests.

use catalog::{Workload, WorkloadSizes};
use plans::Strategy;

use crate::Scenario;

/// A model on a cluster under a runtime, each by the name of its preset, without headroom.
pub(crate) fn scenario([model, cluster, runtime]: [&str; 3], sizes: WorkloadSizes) -> Scenario {
    Scenario {
        model: catalog::load::model(model).expect("a preset"),
        cluster: catalog::load::cluster(cluster).expect("a preset"),
        runtime: catalog::load::runtime(runtime).expect("a preset"),
        workload: Workload::new(sizes).expect("a workload"),
        headroom: 0.0,
    }
}

/// A strategy as it is written.
pub(crate) fn strategy(scenario: &Scenario, text: &str) -> Strategy {
    let (model, workload) = (&scenario.model, &scenario.workload);
    plans::grammar::parse(text, model, workload, &scenario.runtime)
        .unwrap_or_else(|e| panic!("{text}: {e}"))
}
