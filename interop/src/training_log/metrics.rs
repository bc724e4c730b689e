//! Metrics that a tracker exports: CSV and JSON of Weights & Biases, CSV and JSON of TensorBoard, the Trainer's
//! `trainer_state.json`, and Megatron-LM's golden values. Where no metric is a step's time or a rate, the wall time between logged steps is taken.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::line::MOST;
use super::log::{LogError, LogSystem, LoggedStep, TrainingLog};
use super::quantity::Quantity;

/// What a metric measures, told by a part of its name in lower case; the first part that occurs in the name decides. Times are
/// in seconds where the end of the name does not say milliseconds.
const NAMES: [(&str, Quantity); 23] = [
    ("time_per_iteration", Quantity::Seconds),
    ("time per iteration", Quantity::Seconds),
    ("train_step_timing in s", Quantity::Seconds),
    ("time_metrics/end_to_end(s)", Quantity::Seconds),
    ("step_time", Quantity::Seconds),
    ("iteration-time", Quantity::Seconds),
    ("iteration_time", Quantity::Seconds),
    ("time/iteration", Quantity::Seconds),
    ("tokens_per_sec_per_gpu", Quantity::TokensPerGpu),
    ("tokens_per_second_per_gpu", Quantity::TokensPerGpu),
    ("tokens_per_sec_per_device", Quantity::TokensPerGpu),
    ("per_device_tokens_per_sec", Quantity::TokensPerGpu),
    ("throughput(tps)", Quantity::TokensPerGpu),
    // Composer's rates, as llm-foundry logs them too; those of the whole job have no `device/`.
    ("device/tokens_per_sec", Quantity::TokensPerGpu),
    ("device/samples_per_sec", Quantity::SequencesPerGpu),
    ("samples_per_second", Quantity::Sequences),
    ("samples_per_sec", Quantity::Sequences),
    ("tflops_per_gpu", Quantity::Tflops),
    ("per_device_tflops_per_sec", Quantity::Tflops),
    ("tflop/s/gpu", Quantity::Tflops),
    ("memory/max_reserved(gib)", Quantity::ReservedGib),
    ("wall time", Quantity::WallTime),
    ("_timestamp", Quantity::WallTime),
];

/// The metric by which Megatron-LM logs the sequences of a step (`megatron/training/training.py`, `training_log`). `batch-size vs samples` has
/// another axis than steps.
const BATCH: &str = "batch-size";

/// Names of columns and fields that hold the step number, in lower case; the first that is present counts. `_step` of Weights
/// & Biases counts calls of its `log`, of which the Trainer makes one in `logging_steps` steps
/// (transformers `integrations/integration_utils.py`, `WandbCallback`).
const STEP: [&str; 6] = [
    "train/global_step",
    "trainer/global_step",
    "global_step",
    "iteration",
    "step",
    "_step",
];

/// Prefixes of the names of metrics that an evaluation logs.
const EVALUATION: [&str; 3] = ["eval", "val", "test"];

/// Least ratio of the Trainer's mean loss to the mean of its logged losses in a run that was not resumed. They differ by the steps
/// after the last logged one, and by rounding.
const LEAST_LOSS_RATIO: f64 = 0.9;

/// A logged step, with the wall times in seconds at which it was logged first and last: an evaluation logs its step again.
#[derive(Clone, Copy, Debug, Default)]
struct Row {
    step: LoggedStep,
    wall: Option<f64>,
    last_wall: Option<f64>,
}

/// Reads exported metrics; `None` if the text holds none.
///
/// # Errors
/// When it holds the metrics of several runs, or is the Trainer's state of a run that was resumed or has not ended, which has no time of
/// all its steps.
pub(super) fn parse(text: &str, path: &str) -> Result<Option<TrainingLog>, LogError> {
    let start = text.trim_start();
    if start.starts_with('{') && start.contains("\"log_history\"") {
        return trainer_state(start, path);
    }
    let items = match start.chars().next() {
        Some('[') => of_json(start),
        Some('{') if start.contains("\"values\"") => {
            let rows = of_golden_values(start);
            return Ok(rows.and_then(|rows| finished(rows, 0, LogSystem::Metrics)));
        }
        Some('{') if start.contains("\"_step\"") => Some(of_lines(text)),
        _ => of_csv(text),
    };
    let Some(items) = items else {
        return Ok(None);
    };
    let runs: Vec<String> = runs(&items).into_iter().map(str::to_owned).collect();
    if runs.len() > 1 {
        let path = path.to_owned();
        return Err(LogError::SeveralRuns { path, runs });
    }
    let (rows, garbled) = of_items(&items);
    Ok(finished(rows, garbled, LogSystem::Metrics))
}

/// The names of the runs that have values of a known quantity.
fn runs(items: &[Item]) -> BTreeSet<&str> {
    let fields = items.iter().filter_map(|(_, fields)| fields.as_ref());
    let values = fields.flatten().filter(|(_, value)| value.is_number());
    let runs = values.filter_map(|(name, _)| Some((name.rsplit_once(OF_RUN)?.0, name)));
    let known = runs.filter(|(_, name)| quantity(name).is_some());
    known.map(|(run, _)| run).collect()
}

/// Sorts and merges rows so that each step occurs once; where no row has a time or a rate, wall times give step times.
fn finished(mut rows: Vec<Row>, garbled: usize, system: LogSystem) -> Option<TrainingLog> {
    rows.sort_by_key(|row| row.step.step);
    // A tracker writes metrics of one step in several rows.
    rows.dedup_by(|later, earlier| {
        let same = later.step.step == earlier.step.step;
        if same {
            merge(earlier, later);
        }
        same
    });
    if !rows.iter().any(|row| is_timed(&row.step)) {
        for at in (1..rows.len()).rev() {
            let (before, now) = (rows[at - 1], rows[at]);
            let steps = (now.step.step - before.step.step) as f64;
            let passed = now.wall.zip(before.last_wall);
            let passed = passed.map(|(now, before)| now - before);
            rows[at].step.seconds = passed.filter(|s| *s > 0.0).map(|s| s / steps);
        }
    }
    rows.retain(|row| is_timed(&row.step));
    let steps: Vec<LoggedStep> = rows.iter().map(|row| row.step).collect();
    (!steps.is_empty()).then(|| TrainingLog {
        system,
        of_others: 0,
        other_runs: Vec::new(),
        allocated: None,
        reserved: steps.iter().filter_map(|step| step.reserved).max(),
        retries: 0,
        garbled,
        repeated: 0,
        mean_of: None,
        steps,
    })
}

fn merge(into: &mut Row, from: &Row) {
    let (to, step) = (&mut into.step, from.step);
    to.seconds = to.seconds.or(step.seconds);
    to.tokens_per_s_per_gpu = to.tokens_per_s_per_gpu.or(step.tokens_per_s_per_gpu);
    to.sequences_per_s_per_gpu = to.sequences_per_s_per_gpu.or(step.sequences_per_s_per_gpu);
    to.sequences_per_s = to.sequences_per_s.or(step.sequences_per_s);
    to.tflops_per_gpu = to.tflops_per_gpu.or(step.tflops_per_gpu);
    to.reserved = to.reserved.or(step.reserved);
    to.global_batch = to.global_batch.or(step.global_batch);
    into.wall = into.wall.or(from.wall);
    into.last_wall = from.last_wall.or(into.last_wall);
}

pub(super) fn quantity(name: &str) -> Option<Quantity> {
    let name = name.to_lowercase();
    // Weights & Biases adds the extremes of smoothed points.
    if name.ends_with("__min") || name.ends_with("__max") {
        return None;
    }
    let metric = metric(&name);
    // The Trainer's `train_samples_per_second` is the mean of the whole run, evaluations included.
    let of_run = metric.ends_with("train_samples_per_second");
    if of_run || EVALUATION.iter().any(|of| metric.starts_with(of)) {
        return None;
    }
    if metric == BATCH {
        return Some(Quantity::GlobalBatch);
    }
    let (_, found) = NAMES.iter().find(|(part, _)| metric.contains(part))?;
    match found {
        Quantity::Seconds if is_in_milliseconds(metric) => Some(Quantity::Milliseconds),
        found => Some(*found),
    }
}

/// Whether the last word of a metric's name is milliseconds, as in `step_time_ms` and `step time (ms)`.
fn is_in_milliseconds(metric: &str) -> bool {
    let mut words = metric.split(|c: char| !c.is_alphanumeric());
    let last = words.rfind(|word| !word.is_empty());
    last.is_some_and(|unit| ["ms", "msec", "milliseconds"].contains(&unit))
}

/// The index in [`STEP`] of a column's name; `None` if the column has no step numbers.
fn rank(name: &str) -> Option<usize> {
    let name = name.to_lowercase();
    STEP.iter().position(|of| *of == metric(&name))
}

/// The field with step numbers: the first of [`STEP`] in at least half of the rows with a time or
/// rate, or else in any of them. Without such rows, all rows count.
fn step_name(items: &[Item]) -> Option<&String> {
    let rows = || items.iter().filter_map(|(_, fields)| fields.as_ref());
    let mut chosen: Vec<&Map<String, Value>> = rows()
        .filter(|fields| is_timed(&measured(fields).step))
        .collect();
    let least = chosen.len().div_ceil(2).max(1);
    if chosen.is_empty() {
        chosen = rows().collect();
    }
    let mut counts = BTreeMap::new();
    let fields = chosen.iter().flat_map(|fields| fields.iter());
    for (name, _) in fields.filter(|(_, value)| !value.is_null()) {
        if let Some(rank) = rank(name) {
            *counts.entry((rank, name)).or_insert(0) += 1;
        }
    }
    let usual = counts.iter().find(|(_, count)| **count >= least);
    let found = usual.or_else(|| counts.iter().next());
    found.map(|((_, name), _)| *name)
}

/// What Weights & Biases writes between the name of a run and that of its metric.
const OF_RUN: &str = " - ";

/// The name of a metric without that of its run.
fn metric(name: &str) -> &str {
    name.rsplit(OF_RUN).next().unwrap_or(name)
}

fn set(row: &mut Row, quantity: Quantity, value: f64) {
    let none = quantity == Quantity::GlobalBatch && value < 1.0;
    if none || !(0.0..=MOST).contains(&value) {
        return;
    }
    quantity.set(&mut row.step, value);
    if quantity == Quantity::WallTime {
        (row.wall, row.last_wall) = (Some(value), Some(value));
    }
}

/// The line of a row, 0 if unknown, and its named values; `None` if they cannot be read.
pub(super) type Item = (usize, Option<Map<String, Value>>);

/// The lines of a table whose header has a column of steps.
pub(super) fn of_csv(text: &str) -> Option<Vec<Item>> {
    let mut lines = text.lines().enumerate();
    let (_, header) = lines.next()?;
    let names = cells(header);
    let known = |name: &String| quantity(name).is_some();
    if names.len() < 2 || !names.iter().any(|name| rank(name).is_some()) || !names.iter().any(known)
    {
        return None;
    }
    let used = |name: &String| rank(name).is_some() || known(name);
    let used: Vec<bool> = names.iter().map(used).collect();
    let fields = |line: &str| {
        let cells = cells(line);
        let columns = names.iter().zip(&used).zip(&cells);
        let present = columns.filter(|((_, used), cell)| **used && !cell.is_empty());
        let value = |cell: &String| {
            cell.parse()
                .map_or_else(|_| cell.clone().into(), |n: f64| n.into())
        };
        let fields = present.map(|((name, _), cell)| (name.clone(), value(cell)));
        (cells.len() == names.len()).then(|| fields.collect())
    };
    let lines = lines.filter(|(_, line)| !line.trim().is_empty());
    Some(
        lines
            .map(|(index, line)| (index + 1, fields(line)))
            .collect(),
    )
}

/// The cells of a line of CSV, without quotes.
fn cells(line: &str) -> Vec<String> {
    let mut cells = vec![String::new()];
    let mut quoted = false;
    for c in line.chars() {
        match c {
            '"' => quoted = !quoted,
            ',' if !quoted => cells.push(String::new()),
            c => {
                if let Some(cell) = cells.last_mut() {
                    cell.push(c);
                }
            }
        }
    }
    cells.iter().map(|cell| cell.trim().to_owned()).collect()
}

/// The items of TensorBoard's `[[wall time, step, value], …]`, or of a list of objects.
fn of_json(text: &str) -> Option<Vec<Item>> {
    let items: Vec<Value> = serde_json::from_str(text).ok()?;
    let fields = |item: Value| match item {
        Value::Object(fields) => Some(fields),
        Value::Array(triple) => {
            let [wall, step, _] = <[Value; 3]>::try_from(triple).ok()?;
            Some(Map::from_iter([
                ("wall time".into(), wall),
                ("step".into(), step),
            ]))
        }
        _ => None,
    };
    Some(items.into_iter().map(|item| (0, fields(item))).collect())
}

/// The lines of one JSON object each, as Weights & Biases keeps a run's history.
fn of_lines(text: &str) -> Vec<Item> {
    let lines = text.lines().enumerate();
    let lines = lines.filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(index, line)| (index + 1, serde_json::from_str(line).ok()))
        .collect()
}

/// The rows of a log, and how many items were left out because their step number cannot be read. Items without facts of training do not
/// count: a tracker writes how busy the machine is in items of their own.
fn of_items(items: &[Item]) -> (Vec<Row>, usize) {
    let name = step_name(items);
    let mut rows = Vec::new();
    let mut garbled = 0;
    for (line, fields) in items {
        let Some(fields) = fields else {
            garbled += 1;
            continue;
        };
        let mut row = measured(fields);
        let said = name.and_then(|name| fields.get(name));
        let said = said.filter(|value| !value.is_null());
        // pandas writes whole numbers as `10.0` where some rows have none.
        let step = said.and_then(Value::as_f64);
        if let Some(step) = step.filter(|step| (0.0..=MOST).contains(step)) {
            (row.step.step, row.step.line) = (step as u64, *line);
            rows.push(row);
        } else if said.is_some() || is_timed(&row.step) {
            garbled += 1;
        }
    }
    (rows, garbled)
}

/// What the fields of a row measure. Where several measure the same, the shortest name counts: longer ones are of a part, such as
/// `data_step_time`.
fn measured(fields: &Map<String, Value>) -> Row {
    let mut row = Row::default();
    let mut named: Vec<_> = fields.iter().collect();
    named.sort_by_key(|(name, _)| Reverse(metric(name).len()));
    for (name, value) in named {
        if let (Some(value), Some(quantity)) = (value.as_f64(), quantity(name)) {
            set(&mut row, quantity, value);
        }
    }
    row
}

fn is_timed(step: &LoggedStep) -> bool {
    let rates = [
        step.tokens_per_s_per_gpu,
        step.sequences_per_s_per_gpu,
        step.sequences_per_s,
    ];
    step.seconds.is_some() || rates.iter().any(Option::is_some)
}

/// Reads Megatron-LM's golden values: for each metric an object whose `values` have the step as
/// their key; values that were not measured are `nan`.
fn of_golden_values(text: &str) -> Option<Vec<Row>> {
    let metrics: Map<String, Value> = serde_json::from_str(text).ok()?;
    let mut rows = Vec::new();
    for (name, metric) in &metrics {
        let values = metric.get("values").and_then(Value::as_object);
        let (Some(quantity), Some(values)) = (quantity(name), values) else {
            continue;
        };
        for (step, value) in values {
            let mut row = Row::default();
            if let (Ok(step), Some(value)) = (step.parse(), value.as_f64()) {
                row.step.step = step;
                set(&mut row, quantity, value);
                rows.push(row);
            }
        }
    }
    Some(rows)
}

/// Reads the Trainer's state. The time of a step is the time of the whole run, which the entry after its last step has, divided by the number
/// of steps: evaluations and saves are in it. `None` if it cannot be read.
fn trainer_state(text: &str, path: &str) -> Result<Option<TrainingLog>, LogError> {
    let state = serde_json::from_str(text).unwrap_or(Value::Null);
    let Some(history) = state["log_history"].as_array() else {
        return Ok(None);
    };
    let path = || path.to_owned();
    let whole = |entry: &&Value| entry["train_runtime"].is_number();
    let Some(whole) = history.iter().rfind(whole) else {
        return Err(LogError::Unfinished { path: path() });
    };
    if was_resumed(history, whole) {
        return Err(LogError::Resumed { path: path() });
    }
    let mut row = Row::default();
    row.step.step = whole["step"].as_u64().unwrap_or(0);
    let steps = Some(row.step.step).filter(|steps| *steps > 0);
    if let Some((seconds, steps)) = whole["train_runtime"].as_f64().zip(steps) {
        set(&mut row, Quantity::Seconds, seconds / steps as f64);
    }
    let log = finished(vec![row], 0, LogSystem::Trainer);
    Ok(log.map(|log| TrainingLog {
        mean_of: steps,
        ..log
    }))
}

/// Whether the Trainer's run began at a checkpoint. It adds up the losses since then, but divides them by all steps
/// (transformers `trainer.py`, `_total_loss_scalar`), so that its mean is below that of the losses logged.
fn was_resumed(history: &[Value], last: &Value) -> bool {
    let (mut before, mut sum) = (0, 0.0);
    for entry in history {
        let logged = entry["step"].as_u64().zip(entry["loss"].as_f64());
        if let Some((step, loss)) = logged.filter(|(step, _)| *step > before) {
            sum += loss * (step - before) as f64;
            before = step;
        }
    }
    let mean = last["train_loss"].as_f64();
    mean.is_some_and(|mean| before > 0 && mean < LEAST_LOSS_RATIO * sum / before as f64)
}
