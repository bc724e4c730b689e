//! What a step loses where a system waits between passes: its host for the GPU, or its GPU for messages.

use catalog::runtime::Rewrite;
use catalog::{Precision, Workload};
use costmodel::{CostModel, Scenario};

/// A job, and the wait that it is predicted with and without.
struct Job {
    runtime: &'static str,
    wait: Rewrite,
    model: &'static str,
    cluster: &'static str,
    gpus: u64,
    /// Sequences of 1,024 tokens in a step.
    batch: u64,
    plan: &'static str,
}

impl Job {
    /// Time of a step with the wait, over that of a step without it.
    fn longer(&self) -> f64 {
        let [with, without] = [true, false].map(|waits| {
            let mut s = Scenario {
                model: catalog::load::model(self.model).expect("preset"),
                cluster: catalog::load::cluster(self.cluster).expect("preset"),
                runtime: catalog::load::runtime(self.runtime).expect("preset"),
                workload: Workload::new(catalog::WorkloadSizes {
                    gpus: self.gpus,
                    seq_len: 1024,
                    global_batch: self.batch,
                    precision: Precision::Bf16,
                })
                .expect("a workload"),
                headroom: 0.0,
            };
            if !waits {
                assert!(s.runtime.rewrites.remove(&self.wait), "{}", self.runtime);
            }
            let plan = plans::grammar::parse(self.plan, &s.model, &s.workload, &s.runtime);
            let costs = CostModel::new(s).expect("priced");
            let plan = plan.expect(self.plan);
            costs.predict(&plan).expect("priced").step_time.0
        });
        with / without
    }
}

/// A host that waits issues no kernels of a pass while the GPU runs the head of the pass before. That shows where it issues layers
/// more slowly than the GPU runs them, and the head's kernels last longer than it takes to issue them.
#[test]
fn the_host_waits_for_the_gpu() {
    use Rewrite::{WaitAfterMicroBatches, WaitAfterPasses, WaitAfterTransfers};
    // A head of 151,936 tokens for layers of few.
    let small = |runtime, wait, gpus, plan| Job {
        runtime,
        wait,
        model: "qwen2.5-0.5b",
        cluster: "dgx-h100",
        gpus,
        batch: 64,
        plan,
    };
    for (job, shows) in [
        (small("megatron-2022", WaitAfterPasses, 1, "mbs8"), true),
        (small("internevo", WaitAfterPasses, 1, "mbs8"), true),
        (small("hf-trainer", WaitAfterMicroBatches, 1, "mbs8"), true),
        (
            small("deepspeed", WaitAfterMicroBatches, 2, "dp2 zero1 mbs8"),
            true,
        ),
        (
            small("megatron-core", WaitAfterTransfers, 2, "pp2 mbs8"),
            true,
        ),
        (small("nanotron", WaitAfterTransfers, 2, "pp2 mbs8"), true),
        // The host is slower throughout, and casts of weights run while the GPU waits for it.
        (small("hf-trainer", WaitAfterMicroBatches, 1, "mbs1"), false),
        // The GPU is slower throughout.
        (small("megatron-2022", WaitAfterPasses, 1, "mbs64"), false),
        (
            small("hf-trainer", WaitAfterMicroBatches, 1, "mbs64"),
            false,
        ),
        // Without a pipeline no message is waited for.
        (small("megatron-core", WaitAfterTransfers, 1, "mbs8"), false),
    ] {
        let longer = job.longer();
        let (runtime, plan) = (job.runtime, job.plan);
        assert_eq!(longer > 1.01, shows, "{runtime} {plan}: {longer}");
        assert!((0.999..1.2).contains(&longer), "{runtime} {plan}: {longer}");
    }
}

/// DeepSpeed begins a micro-batch when the gradients of the one before are reduced. Without that, reductions that take longer than
/// backward would run beside the next forward passes too.
#[test]
fn a_micro_batch_waits_for_the_reductions_of_the_one_before() {
    let job = |batch, plan| Job {
        runtime: "deepspeed",
        wait: Rewrite::WaitForReductions,
        model: "llama3-8b",
        cluster: "gcp-a3-high",
        gpus: 64,
        batch,
        plan,
    };
    assert!(job(512, "dp64 zero2 mbs1").longer() > 1.05);
    // The optimizer waits for the last micro-batch's gradients anyway, and ZeRO-1 reduces no others.
    for job in [job(64, "dp64 zero2 mbs1"), job(512, "dp64 zero1 mbs1")] {
        assert_eq!(job.longer(), 1.0, "{} {}", job.batch, job.plan);
    }
}
