//! The measurement and the prediction of one run.

use catalog::residuals::Kind;
use catalog::runs::{Framework, MemoryCounter, Recipe, Run, Status, Tier};
use catalog::{Bytes, Fitted, Reach};
use costmodel::{CostModel, Scenario};
use plans::{Breakdown, MemoryItem, NamedTime, Prediction};
use serde::Serialize;

use super::mapping::{self, Mapped};

/// A run with its prediction, or why there is none.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Scored {
    pub(crate) id: String,
    pub(crate) file: String,
    pub(crate) framework: String,
    pub(crate) runtime: Option<String>,
    pub(crate) runtime_inferred: bool,
    pub(crate) device_matched: bool,
    pub(crate) model: String,
    pub(crate) moe: bool,
    pub(crate) gpu: Option<String>,
    pub(crate) gpus: Option<u64>,
    pub(crate) precision: Option<String>,
    /// Precision of the products, as intervals group it.
    pub(crate) precision_kind: Option<&'static str>,
    pub(crate) tier: Option<Tier>,
    pub(crate) status: Status,
    /// The kind of the run, by which other runs count as evidence for it.
    #[serde(skip)]
    pub(crate) kind: Option<Kind>,
    /// The run's sequence length, and whether its expert parallelism crosses the network.
    #[serde(skip)]
    pub(crate) reach: Reach,
    pub(crate) skipped: Option<String>,
    pub(crate) strategy: Option<String>,
    pub(crate) measured: Measured,
    pub(crate) predicted: Option<Predicted>,
    pub(crate) error: Errors,
}

/// Measured step time and memory of a run, where its source has them.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Measured {
    pub(crate) step_time_s: Option<f64>,
    pub(crate) time_origin: Option<&'static str>,
    pub(crate) peak_memory_bytes: Option<f64>,
    pub(crate) memory_counter: Option<&'static str>,
}

/// What the cost model predicts for a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Predicted {
    pub(crate) step_time_s: f64,
    pub(crate) peak_memory_bytes: f64,
    /// The predicted peak as each memory counter would show it.
    pub(crate) counters: Counters,
    /// Bytes of the device's memory that the run may use.
    pub(crate) capacity_bytes: f64,
    pub(crate) fits: bool,
    pub(crate) p_fits: f64,
    /// How many published runs support predictions like this one, in words.
    pub(crate) evidence: String,
    pub(crate) interval: [f64; 2],
    /// Model FLOPs utilisation, with causal attention counted once.
    pub(crate) mfu: f64,
    /// Model FLOPs utilisation as most sources count it, as if nothing were masked.
    pub(crate) mfu_palm: f64,
    pub(crate) breakdown: Breakdown,
    /// Time per step of the busiest rank's kernels and collectives, longest first.
    pub(crate) kernels: Vec<NamedTime>,
    /// Named parts of the heaviest rank's peak, largest first.
    pub(crate) memory: Vec<MemoryItem>,
}

/// A predicted peak in bytes, as different memory counters show it.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Counters {
    /// Allocated by tensors (`torch.cuda.max_memory_allocated`).
    pub(crate) allocated: f64,
    /// Reserved by the allocator (`torch.cuda.max_memory_reserved`).
    pub(crate) reserved: f64,
    /// In use on the device, with CUDA context and communicators (nvidia-smi).
    pub(crate) device: f64,
}

impl Counters {
    /// Bytes that the device must hold: all that is in use, without the allocator's cache.
    pub(crate) fn needed(self) -> f64 {
        self.allocated + self.device - self.reserved
    }
}

impl Predicted {
    /// Collects what the report needs; `memory` is the peak as the source's counter would show it.
    fn new(prediction: Prediction, memory: f64, capacity: Bytes) -> Self {
        let (shortest, longest) = prediction.step_time_interval;
        Self {
            step_time_s: prediction.step_time.0,
            peak_memory_bytes: memory,
            counters: Counters {
                allocated: like_counter(&prediction, "allocated"),
                reserved: like_counter(&prediction, "reserved"),
                device: like_counter(&prediction, "nvidia-smi"),
            },
            capacity_bytes: capacity.as_f64(),
            fits: prediction.fit.fits(),
            p_fits: prediction.p_fits,
            evidence: prediction.evidence,
            interval: [shortest.0, longest.0],
            mfu: prediction.mfu,
            mfu_palm: prediction.mfu_palm,
            breakdown: prediction.breakdown,
            kernels: prediction.kernels,
            memory: prediction.memory,
        }
    }
}

/// Relative errors: predicted over measured, minus one.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Errors {
    pub(crate) step_time: Option<f64>,
    pub(crate) peak_memory: Option<f64>,
}

/// Predicts a run; `constants` sets a scenario's constants. A run that is `left_out` has no errors.
pub(crate) fn score(
    run: &Run,
    file: &str,
    constants: &dyn Fn(&mut Scenario) -> Fitted,
    left_out: Option<String>,
) -> Scored {
    let is_left_out = left_out.is_some();
    let mut scored = Scored {
        id: run.id.clone(),
        file: file.to_owned(),
        framework: run
            .sw_version
            .clone()
            .unwrap_or_else(|| "unknown".to_owned()),
        runtime_inferred: true,
        model: run.model.name.clone().unwrap_or_default(),
        moe: run.model.experts.is_some_and(|e| e > 1),
        gpu: run.gpu.clone(),
        gpus: run.num_gpus,
        precision: run.precision.clone(),
        tier: run.tier,
        status: run.status,
        skipped: left_out,
        measured: measured(run),
        ..Scored::default()
    };
    match predict(run, &scored.measured, constants) {
        Ok((mapped, prediction, memory)) => {
            scored.runtime = Some(mapped.scenario.runtime.name.clone());
            scored.kind = Some(mapped.scenario.kind());
            scored.reach = mapped.scenario.reach(&mapped.strategy);
            scored.runtime_inferred = !mapped.names_framework;
            scored.device_matched = mapped.names_device;
            scored.precision_kind = Some(mapped.scenario.workload.precision.name());
            scored.strategy = Some(plans::grammar::short(&mapped.strategy));
            let ratio = |p: f64, m: Option<f64>| m.filter(|m| *m > 0.0).map(|m| p / m - 1.0);
            if run.status == Status::Ok && !is_left_out {
                scored.error = Errors {
                    step_time: ratio(prediction.step_time.0, scored.measured.step_time_s),
                    peak_memory: ratio(memory, scored.measured.peak_memory_bytes),
                };
            }
            scored.predicted = Some(Predicted::new(
                prediction,
                memory,
                mapped.scenario.capacity(),
            ));
        }
        Err(reason) => scored.skipped = scored.skipped.or(Some(reason)),
    }
    scored
}

fn predict(
    run: &Run,
    measured: &Measured,
    constants: &dyn Fn(&mut Scenario) -> Fitted,
) -> Result<(Mapped, Prediction, f64), String> {
    let mut mapped = mapping::map(run)?;
    let constants = constants(&mut mapped.scenario);
    if measured.step_time_s.is_none()
        && measured.peak_memory_bytes.is_none()
        && run.status == Status::Ok
    {
        return Err("neither step time nor memory is stated".to_owned());
    }
    let costs = CostModel::with_constants(mapped.scenario.clone(), &constants)
        .map_err(|e| e.to_string())?;
    let prediction = costs.predict(&mapped.strategy).map_err(|e| e.to_string())?;
    let memory = like_counter(&prediction, measured.memory_counter.unwrap_or("reserved"));
    Ok((mapped, prediction, memory))
}

/// Name of [`MemoryCounter::AllocatedInFirstStep`].
const IN_FIRST_STEP: &str = "allocated in the first step";

/// The predicted memory in bytes, as the source's counter would show it.
pub(crate) fn like_counter(p: &Prediction, counter: &str) -> f64 {
    let part = |name| p.memory_of(name).as_f64();
    let all = p.peak_memory.as_f64();
    let allocated = || {
        all - part("context")
            - part("workspaces and communicators")
            - part("allocator rounding")
            - part("freed gradients")
    };
    match counter {
        "nvidia-smi" => all,
        "allocated" => allocated(),
        IN_FIRST_STEP => {
            let after_update = part("parameters") + part("gradients") + part("optimizer");
            f64::max(allocated() - part("optimizer"), after_update)
        }
        _ => all - part("context") - part("workspaces and communicators"),
    }
}

/// The measured step time in seconds, also where the optimizer is not Adam.
pub(crate) fn step_time(run: &Run) -> Option<f64> {
    time(run).0
}

/// Whether the run's steps have costs that it does not state, as with another optimizer than Adam. Its times are
/// compared only after some runs of its source are known.
pub(crate) fn hides_costs(run: &Run) -> bool {
    run.is_on("optimizer_is_not_adam") || run.is_on("fixed_costs_not_published")
}

pub(crate) fn measured(run: &Run) -> Measured {
    let (step_time_s, time_origin) = match hides_costs(run) {
        true => (None, None),
        false => time(run),
    };
    let (peak_memory_bytes, memory_counter) = memory(run);
    Measured {
        step_time_s,
        time_origin,
        peak_memory_bytes,
        memory_counter,
    }
}

/// Step time in seconds and its origin: as measured, else as derived, else from tokens per second. A run whose
/// sequences vary in length has none to compare.
fn time(run: &Run) -> (Option<f64>, Option<&'static str>) {
    if run.is_on("variable_length") {
        return (None, None);
    }
    if let Some(time) = run.metric(|m| &m.step_time_s) {
        return (Some(time), Some("metrics"));
    }
    if let Some(time) = run.derived_metric(|d| &d.step_time_s) {
        return (Some(time), Some("derived"));
    }
    let tokens = run
        .global_batch
        .zip(run.seq_len)
        .map(|(b, s)| (b * s) as f64);
    let rate = run
        .metric(|m| &m.tokens_per_s)
        .or_else(|| {
            run.metric(|m| &m.tokens_per_s_per_gpu)
                .zip(run.num_gpus)
                .map(|(r, n)| r * n as f64)
        })
        .or_else(|| {
            run.metric(|m| &m.samples_per_s)
                .zip(run.seq_len)
                .map(|(r, s)| r * s as f64)
        });
    match tokens.zip(rate) {
        Some((tokens, rate)) if rate > 0.0 => (Some(tokens / rate), Some("rate")),
        _ => (None, None),
    }
}

/// The measured peak in bytes and its counter. A metric that does not name its counter has that of
/// the source's recipe, else that of the framework's log, else the device's (nvidia-smi).
fn memory(run: &Run) -> (Option<f64>, Option<&'static str>) {
    let gib = 1024f64.powi(3);
    let logs_reserved = Framework::of(run)
        .and_then(|framework| framework.memory_counter.as_deref())
        .is_some_and(|counter| counter == "reserved");
    let recipe = Recipe::of(run).and_then(|recipe| recipe.memory_counter);
    let unnamed = match recipe {
        Some(MemoryCounter::Allocated) => "allocated",
        Some(MemoryCounter::AllocatedInFirstStep) => IN_FIRST_STEP,
        None if logs_reserved => "reserved",
        None => "nvidia-smi",
    };
    let Some(m) = &run.metrics else {
        return (None, None);
    };
    let peaks = [
        (&m.peak_mem_reserved_gib, gib, "reserved"),
        (&m.peak_mem_allocated_gib, gib, "allocated"),
        (&m.peak_mem_active_gib, gib, "allocated"),
        // nvidia-smi prints MiB; sources divide by 1024 and write GB.
        (&m.peak_mem_gb_nvidia_smi, gib, "nvidia-smi"),
        (&m.peak_mem_gib, gib, unnamed),
        (&m.peak_mem_gb, 1e9, unnamed),
    ];
    let stated = peaks.into_iter().find_map(|(peak, unit, counter)| {
        let bytes = peak.as_ref()?.get() * unit;
        Some((bytes, counter))
    });
    stated.unzip()
}
