//! What people see on a terminal: lines that fit, one notation, colours only where they are wanted, and commands to go on
//! with.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::{code, shell, stderr};

/// The output of a command on a terminal with this number of columns.
fn on(folder: &Path, columns: &str, args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_vescale-plan"))
        .args(args)
        .current_dir(folder)
        .env("COLUMNS", columns)
        .env_remove("NO_COLOR")
        .output()
        .expect("the binary starts");
    assert!(
        [0, 3].contains(&code(&output)),
        "{args:?}: {}",
        stderr(&output)
    );
    String::from_utf8(output.stdout).expect("text")
}

const ANSWERS: [&[&str]; 8] = [
    &[
        "search",
        "--model",
        "llama3-8b",
        "--gpus",
        "16",
        "--max",
        "pp=2",
        "-o",
        "a.plan.yaml",
        "--force",
    ],
    &[
        "estimate",
        "--model",
        "llama3-8b",
        "--gpus",
        "8",
        "--strategy",
        "tp2 mbs1",
        "--tokens",
        "1T",
    ],
    &[
        "explain",
        "a.plan.yaml",
        "--why-not",
        "tp=8",
        "--explain-terms",
    ],
    &["compare", "a.plan.yaml", "a.plan.yaml"],
    &["replan", "a.plan.yaml", "--lost", "8", "--force"],
    &[
        "search",
        "--from",
        "tp8 dp2 zero0 recompute=full overlap=none",
        "--keep",
        "mbs",
        "--model",
        "llama3-8b",
        "--gpus",
        "16",
        "-o",
        "b.plan.yaml",
        "--force",
    ],
    &["size", "--model", "gpt2", "--gpus", "1,2", "--tokens", "1T"],
    &["config"],
];

#[test]
fn lines_fit_the_width() {
    let folder = tempfile::tempdir().expect("a folder");
    for columns in ["60", "80", "120", "200"] {
        let width: usize = columns.parse().expect("a number");
        for args in ANSWERS {
            let text = on(folder.path(), columns, args);
            for line in text.lines() {
                // Commands are not broken inside a word or a quoted value.
                let command = line.starts_with("    ")
                    && (line.contains("vescale-plan") || line.contains("--strategy"));
                assert!(
                    command || line.chars().count() <= width,
                    "{args:?} on {width}: {line}"
                );
            }
        }
    }
}

#[test]
fn what_is_printed_is_accepted_back() {
    let folder = tempfile::tempdir().expect("a folder");
    for runtime in ["megatron-core", "torchtitan", "deepspeed"] {
        let args = [
            "search",
            "--model",
            "llama3-8b",
            "--gpus",
            "16",
            "--runtime",
            runtime,
            "-o",
            "p.plan.yaml",
            "--force",
        ];
        let text = on(folder.path(), "200", &args);
        let lines: Vec<&str> = text.lines().collect();
        let listed = lines.windows(2).filter(|pair| {
            pair[0]
                .trim_start()
                .starts_with(|c: char| c.is_ascii_digit())
                && pair[0].contains('%')
        });
        let strategies: Vec<&str> = std::iter::once(lines[1])
            .chain(listed.map(|pair| pair[1].trim()))
            .filter(|line| line.starts_with("tp"))
            .collect();
        assert!(strategies.len() > 1, "{text}");
        for strategy in strategies {
            let back = [
                "estimate",
                "--model",
                "llama3-8b",
                "--gpus",
                "16",
                "--runtime",
                runtime,
                "--strategy",
                strategy,
            ];
            let again = on(folder.path(), "200", &back);
            assert_eq!(again.lines().nth(1), Some(strategy), "{runtime}");
        }
    }
}

#[test]
fn colours_are_as_asked() {
    let folder = tempfile::tempdir().expect("a folder");
    let estimate =
        "vescale-plan estimate --model gpt2 --gpus 1 --seq 1k --global-batch 8 --strategy tp1";
    for (line, coloured) in [
        (estimate.to_owned(), false),
        (format!("{estimate} --color always"), true),
        (format!("NO_COLOR=1 {estimate} --color=always"), true),
        (format!("{estimate} --color never"), false),
        ("vescale-plan --color always search --help".to_owned(), true),
        ("vescale-plan search --help".to_owned(), false),
        (
            "VESCALE_PLAN_COLOR=always vescale-plan search --help".to_owned(),
            true,
        ),
    ] {
        let output = shell(folder.path(), &line);
        assert_eq!(code(&output), 0, "{line}: {}", stderr(&output));
        assert_eq!(output.stdout.contains(&0x1b), coloured, "{line}");
    }
    let wrong = shell(
        folder.path(),
        "vescale-plan search --modle x --color always",
    );
    assert!(
        stderr(&wrong).starts_with("\u{1b}[31merror\u{1b}[0m: "),
        "{}",
        stderr(&wrong)
    );
}

/// The commands under "Next", run as they are printed.
#[test]
fn the_next_commands_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let search = |runtime: &'static str| {
        [
            "search",
            "--model",
            "llama3-8b",
            "--gpus",
            "16",
            "--runtime",
            runtime,
        ]
    };
    let searches = ["megatron-core", "torchtitan", "fsdp2", "nemo"].map(search);
    let lora =
        "search --model llama3-8b --gpus 8 --runtime hf-trainer --lora rank=16 -o lora.plan.yaml";
    let alone = "search --model llama3-8b --gpus 1 --cluster h200";
    let [lora, alone] = [lora, alone].map(|line| line.split(' ').collect::<Vec<_>>());
    let answers: [&[&str]; 7] = [
        &lora,
        &alone,
        &searches[0],
        &searches[1],
        &searches[2],
        &searches[3],
        &[
            "estimate",
            "--model",
            "llama3-8b",
            "--gpus",
            "8",
            "--seq",
            "4k",
            "--strategy",
            "tp2",
        ],
    ];
    for args in answers {
        let text = on(folder.path(), "80", args);
        let block = text
            .split("\nNext\n")
            .nth(1)
            .expect("a block of next steps");
        let commands: Vec<String> = block
            .replace(" \\\n", "")
            .lines()
            .filter(|line| line.starts_with("    vescale-plan"))
            .map(|line| line.trim().to_owned())
            .collect();
        assert!(commands.len() >= 3, "{text}");
        for command in commands {
            let output = shell(folder.path(), &command);
            assert_eq!(code(&output), 0, "{command}: {}", stderr(&output));
        }
        assert!(folder.path().join("launch").is_dir());
        fs::remove_dir_all(folder.path().join("launch")).expect("written");
    }
}

/// If no target of the runtime's own system can express a plan, the next steps say so and name
/// another target.
#[test]
fn another_system_is_offered_with_the_reason() {
    let folder = tempfile::tempdir().expect("a folder");
    for (runtime, model, launch) in [
        (
            "torchtitan",
            "gemma2-9b",
            "launch it with deepspeed: torchtitan has no model like this",
        ),
        (
            "megatron-fsdp",
            "llama3-8b --lora rank=16",
            "launch it with axolotl: the export to megatron-core has no adapters",
        ),
        ("maxtext", "llama3-8b", "there is no export to maxtext"),
        ("hf-trainer", "gemma2-9b", "  launch it\n"),
    ] {
        let plan = "--gpus 8 --seq 4k --strategy zero=3,recompute=full --runtime";
        let mut args = vec!["estimate", "--model"];
        args.extend(model.split(' ').chain(plan.split(' ')).chain([runtime]));
        let text = on(folder.path(), "120", &args);
        assert!(text.contains(launch), "{runtime} {model}: {text}");
    }
}

#[test]
fn terms_and_moments_are_words() {
    let folder = tempfile::tempdir().expect("a folder");
    let args = [
        "estimate",
        "--model",
        "gpt2",
        "--gpus",
        "1",
        "--strategy",
        "dp=1",
        "--explain-terms",
    ];
    let text = on(folder.path(), "200", &args);
    assert!(
        text.contains("in the backward of micro-batch 0, stage 0"),
        "{text}"
    );
    assert!(
        text.contains("tensor parallel: 8 GPUs share each layer"),
        "{text}"
    );
    assert!(!text.contains(" s0 m0"), "{text}");
}

/// A single change that makes a plan faster is listed as such, with its gain.
#[test]
fn a_faster_neighbour_is_shown_as_faster() {
    let folder = tempfile::tempdir().expect("a folder");
    let estimate = "estimate --model llama3-8b --gpus 8 --seq 4k --strategy recompute=full,tp=2 -o a.plan.yaml";
    let estimate: Vec<&str> = estimate.split(' ').collect();
    on(folder.path(), "200", &estimate);
    let text = on(folder.path(), "200", &["explain", "a.plan.yaml"]);
    assert!(text.contains("% step time: recomputation -"), "{text}");
    assert!(!text.contains("+-"), "{text}");
}

/// Settings are defaults: a flag beats the environment, which beats the file.
#[test]
fn settings_are_defaults() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = folder.path();
    fs::write(
        at.join("vescale-plan.toml"),
        "model = \"gpt2\"\nseq = 1024\nheadroom = \"10%\"\n",
    )
    .expect("written");
    let asked = "vescale-plan estimate --gpus 1 --global-batch 8 --strategy tp1 --json";
    for (before, after, seq) in [
        ("", "", 1024),
        ("VESCALE_PLAN_SEQ=512", "", 512),
        ("VESCALE_PLAN_SEQ=512", "--seq 256", 256),
    ] {
        let output = shell(at, &format!("{before} {asked} {after}"));
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        let inputs = &common::json(&output)["inputs"];
        assert_eq!(
            (inputs["seq_len"].as_u64(), inputs["headroom"].as_f64()),
            (Some(seq), Some(0.1))
        );
    }
    let shown = shell(at, "VESCALE_PLAN_SEQ=512 vescale-plan config");
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    for part in ["VESCALE_PLAN_SEQ", "vescale-plan.toml", "built in"] {
        assert!(shown.contains(part), "{shown}");
    }
    for (set, said) in [
        ("VESCALE_PLAN_SEQ=many", "VESCALE_PLAN_SEQ: seq = many"),
        ("VESCALE_PLAN_TOP=-1", "VESCALE_PLAN_TOP: top = -1"),
        ("VESCALE_PLAN_COLOR=red", "VESCALE_PLAN_COLOR: color = red"),
    ] {
        for command in [
            "vescale-plan search",
            "vescale-plan config",
            "vescale-plan config --json",
        ] {
            let wrong = shell(at, &format!("{set} {command}"));
            assert_eq!(code(&wrong), 2, "{set} {command}");
            assert!(stderr(&wrong).contains(said), "{}", stderr(&wrong));
        }
    }
    let wrong = stderr(&shell(at, &format!("VESCALE_PLAN_SEQ=0 {asked}")));
    assert!(wrong.contains("VESCALE_PLAN_SEQ: seq = 0"), "{wrong}");
    fs::write(at.join("vescale-plan.toml"), "seq = 5\nseq = 6\n").expect("written");
    let wrong = stderr(&shell(at, asked));
    assert!(wrong.contains("vescale-plan.toml, line 2"), "{wrong}");
    fs::write(at.join("vescale-plan.toml"), "modle = \"gpt2\"\n").expect("written");
    let wrong = stderr(&shell(at, asked));
    assert!(
        wrong.contains("unknown key `modle`") && wrong.contains("nearest   model"),
        "{wrong}"
    );
}

/// Pages of an estimate and of a comparison hold what the terminal says, and stay small.
#[test]
fn estimates_and_comparisons_write_pages() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = folder.path();
    let estimate = "vescale-plan estimate --model llama3-8b --gpus 8 --seq 4k";
    for (strategy, plan, page) in [
        ("tp2 recompute=full", "a.plan.yaml", "a.html"),
        ("tp8", "b.plan.yaml", "b.html"),
    ] {
        let line = format!("{estimate} --strategy '{strategy}' -o {plan} --report {page} -q");
        let output = shell(at, &line);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        let html = fs::read_to_string(at.join(page)).expect("a page");
        assert!(html.contains("id=\"launch\"") && html.contains("Best next change"));
        assert!(html.contains(&format!("vescale-plan export {plan} --to megatron-lm")));
        assert!(html.len() < 1_500_000, "{} bytes", html.len());
    }
    let output = shell(
        at,
        "vescale-plan compare a.plan.yaml b.plan.yaml a.plan.yaml --report c.html -q",
    );
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let html = fs::read_to_string(at.join("c.html")).expect("a page");
    for part in [
        "3 plans",
        "yes (fits with probability ",
        "more tokens/s per GPU than",
        "8 GPUs of a node share each layer",
        "<b>tp8</b>",
    ] {
        assert!(html.contains(part), "{part}");
    }
}
