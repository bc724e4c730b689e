//! Which causes a gap is explained by, and what is said of logs that are not of the plan.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::{JOB, estimate, json, log, run};

/// Of several runs in one log the last counts; that is said, and warned of if their step times differ.
#[test]
fn several_runs_in_one_log_are_said() {
    let folder = tempfile::tempdir().expect("temporary folder");
    estimate(folder.path(), "dgx-h100", "tp=4,pp=2,zero=1", "a.plan.yaml");
    let note = "step numbers go back once, as where several runs write one log: one run counts, with steps 1 to 30 from line 31";
    for (first, warns) in [(5.0, true), (4.05, false)] {
        let mut text = String::new();
        for seconds in [first, 4.0] {
            log(folder.path(), "run.log", seconds, 128);
            text += &fs::read_to_string(folder.path().join("run.log")).expect("read");
        }
        fs::write(folder.path().join("run.log"), text).expect("written");
        let args = ["diagnose", "run.log", "--plan", "a.plan.yaml", "--json"];
        let output = run(folder.path(), &args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(note), "{said}");
        let warning = "a step takes 4.00 s in the one that counts and 5.00 s in another";
        assert_eq!(said.contains(warning), warns, "{said}");
        assert_eq!(json(&output)["measured"]["step_time_s"], 4.0);
    }
}

/// Megatron-LM's line of memory: so many MiB are reserved.
fn with_memory(folder: &Path, name: &str, mib: f64) {
    let text = fs::read_to_string(folder.join(name)).expect("read");
    let line = format!(
        "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: 1.0 | max reserved: {mib:.1}\n"
    );
    fs::write(folder.join(name), text + &line).expect("written");
}

/// Causes with other memory than the log's are not named, nor any for a gap that is no larger than what is uncertain.
#[test]
fn only_causes_that_can_be_are_named() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let args = ["diagnose", "run.log", "--plan", "a.plan.yaml", "--json"];
    let recomputed = "every layer is recomputed";
    let plan = estimate(folder.path(), "dgx-h100", "tp=4,pp=2,zero=1", "a.plan.yaml");
    let [base, full] = ["tp=4,pp=2,zero=1", "tp=4,pp=2,zero=1,recompute=full"].map(|strategy| {
        let plan = estimate(folder.path(), "dgx-h100", strategy, "b.plan.yaml");
        let time = plan["predicted"]["step_time_s"].as_f64().expect("time");
        log(folder.path(), "run.log", time, 128);
        let answer = json(&run(
            folder.path(),
            &["diagnose", "run.log", "--plan", "b.plan.yaml", "--json"],
        ));
        let reserved = answer["predicted_reserved_bytes"].as_f64().expect("bytes");
        (time, reserved / 1024f64.powi(2))
    });
    let causes = |seconds: f64, mib: Option<f64>| -> Vec<String> {
        log(folder.path(), "run.log", seconds, 128);
        if let Some(mib) = mib {
            with_memory(folder.path(), "run.log", mib);
        }
        let answer = json(&run(folder.path(), &args));
        let list = answer["hypotheses"].as_array().expect("list").iter();
        list.map(|of| of["cause"].as_str().expect("words").to_owned())
            .collect()
    };
    for (mib, named) in [(None, true), (Some(full.1), true), (Some(base.1), false)] {
        let causes = causes(full.0, mib);
        assert_eq!(
            causes.iter().any(|cause| cause == recomputed),
            named,
            "{causes:?}"
        );
        // Unfused attention would need more than a device has.
        assert!(
            !causes.iter().any(|cause| cause == "attention is not fused"),
            "{causes:?}"
        );
    }
    let time = plan["predicted"]["step_time_s"].as_f64().expect("time");
    assert_eq!(causes(1.015 * time, None), ["nothing need be wrong"]);
}

/// A log of another batch than the plan's is compared with a step of its own batch.
#[test]
fn another_batch_than_the_plans_is_said_first() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let strategy = "tp=4,pp=2,zero=1";
    let args = ["diagnose", "run.log", "--plan", "a.plan.yaml"];
    estimate(folder.path(), "dgx-h100", strategy, "a.plan.yaml");
    let mut twice = [&["estimate"], JOB, &["--strategy", strategy, "--json"]].concat();
    twice[JOB.len()] = "256";
    let twice = json(&run(folder.path(), &twice));
    let time = twice["predicted"]["step_time_s"].as_f64().expect("time");
    log(folder.path(), "run.log", 1.01 * time, 256);
    let answer = json(&run(folder.path(), &[&args[..], &["--json"]].concat()));
    let ratio = answer["step_time_ratio"].as_f64().expect("ratio");
    assert!((ratio - 1.01).abs() < 1e-3, "{ratio}");
    let said = &answer["hypotheses"];
    assert_eq!(
        said[0]["cause"],
        "the run does not follow the plan: its global batch differs"
    );
    assert_eq!(
        said[0]["evidence"],
        "the log has 256 sequences per step, the plan 128; predicted is a step of 256"
    );
    assert_eq!(said[1]["cause"], "nothing need be wrong");
    let followed = run(
        folder.path(),
        &[&args[..], &["--follow", "--idle", "1", "--json"]].concat(),
    );
    let words = String::from_utf8_lossy(&followed.stderr).into_owned();
    assert!(
        words.contains("they are compared with a predicted step of 256"),
        "{words}"
    );
    assert!(!words.contains("drift"), "{words}");
    // What the strategy cannot run is not compared.
    log(folder.path(), "run.log", time, 129);
    let answer = json(&run(folder.path(), &[&args[..], &["--json"]].concat()));
    let list = answer["hypotheses"].as_array().expect("list");
    let evidence = "the log has 129 sequences per step, the plan 128; the plan's strategy cannot run 129, so that step times cannot be compared";
    assert_eq!((list.len(), &list[0]["evidence"]), (1, &evidence.into()));
    let followed = run(
        folder.path(),
        &[&args[..], &["--follow", "--idle", "1", "--json"]].concat(),
    );
    let words = String::from_utf8_lossy(&followed.stderr).into_owned();
    assert!(
        words.contains("they are not compared") && followed.stdout.is_empty(),
        "{words}"
    );
}

/// What moves a step by far more than the gap does not explain it.
#[test]
fn changes_far_beyond_the_gap_are_not_named() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let plan = estimate(folder.path(), "dgx-h100", "tp=4,pp=2,zero=1", "a.plan.yaml");
    let predicted = plan["predicted"]["step_time_s"].as_f64().expect("time");
    log(folder.path(), "run.log", 1.03 * predicted, 128);
    let args = ["diagnose", "run.log", "--plan", "a.plan.yaml", "--json"];
    let answer = json(&run(folder.path(), &args));
    let measured = answer["measured"]["step_time_s"].as_f64().expect("time");
    for found in answer["hypotheses"].as_array().expect("list") {
        let Some(changed) = found["step_time_s"].as_f64() else {
            continue;
        };
        let times = (changed - predicted) / (measured - predicted);
        assert!(times < 3.01, "{found}");
    }
}

/// torchtitan counts the whole sequence also in layers with a window.
#[test]
fn logged_tflops_may_count_keys_beyond_windows() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let job = "estimate --model gpt-oss-20b --gpus 16 --seq 32768 --global-batch 32 --runtime torchtitan --strategy zero=3,recompute=full --json";
    let line = format!("{job} -o a.plan.yaml");
    // It does not fit, which is no matter here.
    let output = run(folder.path(), &line.split(' ').collect::<Vec<_>>());
    let predicted: Value = serde_json::from_slice(&output.stdout).expect("a prediction");
    let of = |key: &str| predicted["predicted"][key].as_f64().expect(key);
    // In half of 24 layers of 64 heads of 64, 32640 more keys are seen, each by two products: 6 FLOPs of training per weight.
    let more = 12.0 * 6.0 * 64.0 * 128.0 * (32768.0 - 128.0);
    let (rate, step) = (of("tokens_per_s_per_gpu"), of("step_time_s"));
    let tflops = (of("mfu_palm") * of("peak_flops_per_s") + more * rate) / 1e12;
    let lines = (1..=30).map(|step| format!("step: {step} loss: 1.0 memory: 60.00GiB(75%) tps: {rate} tflops: {tflops:.1} mfu: 40%\n"));
    fs::write(folder.path().join("run.log"), lines.collect::<String>()).expect("written");
    let output = run(
        folder.path(),
        &["diagnose", "run.log", "--plan", "a.plan.yaml"],
    );
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let row = text.lines().find(|line| line.starts_with("TFLOP/s/GPU"));
    let row = row.unwrap_or_else(|| panic!("{step}: {text}"));
    assert!(
        row.ends_with("0.0%") && !text.contains("way of counting"),
        "{text}"
    );
}

/// Steps shorter than the peak rate allows are warned of, and the Trainer's mean is not called one first step.
#[test]
fn what_no_step_takes_is_warned_of() {
    let folder = tempfile::tempdir().expect("temporary folder");
    estimate(folder.path(), "dgx-h100", "tp=4,pp=2,zero=1", "a.plan.yaml");
    for (seconds, warns) in [(0.1, true), (5.0, false)] {
        let runtime = 200.0 * seconds;
        let state =
            format!("{{\"log_history\": [{{\"step\": 200, \"train_runtime\": {runtime}}}]}}");
        fs::write(folder.path().join("trainer_state.json"), state).expect("written");
        let args = ["diagnose", "trainer_state.json", "--plan", "a.plan.yaml"];
        let output = run(folder.path(), &args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(
            said.contains("at the peak rate of the GPUs"),
            warns,
            "{said}"
        );
        assert!(!said.contains("first step"), "{said}");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let words = "mean of 200 steps of transformers, evaluations and saves included";
        assert!(text.contains(words), "{text}");
    }
}
