//! Diagnosis of a training log: measurement against prediction, and causes of a gap.

use answers::SCHEMA_VERSION;
use answers::inputs::InputsJson;
use catalog::{Bytes, Seconds};
use planner::PlannerError;
use plans::Breakdown;
use plans::json::PredictedJson;
use serde::Serialize;

use crate::diagnose::{self, Hypothesis, Measured, StepFlops};
use crate::logged_run::{LoggedRun, system};

/// A logged run with the likeliest explanations of its difference from the prediction.
#[derive(Debug)]
pub struct Diagnosis<'a> {
    run: &'a LoggedRun,
    hypotheses: Vec<Hypothesis>,
}

#[derive(Serialize)]
struct DiagnoseJson<'a> {
    schema_version: u32,
    inputs: &'a InputsJson,
    plan_id: &'a str,
    system: &'static str,
    measured: MeasuredJson,
    predicted: PredictedJson,
    /// Measured over predicted step time: a ratio.
    step_time_ratio: f64,
    /// Measured over predicted reserved memory.
    memory_ratio: Option<f64>,
    predicted_reserved_bytes: u64,
    hypotheses: Vec<HypothesisJson<'a>>,
    calibration_path: Option<&'a str>,
}

#[derive(Serialize)]
struct MeasuredJson {
    steps: usize,
    warmup: usize,
    step_time_s: f64,
    /// Tenth and ninetieth percentile of step times, in seconds.
    step_time_spread_s: [f64; 2],
    mean_step_time_s: f64,
    tokens_per_s_per_gpu: f64,
    tflops_per_s_per_gpu: Option<f64>,
    peak_allocated_bytes: Option<u64>,
    peak_reserved_bytes: Option<u64>,
    allocation_retries: u64,
    /// Lines of steps that were left out because the output of several ranks is mixed in them.
    garbled_lines: usize,
    /// Lines that repeat a step, as when several ranks log it.
    repeated_lines: usize,
    /// Steps after the warm-up that were left out because they have another global batch.
    steps_of_other_batches: usize,
}

#[derive(Serialize)]
struct HypothesisJson<'a> {
    cause: &'a str,
    evidence: &'a str,
    step_time_s: Option<f64>,
    share_of_gap: f64,
}

impl<'a> Diagnosis<'a> {
    /// Looks for explanations of the run's difference from its prediction.
    ///
    /// # Errors
    /// When a changed scenario cannot be priced.
    pub fn of(run: &'a LoggedRun) -> Result<Self, PlannerError> {
        let planned = run.plan.costs.scenario().workload.global_batch;
        let comparable = run.is_comparable();
        let another = |batch| diagnose::another_batch(batch, planned, comparable);
        let mut hypotheses: Vec<Hypothesis> = run.other_batch().map(another).into_iter().collect();
        if comparable {
            let (costs, strategy) = run.job();
            let causes = diagnose::diagnose(costs, strategy, &run.prediction, &measured(run))?;
            hypotheses.extend(causes);
        }
        Ok(Self { run, hypotheses })
    }

    /// The diagnosis for programs; `calibration_path` is the cluster file calibrated with the log.
    #[must_use]
    pub fn document(&self, calibration_path: Option<&'a str>) -> impl Serialize {
        let run = self.run;
        let reserved = diagnose::reserved_by(&run.prediction);
        DiagnoseJson {
            schema_version: SCHEMA_VERSION,
            inputs: &run.plan.inputs,
            plan_id: &run.plan.file.id,
            system: system(run.log.system),
            measured: MeasuredJson {
                steps: run.steady.seconds.len(),
                warmup: run.steady.warmup,
                step_time_s: run.steady.median(),
                step_time_spread_s: [run.steady.quantile(0.1), run.steady.quantile(0.9)],
                mean_step_time_s: run.steady.mean(),
                tokens_per_s_per_gpu: tokens_per_s(run),
                tflops_per_s_per_gpu: diagnose::tflops(&run.steady),
                peak_allocated_bytes: run.log.allocated,
                peak_reserved_bytes: run.log.reserved,
                allocation_retries: run.log.retries,
                garbled_lines: run.log.garbled,
                repeated_lines: run.log.repeated,
                steps_of_other_batches: run.steady.other_batches,
            },
            predicted: PredictedJson::from(&run.prediction),
            step_time_ratio: run.steady.median() / run.prediction.step_time.0,
            memory_ratio: run.log.reserved.map(|r| r as f64 / reserved.as_f64()),
            predicted_reserved_bytes: reserved.0,
            hypotheses: self
                .hypotheses
                .iter()
                .map(|h| HypothesisJson {
                    cause: &h.cause,
                    evidence: &h.evidence,
                    step_time_s: h.step_time.map(|s| s.0),
                    share_of_gap: h.share,
                })
                .collect(),
            calibration_path,
        }
    }

    /// The diagnosis for people.
    #[must_use]
    pub fn text(&self) -> String {
        let Self { run, hypotheses } = self;
        let steady = &run.steady;
        let head = ["", "predicted", "measured", "gap"].map(str::to_owned);
        let mut text = table(&head, &rows(run));
        let (time, system) = (run.time_in_words(), system(run.log.system));
        text.push_str(&match run.log.mean_of {
            Some(_) => format!("\nStep time: {time} of {system}, evaluations and saves included\n"),
            None => format!(
                "\nStep time: {time} of {system} after {} of warm-up; tenth to ninetieth percentile {} to {}\n",
                steady.warmup,
                Seconds(steady.quantile(0.1)),
                Seconds(steady.quantile(0.9)),
            ),
        });
        text.push_str(&format!(
            "Predicted: {}\n",
            parts(&run.prediction.breakdown)
        ));
        text.push_str("\nWhere the gap may lie: what the log says, then single changes by how much of it each explains\n",
        );
        for (i, h) in hypotheses.iter().enumerate() {
            text.push_str(&format!("{:>3}. {}: {}\n", i + 1, h.cause, h.evidence));
        }
        if hypotheses.is_empty() {
            text.push_str("   no single change that was tried explains a tenth of it\n");
        }
        text
    }
}

/// Tokens per second and GPU, with the sequences per step of the log, or else of the plan.
fn tokens_per_s(run: &LoggedRun) -> f64 {
    let workload = &run.plan.costs.scenario().workload;
    let sequences = run.steady.global_batch().unwrap_or(workload.global_batch);
    let tokens =
        workload.tokens_per_step() as f64 / workload.global_batch as f64 * sequences as f64;
    tokens / workload.gpus as f64 / run.steady.median()
}

fn measured(run: &LoggedRun) -> Measured<'_> {
    Measured {
        log: &run.log,
        steady: &run.steady,
    }
}

/// Rows of measurement against prediction: name, predicted, measured, gap.
fn rows(run: &LoggedRun) -> Vec<[String; 4]> {
    let (steady, p) = (&run.steady, &run.prediction);
    let ratio =
        |measured: f64, predicted: f64| format!("{:+.1}%", (measured / predicted - 1.0) * 100.0);
    // Steps of another job are not compared with the plan, so no gap between them is given.
    let gap = |measured: f64, predicted: f64| match run.is_comparable() {
        true => ratio(measured, predicted),
        false => String::new(),
    };
    let mut rows = vec![[
        "step time".to_owned(),
        p.step_time.to_string(),
        Seconds(steady.median()).to_string(),
        gap(steady.median(), p.step_time.0),
    ]];
    let rate = tokens_per_s(run);
    rows.push([
        "tokens/s/GPU".to_owned(),
        format!("{:.0}", p.tokens_per_s_per_gpu),
        format!("{rate:.0}"),
        gap(rate, p.tokens_per_s_per_gpu),
    ]);
    let (costs, _) = run.job();
    if let Some(StepFlops { logged, planned }) = StepFlops::of(costs.scenario(), &measured(run), p)
    {
        let tflops = logged.0 / steady.median() / 1e12;
        let predicted = planned.0 / p.step_time.0 / 1e12;
        rows.push([
            "TFLOP/s/GPU".to_owned(),
            format!("{predicted:.0}"),
            format!("{tflops:.0}"),
            gap(tflops, predicted),
        ]);
    }
    let reserved = diagnose::reserved_by(p);
    if let Some(bytes) = run.log.reserved {
        rows.push([
            "memory reserved".to_owned(),
            reserved.to_string(),
            Bytes(bytes).to_string(),
            ratio(bytes as f64, reserved.as_f64()),
        ]);
    }
    if let Some(bytes) = run.log.allocated {
        rows.push([
            "memory allocated".to_owned(),
            String::new(),
            Bytes(bytes).to_string(),
            String::new(),
        ]);
    }
    rows
}

/// The breakdown on one line.
fn parts(b: &Breakdown) -> String {
    let shown = planner::explain::parts(b)
        .into_iter()
        .filter(|(_, s)| *s > 1e-4)
        .map(|(name, s)| format!("{name} {}", Seconds(s)));
    shown.collect::<Vec<_>>().join(", ")
}

fn table(head: &[String; 4], rows: &[[String; 4]]) -> String {
    let all: Vec<&[String; 4]> = std::iter::once(head).chain(rows).collect();
    let width = |column: usize| {
        let lengths = all.iter().map(|row| row[column].chars().count());
        lengths.max().unwrap_or(0)
    };
    let widths: [usize; 4] = std::array::from_fn(width);
    all.iter().fold(String::new(), |mut text, row| {
        let line = format!(
            "{:<a$}  {:>b$}  {:>c$}  {:>d$}",
            row[0],
            row[1],
            row[2],
            row[3],
            a = widths[0],
            b = widths[1],
            c = widths[2],
            d = widths[3],
        );
        text.push_str(line.trim_end());
        text.push('\n');
        text
    })
}
