//! `export`, `export --check` and `import` as a user meets them: files, exit codes, one clear message.

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

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("ended by itself")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).expect("stdout is one JSON document")
}

/// A plan of Llama 3 8B on 16 GPUs.
fn plan(folder: &Path, name: &str, runtime: &str, strategy: &str) {
    let args = [
        "estimate",
        "--model",
        "llama3-8b",
        "--gpus",
        "16",
        "--seq",
        "4096",
        "--global-batch",
        "64",
        "--runtime",
        runtime,
        "--strategy",
        strategy,
        "-o",
        name,
        "--json",
    ];
    let output = run(folder, &args);
    assert!(
        code(&output) == 0 || code(&output) == 3,
        "{}",
        stderr(&output)
    );
}

#[test]
fn export_and_import_are_inverse() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let cases = [
        (
            "megatron-lm",
            "megatron-core",
            "tp=2,pp=2,zero=1,recompute=selective",
            "megatron_args.sh",
        ),
        (
            "torchtitan@0.2",
            "torchtitan",
            "tp=2,pp=2,zero=3,stages=15/17",
            "train.toml",
        ),
        (
            "torchtitan",
            "torchtitan",
            "tp=2,zero=3,recompute=full",
            "vescale_plan_config.py",
        ),
        (
            "torchtitan@main",
            "torchtitan",
            "tp=2,zero=3",
            "vescale_plan_config.py",
        ),
        (
            "deepspeed",
            "deepspeed",
            "zero=3,recompute=full",
            "ds_config.json",
        ),
    ];
    for (target, runtime, strategy, file) in cases {
        plan(folder.path(), "a.plan.yaml", runtime, strategy);
        let output = run(
            folder.path(),
            &[
                "export",
                "a.plan.yaml",
                "--to",
                target,
                "-o",
                "out",
                "--launcher",
                "torchrun",
                "--tokenizer",
                "org/tokenizer",
                "--data",
                "org/data",
            ],
        );
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        assert_eq!(stdout(&output), "");
        let file = format!("out/{file}");
        let checked = run(
            folder.path(),
            &[
                "export",
                "--check",
                &file,
                "--to",
                target,
                "--model",
                "llama3-8b",
            ],
        );
        assert_eq!(
            (code(&checked), stdout(&checked).as_str()),
            (0, ""),
            "{}",
            stderr(&checked)
        );
        let imported = run(
            folder.path(),
            &[
                "import",
                &file,
                "--from",
                target,
                "--model",
                "llama3-8b",
                "--gpus",
                "16",
                "--seq",
                "4096",
                "--json",
                "-o",
                "b.plan.yaml",
            ],
        );
        assert_eq!(code(&imported), 0, "{}", stderr(&imported));
        let compared = run(
            folder.path(),
            &["compare", "a.plan.yaml", "b.plan.yaml", "--json"],
        );
        assert_eq!(code(&compared), 0, "{}", stderr(&compared));
        let shown = run(folder.path(), &["compare", "a.plan.yaml", "b.plan.yaml"]);
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        assert!(shown.contains("tokens/s/GPU"), "{shown}");
        let text = json(&imported)["strategy_text"]
            .as_str()
            .expect("text")
            .to_owned();
        let why = run(
            folder.path(),
            &["explain", "b.plan.yaml", "--why-not", &text, "--json"],
        );
        assert_eq!(code(&why), 0, "{}", stderr(&why));
        fs::remove_dir_all(folder.path().join("out")).expect("removed");
    }
}

#[test]
fn what_a_target_cannot_express_is_refused_whole() {
    let folder = tempfile::tempdir().expect("temporary folder");
    plan(
        folder.path(),
        "a.plan.yaml",
        "vescale",
        "pp=2,schedule=zb-h1,zero=2",
    );
    let output = run(
        folder.path(),
        &[
            "export",
            "a.plan.yaml",
            "--to",
            "torchtitan",
            "-o",
            "out",
            "--json",
        ],
    );
    assert_eq!(code(&output), 4);
    let said = stderr(&output);
    for words in [
        "zero=2",
        "nearest: zero=3",
        "schedule=1f1b",
        "--strategy",
        "search --model llama3-8b",
    ] {
        assert!(said.contains(words), "{words} in {said}");
    }
    assert_eq!(json(&output)["refused"].as_array().map(Vec::len), Some(2));
    assert!(!folder.path().join("out").exists());

    let refused = json(&output);
    // The offered search finds a plan that the target takes.
    let search = refused["search"].as_str().expect("a command").to_owned();
    let unquoted = search.replace('\'', "");
    let mut args: Vec<&str> = unquoted.split_whitespace().skip(1).collect();
    args.extend(["-o", "c.plan.yaml", "--report", "c.html", "--quiet"]);
    assert_eq!(code(&run(folder.path(), &args)), 0, "{search}");
    let output = run(
        folder.path(),
        &["export", "c.plan.yaml", "--to", "torchtitan"],
    );
    assert_eq!(code(&output), 0, "{}", stderr(&output));

    // The offered strategy is one that the target takes.
    let nearest = refused["nearest"]
        .as_str()
        .expect("a nearest plan")
        .to_owned();
    let runtime = refused["runtime"].as_str().expect("a runtime");
    plan(folder.path(), "b.plan.yaml", runtime, &nearest);
    let output = run(
        folder.path(),
        &["export", "b.plan.yaml", "--to", "torchtitan"],
    );
    assert_eq!(code(&output), 0, "{}", stderr(&output));
}

#[test]
fn bad_input_is_one_message() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let root = folder.path();
    plan(root, "a.plan.yaml", "megatron-core", "tp=2");
    fs::write(
        root.join("bad.toml"),
        "[parallelism]\ntensor_paralel_degree = 2\n",
    )
    .expect("written");
    fs::write(root.join("broken.json"), "{").expect("written");
    fs::write(root.join("taken"), "a file").expect("written");
    fs::write(root.join("bytes.yaml"), [0xff, 0xfe, 0]).expect("written");
    let unfilled = run(
        root,
        &["export", "a.plan.yaml", "--to", "megatron-lm", "-o", "open"],
    );
    assert_eq!(code(&unfilled), 0, "{}", stderr(&unfilled));
    #[rustfmt::skip]
    let cases: [(&[&str], i32, &str); 14] = [
        (&["export", "a.plan.yaml", "--to", "megatron"], 2, "one of the targets megatron-lm"),
        (&["export", "a.plan.yaml", "--to", "torchtitan@9"], 2, "one of the versions 0.3, 0.2, main"),
        (&["export", "a.plan.yaml"], 2, "--to"),
        (&["export", "missing.yaml", "--to", "deepspeed"], 2, "missing.yaml"),
        (&["export", "a.plan.yaml", "--to", "megatron-lm", "-o", "taken"], 2, "taken"),
        (&["export", "a.plan.yaml", "--to", "megatron-lm", "-o", "no/such/folder"], 2, "no/such/folder"),
        (&["export", "--check", "bad.toml"], 4, "1 thing is wrong"),
        (&["export", "--check", "broken.json"], 2, "broken.json:1"),
        (&["import", "bad.toml"], 2, "--model"),
        (&["import", "bad.toml", "--model", "llama3-8b"], 2, "give --gpus"),
        (&["export", "--check", "open/megatron_args.sh"], 4, "2 things are wrong"),
        (&["import", "open/megatron_args.sh", "--model", "qwen3-8b", "--gpus", "16"], 2, "give the right --model"),
        (&["import", "bytes.yaml", "--gpus", "8"], 2, "not UTF-8 text"),
        (&["export", "a.plan.yaml", "--to", "nanotron@2", "-o", "out"], 2, "nanotron has no version"),
    ];
    let before = fs::read_dir(root).expect("folder").count();
    for (args, expected, words) in cases {
        let output = run(root, args);
        let said = stderr(&output);
        assert_eq!(code(&output), expected, "{args:?}: {said}");
        assert!(said.contains(words), "{args:?}: {said}");
    }
    // Nothing half-written stays.
    assert_eq!(fs::read_dir(root).expect("folder").count(), before);
}

#[test]
fn a_models_configuration_imports_as_data_parallelism() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let config = r#"{"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
        "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 2048}"#;
    fs::write(folder.path().join("config.json"), config).expect("written");
    let output = run(
        folder.path(),
        &["import", "config.json", "--gpus", "8", "--json"],
    );
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert_eq!(json(&output)["strategy"]["dp_shard"], 8);
    assert_eq!(json(&output)["target"], Value::Null);
}

/// Lengths and numbers of GPUs are written as for `search` and `estimate`.
#[test]
fn sizes_beside_a_file_are_read_as_elsewhere() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let engine = r#"{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}"#;
    fs::write(folder.path().join("ds.json"), engine).expect("written");
    for (gpus, count, cluster) in [
        ("8", 8, "dgx-h100"),
        ("2 nodes", 16, "dgx-h100"),
        ("16x h100", 16, "h100"),
        ("16x a100", 16, "a100"),
    ] {
        let args = [
            "import",
            "ds.json",
            "--model",
            "llama3-8b",
            "--gpus",
            gpus,
            "--seq",
            "8k",
            "--json",
        ];
        let output = run(folder.path(), &args);
        assert_eq!(code(&output), 0, "{gpus}: {}", stderr(&output));
        let inputs = json(&output)["inputs"].clone();
        assert_eq!(inputs["gpus"], count, "{gpus}");
        assert_eq!(inputs["seq_len"], 8192, "{gpus}");
        let named = inputs["cluster"].to_string();
        assert!(named.contains(cluster), "{gpus}: {named}");
    }
    let args = [
        "import",
        "ds.json",
        "--model",
        "llama3-8b",
        "--cluster",
        "dgx-h100",
        "--gpus",
        "16x a100",
    ];
    let output = run(folder.path(), &args);
    assert_eq!(code(&output), 2);
    assert!(
        stderr(&output).contains("GPUs of one kind"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn contradictions_of_a_script_are_noted() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let script = "torchrun --nproc_per_node 8 pretrain_gpt.py --bf16 --seq-length 8192 --max-position-embeddings 4096";
    fs::write(folder.path().join("run.sh"), script).expect("written");
    let args = ["import", "run.sh", "--model", "llama3-8b", "--json"];
    let output = run(folder.path(), &args);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let note = "export --check finds run.sh:1: `--seq-length`: 8192 is above --max-position-embeddings 4096 (arguments.py:1354)";
    let notes = json(&output)["notes"].clone();
    let notes = notes.as_array().expect("notes");
    assert!(notes.iter().any(|found| found == note), "{notes:?}");
}

/// A plan for a folder's model carries the model: it opens where that folder is not.
#[test]
fn a_plan_carries_its_model() {
    let (here, there) = (
        tempfile::tempdir().expect("a folder"),
        tempfile::tempdir().expect("a folder"),
    );
    let config = r#"{"model_type": "nemotron", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 1024, "vocab_size": 1024, "partial_rotary_factor": 0.5,
        "norm_eps": 1e-05, "rope_scaling": null, "use_cache": true}"#;
    fs::create_dir(here.path().join("tiny.v2")).expect("a folder");
    fs::write(here.path().join("tiny.v2/config.json"), config).expect("written");
    let made = run(
        here.path(),
        &[
            "estimate",
            "--model",
            "tiny.v2",
            "--gpus",
            "8",
            "--seq",
            "512",
            "--global-batch",
            "16",
            "--strategy",
            "tp=2,zero=1",
            "-o",
            "a.plan.yaml",
            "--json",
        ],
    );
    assert_eq!(code(&made), 0, "{}", stderr(&made));
    let made = json(&made);
    fs::rename(
        here.path().join("a.plan.yaml"),
        there.path().join("b.plan.yaml"),
    )
    .expect("moved");
    let text = fs::read_to_string(there.path().join("b.plan.yaml")).expect("a plan");
    assert!(
        text.contains("model_config:") && !text.contains("use_cache"),
        "{text}"
    );
    let opened = run(there.path(), &["explain", "b.plan.yaml", "--json"]);
    assert_eq!(code(&opened), 0, "{}", stderr(&opened));
    assert_eq!(json(&opened)["inputs"]["model"], made["inputs"]["model"]);
    assert_eq!(
        json(&opened)["inputs"]["parameters"],
        made["inputs"]["parameters"]
    );
    let exported = run(
        there.path(),
        &["export", "b.plan.yaml", "--to", "megatron-lm"],
    );
    assert_eq!(code(&exported), 0, "{}", stderr(&exported));
    let options = stdout(&exported);
    assert!(options.contains("--rotary-percent 0.5") && options.contains("--apply-layernorm-1p"));
    // The model is part of what the plan's id says.
    let other = text.replace("hidden_size: 256", "hidden_size: 512");
    fs::write(there.path().join("c.plan.yaml"), other).expect("written");
    let refused = run(there.path(), &["explain", "c.plan.yaml"]);
    assert_eq!(code(&refused), 2);
    assert!(stderr(&refused).contains("`id`"), "{}", stderr(&refused));
}

/// A nanotron file's own model is planned for, and the plan carries it.
#[test]
fn a_files_own_model_is_planned_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let yaml = "parallelism: {dp: 2, tp: 2, pp: 1}\noptimizer: {zero_stage: 1}\nmodel:\n  dtype: bfloat16\n  model_config:\n    is_llama_config: true\n    hidden_size: 256\n    num_attention_heads: 8\n    num_hidden_layers: 4\n    intermediate_size: 1024\n    vocab_size: 1024\ntokens: {sequence_length: 512, micro_batch_size: 2, batch_accumulation_per_replica: 4}\n";
    fs::write(folder.path().join("small.yaml"), yaml).expect("written");
    let args = ["import", "small.yaml", "-o", "small.plan.yaml", "--json"];
    let imported = run(folder.path(), &args);
    assert_eq!(code(&imported), 0, "{}", stderr(&imported));
    let imported = json(&imported);
    assert_eq!(imported["inputs"]["runtime"], "nanotron");
    assert_eq!(imported["inputs"]["global_batch"], 16);
    let opened = run(folder.path(), &["explain", "small.plan.yaml", "--json"]);
    assert_eq!(code(&opened), 0, "{}", stderr(&opened));
    let refused = run(
        folder.path(),
        &["import", "small.yaml", "--model", "llama3-8b"],
    );
    assert_eq!(code(&refused), 2);
    assert!(
        stderr(&refused).contains("layers 4, but model llama3-8b has 32"),
        "{}",
        stderr(&refused)
    );
}

/// A configuration, a plan file and a text of one strategy are the same strategy in use.
#[test]
fn a_search_begins_from_what_is_in_use() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let strategy = "tp=4,pp=2,zero=1,recompute=full";
    plan(folder.path(), "now.plan.yaml", "megatron-core", strategy);
    let export = [
        "export",
        "now.plan.yaml",
        "--to",
        "megatron-lm",
        "-o",
        "now",
    ];
    assert_eq!(code(&run(folder.path(), &export)), 0);
    let sizes = "--model llama3-8b --gpus 16 --seq 4096 --global-batch 64";
    let flags: Vec<&str> = sizes.split(' ').collect();
    let sources: [(&str, &[&str]); 3] = [
        ("now.plan.yaml", &[]),
        ("now/megatron_args.sh", &[]),
        (strategy, &flags),
    ];
    let mut answers: Vec<Value> = Vec::new();
    let mut plans: Vec<String> = Vec::new();
    for (from, given) in sources {
        let args = [
            "search",
            "--from",
            from,
            "--keep",
            "mbs,sp",
            "--force",
            "-o",
            "best.plan.yaml",
        ];
        let output = run(folder.path(), &[&args, given, &["--json"]].concat());
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        let mut answer = json(&output);
        let page = fs::read_to_string(folder.path().join("best.report.html")).expect("a report");
        assert!(
            page.contains("id=\"present\"") && page.contains("recompute=full → recompute=none")
        );
        let present = answer["present"].take();
        let best = &answer["best"]["predicted"]["step_time_s"];
        let now = &present["predicted"]["step_time_s"];
        let gain = now.as_f64().expect("a time") - best.as_f64().expect("a time");
        assert_eq!(present["best_gain"]["seconds"].as_f64(), Some(gain));
        let steps = present["path"].as_array().expect("a path");
        let last = steps.last().expect("steps");
        assert_eq!(last["strategy_text"], answer["best"]["strategy_text"]);
        for change in present["changes"].as_array().expect("changes") {
            let text = change["strategy_text"].as_str().expect("text");
            assert!(text.contains("mbs=1") && text.contains("sp=on"), "{text}");
        }
        answers.push(present);
        plans.push(fs::read_to_string(folder.path().join("best.plan.yaml")).expect("a plan"));
    }
    assert!(plans.iter().all(|plan| *plan == plans[0]), "{plans:?}");
    for key in ["strategy_text", "predicted", "changes", "path"] {
        assert_eq!(answers[0][key], answers[1][key], "{key}");
        assert_eq!(answers[0][key], answers[2][key], "{key}");
    }
}
