//! `export`: writes a plan as a training system's configuration.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use answers::inputs::DEFAULT_HEADROOM;
use answers::{Opened, SCHEMA_VERSION, opened};
use catalog::files::{self, FolderDestination, Kind, NamedFile, Replace};
use catalog::{Packing, Pools, Precision};
use interop::check::{Finding, Severity};
use interop::config::escape;
use interop::export::{
    self, Dialect, ExportError, Exported, ExportedFile, Inputs, Job, Launcher, Refusal, Unfilled,
};
use plans::support::allowed_by;
use plans::{PlanFile, Strategy, grammar};
use serde::Serialize;

use crate::args::{ExportArgs, LauncherArg};
use crate::commands::assumptions::{self, AssumptionJson};
use crate::commands::import::document;
use crate::commands::stale_launchers;
use crate::commands::under_target::{self, UnderTargetJson};
use crate::destinations;
use crate::error::{CliError, code};
use crate::output;

#[derive(Serialize)]
struct ExportJson<'a> {
    schema_version: u32,
    target: String,
    plan: String,
    files: Vec<FileJson>,
    unfilled: &'a [Unfilled],
    assumptions: Vec<AssumptionJson>,
    /// What the files take under the runtime that stands for the target; absent where that is the plan's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    under_target: Option<UnderTargetJson>,
    notes: Vec<String>,
}

#[derive(Serialize)]
struct FileJson {
    name: String,
    path: Option<String>,
    text: String,
}

#[derive(Serialize)]
struct RefusedJson<'a> {
    schema_version: u32,
    target: String,
    plan: &'a str,
    refused: Vec<RefusalJson>,
    /// The runtime of `nearest` and `search`.
    runtime: &'static str,
    /// The plan with the refused decisions replaced; absent where the target cannot express it or the runtime cannot run it.
    nearest: Option<&'a String>,
    /// A search command whose best plan the target can express; absent where it cannot express the model.
    search: Option<&'a String>,
}

#[derive(Serialize)]
struct RefusalJson {
    decision: String,
    why: String,
    instead: Option<String>,
    taken_by: Option<&'static str>,
}

/// Runs `export`.
pub(crate) fn run(args: &ExportArgs) -> Result<ExitCode, CliError> {
    let dialect = args.to.as_deref().map(Dialect::parse).transpose()?;
    if let Some(file) = &args.check {
        return checked(args, file, dialect);
    }
    // The argument parser requires both unless a file is checked.
    let (Some(dialect), Some(path)) = (dialect, &args.plan) else {
        let wrong = "a plan and --to are needed";
        return Err(CliError::wrong("vescale-plan export", wrong));
    };
    let file = opened::read(path)?;
    if !file.groups.is_empty() {
        return replicas_differ(args, &file, path, dialect);
    }
    let loaded = Opened::of(file, path)?;
    let launcher = args.launcher.map(|launcher| match launcher {
        LauncherArg::Torchrun => Launcher::Torchrun,
        LauncherArg::Slurm => Launcher::Slurm,
        LauncherArg::Kubernetes => Launcher::Kubernetes,
    });
    let inputs = inputs(args)?;
    let pools = loaded.costs.scenario().cluster.pools.as_deref();
    if let Some(pools) = pools.filter(|_| launcher.is_some()) {
        check_nodes(pools)?;
    }
    let job = job(&loaded, &loaded.strategy, inputs);
    match export::export(&job, dialect, launcher) {
        Ok(mut exported) => {
            let order = pools.map(|pools| {
                let ranks = reports::words::pools(pools, &loaded.strategy);
                format!("start the job on hosts in this order: {ranks}")
            });
            exported.notes.extend(order);
            exported.notes.extend(of_one_group(path, &loaded));
            finish(args, &loaded, dialect, &mut exported)
        }
        Err(ExportError::Inexpressible { refusals, .. }) => {
            refused(args, &loaded, dialect, &refusals)
        }
        Err(error) => Err(error.into()),
    }
}

/// Refuses a launch script, which has one number of GPUs per node, for pools that differ in it.
fn check_nodes(pools: &Pools) -> Result<(), CliError> {
    if pools.gpus_per_node().is_some() {
        return Ok(());
    }
    let sizes = pools.parts.iter().map(|pool| pool.cluster.gpus_per_node);
    let sizes: Vec<String> = sizes.map(|size| size.to_string()).collect();
    let what = format!("the pools have {} GPUs per node", sizes.join(" and "));
    let expected = "nodes of equal size; without --launcher only the arguments are written";
    Err(CliError::unexpected("--launcher", what, expected))
}

/// Tokenizer, data and hub name from the command line, as text that a file can hold.
fn inputs(args: &ExportArgs) -> Result<Inputs<'_>, CliError> {
    let given = [
        ("--tokenizer", &args.tokenizer),
        ("--data", &args.data),
        ("--hf-id", &args.hf_id),
    ];
    for (option, text) in given {
        if let Some(text) = text {
            if text.trim().is_empty() {
                let what = format!("{option} is given no name");
                let expected = "a folder, a file or a hub name; without the option, the file has a place to fill in";
                return Err(CliError::unexpected(option, what, expected));
            }
            catalog::names::checked(text, "command line", option)?;
        }
    }
    Ok(Inputs {
        tokenizer: args.tokenizer.as_deref(),
        data: args.data.as_deref(),
        hf_id: args.hf_id.as_deref(),
    })
}

#[derive(Serialize)]
struct CheckJson {
    schema_version: u32,
    file: String,
    target: String,
    findings: Vec<Finding>,
}

/// Checks a configuration; exit code 4 for errors, 0 for warnings only.
fn checked(args: &ExportArgs, file: &Path, dialect: Option<Dialect>) -> Result<ExitCode, CliError> {
    let document = document(file, dialect)?;
    let model = args.model.as_deref();
    let model = model.map(catalog::load::model).transpose()?;
    let findings = interop::check::check(&document, model.as_deref())?;
    let errors = findings.iter().filter(|f| f.severity == Severity::Error);
    let errors = errors.count();
    if args.format.json {
        output::json(&CheckJson {
            schema_version: SCHEMA_VERSION,
            file: document.path.clone(),
            target: document.dialect.name(),
            findings,
        })?;
    } else {
        for finding in &findings {
            output::print(&format!("{finding}\n"));
        }
        let name = document.dialect.name();
        let verdict = match errors {
            0 => format!("{}: fit for {name}", document.path),
            1 => format!("{}: 1 thing is wrong for {name}", document.path),
            n => format!("{}: {n} things are wrong for {name}", document.path),
        };
        output::note(args.format.quiet, &verdict);
    }
    Ok(code::unless(errors == 0, code::EXPORT_INVALID))
}

/// A plan's job with this strategy.
fn job<'a>(loaded: &'a Opened, strategy: &'a Strategy, inputs: Inputs<'a>) -> Job<'a> {
    let scenario = &loaded.scenario;
    Job {
        model: &scenario.model,
        decisions: strategy.decisions(),
        workload: &scenario.workload,
        runtime: &scenario.runtime,
        sharding: &loaded.file.sharding,
        id: &loaded.file.id,
        cluster: &scenario.cluster,
        inputs,
    }
}

/// What is predicted of exported files beyond the plan's own prediction.
struct Prices {
    assumptions: Vec<AssumptionJson>,
    under_target: Option<UnderTargetJson>,
}

fn finish(
    args: &ExportArgs,
    loaded: &Opened,
    dialect: Dialect,
    exported: &mut Exported,
) -> Result<ExitCode, CliError> {
    let replace = Replace::forced(args.force);
    let check = |folder: &PathBuf| FolderDestination::check(folder, Kind::Exported, replace);
    let to = args.output.as_ref().map(check).transpose()?;
    let saved = match &to {
        Some(to) => save(args, loaded, to, exported),
        None => Ok(Vec::new()),
    };
    let exported = &*exported;
    let prices = Prices {
        assumptions: assumptions::priced(loaded, &exported.unmet),
        under_target: under_target::predicted(loaded, dialect, exported),
    };
    notes(args, loaded, dialect, exported, &prices);
    let folder = args.output.as_deref().filter(|_| saved.is_ok());
    if args.format.json {
        print_json(loaded, dialect, exported, folder, prices)?;
    } else if args.output.is_some() {
        let files = exported.files.iter();
        for path in files.filter_map(|file| Some(folder?.join(&file.name))) {
            let replaced = saved.as_ref().is_ok_and(|all| all.contains(&path));
            let note = destinations::replaced(replaced);
            output::note(args.format.quiet, &format!("{}{note}", files::shown(&path)));
        }
    } else {
        let several = exported.files.len() > 1;
        for file in &exported.files {
            if several {
                output::document(&format!("==> {} <==\n", file.name));
            }
            output::document(&file.text);
        }
    }
    saved?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the files and, if forced, removes launch scripts of other plans; returns the files that were replaced.
fn save(
    args: &ExportArgs,
    loaded: &Opened,
    to: &FolderDestination,
    exported: &mut Exported,
) -> Result<Vec<PathBuf>, CliError> {
    let replaced = write(to, &exported.files)?;
    let id = &loaded.file.id;
    let stale = stale_launchers::cleared(to, id, &exported.files, args.force)?;
    exported.notes.extend(stale);
    Ok(replaced)
}

/// Prints an export as JSON; `folder` is the one that its files were written to.
fn print_json(
    loaded: &Opened,
    dialect: Dialect,
    exported: &Exported,
    folder: Option<&Path>,
    prices: Prices,
) -> Result<(), CliError> {
    let file = |file: &ExportedFile| FileJson {
        name: file.name.clone(),
        path: folder.map(|folder| folder.join(&file.name).display().to_string()),
        text: file.text.clone(),
    };
    output::json(&ExportJson {
        schema_version: SCHEMA_VERSION,
        target: dialect.name(),
        plan: loaded.file.id.clone(),
        files: exported.files.iter().map(file).collect(),
        unfilled: &exported.unfilled,
        assumptions: prices.assumptions,
        under_target: prices.under_target,
        notes: exported.notes.clone(),
    })
}

/// Prints what is still to be filled in, and what the target does less or otherwise.
fn notes(
    args: &ExportArgs,
    loaded: &Opened,
    dialect: Dialect,
    exported: &Exported,
    prices: &Prices,
) {
    for unfilled in &exported.unfilled {
        let line = format!("fill in {}: {}", unfilled.name, unfilled.what);
        output::note(args.format.quiet, &line);
    }
    let mut differences = assumptions::sentences(loaded, &exported.unmet, &prices.assumptions);
    let under_target = prices.under_target.iter();
    differences.extend(under_target.map(|under| under_target::sentence(loaded, dialect, under)));
    for note in exported.notes.iter().chain(&differences) {
        output::note(args.format.quiet, &format!("note: {note}"));
    }
}

fn write(to: &FolderDestination, files: &[ExportedFile]) -> Result<Vec<PathBuf>, CliError> {
    let named = files.iter().map(|file| NamedFile {
        name: &file.name,
        content: file.text.as_bytes(),
        executable: file.executable,
    });
    Ok(to.write(&named.collect::<Vec<_>>())?)
}

/// Prints what a target refuses of the plan with this id, if JSON is asked for; with the nearest strategy that it takes, and a
/// search for others.
fn print_refused(
    args: &ExportArgs,
    dialect: Dialect,
    plan: &str,
    refused: Vec<RefusalJson>,
    [nearest, search]: [Option<&String>; 2],
) -> Result<(), CliError> {
    if !args.format.json {
        return Ok(());
    }
    output::json(&RefusedJson {
        schema_version: SCHEMA_VERSION,
        target: dialect.name(),
        plan,
        refused,
        runtime: dialect.runtime(),
        nearest,
        search,
    })
}

/// Refuses a plan whose replicas are not alike: every target starts equal replicas, which take equally many micro-batches.
fn replicas_differ(
    args: &ExportArgs,
    file: &PlanFile,
    path: &Path,
    dialect: Dialect,
) -> Result<ExitCode, CliError> {
    let target = dialect.target();
    let count = file.groups.len();
    let shares: Vec<String> = (file.groups.iter())
        .map(|group| format!("{} sequences on {} GPUs", group.global_batch, group.gpus))
        .collect();
    let decision = format!("groups={count}");
    let why = format!(
        "its groups of replicas differ in their plans and take {}, and {target} trains replicas that are all alike",
        shares.join(" and ")
    );
    let search = search_command(file, file.workload.packing, dialect, &[]) + " --fix groups=1";
    let refusal = RefusalJson {
        decision: decision.clone(),
        why: why.clone(),
        instead: Some("groups=1".to_owned()),
        taken_by: None,
    };
    print_refused(
        args,
        dialect,
        &file.id,
        vec![refusal],
        [None, Some(&search)],
    )?;
    output::error(&format!("{target} cannot express {decision}: {why}"));
    output::error(&format!(
        "plan with replicas that are all alike, in one pipeline through the pools: {search}"
    ));
    let path = path.display();
    output::error(&format!(
        "or export each group as a job of its own, {path}#1 to {path}#{count}; your code adds up their gradients"
    ));
    Ok(ExitCode::from(code::EXPORT_INVALID))
}

/// A note for the user whose plan is one of several groups of replicas. `None` if it is the plan of a whole job.
fn of_one_group(path: &Path, loaded: &Opened) -> Option<String> {
    let (file, number) = opened::group(path)?;
    Some(format!(
        "this is group {number} of {} alone, with its share of {} sequences: your code must add up its gradients with those \
         of the other groups",
        file.display(),
        loaded.file.workload.global_batch
    ))
}

fn refused(
    args: &ExportArgs,
    loaded: &Opened,
    dialect: Dialect,
    refusals: &[Refusal],
) -> Result<ExitCode, CliError> {
    let nearest = nearest(loaded, dialect, refusals);
    let takes_model = !refusals.iter().any(|refusal| refusal.of_model);
    let packing = loaded.file.workload.packing.map(|packing| {
        let decision = format!("packing={packing}");
        match refusals.iter().any(|refusal| refusal.decision == decision) {
            true => export::packing_instead(dialect, &loaded.scenario.model),
            false => packing,
        }
    });
    let search = takes_model.then(|| search_command(&loaded.file, packing, dialect, refusals));
    let refusal = |r: &Refusal| RefusalJson {
        decision: r.decision.clone(),
        why: r.why.clone(),
        instead: (r.instead.as_ref()).map(|(key, value)| format!("{key}={value}")),
        taken_by: r.taken_by,
    };
    let all = refusals.iter().map(refusal).collect();
    print_refused(
        args,
        dialect,
        &loaded.file.id,
        all,
        [nearest.as_ref(), search.as_ref()],
    )?;
    let error = ExportError::Inexpressible {
        target: dialect.name(),
        refusals: refusals.to_vec(),
    };
    output::error(&error.to_string());
    if let Some(strategy) = nearest {
        output::error(&format!(
            "it can run this one: --runtime {} --strategy {strategy}",
            dialect.runtime()
        ));
    }
    if let Some(search) = search {
        output::error(&format!("or plan within its limits: {search}"));
    }
    Ok(ExitCode::from(code::EXPORT_INVALID))
}

/// The plan with the refused decisions replaced, if the target can express it and the target's runtime can run it.
fn nearest(loaded: &Opened, dialect: Dialect, refusals: &[Refusal]) -> Option<String> {
    let scenario = loaded.costs.scenario();
    let runtime = catalog::load::runtime(dialect.runtime()).ok()?;
    let model = scenario.model.clone().trained_under(&runtime);
    let mut refusals = refusals.to_vec();
    let mut decisions = loaded.strategy.decisions().clone();
    // Most runtimes overlap by themselves, and each in its way.
    if runtime.name != scenario.runtime.name {
        decisions.overlap = runtime.overlap;
    }
    let mut text = decisions.to_string();
    // Replacing one decision may cause another refusal; every round replaces at least one.
    for _ in 0..8 {
        let changes: Option<Vec<_>> = refusals.iter().map(|r| r.instead.clone()).collect();
        text = grammar::with(&text, &changes?);
        let (model, workload) = (&model, &scenario.workload);
        let strategy = grammar::parse(&text, model, workload, &runtime).ok()?;
        let job = Job {
            model,
            runtime: &runtime,
            ..job(loaded, &strategy, Inputs::default())
        };
        match export::export(&job, dialect, None) {
            Ok(_) => {
                let allowed = allowed_by(&strategy, model, &runtime, workload.precision);
                return allowed.is_ok().then(|| strategy.to_string());
            }
            Err(ExportError::Inexpressible { refusals: more, .. }) => refusals = more,
            Err(_) => return None,
        }
    }
    None
}

/// A search command whose best plan the target can express: its runtime within its limits, with refused sizes bounded
/// by the offered ones and with documents packed in this way.
fn search_command(
    file: &PlanFile,
    packing: Option<Packing>,
    dialect: Dialect,
    refusals: &[Refusal],
) -> String {
    let w = &file.workload;
    let refused = format!("precision {}", w.precision.name());
    let precision = match refusals.iter().any(|refusal| refusal.decision == refused) {
        true => Precision::Bf16,
        false => w.precision,
    };
    let known = dialect.limits(precision);
    let mut limits: Vec<String> = known
        .iter()
        .map(|(key, value)| format!(" --fix {}", escape::shell(&format!("{key}={value}"))))
        .collect();
    for (key, value) in refusals.iter().filter_map(|r| r.instead.as_ref()) {
        let size = planner::constraints::DIMENSIONS.contains(key);
        let limit = format!(" --max {}", escape::shell(&format!("{key}={value}")));
        if size && !known.iter().any(|(k, _)| k == key) && !limits.contains(&limit) {
            limits.push(limit);
        }
    }
    if let Some(adapters) = &file.adapters {
        limits.push(format!(" --lora {adapters}"));
    }
    if let (Some(lengths), Some(packing)) = (&w.lengths, packing) {
        limits.push(format!(
            " --lengths {} --packing {packing}",
            escape::shell(lengths)
        ));
    }
    let other = |share: &f64| *share != DEFAULT_HEADROOM;
    if let Some(headroom) = file.headroom.filter(other) {
        limits.push(format!(" --headroom {headroom}"));
    }
    let limits = limits.concat();
    format!(
        "vescale-plan search {} {} --gpus {} --seq {} --global-batch {} --precision {} --runtime {}{limits}",
        escape::option("model", &file.model),
        escape::option("cluster", &file.cluster),
        w.gpus,
        w.seq_len,
        w.global_batch,
        precision.name(),
        dialect.runtime(),
    )
}
