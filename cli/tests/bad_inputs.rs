//! Wrong and odd inputs as one table: what is run, how it ends, what it says, and that nothing is
//! written. Every command runs under a limit of memory and a deadline.

mod limited;

use std::fs;
use std::path::Path;

use limited::{Ended, listing, run};
use plans::PlanFile;

/// A command, how it must end (one of these codes), and a part of what it must say.
type Row = (&'static str, &'static [i32], &'static str);

/// The command line itself.
const FLAGS: &[Row] = &[
    (
        "search --model lama70b --gpus 8",
        &[2],
        "did you mean `llama70b`?",
    ),
    (
        "search --model llama-3-70b --gpus 8",
        &[2],
        "did you mean `llama3-70b`?",
    ),
    (
        "search --model meta-llama/Llama-3.1-70B --gpus 64",
        &[2],
        "meta-llama/Llama-3.1-70B",
    ),
    (
        "search --model gpt2 --gpus 64 --cluster dgx-h1000",
        &[2],
        "did you mean `dgx-h100`?",
    ),
    (
        "search --model gpt2 --gpus 64 --cluster tpu-v5p",
        &[2],
        "unknown cluster `tpu-v5p`",
    ),
    (
        "search --model gpt2 --gpus 64 --runtime megatorn",
        &[2],
        "did you mean `megatron`?",
    ),
    ("search --model gpt2 --gpu 64", &[2], "'--gpus'"),
    ("serach --model gpt2", &[2], "search"),
    (
        "search --model gpt2 --gpus 0",
        &[2],
        "expected 1 to 1048576",
    ),
    ("search --model gpt2 --gpus -8", &[2], "-8"),
    ("search --model gpt2 --gpus 12 -q", &[2], "are 8 and 16"),
    (
        "search --model gpt2 --gpus 1000000000",
        &[2],
        "expected 1 to 1048576",
    ),
    (
        "search --model gpt2 --gpus 18446744073709551615",
        &[2],
        "expected 1 to 1048576",
    ),
    (
        "search --model gpt2 --gpus 18446744073709551616",
        &[2],
        "--gpus",
    ),
    ("search --model gpt2 --gpus 8x64", &[2], "--gpus"),
    ("search --model gpt2 --gpus 512.0", &[2], "--gpus"),
    (
        "search --model gpt2 --gpus 8 --seq 0",
        &[2],
        "expected 1 to 16777216",
    ),
    (
        "search --model gpt2 --gpus 8 --seq 9223372036854775808",
        &[2],
        "--seq",
    ),
    (
        "search --model gpt2 --gpus 8 --global-batch 0",
        &[2],
        "expected 1 to 16777216",
    ),
    (
        "search --model gpt2 --gpus 8 --global-batch 1000000000000",
        &[2],
        "--global-batch",
    ),
    (
        "search --model gpt2 --gpus 8 --precision int4",
        &[2],
        "fp32",
    ),
    ("search --model gpt2 --gpus 8 --headroom 5", &[2], "[0, 1)"),
    ("search --model gpt2 --gpus 8 --headroom -1", &[2], "-1"),
    (
        "search --model gpt2 --gpus 8 --headroom nan",
        &[2],
        "[0, 1)",
    ),
    (
        "search --model gpt2 --gpus 8 --top 0",
        &[2],
        "expected 1 to 1000",
    ),
    (
        "search --model gpt2 --gpus 8 --threads 0",
        &[2],
        "expected 1 to 1024",
    ),
    (
        "search --model gpt2 --gpus 8 --threads 100000",
        &[2],
        "expected 1 to 1024",
    ),
    (
        "search --model gpt2 --gpus 8 --tokens 15TB",
        &[2],
        "--tokens 15TB",
    ),
    (
        "size --model llama3-8b --tokens 15TB",
        &[2],
        "--tokens 15TB",
    ),
    ("size --model gpt2 --tokens -1T", &[2], "-1"),
    ("size --model gpt2 --tokens 1T --price abc", &[2], "--price"),
    (
        "size --model gpt2 --tokens 1T --price -2 --gpus 8",
        &[2],
        "-2",
    ),
    (
        "size --model gpt2 --tokens 1T --price nan --gpus 8",
        &[2],
        "--price",
    ),
    ("size --model gpt2 --seq 0", &[2], "--seq 0"),
    ("size --model gpt2 --global-batch 0", &[2], "--global-batch"),
    ("validate --tolerance abc", &[2], "--tolerance"),
];

/// Constraints: a value that the runtime's space does not know is refused, never dropped.
const CONSTRAINTS: &[Row] = &[
    (
        "search --model llama3-8b --gpus 8 --fix ttp=8",
        &[2],
        "unknown dimension `ttp`",
    ),
    ("search --model llama3-8b --gpus 8 --fix tp=0", &[2], "tp=0"),
    ("search --model llama3-8b --gpus 8 --fix tp=3", &[2], "tp"),
    ("search --model llama3-8b --gpus 8 --fix tp=16", &[2], "tp"),
    (
        "search --model llama3-8b --gpus 8 --fix tp=8 --forbid tp",
        &[2],
        "tp",
    ),
    (
        "search --model llama3-8b --gpus 8 --fix tp=2 --fix tp=4",
        &[2],
        "tp",
    ),
    (
        "search --model llama3-8b --gpus 8 --min tp=4 --max tp=2",
        &[2],
        "tp",
    ),
    (
        "search --model llama3-8b --gpus 8 --fix schedule=zerobubble",
        &[2],
        "1f1b",
    ),
    (
        "search --model llama3-8b --gpus 8 --fix schedule=zbv",
        &[2],
        "schedule",
    ),
    (
        "search --model llama3-8b --gpus 8 --fix zero=9",
        &[2],
        "zero",
    ),
    (
        "search --model llama3-8b --gpus 8 --fix zero=3",
        &[2],
        "zero",
    ),
    (
        "search --model llama3-8b --gpus 8 --fix recompute=selctive",
        &[2],
        "selective",
    ),
    (
        "search --model llama3-8b --gpus 8 --fix sp=maybe",
        &[2],
        "sp",
    ),
    (
        "search --model llama3-8b --gpus 8 --fix cp_kind=rings",
        &[2],
        "cp_kind",
    ),
    ("search --model llama3-8b --gpus 8 --max tp=0", &[2], "tp=0"),
    ("search --model llama3-8b --gpus 8 --fix tp", &[2], "tp"),
    (
        "search --model llama3-8b --gpus 8 --constraints plan.yaml",
        &[2],
        "unknown field",
    ),
    (
        "search --model llama3-8b --gpus 8 --constraints zero9.yaml",
        &[2],
        "zero",
    ),
    (
        "search --model llama3-8b --gpus 8 --constraints crossed.yaml",
        &[2],
        "tp",
    ),
];

/// Strategies.
const STRATEGIES: &[Row] = &[
    (
        "estimate --model llama3-8b --gpus 8 --strategy tp=8,foo",
        &[2],
        "key=value",
    ),
    (
        "estimate --model llama3-8b --gpus 8 --strategy TP=8",
        &[2],
        "did you mean `tp`?",
    ),
    (
        "estimate --model llama3-8b --gpus 8 --strategy tp=2,pp=2,dp=4",
        &[2],
        "8 GPUs",
    ),
    (
        "estimate --model llama3-8b --gpus 8 --strategy fsdp=8",
        &[2],
        "unknown key `fsdp`",
    ),
    (
        "estimate --model llama3-8b --gpus 8 --strategy tp=8,vpp=4",
        &[2],
        "pp",
    ),
    (
        "estimate --model llama3-8b --gpus 8 --strategy tp=8,tp=4",
        &[2],
        "twice",
    ),
    (
        "estimate --model llama3-8b --gpus 8 --strategy zero=3",
        &[2],
        "ZeRO-0, ZeRO-1",
    ),
    (
        "estimate --model llama3-8b --gpus 8 --strategy tp=8,recompute=selctive",
        &[2],
        "selective",
    ),
    (
        "estimate --model llama3-8b --gpus 8 --strategy pp=2,stages=18446744073709551615/33",
        &[2],
        "stages",
    ),
    (
        "estimate --model llama3-8b --gpus 8 --strategy dp_shard=16777216,dp_replicate=16777216",
        &[2],
        "",
    ),
    (
        "estimate --model llama3-8b --gpus 8 --strategy ''",
        &[3],
        "DOES NOT FIT",
    ),
    (
        "estimate --model llama3-8b --gpus 8 --strategy tp=2,dp=4 -q",
        &[0],
        "FITS",
    ),
];

/// Files that are not what is asked for.
const FILES: &[Row] = &[
    ("explain nope.yaml", &[2], "nope.yaml"),
    ("explain .", &[2], "."),
    ("search --model . --gpus 8", &[2], "config.json"),
    ("explain empty.yaml", &[2], "empty.yaml"),
    (
        "search --model gpt2 --gpus 8 --cluster empty.yaml",
        &[2],
        "empty.yaml",
    ),
    ("explain nonutf.yaml", &[2], "not UTF-8"),
    (
        "search --model gpt2 --gpus 8 --cluster nonutf.yaml",
        &[2],
        "not UTF-8",
    ),
    (
        "search --model gpt2 --gpus 8 --cluster plan.yaml",
        &[2],
        "plan.yaml",
    ),
    ("search --model plan.yaml --gpus 8", &[2], "plan.yaml"),
    ("explain page.html", &[2], "page.html"),
    ("export trace.json --to megatron-lm", &[2], "trace.json"),
    ("explain deep.yaml", &[2], "deep.yaml"),
    (
        "search --model gpt2 --gpus 8 --cluster deep.yaml",
        &[2],
        "deep.yaml",
    ),
    ("explain deep.json", &[2], "deep.json"),
    ("search --model deep.json --gpus 8", &[2], "deep.json"),
    (
        "search --model gpt2 --gpus 8 --cluster bomb.yaml",
        &[2],
        "bomb.yaml",
    ),
    ("explain big.yaml", &[2], "67108864"),
    ("search --model big.yaml --gpus 8", &[2], "67108864"),
    (
        "search --model gpt2 --gpus 8 --cluster big.yaml",
        &[2],
        "67108864",
    ),
    ("explain loop", &[2], "loop"),
    ("search --model gpt2 --gpus 8 --cluster loop", &[2], "loop"),
    ("search --model loop --gpus 8", &[2], "loop"),
    ("explain /dev/zero", &[2], "/dev/zero"),
    ("search --model /dev/zero --gpus 8", &[2], "/dev/zero"),
    (
        "search --model gpt2 --gpus 8 --cluster /dev/zero",
        &[2],
        "/dev/zero",
    ),
    ("export --check /dev/zero", &[2], "/dev/zero"),
    ("diagnose /dev/zero --plan plan.yaml", &[2], "/dev/zero"),
    ("explain /dev/null", &[2], "/dev/null"),
    ("import nonutf.yaml --model gpt2", &[2], "not UTF-8"),
    ("diagnose big.yaml --plan plan.yaml", &[2], "67108864"),
    (
        "diagnose empty.yaml --plan plan.yaml",
        &[2],
        "no training step",
    ),
    ("diagnose . --plan plan.yaml", &[2], "."),
    ("diagnose endless.log --plan plan.yaml", &[2], "endless.log"),
    ("export --check empty.yaml", &[2], "--to TARGET"),
    ("export --check .", &[2], "."),
    (
        "export plan.yaml --to megatron",
        &[2],
        "did you mean `megatron-lm`?",
    ),
    ("export plan.yaml", &[2], "--to"),
    (
        "export plan.yaml --to torchtitan@9.9",
        &[2],
        "versions: 0.3",
    ),
    (
        "export plan.yaml --to megatron-lm -o empty.yaml",
        &[2],
        "empty.yaml",
    ),
    ("report plan.yaml -o .", &[2], "folder"),
    ("report plan.yaml -o nowhere/x.html", &[2], "nowhere"),
    (
        "estimate --model gpt2 --gpus 8 --strategy zero=1 -o nowhere/x.yaml",
        &[2],
        "nowhere",
    ),
    ("run plan.yaml", &[2], "--data"),
    ("run plan.yaml --data empty.yaml --steps 0", &[2], "--steps"),
    (
        "search --model gpt2 --gpus 8 --cluster local",
        &[2],
        "vescale-profile.yaml",
    ),
    ("checkpoint inspect .", &[2], "no complete checkpoint"),
    ("explain seq-0.plan.yaml", &[2], "seq_len"),
    ("report seq-0.plan.yaml", &[2], "seq_len"),
    ("export seq-0.plan.yaml --to megatron-lm", &[2], "seq_len"),
    ("explain seq-2-63.plan.yaml", &[2], "seq_len"),
    ("compare plan.yaml seq-2-64.plan.yaml", &[2], "seq_len"),
    ("explain batch-0.plan.yaml", &[2], ""),
    ("explain gpus-0.plan.yaml", &[2], ""),
];

/// One change of a cluster file.
const CLUSTERS: &[(&str, &str, &str)] = &[
    ("gpus_per_node: 8", "gpus_per_node: .nan", "gpus_per_node"),
    ("gpus_per_node: 8", "gpus_per_node: 0", "gpus_per_node"),
    ("gpus_per_node: 8", "gpus_per_node: -8", "gpus_per_node"),
    ("gpus_per_node: 8", "gpus_per_node: 3", "3"),
    (
        "gpus_per_node: 8",
        "gpus_per_node: 8\ngpus_per_node: 4",
        "gpus_per_node",
    ),
    (
        "scale_up_domain: 8",
        "scale_up_domain: 5",
        "scale_up_domain",
    ),
    (
        "scale_up_domain: 8",
        "scale_up_domain: 1000000000",
        "scale_up_domain",
    ),
    ("450 GB/s", ".nan", "bandwidth"),
    ("450 GB/s", ".inf", "bandwidth"),
    ("450 GB/s", "nan GB/s", "bandwidth"),
    ("450 GB/s", "inf GB/s", "bandwidth"),
    ("450 GB/s", "1e308 TB/s", "bandwidth"),
    ("450 GB/s", "0 GB/s", "bandwidth"),
    ("450 GB/s", "-450 GB/s", "bandwidth"),
    ("450 GB/s", "450", "bandwidth"),
    ("450 GB/s", "450 GBs", "bandwidth"),
    ("value: 2.95", "value: -2.95", "dollars_per_gpu_hour"),
    ("value: 2.95", "value: .nan", "dollars_per_gpu_hour"),
    ("value: 2.95", "value: .inf", "dollars_per_gpu_hour"),
    (
        "device: h100-sxm",
        "device: h100sxm",
        "did you mean `h100-sxm`?",
    ),
    ("schema_version: 1", "schema_version: 99", "schema_version"),
    ("fabric: infini_band", "fabric: infiniband", "infini_band"),
    (
        "scale_out: {",
        "scale_out: {latency: {value: 9e307 days, origin: assumed, source: x}, ",
        "latency",
    ),
    (
        "device: h100-sxm",
        "device: {schema_version: 1, name: x, architecture: hopper}",
        "memory",
    ),
];

/// One change of a model's `config.json`.
const MODELS: &[(&str, &str, &str)] = &[
    (
        "\"num_hidden_layers\": 32",
        "\"num_hidden_layers\": 0",
        "layers",
    ),
    (
        "\"num_hidden_layers\": 32",
        "\"num_hidden_layers\": -1",
        "num_hidden_layers",
    ),
    (
        "\"num_hidden_layers\": 32",
        "\"num_hidden_layers\": 1000000000",
        "num_hidden_layers",
    ),
    ("\"hidden_size\": 4096", "\"hidden_size\": 0", "hidden"),
    ("\"hidden_size\": 4096", "\"hidden_size\": 4097", "hidden"),
    (
        "\"hidden_size\": 4096",
        "\"hidden_size\": 4611686018427387904",
        "hidden_size",
    ),
    (
        "\"hidden_size\": 4096",
        "\"hidden_size\": \"4096\"",
        "hidden_size",
    ),
    (
        "\"hidden_size\": 4096",
        "\"hidden_size\": 4096.0",
        "hidden_size",
    ),
    (
        "\"hidden_size\": 4096,\n  \"num_hidden_layers\": 32,\n  \"num_attention_heads\": 32,\n  \"num_key_value_heads\": 8",
        "\"hidden_size\": 1048576, \"head_dim\": 1048576, \"num_hidden_layers\": 1, \"num_attention_heads\": 16777216, \"num_key_value_heads\": 16777216",
        "",
    ),
    (
        "\"num_attention_heads\": 32",
        "\"num_attention_heads\": 7",
        "heads",
    ),
    (
        "\"num_attention_heads\": 32",
        "\"num_attention_heads\": 0",
        "heads",
    ),
    (
        "\"num_key_value_heads\": 8",
        "\"num_key_value_heads\": 5",
        "heads",
    ),
    (
        "\"num_key_value_heads\": 8",
        "\"num_key_value_heads\": 0",
        "heads",
    ),
    ("\"vocab_size\": 128256", "\"vocab_size\": 0", "vocab"),
    ("\"vocab_size\": 128256,", "", "vocab_size"),
    ("\"llama\"", "\"mamba\"", "model_type"),
    ("\"model_type\": \"llama\",", "", "model_type"),
    (
        "\"rope_theta\"",
        "\"quantization_config\": {\"bits\": 4}, \"rope_theta\"",
        "quantization_config",
    ),
];

fn preset(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../spec/presets");
    fs::read_to_string(root.join(path)).expect("a preset")
}

/// A folder with everything that the rows name.
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
    change("seq-2-63.plan.yaml", |plan| plan.workload.seq_len = 1 << 63);
    change("seq-2-64.plan.yaml", |plan| {
        plan.workload.seq_len = u64::MAX - 7
    });
    change("batch-0.plan.yaml", |plan| plan.workload.global_batch = 0);
    change("gpus-0.plan.yaml", |plan| plan.workload.gpus = 0);
    write("zero9.yaml", "fix: {zero: ['9']}\n");
    write("crossed.yaml", "min: {tp: 4}\nmax: {tp: 2}\n");
    write("empty.yaml", "");
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

/// What is wrong with how a row ended; nothing if all is right.
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
    None
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
fn files() {
    check(FILES);
}

/// A preset with one change, as the input of a command.
fn changed(base: &str, name: &str, rows: &[(&str, &str, &str)], command: &str) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let base = preset(base);
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
    changed("clusters/dgx-h100.yaml", ".cluster.yaml", CLUSTERS, command);
}

#[test]
fn models() {
    let command = "estimate --model FILE --gpus 8 --strategy tp=1,zero=1";
    changed("models/llama3-8b.json", ".config.json", MODELS, command);
}

/// Odd, and right: what such an input asks for is what is answered.
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

/// What a model's folder is called is never run.
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

/// A reader that stops early, and a full or closed stream, end no command with a panic.
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
