//! Plans of clusters of several pools, through every command that reads plans.

mod common;

use common::{code, json, run, shell, stderr};

const SEARCH: [&str; 10] = [
    "search",
    "--model",
    "llama3-8b",
    "--seq",
    "4096",
    "--global-batch",
    "64",
    "--gpus",
    "16",
    "--json",
];

/// A plan with two groups of replicas, `two.yaml`, and one whose replicas are all alike, `one.yaml`.
fn plans(folder: &std::path::Path) {
    for (name, groups) in [("two.yaml", "groups=2"), ("one.yaml", "groups=1")] {
        let cluster = "1 node x dgx-h100 + 1 node x dgx-a100";
        let flags = ["--cluster", cluster, "--fix", groups, "-o", name];
        let output = run(folder, &[&SEARCH[..], &flags].concat());
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        let answer = json(&output);
        let shares = answer["best"]["groups"].as_array();
        assert_eq!(answer["top"][0]["groups"].as_array(), shares, "{name}");
        let shares: Vec<u64> = (shares.into_iter().flatten())
            .filter_map(|group| group["global_batch"].as_u64())
            .collect();
        match name {
            "one.yaml" => assert!(shares.is_empty(), "{shares:?}"),
            _ => assert!(
                shares.len() == 2 && shares[0] > shares[1] && shares.iter().sum::<u64>() == 64
            ),
        }
    }
}

/// A command, its exit code, and a part of its output.
#[rustfmt::skip]
const COMMANDS: [(&str, i32, &str); 63] = [
    ("explain two.yaml", 0, "group 2: "),
    ("explain two.yaml --json", 0, "\"groups\""),
    ("explain 'two.yaml#2'", 0, "One decision away"),
    ("explain 'two.yaml#3'", 2, "expected  #1 to #2"),
    ("explain 'one.yaml#1'", 2, "all of its replicas are alike"),
    ("explain two.yaml --why-not tp8", 2, "one of its groups, such as two.yaml#1"),
    ("report two.yaml && cat two.report.html", 0, "Groups of replicas"),
    ("report two.yaml && cat two.report.html", 0, "data-tip=\"pipeline rank 0 of group 2: "),
    ("report 'two.yaml#1'", 0, "two.group1.report.html"),
    ("compare two.yaml one.yaml", 0, "gradients between pools"),
    ("compare two.yaml one.yaml --json", 0, "\"groups\",\n      \"2\",\n      \"1\""),
    ("compare two.yaml two.yaml", 0, "step time"),
    ("compare 'two.yaml#1' 'two.yaml#2'", 0, "step time"),
    ("compare two.yaml one.yaml --report both.html && cat both.html", 0, "of 64 sequences on 8 × a100-80gb"),
    ("compare two.yaml one.yaml --report both.html && cat both.html", 0, "<td>pipeline rank 0 of group 2, "),
    ("export two.yaml --to megatron-lm", 4, "cannot express groups=2"),
    ("export two.yaml --to megatron-lm", 4, "--fix groups=1"),
    ("export two.yaml --to megatron-lm", 4, "two.yaml#1 to two.yaml#2"),
    ("export two.yaml --to torchtitan --json", 4, "\"instead\": \"groups=1\""),
    ("export 'two.yaml#1' --to megatron-lm", 0, "this is group 1 of two.yaml alone"),
    ("export one.yaml --to megatron-lm", 0, "start the job on hosts in this order"),
    ("trace two.yaml", 2, "two.yaml#1 (8 GPUs), two.yaml#2 (8 GPUs)"),
    ("run two.yaml --data tokens.bin", 2, "two.yaml#1 (8 GPUs), two.yaml#2 (8 GPUs)"),
    ("profile two.yaml", 2, "two.yaml#1 (8 GPUs), two.yaml#2 (8 GPUs)"),
    ("diagnose train.log --plan two.yaml", 2, "the plan has 2 groups of replicas"),
    ("diagnose train.log --plan two.yaml --follow", 2, "the plan has 2 groups of replicas"),
    ("diagnose train.log --plan 'two.yaml#1'", 2, "a log has the steps of all groups together"),
    ("calibrate train.log --plan two.yaml -o my.yaml", 2, "as `search --fix groups=1` finds it"),
    ("calibrate train.log --plan 'two.yaml#2' -o my.yaml", 2, "a log has the steps of all groups together"),
    ("calibrate --measured pp=2,mbs=1:1s --plan one.yaml -o my.yaml", 2, "has several pools"),
    ("search --from two.yaml --fix vpp=1 -o again.yaml", 0, "the present strategy is the best plan"),
    ("search --from two.yaml -o again.yaml", 0, "Not looked for: where groups of replicas differ"),
    ("search --from two.yaml --cluster '16 x dgx-h100 + 8 x dgx-a100' --keep pp -o more.yaml", 0, "The best plan has groups of replicas side by side on"),
    ("search --from two.yaml --cluster '16 x dgx-h100 + 8 x dgx-a100' --report more.html -o more.yaml && cat more.html", 0, "From the present strategy"),
    ("search --from two.yaml --cluster '16 x dgx-h100 + 8 x dgx-a100' --keep pp -o more.yaml", 0, "vescale-plan compare more.yaml two.yaml"),
    ("search --from two.yaml --seq 2k", 2, "no --seq, or one of its groups, such as two.yaml#1"),
    ("search --from two.yaml --cluster dgx-h100", 2, "a cluster of several pools, or one of its groups"),
    ("search --from two.yaml --cluster '16 x dgx-h100 + 8 x dgx-a100' --gpus 12", 2, "has 24"),
    ("search --from 'two.yaml#1' -o first.yaml", 0, "Best single change"),
    ("search --from 'two.yaml#3'", 2, "expected  #1 to #2"),
    ("search --from one.yaml -o again.yaml", 0, "8 × h100-sxm + 8 × a100-80gb"),
    ("search --from one.yaml --on dgx-a100", 2, "there are 8 GPUs"),
    ("search --from one.yaml --on dgx-v100", 2, "one of dgx-h100 (8 GPUs), dgx-a100 (8 GPUs)"),
    ("search --from one.yaml --on 'dgx-h100 + h100'", 2, "`dgx-h100` is named twice"),
    ("search --from 'two.yaml#2' --on dgx-a100", 2, "the nodes of the cluster are all alike"),
    ("replan two.yaml --lost 1node", 2, "one of dgx-h100 (8 GPUs), dgx-a100 (8 GPUs)"),
    ("replan two.yaml --lost 1node", 2, "'1node of dgx-h100'"),
    ("replan two.yaml --lost '1node of dgx-v100'", 2, "nearest   dgx-a100"),
    ("replan two.yaml --lost '9 of dgx-h100'", 2, "expected  1 to 8"),
    ("replan two.yaml --lost '0 of dgx-h100'", 2, "expected  1 to 8"),
    ("replan two.yaml --lost '1node of dgx-h100,8 of a100'", 2, "all 16 GPUs of the plan are lost"),
    ("replan two.yaml --lost '1node of dgx-h100' --fix tp=3", 2, "constraint `tp=3`"),
    ("replan two.yaml --lost '1node of dgx-h100' -o left.yaml", 0, "ranks that are left send each other"),
    ("replan two.yaml --lost '4 x h100-sxm'", 0, "12 of 16 are left: 4 × h100-sxm + 8 × a100-80gb"),
    ("explain 'two.12gpus.plan.yaml#2'", 0, "One decision away"),
    ("replan two.12gpus.plan.yaml --lost '1node of a100' --lost '2 of dgx-h100' --json", 0, "\"lost_gpus\": 10"),
    ("replan one.yaml --lost '4x h100-sxm'", 0, "Ways to use the pools"),
    ("replan 'two.yaml#2' --lost 4", 0, "two.group2.4gpus.plan.yaml"),
    ("search --model gpt2 --seq 1k --global-batch 64 --cluster '8 x dgx-a100 + 16 x dgx2-v100' --gpus 24 -o part.yaml --report part.html && cat part.html", 0, "<td>GPUs of the plan</td>"),
    ("search --model gpt2 --seq 1k --global-batch 64 --cluster '8 x dgx-a100 + 16 x dgx2-v100' --gpus 24 -o part.yaml --force && cat part.report.html", 0, "<h2 id=\"ways-title\">Ways to use the pools</h2>"),
    ("size --model gpt2 --cluster '8 x dgx-a100 + 8 x dgx-h100' --gpus 4,16", 0, "plan the smallest in full"),
    ("size --model llama3-8b --seq 4096 --global-batch 64 --cluster '8 x dgx-h100 + 8 x dgx-a100' --gpus 16 --fix groups=2", 0, "group 2: "),
    ("size --model gpt2 --cluster '8 x dgx-a100 + 8 x dgx-h100' --gpus 8,24", 2, "the pools have 1 to 16"),
];

#[test]
fn every_command_takes_plans_of_several_groups_or_says_why_not() {
    let folder = tempfile::tempdir().expect("a folder");
    plans(folder.path());
    std::fs::write(folder.path().join("train.log"), "step 1\n").expect("written");
    for (line, expected, says) in COMMANDS {
        let output = shell(folder.path(), &format!("vescale-plan {line}"));
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &stderr(&output);
        assert_eq!(code(&output), expected, "{line}: {said}");
        assert!(said.contains(says), "{line}: {said}");
    }
}

/// The strategy in use, its pools if given, its devices, and whether the best plan is on others.
#[rustfmt::skip]
const NOW: [(&str, &str, &str, bool); 6] = [
    ("tp8 pp3 mbs1", "", "16 × h100-sxm + 8 × a100-80gb", true),
    ("tp8 pp3 mbs1", "dgx-a100 + dgx-h100", "8 × a100-80gb + 16 × h100-sxm", true),
    ("tp4 dp4 mbs1", "", "16 × h100-sxm", true),
    ("tp4 mbs1", "h100", "16 × h100-sxm", true),
    ("tp4 mbs1", "dgx-a100", "8 × a100-80gb", true),
    ("tp4 mbs1", "8 x dgx-a100", "8 × a100-80gb", true),
];

/// A strategy in use is priced on its own pools as if alone, and compared with the best plan of all
/// pools.
#[test]
fn a_strategy_in_use_lies_on_some_of_the_pools() {
    let folder = tempfile::tempdir().expect("a folder");
    let search = |more: &[&str]| {
        let pools = [
            "--cluster",
            "16 x dgx-h100 + 8 x dgx-a100",
            "--gpus",
            "24",
            "--force",
        ];
        let own = [
            "--model",
            "llama3-8b",
            "--seq",
            "4096",
            "--global-batch",
            "96",
            "--json",
        ];
        let output = run(
            folder.path(),
            &[&["search"], &own[..], &pools, more].concat(),
        );
        assert_eq!(code(&output), 0, "{more:?}: {}", stderr(&output));
        json(&output)
    };
    let best = search(&[])["best"]["predicted"]["step_time_s"].clone();
    for (strategy, on, devices, elsewhere) in NOW {
        let flags = match on {
            "" => vec!["--from", strategy],
            on => vec!["--from", strategy, "--on", on],
        };
        let answer = search(&flags);
        let present = &answer["present"];
        assert_eq!(present["pools"]["devices"], devices, "{flags:?}");
        assert_eq!(
            present["pools"]["best_elsewhere"].is_string(),
            elsewhere,
            "{flags:?}"
        );
        assert_eq!(
            answer["best"]["predicted"]["step_time_s"], best,
            "{flags:?}"
        );
        let (cluster, gpus) = match devices {
            "16 × h100-sxm" => ("dgx-h100", "16"),
            "8 × a100-80gb" => ("dgx-a100", "8"),
            "16 × h100-sxm + 8 × a100-80gb" => ("16 x dgx-h100 + 8 x dgx-a100", "24"),
            _ => ("8 x dgx-a100 + 16 x dgx-h100", "24"),
        };
        let own = [
            "--model",
            "llama3-8b",
            "--seq",
            "4096",
            "--global-batch",
            "96",
            "--json",
        ];
        let alone = ["--cluster", cluster, "--gpus", gpus, "--strategy", strategy];
        let output = run(folder.path(), &[&["estimate"], &own[..], &alone].concat());
        let estimated = &json(&output)["predicted"];
        assert_eq!(&present["predicted"], estimated, "{flags:?}");
        let changes = present["changes"].as_array().expect("changes");
        assert!(
            !changes.is_empty() && present["path"] == serde_json::json!([]),
            "{flags:?}"
        );
    }
    // On the best plan's own pools single changes lead to it.
    let same = search(&[
        "--from",
        "tp8 pp3 mbs1",
        "--fix",
        "groups=1",
        "--fix",
        "pp=3",
    ]);
    let path = same["present"]["path"].as_array().expect("a path");
    match same["present"]["pools"]["best_elsewhere"].as_str() {
        Some(_) => assert!(path.is_empty()),
        None => assert_eq!(
            path.last().expect("steps")["step_time_s"],
            same["best"]["predicted"]["step_time_s"]
        ),
    }
}

/// GPUs are taken in the order of pools and planned as by `search`; more GPUs are never slower.
#[test]
fn sizes_of_pools_are_what_search_finds() {
    let folder = tempfile::tempdir().expect("a folder");
    let own = [
        "--model",
        "llama3-8b",
        "--seq",
        "4096",
        "--global-batch",
        "96",
        "--json",
    ];
    let pools = [
        "--cluster",
        "16 x dgx-h100 + 16 x dgx-a100, 400 Gb/s between",
    ];
    let output = run(folder.path(), &[&["size"], &own[..], &pools].concat());
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let answer = json(&output);
    let rows = answer["sizes"].as_array().expect("rows");
    let gpus: Vec<u64> = rows.iter().filter_map(|row| row["gpus"].as_u64()).collect();
    assert_eq!(gpus, [1, 2, 4, 8, 16, 24, 32]);
    let mut fastest = 0.0;
    for row in rows {
        let Some(rate) = row["tokens_per_s"].as_f64() else {
            continue;
        };
        // Plans that are shown may take a little longer than the fastest.
        assert!(rate >= fastest * 0.99, "{row}");
        fastest = rate.max(fastest);
    }
    for (row, cluster) in [
        (&rows[3], "dgx-h100"),
        (&rows[5], "16 x dgx-h100 + 8 x dgx-a100, 400 Gb/s between"),
        (&rows[6], "16 x dgx-h100 + 16 x dgx-a100, 400 Gb/s between"),
    ] {
        let gpus = row["gpus"].to_string();
        let same = ["--cluster", cluster, "--gpus", &gpus, "--force"];
        let searched = json(&run(
            folder.path(),
            &[&["search"], &own[..], &same].concat(),
        ));
        assert_eq!(
            searched["best"]["predicted"], row["best"]["predicted"],
            "{cluster}"
        );
        assert_eq!(
            searched["best"]["groups"], row["best"]["groups"],
            "{cluster}"
        );
    }
}
