//! `diagnose` and `calibrate`: a log made from a prediction is explained by what it was made with.

mod causes;
#[path = "../common/mod.rs"]
mod common;

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use common::run;
use serde_json::Value;

fn json(output: &Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    serde_json::from_slice(&output.stdout).expect("stdout is one JSON document")
}

const JOB: &[&str] = &[
    "--model",
    "llama3-8b",
    "--gpus",
    "32",
    "--seq",
    "8192",
    "--global-batch",
    "128",
];

fn estimate(folder: &Path, cluster: &str, strategy: &str, plan: &str) -> Value {
    let args = [
        &["estimate"],
        JOB,
        &[
            "--cluster",
            cluster,
            "--strategy",
            strategy,
            "-o",
            plan,
            "--json",
        ],
    ];
    json(&run(folder, &args.concat()))
}

/// A Megatron-LM log whose steps take so long, with jitter of a hundredth.
fn log(folder: &Path, name: &str, seconds: f64, batch: u64) {
    let mut text = String::new();
    for step in 1..=30u32 {
        let jitter = 1.0 + 0.01 * f64::from(step % 3) - 0.01;
        let warm = if step < 3 { 5.0 } else { 1.0 };
        writeln!(
            text,
            " [2026-05-01 12:00:00] iteration {step:8}/     500 | consumed samples: 1 | elapsed time per iteration (ms): {:.1} | global batch size: {batch:5} | loss scale: 1.0 |",
            seconds * 1e3 * jitter * warm
        )
        .expect("text");
    }
    fs::write(folder.join(name), text).expect("written");
}

#[test]
fn a_run_without_overlap_is_recognised() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let strategy = "tp=4,zero=1";
    let plan = estimate(folder.path(), "dgx-h100", strategy, "a.plan.yaml");
    let off = format!("{strategy},overlap=none");
    let slow = estimate(folder.path(), "dgx-h100", &off, "b.plan.yaml");
    let time = |v: &Value| v["predicted"]["step_time_s"].as_f64().expect("time");
    assert!(time(&slow) > time(&plan));
    log(folder.path(), "run.log", time(&slow), 128);
    let answer = json(&run(
        folder.path(),
        &["diagnose", "run.log", "--plan", "a.plan.yaml", "--json"],
    ));
    assert_eq!(answer["system"], "megatron-lm");
    assert_eq!(answer["measured"]["warmup"], 3);
    let ratio = answer["step_time_ratio"].as_f64().expect("ratio");
    assert!((ratio - time(&slow) / time(&plan)).abs() < 1e-3, "{ratio}");
    let hypotheses = answer["hypotheses"].as_array().expect("list");
    let what_ifs: Vec<&str> = hypotheses
        .iter()
        .filter(|h| h["step_time_s"].is_number())
        .filter_map(|h| h["cause"].as_str())
        .collect();
    assert_eq!(
        what_ifs.first(),
        Some(&"communication does not overlap with compute"),
        "{what_ifs:?}"
    );
    let text = run(
        folder.path(),
        &["diagnose", "run.log", "--plan", "a.plan.yaml"],
    );
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(
        text.contains("step time") && text.contains("what the log says, then single changes"),
        "{text}"
    );
}

/// A cluster, and decisions beside a layout.
type Case = [&'static str; 2];

/// What differs between two plans: name, value of the first and of the second.
#[rustfmt::skip]
const DIFFER: [(Case, Case, &[[&str; 3]]); 7] = [
    (["dgx-h100", ""], ["dgx-a100", ""], &[["devices", "32 × h100-sxm", "32 × a100-80gb"], ["cluster", "dgx-h100", "dgx-a100"]]),
    (["dgx-h100", ""], ["dgx-h100 at 0.8", ""], &[["cluster", "dgx-h100", "dgx-h100 at 0.8"]]),
    // Without context parallelism there is no message of its kind.
    (["dgx-h100", ""], ["dgx-h100", " cp_kind=all_gather"], &[]),
    (["dgx-h100", ""], ["dgx-h100", " grad_dtype=bf16"], &[["grad_dtype", "fp32", "bf16"]]),
    (["dgx-h100", " offload=optimizer"], ["dgx-h100", " grad_dtype=bf16"], &[["offload", "optimizer", "none"], ["grad_dtype", "fp32", "bf16"]]),
    (["dgx-h100", " grad_dtype=bf16 offload=optimizer:50"], ["dgx-h100", " offload=optimizer"], &[["grad_dtype", "bf16", "fp32"], ["offload", "optimizer:50", "optimizer"]]),
    (["dgx-h100", " optim_states=bf16_moments"], ["dgx-h100", " mbs2"], &[["mbs", "1", "2"], ["m", "32", "16"], ["optim_states", "bf16_moments", "own"]]),
];

#[test]
fn two_plans_say_what_differs() {
    let folder = tempfile::tempdir().expect("temporary folder");
    for (first, second, expected) in DIFFER {
        for ([cluster, more], plan) in [(first, "a.plan.yaml"), (second, "b.plan.yaml")] {
            estimate(
                folder.path(),
                cluster,
                &format!("tp4 pp2 zero1{more}"),
                plan,
            );
        }
        let args = ["compare", "a.plan.yaml", "b.plan.yaml", "--json"];
        let page = ["--report", "both.html", "--force"];
        let compared = json(&run(folder.path(), &[&args[..], &page].concat()));
        assert_eq!(
            compared["changed"],
            serde_json::json!(expected),
            "{first:?} {second:?}"
        );
        for (plan, [cluster, _]) in [first, second].into_iter().enumerate() {
            assert_eq!(compared["inputs"][plan]["cluster"], *cluster);
        }
        let page = fs::read_to_string(folder.path().join("both.html")).expect("a page");
        let other_job = expected.iter().any(|[name, ..]| *name == "cluster");
        let says = page.contains("They are plans for different jobs");
        assert_eq!(says, other_job, "{first:?} {second:?}");
    }
}

/// A log's line with its step time and TFLOP/s left open, the count of attention that they follow, and whether such a log is
/// of the plan.
#[rustfmt::skip]
const COUNTED: [(&str, &str, bool); 5] = [
    (MEGATRON, "mfu", true),
    (MEGATRON, "mfu_palm", true),
    (MEGATRON, "half", false),
    (TORCHTITAN, "mfu_palm", true),
    (TORCHTITAN, "mfu", false),
];
const MEGATRON: &str = " iteration {step}/ 500 | elapsed time per iteration (ms): {ms} | throughput per GPU (TFLOP/s/GPU): {tflops} | global batch size: 64 |";
const TORCHTITAN: &str =
    "step: {step} loss: 1.0 memory: 60.00GiB(75%) tps: {tps} tflops: {tflops} mfu: 40%";

/// TFLOP/s are held against the count of attention that the log's system has: Megatron-LM's has changed, torchtitan counts all.
#[test]
fn logged_tflops_are_counted_as_the_logs_system_does() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let mut args = [
        &["estimate"],
        JOB,
        &["--strategy", "cp8 dp8 zero1 recompute=full"],
    ]
    .concat();
    args.extend(["-o", "a.plan.yaml", "--json"]);
    for (flag, value) in [
        ("--gpus", "64"),
        ("--seq", "65536"),
        ("--global-batch", "64"),
    ] {
        let at = args.iter().position(|arg| *arg == flag).expect("a flag");
        args[at + 1] = value;
    }
    let plan = json(&run(folder.path(), &args));
    let of = |key: &str| plan["predicted"][key].as_f64().expect(key);
    for (line, count, follows) in COUNTED {
        let mfu = if count == "half" {
            of("mfu") / 2.0
        } else {
            of(count)
        };
        let tflops = mfu * of("peak_flops_per_s") / 1e12;
        let numbers = line
            .replace("{ms}", &format!("{}", of("step_time_s") * 1e3))
            .replace("{tps}", &format!("{}", of("tokens_per_s_per_gpu")))
            .replace("{tflops}", &format!("{tflops:.1}"));
        let steps = (1..=30).map(|step| numbers.replace("{step}", &format!("{step}")));
        let text = steps.collect::<Vec<_>>().join("\n");
        fs::write(folder.path().join("run.log"), text).expect("written");
        let args = ["diagnose", "run.log", "--plan", "a.plan.yaml"];
        let output = run(folder.path(), &args);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let row = text.lines().find(|line| line.starts_with("TFLOP/s/GPU"));
        let row = row.unwrap_or_else(|| panic!("{text}"));
        let gap = row
            .split_whitespace()
            .last()
            .and_then(|gap| gap.strip_suffix('%'));
        let gap: f64 = gap.and_then(|gap| gap.parse().ok()).expect("a gap");
        let same = gap.abs() <= 0.1;
        assert_eq!(same, follows, "{line} {count}: {row}");
        assert_eq!(
            !text.contains("way of counting"),
            follows,
            "{count}: {text}"
        );
    }
}

/// A job that raises its batch is judged, and learned from, by the steps of the plan's batch.
#[test]
fn steps_of_other_batches_are_left_out() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let plan = estimate(folder.path(), "dgx-h100", "tp=4,pp=2,zero=1", "a.plan.yaml");
    let time = plan["predicted"]["step_time_s"].as_f64().expect("time");
    let mut text = String::new();
    for (batch, share) in [(64, 0.5), (128, 1.1)] {
        log(folder.path(), "run.log", share * time, batch);
        text += &fs::read_to_string(folder.path().join("run.log")).expect("read");
    }
    let after_step = text.lines().filter_map(|line| line.split_once('/'));
    let numbered = (1..).zip(after_step);
    let lines = numbered.map(|(step, (_, rest))| format!(" iteration {step}/{rest}\n"));
    fs::write(folder.path().join("run.log"), lines.collect::<String>()).expect("written");
    let job = ["run.log", "--plan", "a.plan.yaml", "--json"];
    let diagnosed = run(folder.path(), &[&["diagnose"], &job[..]].concat());
    let calibrate = [&["calibrate", "-o", "c.yaml"], &job[..]].concat();
    let calibrated = run(folder.path(), &calibrate);
    for output in [&diagnosed, &calibrated] {
        let said = String::from_utf8_lossy(&output.stderr);
        let note = "24 steps have another global batch than 128 sequences and are left out";
        assert!(said.contains(note), "{said}");
    }
    let (diagnosed, calibrated) = (json(&diagnosed), json(&calibrated));
    let measured = &diagnosed["measured"];
    assert_eq!(measured["steps"], 30);
    assert_eq!(measured["steps_of_other_batches"], 24);
    let step_time = |of: &Value, field: &str| of[field].as_f64().expect("time") / time;
    let seen = step_time(measured, "step_time_s");
    let learned = step_time(&calibrated["runs"][0], "measured_step_time_s");
    assert!(
        (seen - 1.1).abs() < 0.02 && seen == learned,
        "{seen} {learned}"
    );
}

#[test]
fn what_was_learned_predicts_the_run() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let strategy = "tp=4,pp=2,zero=1";
    let plan = estimate(folder.path(), "dgx-h100", strategy, "a.plan.yaml");
    let time = plan["predicted"]["step_time_s"].as_f64().expect("time");
    let other = "tp=2,pp=4,zero=1";
    let second = estimate(folder.path(), "dgx-h100", other, "second.plan.yaml");
    let second = second["predicted"]["step_time_s"].as_f64().expect("time");
    log(folder.path(), "run.log", 1.3 * time, 128);
    log(folder.path(), "other.log", 1.2 * second, 128);
    json(&run(
        folder.path(),
        &[
            "diagnose",
            "run.log",
            "--plan",
            "a.plan.yaml",
            "--calibrate",
            "ours.yaml",
            "--json",
        ],
    ));
    let calibrated = estimate(folder.path(), "ours.yaml", strategy, "b.plan.yaml");
    let predicted = |v: &Value, field: &str| v["predicted"][field].as_f64().expect("number");
    // One run moves the prediction a part of the way: the rest may be of this run alone.
    let one = predicted(&calibrated, "step_time_s") / time;
    assert!((1.05..1.3).contains(&one), "{one}");
    assert_eq!(
        predicted(&calibrated, "peak_memory_bytes"),
        predicted(&plan, "peak_memory_bytes")
    );
    let provenance = calibrated["detail"]["provenance"].as_array();
    let stated = provenance.expect("constants").iter().any(|c| {
        c["name"] == "compute time of this system, relative to the prediction"
            && c["origin"] == "measured"
    });
    assert!(stated);
    let evidence = calibrated["predicted"]["evidence"].as_str();
    assert_eq!(
        evidence,
        Some("calibrated: 1 measured run of this very system")
    );
    // A run on the calibrated cluster does not multiply twice; two runs are taken together.
    estimate(folder.path(), "ours.yaml", other, "c.plan.yaml");
    let args = [
        "calibrate",
        "run.log",
        "other.log",
        "--plan",
        "b.plan.yaml",
        "--plan",
        "c.plan.yaml",
        "-o",
        "ours.yaml",
        "--json",
    ];
    let both = json(&run(folder.path(), &args));
    assert_eq!(both["calibration"]["runs"], 2);
    let runs = both["runs"].as_array().expect("runs");
    for (of, time) in runs.iter().zip([time, second]) {
        let [before, after] = ["before", "after"].map(|when| {
            let predicted = &of[format!("predicted_step_time_{when}_s")];
            predicted.as_f64().expect("a time") / time
        });
        assert!((before - 1.0).abs() < 1e-9, "{before}");
        // Two runs that are both much slower move it farther than one.
        assert!((one + 0.02..1.25).contains(&after), "{one} {after}");
    }
}

/// A strategy's step time can be given without a log; the factors that its step depends on most change it most.
#[test]
fn a_measured_strategy_moves_what_its_step_depends_on() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let strategy = "tp=2,zero=1,recompute=full";
    let plan = estimate(folder.path(), "dgx-h100", strategy, "a.plan.yaml");
    let time = plan["predicted"]["step_time_s"].as_f64().expect("time");
    let measured = format!("{strategy}:{}s", 1.2 * time);
    let job = ["calibrate", "--plan", "a.plan.yaml", "--measured"];
    let args = [&job[..], &[&measured, "-o", "ours.yaml", "--json"]].concat();
    let learned = json(&run(folder.path(), &args));
    let factor = |rate: &str| {
        let factors = &learned["calibration"]["time_factors"];
        factors[rate].as_f64().expect("factor")
    };
    // Networks differ more between systems than what computes does; the step does not wait for the host.
    assert!(factor("compute") > 1.01, "{learned}");
    let change = |rate: &str| {
        let changes = &learned["runs"][0]["change_by_rate"];
        changes[rate].as_f64().expect("change")
    };
    assert!(factor("network") > factor("compute"), "{learned}");
    assert!(change("compute") > 100.0 * change("host"), "{learned}");
    for (wrong, words) in [
        ("tp=8", "expected  a strategy, a colon and a time"),
        ("tp=8:soon", "expected  a strategy, a colon and a time"),
        ("tp=7:1s", "tp"),
        ("tp=2:1s", "whose peak rates bound them"),
    ] {
        let args = [&job[..], &[wrong, "-o", "not.yaml"]].concat();
        let output = run(folder.path(), &args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{wrong}: {said}");
        assert!(said.contains(words), "{wrong}: {said}");
    }
    assert!(!folder.path().join("not.yaml").exists());
}

/// What factors cannot explain of a slow run is said; nothing is of one that they explain.
#[test]
fn a_run_that_factors_do_not_explain_is_warned_of() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let plan = estimate(folder.path(), "dgx-h100", "tp=4,pp=2,zero=1", "a.plan.yaml");
    let time = plan["predicted"]["step_time_s"].as_f64().expect("time");
    for (slower, words) in [
        (1.2, &[][..]),
        (
            9.0,
            &[
                "the most that can be learned",
                "times what the factors explain",
            ],
        ),
    ] {
        log(folder.path(), "run.log", slower * time, 128);
        for command in [
            ["calibrate", "run.log", "-o", "c.yaml"],
            ["diagnose", "run.log", "--calibrate", "c.yaml"],
        ] {
            let args = [&command[..], &["--plan", "a.plan.yaml"]].concat();
            let output = run(folder.path(), &args);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(0), "{said}");
            assert_eq!(said.contains("warning"), !words.is_empty(), "{said}");
            assert!(words.iter().all(|word| said.contains(word)), "{said}");
        }
        // What the factors leave of the run widens intervals, so that they hold it.
        let strategy = "tp=4,pp=2,zero=1";
        let calibrated = estimate(folder.path(), "c.yaml", strategy, "again.plan.yaml");
        let interval = &calibrated["predicted"]["step_time_interval_s"];
        let ends = [0, 1].map(|end| interval[end].as_f64().expect("time"));
        assert!((ends[0]..=ends[1]).contains(&(slower * time)), "{interval}");
    }
}

#[test]
fn bad_logs_and_plans_are_one_message() {
    let folder = tempfile::tempdir().expect("temporary folder");
    estimate(folder.path(), "dgx-h100", "tp=4", "a.plan.yaml");
    estimate(folder.path(), "dgx-a100", "tp=4", "b.plan.yaml");
    log(folder.path(), "run.log", 1e6, 128);
    log(folder.path(), "other.log", 1.0, 256);
    fs::write(folder.path().join("empty.log"), "").expect("written");
    #[rustfmt::skip]
    let cases: [(&[&str], &str); 8] = [
        (&["calibrate", "other.log", "--plan", "a.plan.yaml", "-o", "c.yaml"],
            "the log has 256 sequences per step, the plan 128"),
        (&["diagnose", "other.log", "--plan", "a.plan.yaml", "--calibrate", "c.yaml"],
            "the log has 256 sequences per step, the plan 128"),
        (&["diagnose", "empty.log", "--plan", "a.plan.yaml"], "no training step is found"),
        (&["diagnose", "missing.log", "--plan", "a.plan.yaml"], "missing.log"),
        (&["diagnose", "run.log", "--plan", "a.plan.yaml", "--warmup", "99"], "30 steps are logged"),
        (&["calibrate", "run.log", "--plan", "a.plan.yaml", "-o", "c.yaml"], "expected  0.1 to 10"),
        (&["calibrate", "run.log", "run.log", "--plan", "a.plan.yaml", "-o", "c.yaml"], "2 logs and 1 plans"),
        (&["calibrate", "run.log", "run.log", "--plan", "a.plan.yaml", "--plan", "b.plan.yaml", "-o", "c.yaml"],
            "different clusters"),
    ];
    for (args, words) in cases {
        let output = run(folder.path(), args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.contains(words), "{args:?}: {said}");
    }
    assert!(!folder.path().join("c.yaml").exists());
}

/// Compute of less than a hundredth of a second is said in its own unit.
#[test]
fn short_compute_is_said_in_its_unit() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let args =
        "estimate --model gpt2 --gpus 1 --seq 64 --global-batch 1 --strategy tp=1 -o small.yaml";
    let made = run(folder.path(), &args.split(' ').collect::<Vec<_>>());
    assert_eq!(
        made.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&made.stderr)
    );
    log(folder.path(), "slow.log", 2.0, 1);
    let output = run(
        folder.path(),
        &["diagnose", "slow.log", "--plan", "small.yaml"],
    );
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = said.lines().find(|line| line.contains("of compute:"));
    assert!(
        line.is_some_and(|line| line.contains(" ms of compute:")),
        "{said}"
    );
}

/// A log that grows while it is followed: a run that slows down is noticed once, and when it recovers.
#[test]
fn a_drifting_run_is_noticed_while_it_runs() {
    let folder = tempfile::tempdir().expect("a folder");
    let predicted = estimate(folder.path(), "dgx-h100", "tp=4,zero=1", "a.plan.yaml");
    let usual = predicted["predicted"]["step_time_s"]
        .as_f64()
        .expect("a number");
    let path = folder.path().join("run.log");
    fs::write(&path, "starting\n").expect("written");
    let follow = Command::new(env!("CARGO_BIN_EXE_vescale-plan"))
        .args(["diagnose", "run.log", "--plan", "a.plan.yaml"])
        .args(["--follow", "--idle", "4", "--json"])
        .current_dir(folder.path())
        .env("NO_COLOR", "1")
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut text = String::from("starting\n");
    let mut step = 0;
    for factor in [1.0, 2.5, 1.0, 2.5] {
        if factor == 1.0 && step > 0 {
            // The job starts anew, and empties its log.
            (text, step) = (String::from("starting\n"), 0);
        }
        for _ in 0..14 {
            step += 1;
            let ms = usual * factor * 1e3;
            let _ = writeln!(
                text,
                " iteration {step}/ 100 | elapsed time per iteration (ms): {ms:.3} | global batch size: 128 |"
            );
        }
        fs::write(&path, &text).expect("written");
        std::thread::sleep(std::time::Duration::from_millis(1500));
    }
    let output = follow
        .wait_with_output()
        .expect("ends when the log does not grow");
    assert_eq!(output.status.code(), Some(0));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said.matches("warning: drift:").count(), 2, "{said}");
    assert_eq!(said.matches("no drift any more").count(), 1, "{said}");
    let lines = String::from_utf8_lossy(&output.stdout);
    let seen: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON lines"))
        .collect();
    for line in &seen {
        assert_eq!(line["schema_version"], 1, "{line}");
        let interval = line["step_time_interval_s"].as_array();
        assert_eq!(interval.map(Vec::len), Some(2), "{line}");
    }
    let inside: Vec<bool> = seen
        .iter()
        .filter_map(|line| line["inside"].as_bool())
        .collect();
    assert!(
        inside.contains(&true) && inside.last() == Some(&false),
        "{lines}"
    );
    assert_eq!(
        seen.last().map(|line| line["step"].clone()),
        Some(step.into())
    );
}

/// Steps that the hardware cannot take are not explained by its kernels, and steps of another job have no gap.
#[test]
fn what_cannot_be_compared_is_not_explained() {
    let folder = tempfile::tempdir().expect("temporary folder");
    estimate(folder.path(), "dgx-h100", "tp=4", "a.plan.yaml");
    log(folder.path(), "fast.log", 0.01, 128);
    log(folder.path(), "other.log", 1.0, 7);
    let said = |log: &str| {
        let output = run(folder.path(), &["diagnose", log, "--plan", "a.plan.yaml"]);
        let [out, err] =
            [output.stdout, output.stderr].map(|of| String::from_utf8_lossy(&of).into_owned());
        (out, err)
    };
    let (out, err) = said("fast.log");
    assert!(err.contains("at the peak rate of the GPUs"), "{err}");
    assert!(!out.contains("kernels are faster"), "{out}");
    let (out, _) = said("other.log");
    assert!(out.contains("cannot be compared"), "{out}");
    let rate = out.lines().find(|line| line.starts_with("tokens/s/GPU"));
    assert!(rate.is_some_and(|line| !line.contains('%')), "{out}");
}
