//! What must be true of every prediction, strategy and file, whatever the input was.

use catalog::Bytes;
use costmodel::{CostModel, Scenario};
use interop::export::{Dialect, Differs, ExportError, Exported, Inputs, Job, Launcher, export};
use interop::import::{Document, Given, Imported, import};
use plans::json::{DetailJson, PredictedJson, StrategyJson};
use plans::plan_file::PlannedFor;
use plans::{PlanFile, Prediction, Strategy, Zero};
use serde_json::Value;

use crate::outcome::Outcome;
use reports::terminal::{Ground, Style};

/// Schedules of more actions are not priced here: a legal plan may be as large as its user likes.
const MOST_ACTIONS: u64 = 4000;

/// Prices a strategy and checks everything that is promised of a prediction.
pub fn predicted(scenario: &Scenario, strategy: &Strategy, outcome: &mut Outcome) {
    let actions = strategy.pp.saturating_mul(strategy.vpp);
    if actions.saturating_mul(strategy.num_micro_batches) > MOST_ACTIONS {
        return;
    }
    let costs = match CostModel::new(scenario.clone()) {
        Ok(costs) => costs,
        Err(_) => return,
    };
    let Ok(prediction) = costs.predict(strategy) else {
        return;
    };
    of_prediction(&prediction, outcome);
    if let Ok(score) = costs.score(strategy) {
        let same =
            score.step_time == prediction.step_time && score.peak_memory == prediction.peak_memory;
        outcome.expect(same, || "score and prediction differ".to_owned());
        if let Ok(floors) = costs.floors(strategy, None, None) {
            outcome.expect(floors.time.0 <= score.step_time.0 * (1.0 + 1e-9), || {
                format!("time floor {:?} above {:?}", floors.time, score.step_time)
            });
            outcome.expect(floors.memory <= score.peak_memory, || {
                format!("memory floor {} above {}", floors.memory, score.peak_memory)
            });
        }
    }
    written(scenario, strategy, &prediction, outcome);
    let ground = Ground {
        runtime: &scenario.runtime,
        gpus_per_node: scenario.cluster.gpus_per_node,
        adapters: scenario.model.adapters,
        pools: scenario.cluster.pools.as_deref(),
        documents: scenario.workload.documents(),
        groups: &[],
    };
    let style = Style {
        width: 80,
        colour: false,
    };
    let text = reports::terminal::prediction(strategy, &prediction, ground, style);
    let shown = plans::grammar::written(strategy, &scenario.runtime);
    let (model, workload) = (&scenario.model, &scenario.workload);
    let read = plans::grammar::parse(&shown, model, workload, &scenario.runtime);
    let same = read
        .as_ref()
        .is_ok_and(|read| read.canonical(model) == strategy.canonical(model));
    outcome.expect(same, || format!("`{shown}` is read back as {read:?}"));
    readable("terminal", &text, outcome);
    outcome.class.push_str(if prediction.fit.fits() {
        " fits"
    } else {
        " too large"
    });
}

/// Checks a prediction: numbers are finite, parts sum up, the MFU is at most 1.
pub fn of_prediction(p: &Prediction, outcome: &mut Outcome) {
    let step = p.step_time.0;
    outcome.expect(step.is_finite() && step > 0.0, || {
        format!("step time {step}")
    });
    outcome.expect(p.mfu.is_finite() && p.mfu > 0.0 && p.mfu <= 1.0, || {
        format!("MFU {}", p.mfu)
    });
    let parts = planner::explain::parts(&p.breakdown);
    let sum: f64 = parts.iter().map(|(_, s)| s).sum();
    outcome.expect((sum - step).abs() <= 1e-6 * step, || {
        format!("the parts sum to {sum}, the step takes {step}")
    });
    for (name, seconds) in parts {
        outcome.expect(seconds.is_finite() && seconds >= -1e-9 * step, || {
            format!("{name} takes {seconds}")
        });
    }
    let memory: u64 = p
        .memory
        .iter()
        .map(|item| item.bytes)
        .fold(0, u64::saturating_add);
    outcome.expect(memory == p.peak_memory.0, || {
        format!(
            "parts of memory sum to {memory}, the peak is {}",
            p.peak_memory.0
        )
    });
    let (low, high) = p.step_time_interval;
    outcome.expect(low.0 <= high.0 && high.0.is_finite() && low.0 > 0.0, || {
        format!("interval {low:?} {high:?}")
    });
    outcome.expect(p.peak_memory > Bytes(0), || "no memory".to_owned());
    match (
        serde_json::to_value(PredictedJson::from(p)),
        serde_json::to_value(DetailJson::from(p)),
    ) {
        (Ok(predicted), Ok(detail)) => {
            let null = has_null(&predicted) || has_null(&detail);
            outcome.expect(!null, || "null in JSON".to_owned());
        }
        _ => outcome.expect(false, || "no JSON".to_owned()),
    }
}

/// Whether JSON has a `null`, which is how infinities and NaN are written.
#[must_use]
pub fn has_null(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.iter().any(has_null),
        Value::Object(map) => map.values().any(has_null),
        _ => false,
    }
}

/// Checks that a text for people has no control character, no NaN and no infinity.
pub fn readable(what: &str, text: &str, outcome: &mut Outcome) {
    let control = |c: char| c.is_control() && c != '\n';
    outcome.expect(!text.contains(control), || {
        format!("{what}: a control character")
    });
    let nonsense = text
        .split(|c: char| !c.is_alphanumeric())
        .find(|w| matches!(*w, "NaN" | "inf"));
    outcome.expect(nonsense.is_none(), || format!("{what}: not a number"));
}

/// Checks that a strategy's text parses to the same strategy, and that its sizes multiply up.
pub fn of_strategy(scenario: &Scenario, strategy: &Strategy, outcome: &mut Outcome) {
    let w = &scenario.workload;
    let again = plans::grammar::parse(&strategy.to_string(), &scenario.model, w, &scenario.runtime);
    outcome.expect(again.as_ref() == Ok(strategy), || {
        format!("printed and read again: {again:?}")
    });
    outcome.expect(strategy.world() == w.gpus, || {
        format!("{} ranks of {} GPUs", strategy.world(), w.gpus)
    });
    let sequences = strategy.dp() * strategy.micro_batch * strategy.num_micro_batches;
    outcome.expect(sequences == w.global_batch, || {
        format!("{sequences} sequences of {}", w.global_batch)
    });
    let layers: u64 = strategy
        .stages
        .0
        .iter()
        .fold(0, |sum, n| sum.saturating_add(*n));
    outcome.expect(layers == scenario.model.layers, || {
        format!("{layers} layers in stages")
    });
    let canonical = Strategy::new(strategy.canonical(&scenario.model), &scenario.model, w);
    outcome.expect(canonical.is_ok(), || {
        format!("canonical form: {canonical:?}")
    });
}

/// Checks that the plan file of a strategy is read back unchanged.
fn written(
    scenario: &Scenario,
    strategy: &Strategy,
    prediction: &Prediction,
    outcome: &mut Outcome,
) {
    let w = &scenario.workload;
    let Ok(sharding) = models::sharding_section(&scenario.model, strategy, w) else {
        return;
    };
    let planned = PlannedFor {
        model: &scenario.model.name,
        model_config: scenario.model.definition(),
        adapters: scenario.model.adapters,
        cluster: &scenario.cluster.name,
        runtime: &scenario.runtime.name,
        workload: w,
        headroom: scenario.headroom,
    };
    let file = PlanFile::of(planned, strategy, sharding, prediction);
    let again = file
        .to_yaml()
        .and_then(|text| PlanFile::from_yaml(&text, "plan"));
    outcome.expect(again.as_ref() == Ok(&file), || {
        format!(
            "a plan that is written reads back as {:?}",
            again.map(|f| f.id)
        )
    });
    let json = StrategyJson::new(strategy.decisions(), w.precision);
    outcome.expect(json == file.strategy, || {
        "strategy and plan differ".to_owned()
    });
}

/// Exports a strategy to a training system; `None` if the model cannot be sharded as it says.
#[must_use]
pub fn exported(
    scenario: &Scenario,
    strategy: &Strategy,
    dialect: Dialect,
    launcher: Option<Launcher>,
) -> Option<Result<Exported, ExportError>> {
    let w = &scenario.workload;
    let sharding = models::sharding_section(&scenario.model, strategy, w).ok()?;
    let job = Job {
        model: &scenario.model,
        decisions: strategy.decisions(),
        workload: w,
        runtime: &scenario.runtime,
        sharding: &sharding,
        id: "0123456789abcdef",
        cluster: &scenario.cluster,
        // All inputs are given, so that the export passes its check.
        inputs: Inputs {
            tokenizer: Some("tokenizer"),
            data: Some("data"),
            hf_id: Some("model"),
        },
    };
    Some(export(&job, dialect, launcher))
}

/// Checks that an export passes `export --check` and is imported as the same strategy.
pub fn round_trip(
    scenario: &Scenario,
    strategy: &Strategy,
    dialect: Dialect,
    outcome: &mut Outcome,
) {
    let exported = match exported(scenario, strategy, dialect, Some(Launcher::Torchrun)) {
        Some(Ok(exported)) => exported,
        Some(Err(ExportError::Inexpressible { refusals, .. })) => {
            outcome.expect(!refusals.is_empty(), || "refused for nothing".to_owned());
            return;
        }
        Some(Err(error)) => return outcome.expect(false, || error.to_string()),
        None => return,
    };
    let name = dialect.name();
    let file = &exported.files[0];
    let text = file.text.replace("FILL_IN_LEARNING_RATE", "1e-5");
    let document = match Document::read(&text, &file.name, None, &|_| None) {
        Ok(document) => document,
        Err(error) => return outcome.expect(false, || format!("{name}: its own file: {error}")),
    };
    outcome.expect(document.dialect == dialect, || {
        format!(
            "{name}: its own file is taken for {}",
            document.dialect.name()
        )
    });
    if let Ok(findings) = interop::check::check(&document, Some(&scenario.model)) {
        outcome.expect(findings.is_empty(), || {
            format!("{name}: its own file: {findings:?}")
        });
    }
    let given = Given {
        model: &scenario.model,
        gpus: Some(scenario.workload.gpus),
        seq_len: (!dialect.has_sequence_length()).then_some(scenario.workload.seq_len),
        gpus_per_node: 8,
    };
    match import(&document, &given) {
        Ok(mut imported) => {
            as_noted(&mut imported, &exported, scenario, strategy);
            let model = &scenario.model;
            let same =
                imported.decisions_under(model, &scenario.runtime) == strategy.canonical(model);
            outcome.expect(same, || {
                format!("{name}: {strategy} came back as {:?}", imported.decisions)
            });
            outcome.expect(imported.workload == scenario.workload, || {
                format!("{name}: another workload came back")
            });
        }
        Err(interop::import::ImportError::NotImportable { .. }) => {}
        Err(error) => outcome.expect(false, || format!("{name}: its own file: {error}")),
    }
}

/// Sets decisions that an exported file lacks or changes to those of the plan; the export noted
/// both.
fn as_noted(
    imported: &mut Imported,
    exported: &Exported,
    scenario: &Scenario,
    strategy: &Strategy,
) {
    let planned = strategy.decisions();
    let read = &mut imported.decisions;
    if !imported.dialect.has_micro_batch() {
        read.micro_batch = planned.micro_batch;
        read.num_micro_batches = planned.num_micro_batches;
        // Without FSDP the file cannot say that layers are recomputed: an argument of the training script does.
        if planned.zero == Zero::Z0 {
            read.recompute = planned.recompute;
        }
        let w = &imported.workload;
        let batch = scenario.workload.global_batch;
        imported.workload = crate::scene::workload(w.gpus, w.seq_len, batch, w.precision)
            .expect("the workload of a plan, but for its batch");
    }
    // Gradient types that the plan left to its runtime.
    for unmet in &exported.unmet {
        if let Differs::Gradients { assumed, has } = unmet.differs
            && read.gradients == Some(has)
        {
            read.gradients = Some(assumed);
        }
    }
}
