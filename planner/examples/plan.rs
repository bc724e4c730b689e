//! Searches the best plan of a model on a cluster, and says what was found:
//! `cargo run --release -p vescale-planner --example plan -- llama3-70b dgx-h100 512`.

use catalog::{Precision, Workload, WorkloadSizes};
use costmodel::{CostModel, Scenario};
use planner::{Constraints, SearchOptions, SearchSpace, search};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let mut next = |usual: &str| args.next().unwrap_or_else(|| usual.to_owned());
    let scenario = Scenario {
        model: catalog::load::model(&next("llama3-8b"))?,
        cluster: catalog::load::cluster(&next("dgx-h100"))?,
        runtime: catalog::load::runtime("megatron-core")?,
        workload: Workload::new(WorkloadSizes {
            gpus: next("8").parse()?,
            seq_len: 8192,
            global_batch: 512,
            precision: Precision::Bf16,
        })?,
        headroom: 0.05,
    };
    let costs = CostModel::new(scenario.clone())?;
    let space = SearchSpace::new(&scenario, &Constraints::default());
    let found = search(&costs, &space, &SearchOptions::default(), &|_| {})?;
    let mut out = std::io::stdout().lock();
    for candidate in &found.top {
        use std::io::Write;
        let strategy = plans::grammar::written(&candidate.strategy, &scenario.runtime);
        let prediction = &candidate.prediction;
        writeln!(
            out,
            "{}  {}  {strategy}",
            prediction.step_time, prediction.peak_memory
        )?;
    }
    Ok(())
}
