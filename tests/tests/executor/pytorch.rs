//! Logits, loss and gradients of small models equal PyTorch's (tests/pytorch/oracle.py, 64 bits) to 1e-5.

use std::sync::Mutex;

use catalog::{Model, Precision, Workload};
use cpu_device::Numerics;
use cpu_device::{Seen, Watch, WatchError};
use dtensor::train::StatesPlan;
use dtensor::{CostClass, Pass};
use executor::checkpoint::{Memory, Piece};
use executor::{AdamW, Dataset, Execution, Job, Session, Settings};
use serde_json::Value;

use super::jobs::{families, session};

const SEQ: u64 = 32;

fn tokens() -> Dataset {
    let stream = (0..=SEQ).map(|i| ((7 * i * i + 3 * i + i / 5) % 128) as u16);
    let bytes: Vec<u8> = stream.flat_map(u16::to_le_bytes).collect();
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("tokens.bin");
    std::fs::write(&path, bytes).expect("writable");
    Dataset::read(&path, 128, SEQ).expect("readable")
}

/// Weights by the script's formula.
fn fill(job: &Job) -> Memory {
    let empty = Job {
        stop_after: Some(0),
        ..job.clone()
    };
    let names = executor::train(&session(&empty)).expect("makes states");
    let mut memory = Memory::default();
    for (c, (name, (global, values))) in names.states.weights().into_iter().enumerate() {
        let norm = name.ends_with("weight") && (name.contains("ln_") || name.contains("norm"));
        let noise = |i: usize| 0.2 * (f64::from(mix(i as u32, c as u32)) / 4_294_967_296.0 - 0.5);
        let at = |i: usize| noise(i) + f64::from(u8::from(norm));
        let n = values.len();
        memory.add(vec![Piece {
            name,
            global,
            runs: vec![[0, n as u64]],
            data: [
                (0..n).map(|i| at(i) as f32).collect(),
                vec![0.0; n],
                vec![0.0; n],
            ],
        }]);
    }
    memory
}

fn mix(i: u32, c: u32) -> u32 {
    let h = i
        .wrapping_mul(2_654_435_761)
        .wrapping_add(c.wrapping_mul(97));
    let h = (h ^ h >> 15).wrapping_mul(2_246_822_519);
    h ^ h >> 13
}

/// Records the outputs of the head.
#[derive(Default)]
struct Logits(Mutex<Vec<f32>>);

impl Watch for Logits {
    fn ran(&self, seen: &Seen<'_>) -> Result<(), WatchError> {
        // The product, and what bounds it.
        let makes = matches!(
            seen.op.cost(),
            CostClass::Product(_) | CostClass::Activation { .. }
        );
        if makes && seen.op.pass == Pass::Forward {
            for (info, tensor) in seen.tensors(seen.op.outputs) {
                if seen.block.layer.is_none() && info.global.last() == Some(&128) {
                    *self.0.lock().expect("one rank") = tensor.f32().into_owned();
                }
            }
        }
        Ok(())
    }
}

/// Entries `[place, value]` within 1e-5 of the largest, or of `least` where that is more.
fn compare(what: &str, theirs: &Value, least: f64, ours: impl Fn(usize) -> f64) {
    let largest = theirs["largest"].as_f64().expect("a number").max(least);
    for entry in theirs["entries"].as_array().expect("a list") {
        let at = entry[0].as_u64().expect("a place") as usize;
        let want = entry[1].as_f64().expect("a number");
        let got = ours(at);
        assert!(
            (got - want).abs() <= 1e-5 * largest,
            "{what}[{at}]: {got} for {want}, largest {largest}"
        );
    }
}

fn check(model: &str, config: &Model) {
    let text = include_str!("../../fixtures/pytorch.json");
    let expected: Value = serde_json::from_str(text).expect("a fixture");
    let expected = &expected[model];
    assert!(
        expected.is_object(),
        "{model}: make tests/fixtures/pytorch.json again with tests/pytorch/oracle.py"
    );
    let workload = Workload::new(catalog::WorkloadSizes {
        gpus: 1,
        seq_len: SEQ,
        global_batch: 1,
        precision: Precision::Fp32,
    })
    .expect("a workload");
    let runtime = catalog::load::runtime("vescale").expect("a preset");
    let strategy = plans::grammar::parse("mbs=1", config, &workload, &runtime).expect("legal");
    for numerics in [Numerics::Exact, Numerics::Fast] {
        let settings = Settings {
            seed: 1,
            steps: 1,
            numerics,
            execution: Execution::Replayed,
            dropout_by_rank: false,
            gradient_bucket: StatesPlan::BUCKET,
            optimizer: AdamW {
                clip_norm: None,
                ..AdamW::default()
            },
            timeout: std::time::Duration::from_secs(60),
        };
        let beta = 1.0 - settings.optimizer.beta1;
        let job = Job::new(
            config.clone(),
            strategy.clone(),
            &workload,
            tokens(),
            settings,
        )
        .expect("a job");
        let start = fill(&job);
        let logits = Logits::default();
        let outcome = executor::train(&Session {
            start: Some((&start, 0)),
            watch: Some(&logits),
            ..session(&job)
        })
        .expect("trains");
        let loss = expected["loss"].as_f64().expect("a number");
        assert!(
            (outcome.losses[0] - loss).abs() < 1e-5 * loss,
            "{model}: {} for {loss}",
            outcome.losses[0]
        );
        let logits = logits.0.into_inner().expect("one rank");
        assert_eq!(logits.len() as u64, SEQ * 128);
        compare(&format!("{model} logits"), &expected["logits"], 0.0, |at| {
            f64::from(logits[at])
        });
        let gradients = outcome.states.moments();
        let theirs = expected["gradients"].as_object().expect("by name");
        // A bias of all keys changes no weight: its gradient is rounding, of which the largest says nothing.
        let largest = theirs
            .values()
            .map(|g| g["largest"].as_f64().expect("a number"));
        let least = 1e-3 * largest.fold(0.0, f64::max);
        let ours: Vec<&String> = gradients.keys().collect();
        let names: Vec<&String> = theirs.keys().collect();
        assert_eq!(ours, names, "{model}");
        for (name, theirs) in theirs {
            compare(&format!("{model} {name}"), theirs, least, |at| {
                f64::from(gradients[name][at]) / beta
            });
        }
    }
}

#[test]
fn gpt_and_llama_equal_pytorch() {
    let gpt = r#"{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "vocab_size": 128, "activation_function": "gelu_new"}"#;
    let llama = r#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 128,
        "vocab_size": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}"#;
    for (name, config) in [("gpt", gpt), ("llama", llama)] {
        let config = catalog::hf::decode(config, "config.json", name).expect("a valid config");
        check(name, &config);
    }
}

/// Every model of `tests/pytorch/models`: fused projections of every layout, linear biases, part of a head
/// rotated, parallel residuals, bounds of scores and logits, norms after blocks, windows, rescaled
/// frequencies in both forms of the file, gated shared experts.
#[test]
fn families_equal_transformers() {
    for (name, config) in families() {
        check(&name, &config);
    }
}
