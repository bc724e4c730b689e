//! Training logs, as `diagnose` reads them.

use std::sync::OnceLock;

use accuracy::diagnose::{Measured, diagnose};
use costmodel::CostModel;
use interop::training_log::{LogError, Steady, StepSize, TrainingLog, parse};
use plans::{Prediction, Strategy};

use crate::mutate;
use crate::outcome::Outcome;
use crate::scene::Scene;
use crate::target::{Depth, Target};

/// A step with this many tokens per device.
const SIZE: StepSize = StepSize {
    tokens_per_gpu: 8192.0,
    sequences: 64,
    gpus: 8,
};

const SEEDS: [&str; 5] = [
    " iteration        1/     100 | consumed samples:          64 | elapsed time per iteration (ms): 21234.5 | throughput per GPU (TFLOP/s/GPU): 40.1 | global batch size:    64 | lm loss: 1.2E+01 |\n\
     [Rank 0] (after 1 iterations) memory (MB) | allocated: 20000.25 | max allocated: 40960.50 | reserved: 50000.00 | max reserved: 51200.00\n \
     iteration        2/     100 | elapsed time per iteration (ms): 2100.0 | throughput per GPU (TFLOP/s/GPU): 401.0 | global batch size:    64 |\n \
     iteration        3/     100 | elapsed time per iteration (ms): 2000.0 | global batch size:    64 |\n \
     iteration        4/     100 | elapsed time per iteration (ms): 2010.0 | global batch size:    64 |\n",
    "[titan] INFO - \u{1b}[31mstep:  1  \u{1b}[32mloss: 12.2  \u{1b}[36mmemory: 30.50GiB(38.52%)  \u{1b}[34mtps: 700  \u{1b}[36mtflops: 40.30  \u{1b}[35mmfu: 4.07%\u{1b}[39m\n\
     [titan] INFO - step: 10  loss: 10.1  memory: 61.25GiB(77.36%)  tps: 7,123  tflops: 412.30  mfu: 41.70%\n\
     [titan] WARNING - 3 CUDA memory allocation retries.\n\
     [titan] INFO - step: 20  loss:  9.1  memory: 61.25GiB(77.36%)  tps: 7,200  tflops: 416.80  mfu: 42.15%\n",
    "[INFO]: iteration: 1 / 2000 | consumed_tokens: 1.05M | time_per_iteration_ms: 12.3K | tokens_per_sec: 85.3K | tokens_per_sec_per_gpu: 10.7K | global_batch_size: 1.05M |\n\
     [INFO]:  Memory usage: 9000.25MiB. Peak allocated 30720.00MiB. Peak reserved: 40960.00MiB\n\
     [INFO]: iteration: 2 / 2000 | time_per_iteration_ms: 987 | tokens_per_sec: 1.06M | tokens_per_sec_per_gpu: 133K |\n",
    "epoch=0/micro_step=40/global_step=20, RunningAvgSamplesPerSec=60.0, CurrSamplesPerSec=64.0\n\
     Training epoch 0, iteration 45/99 | global_step: 45 | train_step_timing in s: 6.08 | TFLOPS_per_GPU: 1.249e+03 |\n\
     completed step: 9, seconds: 3.139, TFLOP/s/device: 419.7, Tokens/s/device: 7831.5, loss: 6.7\n  \
     9%|9   | 9/100 [00:19<03:09,  2.20s/it]\r 10%|#   | 10/100 [00:21<03:09,  2.10s/it]\n\
     {\"step\":3,\"step_time_s\":0.25,\"peak_memory_bytes\":1024}\n",
    "starting\n iteration 7/ 9 | elapsed time per iteration (ms): 1e3 |\nstep: 3 tps: 1e6\n",
];

/// Fuzzes training logs.
pub(super) fn logs() -> Target {
    Target::of_text(
        "training-logs",
        || SEEDS.iter().map(|text| text.as_bytes().to_vec()).collect(),
        mutate::text,
        read,
    )
}

fn read(text: &str, depth: Depth) -> Outcome {
    let log = match parse(text, "input") {
        Ok(log) => log,
        Err(error @ LogError::NoSteps { .. }) => return Outcome::malformed(&error),
        Err(error) => return Outcome::refused(&error),
    };
    let mut outcome = Outcome::accepted(format!(
        "{:?} steps {} memory {} retries {}",
        log.system,
        log.steps.len().min(4),
        log.reserved.is_some(),
        log.retries > 0
    ));
    of_log(&log, &mut outcome);
    for warmup in [None, Some(0), Some(1)] {
        match log.steady("input", warmup, SIZE) {
            Ok(steady) => {
                of_times(&steady, &mut outcome);
                if depth == Depth::Use {
                    judged(&log, &steady, &mut outcome);
                }
            }
            Err(error) => outcome
                .class
                .push_str(&crate::outcome::kind(&error.to_string())),
        }
    }
    outcome
}

fn of_log(log: &TrainingLog, outcome: &mut Outcome) {
    for step in &log.steps {
        let numbers = [step.seconds, step.tokens_per_s_per_gpu, step.tflops_per_gpu];
        for number in numbers.into_iter().flatten() {
            outcome.expect(number.is_finite() && number >= 0.0, || {
                format!("a step of {number}")
            });
        }
    }
}

fn of_times(steady: &Steady, outcome: &mut Outcome) {
    let numbers = [
        steady.median(),
        steady.mean(),
        steady.quantile(0.1),
        steady.quantile(0.9),
    ];
    for number in numbers {
        outcome.expect(number.is_finite() && number > 0.0, || {
            format!("a time of {number}")
        });
    }
    outcome.expect(steady.slow() <= steady.seconds.len(), || {
        "slow steps".to_owned()
    });
}

/// A small plan that logs are compared with.
fn plan() -> Option<&'static (CostModel, Strategy, Prediction)> {
    static PLAN: OnceLock<Option<(CostModel, Strategy, Prediction)>> = OnceLock::new();
    let made = || {
        let scenario = Scene::default().scenario().ok()?;
        let (model, w) = (&scenario.model, &scenario.workload);
        let strategy = plans::grammar::parse("tp=2,zero=1", model, w, &scenario.runtime).ok()?;
        let costs = CostModel::new(scenario).ok()?;
        let prediction = costs.predict(&strategy).ok()?;
        Some((costs, strategy, prediction))
    };
    PLAN.get_or_init(made).as_ref()
}

fn judged(log: &TrainingLog, steady: &Steady, outcome: &mut Outcome) {
    let Some((costs, strategy, prediction)) = plan() else {
        return;
    };
    let measured = Measured { log, steady };
    match diagnose(costs, strategy, prediction, &measured) {
        Ok(causes) => {
            for cause in causes {
                outcome.expect(cause.share.is_finite(), || {
                    format!("{}: a share of {}", cause.cause, cause.share)
                });
            }
        }
        Err(error) => outcome
            .class
            .push_str(&crate::outcome::kind(&error.to_string())),
    }
}
