//! `calibrate` and what a calibrated cluster file means for later predictions.

mod common;

use std::fs;
use std::path::Path;

use common::{code, json, shell, stderr};
use serde_json::Value;

/// Nodes of six GPUs over PCI Express, and a slow network between them.
const OURS: &str = r#"schema_version: 1
name: ours
device:
  schema_version: 1
  name: mygpu
  architecture: ampere
  memory: {value: "47 GiB", origin: assumed, source: us}
  memory_bandwidth: {value: "768 GB/s", origin: datasheet, source: us}
  peak:
    bf16: {value: "155 TFLOP/s", origin: datasheet, source: us}
    f16: {value: "155 TFLOP/s", origin: datasheet, source: us}
    f32: {value: "77 TFLOP/s", origin: datasheet, source: us}
  sm_count: 84
gpus_per_node: 6
scale_up: {bandwidth: {value: "32 GB/s", origin: datasheet, source: us}}
scale_out: {bandwidth: {value: "4 GB/s", origin: datasheet, source: us}}
fabric: ethernet
"#;

const JOB: &str = "--model llama3-8b --gpus 24 --global-batch 96";
/// A strategy whose step is 28 s, a tenth of it messages.
const USED: &str = "tp=2,dp=12,zero=1,sp,mbs=1,recompute=full";

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("temporary folder");
    fs::write(folder.path().join("ours.yaml"), OURS).expect("written");
    plan(folder.path(), "ours.yaml", USED, "a.plan.yaml");
    folder
}

fn ended(folder: &Path, line: &str) -> String {
    let output = shell(folder, &format!("vescale-plan {line}"));
    let said = stderr(&output);
    assert_eq!(code(&output), 0, "{line}: {said}");
    said
}

fn plan(folder: &Path, cluster: &str, strategy: &str, to: &str) {
    let asked = format!("estimate {JOB} --cluster {cluster} --strategy {strategy} -o {to}");
    ended(folder, &asked);
}

fn predicted(folder: &Path, question: &str) -> Value {
    let output = shell(folder, &format!("vescale-plan estimate {question} --json"));
    // What does not fit is predicted too.
    assert!(
        [0, 3].contains(&code(&output)),
        "{question}: {}",
        stderr(&output)
    );
    json(&output)["predicted"].clone()
}

/// The predicted step time and the ends of its interval.
fn step(predicted: &Value) -> [f64; 3] {
    let interval = &predicted["step_time_interval_s"];
    [&predicted["step_time_s"], &interval[0], &interval[1]].map(|of| of.as_f64().expect("seconds"))
}

fn evidence(predicted: &Value) -> &str {
    predicted["evidence"].as_str().expect("words")
}

/// Writes a Megatron-LM log of `steps` steps of `seconds` each; the first takes twice as long.
fn log(folder: &Path, name: &str, seconds: f64, steps: u32) {
    let line = |step: u32| {
        let ms = seconds * 1e3 * if step == 1 { 2.0 } else { 1.0 };
        format!(
            " iteration {step}/ 100 | elapsed time per iteration (ms): {ms:.1} | global batch size: 96 |\n"
        )
    };
    let text: String = (1..=steps).map(line).collect();
    fs::write(folder.join(name), text).expect("written");
}

#[test]
fn calibrated_files_are_read_from_every_folder() {
    let folder = folder();
    let inner = folder.path().join("inner");
    fs::create_dir(&inner).expect("made");
    // A preset stays one, whatever files are there.
    fs::write(inner.join("dgx-h100"), "no cluster").expect("written");
    let preset = "estimate --model gpt2 --gpus 8 --cluster dgx-h100 --strategy tp=1 -o p.plan.yaml";
    ended(&inner, preset);
    let again = |cluster: &str| format!("estimate {JOB} --strategy {USED} --cluster {cluster}");
    for line in [
        format!("calibrate --plan ../a.plan.yaml --measured {USED}:40s -o b.yaml"),
        again("b.yaml"),
        format!(
            "estimate {JOB} --cluster '../ours.yaml at 0.9' --strategy {USED} -o slow.plan.yaml"
        ),
        format!("calibrate --plan slow.plan.yaml --measured {USED}:40s -o slow.yaml"),
        "calibrate --plan p.plan.yaml --measured tp=1:15s -o p.yaml".to_owned(),
    ] {
        ended(&inner, &line);
    }
    ended(folder.path(), &again("inner/b.yaml"));
    ended(folder.path(), &again("inner/slow.yaml"));
    let written = fs::read_to_string(inner.join("p.yaml")).expect("read");
    assert!(written.contains("\nextends: dgx-h100\n"), "{written}");
}

#[test]
fn no_file_extends_itself() {
    let folder = folder();
    let at = folder.path();
    ended(
        at,
        &format!("calibrate --plan a.plan.yaml --measured {USED}:40s -o c.yaml"),
    );
    fs::write(
        at.join("e.yaml"),
        "schema_version: 1\nname: e\nextends: c.yaml\nspeed: {value: 0.9, origin: assumed, source: us}\n",
    )
    .expect("written");
    plan(at, "c.yaml", USED, "c.plan.yaml");
    plan(at, "e.yaml", USED, "e.plan.yaml");
    let full = fs::canonicalize(at).expect("there");
    let full = full.display();
    for (plan, to, expected) in [
        ("a", "ours.yaml".to_owned(), 2),
        ("a", format!("{full}/ours.yaml"), 2),
        ("c", "ours.yaml".to_owned(), 2),
        ("e", "./c.yaml".to_owned(), 2),
        ("e", "e.yaml".to_owned(), 0),
        ("c", "./c.yaml".to_owned(), 0),
        ("c", format!("{full}/c.yaml"), 0),
    ] {
        let line = format!(
            "vescale-plan calibrate --force --plan {plan}.plan.yaml --measured {USED}:41s -o {to}"
        );
        let output = shell(at, &line);
        let said = stderr(&output);
        assert_eq!(code(&output), expected, "{line}: {said}");
        assert_eq!(
            said.contains("would extend itself"),
            expected == 2,
            "{line}: {said}"
        );
        for cluster in ["ours.yaml", "c.yaml", "e.yaml"] {
            ended(
                at,
                &format!("estimate {JOB} --cluster {cluster} --strategy {USED}"),
            );
        }
    }
}

/// Runs that no factors explain together are taken, and said to contradict each other; one below peak rates is refused.
#[test]
fn runs_that_contradict_each_other_are_named() {
    let folder = folder();
    let line = format!("calibrate --plan a.plan.yaml -o c.yaml --measured {USED}:28s --measured");
    let said = ended(folder.path(), &format!("{line} tp=4:190s"));
    assert!(
        said.contains("the runs contradict each other: beside"),
        "{said}"
    );
    for (measured, words) in [
        (format!("{USED}:15s"), "whose peak rates bound them"),
        (format!("{USED}:28s"), "runs 1 and 2 are the same"),
    ] {
        let output = shell(folder.path(), &format!("vescale-plan {line} {measured}"));
        let said = stderr(&output);
        assert_eq!(code(&output), 2, "{measured}: {said}");
        assert!(said.contains(words), "{measured}: {said}");
    }
}

#[test]
fn weak_logs_are_warned_of() {
    let folder = folder();
    let at = folder.path();
    log(at, "first.log", 28.0, 1);
    log(at, "two.log", 28.0, 20);
    let mixed = fs::read_to_string(at.join("two.log")).expect("read");
    let titan: String = (21..40)
        .map(|step| format!("[rank0]: step: {step}  loss: 8.1  memory: 33.5GiB(71%)  tps: 1,170  tflops: 60 mfu: 38%\n"))
        .collect();
    fs::write(at.join("mixed.log"), mixed + &titan).expect("written");
    for (log, words) in [
        ("first.log", "it holds start-up and compilation"),
        (
            "mixed.log",
            "20 of 39 steps are written as another system writes them than torchtitan",
        ),
    ] {
        for command in ["diagnose", "calibrate -o c.yaml"] {
            let said = ended(at, &format!("{command} {log} --plan a.plan.yaml"));
            assert!(said.contains(words), "{command} {log}: {said}");
        }
        let said = ended(at, "calibrate two.log --plan a.plan.yaml -o c.yaml");
        assert!(!said.contains("warning"), "{said}");
    }
    let twice =
        "vescale-plan calibrate two.log two.log --plan a.plan.yaml --plan a.plan.yaml -o c.yaml";
    let output = shell(at, twice);
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("runs 1 and 2 are the same"));
}

/// A cluster of several pools cannot be calibrated, because factors belong to one kind of node.
#[test]
fn clusters_of_several_pools_are_not_calibrated() {
    let folder = folder();
    let at = folder.path();
    let line = "estimate --model llama3-8b --cluster '8 x dgx-a100 + 8 x dgx-h100' --gpus 16 --global-batch 32 --strategy tp=8,pp=2 \
                -o p.plan.yaml";
    ended(at, line);
    let output = shell(
        at,
        "vescale-plan calibrate --plan p.plan.yaml --measured tp=8,pp=2:9s -o c.yaml",
    );
    assert_eq!(code(&output), 2);
    assert!(
        stderr(&output).contains("has several pools"),
        "{}",
        stderr(&output)
    );
    fs::write(
        at.join("p.yaml"),
        "schema_version: 1\nname: p\nextends: 8 x dgx-a100 + 8 x dgx-h100\nspeed: {value: 0.9, origin: assumed, source: us}\n",
    )
    .expect("written");
    let output = shell(
        at,
        "vescale-plan estimate --model llama3-8b --gpus 16 --cluster p.yaml --strategy tp=8,pp=2",
    );
    assert_eq!(code(&output), 2);
    assert!(
        stderr(&output).contains("expected  one pool's cluster"),
        "{}",
        stderr(&output)
    );
}

/// The width of an interval, as the logarithm of its ends' ratio.
fn width(predicted: &Value) -> f64 {
    let [_, least, most] = step(predicted);
    (most / least).ln()
}

/// A measured run is evidence for jobs like it. For others the published runs stay the evidence, and intervals are no narrower
/// than without factors.
#[test]
fn what_no_run_shows_keeps_its_evidence() {
    let folder = folder();
    let at = folder.path();
    ended(
        at,
        &format!("calibrate --plan a.plan.yaml --measured {USED}:40s -o c.yaml"),
    );
    let own = "calibrated: 1 measured run of this very system";
    let applied = "; times are multiplied by factors learned from 1 measured run of other jobs under megatron-core";
    for (question, calibrated) in [
        (format!("{JOB} --strategy {USED}"), true),
        (format!("{JOB} --strategy tp=4,zero=1"), true),
        (
            "--model llama-13b --seq 4k --gpus 24 --global-batch 96 --strategy tp=2,pp=2,zero=1,recompute=full".to_owned(),
            true,
        ),
        (
            format!("{JOB} --strategy tp=4,zero=1 --precision fp16"),
            false,
        ),
        (format!("{JOB} --strategy tp=4,zero=1 --seq 64k"), false),
        (
            format!("{JOB} --strategy tp=2,zero=3 --runtime torchtitan"),
            false,
        ),
        (
            "--model deepseek-v2-lite --gpus 24 --strategy pp=3,ep=4".to_owned(),
            false,
        ),
    ] {
        let [on_ours, on_calibrated] = ["ours.yaml", "c.yaml"]
            .map(|cluster| predicted(at, &format!("{question} --cluster {cluster}")));
        let said = evidence(&on_calibrated);
        let published = format!("{}{applied}", evidence(&on_ours));
        match calibrated {
            true => assert_eq!(said, own, "{question}"),
            false => assert_eq!(said, published, "{question}"),
        }
        let widths = [width(&on_ours), width(&on_calibrated)];
        assert!(
            calibrated || widths[0] < widths[1],
            "{question}: {widths:?}"
        );
    }
}

/// One slow run may have a slow network or slow kernels. A note says so, intervals include both,
/// and the strategy that it names tells them apart.
#[test]
fn what_one_run_leaves_open_is_said() {
    let folder = folder();
    let at = folder.path();
    let said = ended(
        at,
        &format!("calibrate --plan a.plan.yaml --measured {USED}:84s -o c.yaml"),
    );
    let (_, rest) = said
        .split_once("if only compute takes")
        .unwrap_or_else(|| panic!("{said}"));
    let (_, named) = rest
        .split_once("a measured step of `")
        .unwrap_or_else(|| panic!("{said}"));
    let (next, _) = named.split_once('`').expect("a strategy");
    let question = |cluster: &str| format!("{JOB} --cluster {cluster} --strategy '{next}'");
    let usual = step(&predicted(at, &question("ours.yaml")))[0];
    let open = predicted(at, &question("c.yaml"));
    let [_, least, most] = step(&open);
    // Kernels that are three times as slow, or a slow network alone.
    assert!(least < 1.5 * usual && most > 2.5 * usual, "{usual} {open}");
    plan(at, "c.yaml", USED, "c.plan.yaml");
    let second = format!("calibrate --plan c.plan.yaml --measured '{next}:{usual}s' -o d.yaml");
    let said = ended(at, &second);
    assert!(!said.contains("if only"), "{said}");
    assert!(width(&predicted(at, &question("d.yaml"))) < 0.7 * width(&open));
}

/// Calibrating again takes all runs together.
#[test]
fn earlier_runs_are_learned_from_again() {
    let folder = folder();
    let at = folder.path();
    ended(
        at,
        &format!("calibrate --plan a.plan.yaml --measured {USED}:60s -o c.yaml"),
    );
    plan(at, "c.yaml", "tp=4,zero=1", "c.plan.yaml");
    let again = "calibrate --plan c.plan.yaml --measured tp=4,zero=1:150s -o d.yaml";
    let said = ended(at, again);
    assert!(said.contains("c.yaml is learned from again"), "{said}");
    let on = |cluster: &str, strategy: &str| {
        predicted(
            at,
            &format!("{JOB} --cluster {cluster} --strategy {strategy}"),
        )
    };
    for (strategy, measured) in [(USED, 60.0), ("tp=4,zero=1", 150.0)] {
        let found = on("d.yaml", strategy);
        assert_eq!(
            evidence(&found),
            "calibrated: 2 measured runs of this very system"
        );
        let [_, least, most] = step(&found);
        assert!(
            (least..=most).contains(&measured),
            "{strategy}: {least} to {most}"
        );
    }
    // A calibration that fails replaces no file, so it must not say that it does.
    let failing =
        "vescale-plan calibrate --plan c.plan.yaml --measured tp=8:9999s -o d.yaml --force";
    let failed = shell(at, failing);
    assert_eq!(code(&failed), 2);
    assert!(
        !stderr(&failed).contains("is replaced"),
        "{}",
        stderr(&failed)
    );
    // The same again counts once; another runtime is refused; a file that lists no runs is said to be replaced.
    let said = ended(
        at,
        &format!("calibrate --plan c.plan.yaml --measured {USED}:60s -o d.yaml"),
    );
    assert!(
        said.contains("d.yaml is replaced, with what 2 runs had told"),
        "{said}"
    );
    assert_eq!(step(&on("d.yaml", USED)), step(&on("c.yaml", USED)));
    let line = format!(
        "estimate {JOB} --cluster c.yaml --runtime torchtitan --strategy tp=2,zero=3 -o t.plan.yaml"
    );
    ended(at, &line);
    let output = shell(
        at,
        "vescale-plan calibrate --plan t.plan.yaml --measured tp=2,zero=3:40s -o t.yaml",
    );
    assert_eq!(code(&output), 2);
    assert!(
        stderr(&output).contains("different runtimes, megatron-core and torchtitan"),
        "{}",
        stderr(&output)
    );
    let older = "schema_version: 1\nname: old\nextends: ours.yaml\ncalibration: {runtime: megatron-core, runs: 2, time_factors: \
                 {compute: 1.1, memory: 1, network: 1.2, host: 1}, source: us}\n";
    fs::write(at.join("old.yaml"), older).expect("written");
    let old = on("old.yaml", USED);
    assert!(
        evidence(&old).contains("2 measured runs that the cluster file does not list"),
        "{old}"
    );
    plan(at, "old.yaml", USED, "old.plan.yaml");
    let said = ended(
        at,
        &format!("calibrate --plan old.plan.yaml --measured {USED}:60s -o new.yaml"),
    );
    assert!(said.contains("old.yaml does not list the 2 runs"), "{said}");
}

/// Runs of one strategy are one run, with their mean; one that is measured again replaces what its cluster has.
#[test]
fn repeats_count_as_one_run() {
    let folder = folder();
    let at = folder.path();
    let measured = |plan: &str, times: &[f64], to: &str| {
        let times = times
            .iter()
            .map(|time| format!(" --measured {USED}:{time}s"));
        let times = times.collect::<String>();
        ended(at, &format!("calibrate --plan {plan} -o {to}{times}"))
    };
    measured("a.plan.yaml", &[60.0], "one.yaml");
    measured("a.plan.yaml", &[59.0, 60.5, 60.5 + 1e-9], "three.yaml");
    plan(at, "one.yaml", USED, "one.plan.yaml");
    let said = measured("one.plan.yaml", &[50.0, 70.0], "again.yaml");
    assert!(said.contains("one.yaml is measured again"), "{said}");
    let strategy = "tp=4,zero=1";
    let on = |cluster: &str| {
        predicted(
            at,
            &format!("{JOB} --cluster {cluster} --strategy {strategy}"),
        )
    };
    let one = on("one.yaml");
    assert_eq!(
        evidence(&one),
        "calibrated: 1 measured run of this very system"
    );
    for cluster in ["three.yaml", "again.yaml"] {
        let several = on(cluster);
        assert_eq!(evidence(&several), evidence(&one), "{cluster}");
        for (a, b) in step(&several).into_iter().zip(step(&one)) {
            assert!((a / b - 1.0).abs() < 1e-6, "{cluster}: {a} {b}");
        }
    }
}

/// The factors of a pool's cluster widen the intervals of all pools together, and a note mentions
/// them.
#[test]
fn factors_of_pools_are_said() {
    let folder = folder();
    let at = folder.path();
    ended(
        at,
        &format!("calibrate --plan a.plan.yaml --measured {USED}:60s -o c.yaml"),
    );
    let on = |line: &str| {
        predicted(
            at,
            &format!(
                "--model llama3-8b --gpus 24 --global-batch 96 --strategy tp=2,pp=2 --cluster '{line}'"
            ),
        )
    };
    let [usual, learned] = [
        "12 x ours.yaml + 12 x ours.yaml",
        "12 x ours.yaml + 12 x c.yaml",
    ]
    .map(on);
    assert!(
        evidence(&learned).ends_with("1 measured run of other jobs under megatron-core"),
        "{learned}"
    );
    assert!(width(&usual) < width(&learned), "{usual} {learned}");
}
