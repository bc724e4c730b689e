//! Exports of adapters, documents and hybrid models: they are written, or refused by name.

use catalog::{Packing, Precision};
use interop::check::check;
use interop::export::Dialect;
use interop::import::{Given, import};

use crate::{exported, exported_for, parse, read, scene};

/// Adapters are written and read back by the systems whose files have them; the others refuse the model by name.
#[test]
fn adapters_are_written_or_refused() {
    for (adapters, layers) in [
        ("rank=16,alpha=32", "gate_proj"),
        ("rank=8,alpha=16,modules=q+v,dropout=0.05", "v_proj"),
    ] {
        let (model, workload) = scene("llama3-8b", 8, Precision::Bf16);
        let adapters = adapters.parse().expect("adapters");
        let model = model.with_adapters(Some(adapters)).expect("adapted");
        let plan = parse("dp=8,mbs=1,zero=0", &model, &workload).expect("a plan");
        for &dialect in Dialect::ALL {
            let written = exported(&plan, &model, &workload, dialect, None);
            if !matches!(dialect, Dialect::Axolotl | Dialect::LlamaFactory) {
                let error = written.expect_err("refused").to_string();
                assert!(error.contains("adapters"), "{error}");
                continue;
            }
            let file = &written.expect("written").files[0];
            assert!(file.text.contains(layers), "{}", file.text);
            let document = read(&file.text, &file.name, Some(dialect));
            let given = Given {
                model: &model,
                gpus: Some(8),
                seq_len: None,
                gpus_per_node: 8,
            };
            let imported = import(&document, &given).expect("imports");
            assert_eq!(imported.adapters, Some(adapters), "{}", dialect.name());
        }
    }
}

/// Packing within documents is written by systems that have a switch for it, and left to the user's script by those that
/// run one; padding likewise. Packing across documents changes no file. What a system never does is refused.
#[test]
fn documents_are_written_or_refused() {
    let (model, plain) = scene("llama3-8b", 8, Precision::Bf16);
    let plan = parse("dp=8,mbs=1,zero=0", &model, &plain).expect("a plan");
    let text = |packing, dialect| {
        let lengths = "512:0.7,4k:0.3".parse().expect("lengths");
        let workload = plain.of_documents(lengths, packing).expect("documents");
        let written = exported(&plan, &model, &workload, dialect, None);
        written.map(|exported| (exported.files[0].text.clone(), exported.notes.join(" ")))
    };
    for &dialect in Dialect::ALL {
        let today = exported(&plan, &model, &plain, dialect, None);
        let same = today.map(|exported| exported.files[0].text.clone());
        let across = text(Packing::Across, dialect).map(|(text, _)| text);
        let within = text(Packing::Within, dialect);
        let switch = match dialect {
            Dialect::MegatronLm => "--dataloader-inter-document-masking",
            Dialect::MegatronBridge => "offline_packing_specs.packed_sequence_size = 4096",
            Dialect::Axolotl => "sample_packing: true",
            Dialect::LlamaFactory => "neat_packing: true",
            Dialect::Torchtitan03 | Dialect::TorchtitanMain => {
                assert_eq!(within.map(|(text, _)| text), same, "{}", dialect.name());
                continue;
            }
            Dialect::Torchtitan02 | Dialect::Nanotron => "",
            _ => {
                let (_, notes) = within.expect("written");
                assert!(notes.contains("keep attention within"), "{notes}");
                let (_, notes) = text(Packing::Padded, dialect).expect("written");
                assert!(notes.contains("must pad every document"), "{notes}");
                continue;
            }
        };
        if dialect != Dialect::Axolotl {
            assert_eq!(across, same, "{}", dialect.name());
        }
        if switch.is_empty() {
            continue;
        }
        let (text, _) = within.expect("written");
        assert!(text.contains(switch), "{text}");
        let findings = check(&read(&text, "file", Some(dialect)), Some(&model));
        assert_eq!(findings.expect("schema"), [], "{text}");
    }
}

/// A packing that a system never does is refused, with the one that it does.
#[test]
fn packings_that_a_system_never_does_are_refused() {
    use Dialect::{Axolotl, Nanotron, Torchtitan02, Torchtitan03, TorchtitanMain};
    use Packing::{Across, Padded, Within};
    let advised = |packing: Packing| format!("plan with --packing {packing}");
    for (name, dialect, packing, wanted) in [
        ("llama3-8b", Torchtitan03, Across, advised(Within)),
        ("llama3-8b", TorchtitanMain, Across, advised(Within)),
        (
            "llama3-8b",
            TorchtitanMain,
            Padded,
            "fills every sequence".to_owned(),
        ),
        ("llama3-8b", Torchtitan02, Within, advised(Across)),
        (
            "llama3-8b",
            Torchtitan02,
            Padded,
            "fills every sequence".to_owned(),
        ),
        ("deepseek-v3", Torchtitan02, Across, advised(Within)),
        ("llama3-8b", Axolotl, Across, advised(Within)),
        ("llama2-7b", Nanotron, Within, "have no switch".to_owned()),
    ] {
        let (model, plain) = scene(name, 8, Precision::Bf16);
        let plan = parse("zero=3,mbs=1", &model, &plain).expect("a plan");
        let lengths = "512:0.7,4k:0.3".parse().expect("lengths");
        let workload = plain.of_documents(lengths, packing).expect("documents");
        let error = exported(&plan, &model, &workload, dialect, None).expect_err("refused");
        let error = error.to_string();
        let said = error
            .lines()
            .any(|line| line.contains(&format!("packing={packing}")) && line.contains(&wanted));
        assert!(said, "{} {packing}: {error}", dialect.name());
    }
}

/// torchtitan trains prediction modules of undivided models only.
#[test]
fn layouts_that_torchtitan_lacks_beside_prediction_modules_are_not_written() {
    for (strategy, wanted) in [
        (
            "cp=2,cp_kind=all_gather,zero=3",
            "no context parallelism beside multi-token-prediction modules; nearest: cp=1",
        ),
        (
            "pp=2,zero=3",
            "no pipeline parallelism beside multi-token-prediction modules; nearest: pp=1",
        ),
    ] {
        let (model, workload) = scene("deepseek-v3", 8, Precision::Bf16);
        let plan = parse(strategy, &model, &workload).expect("a plan");
        for dialect in [Dialect::Torchtitan03, Dialect::TorchtitanMain] {
            let refused = exported(&plan, &model, &workload, dialect, None).expect_err("refused");
            assert!(refused.to_string().contains(wanted), "{refused}");
        }
    }
}

/// A model with prediction modules goes to systems that leave them out too, which is said.
#[test]
fn modules_that_a_target_leaves_out_are_noted() {
    for (dialect, noted) in [
        (Dialect::Transformers, true),
        (Dialect::Accelerate, true),
        (Dialect::DeepSpeed, true),
        (Dialect::TorchtitanMain, false),
        (Dialect::MegatronLm, false),
    ] {
        let (model, workload) = scene("deepseek-v3", 8, Precision::Bf16);
        let zero = if dialect == Dialect::MegatronLm { 1 } else { 3 };
        let plan = parse(&format!("zero={zero},mbs=1"), &model, &workload).expect("a plan");
        let written = exported(&plan, &model, &workload, dialect, None);
        let notes = written.unwrap_or_else(|e| panic!("{e}")).notes;
        let found = notes
            .iter()
            .any(|note| note.contains("does not train the model's multi-token-prediction modules"));
        assert_eq!(found, noted, "{}: {notes:?}", dialect.name());
    }
    // These refuse the model, but not for its prediction modules.
    for dialect in [Dialect::Torchtitan02, Dialect::Nanotron] {
        let (model, workload) = scene("deepseek-v3", 8, Precision::Bf16);
        let plan = parse("zero=1,mbs=1", &model, &workload).expect("a plan");
        let refused = exported(&plan, &model, &workload, dialect, None).expect_err("refused");
        let refused = refused.to_string();
        assert!(!refused.contains("mtp_layers"), "{refused}");
    }
}

/// Attention with sinks or a window goes to Megatron's systems only with the kinds of context parallelism that Transformer Engine
/// runs with it, whichever runtime the plan was predicted for.
#[test]
fn context_parallelism_that_transformer_engine_refuses_is_not_written() {
    for (name, strategy, wanted) in [
        (
            "mistral-7b-v0.1",
            "cp=2,cp_kind=ring,zero=1",
            "nearest: cp_kind=all_gather",
        ),
        ("mistral-7b-v0.1", "cp=2,cp_kind=all_gather,zero=1", ""),
        ("mistral-7b-v0.1", "cp=2,cp_kind=all_to_all,zero=1", ""),
        ("mistral-7b-v0.1", "zero=1", ""),
        (
            "gpt-oss-20b",
            "cp=2,cp_kind=ring,zero=1",
            "nearest: cp_kind=all_to_all",
        ),
        (
            "gpt-oss-20b",
            "cp=2,cp_kind=all_gather,zero=1",
            "nearest: cp_kind=all_to_all",
        ),
        ("gpt-oss-20b", "cp=2,cp_kind=all_to_all,zero=1", ""),
        ("llama3-8b", "cp=2,cp_kind=ring,zero=1", ""),
    ] {
        let (model, workload) = scene(name, 8, Precision::Bf16);
        let plan = parse(strategy, &model, &workload).expect("a plan");
        for dialect in [Dialect::MegatronLm, Dialect::MegatronBridge] {
            let written = exported(&plan, &model, &workload, dialect, None);
            let said = match &written {
                Ok(_) => String::new(),
                Err(error) => error.to_string(),
            };
            let right = said.contains(wanted) && said.is_empty() == wanted.is_empty();
            assert!(right, "{} {name} {strategy}: {said}", dialect.name());
        }
    }
}

/// Types in the files, notes or refusals for Hugging Face's systems.
#[test]
fn types_are_those_that_the_systems_can_run() {
    use Dialect::{Accelerate, Axolotl, DeepSpeed, Transformers};
    for (name, strategy, precision, dialect, want) in [
        (
            "llama3-8b",
            "zero=3,optim_states=8bit_moments",
            Precision::Bf16,
            Axolotl,
            "adamw_torch_8bit",
        ),
        (
            "llama3-8b",
            "zero=3,optim_states=8bit_moments",
            Precision::Bf16,
            Transformers,
            "adamw_torch_8bit",
        ),
        (
            "llama3-8b",
            "zero=0,optim_states=8bit_moments",
            Precision::Bf16,
            Transformers,
            "adamw_bnb_8bit",
        ),
        (
            "llama3-8b",
            "zero=0",
            Precision::Bf16,
            Transformers,
            "\"dtype\": \"float32\"",
        ),
        (
            "llama3-8b",
            "zero=3",
            Precision::Bf16,
            Axolotl,
            "held in bf16",
        ),
        (
            "llama3-8b",
            "zero=3",
            Precision::Fp16,
            Axolotl,
            "precision fp16",
        ),
        (
            "llama3-8b",
            "zero=0,grad_dtype=fp32/bf16",
            Precision::Bf16,
            DeepSpeed,
            "nearest: grad_dtype=bf16",
        ),
        (
            "gpt-oss-20b",
            "zero=3",
            Precision::Bf16,
            Axolotl,
            "dequantize: true",
        ),
        (
            "gpt-oss-20b",
            "zero=3",
            Precision::Bf16,
            Accelerate,
            "Mxfp4Config(dequantize=True)",
        ),
    ] {
        let (model, workload) = scene(name, 8, precision);
        let plan = parse(strategy, &model, &workload).expect("a plan");
        let said = match exported(&plan, &model, &workload, dialect, None) {
            Ok(exported) => exported.files[0].text.clone() + &exported.notes.join("\n"),
            Err(error) => error.to_string(),
        };
        assert!(said.contains(want), "{} {strategy}: {said}", dialect.name());
    }
}

/// Hybrid models go to systems whose files only name the model, on whole layers; the others refuse them by name.
#[test]
fn hybrids_are_named_or_refused() {
    for name in ["nemotron-h-8b", "qwen3-next-80b-a3b"] {
        let (model, workload) = scene(name, 8, Precision::Bf16);
        let plan = parse("dp=8,mbs=1,zero=1", &model, &workload).expect("a plan");
        for dialect in [Dialect::MegatronLm, Dialect::Torchtitan03, Dialect::VeScale] {
            let error = exported(&plan, &model, &workload, dialect, None).expect_err("refused");
            assert!(error.to_string().contains("model hybrid"), "{error}");
        }
        let split = parse("tp=2,dp=4,mbs=1,zero=1", &model, &workload).expect("a plan");
        let error = exported(&split, &model, &workload, Dialect::DeepSpeed, None);
        let error = error.expect_err("refused").to_string();
        assert!(error.contains("tp=2"), "{error}");
    }
}

/// torchtitan's loss runs over eight chunks of a rank's tokens: of every sequence in 0.3, of all sequences in main. 0.2 has no chunks.
#[test]
fn sequences_that_torchtitans_loss_cannot_divide_are_refused() {
    let (model, _) = scene("llama3-8b", 8, Precision::Bf16);
    for (sequence, strategy, taken) in [
        (4096, "zero=3,mbs=1", [true, true, true]),
        (4100, "zero=3,mbs=1", [true, false, false]),
        (4100, "zero=3,mbs=2", [true, false, true]),
        (
            4104,
            "zero=3,mbs=1,cp=2,cp_kind=all_gather",
            [true, false, false],
        ),
    ] {
        let workload = catalog::Workload::new(catalog::WorkloadSizes {
            gpus: 8,
            seq_len: sequence,
            global_batch: 256,
            precision: Precision::Bf16,
        })
        .expect("a workload");
        let plan = parse(strategy, &model, &workload).expect("a plan");
        let dialects = ["0.2", "0.3", "main"].map(|version| {
            let dialect = Dialect::parse(&format!("torchtitan@{version}")).expect("a dialect");
            exported(&plan, &model, &workload, dialect, None).is_ok()
        });
        assert_eq!(dialects, taken, "{sequence} tokens, {strategy}");
    }
}

/// For a file of torchtitan, `import` picks the preset of its version and of what it compiles.
#[test]
fn files_of_torchtitan_are_predicted_with_their_versions_preset() {
    let (model, workload) = scene("llama3-8b", 8, Precision::Bf16);
    let plan = parse("zero=3,mbs=1", &model, &workload).expect("a plan");
    for (planned, version, expected) in [
        ("torchtitan", "0.2", "torchtitan"),
        ("torchtitan-compile", "0.2", "torchtitan-compile"),
        ("torchtitan-compile-2025", "0.2", "torchtitan-compile-2025"),
        ("torchtitan-2026", "0.3", "torchtitan-2026"),
        ("torchtitan-compile-2026", "0.3", "torchtitan-compile-2026"),
        ("torchtitan-compile-2026", "main", "torchtitan-compile-2026"),
    ] {
        let dialect = Dialect::parse(&format!("torchtitan@{version}")).expect("a dialect");
        let written = exported_for(planned, &plan, &model, &workload, dialect, None);
        let file = &written.expect("taken").files[0];
        let document = read(&file.text, &file.name, None);
        let given = Given {
            model: &model,
            gpus: Some(workload.gpus),
            seq_len: None,
            gpus_per_node: 8,
        };
        let imported = import(&document, &given).expect("imports");
        assert_eq!(imported.runtime(&document), expected, "{version}");
    }
}
