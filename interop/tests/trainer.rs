//! Files and launch scripts for Hugging Face's Trainer: what is trained, by which optimizer, on how many GPUs, under which
//! sharding. Every row is a setting that people write, with what must come of it.

use catalog::{Dispatcher, Precision, Zero};
use interop::check::check;
use interop::export::Dialect;
use interop::import::{Document, Given, ImportError, Imported, import};
use plans::Recompute;

/// accelerate's file for FSDP1 on two nodes, with this strategy.
fn accelerate(strategy: &str) -> String {
    format!(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 2\nnum_processes: 8\nfsdp_config:\n  fsdp_sharding_strategy: {strategy}\n  fsdp_activation_checkpointing: true\n"
    )
}

/// The files in the folder of a script.
fn beside(name: &str) -> Option<String> {
    match name {
        "fsdp.yaml" => Some(accelerate("FULL_SHARD")),
        "zero.yaml" => Some(
            "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\ndeepspeed_config:\n  zero_stage: 2\n  gradient_accumulation_steps: 3\n"
                .to_owned(),
        ),
        "ds3.json" => Some(
            "{\"bf16\": {\"enabled\": \"auto\"}, \"train_micro_batch_size_per_gpu\": \"auto\", \"train_batch_size\": \"auto\", \"gradient_accumulation_steps\": \"auto\", \"zero_optimization\": {\"stage\": 3}}"
                .to_owned(),
        ),
        _ => None,
    }
}

fn read(name: &str, text: &str, gpus: Option<u64>) -> Result<(Document, Imported), ImportError> {
    let document = Document::read(text, name, None, &beside)?;
    let model = catalog::load::model("llama3-8b").expect("preset");
    let given = Given {
        model: &model,
        gpus,
        seq_len: Some(2048),
        gpus_per_node: 4,
    };
    let imported = import(&document, &given)?;
    Ok((document, imported))
}

/// A YAML file of arguments of Hugging Face's Trainer, ending with these lines.
fn arguments(lines: &str) -> Result<Imported, ImportError> {
    let text = format!("per_device_train_batch_size: 2\nbf16: true\nmax_length: 2048\n{lines}\n");
    read("a.yaml", &text, Some(8)).map(|(_, imported)| imported)
}

/// What Megatron Bridge and mcore_adapter make of LLaMA-Factory's file.
#[test]
fn adapters_and_dispatchers_are_read_for_llama_factorys_megatron() {
    let read = |lines: &str| {
        let text = format!(
            "model_name_or_path: meta-llama/Llama-3.1-8B\nper_device_train_batch_size: 1\ncutoff_len: 2048\nbf16: true\ntensor_model_parallel_size: 2\n{lines}\n"
        );
        read("a.yaml", &text, Some(8)).map(|(_, imported)| imported)
    };
    let all = "rank=8,alpha=16,modules=q+k+v+proj+fc1+fc2";
    for (lines, adapters) in [
        ("stage: sft\nfinetuning_type: lora", Some(all)),
        (
            "stage: sft\nlora_target: q_proj,v_proj\nlora_dropout: 0.1",
            Some(all),
        ),
        ("stage: sft\nfinetuning_type: full", None),
        ("stage: pt\nfinetuning_type: lora", None),
    ] {
        let found = read(lines).expect(lines).adapters.map(|of| of.to_string());
        assert_eq!(found.as_deref(), adapters, "{lines}");
    }
    for (lines, key) in [
        ("stage: dpo", "stage"),
        ("stage: sft\nfinetuning_type: freeze", "finetuning_type"),
    ] {
        let refused = read(lines).expect_err(lines).to_string();
        assert!(refused.contains(&format!("`{key}`")), "{refused}");
    }
    let lines = "stage: sft\nfinetuning_type: full\nexpert_model_parallel_size: 2\nmoe_token_dispatcher_type: alltoall";
    let found = read(lines).expect(lines).decisions.dispatcher;
    assert_eq!(found, Some(Dispatcher::AllToAll));
}

/// A shell script that starts `train.py` with this launch command, and gives it arguments of the Trainer, these last.
fn script(launch: &str, more: &str) -> Result<(Document, Imported), ImportError> {
    let text = format!(
        "#!/bin/bash\n{launch} train.py --model_max_length 2048 --per_device_train_batch_size 4 {more}\n"
    );
    read("a.sh", &text, None)
}

#[test]
fn adapters_are_read_or_the_file_is_refused() {
    let lora = "use_peft: true\nlora_r: 16\nlora_alpha: 64";
    for (lines, adapters) in [
        (
            "lora_target_modules: all-linear",
            "rank=16,alpha=64,modules=q+k+v+proj+fc1+fc2,dropout=0.05",
        ),
        (
            "lora_target_modules: [q_proj, o_proj]\nlora_dropout: 0.0",
            "rank=16,alpha=64,modules=q+proj",
        ),
        ("", "rank=16,alpha=64,modules=q+v,dropout=0.05"),
    ] {
        let read = arguments(&format!("{lora}\n{lines}")).expect(lines);
        assert_eq!(
            read.adapters.map(|of| of.to_string()).as_deref(),
            Some(adapters),
            "{lines}"
        );
    }
    let (_, read) = script("torchrun --nproc_per_node 8", "--use_peft --lora_r 8").expect("LoRA");
    assert_eq!(read.adapters.map(|of| of.rank), Some(8));
    for lines in ["use_peft: false\nlora_r: 16", "learning_rate: 1e-5"] {
        assert_eq!(arguments(lines).expect(lines).adapters, None);
    }
    for (lines, key) in [
        ("use_peft: true\nload_in_4bit: true", "load_in_4bit"),
        ("use_peft: true\nuse_dora: true", "use_dora"),
        ("lora_r: 16", "lora_r"),
        ("unfrozen_parameters: [lm_head.*]", "unfrozen_parameters"),
        ("rl: dpo", "rl"),
        (
            "use_peft: true\nlora_modules_to_save: [lm_head]",
            "lora_modules_to_save",
        ),
    ] {
        let refused = arguments(lines).expect_err(lines).to_string();
        assert!(refused.contains(&format!("`{key}`")), "{refused}");
    }
}

#[test]
fn settings_that_change_the_answer_are_read_or_noted() {
    let axolotl = |lines: &str| {
        let text = format!(
            "base_model: a/llama3-8b\nsequence_len: 2048\nbf16: auto\nfsdp_config: {{fsdp_version: 2}}\n{lines}\n"
        );
        read("a.yaml", &text, Some(8)).expect(lines).1
    };
    for (read, note) in [
        (
            arguments("optim: adafactor"),
            "optim adafactor is planned as AdamW",
        ),
        (arguments("optim: sgd"), "optim sgd is planned as AdamW"),
        (
            arguments("optim: galore_adamw"),
            "optim galore_adamw is planned as AdamW",
        ),
        (
            Ok(axolotl("")),
            "bf16 auto: no plan can express weights and states in 16 bits alone",
        ),
        (
            Ok(axolotl("optimizer: muon")),
            "optimizer muon is planned as AdamW",
        ),
        (
            arguments("cutoff_len: 2048\nfinetuning_type: full\npure_bf16: true"),
            "pure_bf16 true",
        ),
        (arguments("packing: true"), "packing: the file does not say"),
        (
            arguments("use_liger_kernel: true"),
            "use_liger_kernel: not planned for; the prediction shows more memory and time",
        ),
        (
            arguments("attn_implementation: eager"),
            "attn_implementation: not planned for; the prediction shows less memory",
        ),
        (
            arguments(
                "activation_checkpointing: true\nactivation_checkpointing_kwargs: {offload: true}",
            ),
            "activation_checkpointing_kwargs.offload: not planned for; the prediction shows more memory",
        ),
        (
            arguments("cutoff_len: 2048\nfinetuning_type: full\nuse_unsloth_gc: true"),
            "use_unsloth_gc: not planned for; the prediction shows more memory",
        ),
        (
            Ok(axolotl("liger_rope: true\nliger_rms_norm: true")),
            "liger_rms_norm, liger_rope: not planned for",
        ),
        (
            Ok(axolotl("liger_fused_linear_cross_entropy: true")),
            "liger_fused_linear_cross_entropy: not planned for; the prediction shows more memory",
        ),
        (Ok(axolotl("tiled_mlp: true")), "tiled_mlp: not planned for"),
        (
            Ok(axolotl("gradient_checkpointing: offload")),
            "gradient_checkpointing: not planned for; the prediction shows more memory",
        ),
        (
            Ok(axolotl(
                "gradient_checkpointing: true\nactivation_offloading: true",
            )),
            "activation_offloading: not planned for; the prediction shows more memory",
        ),
    ] {
        let notes = read.expect(note).notes;
        assert!(
            notes.iter().any(|said| said.contains(note)),
            "{note}: {notes:?}"
        );
    }
    for name in [
        "adamw_torch",
        "adamw_torch_fused",
        "paged_adamw_32bit",
        "adamw_bnb_8bit",
    ] {
        assert_eq!(
            arguments(&format!(
                "optim: {name}\nactivation_offloading: false\nattn_implementation: sdpa"
            ))
            .expect(name)
            .notes,
            Vec::<String>::new()
        );
    }
    for fsdp in [
        "fsdp: full_shard auto_wrap offload",
        "fsdp: true\nfsdp_config: {version: 2, cpu_offload: true}",
    ] {
        let offload = arguments(fsdp).expect(fsdp).decisions.offload;
        assert_eq!(offload, Some(catalog::Offload::Parameters), "{fsdp}");
    }
    assert_eq!(axolotl("sequence_parallel_degree: 4").decisions.cp, 4);
}

#[test]
fn recomputation_is_read() {
    let every = |n: u64| {
        format!(
            "gradient_checkpointing: true\ngradient_checkpointing_kwargs: {{every_n_layers: {n}}}"
        )
    };
    for (lines, recompute) in [
        ("", Recompute::None),
        ("gradient_checkpointing: true", Recompute::Full),
        ("activation_checkpointing: true", Recompute::Full),
        (
            "activation_checkpointing: false\ngradient_checkpointing: true",
            Recompute::None,
        ),
        (
            "fsdp: full_shard\nfsdp_config: {activation_checkpointing: true}",
            Recompute::Full,
        ),
        (&every(1), Recompute::Full),
        (&every(3), Recompute::Layers(11)),
        ("cutoff_len: 2048\nfinetuning_type: full", Recompute::Full),
        (
            "cutoff_len: 2048\nfinetuning_type: full\ndisable_gradient_checkpointing: true",
            Recompute::None,
        ),
    ] {
        let read = arguments(lines).expect(lines);
        assert_eq!(read.decisions.recompute, recompute, "{lines}");
    }
    // With adapters axolotl keeps all activations in host memory and computes none again.
    let text = "base_model: a/llama3-8b\nsequence_len: 2048\nbf16: auto\nadapter: lora\nlora_r: 8\nlora_target_linear: true\ngradient_checkpointing: true\nactivation_offloading: legacy\n";
    let (_, read) = read("a.yaml", text, Some(8)).expect("imports");
    let d = &read.decisions;
    assert_eq!((d.recompute, d.offload_layers), (Recompute::None, 31));
    assert_eq!(read.notes, Vec::<String>::new());
}

#[test]
fn runtimes_are_those_of_the_engine() {
    let factory =
        "cutoff_len: 2048\nper_device_train_batch_size: 1\nbf16: true\nfinetuning_type: full\n";
    for (lines, runtime) in [
        ("", "hf-trainer"),
        ("deepspeed: ds3.json\n", "hf-deepspeed"),
        ("tensor_model_parallel_size: 2\n", "megatron-core"),
    ] {
        let (document, read) = read("a.yaml", &format!("{factory}{lines}"), Some(8)).expect(lines);
        assert_eq!(read.runtime(&document), runtime, "{lines}");
    }
}

#[test]
fn bare_booleans_are_on() {
    let more = "--bf16 --gradient_checkpointing --tf32 --fsdp \"full_shard auto_wrap\"";
    let (_, read) = script("torchrun --nproc_per_node 8", more).expect("imports");
    let d = &read.decisions;
    assert_eq!((d.recompute, d.zero), (Recompute::Full, Zero::Z3));
    assert_eq!(read.workload.precision, Precision::Bf16);
}

#[test]
fn launchers_say_how_many_gpus_they_start() {
    let engine = "--bf16 --deepspeed ds3.json --gradient_accumulation_steps 8";
    for (launch, more, gpus) in [
        ("torchrun --nproc_per_node 8", "", Ok(8)),
        ("torchrun --nproc_per_node=8 --nnodes=4", engine, Ok(32)),
        ("deepspeed --num_gpus 8", engine, Ok(8)),
        ("deepspeed --num_gpus=8 --num_nodes 4", engine, Ok(32)),
        ("accelerate launch --num_processes 16", "", Ok(16)),
        ("accelerate launch --config_file fsdp.yaml", "", Ok(8)),
        (
            "accelerate launch --config_file fsdp.yaml --num_processes 4",
            "",
            Ok(4),
        ),
        (
            "torchrun --nproc_per_node 8 --nnodes $NODES",
            "",
            Err("a.sh:2: `--nnodes`: `$NODES` is not known here; give --gpus"),
        ),
        (
            "torchrun --nproc_per_node gpu",
            engine,
            Err("a.sh:2: `--nproc_per_node`: `gpu` is not known here; give --gpus"),
        ),
        (
            "accelerate launch --num_processes $N --config_file fsdp.yaml",
            "",
            Err("a.sh:2: `--num_processes`: `$N` is not known here; give --gpus"),
        ),
        ("python", "", Err("give --gpus")),
        ("deepspeed --include localhost:0,1,2,3", engine, Ok(4)),
        ("deepspeed --include a:0,1@b:0,1", engine, Ok(4)),
        ("CUDA_VISIBLE_DEVICES=0,1 deepspeed", engine, Ok(2)),
        ("CUDA_VISIBLE_DEVICES=0,1 python", "", Err("give --gpus")),
        (
            "#SBATCH --nodes=4 --gpus-per-node=8\nsrun torchrun --nproc_per_node 8 --nnodes $SLURM_NNODES",
            "",
            Ok(32),
        ),
        (
            "#SBATCH -N 2\n#SBATCH --gres=gpu:h100:4 # all of them\nsrun python",
            engine,
            Ok(8),
        ),
        (
            "#SBATCH --nodes 2\n\n#SBATCH --ntasks-per-node=8\nsrun python",
            engine,
            Ok(16),
        ),
        (
            "#SBATCH --gpus 16\naccelerate launch --num_processes $SLURM_GPUS",
            "",
            Ok(16),
        ),
        (
            "#SBATCH --nodes=1-4\ntorchrun --nproc_per_node 8 --nnodes $SLURM_NNODES",
            "",
            Err("`$SLURM_NNODES` is not known here; give --gpus"),
        ),
        // A job may have more devices than its launcher uses.
        ("#SBATCH --gpus=8\ntorchrun --nproc_per_node 4", "", Ok(4)),
        (
            "#SBATCH --nodes=4\nsrun torchrun --nproc_per_node 8",
            "",
            Ok(8),
        ),
        ("#SBATCH -N 2 --gpus 16\nsrun python", engine, Ok(16)),
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun", "", Err("give --gpus")),
        // Slurm reads no more options after the first command.
        (
            "true\n#SBATCH --nodes=4\ntorchrun --nproc_per_node 8",
            "",
            Ok(8),
        ),
    ] {
        match (script(launch, more), gpus) {
            (Ok((_, read)), Ok(gpus)) => assert_eq!(read.workload.gpus, gpus, "{launch}"),
            (Err(error), Err(said)) => {
                assert!(error.to_string().contains(said), "{launch}: {error}")
            }
            (read, _) => panic!("{launch}: {read:?}"),
        }
    }
}

#[test]
fn accelerates_file_is_read_beside_the_script_that_names_it() {
    let (document, read) =
        script("accelerate launch --config_file fsdp.yaml", "").expect("imports");
    let d = &read.decisions;
    assert_eq!(
        (d.zero, d.dp_shard, d.recompute),
        (Zero::Z3, 8, Recompute::Full)
    );
    assert_eq!(
        (read.workload.precision, read.runtime(&document)),
        (Precision::Bf16, "hf-trainer")
    );

    let (document, read) =
        script("accelerate launch --config_file zero.yaml", "").expect("imports");
    assert_eq!(
        (read.decisions.zero, read.decisions.num_micro_batches),
        (Zero::Z2, 1)
    );
    assert_eq!(read.runtime(&document), "hf-deepspeed");

    let options = "accelerate launch --config_file fsdp.yaml --fsdp_sharding_strategy HYBRID_SHARD --mixed_precision fp16";
    let (_, read) = script(options, "").expect("imports");
    assert_eq!(
        (read.decisions.dp_shard, read.decisions.dp_replicate),
        (4, 2)
    );
    assert_eq!(read.workload.precision, Precision::Fp16);

    let refused = script("accelerate launch --config_file no.yaml", "").expect_err("no such file");
    assert_eq!(
        refused.to_string(),
        "a.sh:2: `--config_file`: `no.yaml` cannot be read, from the folder of the script or from here"
    );
}

#[test]
fn strategies_of_fsdp_are_read() {
    for (name, number, zero, reshard, ranks) in [
        ("FULL_SHARD", 1, Zero::Z3, true, (8, 1)),
        ("SHARD_GRAD_OP", 2, Zero::Z3, false, (8, 1)),
        ("NO_SHARD", 3, Zero::Z0, false, (1, 8)),
        ("HYBRID_SHARD", 4, Zero::Z3, true, (4, 2)),
        ("HYBRID_SHARD_ZERO2", 5, Zero::Z3, false, (4, 2)),
    ] {
        for strategy in [name.to_owned(), number.to_string()] {
            let (_, read) = read("a.yaml", &accelerate(&strategy), None).expect(name);
            let d = &read.decisions;
            assert_eq!((d.zero, d.reshard_after_forward), (zero, reshard), "{name}");
            assert_eq!((d.dp_shard, d.dp_replicate), ranks, "{name}");
        }
        let d = arguments(&format!("fsdp: {} auto_wrap", name.to_lowercase()))
            .expect(name)
            .decisions;
        assert_eq!(
            (d.zero, d.reshard_after_forward, d.dp_shard),
            (zero, reshard, ranks.0),
            "{name}"
        );
    }
    let refused = read("a.yaml", &accelerate("FULL"), None).expect_err("no such strategy");
    assert!(
        refused.to_string().contains("is not FULL_SHARD"),
        "{refused}"
    );
}

/// Settings with which a system stops when it starts, or in its first step, are found.
#[test]
fn what_ends_a_run_is_found() {
    let deepspeed = |more: &str| {
        format!("{{\"train_batch_size\": 8, \"bf16\": {{\"enabled\": true}}, {more}}}")
    };
    let held = "\"data_types\": {\"grad_accum_dtype\": \"fp32\"}";
    let axolotl = |more: &str| format!("base_model: x\nlearning_rate: 1e-5\n{more}\n");
    let packed = "fsdp_config: {fsdp_version: 2}\ncontext_parallel_size: 2\nmicro_batch_size: 1\n\
                  attn_implementation: flash_attention_2\nring_attn_func";
    let trainer = |more: &str| format!("{{\"per_device_train_batch_size\": 1, {more}}}");
    let fsdp = "\"fsdp\": true, \"optim\": \"adamw";
    for (text, want) in [
        (
            deepspeed(held),
            Some("must be bf16 at zero_optimization.stage 0"),
        ),
        (
            deepspeed(&format!("\"zero_optimization\": {{\"stage\": 1}}, {held}")),
            None,
        ),
        (
            deepspeed("\"communication_data_type\": \"bfp16\""),
            Some("did you mean `bf16`"),
        ),
        (axolotl("optimizer: adamw_bnb_8bit"), None),
        (
            axolotl(
                "optimizer: adamw_bnb_8bit\nfsdp_version: 2\nfsdp_config: {offload_params: false}",
            ),
            Some("use adamw_torch_8bit"),
        ),
        (
            axolotl(&format!("{packed}: varlen_llama3")),
            Some("use batch_ring"),
        ),
        (axolotl(&format!("{packed}: batch_ring")), None),
        (
            axolotl(&format!("{packed}: batch_ring\nsample_packing: true")),
            Some("use varlen_llama3"),
        ),
        (
            trainer(&format!("{fsdp}_bnb_8bit\"")),
            Some("use adamw_torch_8bit"),
        ),
        (trainer(&format!("{fsdp}_torch_8bit\"")), None),
    ] {
        let name = if text.starts_with('{') {
            "a.json"
        } else {
            "a.yaml"
        };
        let document = Document::read(&text, name, None, &|_| None).expect("well-formed");
        let found = check(&document, None).expect("schema");
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        let found = found.join("\n");
        match want {
            Some(want) => assert!(found.contains(want), "{text}: {found}"),
            None => assert_eq!(found, "", "{text}"),
        }
    }
}

/// Each system's own defaults for settings that a file leaves out.
#[test]
fn what_a_file_leaves_out_is_the_systems_default() {
    let model = catalog::load::model("llama3-8b").expect("preset");
    let axolotl = "base_model: a/llama3-8b\n";
    let factory = "finetuning_type: full\nper_device_train_batch_size: 1\nbf16: true\n";
    for (base, lines, seq, expected) in [
        (axolotl, "", None, (512, Precision::Bf16)),
        (axolotl, "", Some(1024), (1024, Precision::Bf16)),
        (axolotl, "sequence_len: 64", Some(9), (64, Precision::Bf16)),
        (axolotl, "fp16: true", None, (512, Precision::Fp16)),
        (
            axolotl,
            "bf16: auto\nfp16: true",
            None,
            (512, Precision::Fp16),
        ),
        (axolotl, "bf16: false", None, (512, Precision::Fp32)),
        (axolotl, "bf16: null", None, (512, Precision::Fp32)),
        (axolotl, "fp8: true", None, (512, Precision::Fp8)),
        (axolotl, "deepspeed: ds3.json", None, (512, Precision::Bf16)),
        (factory, "", None, (2048, Precision::Bf16)),
        (
            factory,
            "stage: pt\npacking: true",
            None,
            (2047, Precision::Bf16),
        ),
        (
            factory,
            "deepspeed: ds3.json\nfp8: true",
            None,
            (2048, Precision::Fp8),
        ),
    ] {
        let text = format!("{base}{lines}\n");
        let document = Document::read(&text, "a.yaml", None, &beside).expect("well-formed");
        let given = Given {
            model: &model,
            gpus: Some(8),
            seq_len: seq,
            gpus_per_node: 8,
        };
        let read = import(&document, &given).expect(lines);
        let found = (read.workload.seq_len, read.workload.precision);
        assert_eq!(found, expected, "{text}");
        // DeepSpeed's engine holds gradients in 16 bits around 8-bit products.
        let engine = lines.contains("ds3");
        assert_eq!(read.decisions.gradients.is_some(), engine, "{text}");
    }
}

/// LLaMA-Factory's command takes options or a file; scripts may give a program neither.
#[test]
fn programs_are_found_with_their_options() {
    let options = "--stage sft --finetuning_type full --do_train --cutoff_len 1024 --per_device_train_batch_size 2 --bf16";
    let script = format!("CUDA_VISIBLE_DEVICES=0,1 llamafactory-cli train \\\n  {options}\n");
    let (document, imported) = read("a.sh", &script, None).expect("imports");
    assert_eq!(document.dialect, Dialect::LlamaFactory);
    let w = &imported.workload;
    assert_eq!((w.gpus, w.seq_len, w.precision), (2, 1024, Precision::Bf16));
    for (text, message) in [
        (
            "set -x\nllamafactory-cli train sft.yaml\n",
            "a.sh:2: the settings of `train` are in `sft.yaml`; give that file",
        ),
        (
            "accelerate launch --config_file a.yaml src/train.py b.yaml\n",
            "a.sh:1: the settings of `src/train.py` are in `b.yaml`; give that file",
        ),
        (
            "accelerate launch --config_file a.yaml train.py\n",
            "a.sh:1: `train.py` is given no `--option`: its settings are not in this script",
        ),
    ] {
        let refused = read("a.sh", text, None).expect_err(text);
        assert_eq!(refused.to_string(), message);
    }
    let ray = "ray_num_workers: 4\nfinetuning_type: full\nper_device_train_batch_size: 1\n";
    let (_, imported) = read("a.yaml", ray, None).expect("imports");
    assert_eq!(imported.workload.gpus, 4);
    let (_, imported) = read("a.yaml", ray, Some(8)).expect("imports");
    assert_eq!(imported.workload.gpus, 8);
}
