//! Plan files, signed again after a change, so that readers get beyond the checksum.

use costmodel::Scenario;
use interop::export::Dialect;
use plans::PlanFile;
use plans::json::StrategyJson;

use super::clusters::refused;
use crate::mutate;
use crate::outcome::Outcome;
use crate::promises;
use crate::rng::{Rng, hash};
use crate::scene;
use crate::target::{Depth, Pool, Target};
use crate::tree::{self, Format};

/// A plan whose model is one of the presets, so that files are not looked for.
fn with_preset(text: &[u8], model: &str) -> Vec<u8> {
    let Ok(file) = serde_yaml_plan(&String::from_utf8_lossy(text)) else {
        return text.to_vec();
    };
    let file = PlanFile {
        model: model.to_owned(),
        ..file
    }
    .with_id();
    file.to_yaml().unwrap_or_default().into_bytes()
}

fn serde_yaml_plan(text: &str) -> Result<PlanFile, catalog::SpecError> {
    catalog::text::yaml(text, "input")
}

/// Plan files.
pub(super) fn plan_files() -> Target {
    Target {
        use_every: 16,
        ..Target::of_text("plan-files", seeds, changed, read)
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let examples = scene::files("examples", ".yaml");
    let mut seeds: Vec<Vec<u8>> = Vec::new();
    for (at, example) in examples.iter().enumerate() {
        seeds.push(with_preset(
            example,
            scene::MODELS[at % scene::MODELS.len()],
        ));
    }
    for text in [
        "",
        "tp=2,zero=1",
        "pp=2",
        "cp=2,zero=1",
        "pp=2,vpp=2,zero=1",
    ] {
        seeds.extend(written(text));
    }
    seeds
}

fn changed(pool: &Pool, rng: &mut Rng) -> Vec<u8> {
    let parsed = std::str::from_utf8(pool.pick(rng))
        .ok()
        .and_then(|t| Format::Yaml.parse(t));
    let Some(mut plan) = parsed.filter(|_| rng.percent(75)) else {
        return mutate::text(pool, rng);
    };
    match rng.below(3) {
        0 => tree::change(&mut plan["workload"], pool, rng),
        1 => {
            let text = plan["strategy_text"].as_str().unwrap_or_default();
            plan["strategy_text"] = mutate::one_number(text, rng).into();
        }
        _ => tree::change(&mut plan, pool, rng),
    }
    let text = Format::Yaml.print(&plan);
    // Without a right id nothing behind it would be reached.
    match serde_yaml_plan(&text).map(PlanFile::with_id) {
        Ok(file) if rng.percent(90) => file.to_yaml().unwrap_or(text).into_bytes(),
        _ => text.into_bytes(),
    }
}

fn read(text: &str, depth: Depth) -> Outcome {
    let file = match PlanFile::from_yaml(text, "input") {
        Ok(file) => file,
        Err(error) => return refused(text, &error),
    };
    let (scenario, strategy) = match loaded(&file) {
        Ok(loaded) => loaded,
        Err(error) => return Outcome::refused(&error),
    };
    let mut outcome =
        Outcome::accepted(plans::grammar::short(&strategy).replace(char::is_numeric, "0"));
    promises::of_strategy(&scenario, &strategy, &mut outcome);
    let again = file
        .to_yaml()
        .and_then(|text| PlanFile::from_yaml(&text, "written"));
    outcome.expect(again.as_ref() == Ok(&file), || {
        "written, it reads back unlike".to_owned()
    });
    if depth == Depth::Use {
        promises::predicted(&scenario, &strategy, &mut outcome);
        let dialect = Dialect::ALL[(hash(text.as_bytes()) % Dialect::ALL.len() as u64) as usize];
        promises::round_trip(&scenario, &strategy, dialect, &mut outcome);
    }
    outcome
}

/// A plan back to a scenario and its strategy, as every command that reads a plan does.
fn loaded(file: &PlanFile) -> Result<(Scenario, plans::Strategy), String> {
    let w = &file.workload;
    let model = match &file.model_config {
        Some(config) => {
            catalog::load::model_defined(config, &file.model, "plan").map_err(|e| e.to_string())?
        }
        None => scene::model(&file.model)?,
    };
    let runtime = scene::runtime(&file.runtime)?;
    let model = model.trained_under(&runtime);
    let scenario = Scenario {
        model: (model.with_adapters(file.adapters)).map_err(|e| e.to_string())?,
        cluster: scene::cluster(&file.cluster)?,
        runtime,
        workload: scene::workload(w.gpus, w.seq_len, w.global_batch, w.precision)?,
        headroom: 0.05,
    };
    scenario.cluster.check_devices(w.gpus)?;
    let Scenario {
        model,
        runtime,
        workload,
        ..
    } = &scenario;
    let strategy = plans::grammar::parse(&file.strategy_text, model, workload, runtime);
    let strategy = strategy.map_err(|e| e.to_string())?;
    if StrategyJson::new(strategy.decisions(), w.precision) != file.strategy {
        return Err("field `strategy_text`: says something else than `strategy`".to_owned());
    }
    Ok((scenario, strategy))
}

/// A plan of a strategy of GPT-2 on one node.
fn written(text: &str) -> Option<Vec<u8>> {
    let scenario = scene::Scene::default().scenario().ok()?;
    let Scenario {
        model,
        runtime,
        workload,
        ..
    } = &scenario;
    let strategy = plans::grammar::parse(text, model, workload, runtime).ok()?;
    let sharding = models::sharding_section(model, &strategy, workload).ok()?;
    let costs = costmodel::CostModel::new(scenario.clone()).ok()?;
    let planned = plans::plan_file::PlannedFor {
        model: &model.name,
        model_config: model.definition(),
        adapters: model.adapters,
        cluster: &scenario.cluster.name,
        runtime: &runtime.name,
        workload,
        headroom: scenario.headroom,
    };
    let prediction = costs.predict(&strategy).ok()?;
    let file = PlanFile::of(planned, &strategy, sharding, &prediction);
    Some(file.to_yaml().ok()?.into_bytes())
}
