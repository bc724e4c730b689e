//! Outputs of commands: where they are written, what they replace, their modes, and messages when
//! writing fails.

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{code, estimate, json, run, shell, stderr};

const SEARCH: &[&str] = &[
    "search",
    "--model",
    "gpt2",
    "--gpus",
    "1",
    "--seq",
    "1024",
    "--global-batch",
    "8",
];

const CHOSEN: &str = "gpt2-1gpus-dgx-h100-megatron-core.plan.yaml";

fn search(more: &[&'static str]) -> Vec<&'static str> {
    [SEARCH, more].concat()
}

fn names(folder: &Path) -> Vec<String> {
    let found = fs::read_dir(folder).expect("folder").flatten();
    let mut names: Vec<String> = found
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// A name that the tool chose never replaces another plan; the answer is printed nevertheless.
#[test]
fn a_chosen_name_never_replaces_another_plan() {
    let folder = tempfile::tempdir().expect("folder");
    let at = folder.path().join(CHOSEN);
    assert_eq!(code(&run(folder.path(), &search(&["-q"]))), 0);
    let first = fs::read(&at).expect("the plan");
    // The same plan again changes nothing and is no reason to speak.
    let again = run(folder.path(), &search(&[]));
    assert_eq!(code(&again), 0);
    assert!(!stderr(&again).contains("replaced"), "{}", stderr(&again));
    let other = search(&["--precision", "fp32"]);
    let refused = run(folder.path(), &other);
    assert_eq!(code(&refused), 2);
    assert!(String::from_utf8_lossy(&refused.stdout).contains("MFU"));
    for words in [CHOSEN, "another plan", "-o", "--force"] {
        assert!(stderr(&refused).contains(words), "{}", stderr(&refused));
    }
    let refused = run(folder.path(), &[&other[..], &["--json"]].concat());
    assert_eq!(code(&refused), 2);
    assert!(json(&refused)["best"]["predicted"]["step_time_s"].is_f64());
    assert!(json(&refused)["plan_path"].is_null());
    assert_eq!(fs::read(&at).expect("the plan"), first);
    assert_eq!(names(folder.path()).len(), 2);
    let forced = run(folder.path(), &[&other[..], &["--force"]].concat());
    assert_eq!(code(&forced), 0);
    assert_ne!(fs::read(&at).expect("the plan"), first);
}

/// A given name replaces only a file of the same kind, with a message.
#[test]
fn a_given_name_replaces_its_own_kind_only() {
    let folder = tempfile::tempdir().expect("folder");
    let root = folder.path();
    estimate(root, "a.plan.yaml");
    fs::write(root.join("notes.txt"), "my notes\n").expect("notes");
    fs::write(root.join("run.log"), LOG).expect("log");
    fs::create_dir(root.join("out")).expect("folder");
    fs::write(root.join("out/megatron_args.sh"), "my script\n").expect("script");
    let estimate: Vec<&str> = [&["estimate", "--strategy", "tp=1"][..], &SEARCH[1..]].concat();
    let import = ["import", "a.toml", "--model", "llama3-8b", "--gpus", "8"];
    let toml = "[training]\nlocal_batch_size = 1\nglobal_batch_size = 8\nseq_len = 4096\n\
                [parallelism]\ntensor_parallel_degree = 8\n[model]\nname = \"llama3\"\n";
    fs::write(root.join("a.toml"), toml).expect("configuration");
    let export = ["export", "a.plan.yaml", "--to", "megatron-lm"];
    let cases: &[(&[&str], &str, &str)] = &[
        (&estimate, "-o", "notes.txt"),
        (&search(&[]), "-o", "notes.txt"),
        (&search(&["-o", "b.plan.yaml"]), "--report", "notes.txt"),
        (&["report", "a.plan.yaml"], "-o", "notes.txt"),
        (&["trace", "a.plan.yaml"], "-o", "notes.txt"),
        (&import, "-o", "notes.txt"),
        (
            &["calibrate", "run.log", "--plan", "a.plan.yaml"],
            "-o",
            "notes.txt",
        ),
        (
            &["diagnose", "run.log", "--plan", "a.plan.yaml"],
            "--calibrate",
            "notes.txt",
        ),
        (
            &["validate", "--only", "bloom_L389"],
            "--markdown",
            "notes.txt",
        ),
        (
            &["validate", "--only", "bloom_L389", "--leave-source-out"],
            "--residuals",
            "notes.txt",
        ),
        (
            &["validate", "--only", "bloom_L389"],
            "--write-baseline",
            "notes.txt",
        ),
        (
            &["validate", "--only", "bloom_L389"],
            "--export",
            "notes.txt",
        ),
        (&export, "-o", "out"),
    ];
    for (command, flag, path) in cases {
        let before = names(root);
        let shown = format!("{} {flag} {path}", command.join(" "));
        let refused = run(root, &[command, &[*flag, *path][..]].concat());
        assert_eq!(code(&refused), 2, "{shown}: {}", stderr(&refused));
        assert!(stderr(&refused).contains("--force"), "{shown}");
        assert_eq!(names(root), before, "{shown}");
        assert_eq!(
            fs::read_to_string(root.join("notes.txt")).expect("notes"),
            "my notes\n"
        );
        let script = fs::read_to_string(root.join("out/megatron_args.sh"));
        assert_eq!(script.expect("script"), "my script\n");
    }
    let forced = run(
        root,
        &[&estimate[..], &["-o", "notes.txt", "--force"]].concat(),
    );
    assert_eq!(code(&forced), 0, "{}", stderr(&forced));
    let again = run(root, &[&estimate[..], &["-o", "notes.txt"]].concat());
    assert_eq!(code(&again), 0);
    assert!(stderr(&again).contains("replaced"), "{}", stderr(&again));
    let forced = run(root, &[&export[..], &["-o", "out", "--force"]].concat());
    assert_eq!(code(&forced), 0, "{}", stderr(&forced));
    assert_eq!(names(&root.join("out")), ["megatron_args.sh"]);
}

/// Enough of a log to learn from.
const LOG: &str = "[rank0]:[titan] step:  1  loss:  8.0\n";

/// A bad destination is refused before the search, which would say that nothing fits.
#[test]
fn destinations_are_checked_before_the_work() {
    let folder = tempfile::tempdir().expect("folder");
    let large = [
        "search",
        "--model",
        "llama3-405b",
        "--gpus",
        "8",
        "-o",
        "absent/a.yaml",
    ];
    let refused = run(folder.path(), &large);
    assert_eq!(code(&refused), 2);
    assert!(stderr(&refused).contains("there is no folder absent"));
    assert!(refused.stdout.is_empty());
    assert!(names(folder.path()).is_empty());
}

#[cfg(unix)]
#[test]
fn the_umask_rules_and_links_are_not_followed() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = tempfile::tempdir().expect("folder");
    let root = folder.path();
    let command = "umask 077; vescale-plan estimate --model gpt2 --gpus 1 --seq 1024 --strategy tp=1 -o a.yaml \
                   && vescale-plan export a.yaml --to megatron-lm --launcher torchrun -o out";
    let output = shell(root, command);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    for (path, mode) in [
        ("a.yaml", 0o600),
        ("out", 0o700),
        ("out/megatron_args.sh", 0o600),
        ("out/launch.sh", 0o700),
    ] {
        let found = fs::metadata(root.join(path)).expect("there").permissions();
        assert_eq!(found.mode() & 0o777, mode, "{path}");
    }
    let victim = fs::read(root.join("a.yaml")).expect("plan");
    symlink("a.yaml", root.join("link.yaml")).expect("link");
    let linked = shell(
        root,
        "vescale-plan estimate --model gpt2 --gpus 1 --seq 64 --strategy tp=1 -o link.yaml",
    );
    assert_eq!(code(&linked), 2);
    assert!(stderr(&linked).contains("symbolic link"));
    assert_eq!(fs::read(root.join("a.yaml")).expect("plan"), victim);
}

/// If streams are closed or full, nothing panics, files are written, and the exit code shows the
/// loss.
#[test]
fn streams_may_be_closed_or_full() {
    let folder = tempfile::tempdir().expect("folder");
    let mut child = Command::new(env!("CARGO_BIN_EXE_vescale-plan"))
        .args(search(&["--json"]))
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("started");
    drop(child.stdout.take());
    drop(child.stderr.take());
    assert_eq!(child.wait().expect("ended").code(), Some(1));
    assert!(folder.path().join(CHOSEN).exists());
    for (command, expected) in [
        ("vescale-plan clusters 2>&-", 0),
        ("vescale-plan clusters --json 2>&-", 0),
        ("vescale-plan search --model absent --gpus 8 2>&-", 2),
        ("vescale-plan --no-such-flag 2>&-", 2),
        #[cfg(target_os = "linux")]
        ("vescale-plan clusters --json > /dev/full", 1),
        #[cfg(target_os = "linux")]
        ("vescale-plan --help > /dev/full", 1),
        #[cfg(target_os = "linux")]
        ("vescale-plan --version > /dev/full", 1),
        #[cfg(target_os = "linux")]
        ("vescale-plan clusters > /dev/full 2> /dev/full", 1),
        #[cfg(target_os = "linux")]
        (
            "vescale-plan search --model absent --gpus 8 2> /dev/full",
            2,
        ),
        #[cfg(target_os = "linux")]
        ("vescale-plan completions bash > /dev/full", 1),
    ] {
        let output = shell(folder.path(), command);
        assert_eq!(code(&output), expected, "{command}: {}", stderr(&output));
        if !command.contains("2>") && expected == 1 {
            assert!(
                stderr(&output).contains("cannot write to stdout"),
                "{command}"
            );
        }
    }
}

/// A disk that fills while the answer is written: the answer is printed, the code says that something was
/// lost, and no part of a file stays.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_loses_no_answer() {
    let folder = tempfile::tempdir().expect("folder");
    // A file may grow to 1 KiB; a plan is longer.
    let limited = "ulimit -f 1; exec vescale-plan ";
    let command = format!("{limited}{}", search(&["--json", "-q"]).join(" "));
    let searched = shell(folder.path(), &command);
    assert_eq!(code(&searched), 1, "{}", stderr(&searched));
    assert!(json(&searched)["best"]["predicted"]["step_time_s"].is_f64());
    assert!(stderr(&searched).contains(CHOSEN), "{}", stderr(&searched));
    assert_eq!(names(folder.path()), [""; 0]);

    assert_eq!(code(&run(folder.path(), &search(&["-q"]))), 0);
    let before = names(folder.path());
    let plan = fs::read(folder.path().join(CHOSEN)).expect("the plan");
    for command in [
        format!("export {CHOSEN} --to megatron-lm -o out"),
        format!("report {CHOSEN} -o new.html"),
        format!("trace {CHOSEN} -o new.json"),
        format!(
            "{} --precision fp32 -o {CHOSEN} --force",
            search(&["-q"]).join(" ")
        ),
    ] {
        let lost = shell(folder.path(), &format!("{limited}{command}"));
        assert_eq!(code(&lost), 1, "{command}: {}", stderr(&lost));
        assert!(!stderr(&lost).contains(".draft"), "{}", stderr(&lost));
        assert_eq!(names(folder.path()), before, "{command}");
        assert_eq!(
            fs::read(folder.path().join(CHOSEN)).expect("the plan"),
            plan
        );
    }
}

/// If a disk fills up while a run writes its log, training continues, and one warning reports it.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_ends_the_log_of_a_run() {
    let folder = tempfile::tempdir().expect("folder");
    let plan = common::examples().join("nanogpt-single.yaml");
    let command = format!(
        "ulimit -f 1; exec vescale-plan run {} --steps 12 --json -q --log l.jsonl",
        plan.display()
    );
    let ran = shell(folder.path(), &command);
    assert_eq!(code(&ran), 1, "{}", stderr(&ran));
    assert_eq!(json(&ran)["losses"].as_array().expect("losses").len(), 12);
    let said = stderr(&ran);
    assert_eq!(
        said.matches("the log ends early: cannot write l.jsonl")
            .count(),
        1,
        "{said}"
    );
}

/// A model folder's name is text in the report and the timeline of a run.
#[test]
fn names_are_text_in_what_a_run_leaves() {
    let folder = tempfile::tempdir().expect("folder");
    let root = folder.path();
    let name = "a</script><script>touch(1)</script>\"'`$(x)";
    let name = name.replace('/', "∕");
    fs::create_dir(root.join(&name)).expect("folder");
    let config = common::examples().join("llama/config.json");
    fs::copy(config, root.join(&name).join("config.json")).expect("config");
    fs::write(
        root.join("$(touch PWNED)\"'.txt"),
        "some text to learn from. ".repeat(200),
    )
    .expect("data");
    let estimate = [
        "estimate",
        "-q",
        "--model",
        &name,
        "--gpus",
        "1",
        "--seq",
        "64",
        "--global-batch",
        "2",
        "--runtime",
        "vescale",
        "--precision",
        "fp32",
        "--strategy",
        "tp=1,mbs=1",
        "-o",
        "a.yaml",
    ];
    let output = run(root, &estimate);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let train = [
        "run",
        "a.yaml",
        "--steps",
        "2",
        "-q",
        "--data",
        "$(touch PWNED)\"'.txt",
        "--report",
        "r.html",
        "--trace",
        "t.json",
        "--log",
        "l.jsonl",
    ];
    let output = run(root, &train);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let page = fs::read_to_string(root.join("r.html")).expect("report");
    assert!(
        page.contains("touch(1)") && !page.contains("<script>touch"),
        "{page}"
    );
    let trace = fs::read(root.join("t.json")).expect("trace");
    let _: serde_json::Value = serde_json::from_slice(&trace).expect("JSON");
    let log = fs::read_to_string(root.join("l.jsonl")).expect("log");
    for line in log.lines() {
        let _: serde_json::Value = serde_json::from_str(line).expect("JSON");
    }
    assert!(!root.join("PWNED").exists());
}

/// Names with control characters are refused, and no message carries them to the terminal.
#[test]
fn no_name_or_path_moves_the_terminal() {
    let folder = tempfile::tempdir().expect("folder");
    let root = folder.path();
    let config = fs::read_to_string(common::examples().join("llama/config.json")).expect("config");
    let lines = "m\ntouch PWNED\n";
    fs::create_dir(root.join(lines)).expect("folder");
    fs::write(root.join(lines).join("config.json"), &config).expect("config");
    let cluster = "schema_version: 1\nname: \"a\\x1b[2Jb\"\nextends: dgx-h100\n\
                   calibration: {runtime: vescale, runs: 1, source: us, \
                   time_factors: {compute: 1.1, memory: 1, network: 1, host: 1}}\n";
    fs::write(root.join("c.yaml"), cluster).expect("cluster");
    let cluster = cluster
        .replace("a\\x1b[2Jb", "b")
        .replace("vescale", "\"a\\x1b[2Jb\"");
    fs::write(root.join("d.yaml"), cluster).expect("cluster");
    let with = |model: &'static str, cluster: &'static str, plan: &'static str| {
        [
            "estimate",
            "--gpus",
            "1",
            "--strategy",
            "tp=1",
            "--model",
            model,
            "--cluster",
            cluster,
            "-o",
            plan,
        ]
    };
    for (args, refused_for) in [
        (with(lines, "dgx-h100", "a.yaml"), "control character"),
        (with("gpt2", "c.yaml", "a.yaml"), "control character"),
        (with("gpt2", "d.yaml", "a.yaml"), "control character"),
        (
            with("gpt2", "\u{1b}]0;title\u{7}.yaml", "a.yaml"),
            "control character",
        ),
        (
            with("gpt2", "dgx-h100", "no\u{1b}[2J\n/a.yaml"),
            "no folder",
        ),
        (
            with("gpt2\u{202e}", "dgx-h100", "a.yaml"),
            "control character",
        ),
    ] {
        let refused = run(root, &args);
        assert_eq!(code(&refused), 2, "{args:?}");
        let said = stderr(&refused);
        assert!(said.contains(refused_for), "{said}");
        assert!(!said.contains(['\u{1b}', '\u{7}', '\u{202e}']), "{said:?}");
        // Lines after the first are parts of the same message.
        let parts = ["where", "expected", "nearest", "example"];
        let part = |line: &str| {
            parts
                .iter()
                .any(|part| line.starts_with(&format!("  {part} ")))
        };
        assert!(said.lines().skip(1).all(part), "{said:?}");
    }
    for args in [
        &["explain", "\u{1b}[2J.yaml"][..],
        &["\u{1b}[2J"],
        &["estimate", "--gpus", "\u{1b}[31m8"],
        &["export", "--check", "\u{1b}[2J.toml"],
        &["run", "\u{9b}2J.yaml"],
        &["checkpoint", "inspect", "\u{1b}[2J"],
        &["validate", "\u{1b}[2J"],
    ] {
        let refused = run(root, args);
        assert_eq!(code(&refused), 2, "{args:?}");
        assert!(!stderr(&refused).contains(['\u{1b}', '\u{9b}']), "{args:?}");
    }
    assert!(!root.join("PWNED").exists());
    assert!(!root.join("a.yaml").exists());
}

/// A launch script of another plan would start an export on that plan's nodes: it is named and, with --force, removed. A script of
/// another origin stays.
#[test]
fn launch_scripts_of_other_plans_do_not_stay() {
    let folder = tempfile::tempdir().expect("folder");
    let root = folder.path();
    for (gpus, name) in [("16", "a.plan.yaml"), ("8", "b.plan.yaml")] {
        let made = run(
            root,
            &[
                "estimate",
                "--model",
                "gpt2",
                "--gpus",
                gpus,
                "--seq",
                "1024",
                "--global-batch",
                "16",
                "--strategy",
                "zero=1",
                "-o",
                name,
            ],
        );
        assert_eq!(code(&made), 0, "{}", stderr(&made));
    }
    let export = |plan: &str, more: &[&str]| {
        let usual = ["export", plan, "--to", "megatron-lm", "-o", "out"];
        let output = run(root, &[&usual[..], more].concat());
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        stderr(&output)
    };
    export("a.plan.yaml", &["--launcher", "slurm"]);
    export("a.plan.yaml", &["--launcher", "kubernetes"]);
    let all = ["job.yaml", "launch.sbatch", "launch.sh", "megatron_args.sh"];
    assert_eq!(names(&root.join("out")), [all[0], all[1], all[3]]);
    fs::write(root.join("out/job.yaml"), "kind: Job\n").expect("a manifest of the user's");
    let said = export("b.plan.yaml", &["--launcher", "torchrun"]);
    assert!(said.contains("launch.sbatch starts plan"), "{said}");
    assert_eq!(names(&root.join("out")), all);
    let said = export("b.plan.yaml", &["--force"]);
    assert!(said.contains("launch.sbatch, which started plan"), "{said}");
    assert_eq!(names(&root.join("out")), [all[0], all[2], all[3]]);
}

/// A plan is predicted on the cluster file that it was made with, wherever plan and reader are; an absent file is named.
#[test]
fn a_plan_names_its_cluster_file_from_every_folder() {
    let folder = tempfile::tempdir().expect("folder");
    let root = folder.path();
    for name in ["h100", "a100", "plans"] {
        fs::create_dir(root.join(name)).expect("folder");
    }
    for name in ["h100", "a100"] {
        let file = format!(
            "schema_version: 1\nname: ours\nextends: dgx-{name}\nspeed: {{value: 0.9, origin: assumed, source: us}}\n"
        );
        fs::write(root.join(name).join("ours.yaml"), file).expect("cluster");
    }
    let job = "vescale-plan estimate --model gpt2 --gpus 16 --strategy 'pp2 dp8' -q --force";
    for (cluster, devices) in [
        ("ours.yaml", "16 × h100-sxm"),
        ("ours.yaml at 0.8", "16 × h100-sxm"),
        ("8 x ours.yaml + 8 x dgx-h200", "8 × h100-sxm"),
    ] {
        let line = format!("cd h100; {job} --cluster '{cluster}' -o ../plans/a.plan.yaml");
        let made = shell(root, &line);
        assert_eq!(code(&made), 0, "{cluster}: {}", stderr(&made));
        let read = shell(
            root,
            "cd a100; vescale-plan report ../plans/a.plan.yaml --force",
        );
        assert_eq!(code(&read), 0, "{cluster}: {}", stderr(&read));
        let page = fs::read_to_string(root.join("plans/a.report.html")).expect("report");
        assert!(page.contains(devices), "{cluster}");
    }
    fs::rename(root.join("h100"), root.join("moved")).expect("moved");
    let lost = shell(root, "cd a100; vescale-plan explain ../plans/a.plan.yaml");
    assert_eq!(code(&lost), 2);
    for words in ["the plan's cluster cannot be read", "h100/ours.yaml"] {
        assert!(stderr(&lost).contains(words), "{}", stderr(&lost));
    }
}
