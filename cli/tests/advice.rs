//! What answers advise holds: commands that are proposed find a plan, and strategies that are named compare as is said.

mod common;

use common::{code, shell, stderr};

/// The commands of an answer's "Next", each on one line.
fn proposed(answer: &str) -> Vec<String> {
    let next = answer.split("\nNext\n").nth(1).unwrap_or_default();
    let whole = next.replace("\\\n", " ");
    let lines = whole.lines().map(str::trim);
    let lines = lines.filter(|line| line.starts_with("vescale-plan "));
    lines.map(str::to_owned).collect()
}

/// Questions that nothing fits, with what is proposed.
const TOO_LARGE: [(&str, &[&str]); 2] = [
    (
        "--model qwen2.5-32b --cluster 'l40s x 8 per node, 100 Gb/s x 1' --gpus 24 --seq 4k --global-batch 96 --runtime hf-trainer",
        &["--global-batch 24", "--runtime "],
    ),
    (
        "--model llama3.1-405b --gpus 8",
        &["--gpus ", "vescale-plan size "],
    ),
];

#[test]
fn what_is_proposed_where_nothing_fits_has_a_plan() {
    for (question, proposes) in TOO_LARGE {
        let folder = tempfile::tempdir().expect("a folder");
        let answer = shell(folder.path(), &format!("vescale-plan search {question}"));
        assert_eq!(code(&answer), 3, "{}", stderr(&answer));
        let answer = String::from_utf8_lossy(&answer.stdout).into_owned();
        let commands = proposed(&answer);
        for flag in proposes {
            assert!(
                commands.iter().any(|c| c.contains(flag)),
                "{flag}: {answer}"
            );
        }
        for command in commands {
            let again = shell(folder.path(), &format!("{command} -q"));
            assert_eq!(code(&again), 0, "{command}: {}", stderr(&again));
        }
    }
}
