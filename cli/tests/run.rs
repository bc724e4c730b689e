//! `run` and `checkpoint` as a user meets them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn command(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vescale-plan"));
    command.args(args).current_dir(folder).env("NO_COLOR", "1");
    command
}

fn run(folder: &Path, args: &[&str]) -> Output {
    command(folder, args).output().expect("the binary starts")
}

fn answer(output: &Output) -> Value {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    serde_json::from_slice(&output.stdout).expect("stdout is one JSON document")
}

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples")
}

/// Every example of a model gives the same weights in exact mode, and the bytes predicted.
fn check(model: &str, layouts: &[&str]) {
    let folder = tempfile::tempdir().expect("temporary folder");
    let mut expected = None;
    for layout in layouts {
        let plan = examples().join(format!("{model}-{layout}.yaml"));
        let plan = plan.to_str().expect("a path in UTF-8");
        let args = ["run", plan, "--steps", "2", "--numerics", "exact", "--json"];
        let answer = answer(&run(folder.path(), &args));
        let got = (
            answer["weights_sha256"].clone(),
            answer["losses"][1]["bits"].clone(),
        );
        assert_eq!(expected.get_or_insert(got.clone()), &got, "{layout}");
        let phases = answer["phases"].as_array().expect("a list");
        assert!(phases.iter().any(|p| p["phase"] == "F"));
        for line in answer["memory"].as_array().expect("a list") {
            assert_eq!(
                line["measured_bytes"], line["predicted_bytes"],
                "{layout} {line}"
            );
        }
    }
}

#[test]
fn examples_of_one_model_agree() {
    check(
        "nanogpt",
        &[
            "single",
            "tp2-pp2",
            "dp2-zero3",
            "cp2-dp2",
            "tp2-cp2-dp2-pp2",
        ],
    );
    check("llama", &["single", "tp2-dp2", "pp2-zbv", "tp2-cp2"]);
    check("mixtral", &["single", "dp4-ep4", "tp2-dp2-ep2-etp2"]);
}

#[test]
fn processes_give_the_bits_of_threads() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let plan = examples().join("nanogpt-tp2-pp2.yaml");
    let plan = plan.to_str().expect("a path in UTF-8");
    let args = ["run", plan, "--steps", "2", "--numerics", "exact", "--json"];
    let threads = answer(&run(folder.path(), &args));
    let tcp = [&args[..], &["--communicator", "tcp"]].concat();
    let processes = answer(&run(folder.path(), &tcp));
    assert_eq!(processes["weights_sha256"], threads["weights_sha256"]);
    assert_eq!(processes["ranks"], 4);
    // Half a launcher is no launcher.
    let output = command(folder.path(), &tcp)
        .env("RANK", "1")
        .output()
        .expect("the binary starts");
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("RANK but not WORLD_SIZE"), "{said}");
}

#[test]
fn checkpoints_are_inspected_verified_resharded_and_resumed() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = |layout: &str| {
        let plan = examples().join(format!("llama-{layout}.yaml"));
        plan.to_str().expect("a path in UTF-8").to_owned()
    };
    let (single, pipeline) = (path("single"), path("pp2-zbv"));
    let at = |args: &[&str]| answer(&run(folder.path(), args));
    let exact = ["--numerics", "exact", "--steps", "4", "--json"];
    let whole = at(&[&["run", &single], &exact[..]].concat());
    let replanned = at(&[
        &["run", &path("tp2-dp2"), "--replan-at", "2", &pipeline],
        &exact[..],
    ]
    .concat());
    assert_eq!(replanned["weights_sha256"], whole["weights_sha256"]);
    // Half of the run; the schedule of the learning rate is that of all of it, so the whole is
    // saved at every step and the last checkpoint is taken away.
    at(&[
        &[
            "run",
            &path("tp2-dp2"),
            "--checkpoints",
            "saved",
            "--every",
            "2",
        ],
        &exact[..],
    ]
    .concat());
    fs::remove_dir_all(folder.path().join("saved/step-00000004")).expect("it was saved");
    let inspected = at(&["checkpoint", "inspect", "saved", "--json"]);
    assert_eq!(inspected["manifest"]["step"], 2);
    let reshard = [
        "checkpoint",
        "reshard",
        "saved",
        "--plan",
        &pipeline,
        "-o",
        "other",
        "--json",
    ];
    let resharded = at(&reshard);
    assert_eq!(resharded["step"], 2);
    assert_eq!(resharded["path"], "other/step-00000002");
    assert_eq!(resharded["checkpoint_path"], "saved/step-00000002");
    assert_eq!(
        at(&["checkpoint", "verify", "other", "--json"])["whole"],
        true
    );
    let resumed = at(&[&["run", &single, "--resume", "other"], &exact[..]].concat());
    assert_eq!(resumed["first_step"], 2);
    assert_eq!(resumed["weights_sha256"], whole["weights_sha256"]);
}

#[test]
fn weights_go_to_the_hubs_format_and_back() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let at = |args: &[&str]| {
        let output = run(folder.path(), args);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{stderr}");
        output
    };
    for model in ["nanogpt", "llama", "mixtral"] {
        let plan = examples().join(format!("{model}-single.yaml"));
        let plan = plan.to_str().expect("a path in UTF-8");
        let train = |more: &[&str]| {
            let args = ["run", plan, "--steps", "1", "--numerics", "exact", "--json"];
            answer(&at(&[&args[..], more].concat()))
        };
        let saved = format!("{model}-saved");
        let file = format!("{model}.safetensors");
        train(&["--checkpoints", &saved]);
        let exported = answer(&at(&[
            "checkpoint",
            "export",
            &saved,
            "-o",
            &file,
            "--json",
        ]));
        assert_eq!(exported["path"], file.as_str());
        assert_eq!(exported["step"], 1);
        let tuned = format!("{model}-tuned");
        let fine_tuned = train(&["--init", &file, "--checkpoints", &tuned]);
        let start = fine_tuned["losses"][0]["loss"].as_f64().expect("a number");
        assert!(start < 4.7, "{model} starts from what it learned: {start}");
        let missing = run(folder.path(), &["run", plan, "--init", "no.safetensors"]);
        assert_eq!(missing.status.code(), Some(2));
    }
    let other = examples().join("llama-single.yaml");
    let other = other.to_str().expect("a path in UTF-8");
    let output = run(
        folder.path(),
        &["run", other, "--init", "nanogpt.safetensors"],
    );
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        stderr.contains("model.embed_tokens.weight is not there"),
        "{stderr}"
    );
}

#[test]
fn a_killed_run_leaves_only_whole_checkpoints() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let plan = examples().join("nanogpt-dp2-zero3.yaml");
    let plan = plan.to_str().expect("a path in UTF-8");
    let saving = [
        "run",
        plan,
        "--steps",
        "1000000",
        "--checkpoints",
        "saved",
        "--every",
        "1",
    ];
    let saved = folder.path().join("saved");
    let newest = || {
        let entries = fs::read_dir(&saved).into_iter().flatten().flatten();
        let names = entries.map(|e| e.file_name().to_string_lossy().into_owned());
        let steps = names.filter_map(|name| name.strip_prefix("step-")?.parse::<u64>().ok());
        steps.max()
    };
    for kill in 0..30u64 {
        let before = newest();
        let resume: &[&str] = if before.is_some() { &["--resume"] } else { &[] };
        let mut child: Child = command(folder.path(), &[&saving[..], resume].concat())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the binary starts");
        // Moments spread over the time of several saves, counted from this run's first.
        let start = Instant::now();
        while newest() == before && start.elapsed() < Duration::from_secs(60) {
            assert!(child.try_wait().expect("a child").is_none(), "kill {kill}");
            std::thread::sleep(Duration::from_millis(2));
        }
        std::thread::sleep(Duration::from_millis(kill * 37 % 400));
        child.kill().expect("it runs until it is killed");
        child.wait().expect("a child");
        assert!(newest() > before, "kill {kill}");
        let output = run(folder.path(), &["checkpoint", "verify", "saved"]);
        assert_eq!(output.status.code(), Some(0), "kill {kill}");
    }
}

#[test]
fn bad_input_has_one_clear_message() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let plan = examples().join("nanogpt-single.yaml");
    let plan = plan.to_str().expect("a path in UTF-8");
    fs::write(folder.path().join("short.txt"), "too short").expect("writable");
    fs::write(folder.path().join("odd.bin"), [1, 2, 3]).expect("writable");
    fs::write(folder.path().join("large.bin"), [255u8; 400]).expect("writable");
    let llama = examples().join("llama-single.yaml");
    let llama = llama.to_str().expect("a path in UTF-8");
    let save = ["run", plan, "--steps", "1", "--checkpoints", "saved", "-q"];
    assert_eq!(run(folder.path(), &save).status.code(), Some(0));
    #[rustfmt::skip]
    let cases: &[(&[&str], &str)] = &[
        (&["run", "no.yaml"], "no.yaml"),
        (&["run", plan, "--data", "no.txt"], "No such file"),
        (&["run", plan, "--data", "short.txt"], "9 tokens are too few"),
        (&["run", plan, "--data", "odd.bin"], "3 bytes are not a whole number"),
        (&["run", plan, "--data", "large.bin"],
            "token 65535 at position 0 is beyond the model's vocabulary of 128"),
        (&["run", plan, "--steps", "0"], "expected  at least 1"),
        (&["run", plan, "--resume"], "expected  a checkpoint after it"),
        (&["run", plan, "--resume", "nowhere"], "holds no complete checkpoint"),
        (&["run", llama, "--resume", "saved"], "model is nanogpt there and llama here"),
        (&["run", plan, "--resume", "saved", "--seed", "5"], "seed is 1234 there and 5 here"),
        (&["run", plan, "--resume", "saved", "--steps", "1"], "has seen 1 steps already"),
        (&["run", plan, "--replan-at", "0", plan], "a step from 1 to"),
        (&["run", plan, "--checkpoints", "short.txt"], "where     short.txt"),
        (&["checkpoint", "verify", "nowhere"], "holds no complete checkpoint"),
    ];
    one_message(folder.path(), cases);
}

/// Each command ends with code 2 and one mistake, which has these words.
fn one_message(folder: &Path, cases: &[(&[&str], &str)]) {
    for (args, expected) in cases {
        let output = run(folder, args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(stderr.contains(expected), "{args:?}: {stderr}");
        let one = stderr.lines().skip(1).all(|line| line.starts_with("  "));
        assert!(one, "{args:?}: {stderr}");
    }
}

/// Bad steps, profiles and output files are reported before training, and leave no files behind.
#[test]
fn flags_are_checked_before_training() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let plan = examples().join("nanogpt-single.yaml");
    let plan = plan.to_str().expect("a path in UTF-8");
    let llama = examples().join("llama-single.yaml");
    let llama = llama.to_str().expect("a path in UTF-8");
    fs::write(folder.path().join("words.txt"), "words").expect("writable");
    let half = "--steps 4 --checkpoints half --every 2 -q";
    let half: Vec<&str> = ["run", plan].into_iter().chain(half.split(' ')).collect();
    assert_eq!(run(folder.path(), &half).status.code(), Some(0));
    #[rustfmt::skip]
    let cases: &[(&[&str], &str)] = &[
        (&["run", plan, "--steps", "4", "--resume", "half/step-00000002", "--replan-at", "1", plan],
            "a step from 2 to 3: the checkpoint has seen 2"),
        (&["run", plan, "--replan-at", "1", llama], "another run: model is nanogpt before and llama after"),
        (&["run", plan, "--trace", "t.json", "--report", "./t.json"], "--trace and --report name the same file"),
        (&["run", plan, "--trace", "t", "--log", "t.predicted.json"], "--log name the same file"),
        (&["run", plan, "--profile", "nothere"], "where     --profile nothere"),
        (&["run", plan, "--timeout", "0"], "expected  a whole number from 1 to 2592000"),
        (&["run", plan, "--resume", "nowhere", "--log", "new.log"], "holds no complete checkpoint"),
        (&["run", plan, "--log", "words.txt"], "or --force to replace the file"),
    ];
    one_message(folder.path(), cases);
    for left in ["new.log", "t.json", "t"] {
        assert!(!folder.path().join(left).exists(), "{left} was left");
    }
}

/// The plan for `--replan-at` may have another layout, but must train the same.
#[test]
fn another_run_is_not_gone_on_with() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let at = |name: &str| folder.path().join(name);
    for beside in ["nanogpt", "data"] {
        std::os::unix::fs::symlink(examples().join(beside), at(beside)).expect("a link");
    }
    let text = fs::read_to_string(examples().join("nanogpt-single.yaml")).expect("a plan");
    fs::write(at("plan.yaml"), &text).expect("writable");
    fs::write(at("words.txt"), "words ".repeat(999)).expect("writable");
    let rate = "  learning_rate: 0.001\n";
    let seeded = format!("  seed: 5\n{rate}");
    for (from, to, says) in [
        ("  steps: 100\n", "  steps: 4\n", "over 100 steps"),
        (rate, &seeded, "seed is 1234 before and 5 after"),
        ("clip_norm: 1.0", "clip_norm: 2.0", "optimizer is AdamW"),
        ("data/tales.txt", "words.txt", "data is "),
    ] {
        let other = text.replace(from, to);
        assert_ne!(other, text, "{from}");
        fs::write(at("other.yaml"), other).expect("writable");
        let args = ["run", "plan.yaml", "--replan-at", "1", "other.yaml"];
        let output = run(folder.path(), &args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{says}: {stderr}");
        assert!(stderr.contains(says), "{says}: {stderr}");
        assert!(stderr.contains("where     other.yaml"), "{says}: {stderr}");
    }
}

/// A layout that exact mode cannot sum is refused with the place of the cut and the plan's file.
#[test]
fn a_cut_block_is_placed_in_its_plan() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let model = examples().join("nanogpt/config.json");
    let model = model.to_str().expect("a path in UTF-8");
    let data = examples().join("data/tales.txt");
    let data = data.to_str().expect("a path in UTF-8");
    let made = run(
        folder.path(),
        &[
            "estimate",
            "--model",
            model,
            "--runtime",
            "vescale",
            "--gpus",
            "8",
            "--seq",
            "32",
            "--global-batch",
            "8",
            "--precision",
            "fp32",
            "--strategy",
            "cp=8,mbs=1",
            "-o",
            "cut.yaml",
        ],
    );
    assert_eq!(
        made.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&made.stderr)
    );
    let args = [
        "run",
        "cut.yaml",
        "--data",
        data,
        "--steps",
        "1",
        "--numerics",
        "exact",
        "-q",
    ];
    let output = run(folder.path(), &args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    for says in [
        "cuts the 32 of them at ",
        "where     cut.yaml",
        "expected  shards of a multiple of 4",
    ] {
        assert!(stderr.contains(says), "{says}: {stderr}");
    }
}

/// A log over another kind of file is refused, and made there when it is forced.
#[test]
fn a_log_replaces_another_file_when_forced() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let plan = examples().join("nanogpt-single.yaml");
    let plan = plan.to_str().expect("a path in UTF-8");
    let log = folder.path().join("notes");
    fs::write(&log, "notes\n").expect("writable");
    let args = ["run", plan, "--steps", "2", "-q", "--log", "notes"];
    assert_eq!(run(folder.path(), &args).status.code(), Some(2));
    assert_eq!(fs::read_to_string(&log).expect("kept"), "notes\n");
    let forced = run(folder.path(), &[&args[..], &["--force"]].concat());
    assert_eq!(
        forced.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&forced.stderr)
    );
    let lines = fs::read_to_string(&log).expect("a log");
    assert_eq!(lines.lines().count(), 2, "{lines}");
    assert!(lines.starts_with("{\"step\":0,"), "{lines}");
}

/// A log of a run on a profiled machine cannot calibrate factors, which belong to tables.
fn no_factors_are_learned(folder: &Path) {
    let args = ["calibrate", "log.jsonl", "--plan", "local.plan.yaml"];
    let refused = run(folder, &[&args[..], &["-o", "c.yaml"]].concat());
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("cluster local is a profile"), "{said}");
    assert!(!folder.join("c.yaml").exists());
}

/// `run` predicts with the profile that the plan was made with, wherever that file is.
fn the_plans_own_profile_predicts(folder: &Path, model: &str) {
    let own = folder.join("own");
    fs::create_dir(&own).expect("a folder");
    let profile = fs::read_to_string(folder.join("vescale-profile.yaml")).expect("a profile");
    let cores = profile.lines().find(|line| line.starts_with("  cores: "));
    let one_core = profile.replacen(cores.expect("cores"), "  cores: 1", 1);
    fs::write(own.join("own.yaml"), one_core).expect("written");
    let job = format!("--model {model} --gpus 4 --seq 64 --global-batch 16 --runtime vescale");
    let asked = |words: &str| {
        let args: Vec<&str> = words.split_whitespace().chain(job.split(' ')).collect();
        run(&own, &args)
    };
    let estimate = |cluster: &str, plan: &str| {
        let words = "estimate --precision fp32 --strategy tp=2,pp=2,mbs=2 --json";
        answer(&asked(&format!("{words} --cluster {cluster} -o {plan}")))["predicted"].clone()
    };
    let predicted = estimate("own.yaml", "own.plan.yaml");
    // FLOPs of a token are the model's: four ranks on one core share its peak.
    let flops = |p: &Value| {
        let of = |key: &str| p[key].as_f64().expect("a number");
        of("mfu") * of("peak_flops_per_s") / of("tokens_per_s_per_gpu")
    };
    let elsewhere = flops(&estimate("a100-pcie-node", "gpus.plan.yaml"));
    assert!((flops(&predicted) / elsewhere - 1.0).abs() < 1e-9);
    let data = examples().join("data/tales.txt").display().to_string();
    for (plan, wanted) in [
        ("own.plan.yaml", predicted["step_time_s"].as_f64()),
        ("gpus.plan.yaml", None),
    ] {
        let train = ["run", plan, "--data", &data, "--steps", "2", "--json"];
        let trained = answer(&run(&own, &train));
        assert_eq!(trained["predicted_step_time_s"].as_f64(), wanted, "{plan}");
    }
    for (precision, says) in [
        ("bf16", "example   --precision fp32"),
        ("fp32", "`--fix` and `--forbid` leave others out"),
    ] {
        let refused = asked(&format!(
            "search --cluster own.yaml --precision {precision}"
        ));
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(said.contains(says), "{said}");
    }
}

#[test]
fn a_profile_predicts_what_run_measures() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let plan = examples().join("nanogpt-tp2-pp2.yaml");
    let plan = plan.to_str().expect("a path in UTF-8");
    let measured = answer(&run(folder.path(), &["profile", plan, "--json"]));
    let kernels = measured["measured"].as_array().expect("a list");
    assert!(kernels.iter().any(|m| m["kernel"] == "matmul forward f32"));
    // The profile lies where `run` and `--cluster local` look for it.
    let trained = answer(&run(
        folder.path(),
        &["run", plan, "--steps", "3", "--json", "--log", "log.jsonl"],
    ));
    let predicted = trained["predicted_step_time_s"].as_f64().expect("a time");
    assert!(predicted > 0.0);
    for phase in ["F", "B", "optimizer", "send F"] {
        let phases = trained["phases"].as_array().expect("a list");
        let found = phases.iter().find(|p| p["phase"] == phase);
        let time = found.and_then(|p| p["predicted_s"].as_f64());
        assert!(time.is_some_and(|t| t > 0.0), "{phase}");
    }
    let log = fs::read_to_string(folder.path().join("log.jsonl")).expect("a log");
    assert_eq!(log.lines().count(), 3);
    let line: Value = serde_json::from_str(log.lines().next().expect("a line")).expect("JSON");
    assert!(
        line["mfu"]
            .as_f64()
            .is_some_and(|mfu| mfu > 0.0 && mfu < 1.0)
    );
    let model = examples().join("nanogpt/config.json");
    let model = model.to_str().expect("a path in UTF-8");
    let shared = ["--seq", "64", "--global-batch", "16", "--precision", "fp32"];
    let mut args = vec![
        "estimate",
        "--model",
        model,
        "--cluster",
        "local",
        "--gpus",
        "4",
    ];
    args.extend([
        "--strategy",
        "tp=2,pp=2,sp=on,mbs=2,schedule=1f1b",
        "--json",
    ]);
    args.extend(shared);
    args.extend(["-o", "local.plan.yaml"]);
    let estimated = answer(&run(folder.path(), &args));
    no_factors_are_learned(folder.path());
    the_plans_own_profile_predicts(folder.path(), model);
    assert_eq!(estimated["inputs"]["runtime"], "vescale");
    assert_eq!(
        estimated["predicted"]["step_time_s"].as_f64(),
        Some(predicted)
    );
    // Errors of a step's parts may cancel: they stand beside its own.
    let shown = run(folder.path(), &["run", plan, "--steps", "3"]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    let step = shown.lines().find(|line| line.starts_with("step "));
    let step = step.expect("a line of the step's time");
    assert!(
        step.contains("(predicted ") && step.contains("%; its actions "),
        "{step}"
    );
    let forward = shown.lines().find(|line| line.starts_with("  pp0   F "));
    assert!(forward.is_some_and(|line| line.ends_with('%')), "{shown}");
}

#[test]
fn a_local_cluster_says_what_it_needs() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let args = [
        "estimate",
        "--model",
        "gpt2",
        "--cluster",
        "local",
        "--gpus",
        "2",
        "--strategy",
        "tp=2",
    ];
    let output = run(folder.path(), &args);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr.contains("in which `vescale-plan profile` writes what it measures on this machine"),
        "{stderr}"
    );
}

#[test]
fn a_break_shows_what_an_operator_read_and_wrote() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let plan = examples().join("nanogpt-single.yaml");
    let plan = plan.to_str().expect("a path in UTF-8");
    let at = |name: &str| run(folder.path(), &["run", plan, "-q", "--break-at", name]);
    let output = at("transformer.h.2.mlp.c_fc");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0));
    assert!(
        text.starts_with("rank 0: transformer.h.2.mlp.c_fc Matmul (forward), step 0"),
        "{text}"
    );
    assert!(text.contains("wrote mlp.c_fc.output F32"), "{text}");
    let wrong = at("transformer.h.2.mlp.c_fx");
    let stderr = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert_eq!(wrong.status.code(), Some(2));
    assert!(
        stderr.contains("nearest   transformer.h.2.mlp.c_fc\n"),
        "{stderr}"
    );
}
