//! Logits, loss and gradients of small models equal PyTorch's (tests/pytorch/oracle.py, 64 bits) to 1e-5.

use std::sync::Mutex;

use dtensor::cpu::{CpuError, Numerics, Seen, Watch};
use dtensor::{OpKind, Pass};
use executor::checkpoint::{Memory, Piece};
use executor::{AdamW, Dataset, Execution, Job, Session, Settings};
use serde_json::Value;
use spec::{Precision, Workload};

use super::jobs::session;

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

/// Keeps what the head writes.
#[derive(Default)]
struct Logits(Mutex<Vec<f32>>);

impl Watch for Logits {
    fn ran(&self, seen: &Seen<'_>) -> Result<(), CpuError> {
        let is_matmul = matches!(seen.op.kind, OpKind::Matmul { .. });
        if is_matmul && seen.op.pass == Pass::Forward {
            for (info, tensor) in seen.tensors(&seen.op.outputs) {
                if seen.block().layer.is_none() && info.global.last() == Some(&128) {
                    *self.0.lock().expect("one rank") = tensor.f32().into_owned();
                }
            }
        }
        Ok(())
    }
}

/// Entries `[place, value]` within 1e-5 of the largest.
fn compare(what: &str, theirs: &Value, ours: impl Fn(usize) -> f64) {
    let largest = theirs["largest"].as_f64().expect("a number");
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

fn check(model: &str, config: &str) {
    let text = include_str!("../../fixtures/pytorch.json");
    let expected: Value = serde_json::from_str(text).expect("a fixture");
    let expected = &expected[model];
    let config = spec::hf::decode(config, "config.json", model).expect("a valid config");
    let workload = Workload {
        gpus: 1,
        seq_len: SEQ,
        global_batch: 1,
        precision: Precision::Fp32,
    };
    let runtime = spec::load::runtime("vescale").expect("a preset");
    let strategy = plans::grammar::parse("mbs=1", &config, &workload, &runtime).expect("legal");
    for numerics in [Numerics::Exact, Numerics::Fast] {
        let settings = Settings {
            seed: 1,
            steps: 1,
            numerics,
            execution: Execution::Replayed,
            dropout_by_rank: false,
            gradient_bucket: Settings::GRADIENT_BUCKET,
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
        assert!((outcome.losses[0] - loss).abs() < 1e-5 * loss);
        let logits = logits.0.into_inner().expect("one rank");
        assert_eq!(logits.len() as u64, SEQ * 128);
        compare("logits", &expected["logits"], |at| f64::from(logits[at]));
        let gradients = outcome.states.moments();
        let theirs = expected["gradients"].as_object().expect("by name");
        assert_eq!(gradients.len(), theirs.len());
        for (name, theirs) in theirs {
            compare(name, theirs, |at| f64::from(gradients[name][at]) / beta);
        }
    }
}

#[test]
fn gpt_equals_pytorch() {
    check(
        "gpt",
        r#"{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
            "vocab_size": 128, "activation_function": "gelu_new"}"#,
    );
}

#[test]
fn llama_equals_pytorch() {
    check(
        "llama",
        r#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 128,
            "vocab_size": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}"#,
    );
}

/// Llama 3.1's frequencies, in the older form of the file.
#[test]
fn rescaled_llama_equals_transformers() {
    check(
        "llama31",
        r#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 128,
            "vocab_size": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling":
            {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 16}}"#,
    );
}

/// Norms of queries and keys, wide heads, and YaRN's frequencies in the newer form of the file.
#[test]
fn qwen3_equals_transformers() {
    check(
        "qwen3",
        r#"{"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16,
            "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 128,
            "vocab_size": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "rope_parameters":
            {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
             "original_max_position_embeddings": 16}}"#,
    );
}
