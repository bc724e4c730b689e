//! Predicted against measured step time of training on this machine: measures the kernels that a set
//! of layouts needs, trains under each, and prints the table of `docs/executor.md`.
//!
//! `cargo bench -p vescale-plan --bench prediction`; with `-- --grid` the kernels are measured over
//! the general grid instead, so that no layout's own shapes are known.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

const TOOL: &str = env!("CARGO_BIN_EXE_vescale-plan");
/// Steps of one run.
const STEPS: &str = "7";
/// Runs of each layout, in turn.
const ROUNDS: usize = 2;

/// Ranks and strategy.
const LAYOUTS: &[(u64, &str)] = &[
    (1, "mbs=8"),
    (1, "mbs=2"),
    (1, "mbs=8,recompute=full"),
    (1, "mbs=8,recompute=selective"),
    (2, "tp=2,mbs=8"),
    (2, "tp=2,sp=on,mbs=4"),
    (2, "cp=2,cp_kind=ring,mbs=8"),
    (2, "cp=2,cp_kind=all_to_all,mbs=8"),
    (2, "dp_replicate=2,zero=0,mbs=4"),
    (2, "dp_shard=2,zero=1,mbs=2"),
    (2, "dp_shard=2,zero=3,mbs=1"),
    (2, "pp=2,mbs=1,schedule=1f1b"),
    (2, "pp=2,mbs=4,schedule=gpipe"),
    (2, "pp=2,mbs=2,schedule=zb-h1"),
    (4, "tp=2,pp=2,mbs=2"),
    (4, "dp_shard=2,tp=2,sp=on,zero=1,mbs=4"),
    (4, "dp_shard=4,zero=2,mbs=2"),
    (4, "pp=2,vpp=3,mbs=2,dp_shard=2,zero=1,schedule=interleaved"),
    (4, "pp=2,cp=2,mbs=2,recompute=full"),
    (8, "dp_shard=2,tp=2,pp=2,mbs=1,zero=1"),
];

/// Measurements of one layout.
struct Row {
    ranks: u64,
    layout: &'static str,
    predicted: f64,
    /// Median step time of every run.
    measured: Vec<f64>,
}

impl Row {
    fn median(&self) -> f64 {
        median(self.measured.clone())
    }

    /// Noise: half the distance between the runs, relative to their median.
    fn noise(&self) -> f64 {
        let most = self.measured.iter().copied().fold(f64::MIN, f64::max);
        let least = self.measured.iter().copied().fold(f64::MAX, f64::min);
        (most - least) / 2.0 / self.median()
    }

    fn error(&self) -> f64 {
        self.predicted / self.median() - 1.0
    }
}

fn main() {
    let grid = std::env::args().any(|a| a == "--grid");
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let plans: Vec<PathBuf> = (0..LAYOUTS.len())
        .map(|i| plan(&examples, folder.path(), i))
        .collect();
    let profile = folder.path().join("profile.yaml");
    let mut measure = Command::new(TOOL);
    measure.arg("profile").arg("-q").arg("-o").arg(&profile);
    if !grid {
        measure.args(&plans);
    }
    output(&mut measure);
    let mut rows: Vec<Row> = LAYOUTS
        .iter()
        .map(|&(ranks, layout)| Row {
            ranks,
            layout,
            predicted: 0.0,
            measured: Vec::new(),
        })
        .collect();
    for round in 0..ROUNDS {
        // Layouts run in order and then in reverse, so that a machine that slows down or recovers affects all alike.
        let mut order: Vec<usize> = (0..rows.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for index in order {
            let (row, plan) = (&mut rows[index], &plans[index]);
            let mut run = Command::new(TOOL);
            run.args(["run", "-q", "--json", "--steps", STEPS, "--profile"])
                .arg(&profile)
                .arg("--data")
                .arg(examples.join("data/tales.txt"))
                .arg(plan);
            let json: Value = serde_json::from_str(&output(&mut run)).expect("JSON");
            let number = |field: &str| json[field].as_f64().expect(field);
            row.predicted = number("predicted_step_time_s");
            row.measured.push(number("step_time_s"));
        }
    }
    print(&rows);
}

/// Writes the plan of a layout.
fn plan(examples: &Path, folder: &Path, index: usize) -> PathBuf {
    let (ranks, layout) = LAYOUTS[index];
    let path = folder.join(format!("{index}.yaml"));
    let model = examples.join("nanogpt-10m/config.json");
    let mut estimate = Command::new(TOOL);
    estimate
        .args(["estimate", "-q", "--json", "--runtime", "vescale"])
        .args(["--precision", "fp32", "--seq", "256", "--global-batch", "8"])
        .args(["--gpus", &ranks.to_string(), "--strategy", layout])
        .arg("--model")
        .arg(model)
        .arg("-o")
        .arg(&path);
    output(&mut estimate);
    path
}

fn output(command: &mut Command) -> String {
    let output = command.output().expect("the tool starts");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{command:?}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn print(rows: &[Row]) {
    println!("| ranks | layout | measured, ms | between runs | predicted, ms | error |");
    println!("|---:|---|---:|---:|---:|---:|");
    for row in rows {
        println!(
            "| {} | {} | {:.0} | ±{:.1}% | {:.0} | {:+.1}% |",
            row.ranks,
            row.layout.replace(',', " "),
            row.median() * 1e3,
            row.noise() * 100.0,
            row.predicted * 1e3,
            row.error() * 100.0
        );
    }
    let errors: Vec<f64> = rows.iter().map(|r| r.error().abs()).collect();
    let worst = errors.iter().copied().fold(0.0, f64::max);
    let (tau, pairs) = kendall(rows);
    println!(
        "\n{} layouts: median error {:.1}%, largest {:.1}%; Kendall's tau {tau:.2} over the {pairs} pairs that differ by more than runs do",
        rows.len(),
        median(errors) * 100.0,
        worst * 100.0
    );
}

/// Kendall's tau between predicted and measured order, over pairs whose measured times differ by more than the noise of
/// both.
fn kendall(rows: &[Row]) -> (f64, u32) {
    let (mut agree, mut pairs) = (0i32, 0u32);
    for (i, a) in rows.iter().enumerate() {
        for b in &rows[i + 1..] {
            let apart = (a.median() / b.median()).ln();
            if apart.abs() <= a.noise().max(b.noise()) * 2.0 {
                continue;
            }
            pairs += 1;
            let same = (a.predicted / b.predicted).ln() * apart > 0.0;
            agree += if same { 1 } else { -1 };
        }
    }
    (f64::from(agree) / f64::from(pairs.max(1)), pairs)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len().is_multiple_of(2) {
        f64::midpoint(values[middle - 1], values[middle])
    } else {
        values[middle]
    }
}
