//! The binary, started as a user starts it.
#![allow(dead_code, reason = "each test file uses a part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

const BINARY: &str = env!("CARGO_BIN_EXE_vescale-plan");

pub(crate) fn run(folder: &Path, args: &[&str]) -> Output {
    Command::new(BINARY)
        .args(args)
        .current_dir(folder)
        .env("NO_COLOR", "1")
        .output()
        .expect("the binary starts")
}

/// A line of shell, with the binary on the path.
pub(crate) fn shell(folder: &Path, line: &str) -> Output {
    let here = Path::new(BINARY).parent().expect("a folder");
    let path = std::env::var("PATH").unwrap_or_default();
    Command::new("sh")
        .args(["-c", line])
        .current_dir(folder)
        .env("NO_COLOR", "1")
        .env("PATH", format!("{}:{path}", here.display()))
        .output()
        .expect("the shell starts")
}

pub(crate) fn code(output: &Output) -> i32 {
    output.status.code().expect("ended by itself")
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub(crate) fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", stderr(output)))
}

/// The shipped examples.
pub(crate) fn examples() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    root.expect("the workspace").join("examples")
}

/// A small plan.
pub(crate) fn estimate(folder: &Path, name: &str) {
    let args = [
        "estimate",
        "--model",
        "llama3-8b",
        "--gpus",
        "8",
        "--seq",
        "4096",
        "--global-batch",
        "32",
        "--strategy",
        "tp=4,zero=1",
        "-o",
        name,
    ];
    let output = run(folder, &args);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
}
