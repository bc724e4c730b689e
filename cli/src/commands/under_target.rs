//! What a plan takes under the runtime that stands for an export target, if that is not the plan's own.

use std::path::Path;

use answers::Opened;
use catalog::{Bytes, Seconds};
use costmodel::{CostModel, Scenario};
use interop::export::{Dialect, Exported, ExportedFile};
use interop::import::{self, Document, Given};
use plans::{Prediction, Strategy};
use serde::Serialize;

/// The prediction of exported files.
#[derive(Serialize)]
pub(crate) struct UnderTargetJson {
    /// Name of the runtime that stands for the target.
    runtime: String,
    step_time_s: f64,
    /// Peak memory of the rank with the most.
    peak_memory_bytes: f64,
}

/// Reads exported files as `import` does and predicts them. `None` where they run under the runtime that the plan was made for, or
/// cannot be read without what the user has to fill in.
pub(crate) fn predicted(
    loaded: &Opened,
    dialect: Dialect,
    exported: &Exported,
) -> Option<UnderTargetJson> {
    let own = &loaded.scenario.runtime.name;
    let of_file = |file| predicted_file(loaded, dialect, exported, file);
    let (runtime, prediction) = exported.files.iter().find_map(of_file)?;
    (runtime != *own).then(|| UnderTargetJson {
        runtime,
        step_time_s: prediction.step_time.0,
        peak_memory_bytes: prediction.peak_memory.as_f64(),
    })
}

/// Name of the runtime that runs a file, and the file's prediction under it.
fn predicted_file(
    loaded: &Opened,
    dialect: Dialect,
    exported: &Exported,
    file: &ExportedFile,
) -> Option<(String, Prediction)> {
    let beside = |name: &str| {
        let base = Path::new(name).file_name()?;
        let mut files = exported.files.iter();
        let found = files.find(|file| Path::new(&file.name).file_name() == Some(base));
        found.map(|file| file.text.clone())
    };
    let document = Document::read(&file.text, &file.name, Some(dialect), &beside).ok()?;
    let scenario = &loaded.scenario;
    let given = Given {
        model: &scenario.model,
        gpus: Some(scenario.workload.gpus),
        seq_len: Some(scenario.workload.seq_len),
        gpus_per_node: scenario.cluster.gpus_per_node,
    };
    let imported = import::import(&document, &given).ok()?;
    let runtime = catalog::load::runtime(imported.runtime(&document)).ok()?;
    let decisions = imported.decisions_under(&scenario.model, &runtime);
    let name = runtime.name.clone();
    let other = Scenario {
        model: scenario.model.clone().trained_under(&runtime),
        runtime,
        ..scenario.clone()
    };
    let strategy = Strategy::new(decisions, &other.model, &other.workload).ok()?;
    let prediction = CostModel::new(other).ok()?.predict(&strategy).ok()?;
    Some((name, prediction))
}

/// The prediction in a sentence, beside that of the plan.
pub(crate) fn sentence(loaded: &Opened, dialect: Dialect, under: &UnderTargetJson) -> String {
    let shown = |time, memory| {
        let time = reports::format::seconds(time);
        let memory = reports::format::bytes(memory);
        format!("{time} a step and {memory} per GPU")
    };
    let memory = Bytes(under.peak_memory_bytes as u64);
    let own = loaded.costs.predict(&loaded.strategy).ok();
    let own = own.map_or_else(String::new, |own| {
        let own = shown(own.step_time, own.peak_memory);
        format!(
            ", for which {own} are predicted under {}",
            loaded.scenario.runtime.name
        )
    });
    format!(
        "under {}, the runtime that stands for {}, these files take {}{own}",
        under.runtime,
        dialect.target(),
        shown(Seconds(under.step_time_s), memory),
    )
}
