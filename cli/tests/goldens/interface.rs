//! The interface of users and scripts: help, lists, keys of JSON, exports.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::common::{code, examples, json, run, stderr};
use crate::training::{name, plans};
use crate::{compare, digest, lines};

const TARGETS: [&str; 10] = [
    "megatron-lm",
    "megatron-bridge",
    "torchtitan@0.3",
    "torchtitan@0.2",
    "torchtitan@main",
    "deepspeed",
    "accelerate",
    "axolotl",
    "nanotron",
    "vescale",
];

/// Subcommands that a help text lists, `help` aside.
fn subcommands(help: &str) -> Vec<String> {
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    listed
        .take_while(|line| !line.is_empty())
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|command| *command != "help")
        .map(str::to_owned)
        .collect()
}

fn help(folder: &Path, command: &[String], text: &mut String) {
    let mut args: Vec<&str> = command.iter().map(String::as_str).collect();
    args.push("--help");
    let output = run(folder, &args);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let page = String::from_utf8(output.stdout).expect("help is text");
    *text += &format!("== {}\n{page}\n", command.join(" "));
    for below in subcommands(&page) {
        help(folder, &[command, &[below]].concat(), text);
    }
}

#[test]
fn help_of_every_command() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut text = String::new();
    help(folder.path(), &[], &mut text);
    compare("help.txt", &text);
}

#[test]
fn lists_and_schemas() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut text = String::new();
    for list in ["models", "clusters", "runtimes"] {
        let output = run(folder.path(), &[list]);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        text += &format!("== {list}\n{}\n", String::from_utf8_lossy(&output.stdout));
    }
    let formats = [
        "plan",
        "cluster",
        "cluster-extension",
        "device",
        "runtime",
        "constraints",
        "runs",
        "profile",
    ];
    for format in formats {
        let output = run(folder.path(), &["schema", format]);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        text += &format!("== schema {format}: {}\n", digest(&output.stdout));
    }
    compare("lists.txt", &text);
}

/// Every path of keys in a document, with the kinds of its values.
fn keys(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "list",
        Value::Object(_) => "object",
    };
    if !path.is_empty() {
        found.insert(format!("{path}: {kind}"));
    }
    match value {
        Value::Array(items) => items
            .iter()
            .for_each(|item| keys(item, &format!("{path}[]"), found)),
        Value::Object(fields) => fields.iter().for_each(|(key, item)| {
            // Names of reasons and tensors are values that stand as keys.
            let key = if key.contains([' ', '/']) { "*" } else { key };
            keys(item, &format!("{path}.{key}"), found);
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

#[test]
fn keys_of_json() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let examples = examples();
    let at = |name: &str| examples.join(name).display().to_string();
    let (single, split) = (at("llama-single.yaml"), at("llama-tp2-dp2.yaml"));
    let config = at("llama/config.json");
    let mut text = String::new();
    let commands: [&[&str]; 17] = [
        &[
            "search",
            "--model",
            "llama3-8b",
            "--gpus",
            "8",
            "--tokens",
            "1T",
            "--json",
        ],
        &["search", "--model", "llama3-70b", "--gpus", "1", "--json"],
        &[
            "search",
            "--from",
            "tp8 recompute=full",
            "--keep",
            "mbs",
            "--model",
            "llama3-8b",
            "--gpus",
            "8",
            "--json",
        ],
        &[
            "estimate",
            "--model",
            "llama3-8b",
            "--gpus",
            "8",
            "--strategy",
            "tp=4",
            "--json",
        ],
        &["explain", &split, "--json"],
        &["compare", &single, &split, "--json"],
        &["size", "--model", "gpt2", "--gpus", "1,2,8", "--json"],
        &["replan", &split, "--lost", "2", "-o", "left.yaml", "--json"],
        &["validate", "--json"],
        &[
            "run",
            &split,
            "--steps",
            "2",
            "--checkpoints",
            "saved",
            "--json",
        ],
        &["checkpoint", "inspect", "saved", "--json"],
        &["checkpoint", "verify", "saved", "--json"],
        &[
            "checkpoint",
            "reshard",
            "saved",
            "--plan",
            &single,
            "-o",
            "other",
            "--json",
        ],
        &[
            "checkpoint",
            "export",
            "saved",
            "-o",
            "w.safetensors",
            "--json",
        ],
        &["export", &single, "--to", "megatron-lm", "--json"],
        &["import", &config, "--json"],
        &["models", "--json"],
    ];
    for command in commands {
        let output = run(folder.path(), command);
        let mut found = BTreeSet::new();
        if output.stdout.starts_with(b"{") || output.stdout.starts_with(b"[") {
            keys(&json(&output), "", &mut found);
        }
        let words: Vec<&str> = command.iter().map(|word| name(word)).collect();
        text += &format!("== {}: exit {}\n", words.join(" "), code(&output));
        found.iter().for_each(|line| text += &format!("{line}\n"));
    }
    compare("keys.txt", &text);
}

/// What exports to every target answered: exit codes and digests of what was printed.
pub(crate) fn exported(folder: &Path, plan: &str) -> String {
    let answers = TARGETS.map(|target| {
        let output: Output = run(
            folder,
            &["export", plan, "--to", target, "--launcher", "slurm"],
        );
        let written = digest(&[output.stdout.clone(), output.stderr.clone()].concat());
        format!("  {target}: {} {written}", code(&output))
    });
    answers.join("\n")
}

#[test]
fn exports_of_examples() {
    let text = lines(&plans(), |plan| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        // Messages name the plan as it was given.
        let path = folder.path().join("plan.yaml");
        std::fs::copy(plan, path).expect("a copy");
        std::os::unix::fs::symlink(examples().join("data"), folder.path().join("data"))
            .expect("a link");
        format!("{}\n{}", name(plan), exported(folder.path(), "plan.yaml"))
    });
    compare("exports.txt", &text);
}
