//! Predictions of all published runs, and the best plans of searches over models, runtimes and clusters.

use std::path::Path;

use serde_json::Value;

use crate::common::{code, json, run, stderr};
use crate::interface::exported;
use crate::{compare, digest, lines};

/// A model, GPUs, a runtime, a cluster with flags that it needs, and dimensions that are fixed.
type Search = (
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    &'static str,
);

#[rustfmt::skip]
const SEARCHES: [Search; 40] = [
    ("gpt2", "8", "vescale", "dgx-h100", ""),
    ("gpt2-xl", "8", "vescale", "dgx-a100", ""),
    ("llama3-8b", "16", "vescale", "dgx-h100", "mbs=1|2"),
    ("mistral-7b", "8", "vescale", "dgx-h100", "mbs=1"),
    ("qwen2.5-0.5b", "4", "vescale-cuda", "dgx-h100", ""),
    ("llama3.2-1b", "8", "vescale-cuda", "dgx-h100", ""),
    ("megatron-22b", "64", "megatron-2021", "selene", ""),
    ("gpt3-175b", "96", "megatron-2021", "selene", ""),
    ("megatron-22b", "8", "megatron-2022", "selene", ""),
    ("megatron-530b", "280", "megatron-2022", "selene", ""),
    ("bloom-7b1", "32", "megatron-deepspeed", "jean-zay-a100", ""),
    ("bloom-176b", "384", "megatron-deepspeed-bf16", "jean-zay-a100", ""),
    ("llama3-8b", "8", "megatron-core", "dgx-h100", ""),
    ("llama3-8b", "8", "megatron-core", "l40s-node", ""),
    ("llama3-70b", "64", "megatron-core", "dgx-h100", ""),
    ("llama3.1-405b", "512", "megatron-core", "dgx-h100", "tp=8"),
    ("mixtral-8x7b", "32", "megatron-core", "dgx-h100", ""),
    ("mixtral-8x22b", "128", "megatron-core", "h800", "tp=1|2"),
    ("deepseek-v2-lite", "16", "megatron-core", "dgx-h200", ""),
    ("deepseek-v3", "256", "megatron-core", "gb200-nvl72", "tp=1,vpp=1|2"),
    ("qwen3-30b-a3b", "32", "megatron-core", "dgx-b200", ""),
    ("gpt-oss-20b", "16", "megatron-core", "mi300x", ""),
    ("gemma3-27b", "32", "megatron-core", "meta-roce-h100", ""),
    ("falcon-40b", "64", "megatron-core", "dgx-a100", ""),
    ("nemotron-4-15b", "64", "nemo", "dgx-h100", ""),
    ("nemotron-4-340b", "256", "nemo", "dgx-h100", "tp=8"),
    ("mixtral-8x7b", "64", "nemo", "gcp-a3-mega", "tp=1|2|4"),
    ("mpt-7b", "16", "fsdp1", "dgx-a100-40gb", ""),
    ("mpt-30b", "64", "fsdp1", "dgx-a100", ""),
    ("llama2-7b", "8", "deepspeed", "dgx-a100", ""),
    ("opt-13b", "16", "deepspeed", "azure-ndv4", ""),
    ("gpt-neox-20b", "64", "deepspeed-2021", "dgx2-v100 --precision fp16", ""),
    ("qwen2.5-7b", "8", "fsdp2", "dgx-h100", ""),
    ("phi3-medium", "16", "fsdp2", "aws-p5", ""),
    ("llama3-8b", "8", "torchtitan", "dgx-h100", ""),
    ("mixtral-8x7b", "32", "torchtitan", "dgx-h100", ""),
    ("llama3-70b", "128", "torchtitan-compile", "dgx-h100", ""),
    ("llama3-8b", "64", "torchtitan-compile-2025", "grand-teton-96gb", ""),
    ("gemma2-9b", "16", "maxtext", "dgx-h100", ""),
    ("llama2-70b", "64", "maxtext", "dgx-h100", ""),
];

/// Searches, and writes the plan file `plan.yaml`; the answer, or why there is none.
fn search(folder: &Path, search: &Search) -> Result<Value, String> {
    let (model, gpus, runtime, cluster, fix) = search;
    let mut args = vec![
        "search",
        "--model",
        model,
        "--gpus",
        gpus,
        "--runtime",
        runtime,
    ];
    args.push("--cluster");
    args.extend(cluster.split_whitespace());
    args.extend(["--top", "20", "--json", "--quiet"]);
    args.extend(["--threads", "1", "-o", "plan.yaml", "--report", "plan.html"]);
    if !fix.is_empty() {
        args.extend(["--fix", fix]);
    }
    let output = run(folder, &args);
    match code(&output) {
        0 => Ok(json(&output)),
        other => Err(format!("{other}: {}", stderr(&output).trim())),
    }
}

/// Step time, peak memory and all their parts, to the last digit.
fn numbers(predicted: &Value) -> String {
    let (time, peak) = (&predicted["step_time_s"], &predicted["peak_memory_bytes"]);
    let parts = predicted["breakdown"].as_object().map(|parts| {
        let some = parts
            .iter()
            .filter(|(_, seconds)| seconds.as_f64() != Some(0.0));
        some.map(|(name, seconds)| format!("{}={seconds}", name.trim_end_matches("_s")))
            .collect::<Vec<_>>()
            .join(" ")
    });
    format!("{time} s {peak} B | {}", parts.unwrap_or_default())
}

fn memory(parts: &Value) -> String {
    let parts = parts.as_array().map_or(&[][..], Vec::as_slice);
    let named = parts
        .iter()
        .map(|part| format!("{}={}", part["name"].as_str().unwrap_or(""), part["bytes"]));
    named.collect::<Vec<_>>().join(", ")
}

/// A published run: its prediction, and a digest of all of it, kernels included.
fn published(run: &Value) -> String {
    let predicted = &run["predicted"];
    let id = run["id"].as_str().unwrap_or("");
    if predicted.is_null() {
        return format!("{id}: {}", run["skipped"]);
    }
    format!(
        "{id}: {} | {} | {}",
        numbers(predicted),
        memory(&predicted["memory"]),
        digest(predicted.to_string().as_bytes())
    )
}

#[test]
fn predictions_of_published_runs() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let output = run(folder.path(), &["validate", "--json"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let answer = json(&output);
    let runs = answer["runs"].as_array().expect("runs");
    assert!(runs.len() > 700);
    let text: Vec<String> = runs.iter().map(published).collect();
    compare("predictions.txt", &(text.join("\n") + "\n"));
}

#[test]
fn best_plans_of_searches_and_their_exports() {
    let text = lines(&SEARCHES, |asked| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (model, gpus, runtime, cluster, fix) = asked;
        let head = format!("{model} {gpus} {runtime} {cluster} {fix}");
        let answer = match search(folder.path(), asked) {
            Ok(answer) => answer,
            Err(why) => return format!("{head}: {why}"),
        };
        let space = format!(
            "{} strategies, illegal {}, relax {}",
            answer["space"]["strategies"], answer["space"]["illegal"], answer["relax"]
        );
        let kernels = digest(answer["detail"]["kernels"].to_string().as_bytes());
        let best = memory(&answer["detail"]["memory"]);
        let top = answer["top"].as_array().expect("plans");
        let plans = top.iter().map(|plan| {
            let text = plan["strategy_text"].as_str().unwrap_or("");
            let all = digest(plan.to_string().as_bytes());
            format!("\n  {text}: {} | {all}", numbers(&plan["predicted"]))
        });
        let plans: String = plans.collect();
        let exports = exported(folder.path(), "plan.yaml");
        format!("{head}: {space}\n  {best} | {kernels}{plans}\n{exports}")
    });
    compare("searches.txt", &text);
}
