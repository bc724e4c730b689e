//! A training job: a plan with everything needed to run it.

use catalog::hybrid::Recurrence;
use catalog::model::Position;
use catalog::{DType, Model, ModelConfig, Precision, ScheduleKind, Workload};
use plans::program::{self, Program};
use plans::schedule::{self, Schedule};
use plans::{Recompute, Strategy};

use crate::data::Dataset;
use crate::error::ExecutorError;
use crate::settings::Settings;

/// A training job.
#[derive(Clone, Debug)]
pub struct Job {
    /// The model to train.
    pub model: Model,
    /// How it is sharded.
    pub strategy: Strategy,
    /// Tokens per sequence.
    pub seq_len: u64,
    /// Sequences per step.
    pub global_batch: u64,
    /// Precision of activations and of the weights that kernels read.
    pub precision: Precision,
    /// The training data.
    pub data: Dataset,
    /// Seed, optimizer, numerics and other settings.
    pub settings: Settings,
    /// Stop after this many steps in total, before `settings.steps` (to continue elsewhere).
    pub stop_after: Option<u64>,
    /// The pipeline schedule.
    pub schedule: Schedule,
    /// The actions of every rank in a step.
    pub program: Program,
}

impl Job {
    /// Makes a job from a plan.
    ///
    /// # Errors
    /// When the executor cannot run the model, or the schedule does not exist.
    pub fn new(
        model: Model,
        strategy: Strategy,
        workload: &Workload,
        data: Dataset,
        settings: Settings,
    ) -> Result<Self, ExecutorError> {
        check(&model, &strategy)?;
        check_positions(&model, workload.seq_len)?;
        // A single stage runs its micro-batches in order whatever the schedule.
        let kind = if strategy.pp == 1 {
            ScheduleKind::OneFOneB
        } else {
            strategy.schedule
        };
        let schedule =
            schedule::build(kind, strategy.pp, strategy.vpp, strategy.num_micro_batches)?;
        let program = program::lower(&schedule, strategy.zero, strategy.reshard_after_forward);
        Ok(Self {
            model,
            seq_len: workload.seq_len,
            global_batch: workload.global_batch,
            precision: workload.precision,
            strategy,
            data,
            settings,
            stop_after: None,
            schedule,
            program,
        })
    }

    /// Number of steps, counted from the beginning of training, after which this job stops.
    #[must_use]
    pub fn last_step(&self) -> u64 {
        self.stop_after.unwrap_or(self.settings.steps)
    }

    /// Type of activations and of the weights that kernels read.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.precision.activation()
    }
}

/// Rejects what the executor cannot run, before any rank starts.
fn check(model: &ModelConfig, strategy: &Strategy) -> Result<(), ExecutorError> {
    let reason = if matches!(strategy.recompute, Recompute::SelectiveOps) {
        Some(
            "recompute=selective_ops is torchtitan's; use none, selective, full, layers:N or falling:N",
        )
    } else if matches!(strategy.recompute, Recompute::Modules(_)) {
        Some("recompute=selective: with parts; use none, selective, full, layers:N or falling:N")
    } else if strategy.optimizer_states.is_some() {
        Some("optim_states: master weights and moments are held in fp32")
    } else if strategy.offload.is_some() || strategy.offload_layers > 0 {
        Some("offload: every rank keeps states and activations on the device that it computes on")
    } else if strategy.prefetch.is_some() {
        Some("prefetch: a rank gathers the parameters of a whole stage at a time, one pass ahead")
    } else if strategy.ep > 1 && (strategy.overlap.expert_parallel || strategy.dispatcher.is_some())
    {
        Some(
            "overlap=ep, and dispatchers: tokens go to their experts by all-to-all, one exchange after the other",
        )
    } else if strategy.gradients.is_some() {
        Some("grad_dtype: gradients are added up and reduced in fp32")
    } else if model.constants.rope_scaling == catalog::RopeScaling::Other {
        Some("its rope_type is none of default, linear, llama3 and yarn")
    } else if let Some(hybrid) = &model.hybrid {
        Some(match hybrid.recurrence {
            Recurrence::StateSpace(_) => {
                "state-space scans (Mamba-2 layers), which are planned and predicted, not trained here"
            }
            Recurrence::GatedDelta(_) => {
                "gated delta rules, which are planned and predicted, not trained here"
            }
        })
    } else if model.adapters.is_some() {
        Some("adapters beside frozen weights (LoRA) are planned and predicted, not trained here")
    } else if model.mtp_layers > 0 {
        Some("prediction modules; set num_nextn_predict_layers to 0 to train without them")
    } else {
        None
    };
    match reason {
        Some(reason) => Err(ExecutorError::Model {
            model: model.name.clone(),
            reason: reason.to_owned(),
        }),
        None => Ok(()),
    }
}

/// Rejects sequences longer than a learned table of positions.
fn check_positions(model: &ModelConfig, seq_len: u64) -> Result<(), ExecutorError> {
    let Position::Learned { rows } = model.position else {
        return Ok(());
    };
    // OPT's table has more rows than there are positions.
    let positions = rows.min(model.max_position);
    if seq_len <= positions {
        return Ok(());
    }
    Err(ExecutorError::Positions {
        model: model.name.clone(),
        positions,
        seq_len,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_no_longer_than_a_learned_table() {
        for (name, longest) in [("gpt2", 1024), ("opt-13b", 2048)] {
            let model = catalog::load::model(name).expect("preset");
            assert_eq!(check_positions(&model, longest), Ok(()), "{name}");
            let refused = check_positions(&model, longest + 1).expect_err(name);
            let numbers = [longest.to_string(), (longest + 1).to_string()];
            let said = refused.to_string();
            assert!(numbers.iter().all(|number| said.contains(number)), "{said}");
            assert!(!refused.is_failure() && refused.is_of_plan());
        }
        let rotary = catalog::load::model("llama3-8b").expect("preset");
        assert_eq!(check_positions(&rotary, 1 << 20), Ok(()));
    }

    #[test]
    fn recurrent_layers_are_refused_by_the_operators_name() {
        let runtime = catalog::load::runtime("vescale").expect("preset");
        let workload = Workload::new(catalog::WorkloadSizes {
            gpus: 1,
            seq_len: 64,
            global_batch: 1,
            precision: Precision::Fp32,
        })
        .expect("a workload");
        for (name, operator) in [
            ("nemotron-h-8b", "state-space scan"),
            ("qwen3-next-80b-a3b", "gated delta rule"),
        ] {
            let model = catalog::load::model(name).expect("preset");
            let strategy = plans::grammar::parse("tp=1", &model, &workload, &runtime);
            let refused = check(&model, &strategy.expect("legal")).expect_err(name);
            assert!(refused.to_string().contains(operator), "{refused}");
        }
    }
}
