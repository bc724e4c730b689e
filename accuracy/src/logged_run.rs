//! Pairs the log of a training run with its plan and the prediction for that plan.

use answers::Opened;
use catalog::Seconds;
use costmodel::{CostError, CostModel, Scenario};
use interop::training_log::{self, LogError, LogSystem, Steady, StepSize, TrainingLog};
use plans::{Decisions, Prediction, Strategy};

use crate::diagnose;

/// A training run: its log, the plan that it ran under, and the prediction for that plan.
#[derive(Debug)]
pub struct LoggedRun {
    /// The plan that the run used.
    pub plan: Opened,
    /// The prediction for the plan, at the log's global batch if the plan's strategy can run it.
    pub prediction: Prediction,
    /// The plan's job at the log's global batch, if that is another than the plan's and the strategy can run it.
    pub at_batch: Option<AtBatch>,
    /// The training log.
    pub log: TrainingLog,
    /// The log's steps after warm-up.
    pub steady: Steady,
}

/// Step times of two runs that differ by no more than this share are taken for those of the same job.
const SAME_TIME: f64 = 0.05;

/// The job of a plan with another global batch.
#[derive(Debug)]
pub struct AtBatch {
    /// The costs of the job.
    pub costs: CostModel,
    /// The plan's strategy, with as many micro-batches as the batch needs.
    pub strategy: Strategy,
}

impl AtBatch {
    /// The job of a plan with a global batch of `batch` sequences; `None` if the plan's strategy
    /// cannot run that.
    ///
    /// # Errors
    /// When the job cannot be priced.
    pub fn of(plan: &Opened, batch: u64) -> Result<Option<Self>, CostError> {
        let scenario = plan.costs.scenario();
        let Ok(workload) = scenario.workload.with_batch(batch) else {
            return Ok(None);
        };
        let micro_batches = plan.strategy.num_micro_batches.checked_mul(batch);
        let planned = scenario.workload.global_batch;
        let micro_batches = micro_batches.filter(|number| number.is_multiple_of(planned));
        let Some(micro_batches) = micro_batches else {
            return Ok(None);
        };
        let decisions = Decisions {
            num_micro_batches: micro_batches / planned,
            ..plan.strategy.decisions().clone()
        };
        let Ok(strategy) = Strategy::new(decisions, &scenario.model, &workload) else {
            return Ok(None);
        };
        let costs = CostModel::new(Scenario {
            workload,
            ..scenario.clone()
        })?;
        Ok(Some(Self { costs, strategy }))
    }
}

/// Why a log cannot be compared with a plan.
#[derive(Debug, thiserror::Error)]
pub enum LoggedRunError {
    /// The log cannot be read.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The plan cannot be priced.
    #[error(transparent)]
    Cost(#[from] CostError),
}

/// The tokens per GPU, the sequences and the GPUs of one step of a plan.
#[must_use]
pub fn step_size(plan: &Opened) -> StepSize {
    let workload = &plan.costs.scenario().workload;
    StepSize {
        tokens_per_gpu: workload.tokens_per_step() as f64 / workload.gpus as f64,
        sequences: workload.global_batch,
        gpus: workload.gpus,
    }
}

impl LoggedRun {
    /// Reads the text of a log called `name`, and predicts its plan; `warmup` steps are skipped.
    ///
    /// # Errors
    /// When the log has no steps, or the plan cannot be priced.
    pub fn read(
        plan: Opened,
        text: &str,
        name: &str,
        warmup: Option<usize>,
    ) -> Result<Self, LoggedRunError> {
        let log = training_log::parse(text, name)?;
        let steady = log.steady(name, warmup, step_size(&plan))?;
        let planned = plan.costs.scenario().workload.global_batch;
        let batch = steady.global_batch().filter(|batch| *batch != planned);
        let at_batch = batch.map(|batch| AtBatch::of(&plan, batch)).transpose()?;
        let at_batch = at_batch.flatten();
        Ok(Self {
            prediction: match &at_batch {
                Some(job) => job.costs.predict(&job.strategy)?,
                None => plan.costs.predict(&plan.strategy)?,
            },
            at_batch,
            plan,
            log,
            steady,
        })
    }

    /// The costs and the strategy that the run is compared with.
    #[must_use]
    pub fn job(&self) -> (&CostModel, &Strategy) {
        match &self.at_batch {
            Some(job) => (&job.costs, &job.strategy),
            None => (&self.plan.costs, &self.plan.strategy),
        }
    }

    /// The log's global batch, if it is another than the plan's.
    #[must_use]
    pub fn other_batch(&self) -> Option<u64> {
        let planned = self.plan.costs.scenario().workload.global_batch;
        self.steady.global_batch().filter(|batch| *batch != planned)
    }

    /// Whether steps of the log are predicted steps: of the same global batch.
    #[must_use]
    pub fn is_comparable(&self) -> bool {
        self.other_batch().is_none() || self.at_batch.is_some()
    }

    /// What was left out of the log, one sentence for each reason.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let log = &self.log;
        let mut notes = Vec::new();
        if log.garbled > 0 {
            notes.push(match log.garbled {
                1 => "1 line holds a garbled step and is left out".to_owned(),
                lines => format!("{lines} lines hold garbled steps and are left out"),
            });
        }
        if log.repeated > 0 {
            notes.push(match log.repeated {
                1 => "1 line repeats a step and counts once".to_owned(),
                lines => format!("{lines} lines repeat a step and count once"),
            });
        }
        if let Some(steps) = log.mean_of {
            let steps = reports::format::counted(steps, "step");
            notes.push(format!(
                "the log has only the mean of {steps}, evaluations and saves included"
            ));
        }
        if let (runs @ 1.., [first, .., last]) = (log.other_runs.len(), &log.steps[..]) {
            let times = if runs == 1 { "once" } else { "several times" };
            notes.push(format!(
                "step numbers go back {times}, as where several runs write one log: one run counts, with steps {} to {} from line {}",
                first.step, last.step, first.line
            ));
        }
        let other = self.steady.other_batches;
        if let Some(batch) = self.steady.global_batch().filter(|_| other > 0) {
            let (steps, have) = match other {
                1 => ("1 step".to_owned(), "has"),
                _ => (format!("{other} steps"), "have"),
            };
            let are = if other == 1 { "is" } else { "are" };
            notes.push(format!(
                "{steps} {have} another global batch than {batch} sequences and {are} left out"
            ));
        }
        notes
    }

    /// Why the step times may not be those of the plan's steps, one sentence for each reason.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.steady.first_alone {
            let first = "the log's first step is all there is: it holds start-up and compilation, and takes longer than those after it";
            warnings.push(first.to_owned());
        }
        if self.log.of_others > 0 {
            warnings.push(format!(
                "{} of {} steps are written as another system writes them than {}: is it the log of one run?",
                self.log.of_others,
                self.log.steps.len(),
                system(self.log.system)
            ));
        }
        warnings.extend(self.another_run());
        warnings.extend(self.beyond_peak());
        warnings
    }

    /// A warning if steps are shorter than the GPUs' peak rate allows.
    fn beyond_peak(&self) -> Option<String> {
        let least = diagnose::at_peak(&self.prediction);
        let median = Seconds(self.steady.median());
        let beyond = diagnose::beyond_peak(&self.prediction, &self.steady);
        (self.is_comparable() && beyond).then(|| {
            format!(
                "a step takes {median}, and at the peak rate of the GPUs a step of the plan takes {least}: are they steps of this training?"
            )
        })
    }

    /// Describes the measured step time: of how many steps it is the median, or the mean.
    #[must_use]
    pub fn time_in_words(&self) -> String {
        match (self.log.mean_of, self.steady.seconds.len()) {
            (Some(steps), _) => format!("mean of {steps} steps"),
            (None, 1) => "median of 1 step".to_owned(),
            (None, steps) => format!("median of {steps} steps"),
        }
    }

    /// A warning if another run in the log has another step time.
    fn another_run(&self) -> Option<String> {
        let own = self.steady.median();
        let others = self.log.other_medians(step_size(&self.plan)).into_iter();
        let differs = |other: &f64| (other / own - 1.0).abs() > SAME_TIME;
        let other = Seconds(others.rev().find(differs)?);
        Some(format!(
            "the log holds several runs: a step takes {} in the one that counts and {other} in another; give the log of one run",
            Seconds(own)
        ))
    }
}

/// The name of a system that writes logs.
#[must_use]
pub fn system(system: LogSystem) -> &'static str {
    match system {
        LogSystem::Megatron => "megatron-lm",
        LogSystem::Torchtitan => "torchtitan",
        LogSystem::Nanotron => "nanotron",
        LogSystem::DeepSpeed => "deepspeed",
        LogSystem::NeMo => "nemo",
        LogSystem::MaxText => "maxtext",
        LogSystem::Trainer => "transformers",
        LogSystem::Own => "vescale-plan",
        LogSystem::Research => "research code",
        LogSystem::Metrics => "exported metrics",
    }
}
