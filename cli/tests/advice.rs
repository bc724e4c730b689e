//! Advice in answers is right: proposed commands find a plan, and named strategies compare as
//! stated.

mod common;

use std::path::Path;

use common::{code, json, shell, stderr};
use serde_json::Value;

/// The commands of an answer's "Next", each on one line.
fn proposed(answer: &str) -> Vec<String> {
    let next = answer.split("\nNext\n").nth(1).unwrap_or_default();
    let whole = next.replace("\\\n", " ");
    let lines = whole.lines().map(str::trim);
    let lines = lines.filter(|line| line.starts_with("vescale-plan "));
    lines.map(str::to_owned).collect()
}

/// Questions for which nothing fits, with the commands that are proposed.
const TOO_LARGE: [(&str, &[&str]); 2] = [
    (
        "--model qwen2.5-32b --cluster 'l40s x 8 per node, 100 Gb/s x 1' --gpus 24 --seq 4k --global-batch 96 --runtime hf-trainer",
        &["--global-batch 24", "--runtime "],
    ),
    (
        "--model llama3.1-405b --gpus 8",
        &["--gpus ", "vescale-plan size "],
    ),
];

#[test]
fn what_is_proposed_where_nothing_fits_has_a_plan() {
    for (question, proposes) in TOO_LARGE {
        let folder = tempfile::tempdir().expect("a folder");
        let answer = shell(folder.path(), &format!("vescale-plan search {question}"));
        assert_eq!(code(&answer), 3, "{}", stderr(&answer));
        let answer = String::from_utf8_lossy(&answer.stdout).into_owned();
        let commands = proposed(&answer);
        for flag in proposes {
            assert!(
                commands.iter().any(|c| c.contains(flag)),
                "{flag}: {answer}"
            );
        }
        for command in commands {
            let again = shell(folder.path(), &format!("{command} -q"));
            assert_eq!(code(&again), 0, "{command}: {}", stderr(&again));
        }
    }
}

/// The explanation of a plan that a search finds.
fn explained(folder: &Path, question: &str, flags: &str) -> Value {
    let search = format!("vescale-plan search {question} -q -o a.plan.yaml --json");
    let found = shell(folder, &search);
    assert_eq!(code(&found), 0, "{}", stderr(&found));
    let explained = shell(
        folder,
        &format!("vescale-plan explain a.plan.yaml {flags} --json"),
    );
    assert_eq!(code(&explained), 0, "{}", stderr(&explained));
    json(&explained)
}

#[test]
fn neighbours_beyond_the_risk_say_so() {
    let question = "--model llama3-8b --runtime megatron-core --seq 6144 --global-batch 16 --cluster dgx-h100 --gpus 8";
    let folder = tempfile::tempdir().expect("a folder");
    let answer = explained(folder.path(), question, "");
    let all = answer["neighbours"].as_array().expect("neighbours");
    let mut beyond = 0;
    for near in all {
        let (chance, why) = (&near["predicted"]["p_fits"], &near["why_not_first"]);
        let (chance, why) = (chance.as_f64(), why.as_str().expect("a reason"));
        let refused = chance.is_some_and(|chance| chance < 0.9);
        let fits = near["predicted"]["fits"] != false;
        beyond += usize::from(why.contains("only (--risk 0."));
        assert!(refused || !why.contains("--risk"), "{near}");
        assert!(!fits || !refused || why.contains("--risk"), "{near}");
    }
    assert!(beyond > 0, "{answer}");
}

#[test]
fn what_was_expected_is_shown_at_its_best() {
    let folder = tempfile::tempdir().expect("a folder");
    let question = "--model llama3-8b --gpus 16 --global-batch 64";
    let answer = explained(folder.path(), question, "--why-not 'tp4 pp2'");
    let (asked, best) = (&answer["why_not"], &answer["why_not_best"]);
    for plan in [asked, best] {
        assert_eq!(
            (&plan["strategy"]["tp"], &plan["strategy"]["pp"]),
            (&4.into(), &2.into())
        );
    }
    let time = |plan: &Value| plan["predicted"]["step_time_s"].as_f64().expect("a time");
    assert!(
        time(&answer) <= time(best) && time(best) < time(asked),
        "{answer}"
    );
    let text = shell(
        folder.path(),
        "vescale-plan explain a.plan.yaml --why-not 'tp4 pp2'",
    );
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("Best plan with pp=2 tp=4"), "{text}");
}

/// Search and explanation say the same of groups of replicas whose plan is not the fastest, but the simplest that ties.
#[test]
fn groups_have_one_time_and_one_host_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let question =
        "--model llama3-70b --cluster '32 x dgx-h100 + 32 x dgx-a100' --gpus 64 --global-batch 512";
    let search = format!("vescale-plan search {question} -q -o a.plan.yaml --json");
    let found = json(&shell(folder.path(), &search));
    let time = &found["best"]["predicted"]["step_time_s"];
    let ways = found["arrangements"].as_array().expect("ways");
    let times: Vec<&Value> = ways.iter().map(|way| &way["step_time_s"]).collect();
    assert!(times.contains(&time), "{time} is none of {times:?}");
    let text = shell(folder.path(), "vescale-plan explain a.plan.yaml");
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("of the fullest node's host memory"), "{text}");
}

/// A precision that a system does not train in is refused with those that it has, before anything is printed. What an export advises
/// instead of a refused precision has another one, and its plan can be exported.
#[test]
fn a_precision_that_a_system_lacks_is_refused_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let fp16 = "--model llama3-8b --gpus 8 --precision fp16";
    for command in ["search", "estimate --strategy dp=8"] {
        let line = format!("vescale-plan {command} {fp16} --runtime torchtitan-2026");
        let answer = shell(folder.path(), &line);
        let said = stderr(&answer);
        assert_eq!(code(&answer), 2, "{said}");
        assert!(answer.stdout.is_empty(), "{command}");
        assert!(
            said.contains("--precision fp16") && said.contains("fp32, bf16, fp8"),
            "{said}"
        );
    }
    let made = format!("vescale-plan search {fp16} --runtime fsdp2 -q -o a.plan.yaml");
    assert_eq!(code(&shell(folder.path(), &made)), 0);
    let export = "vescale-plan export a.plan.yaml --to torchtitan";
    advice_is_exported(folder.path(), export);
}

/// Runs the search that a refused export proposes, and exports the plan it finds.
fn advice_is_exported(folder: &Path, export: &str) {
    let refused = stderr(&shell(folder, export));
    let advised = refused.split("or plan within its limits: ").nth(1);
    let advised = advised
        .and_then(|rest| rest.lines().next())
        .expect("advice");
    let again = shell(folder, &format!("{advised} -q -o a.plan.yaml --force"));
    assert_eq!(code(&again), 0, "{advised}: {}", stderr(&again));
    let exported = shell(folder, export);
    assert_eq!(code(&exported), 0, "{advised}: {}", stderr(&exported));
}

/// What an export advises instead of a plan is within the same memory, its scaling of 8-bit products has a key, and the offered
/// strategy runs under the runtime that it is offered with.
#[test]
fn what_an_export_advises_can_be_exported() {
    let folder = tempfile::tempdir().expect("a folder");
    let question = "--model llama3-8b --gpus 8 --precision fp8 --headroom 0.3";
    let made = format!(
        "vescale-plan search {question} --runtime torchtitan-2026 --fix fp8_recipe=tensorwise -q -o a.plan.yaml"
    );
    let made = shell(folder.path(), &made);
    assert_eq!(code(&made), 0, "{}", stderr(&made));
    let export = "vescale-plan export a.plan.yaml --to torchtitan@0.3";
    let refused = stderr(&shell(folder.path(), export));
    assert!(refused.contains("--headroom 0.3"), "{refused}");
    let offered = refused.split("it can run this one: ").nth(1);
    let offered = offered
        .and_then(|rest| rest.lines().next())
        .expect("a strategy");
    let estimate = format!(
        "vescale-plan estimate --model llama3-8b --gpus 8 --precision fp8 {offered} -q -o b.plan.yaml"
    );
    let estimated = shell(folder.path(), &estimate);
    assert_eq!(code(&estimated), 0, "{}", stderr(&estimated));
    let exported = shell(
        folder.path(),
        "vescale-plan export b.plan.yaml --to torchtitan@0.3",
    );
    assert_eq!(code(&exported), 0, "{}", stderr(&exported));
    advice_is_exported(folder.path(), export);
}

/// A risk above one half also takes plans that are predicted not to fit: answers and exit codes say so, and the next command has the
/// same risk and constraints.
#[test]
fn a_plan_beyond_memory_is_within_the_risk_only() {
    let folder = tempfile::tempdir().expect("a folder");
    let question = "--model llama3-8b --gpus 2 --fix tp=2 --risk 0.9";
    let search = format!("vescale-plan search {question} -q -o a.plan.yaml");
    let found = shell(folder.path(), &search);
    let text = String::from_utf8_lossy(&found.stdout).into_owned();
    assert_eq!(code(&found), 3, "{text}{}", stderr(&found));
    for words in ["DOES NOT FIT", "It is within --risk 0.9"] {
        assert!(text.contains(words), "{text}");
    }
    let size = format!("vescale-plan size {question}");
    let sized = shell(folder.path(), &size);
    let text = String::from_utf8_lossy(&sized.stdout).into_owned();
    assert_eq!(code(&sized), 3, "{text}{}", stderr(&sized));
    for words in [
        "Smallest within --risk 0.9: 2 GPUs",
        "No plan has a predicted peak that fits",
        "--fix tp=2 --risk 0.9",
    ] {
        assert!(text.contains(words), "{text}");
    }
    assert!(!text.contains("Smallest that fits"), "{text}");
}
