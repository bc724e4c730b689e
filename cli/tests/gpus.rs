//! Training on GPUs as a user meets it; NVIDIA's libraries are emulated.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

type Environment = Vec<(&'static str, OsString)>;

/// A folder with tokens, and environment variables for four emulated GPUs; `None` without a C++
/// compiler.
fn here() -> Option<(tempfile::TempDir, Environment)> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let environment = vescale_tests::emulated::environment(target, 4)?;
    let folder = tempfile::tempdir().expect("temporary folder");
    let tokens = (0..1u32 << 14)
        .flat_map(|i| (i.wrapping_mul(2_654_435_761) >> 25).to_le_bytes()[..2].to_vec());
    std::fs::write(
        folder.path().join("tokens.bin"),
        tokens.collect::<Vec<u8>>(),
    )
    .expect("written");
    Some((folder, environment))
}

fn command(folder: &Path, environment: &Environment, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vescale-plan"))
        .args(args)
        .current_dir(folder)
        .env("NO_COLOR", "1")
        .envs(environment.iter().cloned())
        .output()
        .expect("the binary starts")
}

fn answer(output: &Output) -> Value {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    serde_json::from_slice(&output.stdout).expect("stdout is one JSON document")
}

/// A plan of a small model, written to `plan.yaml`.
fn plan(folder: &Path, model: &str, gpus: u64, strategy: &str) {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/pytorch/models");
    let model: PathBuf = models.join(format!("{model}.json"));
    let gpus = gpus.to_string();
    let args = [
        &["estimate", "--model", model.to_str().expect("UTF-8")][..],
        &["--cluster", "dgx-h200", "--runtime", "vescale-cuda"],
        &["--gpus", &gpus, "--precision", "bf16"],
        &["--strategy", strategy, "--seq", "32", "--global-batch", "8"],
        &["--output-plan", "plan.yaml", "--json"],
    ];
    answer(&command(folder, &Vec::new(), &args.concat()));
}

const RUN: [&str; 4] = ["run", "plan.yaml", "--data", "tokens.bin"];
const STEPS: [&str; 2] = ["--steps", "2"];

/// Losses and gradient norms.
fn learned(answer: &Value) -> Vec<f64> {
    let losses = answer["losses"].as_array().expect("a list").iter();
    let losses = losses.map(|step| step["loss"].as_f64());
    let norms = answer["gradient_norms"].as_array().expect("a list").iter();
    let all: Option<Vec<f64>> = losses.chain(norms.map(Value::as_f64)).collect();
    all.expect("numbers")
}

fn close(what: &str, got: &Value, want: &Value, bound: f64) {
    let (got, want) = (learned(got), learned(want));
    assert_eq!(got.len(), want.len(), "{what}");
    for (a, b) in got.iter().zip(&want) {
        assert!((a - b).abs() <= bound * b.abs(), "{what}: {a} for {b}");
    }
}

/// Counted bytes are the predicted ones; the most in use at a time nearly so.
fn held(what: &str, answer: &Value, bound: f64) {
    for line in answer["memory"].as_array().expect("a list") {
        let bytes = |of: &str| line[of].as_f64().expect("a number");
        let (measured, predicted) = (bytes("measured_bytes"), bytes("predicted_bytes"));
        let bound = if line["name"] == "most in use of all" {
            bound
        } else {
            0.0
        };
        assert!(
            (measured - predicted).abs() <= bound * predicted,
            "{what}: {line}"
        );
    }
}

/// Kinds of parallelism, schedules, executions and message transports, each on some model.
#[test]
fn plans_train_on_gpus_as_on_the_cpu() {
    let Some((folder, environment)) = here() else {
        return;
    };
    let folder = folder.path();
    let graph = &["--execution", "graph"][..];
    let processes = &["--gpus", "2", "--gpu-messages", "host"];
    for (model, gpus, strategy, options) in [
        (
            "llama31",
            4,
            "tp=2,sp=on,pp=2,mbs=2,recompute=selective",
            &[][..],
        ),
        ("llama31", 2, "dp=2,zero=3,mbs=1,recompute=full", graph),
        ("llama31", 2, "pp=2,mbs=1,schedule=zb-h1", processes),
        ("gemma2", 2, "cp=2,mbs=2", graph),
        ("bloom", 1, "mbs=2", &["--attention", "own"]),
        (
            "qwen2_moe",
            2,
            "dp=2,ep=2,zero=1,mbs=1",
            &["--execution", "eager"],
        ),
    ] {
        let what = format!("{model} {strategy} {options:?}");
        plan(folder, model, gpus, strategy);
        let run = |args: &[&str]| {
            answer(&command(
                folder,
                &environment,
                &[&RUN[..], &STEPS, args].concat(),
            ))
        };
        let got = run(&[&["--device", "cuda", "--json"], options].concat());
        close(&what, &got, &run(&["--json"]), 5e-3);
        held(&what, &got, 0.05);
    }
}

#[test]
fn a_run_goes_on_from_another_devices_checkpoint() {
    let Some((folder, environment)) = here() else {
        return;
    };
    let folder = folder.path();
    plan(folder, "llama31", 2, "dp=2,zero=2,mbs=2");
    let run = |args: &[&str]| answer(&command(folder, &environment, &[&RUN[..], args].concat()));
    let whole = run(&["--json", "--steps", "2"]);
    let last = |answer: &Value| answer["losses"].as_array()?.last()?["loss"].as_f64();
    let want = last(&whole).expect("a loss");
    for [first, second] in [["cuda", "cpu"], ["cpu", "cuda"]] {
        let on = |device, steps| {
            [
                "--device",
                device,
                "--steps",
                steps,
                "--checkpoints",
                first,
                "--json",
            ]
        };
        run(&on(first, "1"));
        // Another number of steps has other rates: another run.
        let forced = ["--resume", "--force-resume"];
        let resumed = run(&[&on(second, "2")[..], &forced].concat());
        assert_eq!(resumed["first_step"], 1);
        let got = last(&resumed).expect("a loss");
        assert!(
            (got - want).abs() <= 5e-3 * want,
            "{first}, {second}: {got} for {want}"
        );
    }
}

#[test]
fn what_gpus_cannot_do_is_one_line() {
    let Some((folder, mut environment)) = here() else {
        return;
    };
    let folder = folder.path();
    let refused = |environment: &Environment, options: &[&str], says: &str| {
        let args = [&RUN, &["--device", "cuda", "--quiet"][..], options].concat();
        let output = command(folder, environment, &args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(output.stdout.is_empty());
        let one = said.lines().skip(1).all(|line| line.starts_with("  "));
        assert!(one && said.contains(says), "{said}");
    };
    plan(folder, "qwen2_moe", 2, "dp=2,ep=2,mbs=1");
    refused(
        &environment,
        &["--execution", "graph"],
        "other ranks' experts",
    );
    plan(folder, "llama31", 8, "dp=8,mbs=1");
    refused(&environment, &[], "4 GPUs");
    refused(&environment, &["--gpus", "8"], "4 GPUs");
    plan(folder, "llama31", 1, "mbs=8");
    environment.push(("EMULATED_MEMORY", "1500000".into()));
    refused(&environment, &[], "do not fit");
}
