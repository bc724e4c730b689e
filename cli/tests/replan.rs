//! `replan`: the GPUs that are left, the batch planned for them, and the cost of continuing.

mod common;

use std::fs;
use std::path::Path;

use common::{code, json, run, stderr};
use serde_json::Value;

/// A plan of Llama 3 8B in a folder.
fn plan(folder: &Path, gpus: &str, strategy: &str) {
    let sizes = [
        "estimate",
        "--model",
        "llama3-8b",
        "--gpus",
        gpus,
        "--seq",
        "4096",
    ];
    let plan = [
        "--global-batch",
        "96",
        "--strategy",
        strategy,
        "-o",
        "was.plan.yaml",
        "-q",
    ];
    let output = run(folder, &[&sizes[..], &plan[..]].concat());
    assert!([0, 3].contains(&code(&output)), "{}", stderr(&output));
}

fn replan(folder: &Path, flags: &str) -> Value {
    let flags: Vec<&str> = flags.split(' ').collect();
    let all = [
        &["replan", "was.plan.yaml", "--force", "--json"],
        &flags[..],
    ]
    .concat();
    let output = run(folder, &all);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    json(&output)
}

/// Strategy of the old plan, flags, GPUs left, batch, whether all ranks read a checkpoint.
#[rustfmt::skip]
const ROWS: [(&str, &str, &str, u64, u64, bool); 7] = [
    ("32", "tp4 dp8 zero1", "--lost 1node", 24, 96, true),
    ("32", "tp4 dp8 zero0", "--lost 1node", 24, 96, false),
    ("32", "tp4 dp8 zero0", "--lost 2nodes --keep tp", 16, 96, false),
    ("16", "tp8 dp2 zero0", "--lost 1node --keep tp,recompute", 8, 96, false),
    ("8", "tp2 dp4 zero1", "--lost 3 --global-batch 100", 5, 100, true),
    ("8", "tp2 dp4 zero1", "--lost 4 --keep tp --fix pp=1", 4, 96, true),
    ("8", "tp2 dp4 zero1", "--lost 4 --fix optim_states=bf16_moments", 4, 96, true),
];

#[test]
fn what_is_left_is_planned() {
    for (gpus, strategy, flags, left, batch, from_checkpoint) in ROWS {
        let folder = tempfile::tempdir().expect("a folder");
        plan(folder.path(), gpus, strategy);
        let answer = replan(folder.path(), &format!("{flags} --checkpoint 10GB/s"));
        assert_eq!(answer["inputs"]["gpus"], left, "{flags}");
        assert_eq!(answer["inputs"]["global_batch"], batch, "{flags}");
        assert_eq!(answer["global_batch_before"], 96);
        let going_on = &answer["going_on"];
        assert_eq!(
            going_on["from_checkpoint"], from_checkpoint,
            "{strategy} {flags}"
        );
        let number = |key: &str| going_on[key].as_f64().expect(key);
        // Twelve bytes for each of eight billion parameters; what changes results is as before, unless it is asked for.
        let narrow = flags.contains("bf16_moments");
        let each = if narrow { 8e9 } else { 12e9 };
        assert!((number("states_bytes") / each - 8.03).abs() < 0.01);
        let text = answer["best"]["strategy_text"].as_str().expect("text");
        assert_eq!(text.contains("bf16_moments"), narrow, "{text}");
        assert!(!text.contains("grad_dtype"), "{text}");
        let time = match from_checkpoint {
            true => number("bytes") / 10e9,
            // 400 Gb/s between nodes; one node's GPUs have faster links.
            false => number("most_bytes") / if left > 8 { 50e9 } else { 450e9 },
        };
        assert!(
            (number("seconds") - time).abs() <= 1e-9 * time,
            "{strategy} {flags}"
        );
        if flags.contains("--keep tp") {
            assert_eq!(
                answer["best"]["strategy"]["tp"].to_string(),
                strategy[2..3],
                "{flags}"
            );
        }
        let path = answer["plan_path"].as_str().expect("a plan");
        let again = run(folder.path(), &["explain", path, "--json"]);
        assert_eq!(
            json(&again)["predicted"],
            answer["best"]["predicted"],
            "{flags}"
        );
    }
}

/// The new plan keeps the training settings of the old one and its data, wherever the file is.
#[test]
fn training_goes_on_as_before() {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path();
    plan(root, "16", "tp8 dp2 zero0");
    let was = root.join("was.plan.yaml");
    let text = fs::read_to_string(&was).expect("a plan");
    let train = "train:\n  data: words.txt\n  steps: 7\n  learning_rate: 0.02\nprediction:";
    fs::write(&was, text.replace("\nprediction:", &format!("\n{train}"))).expect("written");
    fs::write(root.join("words.txt"), "words").expect("written");
    fs::create_dir(root.join("there")).expect("a folder");
    let whole = fs::canonicalize(root).expect("a folder").join("words.txt");
    for (path, data) in [
        ("new.plan.yaml", "words.txt"),
        ("there/new.plan.yaml", whole.to_str().expect("UTF-8")),
    ] {
        replan(root, &format!("--lost 1node -o {path}"));
        let text = fs::read_to_string(root.join(path)).expect("a plan");
        for line in [
            format!("data: {data}"),
            "steps: 7".into(),
            "learning_rate: 0.02".into(),
        ] {
            assert!(text.contains(&format!("\n  {line}\n")), "{line}: {text}");
        }
    }
}

/// A batch that the GPUs do not divide is kept if a plan fits; where none does, the nearest that they divide is taken.
#[test]
fn the_batch_changes_only_if_it_must() {
    let folder = tempfile::tempdir().expect("a folder");
    plan(folder.path(), "64", "tp2 dp32 zero1");
    let kept = replan(folder.path(), "--lost 1node");
    assert_eq!(kept["inputs"]["global_batch"], 96);
    let other = &kept["other_batch"];
    assert_eq!(other["global_batch"], 112);
    assert!(other["share"].as_f64().is_some_and(|share| share > 0.1));
    // Seven cannot be a pipeline's ranks here: data parallelism has to divide the batch by seven.
    let changed = replan(folder.path(), "--lost 1node --fix pp=1");
    assert_eq!(changed["inputs"]["global_batch"], 112);
    let words = "replan was.plan.yaml --force --lost 1node --keep tp --fix pp=1";
    let words: Vec<&str> = words.split(' ').collect();
    let said = run(folder.path(), &words).stdout;
    let said = String::from_utf8_lossy(&said).replace('\n', " ");
    let said: Vec<&str> = said.split_whitespace().collect();
    let why = "for which 56 GPUs have no plan that keeps tp: no strategy is legal: data parallelism does not divide the global batch";
    assert!(said.join(" ").contains(why), "{said:?}");
    let taken = replan(folder.path(), "--lost 1node --global-batch 112");
    assert_eq!(taken["best"]["predicted"], other["best"]["predicted"]);
}

/// Whether replicas are in groups, what is lost, GPUs left, and whether all ranks read a
/// checkpoint. A group of 8 GPUs holds every state; so does a pipeline, but each of its stages is
/// on one pool.
#[rustfmt::skip]
const POOLS: [(&str, &str, u64, bool); 7] = [
    ("groups=2", "1node of dgx-a100", 24, false),
    ("groups=2", "1node of dgx-h100", 24, false),
    ("groups=2", "2nodes of dgx-a100", 16, false),
    ("groups=2", "16 of dgx-h100", 16, false),
    ("groups=2", "1node of dgx-h100,1node of dgx-a100", 16, true),
    ("groups=1", "1node of dgx-h100", 24, true),
    ("groups=1", "2nodes of dgx-h100", 16, true),
];

/// The remaining GPUs of several pools are planned as by `search`, and states come from groups that
/// hold all of them.
#[test]
fn what_is_left_of_several_pools_is_planned() {
    let folder = tempfile::tempdir().expect("a folder");
    let shared = ["--model", "llama3-8b", "--seq", "4096", "--json"];
    let search = |gpus: &str, cluster: &str, batch: &str, more: &[&str]| {
        let own = [
            "--gpus",
            gpus,
            "--cluster",
            cluster,
            "--global-batch",
            batch,
        ];
        let all = [&["search"], &shared[..], &own, &["--force"], more].concat();
        let output = run(folder.path(), &all);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        json(&output)
    };
    let whole = "16 x dgx-h100 + 16 x dgx-a100";
    let fixed = ["--fix", "grad_dtype=fp32,optim_states=own"];
    for (groups, lost, left, from_checkpoint) in POOLS {
        let more = [&fixed[..], &["--fix", groups, "-o", "was.plan.yaml"]].concat();
        search("32", whole, "64", &more);
        let flags = [
            "replan",
            "was.plan.yaml",
            "--force",
            "--json",
            "--checkpoint",
            "10GB/s",
        ];
        let output = run(
            folder.path(),
            &[&flags[..], &fixed, &["--lost", lost]].concat(),
        );
        assert_eq!(code(&output), 0, "{lost}: {}", stderr(&output));
        let answer = json(&output);
        assert_eq!(answer["lost_gpus"], 32 - left, "{groups} {lost}");
        let going_on = &answer["going_on"];
        assert_eq!(
            going_on["from_checkpoint"], from_checkpoint,
            "{groups} {lost}"
        );
        let after = answer["best"]["groups"].as_array().map_or(0, Vec::len);
        let number = |key: &str| going_on[key].as_f64().expect(key);
        assert!((number("states_bytes") / 12e9 - 8.03).abs() < 0.01);
        if from_checkpoint {
            // Every group reads all states.
            let copies = number("bytes") / number("states_bytes");
            assert!(
                copies + 1e-6 >= after.max(1) as f64,
                "{groups} {lost}: {copies}"
            );
            assert!((number("seconds") - number("bytes") / 10e9).abs() < 1e-6);
        }
        let cluster = match lost {
            "1node of dgx-a100" => "16 x dgx-h100 + 8 x dgx-a100",
            "1node of dgx-h100" => "8 x dgx-h100 + 16 x dgx-a100",
            "1node of dgx-h100,1node of dgx-a100" => "8 x dgx-h100 + 8 x dgx-a100",
            "2nodes of dgx-a100" => "dgx-h100",
            _ => "dgx-a100",
        };
        let searched = search(&left.to_string(), cluster, "64", &fixed);
        assert_eq!(
            in_groups(&searched["best"]),
            in_groups(&answer["best"]),
            "{groups} {lost}"
        );
    }
}

/// A plan's step time and its groups of replicas, by cluster: the order of two groups changes nothing. Without groups, its strategy.
fn in_groups(best: &Value) -> (Value, Vec<Value>) {
    let time = best["predicted"]["step_time_s"].clone();
    let Some(groups) = best["groups"].as_array() else {
        return (time, vec![best["strategy"].clone()]);
    };
    let mut groups = groups.clone();
    groups.sort_by_key(|group| group["cluster"].to_string());
    (time, groups)
}
