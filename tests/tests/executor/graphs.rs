//! Steps captured once and run by one call each train as those that are queued anew, to the bit.

use catalog::Model;
use catalog::Precision;
use cpu_device::Numerics;
use cpu_device::{FirstNonFinite, Watch, WatchError};
use executor::{Execution, Job, Session};

use super::cuda::{BATCH, Emulated, SEQ, is_here, models, on_cuda};
use super::jobs::{families, session, sized};

/// A job of four steps, each with another learning rate.
pub(super) fn job(model: &Model, layout: &str, precision: Precision, execution: Execution) -> Job {
    let mut job = sized(model, layout, Numerics::Fast, precision, [4, BATCH, SEQ]);
    job.settings.optimizer.warmup_steps = 2;
    job.settings.execution = execution;
    job
}

/// One micro-batch and two; everything kept, attention again, everything again.
const LAYOUTS: [(&str, Precision); 3] = [
    ("mbs=4", Precision::Fp32),
    ("mbs=2,recompute=selective", Precision::Fp32),
    ("mbs=2,recompute=full,zero=3", Precision::Bf16),
];

/// [`LAYOUTS`] of every model; factors of 8 bits, which kernels find; slopes, which the host writes when they are first
/// read.
fn cases() -> Vec<(Model, &'static str, Precision)> {
    let all = |model: Model| LAYOUTS.map(|(layout, precision)| (model.clone(), layout, precision));
    let mut cases: Vec<_> = models().into_iter().flat_map(all).collect();
    let [gpt, ..] = models();
    cases.push((gpt, "mbs=4", Precision::Fp8));
    let mut families = families().into_iter();
    let (_, bloom) = families.find(|(name, _)| name == "bloom").expect("is one");
    cases.push((bloom, "mbs=4", Precision::Fp32));
    cases
}

#[test]
fn captured_steps_are_the_steps_queued_anew() {
    if !is_here() {
        return;
    }
    for (model, layout, precision) in cases() {
        let what = format!("{} {layout} {precision:?}", model.name);
        let replayed = on_cuda(&job(&model, layout, precision, Execution::Replayed));
        let captured = on_cuda(&job(&model, layout, precision, Execution::Graph));
        assert_eq!(captured.losses, replayed.losses, "{what}");
        assert_eq!(captured.gradient_norms, replayed.gradient_norms, "{what}");
        assert_eq!(
            captured.weights_sha256(),
            replayed.weights_sha256(),
            "{what}"
        );
        let mut losses = captured.losses.clone();
        losses.dedup();
        assert_eq!(losses.len(), 4, "{what}: every step has other tokens");
        let [here, there] = [&captured, &replayed].map(|outcome| &outcome.ranks[0]);
        let peak = |memory: Option<executor::MemoryUse>| memory.map(|memory| memory.peak);
        assert_eq!(peak(here.memory), peak(there.memory), "{what}");
        assert_eq!(here.peak_saved, there.peak_saved, "{what}");
        assert_eq!(here.routed, there.routed, "{what}");
        assert!(here.events.is_empty() && !there.events.is_empty(), "{what}");
        // All but the first step.
        let within = |(captured, step): (&f64, &f64)| captured <= step;
        let mut times = here.captured_times.iter().zip(&here.step_times[1..]);
        assert_eq!(times.len(), 3, "{what}");
        assert!(
            times.all(within) && there.captured_times.is_empty(),
            "{what}"
        );
    }
}

#[test]
fn a_captured_step_that_diverges_names_its_operator() {
    if !is_here() {
        return;
    }
    let [_, llama, _] = models();
    let mut broken = job(&llama, "mbs=4", Precision::Fp32, Execution::Graph);
    broken.settings.optimizer.warmup_steps = 0;
    broken.settings.optimizer.learning_rate = 1e30;
    let error = executor::train_on(&Emulated, &session(&broken)).expect_err("it diverges");
    let named = matches!(error.watched(), Some(WatchError::NotFinite { .. }));
    assert!(named, "{error}");
}

#[test]
fn steps_that_need_the_host_are_not_captured() {
    if !is_here() {
        return;
    }
    let [gpt, ..] = models();
    let alone = job(&gpt, "mbs=2", Precision::Fp32, Execution::Graph);
    let refused = |result: Result<executor::Outcome, executor::ExecutorError>, says: &str| {
        let error = result.expect_err("refused").to_string();
        assert!(error.contains("cannot be captured"), "{error}");
        assert!(error.contains(says), "{error}");
    };
    refused(executor::train(&session(&alone)), "the cpu device");
    let watched = Session {
        watch: Some(&FirstNonFinite as &(dyn Watch + Sync)),
        ..session(&alone)
    };
    refused(executor::train_on(&Emulated, &watched), "--break-at");
    for layout in ["dp=2,mbs=2", "pp=2,mbs=2", "tp=2,mbs=2"] {
        let several = job(&gpt, layout, Precision::Fp32, Execution::Graph);
        let result = executor::train_on(&Emulated, &session(&several));
        refused(result, "through the memory of the hosts");
    }
    let [_, _, mixtral] = models();
    for layout in ["dp=2,ep=2,mbs=2", "tp=2,sp=on,etp=2,mbs=2"] {
        let several = job(&mixtral, layout, Precision::Fp32, Execution::Graph);
        let result = executor::train_on(&Emulated, &session(&several));
        refused(result, "other ranks' experts");
    }
}
