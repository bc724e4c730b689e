//! A table of wrong and odd inputs: the command, its exit code, what it says, and that it writes
//! nothing. Every command runs under a memory limit and a deadline.

#[path = "../limited/mod.rs"]
mod limited;
mod rows;

use std::fs;
use std::path::Path;

use limited::{Ended, listing, run};
use plans::PlanFile;
use rows::{
    CLUSTERS, CONSTRAINTS, EVERY_COMMAND, EXTENSIONS, FILES, FLAGS, MODELS, Row, STRATEGIES,
};

fn preset(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../catalog/presets");
    fs::read_to_string(root.join(path)).expect("a preset")
}

/// A folder with all files that rows of the tables name.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let at = |name: &str| folder.path().join(name);
    let write = |name: &str, text: &str| fs::write(at(name), text).expect("writable");
    let plan = [
        "estimate",
        "--model",
        "gpt2",
        "--gpus",
        "8",
        "--seq",
        "512",
        "--global-batch",
        "16",
    ];
    let plan = [
        &plan[..],
        &["--strategy", "zero=1", "-q", "-o", "plan.yaml"],
    ]
    .concat();
    assert_eq!(run(folder.path(), &plan).code, Some(0));
    let text = fs::read_to_string(at("plan.yaml")).expect("a plan");
    let change = |name: &str, change: fn(&mut PlanFile)| {
        let mut plan = PlanFile::from_yaml(&text, "plan.yaml").expect("a plan");
        change(&mut plan);
        write(name, &plan.with_id().to_yaml().expect("YAML"));
    };
    change("seq-0.plan.yaml", |plan| plan.workload.seq_len = 0);
    change("seq-2k.plan.yaml", |plan| plan.workload.seq_len = 2048);
    change("seq-2-63.plan.yaml", |plan| plan.workload.seq_len = 1 << 63);
    change("seq-2-64.plan.yaml", |plan| {
        plan.workload.seq_len = u64::MAX - 7
    });
    change("batch-0.plan.yaml", |plan| plan.workload.global_batch = 0);
    change("gpus-0.plan.yaml", |plan| plan.workload.gpus = 0);
    change("headroom-1.plan.yaml", |plan| plan.headroom = Some(1.0));
    write("no-tp.plan.yaml", &text.replacen("  tp: 1\n", "", 1));
    write("zero9.yaml", "fix: {zero: ['9']}\n");
    write("crossed.yaml", "min: {tp: 4}\nmax: {tp: 2}\n");
    let runs = |name: &str, sizes: &str| {
        let run = format!("{{id: mine, metrics: {{tokens_per_s: 9}}, {sizes}}}");
        write(name, &format!("schema: runs-v1\nruns: [{run}]\n"));
    };
    runs(
        "batch-2-63.runs.yaml",
        "seq_len: 8, global_batch: 9223372036854775808",
    );
    runs("vpp-2-63.runs.yaml", "vpp: 9223372036854775808");
    write("empty.yaml", "");
    write("empty.json", "");
    write("list.json", "[1,2]");
    write("other.json", "{\"a\":1}");
    write("resnet.json", "{\"model_type\":\"resnet\"}");
    fs::write(at("nonutf.yaml"), [0x89, b'P', b'N', b'G', 0, 0xff]).expect("writable");
    write("page.html", "<!DOCTYPE html><html lang=\"en\"></html>");
    write(
        "trace.json",
        "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[]}",
    );
    write("deep.yaml", &"[".repeat(100_000));
    write("deep.json", &"{\"a\":".repeat(100_000));
    let bomb: String = (b'b'..=b'k')
        .map(|c| {
            let (c, before) = (c as char, (c - 1) as char);
            format!("{c}: &{c} [{}*{before}]\n", format!("*{before},").repeat(8))
        })
        .collect();
    write("bomb.yaml", &format!("a: &a [x,x,x,x,x,x,x,x,x]\n{bomb}"));
    let big = fs::File::create(at("big.yaml")).expect("writable");
    big.set_len(1 << 30).expect("a sparse file");
    let step = " iteration 1/ 9 | elapsed time per iteration (ms): 1e308K |\n";
    write("endless.log", &step.repeat(5));
    #[cfg(unix)]
    std::os::unix::fs::symlink("loop", at("loop")).expect("a link");
    folder
}

/// What is wrong with the end of a row's command; `None` if nothing is.
fn judged(command: &str, codes: &[i32], says: &str, ended: &Ended) -> Option<String> {
    let text = format!("{}{}", ended.out, ended.err);
    let right = ended.code.is_some_and(|code| codes.contains(&code));
    let shown: String = text.chars().take(300).collect();
    if !right {
        return Some(format!(
            "{command}\n    ended with {:?}, expected {codes:?}: {shown}",
            ended.code
        ));
    }
    if !text.contains(says) {
        return Some(format!("{command}\n    does not say `{says}`: {shown}"));
    }
    if ended.code == Some(2) && !ended.err.starts_with("error: ") {
        return Some(format!(
            "{command}\n    does not begin with `error: `: {shown}"
        ));
    }
    if ended.code == Some(2) {
        return unshapely(&ended.err).map(|why| format!("{command}\n    {why}: {shown}"));
    }
    None
}

/// How a message differs from the form that all mistakes have: what is wrong, where, what was
/// expected, the nearest right value if one is near, an example. `None` if it does not.
fn unshapely(message: &str) -> Option<String> {
    let parts: Vec<&str> = message.lines().skip(1).collect();
    let names = ["where", "expected", "nearest", "example"];
    let name = |line: &str| {
        names
            .into_iter()
            .find(|name| line.starts_with(&format!("  {name:<8}  ")))
    };
    if let Some(odd) = parts.iter().find(|line| name(line).is_none()) {
        return Some(format!("has the odd line `{odd}`"));
    }
    let found: Vec<&str> = parts.iter().filter_map(|line| name(line)).collect();
    let missing = ["where", "expected", "example"]
        .into_iter()
        .find(|part| !found.contains(part));
    missing.map(|part| format!("does not say `{part}`"))
}

fn check(rows: &[Row]) {
    let folder = folder();
    let before = listing(folder.path());
    let wrong: Vec<String> = limited::side_by_side(rows, |(command, codes, says)| {
        let words = limited::words(command);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        judged(command, codes, says, &run(folder.path(), &words))
    });
    assert!(
        wrong.is_empty(),
        "{} rows:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert_eq!(listing(folder.path()), before, "something was written");
}

#[test]
fn flags() {
    check(FLAGS);
}

#[test]
fn constraints() {
    check(CONSTRAINTS);
}

#[test]
fn strategies() {
    check(STRATEGIES);
}

#[test]
fn every_command() {
    check(EVERY_COMMAND);
}

#[test]
fn files() {
    check(FILES);
}

/// A file with one change, as the input of a command.
fn changed(base: &str, name: &str, rows: &[(&str, &str, &str)], command: &str) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let numbered: Vec<_> = rows.iter().enumerate().collect();
    for (at, (old, new, _)) in &numbered {
        assert!(base.contains(old), "{old}");
        let file = folder.path().join(format!("{at}{name}"));
        fs::write(file, base.replacen(old, new, 1)).expect("writable");
    }
    let before = listing(folder.path());
    let wrong = limited::side_by_side(&numbered, |(at, (_, new, says))| {
        let command = command.replace("FILE", &format!("{at}{name}"));
        let words = limited::words(&command);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        judged(new, &[2], says, &run(folder.path(), &words))
    });
    assert!(
        wrong.is_empty(),
        "{} rows:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert_eq!(listing(folder.path()), before, "something was written");
}

#[test]
fn clusters() {
    let command = "search -q --model gpt2 --gpus 8 --cluster FILE";
    let base = preset("clusters/dgx-h100.yaml");
    changed(&base, ".cluster.yaml", CLUSTERS, command);
    let base = "schema_version: 1\nname: ours\nextends: dgx-h100\nspeed: {value: 0.9, origin: assumed, source: x}\n";
    changed(base, ".cluster.yaml", EXTENSIONS, command);
}

#[test]
fn models() {
    let command = "estimate --model FILE --gpus 8 --strategy tp=1,zero=1";
    let base = preset("models/llama3-8b.json");
    changed(&base, ".config.json", MODELS, command);
}

/// Inputs that are odd but right are answered as asked.
#[test]
fn odd_inputs_are_answered() {
    let rows: &[Row] = &[
        ("search -q --model gpt2 --gpus 7 -o a.yaml", &[0], "dp7"),
        (
            "search -q --model gpt2 --gpus 8 --global-batch 7 -o b.yaml",
            &[0, 3],
            "",
        ),
        (
            "estimate --model gpt2 --gpus 8 --seq 1 --global-batch 64 --strategy zero=1",
            &[0],
            "FITS",
        ),
        (
            "search -q --model llama3-8b --gpus 8 --seq 10000000 --global-batch 8 --fix pp=1 -o c.yaml",
            &[3],
            "No plan fits",
        ),
        (
            "search -q --model llama3-8b --gpus 8 --seq 1 --fix tp=1 -o d.yaml",
            &[0, 3],
            "",
        ),
        ("import /dev/null", &[2], "error"),
    ];
    let folder = tempfile::tempdir().expect("a temporary folder");
    let wrong = limited::side_by_side(rows, |(command, codes, says)| {
        let words = limited::words(command);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        judged(command, codes, says, &run(folder.path(), &words))
    });
    assert!(
        wrong.is_empty(),
        "{} rows:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

/// A command in the name of a model's folder is never run.
#[cfg(unix)]
#[test]
fn a_folder_s_name_is_not_a_command() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = folder.path().join("x\ntouch ran\n");
    fs::create_dir(&model).expect("a folder");
    fs::write(model.join("config.json"), preset("models/gpt2.json")).expect("writable");
    let name = model.display().to_string();
    let made = run(
        folder.path(),
        &[
            "estimate",
            "--model",
            &name,
            "--gpus",
            "8",
            "--strategy",
            "zero=1",
            "-q",
            "-o",
            "p.yaml",
        ],
    );
    if made.code == Some(2) {
        return;
    }
    for target in ["megatron-lm", "torchtitan", "deepspeed", "vescale"] {
        let args = [
            "export",
            "p.yaml",
            "--to",
            target,
            "--launcher",
            "torchrun",
            "-o",
            target,
        ];
        let ended = run(folder.path(), &args);
        assert!(
            ended.code.is_some_and(|code| code <= 4),
            "{target}: {}",
            ended.err
        );
        let Ok(files) = fs::read_dir(folder.path().join(target)) else {
            continue;
        };
        for file in files.flatten() {
            let text = fs::read_to_string(file.path()).expect("text");
            let line = text
                .lines()
                .find(|line| line.trim_start().starts_with("touch ran"));
            assert_eq!(line, None, "{target}: {}", file.path().display());
        }
    }
}

/// No command panics if a reader stops early, or if a stream is full or closed.
#[cfg(unix)]
#[test]
fn streams_that_close_or_fill_up() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let search = "search --model gpt2 --gpus 8 --global-batch 16";
    let rows = [
        (
            format!("{search} 2>&1 | head -1; exit ${{PIPESTATUS[0]}}"),
            vec![0, 1],
        ),
        (format!("{search} --json > /dev/full"), vec![1]),
        (format!("{search} --json 2>&-"), vec![0]),
        (format!("{search} >&-"), vec![0, 1]),
    ];
    for (line, codes) in rows {
        let line = line.replacen("search", "\"$BIN\" search", 1);
        let ended = limited::shell(folder.path(), &line);
        let right = ended.code.is_some_and(|code| codes.contains(&code));
        assert!(right, "{line}: {:?} {}", ended.code, ended.err);
        assert!(!ended.err.contains("panicked"), "{line}: {}", ended.err);
    }
}

/// Words that are not UTF-8 are refused wherever they stand.
#[cfg(unix)]
#[test]
fn words_that_are_no_text() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let search = "search --model gpt2 --gpus 8";
    let rows = [
        "$'\\xff'".to_owned(),
        "explain $'l\\xff.plan.yaml'".to_owned(),
        "search --model $'\\xff' --gpus 8".to_owned(),
        format!("{search} -o $'n\\xff.yaml'"),
        format!("{search} --report=$'n\\xff.html' --color never"),
    ];
    for line in rows {
        let ended = limited::shell(folder.path(), &format!("\"$BIN\" {line}"));
        let says = "an argument is not text in UTF-8";
        assert_eq!(judged(&line, &[2], says, &ended), None);
    }
    assert_eq!(listing(folder.path()), [""; 0]);
}

/// No model FLOPs utilisation above the peak, and none in the interval's middle.
#[test]
fn no_step_is_faster_than_the_device() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let commands = [
        "estimate --model llama3-8b --cluster dgx2-v100 --gpus 32 --seq 4096 --global-batch 64 --precision fp32 --strategy tp=8,zero=1",
        "estimate --model gpt2 --cluster dgx2-v100 --gpus 16 --seq 1024 --global-batch 64 --precision fp32 --strategy zero=1",
        "estimate --model llama3-8b --gpus 64 --seq 131072 --global-batch 8 --precision fp32 --strategy tp=8,cp=8,zero=1",
        "estimate --model llama3-8b --gpus 256 --seq 1048576 --global-batch 4 --strategy tp=8,cp=32,zero=1",
    ];
    let wrong = limited::side_by_side(&commands, |command| {
        let words = limited::words(&format!("{command} --json"));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let ended = run(folder.path(), &words);
        let answer: serde_json::Value = serde_json::from_str(&ended.out).unwrap_or_default();
        let predicted = answer
            .get("predicted")
            .or_else(|| answer["best"].get("predicted"));
        let mfu = predicted.and_then(|p| p["mfu"].as_f64());
        let right = mfu.is_some_and(|mfu| mfu > 0.0 && mfu <= 1.0);
        (!right).then(|| format!("{command}: MFU {mfu:?} {}", ended.err))
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
