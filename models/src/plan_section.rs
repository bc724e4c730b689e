//! The sharding section of a plan file: the sharding plan of a strategy as text.

use std::collections::BTreeMap;

use catalog::model::ModelConfig;
use catalog::{Axis, LayerClass, Workload};
use dtensor::{Entry, Placement};
use plans::Strategy;
use plans::plan_file::ShardingFile;

use crate::{BlockClass, BlockLayout, ModelError, sharding_plan, trace_block};

/// The sharding plan of a strategy as text, and the parameters that it replicates.
///
/// # Errors
/// When the model cannot be traced under the strategy.
pub fn sharding_section(
    model: &ModelConfig,
    strategy: &Strategy,
    workload: &Workload,
) -> Result<ShardingFile, ModelError> {
    let layout = BlockLayout::of(strategy, workload.seq_len, workload.precision);
    let plan = sharding_plan(model, &layout)?;
    let mut replicated: Vec<String> = Vec::new();
    let mut layers: Vec<LayerClass> = Vec::new();
    for class in (0..model.layers)
        .rev()
        .map(|layer| model.layer_class(layer))
    {
        if !layers.contains(&class) {
            layers.push(class);
        }
    }
    let layers = layers.into_iter().map(BlockClass::Layer);
    let before = [BlockClass::Embedding].into_iter();
    for class in before.chain(layers).chain([BlockClass::Head]) {
        for p in &trace_block(model, class, &layout)?.parameters {
            let whole = p.global_elements == p.local_elements && strategy.tp * strategy.ep > 1;
            if whole && !p.expert && !replicated.contains(&p.name) {
                replicated.push(p.name.clone());
            }
        }
    }
    Ok(ShardingFile {
        parameter: list(&plan.parameter),
        forward: list(&plan.forward),
        replicated,
    })
}

fn list(entries: &[Entry]) -> BTreeMap<String, Vec<String>> {
    let text = |placements: &[(Axis, Placement)]| {
        placements
            .iter()
            .map(|(axis, p)| format!("{}: {p}", axis.name()))
            .collect()
    };
    entries
        .iter()
        .map(|e| (e.pattern.clone(), text(&e.placements)))
        .collect()
}
