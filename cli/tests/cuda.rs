//! The cuda device on a machine without GPUs: one clear line, and an exit code of its own.

use std::path::Path;
use std::process::Command;

use catalog::DType;
use catalog::profile::{self, Kernel, Measured, Profile};
use dtensor::{AnyOp, CostClass, Epilogues, Trace};
use models::{BlockClass, BlockLayout};

#[test]
fn without_a_gpu_one_line_says_what_is_missing() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    for args in [
        &["profile", "--device", "cuda"][..],
        &["run", "nanogpt-single.yaml", "--device", "cuda"],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_vescale-plan"))
            .args(args)
            .current_dir(&examples)
            .output()
            .expect("the binary starts");
        let said = String::from_utf8_lossy(&output.stderr);
        if cuda_device::devices().is_ok() {
            eprintln!("not tested: this machine has a CUDA device");
            return;
        }
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(output.stdout.is_empty());
        assert!(
            said.lines().skip(1).all(|line| line.starts_with("  ")),
            "{said}"
        );
        let named = ["libcuda.so.1", "shows no device", "the CUDA driver"];
        assert!(named.iter().any(|part| said.contains(part)), "{said}");
    }
}

#[test]
fn what_the_device_cannot_do_is_refused() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    let run = ["run", "nanogpt-single.yaml"];
    let wants_cuda = "expected  --device cuda with it";
    for (command, args, says) in [
        (&run[..], &["--gpus", "1"][..], wants_cuda),
        (&run, &["--gpu-messages", "host"], wants_cuda),
        (&run, &["--attention", "own"], wants_cuda),
        (
            &run,
            &["--gpus", "2", "--device", "cuda"],
            "expected  1, the plan's ranks",
        ),
        (&run, &["--tf32"], wants_cuda),
        (
            &run,
            &["--numerics", "exact", "--device", "cuda"],
            "--numerics exact",
        ),
        (&["profile"], &["--gpus", "1"], wants_cuda),
        (&["profile"], &["--attention", "own"], wants_cuda),
        (&["profile"], &["--all-hosts"], wants_cuda),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_vescale-plan"))
            .args(command)
            .args(args)
            .current_dir(&examples)
            .output()
            .expect("the binary starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(says), "{said}");
    }
}

/// A model whose products include GELUs on a GPU.
const MODEL: &str = r#"{"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4,
    "n_positions": 64, "vocab_size": 128, "tie_word_embeddings": false}"#;

fn entry(kernel: Kernel, seconds: f64) -> Measured {
    Measured {
        kernel: kernel.name,
        sizes: kernel.sizes,
        ranks: 1,
        seconds,
        spread: 0.0,
    }
}

/// Traces of the blocks that one rank runs under a layout: embedding, three layers, head.
struct Blocks(Vec<Trace>);

impl Blocks {
    fn new(layout: &BlockLayout) -> Self {
        let model = catalog::hf::decode(MODEL, "config.json", "gpt").expect("a model");
        let layer = BlockClass::Layer(model.layer_class(0));
        let classes = [BlockClass::Embedding, layer, layer, layer, BlockClass::Head];
        let trace = |class| models::trace_block(&model, class, layout).expect("a block");
        Self(classes.map(trace).into())
    }

    fn ops(&self) -> impl Iterator<Item = (&Trace, AnyOp<'_>)> {
        let ops = |trace| Trace::ops(trace).map(move |op| (trace, op));
        self.0.iter().flat_map(ops)
    }

    fn exchanges(&self) -> usize {
        let collective = |op: AnyOp<'_>| matches!(op.cost(), CostClass::Collective(_));
        self.ops().filter(|(_, op)| collective(*op)).count()
    }

    fn elements(&self) -> u64 {
        let parameters = self.0.iter().flat_map(|trace| &trace.parameters);
        parameters.map(|p| p.local_elements).sum()
    }

    /// Measurements in which every operator takes a millisecond, the optimizer ten, and a copy two.
    fn measured(&self, gpus: Option<u64>) -> Vec<Measured> {
        let kernel = |trace: &Trace, op: AnyOp<'_>| match gpus {
            Some(gpus) => trace.kernel_on_gpu(op, &Epilogues::of(trace), |_| gpus),
            None => trace.kernel(op, |_| 1),
        };
        let ops = self.ops();
        let mut measured: Vec<Measured> = ops
            .map(|(trace, op)| entry(kernel(trace, op), 1e-3))
            .collect();
        for (name, seconds) in [("gradient norm", 1e-2), ("adamw", 1e-2), ("copy", 2e-3)] {
            measured.push(entry(Kernel::new(name, [self.elements()]), seconds));
        }
        measured
    }
}

fn gpu_profile(gpus: Option<u64>, measured: Vec<Measured>) -> Profile {
    Profile {
        schema_version: profile::SCHEMA_VERSION,
        tool_version: "test".to_owned(),
        machine: profile::Machine {
            processor: "a GPU".to_owned(),
            cores: 1,
            memory_bytes: 80 << 30,
            gpu: gpus.map(|count| profile::Gpu {
                count,
                multiprocessors: 132,
                ..profile::Gpu::default()
            }),
        },
        measured,
    }
}

/// Runs `estimate` for our executor with a profile.
fn estimated(profile: &Profile, gpus: u64, strategy: &str) -> std::process::Output {
    let of = "--cluster gpu.yaml --runtime vescale-cuda";
    estimated_for(profile, of, gpus, strategy)
}

/// A cluster file that extends a preset by a profile.
const EXTENDED: &str = "schema_version: 1\nname: ours\nextends: dgx-h100\nprofile: gpu.yaml\n";

/// Runs `estimate` for a cluster and a runtime, beside a profile `gpu.yaml` and the cluster file
/// `ours.yaml`.
fn estimated_for(profile: &Profile, of: &str, gpus: u64, strategy: &str) -> std::process::Output {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("writable");
    };
    write("config.json", MODEL);
    write("gpu.yaml", &profile.to_yaml());
    write("ours.yaml", EXTENDED);
    Command::new(env!("CARGO_BIN_EXE_vescale-plan"))
        .args("estimate --model config.json".split(' '))
        .args(of.split(' '))
        .args("--seq 32 --global-batch 8 --precision bf16 --json".split(' '))
        .args(["--gpus", &gpus.to_string(), "--strategy", strategy])
        .current_dir(folder.path())
        .output()
        .expect("the binary starts")
}

fn step_time(output: &std::process::Output) -> f64 {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one document");
    json["predicted"]["step_time_s"].as_f64().expect("a time")
}

#[test]
fn steps_are_priced_from_a_profile_of_a_gpu() {
    let blocks = Blocks::new(&BlockLayout::alone(2, 32, DType::Bf16));
    let passes = 1e-3 * blocks.ops().count() as f64;
    // Clearing gradients takes half as long as a copy, rounding weights as long.
    let wanted = 4.0 * passes + 2e-2 + 1.5 * 2e-3;
    // A profile of a GPU, and one of a machine without.
    for gpus in [Some(1), None] {
        let profile = gpu_profile(gpus, blocks.measured(gpus));
        let predicted = step_time(&estimated(&profile, 1, "mbs=2,zero=0"));
        assert!(
            (predicted / wanted - 1.0).abs() < 1e-6,
            "{predicted} {wanted}"
        );
    }
}

/// Two GPUs, between which every message takes half a millisecond.
#[test]
fn messages_between_gpus_are_priced_as_they_were_measured() {
    let layout = BlockLayout {
        tp: 2,
        ..BlockLayout::alone(2, 32, DType::Bf16)
    };
    let blocks = Blocks::new(&layout);
    let whole = gpu_profile(Some(2), blocks.measured(Some(2)));
    let mut measured = whole.clone();
    let message = |name: &str, bytes: u64| entry(Kernel::new(name, [2, bytes]), 5e-4);
    measured.add([1, 1 << 30].map(|bytes| message("nccl all-reduce", bytes)));
    let strategy = "tp=2,sp=off,mbs=2,zero=0";
    let predicted = step_time(&estimated(&measured, 2, strategy));
    let passes = 1e-3 * blocks.ops().count() as f64 + 5e-4 * blocks.exchanges() as f64;
    // Two messages for the gradient norm: one sums it, one sends the sum.
    let wanted = 4.0 * passes + 2e-2 + 1.5 * 2e-3 + 2.0 * 5e-4;
    assert!(blocks.exchanges() > 10);
    assert!(
        (predicted / wanted - 1.0).abs() < 1e-6,
        "{predicted} {wanted}"
    );

    for (profile, gpus, strategy, says) in [
        (&whole, 2, strategy, "`nccl all-reduce` between 2 GPUs"),
        (&whole, 2, strategy, "--device cuda --gpus 2"),
        (
            &measured,
            2,
            "dp=2,mbs=2,zero=1",
            "`nccl all-gather` between 2 GPUs",
        ),
        (
            &measured,
            4,
            "tp=4,sp=off,mbs=2,zero=0",
            "--device cuda --gpus 4",
        ),
    ] {
        let output = estimated(profile, gpus, strategy);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && said.contains(says),
            "{strategy}: {said}"
        );
    }
}

/// Data parallelism over two GPUs: gradients are reduced beside backward, so the step is no shorter than its compute,
/// and no longer than both after each other.
#[test]
fn gradients_are_reduced_beside_compute() {
    let blocks = Blocks::new(&BlockLayout::alone(2, 32, DType::Bf16));
    let mut profile = gpu_profile(Some(2), blocks.measured(Some(1)));
    let message = |bytes: u64| entry(Kernel::new("nccl all-reduce", [2, bytes]), 5e-2);
    profile.add([1, 1 << 30].map(message));
    let predicted = step_time(&estimated(&profile, 2, "dp=2,mbs=2,zero=0"));
    let compute = 2.0 * 1e-3 * blocks.ops().count() as f64 + 2e-2 + 1.5 * 2e-3;
    assert!(predicted > compute, "{predicted} {compute}");
    assert!(
        predicted < 1.15 * compute + 3.0 * 5e-2,
        "{predicted} {compute}"
    );
}

/// A profile of one host prices a cluster of many, under another runtime.
#[test]
fn a_profile_of_a_host_prices_a_cluster_of_them() {
    let slow = [
        entry(Kernel::new("copy", [1u64 << 28]), 1e3),
        entry(Kernel::new("nccl all-reduce", [8u64, 1 << 20]), 1e-1),
    ];
    let profile = gpu_profile(Some(8), slow.into());
    let estimated = |of: &str| estimated_for(&profile, of, 16, "tp=2,dp=8,mbs=1,zero=1");
    let preset = estimated("--cluster dgx-h100");
    let ours = estimated("--cluster ours.yaml");
    assert!(step_time(&ours) > 2.0 * step_time(&preset));
    let json: serde_json::Value = serde_json::from_slice(&ours.stdout).expect("one document");
    assert_eq!(json["inputs"]["cluster"], "ours");
    assert_eq!(json["inputs"]["profile"], "a GPU, 8 GPUs");
    let text = json.to_string();
    for row in [
        "copies on the device",
        "1 measured between 8 GPUs",
        "profile of a GPU, 8 GPUs",
    ] {
        assert!(text.contains(row), "{row}");
    }

    let other = gpu_profile(None, Vec::new());
    let refused = estimated_for(&other, "--cluster ours.yaml", 16, "tp=2,dp=8,mbs=1");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success());
    assert!(
        said.contains("gpu.yaml was measured on the processor a GPU")
            && said.contains("ours.yaml, field `profile`"),
        "{said}"
    );
}
