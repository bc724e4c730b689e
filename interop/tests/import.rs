//! Configurations as frameworks' own examples write them.

use catalog::{CpKind, Precision, ScheduleKind, Zero};
use interop::check::{Severity, check, misspelt};
use interop::export::Dialect;
use interop::import::{Document, Given, Imported, import, of_file};

/// A file's content read as a document of the dialect that it is recognised as; nothing lies beside it.
fn read(name: &str, text: &str) -> Document {
    Document::read(text, name, None, &|_| None).expect("well-formed")
}

/// The file imported with its own model, or else with that of Llama 3 8B.
fn imported(document: &Document) -> Imported {
    let found = of_file(document).map(|found| found.model);
    let model = found.unwrap_or_else(|_| catalog::load::model("llama3-8b").expect("preset"));
    let given = Given {
        model: &model,
        gpus: None,
        seq_len: Some(2048),
        gpus_per_node: 8,
    };
    import(document, &given).expect("imports")
}

#[test]
fn accelerates_parallelism_is_read() {
    let yaml = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n  fsdp_activation_checkpointing: true\nparallelism_config:\n  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 2\n  parallelism_config_tp_size: 2\n  parallelism_config_cp_size: 1\n";
    let read = imported(&read("fsdp.yaml", yaml));
    let d = &read.decisions;
    assert_eq!((d.tp, d.cp, d.dp_shard, d.dp_replicate), (2, 1, 2, 2));
    assert_eq!((d.zero, d.recompute), (Zero::Z3, plans::Recompute::Full));
    assert_eq!(
        (read.workload.gpus, read.workload.precision),
        (8, Precision::Bf16)
    );
    assert!(read.notes[0].contains("has no batch"), "{:?}", read.notes);
}

#[test]
fn accelerates_engine_is_deepspeeds() {
    let yaml = "distributed_type: DEEPSPEED\nmixed_precision: fp16\nnum_processes: 4\ndeepspeed_config:\n  zero_stage: 2\n  gradient_accumulation_steps: 3\n";
    let read = imported(&read("zero2.yaml", yaml));
    assert_eq!(
        (read.decisions.zero, read.decisions.num_micro_batches),
        (Zero::Z2, 3)
    );
    assert_eq!(
        (read.decisions.dp(), read.workload.precision),
        (4, Precision::Fp16)
    );
}

#[test]
fn an_engine_that_cannot_be_read_is_refused() {
    let yaml = "base_model: meta-llama/Llama-3.1-8B\nsequence_len: 2048\ndeepspeed: deepspeed_configs/zero3.json\n";
    let document = read("a.yaml", yaml);
    let model = catalog::load::model("llama3-8b").expect("preset");
    let given = Given {
        model: &model,
        gpus: Some(8),
        seq_len: None,
        gpus_per_node: 8,
    };
    let refused = import(&document, &given).expect_err("the engine decides the sharding");
    assert_eq!(
        refused.to_string(),
        "a.yaml:3: `deepspeed`: `deepspeed_configs/zero3.json` cannot be read, from the folder of the configuration or from here"
    );
}

#[test]
fn the_trainers_arguments_are_read_from_a_script() {
    let script = "torchrun --nproc_per_node=4 train.py \\\n    --model_name_or_path ~/weights/llama-7b \\\n    --bf16 True \\\n    --per_device_train_batch_size 2 \\\n    --gradient_accumulation_steps 16 \\\n    --fsdp \"full_shard auto_wrap\" \\\n    --model_max_length 2048 \\\n    --gradient_checkpointing True\n";
    let document = read("train.sh", script);
    assert_eq!(document.dialect, Dialect::Transformers);
    assert_eq!(of_file(&document).expect("named").name, "llama-7b");
    let read = imported(&document);
    let d = &read.decisions;
    assert_eq!((d.dp_shard, d.zero, d.micro_batch), (4, Zero::Z3, 2));
    assert_eq!(d.recompute, plans::Recompute::Full);
    assert_eq!(
        (read.workload.global_batch, read.workload.seq_len),
        (128, 2048)
    );
    // An argument of the script's own is no error.
    let findings = check(&document, None).expect("schema");
    assert!(
        findings.iter().all(|f| f.severity == Severity::Warning),
        "{findings:?}"
    );
}

#[test]
fn a_registry_is_read_with_its_module_and_variables() {
    let file = "from torchtitan.models.qwen3 import model_registry\n\n\ndef mine() -> Trainer.Config:\n    model_spec = model_registry(\"8B\")\n    return Trainer.Config(\n        model_spec=model_spec,\n        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 4096, max_context_length=4096),\n        parallelism=ParallelismConfig(data_parallel_shard_degree=4, tensor_parallel_degree=2),\n    )\n";
    let document = read("registry.py", file);
    // Llama 3 has an `8B` too.
    assert_eq!(of_file(&document).expect("a model").name, "qwen3-8b");
    let read = imported(&document);
    assert_eq!((read.decisions.tp, read.decisions.dp_shard), (2, 4));
    assert_eq!(
        (read.decisions.micro_batch, read.workload.seq_len),
        (2, 4096)
    );
}

#[test]
fn python_is_read_as_python_does() {
    let file = "import megatron.bridge\n\ndef _layout(\n    cfg: ConfigContainer,\n) -> None:\n    cfg.model.num_layers_in_first_pipeline_stage = None\n\n\ndef recipe() -> ConfigContainer:\n    cfg.model = AutoBridge.from_hf_pretrained(\"meta-llama/Llama-3.1-8B\").get_model_config()\n    cfg.model.tensor_model_parallel_size = (\n        2  # inside a node\n    )\n    cfg.train.micro_batch_size = 1\n    cfg.train.global_batch_size = 8\n    cfg.train.manual_gc_eval = 5\n    cfg.model.no_such_field = True\n    cfg.dataset.sequence_length = 4096\n    _layout(cfg)\n    cfg.mixed_precision = MixedPrecisionConfig(bf16=True, grad_reduce_in_fp32=False)\n    return cfg\n";
    let text = interop::config::python::only_function(file, "recipe").expect("defined");
    let document = read("recipe.py", &text);
    let model = catalog::load::model("llama3-8b").expect("preset");
    let given = Given {
        model: &model,
        gpus: Some(4),
        seq_len: None,
        gpus_per_node: 8,
    };
    let read = import(&document, &given).expect("imports");
    assert_eq!(
        (read.decisions.tp, read.workload.precision),
        (2, Precision::Bf16)
    );
    // Python asks no field for its type, and lets every name be set.
    let findings = check(&document, None).expect("schema");
    assert_eq!(findings.len(), 2, "{findings:?}");
    assert!(
        findings.iter().all(|f| f.severity == Severity::Warning),
        "{findings:?}"
    );
}

#[test]
fn keys_that_a_system_drops_are_warnings_unless_misspelt() {
    let yaml = "base_model: meta-llama/Llama-3.1-8B\nsequence_len: 2048\nlearning_rate: 1e-5\nmicro_batch_siz: 2\nold_setting_of_ours: 1\n";
    let findings = check(&read("a.yaml", yaml), None).expect("schema");
    let found: Vec<(&str, Severity)> = findings
        .iter()
        .map(|f| (f.key.as_str(), f.severity))
        .collect();
    assert_eq!(
        found,
        [
            ("micro_batch_siz", Severity::Error),
            ("old_setting_of_ours", Severity::Warning)
        ]
    );
}

#[test]
fn options_that_imply_rotation_are_followed() {
    let script = "MODEL_ARGS=\" --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --use-rotary-position-embeddings --no-position-embedding --rotary-base 500000 --use-rope-scaling --seq-length 4096 --max-position-embeddings 8192 --micro-batch-size 1 --bf16 \"\n";
    assert_eq!(
        of_file(&read("conf.sh", script)).expect("a model").name,
        "llama3-8b"
    );
}

/// torchtitan's TOML of before 0.2 has settings under other keys.
#[test]
fn earlier_keys_of_torchtitan_are_read() {
    let read = |text: &str| {
        let document = read("llama3.toml", text);
        let model = catalog::load::model("llama3-8b").expect("preset");
        let given = Given {
            model: &model,
            gpus: Some(64),
            seq_len: None,
            gpus_per_node: 8,
        };
        import(&document, &given).map(|read| (read.runtime(&document), read))
    };
    for (text, axes, batch, stages, precision, runtime) in [
        (
            "[training]\nbatch_size = 4\ntensor_parallel_degree = 8\ndata_parallel_replicate_degree = 2\ncompile = true\n[float8]\nenable_float8_linear = true\n[experimental]\ncontext_parallel_degree = 2\n",
            (8, 1, 2, 2, 2),
            (4, 1),
            vec![32],
            Precision::Fp8,
            "torchtitan-compile",
        ),
        (
            "[training]\nbatch_size = 24\n[experimental]\npipeline_parallel_degree = 8\npipeline_parallel_microbatches = 12\npipeline_parallel_schedule = \"Interleaved1F1B\"\ncontext_parallel_degree = 4\n",
            (1, 8, 4, 2, 1),
            (2, 12),
            vec![2; 16],
            Precision::Bf16,
            "torchtitan",
        ),
        (
            "[training]\nlocal_batch_size = 2\ncompile = true\n[parallelism]\ntensor_parallel_degree = 8\n",
            (8, 1, 1, 8, 1),
            (2, 1),
            vec![32],
            Precision::Bf16,
            "torchtitan-compile-2025",
        ),
    ] {
        let (found, read) = read(text).expect("imports");
        let d = &read.decisions;
        assert_eq!(
            (d.tp, d.pp, d.cp, d.dp_shard, d.dp_replicate),
            axes,
            "{text}"
        );
        assert_eq!((d.micro_batch, d.num_micro_batches), batch, "{text}");
        assert_eq!(d.stages.0, stages, "{text}");
        assert_eq!(
            (read.workload.precision, found),
            (precision, runtime),
            "{text}"
        );
    }
    for (text, key) in [
        (
            "[training]\ndata_parallel_degree = 8\n",
            "data_parallel_shard_degree",
        ),
        (
            "[parallelism]\npipeline_parallel_split_points = [\"layers.2\"]\n",
            "module_fqns_per_model_part",
        ),
        (
            "[training]\nbatch_size = 8\n[experimental]\npipeline_parallel_degree = 8\npipeline_parallel_schedule = \"Interleaved1F1B\"\n",
            "llama3.toml:2: `training.batch_size`: 8 sequences do not make 16 micro-batches",
        ),
    ] {
        let refused = read(text).expect_err(text).to_string();
        assert!(refused.contains(key), "{refused}");
    }
}

/// A configuration of DeepSpeed on eight GPUs, with this of ZeRO.
fn engine(zero: &str) -> Imported {
    let json = format!(
        "{{\"train_micro_batch_size_per_gpu\": 1, \"train_batch_size\": 8, \"bf16\": {{\"enabled\": true}}, \"zero_optimization\": {{{zero}}}}}"
    );
    let document = read("ds_config.json", &json);
    let model = catalog::load::model("llama3-8b").expect("preset");
    let given = Given {
        model: &model,
        gpus: Some(8),
        seq_len: Some(2048),
        gpus_per_node: 8,
    };
    import(&document, &given).expect("imports")
}

/// A layer of Llama 3 8B has 218 million parameters.
#[test]
fn the_depth_of_prefetching_is_read() {
    for (stage, elements, depth) in [
        (3, "0", Some(0)),
        (3, "1e8", None),
        (3, "5e8", Some(2)),
        (3, "5e7", None),
        (3, "\"auto\"", None),
        (2, "5e8", None),
    ] {
        let zero = format!("\"stage\": {stage}, \"stage3_prefetch_bucket_size\": {elements}");
        assert_eq!(engine(&zero).decisions.prefetch, depth, "{zero}");
    }
    assert_eq!(engine("\"stage\": 3").decisions.prefetch, None);
}

#[test]
fn states_in_host_memory_are_read() {
    let engine = |zero: &str| {
        let read = engine(zero);
        (
            read.decisions.offload.map(catalog::Offload::name),
            read.notes,
        )
    };
    let cpu = |section: &str| format!("\"{section}\": {{\"device\": \"cpu\"}}");
    let (optimizer, parameters) = (cpu("offload_optimizer"), cpu("offload_param"));
    let of = |text: String| engine(&text).0;
    assert_eq!(
        of(format!("\"stage\": 2, {optimizer}")).as_deref(),
        Some("optimizer")
    );
    assert_eq!(
        of(format!("\"stage\": 3, {optimizer}, {parameters}")).as_deref(),
        Some("parameters")
    );
    assert_eq!(
        of("\"stage\": 2, \"cpu_offload\": true".to_owned()).as_deref(),
        Some("optimizer")
    );
    for (ratio, noted) in [("1.0", false), ("1", false), ("0.3", true)] {
        let part = optimizer.replace("\"}", &format!("\", \"ratio\": {ratio}}}"));
        let (_, notes) = engine(&format!("\"stage\": 3, {part}"));
        let says = notes.iter().any(|note| note.contains("all weights"));
        assert_eq!(says, noted, "{ratio}: {notes:?}");
    }
    // Parameters without their optimizer, and states on NVMe, are left out, which a note says.
    for left_out in [parameters, cpu("offload_optimizer").replace("cpu", "nvme")] {
        let (offload, notes) = engine(&format!("\"stage\": 3, {left_out}"));
        assert_eq!(offload, None);
        assert!(
            notes.iter().any(|note| note.contains("left out")),
            "{notes:?}"
        );
    }
}

#[test]
fn misspelt_keys_are_named() {
    for (name, text, near) in [
        (
            "a.toml",
            "[parallelism]\ntensor_parallel_degre = 8\n",
            "parallelism.tensor_parallel_degree",
        ),
        (
            "a.yaml",
            "per_device_train_batch_size: 1\ngradient_checkpointin: true\n",
            "gradient_checkpointing",
        ),
        (
            "a.sh",
            "--tensor-model-paralell-size 4 --bf16\n",
            "--tensor-model-parallel-size",
        ),
    ] {
        let document = read(name, text);
        let notes = misspelt(&document).expect("schema");
        assert!(
            matches!(&notes[..], [note] if note.contains(&format!("did you mean `{near}`"))),
            "{notes:?}"
        );
    }
    let own = "per_device_train_batch_size: 1\nuse_peft: true\nlora_alpha: 16\npacking: true\nmax_length: 8\n";
    let document = read("a.yaml", own);
    assert_eq!(misspelt(&document).expect("schema"), Vec::<String>::new());
}

#[test]
fn files_are_refused_in_formats_that_their_system_does_not_read() {
    for (name, dialect, message) in [
        (
            "a.toml",
            Dialect::Torchtitan03,
            "a.toml: torchtitan@0.3 reads Python, and this is TOML; to read this file, use torchtitan@0.2",
        ),
        (
            "a.py",
            Dialect::Torchtitan02,
            "a.py: torchtitan@0.2 reads TOML, and this is Python; to read this file, use torchtitan@0.3",
        ),
        (
            "a.toml",
            Dialect::MegatronBridge,
            "a.toml: megatron-bridge@main reads Python, and this is TOML",
        ),
        (
            "a.toml",
            Dialect::Axolotl,
            "a.toml: axolotl@0.19 reads YAML or JSON, and this is TOML",
        ),
    ] {
        let refused = Document::read("x = 1\n", name, Some(dialect), &|_| None);
        assert_eq!(refused.expect_err(name).to_string(), message);
    }
}

#[test]
fn the_only_element_of_a_list_is_read_as_the_text_of_its_key() {
    let key = "training.mixed_precision_param";
    let text = |value: &str| {
        let toml = format!("[training]\nmixed_precision_param = {value}\n");
        read("a.toml", &toml)
            .text(key)
            .map(|text| text.map(str::to_owned))
    };
    assert_eq!(text("[\"float32\"]"), Ok(Some("float32".to_owned())));
    let refused = text("[5]").expect_err("a number");
    assert_eq!(
        refused.to_string(),
        "a.toml:2: `training.mixed_precision_param`: a list is not text"
    );
}

#[test]
fn what_nanotrons_file_leaves_out_is_its_default() {
    let of = |parallelism: &str, more: &str| {
        let yaml = format!(
            "parallelism: {{dp: 2, tp: 2, pp: 2{parallelism}}}\ntokens: {{micro_batch_size: 1, batch_accumulation_per_replica: 4, sequence_length: 2048}}\nmodel: {{model_config: {{is_llama_config: true, hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2, intermediate_size: 64, vocab_size: 256}}}}\n{more}"
        );
        imported(&read("a.yaml", &yaml))
    };
    let decided = |parallelism: &str| {
        let d = of(parallelism, "").decisions;
        (d.schedule, d.sequence_parallel, d.overlap.tensor_parallel)
    };
    assert_eq!(decided(""), (ScheduleKind::GPipe, false, false));
    let scatters = ", pp_engine: 1f1b, tp_mode: REDUCE_SCATTER";
    assert_eq!(decided(scatters), (ScheduleKind::OneFOneB, true, false));
    let overlaps = format!("{scatters}, tp_linear_async_communication: true");
    assert_eq!(decided(&overlaps), (ScheduleKind::OneFOneB, true, true));
    for (accumulates, noted) in [("false", true), ("true", false)] {
        let more = format!("optimizer: {{accumulate_grad_in_fp32: {accumulates}}}\n");
        let notes = of("", &more).notes.join("\n");
        assert_eq!(
            notes.contains("weights and states in 16 bits"),
            noted,
            "{notes}"
        );
    }
    for (stage, noted) in [(1, true), (0, false)] {
        let more = format!("optimizer: {{zero_stage: {stage}}}\n");
        let notes = of("", &more).notes.join("\n");
        let stops = "zero_stage 1: nanotron stops with NotImplementedError";
        assert_eq!(notes.contains(stops), noted, "{notes}");
    }
}

#[test]
fn what_deepspeeds_file_says_beside_the_plan_is_noted() {
    let auto = |precision: &str| {
        let json = format!("{{\"train_micro_batch_size_per_gpu\": \"auto\", {precision}}}");
        let document = read("ds_config.json", &json);
        let model = catalog::load::model("llama3-8b").expect("preset");
        let given = Given {
            model: &model,
            gpus: Some(8),
            seq_len: Some(2048),
            gpus_per_node: 8,
        };
        import(&document, &given).expect("imports").notes
    };
    let micro = "ds_config.json:1: train_micro_batch_size_per_gpu is auto: taken as one sequence per micro-batch";
    assert_eq!(auto("\"fp16\": {\"enabled\": true}"), [micro]);
    let bf16 = "ds_config.json:1: bf16.enabled is auto: taken as on";
    assert_eq!(auto("\"bf16\": {\"enabled\": \"auto\"}"), [micro, bf16]);

    for (setting, noted) in [
        ("\"zero_hpz_partition_size\": 8", true),
        ("\"zero_hpz_partition_size\": 1", false),
        ("\"zero_quantized_weights\": true", true),
        ("\"zero_quantized_gradients\": true", true),
        ("\"zero_quantized_gradients\": false", false),
    ] {
        let own = "\"reduce_bucket_size\": 40000000";
        let notes = engine(&format!("\"stage\": 3, {own}, {setting}")).notes;
        assert_eq!(notes.len(), usize::from(noted), "{setting}: {notes:?}");
    }
    for key in ["bf16_master_weights_and_grads", "bf16_optimizer_states"] {
        let notes = auto(&format!("\"bf16\": {{\"enabled\": true, \"{key}\": true}}"));
        assert!(notes.iter().any(|note| note.contains(key)), "{notes:?}");
    }
}

#[test]
fn a_file_that_sets_nothing_is_an_error() {
    for (text, name, dialect, message) in [
        (
            "",
            "a.yaml",
            Dialect::Axolotl,
            "a.yaml: `axolotl@0.19`: the file is empty; a configuration is expected",
        ),
        (
            "x = 1\n",
            "a.py",
            Dialect::Torchtitan03,
            "a.py: `torchtitan@0.3`: the file sets no key of this system; a configuration is expected",
        ),
    ] {
        let document = Document::read(text, name, Some(dialect), &|_| None).expect("well-formed");
        let found = check(&document, None).expect("schema");
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found, [message]);
    }
}

/// accelerate's FSDP reduces gradients in the type of mixed precision, whichever runtime they are predicted with.
#[test]
fn fsdp_reduces_gradients_in_the_type_of_mixed_precision() {
    let fsdp = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n";
    let replicas = "distributed_type: MULTI_GPU\n";
    for (lines, precision, runtime, want) in [
        (fsdp, "bf16", "fsdp2", Some("fp32/bf16")),
        (fsdp, "fp16", "fsdp2", Some("fp32/fp16")),
        (fsdp, "'no'", "fsdp2", None),
        (fsdp, "bf16", "hf-trainer", None),
        (replicas, "bf16", "fsdp2", None),
    ] {
        let text = format!("{lines}mixed_precision: {precision}\nnum_processes: 8\n");
        let document = read("a.yaml", &text);
        let model = catalog::load::model("llama3-8b").expect("preset");
        let given = Given {
            model: &model,
            gpus: Some(8),
            seq_len: Some(2048),
            gpus_per_node: 8,
        };
        let imported = import(&document, &given).expect("imports");
        let runtime = catalog::load::runtime(runtime).expect("preset");
        let types = imported.decisions_under(&model, &runtime).gradients;
        let found = types.map(catalog::GradientTypes::name);
        assert_eq!(found.as_deref(), want, "{text} {}", runtime.name);
    }
}

/// accelerate's file says how context-parallel ranks exchange keys and values; its default gathers them.
#[test]
fn accelerates_kind_of_context_parallelism_is_read() {
    for (line, wanted) in [
        ("", Ok(CpKind::AllGather)),
        ("allgather", Ok(CpKind::AllGather)),
        ("alltoall", Ok(CpKind::Ring)),
        ("zigzag", Err("allgather or alltoall")),
    ] {
        let key = "parallelism_config_cp_comm_strategy";
        let said = match line {
            "" => String::new(),
            kind => format!("  {key}: {kind}\n"),
        };
        let text = format!(
            "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\nparallelism_config:\n  \
             parallelism_config_dp_shard_size: 4\n  parallelism_config_cp_size: 2\n{said}"
        );
        let document = Document::read(&text, "a.yaml", None, &|_| None).expect("well-formed");
        let model = catalog::load::model("llama3-8b").expect("preset");
        let given = Given {
            model: &model,
            gpus: None,
            seq_len: Some(4096),
            gpus_per_node: 8,
        };
        match (import(&document, &given), wanted) {
            (Ok(imported), Ok(kind)) => assert_eq!(imported.decisions.cp_kind, kind, "{line}"),
            (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{error}"),
            (found, _) => panic!("{line}: {found:?}"),
        }
    }
}
