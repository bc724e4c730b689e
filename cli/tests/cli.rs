//! The command as a user meets it: answers, files, exit codes, and one clear message when the input
//! is wrong.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn run(folder: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vescale-plan"))
        .args(args)
        .current_dir(folder)
        .env("NO_COLOR", "1")
        .output()
        .expect("the binary starts")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).expect("stdout is one JSON document")
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("ended by itself")
}

const SMALL: &[&str] = &[
    "--model",
    "llama3-8b",
    "--gpus",
    "8",
    "--global-batch",
    "32",
    "--seq",
    "4096",
];

fn with<'a>(first: &[&'a str], rest: &[&'a str]) -> Vec<&'a str> {
    [first, SMALL, rest].concat()
}

/// The MFU counts causal attention over a million tokens once, the PaLM MFU as if unmasked.
#[test]
fn utilisation_of_long_sequences_is_below_the_peak() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let asked = [
        "estimate",
        "--model",
        "llama3-8b",
        "--gpus",
        "256",
        "--seq",
        "1048576",
        "--global-batch",
        "4",
        "--strategy",
        "tp=8,cp=32,recompute=full",
    ];
    let predicted = &json(&run(folder.path(), &[&asked[..], &["--json"]].concat()))["predicted"];
    let [once, palm] = ["mfu", "mfu_palm"].map(|key| predicted[key].as_f64().expect("a number"));
    assert!(once < 1.0 && palm > 1.8 * once, "{once} {palm}");
    let text = run(folder.path(), &asked).stdout;
    let text = String::from_utf8_lossy(&text);
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let said = format!(
        "causal attention counted once ({:.1}% by the PaLM convention)",
        palm * 100.0
    );
    assert!(text.contains(&said), "{text}");
}

#[test]
fn search_writes_plan_and_report_and_prints_json() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let output = run(
        folder.path(),
        &with(&["search"], &["--json", "--tokens", "1T", "--price", "2.5"]),
    );
    assert_eq!(
        code(&output),
        0,
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let answer = json(&output);
    assert_eq!(answer["schema_version"], 1);
    let best = &answer["best"]["predicted"];
    assert!(best["step_time_s"].as_f64().is_some_and(|t| t > 0.0));
    assert!(best["fits"].as_bool() == Some(true));
    assert_eq!(answer["inputs"]["global_batch"], 32);
    assert!(
        answer["budget"]["dollars"]
            .as_f64()
            .is_some_and(|d| d > 0.0)
    );
    let space = &answer["space"];
    let pruned: u64 = space["pruned"]
        .as_object()
        .expect("object")
        .values()
        .filter_map(Value::as_u64)
        .sum();
    assert_eq!(
        space["simulated"].as_u64().expect("count") + pruned,
        space["strategies"].as_u64().expect("count")
    );
    let plan = folder
        .path()
        .join(answer["plan_path"].as_str().expect("path"));
    let report = folder
        .path()
        .join(answer["report_path"].as_str().expect("path"));
    let html = fs::read_to_string(&report).expect("report");
    assert!(
        html.contains("id=\"verdict\"") && !html.contains("http://") && !html.contains("https://")
    );

    // The plan reads back and predicts the same.
    let explained = run(
        folder.path(),
        &["explain", plan.to_str().expect("path"), "--json"],
    );
    assert_eq!(
        code(&explained),
        0,
        "{}",
        String::from_utf8_lossy(&explained.stderr)
    );
    let again = json(&explained);
    assert_eq!(again["predicted"]["step_time_s"], best["step_time_s"]);
    assert!(
        again["neighbours"]
            .as_array()
            .is_some_and(|n| !n.is_empty())
    );

    let compared = run(
        folder.path(),
        &[
            "compare",
            plan.to_str().expect("path"),
            plan.to_str().expect("path"),
            "--json",
        ],
    );
    assert_eq!(json(&compared)["changed"].as_array().map(Vec::len), Some(0));
    let traced = run(
        folder.path(),
        &["trace", plan.to_str().expect("path"), "-o", "trace.json"],
    );
    assert_eq!(code(&traced), 0);
    let trace: Value =
        serde_json::from_str(&fs::read_to_string(folder.path().join("trace.json")).expect("trace"))
            .expect("JSON");
    assert!(
        trace["traceEvents"]
            .as_array()
            .is_some_and(|e| e.len() > 10)
    );
    let reported = run(
        folder.path(),
        &["report", plan.to_str().expect("path"), "-o", "again.html"],
    );
    assert_eq!(code(&reported), 0);
}

#[test]
fn searching_twice_gives_the_same_bytes() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let mut answers = Vec::new();
    for threads in ["1", "2", "8"] {
        let output = run(
            folder.path(),
            &with(&["search"], &["--json", "--threads", threads]),
        );
        let mut answer = json(&output);
        answer["elapsed_s"] = Value::Null;
        answers.push((
            answer.to_string(),
            fs::read(
                folder
                    .path()
                    .join("llama3-8b-8gpus-dgx-h100-megatron-core.plan.yaml"),
            )
            .expect("plan"),
        ));
    }
    assert!(answers.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn exhaustive_gives_the_same_best() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let pruned = json(&run(folder.path(), &with(&["search"], &["--json"])));
    let all = json(&run(
        folder.path(),
        &with(&["search"], &["--json", "--exhaustive"]),
    ));
    assert_eq!(pruned["best"], all["best"]);
}

#[test]
fn estimate_says_whether_it_fits_by_its_exit_code() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let fits = run(
        folder.path(),
        &with(&["estimate"], &["--strategy", "tp=4", "--json"]),
    );
    assert_eq!(code(&fits), 0);
    let answer = json(&fits);
    assert_eq!(answer["fits"], true);
    assert!(answer["memory"].as_array().is_some_and(|m| m.len() > 5));
    let large = run(
        folder.path(),
        &[
            "estimate",
            "--model",
            "llama3-70b",
            "--gpus",
            "8",
            "--global-batch",
            "8",
            "--strategy",
            "tp=8",
            "--json",
        ],
    );
    assert_eq!(code(&large), 3);
    assert_eq!(json(&large)["fits"], false);
}

#[test]
fn nothing_fits_says_what_to_relax() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let output = run(
        folder.path(),
        &[
            "search",
            "--model",
            "llama3.1-405b",
            "--gpus",
            "8",
            "--json",
        ],
    );
    assert_eq!(code(&output), 3);
    let answer = json(&output);
    assert_eq!(answer["best"], Value::Null);
    assert!(answer["relax"].to_string().contains("GPUs would fit"));
    let page = answer["report_path"]
        .as_str()
        .expect("a report of what would fit");
    let page = fs::read_to_string(folder.path().join(page)).expect("written");
    assert!(page.contains("No plan fits") && page.contains("GPUs would fit"));
    let files = fs::read_dir(folder.path()).expect("folder").count();
    assert_eq!(files, 1, "no plan");
}

#[test]
fn size_finds_the_smallest() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let output = run(
        folder.path(),
        &[
            "size",
            "--model",
            "llama3-70b",
            "--gpus",
            "1,8,16",
            "--tokens",
            "1T",
            "--json",
        ],
    );
    assert_eq!(code(&output), 0);
    let answer = json(&output);
    assert!(
        answer["smallest"]
            .as_u64()
            .is_some_and(|n| n == 8 || n == 16)
    );
    assert_eq!(answer["sizes"].as_array().map(Vec::len), Some(3));
}

#[test]
fn published_runs_are_predicted_within_the_stated_error() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let output = run(
        folder.path(),
        &["validate", "--json", "--tolerance", "0.12"],
    );
    assert_eq!(code(&output), 0, "the median step-time error is above 12%");
    let answer = json(&output);
    let all = answer["summary"]
        .as_array()
        .and_then(|groups| groups.iter().find(|g| g["by"] == "all"))
        .expect("a group of all runs")
        .clone();
    let number = |value: &Value| value.as_f64().expect("a number");
    assert!(number(&all["step_time"]["p90"]) <= 0.35);
    assert!(number(&all["peak_memory"]["median"]) <= 0.12);
    let runs = answer["runs"].as_array().expect("runs");
    let predicted = runs.iter().filter(|r| !r["predicted"].is_null()).count();
    assert!(
        predicted * 10 >= runs.len() * 9,
        "{predicted} of {}",
        runs.len()
    );
    let strict = run(folder.path(), &["validate", "--tolerance", "0.0001"]);
    assert_eq!(code(&strict), 5);
}

#[test]
fn lists_and_schemas_are_json() {
    let folder = tempfile::tempdir().expect("temporary folder");
    for list in ["models", "clusters", "runtimes"] {
        let answer = json(&run(folder.path(), &[list, "--json"]));
        assert!(
            answer["items"]
                .as_array()
                .is_some_and(|items| items.len() > 8),
            "{list}"
        );
    }
    for format in [
        "plan",
        "cluster",
        "cluster-extension",
        "device",
        "runtime",
        "constraints",
        "runs",
        "profile",
    ] {
        let answer = json(&run(folder.path(), &["schema", format]));
        assert!(answer["$schema"].is_string(), "{format}");
    }
    assert_eq!(code(&run(folder.path(), &["completions", "bash"])), 0);
}

/// A format, a place in its schema, and what stands there: schemas refuse what the command refuses.
#[rustfmt::skip]
const BOUNDS: &[(&str, &str, &str)] = &[
    ("plan", "/properties/schema_version/const", "1"),
    ("plan", "/properties/headroom/exclusiveMaximum", "1"),
    ("plan", "/$defs/WorkloadFile/properties/seq_len/maximum", "16777216"),
    ("plan", "/$defs/StrategyJson/properties/tp/minimum", "1"),
    ("plan", "/$defs/Zero/enum", "[0,1,2,3]"),
    ("cluster", "/properties/gpus_per_node/maximum", "65536"),
    ("cluster", "/properties/jitter/properties/value/exclusiveMaximum", "1"),
    ("cluster", "/$defs/Bandwidth/pattern", r#""^\\s*\\+?[0-9._]+\\s*(B/s|MB/s|GB/s|TB/s|GiB/s|Gb/s|Gbit/s|Tb/s)\\s*$""#),
    ("cluster-extension", "/properties/speed/properties/value/exclusiveMinimum", "0"),
    ("device", "/properties/sm_count/minimum", "1"),
    ("runs", "/$defs/Run/properties/global_batch/maximum", "16777216"),
    ("runs", "/$defs/RunModel/properties/shared_experts/minimum", "0"),
    ("runs", "/$defs/Run/additionalProperties", "false"),
    ("constraints", "/properties/uneven/maximum", "64"),
];

#[test]
fn schemas_have_the_bounds_of_what_they_describe() {
    let folder = tempfile::tempdir().expect("temporary folder");
    for (format, place, expected) in BOUNDS {
        let schema = json(&run(folder.path(), &["schema", format]));
        let found = schema.pointer(place).map(ToString::to_string);
        assert_eq!(found.as_deref(), Some(*expected), "{format} {place}");
    }
}

/// Checks a refusal: exit code 2, `expected` on stderr, no panic and no files left behind.
fn refuses(args: &[&str], files: &[(&str, &[u8])], expected: &str) {
    let folder = tempfile::tempdir().expect("temporary folder");
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).expect("written");
    }
    let output = run(folder.path(), args);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(code(&output), 2, "{args:?}: {message}");
    assert!(message.contains(expected), "{args:?}: {message}");
    assert!(!message.contains("panicked"), "{args:?}: {message}");
    let left = fs::read_dir(folder.path()).expect("folder").count();
    assert_eq!(left, files.len(), "{args:?} left files behind");
}

#[test]
fn wrong_names_and_values() {
    let search = |extra: &[&str], expected: &str| refuses(&with(&["search"], extra), &[], expected);
    search(&["--cluster", "dgx-h10"], "nearest   dgx-h100");
    search(&["--runtime", "megatorn"], "nearest   megatron");
    search(&["--precision", "bf61"], "bf16");
    search(&["--objective", "tiem"], "time");
    search(&["--fix", "tpp=2"], "nearest   tp");
    search(&["--fix", "tp=0"], "whole number");
    search(&["--headroom", "1.5"], "[0, 1)");
    search(&["--top", "0"], "--top 0");
    search(&["--threads", "0"], "--threads 0");
    search(&["--tokens", "many"], "15T");
    search(&["--tokens", "1T", "--price=-1"], "--price");
    search(&["--no-such-flag"], "--no-such-flag");
    search(&["--constraints", "absent.yaml"], "absent.yaml");
    #[rustfmt::skip]
    let others: [(&[&str], &str); 8] = [
        (&["lama70b", "--gpus", "8"], "nearest   llama70b"),
        (&["llama70b", "--gpus", "0"], "--gpus 0"),
        (&["llama70b", "--gpus", "99999999999"], "1 to 1048576"),
        (&["llama70b", "--gpus", "12"], "8 and 16"),
        (&["llama70b", "--gpus", "-8"], "-8"),
        (&["llama70b", "--gpus", "8", "--seq", "0"], "--seq 0"),
        (&["llama70b", "--gpus", "8", "--global-batch", "0"], "--global-batch 0"),
        (&["absent/config.json", "--gpus", "8"], "absent/config.json"),
    ];
    for (args, expected) in others {
        refuses(&[&["search", "--model"], args].concat(), &[], expected);
    }
    for (strategy, expected) in [
        ("tp=3", "multiply to the number of GPUs"),
        ("tp=16", "multiply to the number of GPUs"),
        ("tpp=8", "nearest   tp"),
        ("tp=0", "whole number"),
        ("tp", "key=value"),
        ("tp=2,tp=4", "given twice"),
        ("pp=2,schedule=1f2b", "one of 1f1b"),
        ("pp=2,vpp=3,schedule=1f1b", "one stage per rank"),
        ("zero=9", "0, 1, 2 or 3"),
        ("zero=3", "has no ZeRO-3"),
        ("ep=2", "need a model with experts"),
        ("mbs=64", "global batch"),
        ("stages=1/2", "stages hold"),
        ("order=tp-pp", "five axes"),
    ] {
        refuses(
            &with(&["estimate"], &["--strategy", strategy]),
            &[],
            expected,
        );
    }
}

#[test]
fn malformed_files() {
    let model = |bytes: &[u8], expected: &str| {
        refuses(
            &["search", "--model", "config.json", "--gpus", "8"],
            &[("config.json", bytes)],
            expected,
        );
    };
    model(b"{\"model_type\": \"llama\"", "line 1");
    model(b"\xff\xfe\x00", "not UTF-8");
    model(b"[]", "expected an object");
    model(b"{}", "field `model_type`");
    model(b"{\"model_type\": \"lama\"}", "nearest   llama");
    model(b"{\"model_type\": \"llama\"}", "field `hidden_size`");
    model(
        b"{\"model_type\": \"llama\", \"hidden_size\": \"wide\"}",
        "a whole number up to",
    );
    model(
        b"{\"model_type\": \"llama\", \"hidden_size\": -1}",
        "a whole number up to",
    );
    let deep = [
        b"{\"a\":".repeat(10_000),
        b"1".to_vec(),
        b"}".repeat(10_000),
    ]
    .concat();
    model(&deep, "recursion");
    let zero = br#"{"model_type":"llama","hidden_size":0,"num_hidden_layers":1,"num_attention_heads":1,"intermediate_size":1,"vocab_size":1}"#;
    model(zero, "1 to 16777216");

    let cluster = |bytes: &[u8], expected: &str| {
        refuses(
            &with(&["search"], &["--cluster", "c.yaml"]),
            &[("c.yaml", bytes)],
            expected,
        );
    };
    cluster(b"", "c.yaml");
    cluster(b"schema_version: 1\nnmae: x\n", "nmae");
    cluster(b"schema_version: [1", "line 1");
    cluster(b"\xff\xfe", "not UTF-8");
    cluster(&b"[".repeat(100_000), "c.yaml");
    let whole = "schema_version: 1\nname: mine\ndevice: h100-sxm\ngpus_per_node: 8\nscale_up: {bandwidth: {value: 450 GB/s, origin: assumed, source: me}}\nscale_out: {bandwidth: {value: 50 GB/s, origin: assumed, source: me}}\nfabric: infini_band\n";
    cluster(
        whole.replace("per_node: 8", "per_node: 0").as_bytes(),
        "gpus_per_node",
    );
    cluster(
        whole.replace("h100-sxm", "h100-smx").as_bytes(),
        "nearest   h100-sxm",
    );
    cluster(whole.replace("450 GB/s", "450 XB/s").as_bytes(), "450 XB/s");

    refuses(
        &["explain", "plan.yaml"],
        &[("plan.yaml", b"schema_version: 1\n")],
        "plan.yaml",
    );
    refuses(
        &["validate", "runs.yaml"],
        &[("runs.yaml", b"schema: runs-v9\nruns: []\n")],
        "runs-v1",
    );
    refuses(
        &with(&["search"], &["--constraints", "k.yaml"]),
        &[("k.yaml", b"mni: {tp: 2}\n")],
        "mni",
    );
}

#[test]
fn own_clusters_and_models_work() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let cluster = "schema_version: 1\nname: mine\ndevice: a100-80gb\ngpus_per_node: 4\nscale_up: {bandwidth: {value: 300 GB/s, origin: assumed, source: me}}\nscale_out: {bandwidth: {value: 200 Gb/s, origin: assumed, source: me}}\nfabric: roce\n";
    fs::write(folder.path().join("mine.yaml"), cluster).expect("written");
    fs::create_dir(folder.path().join("checkpoint")).expect("made");
    let model = r#"{"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}"#;
    fs::write(folder.path().join("checkpoint/config.json"), model).expect("written");
    let output = run(
        folder.path(),
        &[
            "search",
            "--model",
            "checkpoint",
            "--cluster",
            "mine.yaml",
            "--gpus",
            "8",
            "--seq",
            "1024",
            "--global-batch",
            "64",
            "--json",
        ],
    );
    assert_eq!(
        code(&output),
        0,
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(json(&output)["inputs"]["model"], "checkpoint");
    assert_eq!(json(&output)["inputs"]["parameters"], 124_439_808);
}

#[test]
fn what_is_made_from_a_plan_lies_beside_it() {
    let folder = tempfile::tempdir().expect("temporary folder");
    fs::create_dir(folder.path().join("plans")).expect("a folder");
    for (plan, stem) in [("plans/v1.5.plan.yaml", "v1.5"), ("plans/a.yaml", "a")] {
        let searched = run(folder.path(), &with(&["search"], &["-q", "-o", plan]));
        assert_eq!(code(&searched), 0);
        let report = folder.path().join(format!("plans/{stem}.report.html"));
        fs::remove_file(&report).expect("the search's report");
        for command in ["report", "trace"] {
            assert_eq!(code(&run(folder.path(), &[command, plan])), 0);
        }
        assert!(report.exists());
        let trace = folder.path().join(format!("plans/{stem}.trace.json"));
        assert!(trace.exists());
    }
    assert_eq!(fs::read_dir(folder.path()).expect("folder").count(), 1);
}

#[test]
fn unwritable_outputs_leave_nothing() {
    let folder = tempfile::tempdir().expect("temporary folder");
    for (flag, path) in [
        ("--output-plan", "absent/plan.yaml"),
        ("--report", "absent/report.html"),
    ] {
        let output = run(folder.path(), &with(&["search"], &[flag, path, "-q"]));
        assert_eq!(code(&output), 2);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            message.contains("cannot write") && message.contains(&format!("where     {path}")),
            "{message}"
        );
        assert_eq!(fs::read_dir(folder.path()).expect("folder").count(), 0);
    }
}

#[test]
fn a_tampered_plan_is_refused() {
    let folder = tempfile::tempdir().expect("temporary folder");
    assert_eq!(code(&run(folder.path(), &with(&["search"], &["-q"]))), 0);
    let path = folder
        .path()
        .join("llama3-8b-8gpus-dgx-h100-megatron-core.plan.yaml");
    let text = fs::read_to_string(&path)
        .expect("plan")
        .replace("global_batch: 32", "global_batch: 64");
    fs::write(&path, text).expect("written");
    let output = run(folder.path(), &["explain", path.to_str().expect("path")]);
    assert_eq!(code(&output), 2);
    assert!(String::from_utf8_lossy(&output.stderr).contains("does not match the decisions"));
}
