//! Ctrl-C leaves the best so far.
#![cfg(unix)]

mod common;

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const INTERRUPTED: i32 = 130;

fn start(folder: &Path, args: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_vescale-plan"))
        .args(args)
        .current_dir(folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the binary starts")
}

fn interrupt(child: &Child) {
    let sent = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .expect("kill");
    assert!(sent.success());
}

#[test]
fn a_search_gives_the_best_that_it_has_found() {
    let folder = tempfile::tempdir().expect("folder");
    let args = "search --model llama3-70b --gpus 512 --runtime vescale --fix tp=4,pp=4 --exhaustive --json -q -o best.plan.yaml";
    let args: Vec<&str> = args.split(' ').collect();
    let mut child = start(folder.path(), &args);
    std::thread::sleep(Duration::from_secs(5));
    interrupt(&child);
    let mut text = String::new();
    let mut stdout = child.stdout.take().expect("piped");
    stdout.read_to_string(&mut text).expect("text");
    let status = child.wait().expect("ends");
    assert_eq!(status.code(), Some(INTERRUPTED), "{text}");
    let answer: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(answer["interrupted"], true);
    assert!(answer["best"]["strategy_text"].is_string(), "{text}");
    for (file, says) in [
        ("best.plan.yaml", "# The search was interrupted"),
        ("best.report.html", "interrupted: the best plan until then"),
    ] {
        let written = std::fs::read_to_string(folder.path().join(file)).expect(file);
        assert!(written.contains(says), "{file}");
    }
    let plan = Command::new(env!("CARGO_BIN_EXE_vescale-plan"))
        .args(["compare", "best.plan.yaml", "best.plan.yaml"])
        .current_dir(folder.path())
        .output()
        .expect("the binary starts");
    assert!(plan.status.success(), "{plan:?}");
}

#[test]
fn sizes_are_shown_as_they_are_found() {
    let folder = tempfile::tempdir().expect("folder");
    let args = [
        "size",
        "--model",
        "deepseek-v3",
        "--gpus",
        "8,96,512,1024,2048,4096,8192,16384",
        "-q",
    ];
    let mut child = start(folder.path(), &args);
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut line = || lines.next().map(|line| line.expect("text"));
    let header = line().expect("a header");
    assert!(header.starts_with("GPUs"), "{header}");
    let first = line().expect("a row");
    assert!(first.starts_with("8 "), "{first}");
    interrupt(&child);
    let rest: Vec<String> = std::iter::from_fn(line).collect();
    assert!(rest.len() < 9, "{rest:?}");
    let said = rest
        .iter()
        .any(|line| line.starts_with("Interrupted after "));
    assert!(said, "{rest:?}");
    assert_eq!(child.wait().expect("ends").code(), Some(INTERRUPTED));
}
