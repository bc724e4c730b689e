//! A plan file that was opened: its scenario is rebuilt, so that more can be asked about the plan.

use std::path::{Path, PathBuf};

use catalog::paths::beside;
use catalog::{Cluster, Mistake, SpecError};
use costmodel::{CostModel, Scenario};
use plans::json::StrategyJson;
use plans::{PlanFile, Strategy};

use crate::error::AnswerError;
use crate::inputs::{DEFAULT_HEADROOM, InputsJson};

/// A plan that was opened.
#[derive(Debug)]
pub struct Opened {
    /// The plan file.
    pub file: PlanFile,
    /// Its scenario; that of `costs` may have the model's projections fused.
    pub scenario: Scenario,
    /// The costs of its scenario.
    pub costs: CostModel,
    /// Its strategy.
    pub strategy: Strategy,
    /// Its scenario, as JSON echoes it.
    pub inputs: InputsJson,
}

/// Explains what a plan file is, in an error about another file.
fn not_a_plan(error: SpecError) -> AnswerError {
    let mistake = error.mistake();
    AnswerError::from(match mistake.expected {
        Some(_) => mistake,
        None => mistake
            .expected("a plan file, as `search`, `estimate -o` and `import -o` write")
            .example("vescale-plan search --model llama3-8b --gpus 8 -o best.plan.yaml"),
    })
}

/// The error that a plan has several groups of replicas, where one strategy is expected.
fn several_groups(file: &PlanFile, path: &Path) -> AnswerError {
    let path = path.display();
    let groups = (1..).zip(&file.groups);
    let groups: Vec<String> = groups
        .map(|(number, group)| format!("{path}#{number} ({} GPUs)", group.gpus))
        .collect();
    let wrong = Mistake::new(format!(
        "the plan has {} groups of replicas, each with a strategy of its own",
        groups.len()
    ));
    let wrong = wrong.at(path.to_string());
    AnswerError::from(wrong.expected(format!("one of its groups: {}", groups.join(", "))))
}

/// Reads a plan file. A number after the path picks one of its groups of replicas:
/// `best.plan.yaml#2`.
///
/// # Errors
/// When it cannot be read, or is no plan file; when it has no such group.
pub fn read(path: &Path) -> Result<PlanFile, AnswerError> {
    let Some((file, number)) = group(path) else {
        return read_whole(path);
    };
    let plan = read_whole(&file)?;
    plan.of_group(number).ok_or_else(|| {
        let file = file.display();
        let out = Mistake::new(format!("{file} has no group {number} of replicas"));
        let expected = match plan.groups.len() {
            0 => "the plan itself: all of its replicas are alike".to_owned(),
            groups => format!("#1 to #{groups}"),
        };
        AnswerError::from(out.at(path.display().to_string()).expected(expected))
    })
}

/// The file and the number of a path that names a group of replicas, such as `best.plan.yaml#2`; `None` if it names a file.
#[must_use]
pub fn group(path: &Path) -> Option<(PathBuf, usize)> {
    let shown = path.to_str()?;
    let (file, number) = shown.rsplit_once('#')?;
    let number = number.parse().ok()?;
    (!path.exists()).then(|| (PathBuf::from(file), number))
}

fn read_whole(path: &Path) -> Result<PlanFile, AnswerError> {
    let text = catalog::text::read(path).map_err(not_a_plan)?;
    let file = PlanFile::from_yaml(&text, &path.display().to_string());
    file.map_err(not_a_plan)
}

/// The cluster that the plan file at `path` names.
///
/// # Errors
/// When there is no such cluster, or its file is not where the plan says.
pub fn cluster(path: &Path, name: &str) -> Result<Cluster, AnswerError> {
    catalog::load::cluster(&beside(path, name)).map_err(|error| match error {
        SpecError::Unreadable { path: file, reason } => {
            let wrong = Mistake::new(format!("the plan's cluster cannot be read: {reason}"));
            let wrong = wrong.at(format!("{}, cluster `{name}`", path.display()));
            let expected = format!("the cluster file {file}, where the plan says that it is");
            AnswerError::from(wrong.expected(expected))
        }
        other => other.into(),
    })
}

impl Opened {
    /// Rebuilds the scenario of a plan file that was read from `path`.
    ///
    /// # Errors
    /// When the file names a model, cluster or runtime that is not there, or contradicts itself.
    pub fn of(file: PlanFile, path: &Path) -> Result<Self, AnswerError> {
        if !file.groups.is_empty() {
            return Err(several_groups(&file, path));
        }
        let shown = path.display().to_string();
        let model = match &file.model_config {
            Some(config) => catalog::load::model_defined(config, &file.model, &shown)?,
            None => catalog::load::model(&beside(path, &file.model))?,
        };
        let cluster = cluster(path, &file.cluster)?;
        let runtime = catalog::load::runtime(&file.runtime)?;
        let model = model.trained_under(&runtime);
        let model = model.with_adapters(file.adapters)?;
        let w = &file.workload;
        let wrong = |field: &str, message: String| {
            AnswerError::from(SpecError::field(&shown, field, message))
        };
        let workload = w.read().map_err(|why| wrong("workload", why))?;
        let sequence = model.check_sequence(workload.seq_len);
        sequence.map_err(|e| {
            let expected = e.expected.unwrap_or_default();
            wrong(
                "workload.seq_len",
                format!("{}; expected {expected}", e.what),
            )
        })?;
        let devices = cluster.check_devices(w.gpus);
        devices.map_err(|e| wrong("workload.gpus", format!("{}: {e}", w.gpus)))?;
        let parameters = models::parameter_count(&model)
            .map_err(|e| AnswerError::from(Mistake::new(e.to_string())))?;
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
        Ok(Self {
            file,
            inputs: InputsJson::of(&scenario, parameters),
            costs: CostModel::new(scenario.clone())?,
            scenario,
            strategy,
        })
    }
}
