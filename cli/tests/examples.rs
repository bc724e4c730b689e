//! The examples of all help pages run as printed, in one folder, one after another.

mod common;

use std::fs;
use std::path::Path;

use common::{code, run, shell, stderr};

/// Names of the subcommands that a help page lists.
fn below(help: &str) -> Vec<String> {
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    listed
        .take_while(|line| !line.is_empty())
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|command| *command != "help")
        .map(str::to_owned)
        .collect()
}

/// Adds to `found` the examples in the help of a command and of all its subcommands.
fn examples(folder: &Path, command: &[String], found: &mut Vec<String>) {
    let mut args: Vec<&str> = command.iter().map(String::as_str).collect();
    args.push("--help");
    let output = run(folder, &args);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let page = String::from_utf8(output.stdout).expect("help is text");
    let listed = page.split("Examples:\n").nth(1).unwrap_or_default();
    let lines: Vec<String> = listed
        .lines()
        .filter(|line| line.contains("vescale-plan"))
        .map(|line| line.trim().to_owned())
        .collect();
    assert_eq!(lines.len(), 2, "{command:?} has two examples: {page}");
    let called = ["vescale-plan"]
        .into_iter()
        .chain(command.iter().map(String::as_str));
    let called = called.collect::<Vec<_>>().join(" ");
    assert!(
        lines.iter().all(|line| line.contains(&called)),
        "`{called}` has no examples of its own in cli/src/args/examples.rs: {lines:?}"
    );
    found.extend(lines);
    for sub in below(&page) {
        examples(folder, &[command, &[sub]].concat(), found);
    }
}

/// A Megatron-LM log of the job that `best.plan.yaml` plans.
fn log() -> String {
    let step = |step: u32| {
        format!(
            " [2026-05-01 12:00:00] iteration {step:8}/     500 | consumed samples: 1 | elapsed time per iteration (ms): {}.0 | global batch size:   512 | loss scale: 1.0 |\n",
            60_000 + 100 * (step % 3)
        )
    };
    (1..=30).map(step).collect()
}

#[test]
fn every_example_runs() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = folder.path();
    #[cfg(unix)]
    std::os::unix::fs::symlink(common::examples(), at.join("examples")).expect("a link");
    fs::write(at.join("train.log"), log()).expect("written");
    let mut lines = Vec::new();
    examples(at, &[], &mut lines);
    assert!(lines.len() > 50, "{} examples", lines.len());
    // What later commands read is written first.
    let first = |line: &&String| line.contains(" search ") || line.contains(" estimate ");
    let training = |line: &&String| line.contains(" run ") || line.contains(" profile ");
    let mut order: Vec<&String> = lines.iter().filter(first).collect();
    order.extend(lines.iter().filter(training));
    order.extend(lines.iter().filter(|line| line.contains(" export ")));
    let rest: Vec<&String> = lines.iter().filter(|line| !order.contains(line)).collect();
    order.extend(rest);
    let wrong: Vec<String> = order
        .into_iter()
        .filter_map(|line| {
            let output = shell(at, line);
            (code(&output) != 0).then(|| format!("{line}\n  {}", stderr(&output)))
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Shells complete the names of models, clusters, runtimes and targets.
#[test]
fn completions_know_names() {
    let folder = tempfile::tempdir().expect("a folder");
    for shell in ["bash", "zsh", "fish"] {
        let output = run(folder.path(), &["completions", shell]);
        let script = String::from_utf8_lossy(&output.stdout).into_owned();
        for name in ["llama3.1-405b", "dgx-b200", "torchtitan", "megatron-bridge"] {
            assert!(script.contains(name), "{shell}: {name}");
        }
    }
}

#[test]
fn every_topic_is_explained() {
    let folder = tempfile::tempdir().expect("a folder");
    let topics = run(folder.path(), &["doc"]);
    let topics = String::from_utf8_lossy(&topics.stdout).into_owned();
    let mut count = 0;
    for line in topics.lines().filter(|line| line.starts_with("  ")) {
        let topic = line.split_whitespace().next().expect("a name");
        let page = run(folder.path(), &["doc", topic]);
        assert_eq!(code(&page), 0, "{topic}");
        let page = String::from_utf8_lossy(&page.stdout).into_owned();
        assert!(page.lines().count() > 4, "{topic}: {page}");
        assert!(
            page.lines().all(|line| line.chars().count() <= 100),
            "{topic}: {page}"
        );
        count += 1;
    }
    assert_eq!(count, 6);
}
