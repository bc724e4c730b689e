//! Executes exported launch scripts: whatever a model's folder is called, they start the training
//! and nothing else.
#![cfg(unix)]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use common::{code, run, stderr};

/// Names of model folders that some format would act on. None has control characters: those are refused.
const NAMES: [&str; 9] = [
    "plain",
    "$(touch PWNED)",
    "`touch PWNED`",
    "a'; touch PWNED; '",
    "a\"; touch PWNED; \"",
    "x && touch PWNED",
    "a\\' ; touch PWNED #",
    "'''\"\"\"${x}",
    "</script><script>touch PWNED",
];

/// Each target with a strategy that it can express.
const TARGETS: [(&str, &str); 10] = [
    ("megatron-lm", "tp=2,zero=1"),
    ("megatron-bridge", "tp=2,zero=1"),
    ("torchtitan@0.3", "tp=2,zero=3"),
    ("torchtitan@0.2", "tp=2,zero=3"),
    ("torchtitan@main", "tp=2,zero=3"),
    ("deepspeed", "zero=1"),
    ("accelerate", "zero=3,reshard=off"),
    ("axolotl", "zero=3,reshard=off"),
    ("nanotron", "tp=2,zero=0"),
    ("vescale", "tp=2,zero=1"),
];

/// A program that writes down that it ran, by its name and arguments.
fn recording(folder: &Path, name: &str, then: &str) {
    let path = folder.join(name);
    let script = format!("#!/bin/sh\necho {name} >> \"$RECORD\"\n{then}\n");
    fs::write(&path, script).expect("a script");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("modes");
}

/// Puts the recording programs where `started` looks for them.
fn programs(root: &Path) {
    fs::create_dir(root.join("bin")).expect("folder");
    for name in ["torchrun", "accelerate"] {
        recording(&root.join("bin"), name, "");
    }
    recording(&root.join("bin"), "srun", "shift; exec \"$@\"");
    recording(&root.join("bin"), "scontrol", "echo host0");
}

/// Runs a script on a path with recording programs only; returns the commands it started.
fn started(root: &Path, out: &str, script: &str) -> Vec<String> {
    let record = root.join("record");
    fs::write(&record, "").expect("a record");
    let system = "/usr/bin:/bin";
    let output = Command::new("bash")
        .arg(Path::new(out).join(script))
        .current_dir(root)
        .env_clear()
        .env("PATH", format!("{}:{system}", root.join("bin").display()))
        .env("RECORD", &record)
        .env("SLURM_SUBMIT_DIR", root.join(out))
        .env("SLURM_JOB_NODELIST", "host0")
        .env("SLURM_NODEID", "0")
        .env("TRAIN_SCRIPT", "train.py")
        .env("RECIPE", "module:function")
        .output()
        .expect("bash starts");
    assert_eq!(code(&output), 0, "{script}: {}", stderr(&output));
    let record = fs::read_to_string(&record).expect("a record");
    record.lines().map(str::to_owned).collect()
}

#[test]
fn launch_scripts_start_ranks_and_nothing_else() {
    let folder = tempfile::tempdir().expect("folder");
    let root = folder.path();
    programs(root);
    let all = NAMES.concat();
    let few = TARGETS
        .iter()
        .filter(|(target, _)| ["megatron-lm", "axolotl"].contains(target));
    let each = NAMES
        .iter()
        .flat_map(|name| few.clone().map(move |target| (*name, target)));
    let cases = TARGETS.iter().map(|target| (&all[..], target)).chain(each);
    for (name, (target, strategy)) in cases {
        let model = name.replace('/', "∕");
        model_folder(root, &model, target);
        exported(root, &model, target, strategy, "out", Some(name));
        let expected = if *target == "accelerate" {
            "accelerate"
        } else {
            "torchrun"
        };
        let direct = started(root, "out", "launch.sh");
        assert_eq!(direct, [expected], "{target} {name}");
        let slurm = started(root, "out", "launch.sbatch");
        assert_eq!(slurm, ["scontrol", "srun", expected], "{target} {name}");
        for folder in [root.to_path_buf(), root.join("out"), root.join("bin")] {
            assert!(!folder.join("PWNED").exists(), "{target} {name}");
        }
    }
}

#[test]
fn scripts_start_from_a_folder_of_any_name() {
    let folder = tempfile::tempdir().expect("folder");
    let root = folder.path();
    programs(root);
    for (target, strategy) in TARGETS {
        model_folder(root, "llama", target);
        for name in NAMES {
            let out = name.replace('/', "∕");
            exported(root, "llama", target, strategy, &out, Some("given"));
            let expected = if target == "accelerate" {
                "accelerate"
            } else {
                "torchrun"
            };
            assert_eq!(
                started(root, &out, "launch.sh"),
                [expected],
                "{target} {out}"
            );
            let slurm = started(root, &out, "launch.sbatch");
            assert_eq!(slurm, ["scontrol", "srun", expected], "{target} {out}");
            assert!(!root.join("PWNED").exists(), "{target} {out}");
            fs::remove_dir_all(root.join(&out)).expect("removed");
        }
    }
}

/// A script stops, with a message, while an input is still to be filled in.
#[test]
fn scripts_stop_until_they_are_filled_in() {
    let folder = tempfile::tempdir().expect("folder");
    let root = folder.path();
    programs(root);
    for target in ["megatron-lm", "torchtitan@0.3", "axolotl", "nanotron"] {
        let (_, strategy) = TARGETS
            .iter()
            .find(|(name, _)| *name == target)
            .expect("a row");
        model_folder(root, "llama", target);
        exported(root, "llama", target, strategy, "out", None);
        let output = Command::new("bash")
            .arg("out/launch.sh")
            .current_dir(root)
            .env("RECORD", root.join("record"))
            .output()
            .expect("bash starts");
        assert_eq!(code(&output), 1, "{target}");
        assert!(stderr(&output).contains("FILL_IN_"), "{}", stderr(&output));
        fs::remove_dir_all(root.join("out")).expect("removed");
    }
}

/// A folder with the model that a target takes: torchtitan trains those of its registries.
fn model_folder(root: &Path, name: &str, target: &str) {
    let config = if target.starts_with("torchtitan") {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../catalog/presets/models/llama3-8b.json")
    } else {
        common::examples().join("llama/config.json")
    };
    fs::create_dir_all(root.join(name)).expect("folder");
    fs::copy(config, root.join(name).join("config.json")).expect("config");
}

/// Exports a plan for a model folder with both kinds of script; tokenizer, data and hub name are `given`, or left open.
fn exported(
    root: &Path,
    model: &str,
    target: &str,
    strategy: &str,
    out: &str,
    given: Option<&str>,
) {
    let runtime = "vescale";
    let strategy = format!("{strategy},mbs=1,overlap=grad+param+pp");
    let estimate = [
        "estimate",
        "-q",
        "--model",
        model,
        "--gpus",
        "4",
        "--seq",
        "64",
        "--global-batch",
        "16",
        "--runtime",
        runtime,
        "--strategy",
        &strategy,
        "-o",
        "a.yaml",
        "--force",
    ];
    let output = run(root, &estimate);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    for launcher in ["torchrun", "slurm"] {
        let mut export = vec![
            "export",
            "a.yaml",
            "--to",
            target,
            "--launcher",
            launcher,
            "-o",
            out,
            "--force",
            "-q",
        ];
        if let Some(given) = given {
            for option in ["--tokenizer", "--data", "--hf-id"] {
                export.extend([option, given]);
            }
        }
        let output = run(root, &export);
        assert_eq!(code(&output), 0, "{target}: {}", stderr(&output));
    }
    // No option gives axolotl's learning rate.
    let file = root.join(out).join("axolotl.yaml");
    if let (Some(_), Ok(text)) = (given, fs::read_to_string(&file)) {
        fs::write(file, text.replace("FILL_IN_LEARNING_RATE", "1e-5")).expect("written");
    }
}
