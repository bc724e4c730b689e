//! What `search --from` names: reads the strategy in use from a configuration, a plan file or a text.

use std::path::{Path, PathBuf};

use answers::origins::Asked;
use answers::present::Read;
use answers::values::Gpus;
use answers::{Inputs, InputsJson, arrangements, launch, opened};
use catalog::files::Kind;
use catalog::paths::beside;
use catalog::{Mistake, Pool, Workload};
use costmodel::Scenario;
use interop::config::escape;
use interop::import::ImportError;
use planner::PlannerError;
use plans::{Decisions, Strategy};

use crate::args::SearchArgs;
use crate::commands::import::{self, Reading};
use crate::commands::plan;
use crate::error::CliError;
use crate::inputs;

/// Name that the suggested commands give to a plan of the strategy in use.
const PLAN: &str = "present.plan.yaml";

/// The contents of a source, before flags override them.
struct Source {
    scenario: Scenario,
    model_arg: String,
    cluster_arg: String,
    decisions: Decisions,
    notes: Vec<String>,
    plan: String,
    writes_plan: Option<String>,
}

/// The source that `--from` names.
pub(crate) enum Given<'a> {
    /// A strategy in our notation; everything else is said by flags.
    Text(&'a str),
    /// A plan file.
    Plan(PathBuf),
    /// A configuration of a training system.
    Configuration(PathBuf),
}

impl<'a> Given<'a> {
    /// Finds out whether a text names a file or is a strategy.
    pub(crate) fn of(from: &'a str) -> Result<Self, CliError> {
        let path = PathBuf::from(from);
        if let Some((file, _)) = opened::group(&path)
            && file.exists()
        {
            return Ok(Self::Plan(path));
        }
        if !import::split(&path).0.exists() {
            return Ok(Self::Text(from));
        }
        let text = catalog::text::read(&import::split(&path).0)?;
        Ok(
            match !text.is_empty() && Kind::Plan.recognises(text.as_bytes()) {
                true => Self::Plan(path),
                false => Self::Configuration(path),
            },
        )
    }

    /// The strategy with its question, on a pool if one is given. Flags on the command line override what a file says.
    pub(crate) fn read(
        &self,
        args: &SearchArgs,
        asked: &Asked,
        on: Option<&Pool>,
    ) -> Result<(Inputs, Read), CliError> {
        match self {
            Self::Text(text) => of_text(text, args, on),
            Self::Plan(path) => {
                let source = of_plan(path, args, asked, on)?;
                checked(path, source, args, asked, on)
            }
            Self::Configuration(path) => {
                let source = of_configuration(path, args, asked, on)?;
                checked(path, source, args, asked, on)
            }
        }
    }
}

/// A strategy in our notation; everything else is said by flags.
fn of_text(from: &str, args: &SearchArgs, on: Option<&Pool>) -> Result<(Inputs, Read), CliError> {
    let named = !plans::grammar::is_strategy(from) && !from.contains(['=', ',', ' ']);
    if named || from.trim().is_empty() {
        let wrong = Mistake::new(format!("there is no file `{from}`, and it is no strategy"))
            .at(format!("--from {from}"))
            .expected("a training system's configuration, a plan file, or a strategy")
            .example("--from train.toml, or --from 'tp8 pp2 mbs1'");
        return Err(wrong.into());
    }
    let mut inputs = inputs::resolve(&args.scenario)?;
    if let Some(pool) = on {
        let workload = inputs.scenario.workload.with_gpus(pool.gpus);
        inputs = arrangements::on_pool(&inputs, pool, workload.map_err(PlannerError::from)?);
    }
    let s = &inputs.scenario;
    let strategy = plans::grammar::parse(from, &s.model, &s.workload, &s.runtime)?;
    plans::support::allowed_by(&strategy, &s.model, &s.runtime, s.workload.precision)?;
    let writes = format!("{} -o {PLAN}", launch::estimate(&inputs, from));
    let read = Read {
        from: from.to_owned(),
        strategy,
        kept: inputs::words(&args.keep),
        notes: Vec::new(),
        plan: PLAN.to_owned(),
        writes_plan: Some(writes),
    };
    Ok((inputs, read))
}

fn of_plan(
    path: &Path,
    args: &SearchArgs,
    asked: &Asked,
    on: Option<&Pool>,
) -> Result<Source, CliError> {
    let loaded = plan::load(path)?;
    let mut source = Source {
        scenario: loaded.scenario,
        model_arg: beside(path, &loaded.file.model),
        cluster_arg: beside(path, &loaded.file.cluster),
        decisions: loaded.strategy.decisions().clone(),
        notes: Vec::new(),
        plan: path.display().to_string(),
        writes_plan: None,
    };
    let flags = &args.scenario;
    let s = &mut source.scenario;
    if let Some(model) = flags.model.as_ref().filter(|_| asked.says("model")) {
        s.model = catalog::load::model(model)?;
        of_model(
            path,
            model,
            s.model.layers,
            source.decisions.stages.layers(),
        )?;
        source.model_arg.clone_from(model);
    }
    let device = flags.gpus.as_ref().filter(|_| asked.says("gpus"));
    let device = device.and_then(Gpus::device);
    if let Some(pool) = on {
        source.cluster_arg.clone_from(&pool.arg);
        s.cluster = pool.cluster.clone();
    } else if asked.says("cluster") || device.is_some() {
        source.cluster_arg = answers::inputs::cluster_arg(flags.cluster.as_deref(), device)?;
    }
    let other = asked.says("cluster") || device.is_some() || flags.assumed.jitter.is_some();
    if other && on.is_none() {
        source.cluster_arg = answers::inputs::jittering(source.cluster_arg, flags.assumed.jitter)?;
        s.cluster = answers::inputs::cluster(&source.cluster_arg, device)?;
    }
    if let Some(runtime) = flags.runtime.as_ref().filter(|_| asked.says("runtime")) {
        s.runtime = catalog::load::runtime(runtime)?;
        s.model = s.model.clone().trained_under(&s.runtime);
    }
    if asked.says("headroom") {
        s.headroom = flags.assumed.headroom;
    }
    Ok(source)
}

/// Refuses a model that the plan's stages cannot hold.
fn of_model(path: &Path, model: &str, layers: u64, planned: u64) -> Result<(), CliError> {
    if layers == planned {
        return Ok(());
    }
    let place = format!("--from {} --model {model}", path.display());
    let what = format!("the plan is of a model with {planned} layers, and {model} has {layers}");
    let expected = format!("a plan of {model}, or no --model");
    Err(CliError::unexpected(place, what, expected))
}

fn of_configuration(
    path: &Path,
    args: &SearchArgs,
    asked: &Asked,
    on: Option<&Pool>,
) -> Result<Source, CliError> {
    let flags = &args.scenario;
    let gpus = flags.gpus.as_ref().filter(|_| asked.says("gpus"));
    let device = gpus.and_then(Gpus::device);
    let (cluster_arg, cluster) = match on {
        Some(pool) => (pool.arg.clone(), pool.cluster.clone()),
        None => {
            let arg = answers::inputs::cluster_arg(flags.cluster.as_deref(), device)?;
            let arg = answers::inputs::jittering(arg, flags.assumed.jitter)?;
            let cluster = answers::inputs::cluster(&arg, device)?;
            (arg, cluster)
        }
    };
    let reading = Reading {
        file: path,
        dialect: None,
        model: flags.model.as_deref().filter(|_| asked.says("model")),
        gpus: on.map_or_else(
            || gpus.map(|gpus| gpus.count(&cluster)),
            |pool| Some(pool.gpus),
        ),
        seq: flags.seq.filter(|_| asked.says("seq")),
        runtime: flags.runtime.as_deref().filter(|_| asked.says("runtime")),
        gpus_per_node: cluster.gpus_per_node,
    };
    let read = import::read(&reading).map_err(|error| unknown(path, error))?;
    let named = on.map(|pool| pool.arg.as_str());
    let named = named.or(flags.cluster.as_deref());
    Ok(Source {
        scenario: Scenario {
            model: read.model,
            cluster,
            runtime: read.runtime,
            workload: read.workload,
            headroom: flags.assumed.headroom,
        },
        model_arg: read.model_arg,
        cluster_arg,
        decisions: read.strategy.decisions().clone(),
        notes: read.notes,
        plan: PLAN.to_owned(),
        writes_plan: Some(writes(&reading, named)),
    })
}

/// The command that writes a plan of a configuration.
fn writes(reading: &Reading<'_>, cluster: Option<&str>) -> String {
    let file = reading.file.display().to_string();
    let mut command = format!("vescale-plan import {}", escape::path(&file));
    let values = [
        ("model", reading.model.map(str::to_owned)),
        ("cluster", cluster.map(str::to_owned)),
        ("gpus", reading.gpus.map(|gpus| gpus.to_string())),
        ("seq", reading.seq.map(|seq| seq.to_string())),
        ("runtime", reading.runtime.map(str::to_owned)),
    ];
    for (flag, value) in values {
        if let Some(value) = value {
            command.push_str(&format!(" {}", escape::option(flag, &value)));
        }
    }
    format!("{command} -o {PLAN}")
}

/// Adds to the error for a file of an unknown training system how to say which system it is; leaves other errors as they
/// are.
fn unknown(path: &Path, error: CliError) -> CliError {
    let CliError::Import(ImportError::UnknownKind { .. }) = error else {
        return error;
    };
    let file = path.display();
    let wrong = Mistake::new("cannot tell which training system this file is for")
        .at(format!("--from {file}"))
        .expected("a configuration file of a known training system, a plan file, or a strategy")
        .example(format!(
            "vescale-plan import {} --from megatron-lm -o {PLAN}, then --from {PLAN}",
            escape::path(&file.to_string())
        ));
    CliError::Input(wrong)
}

/// The question and the strategy with the sizes that flags give, if they are legal.
fn checked(
    from: &Path,
    source: Source,
    args: &SearchArgs,
    asked: &Asked,
    on: Option<&Pool>,
) -> Result<(Inputs, Read), CliError> {
    let Source {
        mut scenario,
        mut decisions,
        mut notes,
        ..
    } = source;
    scenario.workload = workload(&scenario, args, asked, on)?;
    let w = &scenario.workload;
    inputs::sequence(&scenario.model, w, from)?;
    if asked.says("global_batch") {
        let per_pass = decisions.dp().saturating_mul(decisions.micro_batch).max(1);
        decisions.num_micro_batches = (w.global_batch / per_pass).max(1);
    }
    answers::inputs::check_gpus(w.gpus, &scenario.cluster)?;
    let decisions = decisions.under(&scenario.runtime, w.precision);
    let strategy = Strategy::new(decisions, &scenario.model, w)?;
    let allowed =
        plans::support::allowed_by(&strategy, &scenario.model, &scenario.runtime, w.precision);
    if let Err(error) = allowed {
        let note = format!("predicted although its runtime preset does not offer it: {error}");
        if !notes.contains(&note) {
            notes.push(note);
        }
    }
    let from = from.display().to_string();
    let parameters = models::parameter_count(&scenario.model)
        .map_err(|e| CliError::wrong(&from, format!("model {}: {e}", source.model_arg)))?;
    let inputs = Inputs {
        json: InputsJson::of(&scenario, parameters),
        scenario,
        model_arg: source.model_arg,
        cluster_arg: source.cluster_arg,
    };
    let read = Read {
        from,
        strategy,
        kept: inputs::words(&args.keep),
        notes,
        plan: source.plan,
        writes_plan: source.writes_plan,
    };
    Ok((inputs, read))
}

/// The workload of a source, with the sizes that flags give.
fn workload(
    scenario: &Scenario,
    args: &SearchArgs,
    asked: &Asked,
    on: Option<&Pool>,
) -> Result<Workload, CliError> {
    let (own, flags) = (&scenario.workload, &args.scenario);
    let gpus = flags.gpus.as_ref().filter(|_| asked.says("gpus"));
    let said = flags.global_batch.filter(|_| asked.says("global_batch"));
    let seq = flags.seq.filter(|_| asked.says("seq"));
    let precision = match asked.says("precision") {
        true => inputs::precision(flags.assumed.precision),
        false => own.precision,
    };
    let workload = answers::inputs::workload(
        match (on, gpus) {
            (Some(pool), _) => pool.gpus,
            (None, Some(gpus)) => gpus.count(&scenario.cluster),
            (None, None) => own.gpus,
        },
        seq.unwrap_or(own.seq_len),
        Some(said.unwrap_or(own.global_batch)),
        precision,
    )?;
    let of = own
        .documents()
        .map(|of| (of.lengths().clone(), of.packing()));
    let documents = inputs::documents(&flags.assumed).or(of);
    Ok(answers::inputs::of_documents(workload, documents)?)
}
