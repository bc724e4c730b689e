//! Runs the command of every question in docs/questions.md and checks that its answer holds what the table says.

mod common;

use std::fs;
use std::path::Path;

use common::{shell, stderr};

/// The text of a table cell without its backquotes.
fn code(cell: &str) -> String {
    let cell = cell.trim();
    let ticks = cell.chars().take_while(|c| *c == '`').count();
    cell[ticks..cell.len() - ticks].trim().to_owned()
}

/// A Megatron-LM log of a job slower than its plan.
fn log() -> String {
    let step = |step: u32| {
        let time = 9000 + 100 * (step % 3);
        format!(
            " [2026-05-01 12:00:00] iteration {step:8}/     500 | consumed samples: 1 | elapsed time per iteration (ms): {time}.0 | global batch size:   512 | loss scale: 1.0 |\n"
        )
    };
    (1..=30).map(step).collect()
}

/// The text of all HTML pages in a folder.
fn pages(folder: &Path) -> String {
    let files = fs::read_dir(folder).expect("a folder").flatten();
    let pages = files.filter(|f| f.path().extension().is_some_and(|e| e == "html"));
    pages
        .filter_map(|f| fs::read_to_string(f.path()).ok())
        .collect()
}

#[test]
fn every_question_is_answered() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = fs::read_to_string(root.join("docs/questions.md")).expect("the page");
    let folder = tempfile::tempdir().expect("a folder");
    let at = folder.path();
    #[cfg(unix)]
    std::os::unix::fs::symlink(common::examples(), at.join("examples")).expect("a link");
    fs::write(at.join("train.log"), log()).expect("written");
    let rows: Vec<Vec<&str>> = page
        .lines()
        .filter(|line| line.starts_with("| ") && line.contains("vescale-plan"))
        .map(|line| line.trim_matches('|').split(" | ").collect())
        .collect();
    assert_eq!(rows.len(), 31);
    let mut wrong = Vec::new();
    for row in rows {
        let (command, says) = (code(row[2]), code(row[3]));
        let output = shell(at, &command);
        let said = format!(
            "{}{}{}",
            String::from_utf8_lossy(&output.stdout),
            stderr(&output),
            pages(at)
        );
        if !said.contains(&says) {
            wrong.push(format!("{command}\n  does not say `{says}`: {said:.600}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
