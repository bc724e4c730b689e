//! What is wrong with a configuration is found, with its line and the nearest right key; scripts as
//! people write them are read.

use interop::check::check;
use interop::config::shell;
use interop::export::Dialect;
use interop::import::{Document, Given, import};
use interop::training_log;
use proptest::prelude::*;

fn findings(name: &str, text: &str, model: Option<&str>) -> Vec<String> {
    let document = Document::read(text, name, None, &|_| None).expect("well-formed");
    let model = model.map(|m| catalog::load::model(m).expect("preset"));
    let found = check(&document, model.as_deref()).expect("schema");
    found.iter().map(ToString::to_string).collect()
}

#[test]
fn wrong_keys_values_and_contradictions_are_found() {
    let titan = "[parallelism]\ntensor_paralel_degree = 2\npipeline_parallel_degree = \"2\"\n[training]\ndtype = \"bf16\"\n";
    let python = "from torchtitan.trainer import Trainer\n\ndef plan():\n    config = base()\n    \
                  config.parallelism = ParallelismConfig(\n        pipeline_parallel_degree=2,\n        \
                  expert_tensor_parallel_degree=1,\n    )\n    return config\n";
    let deepspeed = "{\n  \"train_batch_size\": 33,\n  \"train_micro_batch_size_per_gpu\": 2,\n  \
                     \"gradient_accumulation_steps\": 4,\n  \"tensor_paralel\": {\"autotp_size\": 2},\n  \
                     \"zero_optimization\": {\"stage\": 2, \"stage3_prefetch_bucket_size\": 5e8, \"overlap_com\": true}\n}\n";
    let accelerate = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\n\
                      num_processes: 8\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_fwd: true\n  \
                      fsdp_use_orig_params: true\nparallelism_config:\n  parallelism_config_dp_shard_size: 4\n";
    let axolotl =
        "base_model: x\nmicro_batch_size: 1\ngradient_checkpoint: true\ndp_shard_size: 4\n";
    let nanotron = "parallelism:\n  dp: 1\n  tp: 3\n  pp: 1\n  tp_mode: ALL_REDUCE\n  \
                    tp_linear_async_communication: true\nmodel:\n  model_config:\n    num_attention_heads: 32\n";
    let bridge = "from megatron.bridge.training.config import ConfigContainer\ndef apply(cfg):\n    \
                  cfg.model.tensor_model_parallel_size = 1\n    cfg.model.sequence_parallel = True\n    \
                  cfg.model.pipeline_model_paralel_size = 2\n    cfg.model.seq_length = 4096\n    cfg.dataset.seq_length = 8192\n";
    let megatron = "torchrun --nproc-per-node 8 pretrain_gpt.py \\\n  --tensor-model-paralel-size 2 \\\n  \
                    --num-layers ten --cp-comm-type ring \\\n  --sequence-parallel --overlap-param-gather \\\n  \
                    --num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-layout 'Et|tL' --bf16 1 \\\n  \
                    --data-path 1 FILL_IN_DATA\n";
    let mut all = String::new();
    let cases = [
        ("train.toml", titan, Some("llama3-8b")),
        ("plan.py", python, None),
        ("ds.json", deepspeed, None),
        ("acc.yaml", accelerate, None),
        ("axolotl.yaml", axolotl, None),
        ("nano.yaml", nanotron, None),
        ("bridge.py", bridge, None),
        ("run.sh", megatron, None),
    ];
    for (name, text, model) in cases {
        for line in findings(name, text, model) {
            all.push_str(&line);
            all.push('\n');
        }
    }
    insta::assert_snapshot!(all, @"
    train.toml:2: `parallelism.tensor_paralel_degree`: unknown to torchtitan@0.2; did you mean `parallelism.tensor_parallel_degree`?
    train.toml:3: `parallelism.pipeline_parallel_degree`: `2` where a whole number of at least 1 is expected
    train.toml:5: `training.dtype`: `bf16` where one of bfloat16, float32 is expected
    plan.py:6: `parallelism.pipeline_parallel_degree`: 2 needs training.disable_cuda_graphs = True: CUDA graphs do not do pipeline parallelism
    plan.py:7: `parallelism.expert_tensor_parallel_degree`: unknown to torchtitan@0.3; did you mean `parallelism.expert_parallel_degree`?
    ds.json:2: `train_batch_size`: 33 is not a multiple of train_micro_batch_size_per_gpu 2 · gradient_accumulation_steps 4; the rest is the data-parallel size
    ds.json:5: `tensor_paralel`: unknown to deepspeed@0.19; did you mean `tensor_parallel`?
    ds.json:6: `zero_optimization.overlap_com`: unknown to deepspeed@0.19; did you mean `zero_optimization.overlap_comm`?
    ds.json:6: warning: `zero_optimization.stage3_prefetch_bucket_size`: has no effect at zero_optimization.stage 2
    acc.yaml:4: `num_processes`: 8 is not the product of the parallel sizes, 4
    acc.yaml:7: `fsdp_config.fsdp_reshard_after_fwd`: unknown to accelerate@1.15; did you mean `fsdp_config.fsdp_reshard_after_forward`?
    acc.yaml:8: warning: `fsdp_config.fsdp_use_orig_params`: is an option of FSDP1, which fsdp_version 2 ignores
    axolotl.yaml: `learning_rate`: is missing, and has no default
    axolotl.yaml:3: `gradient_checkpoint`: unknown to axolotl@0.19; did you mean `gradient_checkpointing`?
    axolotl.yaml:4: `dp_shard_size`: needs fsdp_config
    nano.yaml:3: `parallelism.tp`: 3 does not divide the 32 attention heads
    nano.yaml:6: `parallelism.tp_linear_async_communication`: needs tp_mode REDUCE_SCATTER
    bridge.py:4: `model.sequence_parallel`: needs tensor_model_parallel_size of at least 2
    bridge.py:5: `model.pipeline_model_paralel_size`: unknown to megatron-bridge@main; did you mean `model.pipeline_model_parallel_size`?
    bridge.py:7: `dataset.seq_length`: 8192 is not model.seq_length 4096
    run.sh:2: `--tensor-model-paralel-size`: unknown to megatron-lm@0.20; did you mean `--tensor-model-parallel-size`?
    run.sh:3: `--num-layers`: `ten` where a whole number is expected
    run.sh:4: warning: `--sequence-parallel`: has no effect without --tensor-model-parallel-size above 1 (arguments.py:1433)
    run.sh:4: `--overlap-param-gather`: needs --use-distributed-optimizer or --use-megatron-fsdp (arguments.py:1025)
    run.sh:4: `--overlap-param-gather`: needs --overlap-grad-reduce (arguments.py:1028)
    run.sh:5: `--bf16`: `1` where no value is expected
    run.sh:5: `--pipeline-model-parallel-layout`: cannot be combined with --num-layers-per-virtual-pipeline-stage (arguments.py:928)
    run.sh:5: `--num-layers-per-virtual-pipeline-stage`: needs --pipeline-model-parallel-size of at least 2
    run.sh:6: `--data-path`: `FILL_IN_DATA` is still to be filled in
    ");
}

#[test]
fn what_cannot_be_read_says_where() {
    let error = |name: &str, text: &str| {
        let document = Document::read(text, name, None, &|_| None);
        document.expect_err("malformed").to_string()
    };
    let cases = [
        error("a.toml", "[parallelism]\ntp = = 2\n"),
        error("a.json", "{\n  \"train_batch_size\": 3,\n}\n"),
        error(
            "a.json",
            "{\"train_batch_size\": 3,\n\"bf16\": {\"enabled\": true,\n\"enabled\": false}}",
        ),
        error("a.json", "[\"bf16\", 2]"),
        error("a.json", "{\"vocabulary\": 2}"),
        error("a.yaml", "base_model: x\n  y: [\n"),
        error("a.yaml", "hello: 1\n"),
        error("a.py", "from torchtitan import x\nconfig.a = f(1,\n"),
        error("a.sh", "ARGS=(\n  --tensor-model-parallel-size 2\n"),
        error("a.sh", "echo \"--x\n"),
        error("a.sh", "echo --\n"),
        error("a.txt", "nothing\n"),
    ];
    insta::assert_snapshot!(cases.join("\n"), @r#"
    a.toml:2: extra `=`, expected nothing
    a.json:3: trailing comma
    a.json:3: `enabled` is there twice; expected each key once
    a.json:1: a table of keys is expected
    a.json: cannot tell which training system this is for; name it as TARGET[@VERSION]
    a.yaml:2: mapping values are not allowed in this context
    a.yaml: cannot tell which training system this is for; name it as TARGET[@VERSION]
    a.py:2: `)` is missing
    a.sh:1: `(` is not closed
    a.sh:1: " is not closed
    a.sh: no `--option` is found
    a.txt: cannot tell which training system this is for; name it as TARGET[@VERSION]
    "#);
}

#[test]
fn scripts_are_read_as_a_shell_would() {
    let script = r#"#!/bin/bash
# A comment with --an-option
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-4}
WORLD=$((GPUS_PER_NODE * NNODES))
TP="2"
LOG=${LOG:-"${PWD}/logs"}
DISTRIBUTED="--nproc_per_node $GPUS_PER_NODE --nnodes ${NNODES}"
MODEL_ARGS=(
    --num-layers 32        # as in the paper
    --hidden-size 4096
    --num-attention-heads 32
)
MODEL_ARGS+=(--group-query-attention --num-query-groups=8)
torchrun $DISTRIBUTED \
    pretrain_gpt.py "${MODEL_ARGS[@]}" \
    --tensor-model-parallel-size $TP --save "$LOG/run" \
    --micro-batch-size 1 --global-batch-size 256 --seq-length 4096 --bf16 $EXTRA
"#;
    let read = shell::parse(script, "run.sh", &|_| None, &Default::default()).expect("shell");
    let last: Vec<&str> = read.commands[0].iter().map(|w| w.text.as_str()).collect();
    insta::assert_snapshot!(last.join(" "), @"torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups=8 --tensor-model-parallel-size 2 --save $PWD/logs/run --micro-batch-size 1 --global-batch-size 256 --seq-length 4096 --bf16 $EXTRA");
    let document = Document::read(script, "run.sh", None, &|_| None).expect("shell");
    assert_eq!(document.dialect, Dialect::MegatronLm);
    assert_eq!(document.launch.gpus, Some(32));
    let model = catalog::load::model("llama3-8b").expect("preset");
    let given = Given {
        model: &model,
        gpus: None,
        seq_len: None,
        gpus_per_node: 8,
    };
    let imported = import(&document, &given).expect("imports");
    let d = &imported.decisions;
    assert_eq!((d.tp, d.dp(), d.num_micro_batches), (2, 16, 16));
}

#[test]
fn imports_that_cannot_be_say_why() {
    let model = catalog::load::model("llama3-8b").expect("preset");
    let message = |name: &str, text: &str, gpus: Option<u64>| {
        let document = Document::read(text, name, None, &|_| None).expect("well-formed");
        let given = Given {
            model: &model,
            gpus,
            seq_len: None,
            gpus_per_node: 8,
        };
        import(&document, &given)
            .expect_err("not importable")
            .to_string()
    };
    let args = "--tensor-model-parallel-size 4 --micro-batch-size 1 --seq-length 4096";
    let cases = [
        message("a.sh", args, None),
        message("a.sh", args, Some(6)),
        message("a.sh", &format!("{args} --num-layers 40"), Some(8)),
        message("a.sh", &format!("{args} --global-batch-size 7"), Some(8)),
        message("a.sh", &format!("{args} --cp-comm-type a2a+p2p"), Some(8)),
        message(
            "a.sh",
            &format!(
                "{args} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*3|tL'"
            ),
            Some(8),
        ),
        message("a.toml", "[training]\nlocal_batch_size = 2\n", None),
        message(
            "a.toml",
            "[training]\nlocal_batch_size = \"two\"\n",
            Some(8),
        ),
        message(
            "a.toml",
            "[activation_checkpoint]\nmode = \"memory_budget\"\n",
            Some(8),
        ),
        message("a.json", "{\"train_batch_size\": \"auto\"}", Some(8)),
        message(
            "a.json",
            "{\"train_batch_size\": 8, \"zero_optimization\": {\"stage\": 4}}",
            Some(8),
        ),
        message("a.yaml", "compute_environment: x\n", Some(8)),
        message("a.yaml", "base_model: x\nadapter: lora\n", Some(8)),
        message(
            "a.yaml",
            "base_model: x\nsequence_len: 64\nfsdp: [hybrid_shard]\n",
            Some(12),
        ),
        message(
            "a.yaml",
            "base_model: Qwen/Qwen2.5-7B\nsequence_len: 64\n",
            Some(8),
        ),
        message(
            "a.json",
            "{\"per_device_train_batch_size\": 1, \"bf16\": true}",
            Some(8),
        ),
        message(
            "a.yaml",
            "parallelism:\n  dp: 2\nmodel:\n  model_config:\n    is_llama_config: true\n    rope_interleaved: true\n",
            None,
        ),
        message(
            "a.py",
            "import megatron.bridge\ndef a():\n    cfg.model.x = 1\ndef b():\n    cfg.model.x = 2\n",
            Some(8),
        ),
    ];
    insta::assert_snapshot!(cases.join("\n"), @"
    a.sh: the number of GPUs is not given; give --gpus
    a.sh: 6 ranks are no multiple of 4, the product of parallel degrees; expected degrees whose product divides the GPUs; --gpus gives their number
    a.sh:1: `--num-layers`: 40, but model llama3-8b has 32; give the right --model
    a.sh:1: `--global-batch-size`: 7 sequences are not a multiple of micro-batch · dp = 2
    a.sh:1: `--cp-comm-type`: hierarchical context parallelism is not planned; use p2p or a2a
    a.sh:1: `--pipeline-model-parallel-layout`: 4 layers in 2 stages; 32 layers in a multiple of 2 stages are needed
    a.toml: parallelism.data_parallel_shard_degree (-1: the rest of the ranks) is not given; give --gpus
    a.toml:2: `training.local_batch_size`: `two` is not a whole number that is not negative
    a.toml:2: `activation_checkpoint.mode`: the compiler decides what it recomputes; planned: none, full, selective
    a.json: the batch is not given; three of train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps and --gpus are needed, as numbers
    a.json:1: `zero_optimization.stage`: 4 is not 0, 1, 2 or 3
    a.yaml: the sequence length is not given; the file has none; give --seq
    a.yaml: lora_r is not given; axolotl has no default
    a.yaml: HYBRID_SHARD divides states within a node, and 12 ranks fill no whole number of nodes of 8; expected degrees whose product divides the GPUs; --gpus gives their number
    a.yaml:1: `base_model`: layers 28, but model llama3-8b has 32; give the right --model
    a.json: the sequence length is not given; the file has none; give --seq
    a.yaml:6: `model.model_config.rope_interleaved`: rotates neighbouring dimensions, as no Llama or Qwen2 of the hub does
    a.py: the configuration is not given; 2 functions make configurations, a to b; say which: a.py:a
    ");
}

/// Layouts as Megatron-LM's own documentation writes them.
#[test]
fn pipeline_layouts_unroll() {
    let model = catalog::load::model("llama3-8b").expect("preset");
    let stages = |layout: &str, pp: u64| {
        let text = format!(
            "--pipeline-model-parallel-size {pp} --pipeline-model-parallel-layout '{layout}' --seq-length 64"
        );
        let document = Document::read(&text, "a.sh", None, &|_| None).expect("well-formed");
        let given = Given {
            model: &model,
            gpus: Some(pp),
            seq_len: None,
            gpus_per_node: 8,
        };
        import(&document, &given).map(|i| (i.decisions.stages.0, i.decisions.vpp))
    };
    assert_eq!(
        stages("Et*7|t*9|(t*8|)*1t*8L", 4).expect("layout"),
        (vec![7, 9, 8, 8], 1)
    );
    assert_eq!(
        stages("Et*3|(t*4|)*6t*5L", 4).expect("layout"),
        (vec![3, 4, 4, 4, 4, 4, 4, 5], 2)
    );
    assert_eq!(
        stages("E|t*16|t*16|L", 2).expect("layout"),
        (vec![0, 16, 16, 0], 2)
    );
    for bad in [
        "Et*32(",
        "Et*x|tL",
        "Ez|tL",
        "Et*99999999999L",
        "((((((((((t))))))))))",
    ] {
        assert!(stages(bad, 2).is_err(), "{bad}");
    }
}

/// A script whose variables double themselves stays within bounds.
#[test]
fn doubling_variables_are_an_error() {
    for line in [
        "A=$A$A\n",
        "A=(${A[@]} ${A[@]})\n",
        "A+=$A\n",
        "A=\"$A $A\"\n",
    ] {
        let text = format!("A=xxxxxxxx\n{}echo $A --x\n", line.repeat(60));
        let error =
            shell::parse(&text, "x.sh", &|_| None, &Default::default()).expect_err("too much");
        assert_eq!(
            error.message,
            "the script's variables expand to too much text"
        );
    }
    let own = "source x.sh\n".repeat(50);
    let include = |_: &str| Some(own.clone());
    assert!(shell::parse(&own, "x.sh", &include, &Default::default()).is_err());
}

/// Pieces of configurations and logs, from which nonsense is made.
const PIECES: [&str; 48] = [
    "--tensor-model-parallel-size",
    " 2",
    " -1",
    "=",
    "\n",
    "\\\n",
    "\"",
    "'",
    "${",
    "}",
    "$((",
    "))",
    "$X",
    "[@]",
    "(",
    ")",
    "#",
    "MEGATRON_ARGS=(",
    "pretrain_gpt.py ",
    "--pipeline-model-parallel-layout 'Et*9|(t|)*3L'",
    "[parallelism]\n",
    "tensor_parallel_degree = ",
    "9999999999999999999",
    "{",
    "\"train_batch_size\": ",
    ": ",
    ",",
    "[",
    "]",
    "null",
    "- ",
    "  ",
    "base_model: x\n",
    "parallelism:\n  pp: ",
    "distributed_type: FSDP\n",
    "config.parallelism = ParallelismConfig(",
    "torchtitan",
    "return Trainer.Config(",
    "r\"\"\"",
    "iteration 1/ 2 | elapsed time per iteration (ms): ",
    "step: 3 tps: ",
    "1e999",
    "1099511627776",
    "tensor_parallel_degree=1048576, pipeline_parallel_degree=1048576,",
    " --context-parallel-size 1048576",
    "\"train_micro_batch_size_per_gpu\": 1099511627776,",
    "\u{1b}[",
    "ü",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nonsense_never_panics(pieces in prop::collection::vec(0usize..PIECES.len(), 0..40)) {
        let text: String = pieces.into_iter().map(|i| PIECES[i]).collect();
        let model = catalog::load::model("mixtral-8x7b").expect("preset");
        for &dialect in Dialect::ALL {
            let document = Document::read(&text, "x", Some(dialect), &|_| Some("A=1".to_owned()));
            let Ok(document) = document else { continue };
            check(&document, Some(&model)).expect("schema");
            for gpus in [None, Some(64)] {
                let given = Given { model: &model, gpus, seq_len: Some(4096), gpus_per_node: 8 };
                let _ = import(&document, &given).map(|imported| imported.decisions.canonical(&model));
            }
        }
        let _ = training_log::parse(&text, "x").and_then(|log| {
            let size = training_log::StepSize {
                tokens_per_gpu: 1.0,
                sequences: 1,
                gpus: 1,
            };
            log.steady("x", None, size)
        });
    }
}

/// Test cases of Megatron-LM hold options in a YAML section; launchers hold a command as one word.
#[test]
fn options_are_found_where_people_put_them() {
    let yaml = "ENV_VARS:\n  A: 1\nMODEL_ARGS:\n  --num-layers: 32\n  --hidden-size: 4096\n  --num-attention-heads: 32\n  --bf16: true\n  --sequence-parallel: false\n  --micro-batch-size: 2\n";
    let document = Document::read(yaml, "model_config.yaml", None, &|_| None).expect("YAML");
    assert_eq!(document.dialect, Dialect::MegatronLm);
    assert_eq!(
        document.size("--micro-batch-size").expect("a size"),
        Some(2)
    );
    assert_eq!(document.flag("--bf16").expect("a flag"), Some(true));
    assert_eq!(document.flag("--sequence-parallel").expect("a flag"), None);
    assert!(findings("model_config.yaml", yaml, None).is_empty());

    let srun = "srun -l --verbose --output=log sh -c \"torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --bf16\"\n";
    let document = Document::read(srun, "run.sh", None, &|_| None).expect("shell");
    assert_eq!(document.size("--num-layers").expect("a size"), Some(4));
    assert!(document.find("--verbose").is_none() && document.find("--output").is_none());
    let nsys = "nsys profile --force-overwrite true torchrun pretrain_gpt.py --num-layers 4\n";
    let document = Document::read(nsys, "run.sh", None, &|_| None).expect("shell");
    assert!(document.find("--force-overwrite").is_none());
}

/// The model of a file, by its name in the library or with its own definition.
#[test]
fn models_are_read_from_files() {
    let of = |name: &str, text: &str| {
        let document = Document::read(text, name, None, &|_| None).expect("well-formed");
        interop::import::of_file(&document)
    };
    let tiny = "parallelism: {dp: 2, tp: 1, pp: 1}\nmodel:\n  model_config:\n    is_llama_config: true\n    hidden_size: 16\n    num_attention_heads: 4\n    num_hidden_layers: 2\n    intermediate_size: 64\n    vocab_size: 256\n    rope_theta: 500000.0\n";
    let found = of("tiny.yaml", tiny).expect("a model");
    assert!(!found.known && found.model.definition().is_some());
    assert_eq!((found.name.as_str(), found.model.layers), ("tiny", 2));
    assert_eq!(found.model.constants.rope_theta, 500_000.0);
    assert_eq!(found.model.constants.norm_epsilon, 1e-6);
    let mixture = tiny.replace("is_llama_config", "is_qwen2_config").replace(
        "    rope_theta",
        "    moe_config: {num_experts: 4, top_k: 2, moe_intermediate_size: 32}\n    rope_theta",
    );
    let found = of("mixture.yaml", &mixture).expect("a model");
    let moe = found.model.moe.expect("experts");
    assert_eq!((moe.experts, moe.top_k, moe.expert_ffn), (4, 2, 32));
    assert!(!found.model.attention.qkv_bias);

    for (id, preset) in [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3-8b"),
        ("meta-llama/Meta-Llama-3-8B", "meta-llama-3-8b"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "meta-llama-3-70b"),
        ("~/weights/llama-7b", "llama-7b"),
    ] {
        let named = format!("base_model: {id}\nsequence_len: 4096\n");
        let found = of("a.yaml", &named).expect("a model");
        assert_eq!((found.name.as_str(), found.known), (preset, true), "{id}");
    }
    let unknown = of("a.yaml", "base_model: org/other\n").expect_err("unknown");
    assert_eq!(
        unknown.to_string(),
        "a.yaml:1: `base_model`: `org/other` is not a model preset; give --model with its config.json"
    );
    let recipe = "from megatron.bridge import AutoBridge\ndef recipe():\n    cfg.model = AutoBridge.from_hf_pretrained(\"Qwen/Qwen3-8B\").get_model_config()\n    cfg.model.tensor_model_parallel_size = 2\n";
    assert_eq!(of("a.py", recipe).expect("a model").name, "qwen3-8b");
}

/// LLaMA-Factory's defaults for keys that a file leaves out.
#[test]
fn what_llama_factorys_file_leaves_out_is_its_default() {
    let model = catalog::load::model("llama3-8b").expect("preset");
    let read = |more: &str| {
        let yaml = format!(
            "model_name_or_path: meta-llama/Llama-3.1-8B\nper_device_train_batch_size: 1\ncutoff_len: 2048\n{more}"
        );
        let document = Document::read(&yaml, "a.yaml", None, &|_| None).expect("well-formed");
        let given = Given {
            model: &model,
            gpus: Some(8),
            seq_len: None,
            gpus_per_node: 8,
        };
        let imported = import(&document, &given).expect("imports");
        let rank = imported.adapters.map(|adapters| adapters.rank);
        (imported.workload.seq_len, rank)
    };
    for (more, expected) in [
        ("stage: sft\n", (2048, Some(8))),
        ("stage: sft\nfinetuning_type: full\n", (2048, None)),
        ("stage: sft\npacking: true\n", (2048, Some(8))),
        ("stage: pt\nfinetuning_type: full\n", (2048, None)),
        (
            "stage: pt\nfinetuning_type: full\npacking: true\n",
            (2047, None),
        ),
    ] {
        assert_eq!(read(more), expected, "{more}");
    }
}

/// A DeepSpeed configuration that the Trainer's file names, with `auto`.
#[test]
fn the_trainers_values_stand_for_auto() {
    let engine = "{\"train_micro_batch_size_per_gpu\": \"auto\", \"gradient_accumulation_steps\": \"auto\", \"train_batch_size\": \"auto\", \"bf16\": {\"enabled\": \"auto\"}, \"zero_optimization\": {\"stage\": 2}}";
    let yaml = "model_name_or_path: meta-llama/Llama-3.1-8B\nstage: sft\nfinetuning_type: full\ndeepspeed: examples/deepspeed/ds_z2_config.json\ncutoff_len: 2048\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 4\nbf16: true\n";
    let model = catalog::load::model("llama3-8b").expect("preset");
    let beside =
        |name: &str| (name == "examples/deepspeed/ds_z2_config.json").then(|| engine.to_owned());
    let document = Document::read(yaml, "sft.yaml", None, &beside).expect("well-formed");
    assert_eq!(document.dialect, Dialect::LlamaFactory);
    let given = Given {
        model: &model,
        gpus: Some(8),
        seq_len: None,
        gpus_per_node: 8,
    };
    let imported = import(&document, &given).expect("imports");
    let d = &imported.decisions;
    assert_eq!((d.micro_batch, d.num_micro_batches, d.dp()), (2, 4, 8));
    assert_eq!(imported.workload.global_batch, 64);
    assert_eq!(d.recompute, plans::Recompute::Full);
    assert_eq!(imported.runtime(&document), "hf-deepspeed");

    let alone = Document::read(engine, "ds.json", None, &|_| None).expect("well-formed");
    let given = Given {
        seq_len: Some(2048),
        ..given
    };
    let imported = import(&alone, &given).expect("imports");
    assert_eq!(imported.decisions.micro_batch, 1);
    assert!(imported.notes[0].contains("auto"), "{:?}", imported.notes);
}

/// One function of a file with several recipes.
#[test]
fn a_recipe_is_imported_by_its_function() {
    let file = "import megatron.bridge\nSEQ: int = 2048\n_ID = \"meta-llama/Llama-3.1-8B\"\n\ndef _base():\n    cfg.model = AutoBridge.from_hf_pretrained(_ID, revision=1).get_model_config()\n    cfg.dataset.seq_length = SEQ\n    cfg.model.tensor_model_parallel_size = 2\n    return cfg\n\n\ndef small():\n    cfg.model.tensor_model_parallel_size = 1\n    cfg.train.micro_batch_size = 1\n    return cfg\n\n\ndef large():\n    cfg = _base()\n    cfg.model.tensor_model_parallel_size = 4\n    cfg.model.sequence_parallel = True\n    cfg.train.global_batch_size = 64\n    cfg.ddp.use_megatron_fsdp = True\n    cfg.mixed_precision = \"bf16_with_fp8_current_scaling_mixed\"\n    return cfg\n";
    let text = interop::config::python::only_function(file, "large").expect("defined");
    assert_eq!(text.lines().count(), file.lines().count());
    assert!(interop::config::python::only_function(file, "other").is_none());
    let model = catalog::load::model("llama3-8b").expect("preset");
    let document = Document::read(&text, "a.py", None, &|_| None).expect("well-formed");
    let given = Given {
        model: &model,
        gpus: Some(16),
        seq_len: None,
        gpus_per_node: 8,
    };
    let imported = import(&document, &given).expect("imports");
    let d = &imported.decisions;
    assert_eq!((d.tp, d.dp(), d.micro_batch), (4, 4, 2));
    assert_eq!(d.zero, catalog::Zero::Z3);
    assert_eq!(imported.workload.precision, catalog::Precision::Fp8);
    assert_eq!(d.fp8_recipe, Some(catalog::Fp8Recipe::Tensorwise));
    assert_eq!(imported.workload.seq_len, 2048);
    assert_eq!(imported.runtime(&document), "megatron-fsdp");
    assert_eq!(
        document.python.hub_model.as_deref(),
        Some("meta-llama/Llama-3.1-8B")
    );
}

/// A Megatron-LM script of a model that the library lacks.
#[test]
fn a_scripts_own_model_is_read() {
    let of = |text: &str| {
        let document = Document::read(text, "own.sh", None, &|_| None).expect("well-formed");
        interop::import::of_file(&document)
    };
    let sizes = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --max-position-embeddings 2048 --seq-length 2048 --init-method-std 0.02";
    let llama = format!(
        "{sizes} --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --rotary-base 500000 --group-query-attention --num-query-groups 4 --ffn-hidden-size 3072 --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --vocab-size 50000 --tensor-model-parallel-size 2"
    );
    let found = of(&llama).expect("a model");
    assert!(!found.known);
    let m = &found.model;
    assert_eq!((m.layers, m.attention.kv_heads(), m.mlp.ffn), (12, 4, 3072));
    assert_eq!(m.vocab, 50_176);
    assert_eq!(m.constants.rope_theta, 500_000.0);

    let narrow = llama.replace("3072", "1024");
    let experts = format!("{narrow} --num-experts 8 --moe-router-topk 2");
    let moe = of(&experts).expect("a model").model.moe.expect("experts");
    assert_eq!((moe.experts, moe.expert_ffn), (8, 1024));

    // GPT of another size than the library's: biases, learned positions, dropout.
    let gpt = sizes.replace("--num-layers 12", "--num-layers 10");
    let gpt = format!("{gpt} --tokenizer-type GPT2BPETokenizer");
    let m = of(&gpt).expect("a model").model;
    assert_eq!((m.layers, m.vocab, m.hidden_dropout), (10, 50_304, 0.1));

    let latent = format!("{llama} --multi-latent-attention");
    assert!(of(&latent).is_err());
    let open = llama.replace(" --vocab-size 50000", "");
    let error = of(&open).expect_err("no vocabulary").to_string();
    assert!(error.contains("the vocabulary is not given"), "{error}");
}
