//! Commands under a pseudo-terminal, as a user sees them: lines fit its width, colours come and go as asked, and long work
//! shows at once that it has begun. The terminal is made by util-linux's `script`; where that is missing, these tests say so
//! and check nothing.

mod common;

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use regex::Regex;

/// Commands of a first session, in order: the second to fourth read the plan that the first writes.
const SESSION: [&str; 8] = [
    "search --model llama3-8b --gpus 16 --max pp=2 -o a.plan.yaml --force",
    "estimate --model llama3-8b --gpus 8 --strategy tp2,mbs1 --tokens 1T",
    "explain a.plan.yaml --why-not tp=8 --explain-terms",
    "compare a.plan.yaml a.plan.yaml",
    "size --model gpt2 --gpus 1,2 --tokens 1T",
    "models",
    "search --model llama3-8b --gpus 16 --fix tp=3",
    "search --help",
];

/// What `doc` shows, which has no colours.
const DOC: [&str; 7] = [
    "doc",
    "doc strategies",
    "doc constraints",
    "doc clusters",
    "doc models",
    "doc settings",
    "doc exit-codes",
];

/// Whether a `script` with the options that these tests need is installed.
fn script_is_there() -> bool {
    let version = Command::new("script").arg("--version").output();
    let there = version.is_ok_and(|v| String::from_utf8_lossy(&v.stdout).contains("util-linux"));
    if !there {
        println!("skipped: no `script` of util-linux");
    }
    there
}

/// Starts a command with a terminal of `columns` columns as its input, output and messages.
fn start(folder: &Path, columns: u16, no_color: bool, line: &str) -> Child {
    let binary = env!("CARGO_BIN_EXE_vescale-plan");
    let inside = format!("stty columns {columns} rows 50 && exec '{binary}' {line}");
    let mut command = Command::new("script");
    command
        .args([
            "--quiet",
            "--return",
            "--flush",
            "--command",
            &inside,
            "/dev/null",
        ])
        .current_dir(folder)
        .env("SHELL", "/bin/sh")
        .env("TERM", "xterm-256color")
        .env_remove("COLUMNS")
        .env_remove("NO_COLOR")
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    if no_color {
        command.env("NO_COLOR", "1");
    }
    command.spawn().expect("script starts")
}

/// All that a command shows.
fn shown(folder: &Path, columns: u16, no_color: bool, line: &str) -> String {
    let output = start(folder, columns, no_color, line);
    let output = output.wait_with_output().expect("ends");
    let code = common::code(&output);
    let text = String::from_utf8(output.stdout).expect("text");
    assert!([0, 2].contains(&code), "{line}: {code}: {text}");
    text
}

/// Text without the sequences that colour it, move the cursor or clear a line.
fn plain(text: &str) -> String {
    let control = Regex::new("\u{1b}\\[[0-9;?]*[A-Za-z]").expect("a pattern");
    control.replace_all(text, "").into_owned()
}

/// Whether a line can be no shorter: it is one word, one option with its quoted value, or clap's line of usage.
fn unbreakable(line: &str) -> bool {
    let line = line.trim().trim_end_matches(" \\");
    let words = line.split_whitespace().count();
    let option = line.starts_with("--") && line.matches('\'').count() == 2 && line.ends_with('\'');
    words == 1 || option || line.starts_with("Usage: ")
}

#[test]
fn lines_fit_the_terminal() {
    if !script_is_there() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let mut wide = Vec::new();
    for columns in [60, 80, 120, 200] {
        for command in SESSION.into_iter().chain(DOC) {
            let text = plain(&shown(folder.path(), columns, false, command));
            // A progress bar returns to the start of its line.
            let lines = text.split(['\n', '\r']);
            let long = lines.filter(|line| line.chars().count() > usize::from(columns));
            let long = long.filter(|line| !unbreakable(line));
            wide.extend(long.map(|line| format!("{command} on {columns}: {line}")));
        }
    }
    assert!(wide.is_empty(), "{}", wide.join("\n"));
}

#[test]
fn a_terminal_is_coloured_unless_no_color_is_set() {
    if !script_is_there() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let colour = Regex::new("\u{1b}\\[[0-9;]*m").expect("a pattern");
    for command in SESSION {
        let coloured = shown(folder.path(), 80, false, command);
        let has_colours = colour.is_match(&coloured);
        let table = command.starts_with("models") || command.starts_with("compare");
        assert!(has_colours || table, "{command}: {coloured}");
        let without = shown(folder.path(), 80, true, command);
        assert!(!colour.is_match(&without), "{command}: {without}");
    }
}

/// On an idle machine a release build shows its progress bar well within half a second; the limit allows for slow builds
/// on busy machines.
#[test]
fn long_work_shows_progress_at_once() {
    const LIMIT: Duration = Duration::from_secs(10);
    if !script_is_there() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let began = Instant::now();
    let mut sizing = start(folder.path(), 80, false, "size --model deepseek-v3");
    let mut screen = sizing.stdout.take().expect("piped");
    let mut written = Vec::new();
    let mut bytes = [0; 256];
    while !String::from_utf8_lossy(&written).contains("sizing") {
        let count = screen.read(&mut bytes).expect("a screen");
        assert!(count > 0, "ended without progress");
        written.extend(&bytes[..count]);
    }
    let waited = began.elapsed();
    sizing.kill().expect("still at work");
    sizing.wait().expect("ends");
    println!("progress after {waited:?}");
    assert!(waited < LIMIT, "progress after {waited:?}");
}
