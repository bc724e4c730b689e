//! Small training jobs.

use std::time::Duration;

use catalog::{Model, ModelConfig};
use catalog::{Precision, Workload};
use costmodel::{CostModel, Scenario};
use dtensor::train::StatesPlan;
use executor::{AdamW, Dataset, Execution, Job, Observer, Outcome, Session, Settings};

/// Sequences per step of every job.
pub const BATCH: u64 = 16;
/// Tokens per sequence.
pub const SEQ: u64 = 32;

/// A model with something changed.
pub fn changed(model: &Model, change: impl FnOnce(&mut ModelConfig)) -> Model {
    let mut config = (**model).clone();
    change(&mut config);
    Model::new(config, "a test").expect("a model")
}

/// nanoGPT: 4 layers, width 64, a character vocabulary padded to 128.
pub fn nanogpt(dropout: f64) -> Model {
    let text = format!(
        r#"{{"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64,
            "vocab_size": 128, "resid_pdrop": {dropout}, "attn_pdrop": {dropout}}}"#
    );
    catalog::hf::decode(&text, "config.json", "nanogpt").expect("a valid config")
}

/// A small Llama: grouped-query attention, rotary positions, SwiGLU.
pub fn llama() -> Model {
    let text = r#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 128,
        "vocab_size": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}"#;
    catalog::hf::decode(text, "config.json", "llama").expect("a valid config")
}

/// A small Mixtral: 8 experts, 2 per token.
pub fn mixtral() -> Model {
    let text = r#"{"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 64,
        "vocab_size": 128, "num_local_experts": 8, "num_experts_per_tok": 2}"#;
    catalog::hf::decode(text, "config.json", "mixtral").expect("a valid config")
}

/// A small Qwen3: norms of queries and keys, heads wider than their share, YaRN's frequencies.
pub fn qwen3() -> Model {
    let text = r#"{"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 4, "head_dim": 16,
        "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 128,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "rope_parameters": {"rope_type": "yarn",
        "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}}"#;
    catalog::hf::decode(text, "config.json", "qwen3").expect("a valid config")
}

/// The small models of every family in `tests/pytorch/models`, by name.
pub fn families() -> Vec<(String, Model)> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("pytorch/models");
    let mut models: Vec<_> = std::fs::read_dir(&folder)
        .expect("a folder")
        .map(|entry| {
            let path = entry.expect("an entry").path();
            let name = path.file_stem().and_then(|n| n.to_str()).expect("a name");
            let text = std::fs::read_to_string(&path).expect("readable");
            let model = catalog::hf::decode(&text, "config.json", name).expect("a valid config");
            (name.to_owned(), model)
        })
        .collect();
    models.sort_by(|a, b| a.0.cmp(&b.0));
    assert!(models.len() >= 15, "{} models", models.len());
    models
}

/// Layouts of [`families`], those that split no key head.
pub fn family_layouts(model: &Model) -> Vec<&'static str> {
    // Ranks that share out key heads, and a layout.
    const LAYOUTS: [(u64, &str); 7] = [
        (2, "tp=2,sp=on,pp=2,mbs=2"),
        (2, "tp=2,sp=off,cp=2,cp_kind=ring,mbs=2,recompute=selective"),
        (2, "tp=2,sp=on,cp=2,cp_kind=all_gather,mbs=2,recompute=full"),
        (4, "tp=2,cp=2,cp_kind=all_to_all,mbs=2"),
        (2, "cp=2,cp_kind=all_to_all,mbs=2"),
        (1, "cp=2,cp_kind=ring,mbs=2,recompute=full"),
        (1, "dp_shard=2,pp=2,zero=3,mbs=2,schedule=zb-h1"),
    ];
    let kv_heads = model.attention.kv_heads();
    // Experts under tensor parallelism need sequence parallelism.
    let fits = |(ranks, layout): &&(u64, &str)| {
        kv_heads.is_multiple_of(*ranks) && (model.moe.is_none() || !layout.contains("sp=off"))
    };
    let layouts = LAYOUTS.iter().filter(fits).map(|&(_, layout)| layout);
    let experts = model
        .moe
        .map(|_| "dp_shard=2,ep=2,tp=2,etp=1,sp=on,zero=2,mbs=2");
    layouts.chain(experts).collect()
}

/// Text that repeats with variations, so that there is something to learn.
fn text() -> Dataset {
    let line = |i: usize| {
        format!(
            "the {} and the {} went {} times round the {}.\n",
            ["cat", "dog", "fox", "owl"][i % 4],
            ["hen", "cow", "ram"][i % 3],
            i % 10,
            ["house", "tree", "well", "hill", "pond"][i % 5]
        )
    };
    let text: String = (0..400).map(line).collect();
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("text.txt");
    std::fs::write(&path, text).expect("writable");
    Dataset::read(&path, 128, SEQ).expect("readable")
}

/// A job of `strategy`.
pub fn job(
    model: &Model,
    strategy: &str,
    numerics: cpu_device::Numerics,
    precision: Precision,
    steps: u64,
) -> Job {
    sized(model, strategy, numerics, precision, [steps, BATCH, SEQ])
}

/// A training job under `strategy`. The numbers are those of steps, of sequences per step and of tokens per sequence.
pub fn sized(
    model: &Model,
    strategy: &str,
    numerics: cpu_device::Numerics,
    precision: Precision,
    [steps, global_batch, seq_len]: [u64; 3],
) -> Job {
    let gpus = world(strategy);
    let workload = Workload::new(catalog::WorkloadSizes {
        gpus,
        seq_len,
        global_batch,
        precision,
    })
    .expect("a workload");
    let runtime = catalog::load::runtime("vescale").expect("a preset");
    let strategy = plans::grammar::parse(strategy, model, &workload, &runtime)
        .unwrap_or_else(|e| panic!("{strategy}: {e}"));
    let settings = Settings {
        seed: 1234,
        steps,
        numerics,
        execution: Execution::Replayed,
        dropout_by_rank: false,
        gradient_bucket: StatesPlan::BUCKET,
        optimizer: AdamW {
            learning_rate: 3e-3,
            ..AdamW::default()
        },
        timeout: Duration::from_secs(60),
    };
    Job::new(model.clone(), strategy, &workload, text(), settings).expect("a job")
}

/// Ranks of a strategy: the product of its dense axes.
fn world(strategy: &str) -> u64 {
    strategy
        .split(',')
        .filter_map(|part| part.split_once('='))
        .filter(|(key, _)| ["tp", "pp", "cp", "dp", "dp_shard", "dp_replicate"].contains(key))
        .map(|(_, size)| size.parse::<u64>().expect("a number"))
        .product()
}

/// The cost model of a job, on GPUs whose kind changes no number of bytes.
pub fn costs(job: &Job, runtime: &str) -> CostModel {
    let scenario = Scenario {
        model: job.model.clone(),
        cluster: catalog::load::cluster("dgx-h100").expect("a preset"),
        runtime: catalog::load::runtime(runtime).expect("a preset"),
        workload: Workload::new(catalog::WorkloadSizes {
            gpus: job.strategy.world(),
            seq_len: job.seq_len,
            global_batch: job.global_batch,
            precision: job.precision,
        })
        .expect("a workload"),
        headroom: 0.0,
    };
    CostModel::new(scenario).expect("priced")
}

/// An observer that prints nothing.
pub struct Quiet;

impl Observer for Quiet {
    fn step(&self, _: &executor::StepReport) {}
}

/// A run of a job from the beginning, without checkpoints.
pub fn session(job: &Job) -> Session<'_> {
    Session {
        job,
        start: None,
        checkpoints: None,
        observer: &Quiet,
        watch: None,
    }
}

/// Trains; panics on failure.
pub fn train(job: &Job) -> Outcome {
    executor::train(&session(job)).unwrap_or_else(|e| panic!("{}: {e}", job.strategy))
}
