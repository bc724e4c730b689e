//! Runs every command that takes a plan on all shipped examples, and on plans that use a single
//! axis. None may crash.

mod limited;

use std::fs;
use std::path::{Path, PathBuf};

use limited::run;

/// What `export --to` knows, with the versions that are not the default.
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

/// A model, devices, a runtime and a strategy that uses one axis.
#[rustfmt::skip]
const PLANS: [(&str, u64, &str, &str); 40] = [
    ("gpt2", 1, "megatron-core", "dp=1"),
    ("gpt2", 1, "vescale", "dp=1"),
    ("gpt2", 1, "torchtitan", "dp=1"),
    ("gpt2", 1, "deepspeed", "zero=0"),
    ("mixtral", 1, "vescale", "dp=1"),
    ("gpt2", 1, "vescale", "recompute=full"),
    ("gpt2", 2, "megatron-core", "tp=2"),
    ("gpt2", 4, "megatron-core", "tp=4"),
    ("llama", 8, "megatron-core", "tp=8"),
    ("gpt2", 4, "megatron-2021", "tp=4,sp=off,recompute=full"),
    ("gpt2", 2, "vescale", "tp=2"),
    ("gpt2", 8, "torchtitan", "tp=4,zero=3"),
    ("gpt2", 2, "megatron-core", "pp=2"),
    ("gpt2", 4, "megatron-core", "pp=4"),
    ("gpt2", 8, "megatron-core", "pp=8,stages=1/2/2/2/2/1/1/1"),
    (
        "gpt2",
        2,
        "megatron-core",
        "pp=2,vpp=2,schedule=interleaved",
    ),
    ("gpt2", 4, "vescale", "pp=4,schedule=gpipe"),
    ("gpt2", 4, "vescale", "pp=4,schedule=zb-h1"),
    ("gpt2", 2, "vescale", "pp=2,vpp=2,schedule=zb-v"),
    ("gpt2", 2, "vescale", "pp=2,vpp=2,schedule=dualpipe-v"),
    ("llama", 4, "torchtitan", "pp=2,zero=3"),
    ("gpt2", 2, "vescale", "cp=2,cp_kind=ring"),
    ("gpt2", 4, "vescale", "cp=4,cp_kind=all_gather"),
    ("gpt2", 2, "vescale", "cp=2,cp_kind=all_to_all"),
    ("llama", 8, "megatron-core", "cp=8,cp_kind=all_gather"),
    ("gpt2", 2, "vescale", "dp=2,zero=0"),
    ("gpt2", 4, "vescale", "dp=4,zero=1"),
    ("gpt2", 8, "vescale", "dp=8,zero=2"),
    ("gpt2", 8, "vescale", "dp=8,zero=3"),
    ("gpt2", 8, "vescale", "zero=3,dp_shard=4,dp_replicate=2"),
    ("gpt2", 8, "megatron-core", "zero=0"),
    ("gpt2", 16, "megatron-core", "zero=1"),
    ("gpt2", 8, "deepspeed", "zero=1"),
    ("gpt2", 8, "deepspeed", "zero=2"),
    ("gpt2", 8, "deepspeed", "zero=3"),
    ("gpt2", 8, "fsdp2", "zero=3"),
    ("gpt2", 8, "torchtitan", "zero=3"),
    ("mixtral", 2, "vescale", "ep=2,zero=1"),
    ("mixtral", 4, "megatron-core", "ep=4,zero=1"),
    ("mixtral", 4, "vescale", "ep=4,zero=3"),
];

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples")
}

/// Runs every command that takes a plan; returns the commands that failed, with their messages.
fn used(folder: &Path, plan: &str, other: &str) -> Vec<String> {
    let mut commands: Vec<Vec<&str>> = vec![
        vec!["explain", plan],
        vec!["explain", plan, "--json"],
        vec!["report", plan, "-o", "x.html", "--force"],
        vec!["trace", plan, "-o", "x.json", "--force"],
        vec!["compare", plan, other],
        vec!["compare", other, plan, "--json"],
    ];
    commands.extend(TARGETS.map(|target| vec!["export", plan, "--to", target]));
    let mut wrong = Vec::new();
    for command in commands {
        let mut ended = run(folder, &command);
        if ended.err.contains("'--force'") {
            // Before there is such a flag every file is replaced.
            let plain: Vec<&str> = command
                .iter()
                .copied()
                .filter(|w| *w != "--force")
                .collect();
            ended = run(folder, &plain);
        }
        let name = command.join(" ");
        // An export may be refused (exit code 4), a plan may not fit (3); all else is a failure.
        let answered = match (ended.code, command[0]) {
            (Some(0), _) | (Some(4), "export") => true,
            (code, _) => code.is_some_and(|code| code == 3),
        };
        if !answered {
            let shown: String = ended.err.chars().take(200).collect();
            wrong.push(format!("{plan}: {name}: {:?} {shown}", ended.code));
        }
    }
    wrong
}

fn report(wrong: Vec<String>) {
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn examples_through_every_command() {
    let mut plans: Vec<String> = fs::read_dir(examples())
        .expect("examples")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|e| e == "yaml"))
        .map(|path| path.display().to_string())
        .collect();
    plans.sort();
    assert_eq!(plans.len(), 13);
    let first = plans[0].clone();
    report(limited::side_by_side(&plans, |plan| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let wrong = used(folder.path(), plan, &first);
        (!wrong.is_empty()).then(|| wrong.join("\n"))
    }));
}

#[test]
fn plans_of_one_axis_through_every_command() {
    report(limited::side_by_side(
        &PLANS,
        |(model, gpus, runtime, strategy)| {
            let folder = tempfile::tempdir().expect("a temporary folder");
            let model = match *model {
                "gpt2" => "gpt2".to_owned(),
                name => examples()
                    .join(name)
                    .join("config.json")
                    .display()
                    .to_string(),
            };
            let gpus = gpus.to_string();
            let sizes = [
                "--gpus",
                &gpus,
                "--seq",
                "256",
                "--global-batch",
                "64",
                "--runtime",
                runtime,
            ];
            let asked = [
                "estimate",
                "-q",
                "--model",
                &model,
                "--strategy",
                strategy,
                "-o",
                "p.yaml",
            ];
            let ended = run(folder.path(), &[&asked[..], &sizes].concat());
            if ended.code != Some(0) {
                return Some(format!(
                    "{model} {gpus} {runtime} {strategy}: {:?} {}",
                    ended.code, ended.err
                ));
            }
            let wrong = used(folder.path(), "p.yaml", "p.yaml");
            (!wrong.is_empty())
                .then(|| format!("{gpus} {runtime} {strategy}: {}", wrong.join("\n")))
        },
    ));
}
