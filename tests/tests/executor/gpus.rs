//! Training on GPUs through NVIDIA's libraries, all of them emulated: driver, compiler, matrix products and
//! NCCL, on streams that wait for each other only where they are told to.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use catalog::Precision;
use cpu_device::Numerics;
use cpu_device::{Seen, Watch, WatchError};
use cuda_device::Gpu;
use cuda_device::launcher::{AttentionBy, Compute, Launcher};
use dtensor::CausalAttention;
use executor::device::{Gpus, Messages};
use executor::{Execution, ExecutorError, Job, Outcome, Session};

use super::cuda::{close, job, models, on_cuda, wide};
use super::graphs;
use super::jobs::{changed, costs, session, sized, train};

/// Set in the process that has them.
const HERE: &str = "VESCALE_TEST_EMULATED_LIBRARIES";

/// Runs a test of this file again, in a process that has the libraries.
fn elsewhere(test: &str, variables: &[(&str, &str)]) {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let Some(environment) = vescale_tests::emulated::environment(target, 4) else {
        return;
    };
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", &format!("executor::gpus::{test}"), "--nocapture"])
        .env(HERE, "1")
        .envs(environment)
        .envs(variables.iter().copied())
        .output()
        .expect("starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}

fn is_elsewhere() -> bool {
    std::env::var_os(HERE).is_some()
}

fn on_gpus(job: &Job, messages: Messages) -> Result<Outcome, ExecutorError> {
    run(&session(job), messages)
}

fn run(session: &Session<'_>, messages: Messages) -> Result<Outcome, ExecutorError> {
    let gpus = Gpus {
        ordinal: None,
        compute: Compute::Whole,
        messages,
        attention: AttentionBy::Library,
        // Kernels are compiled meanwhile.
        timeout: Duration::from_secs(600),
    };
    executor::train_on(&gpus, session)
}

#[test]
fn trains_through_nccl_as_the_cpu_does() {
    if !is_elsewhere() {
        return elsewhere("trains_through_nccl_as_the_cpu_does", &[]);
    }
    let [gpt, llama, mixtral] = models();
    let cases = [
        (&gpt, "dp=2,zero=0,mbs=2"),
        (&gpt, "pp=2,zero=1,mbs=2"),
        (&llama, "mbs=2"),
        (&llama, "dp=2,zero=3,mbs=1"),
        (&llama, "dp_shard=2,dp_replicate=2,zero=2,mbs=1"),
        (&llama, "tp=2,sp=on,mbs=2"),
        (&llama, "cp=2,cp_kind=ring,mbs=2"),
        (&llama, "cp=2,cp_kind=all_to_all,mbs=2"),
        (&llama, "tp=2,sp=on,pp=2,mbs=1,schedule=zb-h1"),
        (&mixtral, "dp=2,ep=2,zero=1,mbs=2"),
        (&mixtral, "tp=2,sp=on,ep=1,etp=2,mbs=2"),
    ];
    for (model, layout) in cases {
        let on = |layout| job(model, layout, Numerics::Fast, Precision::Fp32);
        let want = train(&on("mbs=2"));
        let what = format!("{} {layout}", model.name);
        let got = on_gpus(&on(layout), Messages::Nccl).unwrap_or_else(|e| panic!("{what}: {e}"));
        close(&what, &got, &want, 1e-5);
    }
    let on = job(&llama, "dp=2,zero=2,mbs=2", Numerics::Fast, Precision::Bf16);
    let through = [Messages::Nccl, Messages::Host].map(|m| on_gpus(&on, m).expect("trains"));
    close("llama in bf16", &through[0], &through[1], 2e-3);
    let library = through[0].ranks[1].attention_library.clone();
    assert_eq!(library, Some(Ok("cuDNN 9.19.0".to_owned())));
    close("llama in bf16", &through[0], &on_cuda(&on), 2e-3);
    // Scale factors lie where cuBLASLt is told that they do.
    let eight = job(&llama, "mbs=4", Numerics::Fast, Precision::Fp8);
    let got = on_gpus(&eight, Messages::Nccl).expect("trains");
    close("llama in fp8", &got, &on_cuda(&eight), 2e-3);
}

/// What the emulated cuBLASLt makes of products that take a GELU, if it has none.
const GELUS: &str = "EMULATED_GELUS";

/// Products take GELUs, of what is not kept and then of what is; kernels do where there is no such product.
#[test]
fn captures_steps() {
    if !is_elsewhere() {
        elsewhere("captures_steps", &[]);
        return elsewhere("captures_steps", &[(GELUS, "refused")]);
    }
    let [gpt, ..] = models();
    let [replayed, captured] = [Execution::Replayed, Execution::Graph].map(|execution| {
        let layout = "mbs=2,recompute=full";
        let job = graphs::job(&gpt, layout, Precision::Bf16, execution);
        (on_gpus(&job, Messages::Nccl).expect("trains"), job)
    });
    assert_eq!(captured.0.losses, replayed.0.losses);
    assert_eq!(captured.0.weights_sha256(), replayed.0.weights_sha256());
    close("gpt in bf16", &replayed.0, &on_cuda(&replayed.1), 2e-3);
}

/// Messages are part of captured work. The host tells of losses and norms between its two parts.
#[test]
fn captures_steps_of_several_ranks() {
    if !is_elsewhere() {
        return elsewhere("captures_steps_of_several_ranks", &[]);
    }
    let [gpt, llama, mixtral] = models();
    let cases = [
        (&gpt, "dp=2,zero=0,mbs=1", Precision::Fp32),
        (&gpt, "pp=2,zero=1,mbs=1", Precision::Fp32),
        (&llama, "dp=2,zero=3,mbs=1", Precision::Bf16),
        (
            &llama,
            "dp_shard=2,dp_replicate=2,zero=2,mbs=1",
            Precision::Fp32,
        ),
        (
            &llama,
            "tp=2,sp=on,pp=2,mbs=1,schedule=zb-h1",
            Precision::Fp32,
        ),
        (
            &llama,
            "cp=2,cp_kind=ring,mbs=2,recompute=full",
            Precision::Fp32,
        ),
        (&mixtral, "dp=2,zero=1,mbs=2", Precision::Bf16),
    ];
    for (model, layout, precision) in cases {
        let what = format!("{} {layout}", model.name);
        let [replayed, captured] = [Execution::Replayed, Execution::Graph].map(|execution| {
            let job = graphs::job(model, layout, precision, execution);
            on_gpus(&job, Messages::Nccl).unwrap_or_else(|e| panic!("{what}: {e}"))
        });
        assert_eq!(captured.losses, replayed.losses, "{what}");
        assert_eq!(captured.gradient_norms, replayed.gradient_norms, "{what}");
        let [here, there] = [&captured, &replayed].map(Outcome::weights_sha256);
        assert_eq!(here, there, "{what}");
        let peaks = |outcome: &Outcome| -> Vec<_> {
            let memory = outcome.ranks.iter().map(|rank| rank.memory);
            memory.map(|memory| memory.map(|used| used.peak)).collect()
        };
        assert_eq!(peaks(&captured), peaks(&replayed), "{what}");
        // Of all steps but the first, the passes: not the update of the step before.
        let mut times = captured.ranks.iter().map(|rank| rank.captured_times.len());
        assert!(times.all(|count| count == 3), "{what}");
    }
}

/// Gathered parameters, sums of gradients and what stages send count too.
#[test]
fn peaks_of_several_ranks_are_predicted() {
    if !is_elsewhere() {
        return elsewhere("peaks_of_several_ranks_are_predicted", &[]);
    }
    let layouts = [
        ("dp=2,zero=0,mbs=1", Precision::Bf16),
        ("dp=2,zero=1,mbs=2", Precision::Fp32),
        ("dp=2,zero=2,mbs=2", Precision::Bf16),
        ("dp=2,zero=3,mbs=1,recompute=full", Precision::Bf16),
        ("dp_shard=2,dp_replicate=2,zero=3,mbs=1", Precision::Bf16),
        ("cp=2,cp_kind=ring,mbs=2,zero=0", Precision::Bf16),
        ("tp=2,sp=on,mbs=2", Precision::Bf16),
        ("pp=2,mbs=1", Precision::Bf16),
        ("pp=2,mbs=1,schedule=zb-h1", Precision::Fp32),
        ("pp=3,mbs=1,recompute=full", Precision::Bf16),
        ("tp=2,pp=2,mbs=1", Precision::Bf16),
        ("pp=2,vpp=2,mbs=1,schedule=interleaved", Precision::Bf16),
        (
            "dp=2,pp=2,vpp=2,mbs=1,zero=2,schedule=zb-v",
            Precision::Bf16,
        ),
    ];
    // Every expert gets every token: how many rows arrive is no matter of chance.
    let experts = r#", "num_local_experts": 2, "num_experts_per_tok": 2"#;
    let of_experts = [
        ("dp=2,ep=2,zero=0,mbs=1", Precision::Bf16),
        ("dp=4,ep=2,zero=2,mbs=1", Precision::Bf16),
        ("dp=4,ep=2,zero=3,mbs=1,recompute=full", Precision::Bf16),
    ];
    let split = [
        (
            "pp=2,cp=2,cp_kind=ring,mbs=4,schedule=zb-h1",
            Precision::Bf16,
        ),
        (
            "pp=2,cp=2,cp_kind=all_to_all,mbs=4,schedule=zb-h1",
            Precision::Bf16,
        ),
    ];
    let small = r#", "word_embed_proj_dim": 64, "ffn_dim": 96"#;
    let layouts = layouts.map(|case| (case, ("llama", "")));
    let split = split.map(|case| (case, ("opt", small)));
    let of_experts = of_experts.map(|case| (case, ("mixtral", experts)));
    let mut far = Vec::new();
    for ((layout, precision), (kind, more)) in layouts.into_iter().chain(of_experts).chain(split) {
        let layers = if layout.contains("vpp") { 4 } else { 3 };
        let model = changed(&wide(kind, more), |m| m.layers = layers);
        let mut job = sized(&model, layout, Numerics::Fast, precision, [1, 8, 32]);
        job.settings.steps = 1;
        let outcome = on_gpus(&job, Messages::Nccl).expect("trains");
        let held = costs(&job, "vescale-cuda").held(&job.strategy);
        for (pp, held) in (0u64..).zip(held.expect("traced")) {
            let peers = outcome.ranks.iter().filter(|rank| rank.pp == pp);
            let counted = peers
                .filter_map(|rank| rank.memory)
                .map(|memory| memory.peak);
            let counted = counted.max().expect("is counted");
            let error = held.peak.0 as f64 / counted as f64 - 1.0;
            if error.abs() > 0.02 {
                far.push(format!("{kind} {layout} stage {pp}: {error:+.4}"));
            }
        }
    }
    assert!(far.is_empty(), "{far:#?}");
}

/// The other waits for it on the device, inside captured work that its groups cannot end before.
#[test]
fn a_rank_that_fails_in_a_captured_step_ends_the_others() {
    const TEST: &str = "a_rank_that_fails_in_a_captured_step_ends_the_others";
    if !is_elsewhere() {
        return elsewhere(TEST, &[("EMULATED_NO_GRAPHS", "1")]);
    }
    let [_, llama, _] = models();
    for layout in ["dp=2,zero=3,mbs=1", "tp=2,sp=on,mbs=2"] {
        let job = graphs::job(&llama, layout, Precision::Fp32, Execution::Graph);
        let trained = on_gpus(&job, Messages::Nccl).map(|_| ());
        let error = trained
            .expect_err("rank 1 runs no captured work")
            .to_string();
        assert!(error.contains("cuGraphLaunch"), "{error}");
    }
}

/// A product that fails ends the run; no other kernel replaces it.
#[test]
fn a_product_that_fails_ends_the_run() {
    if !is_elsewhere() {
        return elsewhere("a_product_that_fails_ends_the_run", &[(GELUS, "fail")]);
    }
    let [gpt, ..] = models();
    let on = job(&gpt, "mbs=2", Numerics::Fast, Precision::Bf16);
    let trained = on_gpus(&on, Messages::Nccl).map(|_| ());
    let error = trained.expect_err("cuBLASLt fails").to_string();
    let said = "cublasLtMatmulAlgoGetHeuristic of cuBLASLt failed: internal error";
    assert!(error.contains(said), "{error}");
}

#[test]
fn what_keeps_cudnn_from_attention_is_said() {
    const RELEASE: &str = "EMULATED_CUDNN";
    if !is_elsewhere() {
        for release in ["9.19.0", "9.8.0", "9.16.0 1001"] {
            elsewhere(
                "what_keeps_cudnn_from_attention_is_said",
                &[(RELEASE, release)],
            );
        }
        return;
    }
    let release = std::env::var(RELEASE).expect("is set");
    let gpu = Gpu::new(0).expect("is emulated");
    assert_eq!(gpu.attention_library(), None, "nobody asked");
    let of = CausalAttention {
        batch: 1,
        length: 16,
        heads: [2, 2],
        dims: [8, 8],
        window: None,
    };
    let takes = gpu.attention_workspaces(&of).expect("works").is_some();
    let said = gpu.attention_library().expect("was asked");
    assert_eq!(takes, said.is_ok(), "{said:?}");
    let folder = std::env::var("VESCALE_CUDA_LIBRARIES").expect("is set");
    let expected = match release.as_str() {
        "9.19.0" => Ok("cuDNN 9.19.0".to_owned()),
        "9.8.0" => Err(format!(
            "cuDNN 9.8.0 at {folder}/libcudnn.so.9 is older than 9.16"
        )),
        _ => Err("cudnnCreate of cuDNN failed: not initialised (code 1001)".to_owned()),
    };
    assert_eq!(said, expected);
}

#[test]
fn an_old_nccl_is_refused() {
    if !is_elsewhere() {
        return elsewhere("an_old_nccl_is_refused", &[("EMULATED_NCCL", "22105")]);
    }
    let [gpt, ..] = models();
    let on = job(&gpt, "dp=2,mbs=2", Numerics::Fast, Precision::Fp32);
    let trained = on_gpus(&on, Messages::Nccl).map(|_| ());
    let error = trained.expect_err("it is too old").to_string();
    let said = "libnccl.so.2 is older than 2.22.0";
    assert!(
        error.contains("NCCL 2.21.5") && error.contains(said),
        "{error}"
    );
}

/// If one rank runs out of memory, it reports that, and the other rank ends instead of waiting.
#[test]
fn a_rank_that_fails_ends_the_others() {
    if !is_elsewhere() {
        // What is left beside cuBLASLt's workspace holds the states, not a step.
        let memory = ("EMULATED_MEMORY", "4294967296,34000000");
        return elsewhere("a_rank_that_fails_ends_the_others", &[memory]);
    }
    let [_, llama, _] = models();
    let on = job(&llama, "dp=2,zero=3,mbs=2", Numerics::Fast, Precision::Fp32);
    let trained = on_gpus(&on, Messages::Nccl).map(|_| ());
    let error = trained.expect_err("memory is full");
    assert!(error.to_string().contains("do not fit"), "{error}");
}

/// Stops rank 1 at the first operator of the second step.
struct StopsRankOne;

impl Watch for StopsRankOne {
    fn ran(&self, seen: &Seen<'_>) -> Result<(), WatchError> {
        match (seen.rank, seen.micro_batch.step) {
            (1, 1..) => Err(WatchError::Stopped {
                operator: seen.name(),
            }),
            _ => Ok(()),
        }
    }
}

/// All groups have met, and the other waits for it on the device, in NCCL.
#[test]
fn a_rank_that_stops_inside_a_step_ends_the_others() {
    if !is_elsewhere() {
        return elsewhere("a_rank_that_stops_inside_a_step_ends_the_others", &[]);
    }
    let [_, llama, _] = models();
    for layout in ["dp=2,zero=2,mbs=2", "tp=2,mbs=2"] {
        let on = job(&llama, layout, Numerics::Fast, Precision::Fp32);
        let stopped = Session {
            watch: Some(&StopsRankOne),
            ..session(&on)
        };
        let trained = run(&stopped, Messages::Nccl).map(|_| ());
        let error = trained.expect_err("one of them stops");
        assert!(error.to_string().contains("stopped at"), "{error}");
    }
}
