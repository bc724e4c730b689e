//! Checkpoints that are forged, damaged, of another run, or half written: what every command
//! prints, and that none takes more memory than the files have.

mod damaged;
mod forge;
mod forged;
mod runs;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Kibibytes of address space that a command gets: forged sizes ask for far more.
const MEMORY: u64 = 2 << 20;

/// A plan among the examples.
fn plan(name: &str) -> String {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    let path = examples.join(format!("nanogpt-{name}.yaml"));
    path.to_str().expect("a path in UTF-8").to_owned()
}

/// Runs the tool with limits of the shell's `ulimit`.
fn limited(folder: &Path, limits: &str, args: &[&str]) -> Output {
    Command::new("sh")
        .args(["-c", &format!("{limits} && exec \"$0\" \"$@\"")])
        .arg(env!("CARGO_BIN_EXE_vescale-plan"))
        .args(args)
        .current_dir(folder)
        .env("NO_COLOR", "1")
        .output()
        .expect("a shell")
}

/// Runs the tool in little memory.
fn run(folder: &Path, args: &[&str]) -> Output {
    limited(folder, &format!("ulimit -v {MEMORY}"), args)
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Trains two steps on two ranks and saves both; returns the folder of the second.
fn saved(folder: &Path) -> PathBuf {
    let args = ["--steps", "2", "--checkpoints", "saved", "--every", "1"];
    let output = run(
        folder,
        &[&["run", &plan("dp2-zero3"), "-q"], &args[..]].concat(),
    );
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    folder.join("saved/step-00000002")
}

/// Runs every command on a checkpoint's folder; returns its name, exit code and output.
fn every_command(folder: &Path, checkpoint: &str) -> Vec<(&'static str, Option<i32>, String)> {
    let single = plan("single");
    let commands: [(&str, Vec<&str>); 5] = [
        ("inspect", vec!["checkpoint", "inspect", checkpoint]),
        ("verify", vec!["checkpoint", "verify", checkpoint]),
        (
            "export",
            vec!["checkpoint", "export", checkpoint, "-o", "out.safetensors"],
        ),
        (
            "reshard",
            vec![
                "checkpoint",
                "reshard",
                checkpoint,
                "--plan",
                &single,
                "-o",
                "other",
                "-q",
            ],
        ),
        (
            "resume",
            vec![
                "run",
                &single,
                "--resume",
                checkpoint,
                "--steps",
                "3",
                "--force-resume",
                "-q",
            ],
        ),
    ];
    let ran = commands.into_iter().map(|(name, args)| {
        let output = run(folder, &args);
        let problems = String::from_utf8_lossy(&output.stdout).into_owned();
        let said = if name == "verify" {
            problems
        } else {
            String::new()
        };
        (name, output.status.code(), stderr(&output) + &said)
    });
    let ran = ran.collect();
    for left in ["out.safetensors", "other"] {
        let path = folder.join(left);
        assert!(!path.exists(), "{left} was left");
    }
    ran
}

/// Asserts that every command except those in `may` refuses the checkpoint: one line, exit code 2.
fn refused(folder: &Path, checkpoint: &str, case: &str, may: &[&str], says: &str) {
    let mut told = false;
    for (command, code, said) in every_command(folder, checkpoint) {
        if may.contains(&command) && code == Some(0) {
            continue;
        }
        assert_eq!(code, Some(2), "{case}, {command}: {said}");
        assert!(!said.contains("panicked"), "{case}, {command}: {said}");
        assert!(said.contains("step-00000002"), "{case}, {command}: {said}");
        told |= said.contains(says);
    }
    assert!(
        told,
        "{case}: nobody said {says:?}: {:#?}",
        every_command(folder, checkpoint)
    );
}
