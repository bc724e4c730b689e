//! What is trained, on what and from what: adapters, documents and hybrid models are written, or refused by name.

use catalog::{Packing, Precision};
use interop::check::check;
use interop::export::Dialect;
use interop::import::{Given, import};

use crate::{exported, parse, read, scene};

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
        for dialect in Dialect::ALL {
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
/// run one; padding likewise. Packing across documents changes no file.
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
    for dialect in Dialect::ALL {
        let today = exported(&plan, &model, &plain, dialect, None);
        let across = text(Packing::Across, dialect);
        let same = today.map(|exported| exported.files[0].text.clone());
        assert_eq!(across.map(|(text, _)| text), same, "{}", dialect.name());
        let within = text(Packing::Within, dialect);
        let switch = match dialect {
            Dialect::MegatronLm => "--dataloader-inter-document-masking",
            Dialect::MegatronBridge => "offline_packing_specs.packed_sequence_size = 4096",
            Dialect::Axolotl => "sample_packing: true",
            Dialect::LlamaFactory => "neat_packing: true",
            Dialect::Torchtitan02
            | Dialect::Torchtitan03
            | Dialect::TorchtitanMain
            | Dialect::Nanotron => {
                let error = within.expect_err("refused").to_string();
                assert!(error.contains("packing=within"), "{error}");
                continue;
            }
            _ => {
                let (_, notes) = within.expect("written");
                assert!(notes.contains("keep attention within"), "{notes}");
                let (_, notes) = text(Packing::Padded, dialect).expect("written");
                assert!(notes.contains("must pad every document"), "{notes}");
                continue;
            }
        };
        let (text, _) = within.expect("written");
        assert!(text.contains(switch), "{text}");
        let findings = check(&read(&text, "file", Some(dialect)), Some(&model));
        assert_eq!(findings.expect("schema"), [], "{text}");
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
