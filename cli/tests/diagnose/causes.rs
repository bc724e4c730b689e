//! Which causes a gap is explained by, and what is said of logs that are not of the plan.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::{estimate, json, log, run};

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
        let warning = "a step takes 4 s in the one that counts and 5 s in another";
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
