//! The cuda device where there is none: one clear line, and an exit code that says so.

use std::path::Path;
use std::process::Command;

use dtensor::Trace;
use models::{BlockClass, BlockLayout};
use spec::DType;
use spec::profile::{self, Kernel, Measured, Profile};

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
        if dtensor::cuda::devices().is_ok() {
            eprintln!("not tested: this machine has a CUDA device");
            return;
        }
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(output.stdout.is_empty());
        assert_eq!(said.lines().count(), 1, "{said}");
        let named = ["libcuda.so.1", "shows no device", "the CUDA driver"];
        assert!(named.iter().any(|part| said.contains(part)), "{said}");
    }
}

#[test]
fn what_the_device_cannot_do_is_refused() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    for (args, says) in [
        (&["--gpus", "1"][..], "expected --device cuda"),
        (&["--gpus", "2", "--device", "cuda"], "the plan has 1 ranks"),
        (&["--tf32"], "expected --device cuda"),
        (
            &["--numerics", "exact", "--device", "cuda"],
            "--numerics exact",
        ),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_vescale-plan"))
            .args(["run", "nanogpt-single.yaml"])
            .args(args)
            .current_dir(&examples)
            .output()
            .expect("the binary starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(says), "{said}");
    }
}

const MODEL: &str = r#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5}"#;

/// A GPU's profile in which every operator takes a millisecond, the optimizer ten, and a copy two.
#[test]
fn steps_are_priced_from_a_profile_of_a_gpu() {
    let model = spec::hf::decode(MODEL, "config.json", "llama").expect("a model");
    let layout = BlockLayout::alone(2, 32, DType::Bf16);
    let layer = BlockClass::Layer(model.layer_class(0));
    let trace = |class| models::trace_block(&model, class, &layout).expect("a block");
    let of = |trace: &Trace| (trace.forward.len() + trace.backward.len()) as f64;
    let [embedding, layers, head] = [BlockClass::Embedding, layer, BlockClass::Head].map(trace);
    let entry = |kernel: Kernel, seconds: f64| Measured {
        kernel: kernel.name,
        sizes: kernel.sizes,
        ranks: 1,
        seconds,
        spread: 0.0,
    };
    let mut measured: Vec<Measured> = Vec::new();
    for trace in [&embedding, &layers, &head] {
        let ops = trace.forward.iter().chain(&trace.backward);
        measured.extend(ops.map(|op| entry(trace.kernel(op, |_| 1), 1e-3)));
    }
    let held = |trace: &Trace| -> u64 {
        let parameters = trace.parameters.iter();
        parameters.map(|p| trace.tensor(p.tensor).elements()).sum()
    };
    let elements = held(&embedding) + 3 * held(&layers) + held(&head);
    for (name, seconds) in [("gradient norm", 1e-2), ("adamw", 1e-2), ("copy", 2e-3)] {
        measured.push(entry(Kernel::new(name, [elements]), seconds));
    }
    let profile = Profile {
        schema_version: profile::SCHEMA_VERSION,
        tool_version: "test".to_owned(),
        machine: profile::Machine {
            processor: "a GPU".to_owned(),
            cores: 1,
            memory_bytes: 80 << 30,
            gpu: None,
        },
        measured,
    };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("writable");
    };
    write("config.json", MODEL);
    write("gpu.yaml", &profile.to_yaml());
    let output = Command::new(env!("CARGO_BIN_EXE_vescale-plan"))
        .args(
            "estimate --model config.json --cluster gpu.yaml --runtime vescale-cuda --gpus 1"
                .split(' '),
        )
        .args(
            "--seq 32 --global-batch 8 --precision bf16 --strategy mbs=2,zero=0 --json".split(' '),
        )
        .current_dir(folder.path())
        .output()
        .expect("the binary starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one document");
    let predicted = json["predicted"]["step_time_s"].as_f64().expect("a time");
    let passes = 1e-3 * (of(&embedding) + 3.0 * of(&layers) + of(&head));
    // Gradients are cleared at half a copy; weights are rounded at one.
    let wanted = 4.0 * passes + 2e-2 + 1.5 * 2e-3;
    assert!(
        (predicted / wanted - 1.0).abs() < 1e-6,
        "{predicted} {wanted}"
    );
}
