//! Runs the command under limits: of memory by `ulimit`, of time by a deadline.

#![allow(dead_code, reason = "not every test that shares this needs all of it")]

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Longest that a command may take, on a busy machine and without optimisation.
const DEADLINE: Duration = Duration::from_secs(30);
/// Address space that a command may have, in KiB.
const MEMORY: u64 = 6 << 20;

/// How a command ended.
pub struct Ended {
    /// Its exit code; none if a signal or the deadline ended it.
    pub code: Option<i32>,
    /// What it wrote to stdout.
    pub out: String,
    /// What it wrote to stderr.
    pub err: String,
}

/// Words of a command line; quotes hold a word together.
pub fn words(line: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut quoted = false;
    for part in line.split(' ') {
        let word = part.replace('\'', "");
        match words.last_mut() {
            Some(last) if quoted => {
                last.push(' ');
                last.push_str(&word);
            }
            _ if part.is_empty() => {}
            _ => words.push(word),
        }
        quoted ^= part.matches('\'').count() % 2 == 1;
    }
    words
}

/// Runs the command with arguments in a folder.
pub fn run(folder: &Path, args: &[&str]) -> Ended {
    let line = format!("ulimit -v {MEMORY}; exec \"$BIN\" \"$@\"");
    bash(folder, &line, args)
}

/// Runs a line of shell in which `$BIN` is the command.
#[allow(
    dead_code,
    reason = "one of the tests that share this does not need it"
)]
pub fn shell(folder: &Path, line: &str) -> Ended {
    bash(folder, line, &[])
}

fn bash(folder: &Path, line: &str, args: &[&str]) -> Ended {
    let beside = tempfile::tempdir().expect("a temporary folder");
    let at = |name: &str| beside.path().join(name);
    let file = |name: &str| Stdio::from(File::create(at(name)).expect("writable"));
    let mut child = Command::new("bash")
        .args(["-c", line, "bash"])
        .args(args)
        .env("BIN", env!("CARGO_BIN_EXE_vescale-plan"))
        .env("NO_COLOR", "1")
        .env("RUST_BACKTRACE", "0")
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(file("out"))
        .stderr(file("err"))
        .spawn()
        .expect("a shell");
    let deadline = Instant::now() + DEADLINE;
    let code = loop {
        match child.try_wait().expect("a child") {
            Some(status) => break status.code(),
            None if Instant::now() > deadline => {
                let _ = child.kill();
                let _ = child.wait();
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let text =
        |name: &str| String::from_utf8_lossy(&fs::read(at(name)).expect("readable")).into_owned();
    Ended {
        code,
        out: text("out"),
        err: text("err"),
    }
}

/// Judges items on two threads; returns what `judge` found, in the order of the items.
pub fn side_by_side<T: Sync>(
    items: &[T],
    judge: impl Fn(&T) -> Option<String> + Sync,
) -> Vec<String> {
    let next = Mutex::new(0usize);
    let found = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let at = {
                        let mut next = next.lock().expect("no panic");
                        *next += 1;
                        *next - 1
                    };
                    let Some(item) = items.get(at) else {
                        return;
                    };
                    if let Some(wrong) = judge(item) {
                        found.lock().expect("no panic").push((at, wrong));
                    }
                }
            });
        }
    });
    let mut found = found.into_inner().expect("no panic");
    found.sort();
    found.into_iter().map(|(_, wrong)| wrong).collect()
}

/// Names of everything in a folder.
#[allow(
    dead_code,
    reason = "one of the tests that share this does not need it"
)]
pub fn listing(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    names.sort();
    names
}
