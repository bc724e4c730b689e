//! The README shows a command and its output; this test runs the command and compares.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::{code, stderr};

/// Width of the terminal, in columns, for which the README shows the output.
const COLUMNS: &str = "96";

#[test]
fn the_readme_shows_what_its_command_prints() {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let readme = fs::read_to_string(readme).expect("the README");
    let block = |language: &str| {
        let start = format!("```{language}\n");
        let (_, rest) = readme.split_once(&start).expect("a block");
        rest.split_once("```").expect("its end").0.to_owned()
    };
    let commands = block("sh");
    let asked = commands
        .lines()
        .find_map(|line| line.strip_prefix("vescale-plan "));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let output = Command::new(env!("CARGO_BIN_EXE_vescale-plan"))
        .args(asked.expect("a command").split(' '))
        .current_dir(folder.path())
        .env("COLUMNS", COLUMNS)
        .env("NO_COLOR", "1")
        .output()
        .expect("the binary starts");
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let printed = String::from_utf8(output.stdout).expect("text");
    let mut printed = printed.lines();
    for shown in block("text").lines().filter(|line| line.trim() != "…") {
        assert!(printed.any(|line| line == shown), "not printed: {shown:?}");
    }
}
