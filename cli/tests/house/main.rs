//! House rules that a machine can check: who imports whom, how long files are, what is printed where.

mod circles;
mod functions;
mod layers;
mod numbers;
mod portable;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("cli lies in the workspace")
        .to_path_buf()
}

/// ARCHITECTURE.md's import table: a crate by its folder, the name that code has for it, and what it may import.
#[rustfmt::skip]
const MAY_IMPORT: &[(&str, &str, &[&str])] = &[
    ("catalog", "catalog", &[]),
    ("plans", "plans", &["catalog"]),
    ("interop", "interop", &["catalog", "plans"]),
    ("dtensor", "dtensor", &["catalog", "plans"]),
    ("models", "models", &["catalog", "plans", "dtensor"]),
    ("costmodel", "costmodel", &["catalog", "plans", "dtensor", "models"]),
    ("planner", "planner", &["catalog", "plans", "costmodel"]),
    ("comm", "comm", &[]),
    ("devices/cpu", "cpu_device", &["catalog", "dtensor", "comm"]),
    ("devices/cuda", "cuda_device", &["catalog", "dtensor", "comm", "cpu_device"]),
    ("profiler", "profiler", &["catalog", "dtensor", "comm", "cpu_device", "cuda_device"]),
    ("executor", "executor", &["catalog", "plans", "dtensor", "models", "comm", "cpu_device", "cuda_device"]),
    ("reports", "reports", &["catalog", "plans", "costmodel"]),
    ("answers", "answers", &["catalog", "plans", "interop", "models", "costmodel", "planner", "reports"]),
    ("accuracy", "accuracy", &["catalog", "plans", "costmodel", "interop", "planner", "reports", "answers"]),
    ("playground", "playground", &["answers", "catalog", "costmodel", "planner", "reports"]),
    ("python", "_native", &["catalog", "plans", "interop", "costmodel", "planner", "reports", "answers", "accuracy"]),
];

/// Folders of all crates that have sources.
fn crates() -> Vec<String> {
    let table = MAY_IMPORT.iter().map(|(folder, _, _)| (*folder).to_owned());
    table.chain(["cli", "fuzz"].map(str::to_owned)).collect()
}

/// Names in a manifest's `[dependencies]`.
fn dependencies(manifest: &str) -> Vec<String> {
    manifest
        .lines()
        .skip_while(|line| line.trim() != "[dependencies]")
        .skip(1)
        .take_while(|line| !line.starts_with('['))
        .filter_map(|line| line.split(['.', '=', ' ']).next())
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

#[test]
fn crates_import_only_what_the_table_allows() {
    let ours: Vec<&str> = MAY_IMPORT.iter().map(|(_, name, _)| *name).collect();
    for (folder, name, allowed) in MAY_IMPORT {
        let manifest =
            fs::read_to_string(root().join(folder).join("Cargo.toml")).expect("manifest");
        // Tools that read manifests see the same arrows as code.
        assert!(
            manifest.contains(&format!("[lib]\nname = \"{name}\"")),
            "{folder}"
        );
        for dependency in dependencies(&manifest) {
            let ok = !ours.contains(&dependency.as_str()) || allowed.contains(&dependency.as_str());
            assert!(
                ok,
                "{folder} may not import {dependency}; see ARCHITECTURE.md"
            );
        }
    }
}

fn sources(folder: &Path, found: &mut BTreeMap<PathBuf, String>) {
    for entry in fs::read_dir(folder).expect("readable folder").flatten() {
        let path = entry.path();
        let name = entry.file_name();
        if path.is_dir() && name != "target" && name != ".git" {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.insert(
                path.clone(),
                fs::read_to_string(&path).expect("readable file"),
            );
        }
    }
}

fn all_sources() -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    sources(&root(), &mut found);
    assert!(found.len() > 50);
    found
}

#[test]
fn files_stay_short() {
    for (path, text) in all_sources() {
        assert!(
            text.lines().count() <= 600,
            "{} is over 600 lines",
            path.display()
        );
    }
}

#[test]
fn every_file_says_what_it_is() {
    for (path, text) in all_sources() {
        assert!(
            text.starts_with("//!"),
            "{} has no module documentation",
            path.display()
        );
    }
}

#[test]
fn only_binaries_print_and_the_cost_model_is_pure() {
    let print = ["print!(", "println!(", "eprint!(", "eprintln!("];
    let impure = [
        "std::fs",
        "std::env",
        "std::time",
        "std::net",
        "rand::",
        "static mut",
        "thread_local!",
    ];
    // What decides a prediction or its judgement is an argument, never a variable of the shell.
    let no_environment = [
        "accuracy/",
        "catalog/",
        "plans/",
        "dtensor/",
        "models/",
        "interop/",
        "reports/",
    ];
    for (path, text) in all_sources() {
        let relative = path
            .strip_prefix(root())
            .expect("below the root")
            .display()
            .to_string();
        if !relative.contains("/src/") {
            continue;
        }
        if !["cli/src/output.rs", "fuzz/src/main.rs"].contains(&relative.as_str()) {
            for word in print {
                assert!(!text.contains(word), "{relative} prints");
            }
        }
        if relative.starts_with("costmodel/") || relative.starts_with("planner/") {
            for word in impure {
                assert!(!text.contains(word), "{relative} uses {word}");
            }
        }
        if no_environment.iter().any(|part| relative.starts_with(part)) {
            assert!(
                !text.contains("env::var"),
                "{relative} reads the environment"
            );
        }
    }
}

/// A macro that prints panics where the stream is closed; `output` asks instead. What may be lost or
/// overwritten goes through `catalog::files`, but for checkpoints, which are folders of many files.
#[test]
fn files_and_streams_are_written_in_one_place_each() {
    let streams = ["stdout()", "stderr()"];
    let writes = [
        "fs::write(",
        "File::create(",
        "OpenOptions",
        "NamedTempFile",
        "tempfile_in(",
        "tempdir_in(",
    ];
    // Compiled kernels are a cache, which nobody else reads; inputs of the fuzzer lie in temporary folders.
    // The secret of a host's ranks is a file that only its user can read.
    let may_write = [
        "comm/src/secret.rs",
        "fuzz/src/",
        "catalog/src/files/",
        "executor/src/checkpoint/",
        "devices/cuda/src/compile.rs",
    ];
    for (path, text) in all_sources() {
        let relative = path
            .strip_prefix(root())
            .expect("below the root")
            .display()
            .to_string();
        let code = text.split("#[cfg(test)]").next().expect("some text");
        if !relative.contains("/src/") {
            continue;
        }
        if relative != "cli/src/output.rs" && relative != "fuzz/src/main.rs" {
            for word in streams {
                let only_asks = |line: &str| line.contains("is_terminal()");
                let writes = code.lines().any(|l| l.contains(word) && !only_asks(l));
                assert!(!writes, "{relative} writes to {word}");
            }
        }
        if !may_write.iter().any(|folder| relative.starts_with(folder)) {
            for word in writes {
                assert!(!code.contains(word), "{relative} writes files by {word}");
            }
        }
    }
}

#[test]
fn no_stubs() {
    let words = [
        concat!("todo", "!("),
        concat!("unimplemented", "!("),
        concat!("FIX", "ME"),
        concat!("#[", "ignore"),
    ];
    for (path, text) in all_sources() {
        for word in words {
            assert!(!text.contains(word), "{}: {word}", path.display());
        }
    }
}
