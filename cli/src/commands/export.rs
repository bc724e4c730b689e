//! `export`: a plan as a training system's configuration.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use plans::export::{self, Dialect, ExportError, Exported, ExportedFile, Job, Launcher, Refusal};
use plans::{Strategy, grammar};
use serde::Serialize;

use crate::commands::import::document;
use crate::commands::plan::{self, Loaded};
use crate::error::{CliError, code};
use crate::exchange_args::{ExportArgs, LauncherArg};
use crate::output::{self, SCHEMA_VERSION};

#[derive(Serialize)]
struct ExportJson {
    schema_version: u32,
    target: String,
    plan: String,
    files: Vec<FileJson>,
    notes: Vec<String>,
}

#[derive(Serialize)]
struct FileJson {
    name: String,
    path: Option<String>,
    text: String,
}

#[derive(Serialize)]
struct RefusedJson {
    schema_version: u32,
    target: String,
    plan: String,
    refused: Vec<RefusalJson>,
    nearest: Option<String>,
    search: String,
}

#[derive(Serialize)]
struct RefusalJson {
    decision: String,
    why: String,
    instead: Option<String>,
}

/// Runs `export`.
pub(crate) fn run(args: &ExportArgs) -> Result<ExitCode, CliError> {
    let dialect = args.to.as_deref().map(Dialect::parse).transpose()?;
    if let Some(file) = &args.check {
        return checked(args, file, dialect);
    }
    // The command line asks for both unless a file is checked.
    let (Some(dialect), Some(path)) = (dialect, &args.plan) else {
        return crate::inputs::usage("a plan and --to are needed".to_owned());
    };
    let loaded = plan::load(path)?;
    let launcher = args.launcher.map(|launcher| match launcher {
        LauncherArg::Torchrun => Launcher::Torchrun,
        LauncherArg::Slurm => Launcher::Slurm,
        LauncherArg::Kubernetes => Launcher::Kubernetes,
    });
    match exported(&loaded, &loaded.strategy, dialect, launcher) {
        Ok(exported) => finish(args, &loaded, dialect, &exported),
        Err(ExportError::Inexpressible { refusals, .. }) => {
            refused(args, &loaded, dialect, &refusals)
        }
        Err(error) => Err(error.into()),
    }
}

#[derive(Serialize)]
struct CheckJson {
    schema_version: u32,
    file: String,
    target: String,
    findings: Vec<FindingJson>,
}

#[derive(Serialize)]
struct FindingJson {
    line: usize,
    key: String,
    message: String,
}

/// Checks a configuration; exit code 4 when anything is wrong.
fn checked(args: &ExportArgs, file: &Path, dialect: Option<Dialect>) -> Result<ExitCode, CliError> {
    let document = document(file, dialect)?;
    let model = args.model.as_deref().map(spec::load::model).transpose()?;
    let findings = plans::check::check(&document, model.as_deref())?;
    if args.format.json {
        output::json(&CheckJson {
            schema_version: SCHEMA_VERSION,
            file: document.path.clone(),
            target: document.dialect.name(),
            findings: findings
                .iter()
                .map(|f| FindingJson {
                    line: f.line,
                    key: f.key.clone(),
                    message: f.message.clone(),
                })
                .collect(),
        })?;
    } else {
        for finding in &findings {
            output::print(&format!("{finding}\n"));
        }
        let name = document.dialect.name();
        let verdict = match findings.len() {
            0 => format!("{}: fit for {name}", document.path),
            1 => format!("{}: 1 thing is wrong for {name}", document.path),
            n => format!("{}: {n} things are wrong for {name}", document.path),
        };
        output::note(args.format.quiet, &verdict);
    }
    Ok(if findings.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(code::EXPORT_INVALID)
    })
}

fn exported(
    loaded: &Loaded,
    strategy: &Strategy,
    dialect: Dialect,
    launcher: Option<Launcher>,
) -> Result<Exported, ExportError> {
    let scenario = loaded.costs.scenario();
    let job = Job {
        model: &scenario.model,
        model_name: &loaded.file.model,
        decisions: strategy.decisions(),
        workload: &scenario.workload,
        runtime: &loaded.file.runtime,
        sharding: &loaded.file.sharding,
        id: &loaded.file.id,
        gpus_per_node: scenario.cluster.gpus_per_node,
    };
    export::export(&job, dialect, launcher)
}

fn finish(
    args: &ExportArgs,
    loaded: &Loaded,
    dialect: Dialect,
    exported: &Exported,
) -> Result<ExitCode, CliError> {
    if let Some(folder) = &args.output {
        write(folder, &exported.files)?;
    }
    for note in &exported.notes {
        output::note(args.format.quiet, &format!("note: {note}"));
    }
    let path = |file: &ExportedFile| args.output.as_ref().map(|folder| folder.join(&file.name));
    if args.format.json {
        output::json(&ExportJson {
            schema_version: SCHEMA_VERSION,
            target: dialect.name(),
            plan: loaded.file.id.clone(),
            files: exported
                .files
                .iter()
                .map(|f| FileJson {
                    name: f.name.clone(),
                    path: path(f).map(|p| p.display().to_string()),
                    text: f.text.clone(),
                })
                .collect(),
            notes: exported.notes.clone(),
        })?;
    } else if args.output.is_some() {
        for path in exported.files.iter().filter_map(path) {
            output::note(args.format.quiet, &path.display().to_string());
        }
    } else {
        let several = exported.files.len() > 1;
        for file in &exported.files {
            if several {
                output::print(&format!("==> {} <==\n", file.name));
            }
            output::print(&file.text);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes all files or none: into a temporary folder beside the target, then moved.
fn write(folder: &Path, files: &[ExportedFile]) -> Result<(), CliError> {
    let failed = |path: &Path, reason: std::io::Error| CliError::Write {
        path: path.display().to_string(),
        reason: reason.to_string(),
    };
    let parent = folder.parent().filter(|p| !p.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    let staged = tempfile::tempdir_in(parent).map_err(|e| failed(folder, e))?;
    for file in files {
        let path = staged.path().join(&file.name);
        std::fs::write(&path, &file.text).map_err(|e| failed(&path, e))?;
        set_mode(&path, if file.executable { 0o755 } else { 0o644 });
    }
    if !folder.exists() {
        let whole = staged.keep();
        set_mode(&whole, 0o755);
        return std::fs::rename(&whole, folder).map_err(|e| {
            // The folder could not be put in place; nothing of it may stay.
            let _ = std::fs::remove_dir_all(&whole);
            failed(folder, e)
        });
    }
    let targets: Vec<PathBuf> = files.iter().map(|f| folder.join(&f.name)).collect();
    if let Some(taken) = targets.iter().find(|path| path.is_dir()) {
        let reason = std::io::Error::other("it is a folder");
        return Err(failed(taken, reason));
    }
    for (file, target) in files.iter().zip(&targets) {
        let from = staged.path().join(&file.name);
        std::fs::rename(&from, target).map_err(|e| failed(target, e))?;
    }
    Ok(())
}

#[cfg(unix)]
fn set_mode(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    // A file system without modes is no reason to fail.
    let _ = std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode));
}

#[cfg(not(unix))]
fn set_mode(_: &Path, _: u32) {}

fn refused(
    args: &ExportArgs,
    loaded: &Loaded,
    dialect: Dialect,
    refusals: &[Refusal],
) -> Result<ExitCode, CliError> {
    let nearest = nearest(loaded, dialect, refusals);
    let search = search_command(loaded, dialect, refusals);
    if args.format.json {
        output::json(&RefusedJson {
            schema_version: SCHEMA_VERSION,
            target: dialect.name(),
            plan: loaded.file.id.clone(),
            refused: refusals
                .iter()
                .map(|r| RefusalJson {
                    decision: r.decision.clone(),
                    why: r.why.clone(),
                    instead: r
                        .instead
                        .as_ref()
                        .map(|(key, value)| format!("{key}={value}")),
                })
                .collect(),
            nearest: nearest.clone(),
            search: search.clone(),
        })?;
    }
    let error = ExportError::Inexpressible {
        target: dialect.name(),
        refusals: refusals.to_vec(),
    };
    output::error(&error.to_string());
    if let Some(strategy) = nearest {
        output::error(&format!("it can run this one: --strategy {strategy}"));
    }
    output::error(&format!("or plan within its limits: {search}"));
    Ok(ExitCode::from(code::EXPORT_INVALID))
}

/// The plan with the refused decisions replaced, when that is a legal plan which the target takes.
fn nearest(loaded: &Loaded, dialect: Dialect, refusals: &[Refusal]) -> Option<String> {
    let scenario = loaded.costs.scenario();
    let mut refusals = refusals.to_vec();
    let mut text = loaded.strategy.to_string();
    // Replacing one decision may bring up the next; every round replaces at least one.
    for _ in 0..8 {
        let changes: Option<Vec<_>> = refusals.iter().map(|r| r.instead.clone()).collect();
        text = grammar::with(&text, &changes?);
        let s = grammar::parse(
            &text,
            &scenario.model,
            &scenario.workload,
            &scenario.runtime,
        );
        let strategy = s.ok()?;
        match exported(loaded, &strategy, dialect, None) {
            Ok(_) => return Some(strategy.to_string()),
            Err(ExportError::Inexpressible { refusals: more, .. }) => refusals = more,
            Err(_) => return None,
        }
    }
    None
}

/// A search whose best plan the target takes: its runtime within its limits, and the sizes that were
/// refused bounded by what was offered instead.
fn search_command(loaded: &Loaded, dialect: Dialect, refusals: &[Refusal]) -> String {
    let w = &loaded.file.workload;
    let known = dialect.limits();
    let quoted = |value: &str| {
        if value.contains('|') {
            format!("'{value}'")
        } else {
            value.to_owned()
        }
    };
    let mut limits: Vec<String> = known
        .iter()
        .map(|(key, value)| format!(" --fix {key}={}", quoted(value)))
        .collect();
    for (key, value) in refusals.iter().filter_map(|r| r.instead.as_ref()) {
        let size = planner::constraints::DIMENSIONS.contains(key);
        let limit = format!(" --max {key}={value}");
        if size && !known.iter().any(|(k, _)| k == key) && !limits.contains(&limit) {
            limits.push(limit);
        }
    }
    let limits = limits.concat();
    format!(
        "vescale-plan search --model {} --cluster {} --gpus {} --seq {} --global-batch {} --precision {} --runtime {}{limits}",
        loaded.file.model,
        loaded.file.cluster,
        w.gpus,
        w.seq_len,
        w.global_batch,
        format!("{:?}", w.precision).to_lowercase(),
        dialect.runtime(),
    )
}
