//! Reports are true: a report's command makes the same prediction, and its statements are right.

mod common;

use std::fs;
use std::path::Path;

use common::{code, json, run, shell, stderr};
use serde_json::Value;

/// A value of HTML, as a browser reads it.
fn unescaped(text: &str) -> String {
    let entities = [
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&quot;", "\""),
        ("&amp;", "&"),
    ];
    let replace = |text: String, (entity, plain): (&str, &str)| text.replace(entity, plain);
    entities.into_iter().fold(text.to_owned(), replace)
}

/// The command that the button "Copy command" copies.
fn command(page: &str) -> String {
    let before = page.split(">Copy command<").next().expect("a button");
    let value = before.rsplit("data-copy=\"").next().expect("its value");
    unescaped(value.split('"').next().expect("its end"))
}

/// Part of a page between two marks.
fn part<'p>(page: &'p str, from: &str, to: &str) -> &'p str {
    let rest = page.split(from).nth(1).expect(from);
    rest.split(to).next().expect(to)
}

/// Executes a report's command and makes a report of the plan that it writes. Numbers, verdict and
/// plan must be those of the first report.
fn same_again(folder: &Path, page: &str, predicted: &Value, budget: &Value) {
    let command = command(page);
    let line = format!("{command} --json -q -o again.plan.yaml --force");
    let output = shell(folder, &line);
    assert!(
        [0, 3].contains(&code(&output)),
        "{line}: {}",
        stderr(&output)
    );
    let again = json(&output);
    assert_eq!(again["predicted"], *predicted, "{command}");
    assert_eq!(again["budget"], *budget, "{command}");
    let budget_flags = command.split(" --tokens ").nth(1);
    let flags = budget_flags.map_or_else(String::new, |flags| format!(" --tokens {flags}"));
    let line = format!("vescale-plan report again.plan.yaml -o again.html --force{flags}");
    assert_eq!(code(&shell(folder, &line)), 0, "{line}");
    let second = fs::read_to_string(folder.join("again.html")).expect("a report");
    // A plan has the full path of its cluster file.
    let second = second.replace(&format!("{}/", folder.display()), "");
    assert_eq!(self::command(&second), command);
    for (from, to) in [
        ("id=\"verdict\"", "class=\"sentences\""),
        ("id=\"memory\"", "</section>"),
    ] {
        assert_eq!(part(page, from, to), part(&second, from, to), "{command}");
    }
    assert!(!folder.join("PWNED").exists());
}

/// A name with characters that a shell would interpret.
const MODEL: &str = "a model's $(touch PWNED) `x`";

fn folder_with_files() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("folder");
    let root = folder.path();
    fs::create_dir(root.join(MODEL)).expect("folder");
    let config = common::examples().join("llama/config.json");
    fs::copy(config, root.join(MODEL).join("config.json")).expect("config");
    let cluster = "schema_version: 1\nname: ours\nextends: dgx-a100\ncalibration: {runtime: megatron-core, \
        runs: 2, time_factors: {compute: 1.25, memory: 1.1, network: 1.3, host: 1}, source: us}\n";
    fs::write(root.join("our cluster's; touch PWNED.yaml"), cluster).expect("cluster");
    folder
}

/// Every option on which a prediction depends, given or left to its default.
#[test]
fn the_command_of_a_search_predicts_the_same() {
    let folder = folder_with_files();
    let cases: &[&[&str]] = &[
        &[
            "--model",
            "llama3-8b",
            "--gpus",
            "8",
            "--precision",
            "fp8",
            "--headroom",
            "0.2",
        ],
        &[
            "--model",
            "gpt2",
            "--gpus",
            "2",
            "--seq",
            "1024",
            "--global-batch",
            "6",
            "--runtime",
            "torchtitan",
        ],
        &[
            "--model",
            "gpt2",
            "--gpus",
            "4",
            "--cluster",
            "our cluster's; touch PWNED.yaml",
            "--tokens",
            "0.3T",
            "--price",
            "1.1",
        ],
        &[
            "--model",
            MODEL,
            "--gpus",
            "2",
            "--seq",
            "64",
            "--headroom",
            "0.123456789",
            "--tokens",
            "7B",
        ],
        &[
            "--model",
            "gpt2",
            "--gpus",
            "1",
            "--precision",
            "fp32",
            "--objective",
            "memory",
        ],
    ];
    for case in cases {
        let args = [
            &["search", "--json", "-q", "-o", "s.plan.yaml", "--force"],
            *case,
        ]
        .concat();
        let output = run(folder.path(), &args);
        assert_eq!(code(&output), 0, "{case:?}: {}", stderr(&output));
        let answer = json(&output);
        let page = fs::read_to_string(folder.path().join("s.report.html")).expect("a report");
        same_again(
            folder.path(),
            &page,
            &answer["best"]["predicted"],
            &answer["budget"],
        );
    }
}

#[test]
fn the_command_of_a_report_predicts_the_same() {
    let folder = folder_with_files();
    fs::create_dir(folder.path().join("plans")).expect("folder");
    let cases: &[(&[&str], &str)] = &[
        (
            &[
                "--model",
                "llama3-8b",
                "--gpus",
                "8",
                "--headroom",
                "0.01",
                "--precision",
                "fp8",
            ],
            "tp=4,zero=1",
        ),
        (
            &[
                "--model",
                MODEL,
                "--gpus",
                "4",
                "--runtime",
                "vescale",
                "--seq",
                "64",
            ],
            "pp=2,schedule=zb-h1,zero=3",
        ),
        (
            &[
                "--model",
                "mixtral-8x7b",
                "--gpus",
                "16",
                "--seq",
                "2048",
                "--global-batch",
                "64",
            ],
            "tp=2,ep=4,zero=1",
        ),
        // It does not fit.
        (&["--model", "llama3-70b", "--gpus", "8"], "tp=8"),
        (
            &["--model", "llama3-8b", "--gpus", "8", "--lora", "rank=16"],
            "recompute=full",
        ),
        (
            &[
                "--model",
                "llama3-8b",
                "--gpus",
                "8",
                "--lengths",
                "512:0.7,4k:0.3",
                "--packing",
                "padded",
            ],
            "recompute=full",
        ),
    ];
    for (case, strategy) in cases {
        let first = [
            "estimate",
            "--json",
            "-q",
            "--strategy",
            strategy,
            "-o",
            "plans/a.yaml",
            "--force",
        ];
        let output = run(folder.path(), &[&first, *case].concat());
        assert!(
            [0, 3].contains(&code(&output)),
            "{case:?}: {}",
            stderr(&output)
        );
        let estimated = json(&output);
        assert_eq!(code(&run(folder.path(), &["report", "plans/a.yaml"])), 0);
        let page = fs::read_to_string(folder.path().join("plans/a.report.html")).expect("a report");
        same_again(folder.path(), &page, &estimated["predicted"], &Value::Null);
    }
}

/// Reports of all examples can be made, though their models are files beside them.
#[test]
fn examples_reports_name_their_models() {
    let folder = tempfile::tempdir().expect("folder");
    for name in ["llama-single", "nanogpt-tp2-pp2"] {
        let plan = common::examples().join(format!("{name}.yaml"));
        let plan = plan.to_str().expect("a path");
        let args = ["report", plan, "-o", "a.html", "--force"];
        let output = run(folder.path(), &args);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        let page = fs::read_to_string(folder.path().join("a.html")).expect("a report");
        let again = shell(folder.path(), &format!("{} --json", command(&page)));
        assert_eq!(code(&again), 0, "{}", stderr(&again));
        let explained = json(&run(folder.path(), &["explain", plan, "--json"]));
        assert_eq!(json(&again)["predicted"], explained["predicted"]);
    }
}

/// The origin of each value, row by row.
fn origins(page: &str) -> Vec<(String, String)> {
    let section = part(page, "id=\"inputs\"", "</section>");
    let cell = |row: &str, from: &str| {
        let text = row.split(from).nth(1).expect(row);
        text.split('<').next().expect(row).to_owned()
    };
    let rows = section.split("<tr>").skip(1);
    rows.map(|row| (cell(row, "<td>"), cell(row, "<td class=\"note\">")))
        .collect()
}

#[test]
fn inputs_say_where_they_come_from() {
    let folder = tempfile::tempdir().expect("folder");
    let search = [
        "search", "-q", "-o", "a.yaml", "--model", "gpt2", "--gpus", "1",
    ];
    let asked = |more: &[&str]| {
        let args = [&search[..], more].concat();
        assert_eq!(code(&run(folder.path(), &args)), 0);
        let page = fs::read_to_string(folder.path().join("a.report.html")).expect("a report");
        let rows = origins(&page).into_iter();
        let said = rows
            .filter(|(_, origin)| origin == "asked")
            .map(|(name, _)| name);
        said.collect::<Vec<_>>()
    };
    assert_eq!(asked(&[]), ["model", "GPUs"]);
    // The same holds if the default is asked for.
    assert_eq!(
        asked(&["--seq", "1024", "--headroom", "0.05"]),
        ["model", "GPUs", "sequence", "memory headroom"]
    );
    assert_eq!(
        asked(&[
            "--cluster",
            "dgx-h100",
            "--runtime",
            "megatron",
            "--precision",
            "bf16",
            "--global-batch",
            "8"
        ]),
        [
            "model",
            "cluster",
            "GPUs",
            "runtime",
            "global batch",
            "precision"
        ]
    );
    assert_eq!(code(&run(folder.path(), &["report", "a.yaml"])), 0);
    let page = fs::read_to_string(folder.path().join("a.report.html")).expect("a report");
    let rows = origins(&page);
    assert_eq!(rows.len(), 8);
    assert!(
        rows.iter().all(|(_, origin)| origin == "plan file"),
        "{rows:?}"
    );
}

/// A plan that does not fit gets no price; the report shows in red what is too large.
#[test]
fn a_plan_that_does_not_fit_is_not_sold() {
    let folder = tempfile::tempdir().expect("folder");
    let args = [
        "estimate",
        "--model",
        "llama3-70b",
        "--gpus",
        "8",
        "--strategy",
        "tp=8",
        "-o",
        "a.yaml",
        "--tokens",
        "15T",
        "--price",
        "2.5",
    ];
    let output = run(folder.path(), &args);
    assert_eq!(code(&output), 3);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!text.contains("days") && !text.contains('$'), "{text}");
    let output = run(folder.path(), &[&args[..], &["--json"]].concat());
    assert!(json(&output)["budget"].is_null());
    let reported = run(
        folder.path(),
        &["report", "a.yaml", "--tokens", "15T", "--price", "2.5"],
    );
    assert_eq!(code(&reported), 0);
    let page = fs::read_to_string(folder.path().join("a.report.html")).expect("a report");
    let verdict = part(&page, "id=\"verdict\"", "</section>");
    assert!(page.contains("hero too-large"));
    assert!(
        verdict.contains("class=\"too-much\">Too large by "),
        "{verdict}"
    );
    assert!(!verdict.contains("Training time") && !verdict.contains("Cost"));
}

/// Plans for other wishes are compared with all plans shown, and drawn among them.
#[test]
fn no_plan_shown_beats_the_lightest_or_the_edge() {
    let folder = tempfile::tempdir().expect("a folder");
    let line = "vescale-plan search --model mixtral-8x7b --gpus 16 -q --json --report a.html";
    let found = json(&shell(folder.path(), line));
    let lists = [&found["top"], &found["wishes"]];
    let all = lists.map(|list| list.as_array().expect("a list"));
    let figures = |plan: &Value| {
        let of = |name: &str| plan["predicted"][name].as_f64().expect("a number");
        [of("step_time_s"), of("peak_memory_bytes")]
    };
    let shown: Vec<&Value> = all.into_iter().flatten().collect();
    let least = shown.iter().map(|plan| figures(plan)[1]);
    let least = least.fold(f64::INFINITY, f64::min);
    for plan in all[1] {
        if plan["wish"] == "least memory of these" {
            assert!(figures(plan)[1] <= least, "{plan}");
        }
    }
    let page = fs::read_to_string(folder.path().join("a.html")).expect("a report");
    let edge = unescaped(part(
        &page,
        "Strategies that fit and that no other",
        "</table>",
    ));
    for plan in &shown {
        let own = figures(plan);
        let beaten = shown.iter().any(|other| {
            let other = figures(other);
            other != own && other[0] <= own[0] && other[1] <= own[1]
        });
        let text = plan["strategy_text"].as_str().expect("a text");
        assert!(
            !beaten || !edge.contains(&format!("<code>{text}</code>")),
            "{text}"
        );
    }
}
