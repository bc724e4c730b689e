//! Reads and writes plan files.

use std::path::Path;

use answers::InputsJson;
use answers::inputs::DEFAULT_HEADROOM;
use catalog::{SpecError, Workload, WorkloadSizes};
use costmodel::{CostModel, Scenario};
use plans::json::StrategyJson;
use plans::{PlanFile, Strategy};

use crate::error::CliError;

/// A plan that was read from a file.
pub(crate) struct Loaded {
    pub(crate) file: PlanFile,
    /// As the plan says it; that of `costs` may have its model's projections fused.
    pub(crate) scenario: Scenario,
    pub(crate) costs: CostModel,
    pub(crate) strategy: Strategy,
    pub(crate) inputs: InputsJson,
}

/// Resolves a path in a plan relative to the plan; a name without a file beside the plan stays as it is.
pub(crate) fn beside(plan: &Path, name: &str) -> String {
    let near = plan.parent().map(|folder| folder.join(name));
    match near.filter(|p| p.exists()) {
        Some(near) => near.display().to_string(),
        None => name.to_owned(),
    }
}

/// Adds to an error, when a file cannot be read as a plan, what a plan file is.
fn not_a_plan(error: SpecError) -> CliError {
    let mistake = error.mistake();
    CliError::Input(match mistake.expected {
        Some(_) => mistake,
        None => mistake
            .expected("a plan file, as `search`, `estimate -o` and `import -o` write")
            .example("vescale-plan search --model llama3-8b --gpus 8 -o best.plan.yaml"),
    })
}

/// Reads a plan and rebuilds its scenario.
pub(crate) fn load(path: &Path) -> Result<Loaded, CliError> {
    let shown = path.display().to_string();
    let text = catalog::text::read(path).map_err(not_a_plan)?;
    let file = PlanFile::from_yaml(&text, &shown).map_err(not_a_plan)?;
    let model = match &file.model_config {
        Some(config) => catalog::load::model_defined(config, &file.model, &shown)?,
        None => catalog::load::model(&beside(path, &file.model))?,
    };
    let model = model.with_adapters(file.adapters)?;
    let cluster = catalog::load::cluster(&beside(path, &file.cluster))?;
    let runtime = catalog::load::runtime(&file.runtime)?;
    let w = &file.workload;
    let wrong = |field: &str, message: String| {
        CliError::Spec(catalog::SpecError::Field {
            path: shown.clone(),
            field: field.to_owned(),
            message,
        })
    };
    let sizes = WorkloadSizes {
        gpus: w.gpus,
        seq_len: w.seq_len,
        global_batch: w.global_batch,
        precision: w.precision,
    };
    let workload = Workload::new(sizes).map_err(|e| wrong("workload", e.to_string()))?;
    let devices = cluster.check_devices(w.gpus);
    devices.map_err(|e| wrong("workload.gpus", format!("{}: {e}", w.gpus)))?;
    let parameters = models::parameter_count(&model).map_err(|e| CliError::Usage(e.to_string()))?;
    let strategy = plans::grammar::parse(&file.strategy_text, &model, &workload, &runtime)?;
    if StrategyJson::new(strategy.decisions(), w.precision) != file.strategy {
        let message = "says something else than `strategy`".to_owned();
        return Err(wrong("strategy_text", message));
    }
    let scenario = Scenario {
        model,
        cluster,
        runtime,
        workload,
        headroom: file.headroom.unwrap_or(DEFAULT_HEADROOM),
    };
    Ok(Loaded {
        file,
        inputs: InputsJson::of(&scenario, parameters),
        costs: CostModel::new(scenario.clone())?,
        scenario,
        strategy,
    })
}
