//! `import`: reads the setup a user has today as a strategy, and predicts it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use answers::SCHEMA_VERSION;
use answers::values::Gpus;
use answers::{Inputs, InputsJson};
use catalog::files::Kind;
use catalog::{Cluster, Model, Precision, Runtime, Workload};
use costmodel::{CostModel, Scenario};
use interop::export::Dialect;
use interop::import::{self, Document, Given, Imported};
use plans::json::{PredictedJson, StrategyJson};
use plans::{Decisions, Strategy};
use serde::Serialize;

use crate::args::ImportArgs;
use crate::commands::next;
use crate::destinations::Target;
use crate::error::CliError;
use crate::inputs;
use crate::output;

#[derive(Serialize)]
struct ImportJson {
    schema_version: u32,
    file: String,
    /// Training system that the file is for; null for a model's own configuration.
    target: Option<String>,
    inputs: InputsJson,
    model: ModelJson,
    strategy: StrategyJson,
    strategy_text: String,
    predicted: PredictedJson,
    notes: Vec<String>,
    plan_path: Option<String>,
}

/// The sizes of the model that was read.
#[derive(Serialize)]
struct ModelJson {
    layers: u64,
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    /// Routed experts of a layer; 0 in a dense model.
    experts: u64,
    vocab: u64,
}

impl ModelJson {
    fn of(model: &Model) -> Self {
        Self {
            layers: model.layers,
            hidden: model.hidden,
            heads: model.attention.heads,
            kv_heads: model.attention.kv_heads(),
            experts: model.moe.as_ref().map_or(0, |moe| moe.experts),
            vocab: model.vocab,
        }
    }
}

/// Runs `import`.
pub(crate) fn run(args: &ImportArgs) -> Result<ExitCode, CliError> {
    let device = args.gpus.as_ref().and_then(Gpus::device);
    let cluster_arg = answers::inputs::cluster_arg(args.cluster.as_deref(), device)?;
    let cluster = answers::inputs::cluster(&cluster_arg, device)?;
    let source = read(&Reading {
        file: &args.file,
        dialect: args.from.as_deref().map(Dialect::parse).transpose()?,
        model: args.model.as_deref(),
        gpus: args.gpus.as_ref().map(|gpus| gpus.count(&cluster)),
        seq: args.seq,
        runtime: args.runtime.as_deref(),
        gpus_per_node: cluster.gpus_per_node,
    })?;
    finish(args, source, (cluster_arg, cluster))
}

/// A file to read, and what flags say about it.
pub(crate) struct Reading<'a> {
    pub(crate) file: &'a Path,
    pub(crate) dialect: Option<Dialect>,
    pub(crate) model: Option<&'a str>,
    pub(crate) gpus: Option<u64>,
    pub(crate) seq: Option<u64>,
    pub(crate) runtime: Option<&'a str>,
    pub(crate) gpus_per_node: u64,
}

/// A strategy that was read, with its scenario.
pub(crate) struct Source {
    target: Option<Dialect>,
    pub(crate) model_arg: String,
    pub(crate) model: Model,
    pub(crate) runtime: Runtime,
    pub(crate) strategy: Strategy,
    pub(crate) workload: Workload,
    /// Sentences on what the strategy expresses only approximately, or what was assumed.
    pub(crate) notes: Vec<String>,
}

/// Reads a configuration of a training system, or a model's own.
pub(crate) fn read(reading: &Reading<'_>) -> Result<Source, CliError> {
    let text = catalog::text::read(&split(reading.file).0)?;
    if reading.dialect.is_none() && is_model(&text) {
        of_model(reading)
    } else {
        of_system(reading)
    }
}

/// Reads a file of a training system, with the files beside it that it sources.
///
/// `FILE.py:FUNCTION` means one function of a Python file.
pub(crate) fn document(path: &Path, dialect: Option<Dialect>) -> Result<Document, CliError> {
    let (path, function) = split(path);
    let mut text = catalog::text::read(&path)?;
    if let Some(name) = function {
        let shown = path.display().to_string();
        let missing = || CliError::wrong(shown, format!("no function `{name}` is defined"));
        text = interop::config::python::only_function(&text, &name).ok_or_else(missing)?;
    }
    // A path in a file is relative to the file or, as frameworks are started from their own folder, to the current one.
    let beside = |name: &str| {
        let folder = path.parent().unwrap_or(Path::new(""));
        let base = Path::new(name).file_name()?;
        let places = [folder.join(name), PathBuf::from(name), folder.join(base)];
        let text = |place: &PathBuf| catalog::text::read(place).ok();
        places
            .iter()
            .filter(|_| !Path::new(name).is_absolute())
            .find_map(text)
    };
    Ok(Document::read(
        &text,
        &path.display().to_string(),
        dialect,
        &beside,
    )?)
}

/// A file's path, and the name of a function in it if one follows after a colon.
pub(crate) fn split(path: &Path) -> (PathBuf, Option<String>) {
    let text = path.to_string_lossy();
    match text.rsplit_once(".py:") {
        Some((file, function)) if !path.exists() => (
            PathBuf::from(format!("{file}.py")),
            Some(function.to_owned()),
        ),
        _ => (path.to_owned(), None),
    }
}

/// Whether the text is a Hugging Face `config.json`.
fn is_model(text: &str) -> bool {
    text.trim_start().starts_with('{') && text.contains("\"model_type\"")
}

fn of_model(reading: &Reading<'_>) -> Result<Source, CliError> {
    let shown = reading.file.display().to_string();
    let model_arg = reading.model.map_or(shown, str::to_owned);
    let model = catalog::load::model(&model_arg)?;
    let runtime = catalog::load::runtime(reading.runtime.unwrap_or("megatron-core"))?;
    let model = model.trained_under(&runtime);
    let gpus = reading.gpus.unwrap_or(1);
    let seq_len = (reading.seq).unwrap_or_else(|| answers::inputs::default_seq(&model));
    let workload = answers::inputs::workload(gpus, seq_len, None, Precision::Bf16)?;
    let strategy = plans::grammar::parse("", &model, &workload, &runtime)?;
    let note =
        "a model's configuration says nothing about parallelism: this is data parallelism alone";
    Ok(Source {
        target: None,
        model_arg,
        model,
        runtime,
        strategy,
        workload,
        notes: vec![note.to_owned()],
    })
}

fn of_system(reading: &Reading<'_>) -> Result<Source, CliError> {
    let document = document(reading.file, reading.dialect)?;
    let (model, model_arg, of_file) = match reading.model {
        Some(given) => (catalog::load::model(given)?, given.to_owned(), None),
        None => {
            let found = import::of_file(&document)?;
            let note = of_library(&found);
            (found.model, found.name, Some(note))
        }
    };
    let usual_seq = answers::inputs::default_seq(&model);
    let has_sequence = document.dialect.has_sequence_length();
    let given = Given {
        model: &model,
        gpus: reading.gpus,
        seq_len: reading.seq.or((!has_sequence).then_some(usual_seq)),
        gpus_per_node: reading.gpus_per_node,
    };
    let imported = import::import(&document, &given)?;
    let usual = imported.runtime(&document);
    let runtime = catalog::load::runtime(reading.runtime.unwrap_or(usual))?;
    let decisions = imported.decisions_under(&model, &runtime);
    let mut notes = imported.notes_under(&runtime);
    let Imported {
        dialect,
        workload,
        adapters,
        ..
    } = imported;
    notes.extend(interop::check::misspelt(&document)?);
    let found = interop::check::contradictions(&document, &model);
    notes.extend(found.iter().map(|f| format!("export --check finds {f}")));
    notes.extend(of_file);
    if !has_sequence && reading.seq.is_none() {
        notes.push(format!(
            "the file has no sequence length: {usual_seq} tokens are assumed (--seq)"
        ));
    }
    let model = model.trained_under(&runtime).with_adapters(adapters)?;
    let strategy = legal(decisions, &model, &workload, &document.path)?;
    if let Err(error) = plans::support::allowed_by(&strategy, &model, &runtime, workload.precision)
    {
        notes.push(format!(
            "predicted although its runtime preset does not offer it: {error}"
        ));
    }
    Ok(Source {
        target: Some(dialect),
        model_arg,
        model,
        runtime,
        strategy,
        workload,
        notes,
    })
}

/// Says whether the library has the model of a file.
fn of_library(found: &import::OfFile) -> String {
    if found.known {
        return format!("the file's model is {} of the library", found.name);
    }
    let differs = found.differs.as_ref().map(|what| format!(" ({what})"));
    let differs = differs.unwrap_or_default();
    format!("the file's model is not in the library{differs}; a plan of it carries it")
}

fn legal(
    decisions: Decisions,
    model: &Model,
    workload: &Workload,
    path: &str,
) -> Result<Strategy, CliError> {
    let strategy = Strategy::new(decisions.canonical(model), model, workload);
    Ok(strategy.map_err(|error| error.mistake().at(path))?)
}

/// A workload, runtime and adapters as flags of `estimate`.
fn flags(w: &Workload, runtime: &str, adapters: Option<&String>) -> String {
    let adapters = adapters.map_or_else(String::new, |of| format!(" --lora {of}"));
    let precision = format!("{:?}", w.precision).to_lowercase();
    format!(
        "--gpus {} --seq {} --global-batch {} --precision {precision} --runtime {runtime}{adapters}",
        w.gpus, w.seq_len, w.global_batch
    )
}

/// Answers for a source on a cluster, which is given as its flag and as what that loads.
fn finish(args: &ImportArgs, source: Source, on: (String, Cluster)) -> Result<ExitCode, CliError> {
    let (cluster_arg, cluster) = on;
    let plan_path = Target::optional(args.output_plan.as_ref(), Kind::Plan, args.force)?;
    let w = source.workload.clone();
    answers::inputs::check_gpus(w.gpus, &cluster)?;
    inputs::sequence(&source.model, &w, &args.file)?;
    let parameters = models::parameter_count(&source.model)
        .map_err(|e| CliError::wrong(&source.model_arg, e.to_string()))?;
    let scenario = Scenario {
        model: source.model,
        cluster,
        runtime: source.runtime,
        workload: w.clone(),
        headroom: answers::inputs::DEFAULT_HEADROOM,
    };
    let inputs = Inputs {
        json: InputsJson::of(&scenario, parameters),
        scenario,
        model_arg: source.model_arg,
        cluster_arg,
    };
    let strategy = source.strategy;
    let costs = CostModel::new(inputs.scenario.clone())?;
    let prediction = costs.predict(&strategy)?;
    let saved = plan_path.as_ref().map(|to| {
        to.write(&answers::plan::file(&inputs, &strategy, &prediction)?.to_yaml()?)?;
        to.say(args.format.quiet, "plan");
        Ok::<_, CliError>(())
    });
    let saved = saved.transpose();
    for note in &source.notes {
        output::note(args.format.quiet, &format!("note: {note}"));
    }
    if args.format.json {
        output::json(&ImportJson {
            schema_version: SCHEMA_VERSION,
            file: args.file.display().to_string(),
            target: source.target.map(Dialect::name),
            model: ModelJson::of(&inputs.scenario.model),
            strategy: StrategyJson::new(strategy.decisions(), w.precision),
            strategy_text: strategy.to_string(),
            predicted: PredictedJson::from(&prediction),
            notes: source.notes,
            plan_path: plan_path.filter(|_| saved.is_ok()).map(|to| to.text()),
            inputs: inputs.json,
        })?;
    } else {
        output::print(&format!(
            "{}\n",
            flags(&w, &inputs.json.runtime, inputs.json.adapters.as_ref())
        ));
        output::print(&format!("--strategy {strategy}\n\n"));
        let ground = answers::plan::ground(&costs);
        let text = reports::terminal::prediction(&strategy, &prediction, ground, output::style());
        output::print(&text);
        next::terms(args.format);
    }
    saved?;
    Ok(ExitCode::SUCCESS)
}
