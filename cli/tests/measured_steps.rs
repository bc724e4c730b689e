//! Steps of our executor that were measured on an H200 (`tests/gpu/run`), against what presets and a profile of that GPU predict for
//! them. No constant of the prices was fitted to a step.

mod common;

use std::path::Path;

use common::{code, run, stderr};
use serde_json::Value;

/// Largest error by presets, and those of runs whose own kernels are priced roughly: attention with dropout, whose random
/// numbers cost as much as the rest, and products of experts with few rows each.
const PRESETS: f64 = 0.125;
const ROUGH: [(&str, &str, f64); 2] = [
    ("gpt2-124m-dropout", "mbs=16,recompute=none", 0.3),
    ("moe-small", "mbs=1,recompute=none", 0.3),
];
/// Largest error by the profile, which holds not all of their shapes.
const PROFILE: f64 = 0.06;

fn read(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).expect("is part of the repository");
    serde_json::from_str(&text).expect("is JSON")
}

fn text(of: &Value) -> &str {
    of.as_str().expect("a text")
}

fn step_time(of: &Value) -> f64 {
    of["step_time_s"].as_f64().expect("a time")
}

/// The predicted step time of a run on a cluster.
fn predicted(root: &Path, case: &Value, strategy: &str, cluster: &str) -> f64 {
    let [seq, batch] = ["seq", "global_batch"].map(|size| case[size].to_string());
    let mut args = vec![
        "estimate",
        "--model",
        text(&case["model"]),
        "--cluster",
        cluster,
    ];
    args.extend([
        "--runtime",
        "vescale-cuda",
        "--gpus",
        "1",
        "--precision",
        "bf16",
        "--json",
    ]);
    args.extend([
        "--strategy",
        strategy,
        "--seq",
        &seq,
        "--global-batch",
        &batch,
    ]);
    let output = run(root, &args);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let answer: Value = serde_json::from_slice(&output.stdout).expect("is JSON");
    step_time(&answer["predicted"])
}

#[test]
fn measured_steps_are_predicted() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let cases = read(&root.join("tests/gpu/cases.json"));
    let measured = read(&root.join("tests/gpu/profiles/h200-training.json"));
    let models = cases["models"].as_array().expect("a list");
    for of in measured["runs"].as_array().expect("a list") {
        let (name, strategy) = (text(&of["model"]), text(&of["strategy"]));
        let case = models.iter().find(|case| case["name"] == of["model"]);
        let case = case.expect("a model of the list");
        let rough = ROUGH.iter().find(|(n, s, _)| *n == name && *s == strategy);
        let presets = rough.map_or(PRESETS, |&(.., limit)| limit);
        for (cluster, limit) in [
            ("dgx-h200", presets),
            ("tests/gpu/profiles/h200.yaml", PROFILE),
        ] {
            let error = predicted(&root, case, strategy, cluster) / step_time(of) - 1.0;
            let what = format!("{name} {strategy} {}, {cluster}", of["execution"]);
            println!("{what}: {:+.1}%", 100.0 * error);
            assert!(error.abs() <= limit, "{what}: {:+.1}%", 100.0 * error);
        }
    }
}
