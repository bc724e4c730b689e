//! Plans for every runtime: a file that is exported passes its own check, whatever kernels and types the runtime has.

use catalog::Precision;
use catalog::runtime::Rewrite;
use interop::check::{Severity, check};
use interop::export::{Dialect, Differs, Exported};
use interop::import::{Given, import};
use plans::grammar::overlap_name;

use super::{exported, exported_for, parse, read, scene};

/// A plan for a runtime, exported.
fn plan(name: &str, runtime: &str, text: &str, dialect: Dialect) -> Exported {
    let (model, workload) = scene(name, 64, Precision::Bf16);
    let of = catalog::load::runtime(runtime).expect("preset");
    let strategy = plans::grammar::parse(text, &model, &workload, &of).expect(text);
    let exported = exported_for(runtime, &strategy, &model, &workload, dialect, None);
    exported.unwrap_or_else(|e| panic!("{runtime} {text}: {e}"))
}

/// Whether the target does a rewrite that the prediction did not assume, or does not do one that it assumed.
fn differs(exported: &Exported, rewrite: Rewrite) -> bool {
    let mut unmet = exported.unmet.iter().map(|unmet| unmet.differs);
    unmet.any(|of| match of {
        Differs::Performed(found) | Differs::NotPerformed(found) => found == rewrite,
        _ => false,
    })
}

/// Exports distinguish checkpoints that stop early from those that run whole layers again, and
/// LLaMA-Factory's file sets which they are.
#[test]
fn checkpoints_are_as_predicted_or_told() {
    use Dialect::{DeepSpeed, LlamaFactory, TransformersDeepSpeed};
    let full = "zero=2,recompute=full";
    for (runtime, text, dialect, told, said) in [
        ("hf-deepspeed", full, TransformersDeepSpeed, false, None),
        ("deepspeed", full, TransformersDeepSpeed, true, None),
        ("hf-deepspeed", full, DeepSpeed, true, None),
        ("hf-deepspeed", full, LlamaFactory, false, Some("false")),
        ("deepspeed", full, LlamaFactory, false, Some("true")),
        ("hf-deepspeed", "zero=2", LlamaFactory, false, None),
    ] {
        let case = format!("{runtime} {text} {}", dialect.name());
        let exported = plan("llama3-8b", runtime, text, dialect);
        let differs = differs(&exported, Rewrite::EarlyStopRecompute);
        assert_eq!(differs, told, "{case}");
        let file = &exported.files[0].text;
        let line = file
            .lines()
            .find_map(|l| l.strip_prefix("use_reentrant_gc: "));
        assert_eq!(line, said, "{case}");
    }
}

#[test]
fn checkpoints_are_read() {
    let model = catalog::load::model("llama3-8b").expect("preset");
    let given = Given {
        model: &model,
        gpus: Some(8),
        seq_len: None,
        gpus_per_node: 8,
    };
    for (line, runtime, note) in [
        ("", "hf-deepspeed", Some("whole layers again unless")),
        ("", "deepspeed", None),
        ("use_reentrant_gc: false", "hf-deepspeed", None),
        (
            "use_reentrant_gc: false",
            "deepspeed",
            Some("stop early are planned"),
        ),
        ("disable_gradient_checkpointing: true", "hf-deepspeed", None),
    ] {
        let text = format!(
            "finetuning_type: full\ncutoff_len: 2048\nbf16: true\nper_device_train_batch_size: 1\n\
             deepspeed: {{zero_optimization: {{stage: 2}}}}\n{line}\n"
        );
        let document = read(&text, "a.yaml", Some(Dialect::LlamaFactory));
        let imported = import(&document, &given).expect(line);
        let notes = imported.notes_under(&catalog::load::runtime(runtime).expect("preset"));
        let found = notes
            .iter()
            .any(|n| note.is_some_and(|note| n.contains(note)));
        let others = notes.iter().filter(|n| n.contains("whole layers")).count();
        let said = usize::from(note.is_some());
        assert_eq!(
            (found, others),
            (note.is_some(), said),
            "{line} {runtime}: {notes:?}"
        );
    }
}

/// accelerate and torchtitan free the embedding after forward, axolotl does not.
#[test]
fn an_embedding_that_is_freed_by_itself_is_told() {
    use Dialect::{Accelerate, Axolotl, Torchtitan02, Torchtitan03, Transformers};
    for (model, runtime, text, dialect, told) in [
        ("llama3-8b", "fsdp2", "zero=3", Accelerate, true),
        ("llama3.2-1b", "fsdp2", "zero=3", Accelerate, false),
        (
            "llama3-8b",
            "fsdp2",
            "zero=3,reshard=off",
            Accelerate,
            false,
        ),
        ("llama3-8b", "hf-trainer", "zero=3", Transformers, false),
        ("llama3-8b", "hf-trainer", "zero=3", Axolotl, true),
        ("llama3-8b", "fsdp2", "zero=3", Axolotl, false),
        ("llama3-8b", "torchtitan", "zero=3", Torchtitan02, false),
        ("llama3-8b", "fsdp2", "zero=3", Torchtitan03, true),
    ] {
        let exported = plan(model, runtime, text, dialect);
        let found = differs(&exported, Rewrite::FreeEmbedding);
        assert_eq!(found, told, "{model} {runtime} {text} {}", dialect.name());
    }
}

/// LLaMA-Factory takes versions of Transformers that launch every expert by itself.
#[test]
fn the_version_that_groups_experts_is_said() {
    for (model, said) in [("mixtral-8x7b", true), ("llama3-8b", false)] {
        let exported = plan(model, "hf-deepspeed", "zero=3", Dialect::LlamaFactory);
        let mut notes = exported.notes.iter();
        let found = notes.any(|note| note.contains("Transformers 5"));
        assert_eq!(found, said, "{model}");
    }
}

#[test]
fn files_of_every_runtimes_plans_pass_their_check() {
    let mut taken = 0;
    for preset in catalog::runtime_presets::presets() {
        let runtime = preset.runtime;
        for (name, gpus, text) in [
            ("llama3-8b", 8, "zero=0,recompute=full"),
            ("llama3-8b", 64, "zero=1,recompute=full"),
            ("llama3-8b", 64, "zero=3,recompute=full"),
            ("llama3-8b", 64, "tp=4,pp=4,zero=1,recompute=full"),
            ("gpt2-124m", 8, "zero=0"),
        ] {
            for precision in [Precision::Bf16, Precision::Fp16] {
                let (model, workload) = scene(name, gpus, precision);
                let strategy = plans::grammar::parse(text, &model, &workload, &runtime);
                let Ok(strategy) = strategy else { continue };
                for &dialect in Dialect::ALL {
                    let of = &runtime.name;
                    let exported = exported_for(of, &strategy, &model, &workload, dialect, None);
                    let Ok(exported) = exported else { continue };
                    taken += 1;
                    let file = &exported.files[0];
                    let document = read(&file.text, &file.name, Some(dialect));
                    let found = check(&document, Some(&model)).expect("schema");
                    let mut wrong = found.iter().filter(|f| f.severity == Severity::Error);
                    let wrong = wrong.next();
                    assert!(wrong.is_none(), "{of} {text} {}: {wrong:?}", dialect.name());
                }
            }
        }
    }
    assert!(taken > 500, "{taken} files");
}

/// If a plan leaves gradient types to its runtime and the target has others, a note names them.
#[test]
fn other_types_of_gradients_are_told() {
    use Dialect::*;
    let rows: [(&str, &str, &[Dialect], Option<&str>); 10] = [
        (
            "fsdp2",
            "zero=3",
            &[Accelerate, Transformers],
            Some("fp32/bf16"),
        ),
        (
            "fsdp2",
            "zero=3,grad_dtype=fp32/bf16",
            &[Accelerate, Transformers],
            None,
        ),
        ("fsdp2", "zero=0", &[Transformers], None),
        ("hf-trainer", "zero=3", &[Transformers], None),
        (
            "megatron-deepspeed",
            "tp=4,pp=4,zero=0,recompute=full",
            &[MegatronLm, MegatronBridge],
            Some("bf16"),
        ),
        (
            "megatron-core",
            "tp=4,zero=1",
            &[MegatronLm, MegatronBridge],
            None,
        ),
        (
            "megatron-core",
            "tp=4,zero=1,grad_dtype=bf16",
            &[MegatronLm, MegatronBridge],
            None,
        ),
        (
            "deepspeed",
            "zero=3,recompute=full",
            &[Torchtitan03],
            Some("fp32"),
        ),
        ("vescale", "zero=0", &[DeepSpeed], Some("bf16/fp32")),
        ("vescale", "zero=1", &[DeepSpeed], None),
    ];
    for (runtime, text, dialects, want) in rows {
        let (model, workload) = scene("llama3-8b", 64, Precision::Bf16);
        let of = catalog::load::runtime(runtime).expect("preset");
        let strategy = plans::grammar::parse(text, &model, &workload, &of).expect(text);
        for &dialect in dialects {
            let exported = exported_for(runtime, &strategy, &model, &workload, dialect, None);
            let exported = exported.unwrap_or_else(|e| panic!("{runtime} {text}: {e}"));
            let mut differs = exported.unmet.iter().filter_map(|of| match of.differs {
                Differs::Gradients { has, .. } => Some(has.name()),
                _ => None,
            });
            let found = differs.next();
            assert_eq!(
                found.as_deref(),
                want,
                "{runtime} {text} {}",
                dialect.name()
            );
        }
    }
}

/// DeepSpeed's files say nothing of how gradients are reduced, added up and freed: its engine does as its runtime's predictions have it.
#[test]
fn deepspeed_treats_gradients_as_predicted() {
    use catalog::runtime::Rewrite::{AccumulateGradients, AllReduceGradients, ReleaseGradients};
    let rows = [
        ("deepspeed", Dialect::DeepSpeed, &[][..]),
        ("hf-deepspeed", Dialect::TransformersDeepSpeed, &[]),
        (
            "hf-deepspeed-2021",
            Dialect::DeepSpeed,
            &[AllReduceGradients],
        ),
    ];
    for (runtime, dialect, sharded) in rows {
        let of = catalog::load::runtime(runtime).expect("preset");
        for zero in 0..4 {
            let text = format!("zero={zero},mbs=1,recompute=full");
            let (model, workload) = scene("llama3-8b", 64, Precision::Bf16);
            let strategy = plans::grammar::parse(&text, &model, &workload, &of).expect(&text);
            let exported = exported_for(runtime, &strategy, &model, &workload, dialect, None);
            let exported = exported.unwrap_or_else(|e| panic!("{runtime} {text}: {e}"));
            let gradients = [AccumulateGradients, AllReduceGradients, ReleaseGradients];
            let differs = exported.unmet.iter().filter_map(|of| match of.differs {
                Differs::Performed(rewrite) | Differs::NotPerformed(rewrite) => Some(rewrite),
                _ => None,
            });
            let found: Vec<_> = differs.filter(|of| gradients.contains(of)).collect();
            let want = if [1, 2].contains(&zero) { sharded } else { &[] };
            assert_eq!(found, want, "{runtime} {text}");
        }
    }
}

/// If a target overlaps otherwise than the plan and has no switch for it, a note says so.
#[test]
fn other_overlaps_are_told() {
    let (model, workload) = scene("llama2-7b", 64, Precision::Bf16);
    for (text, want) in [
        ("zero=0,overlap=grad", None),
        ("tp=2,sp,zero=0,overlap=grad+tp", None),
        ("pp=4,zero=0,overlap=grad+pp", Some("grad")),
        ("pp=4,zero=0,overlap=grad", None),
        ("zero=0,overlap=none", Some("grad+pp")),
        ("zero=0,overlap=grad+param", None),
    ] {
        let plan = parse(text, &model, &workload).expect(text);
        let exported = exported(&plan, &model, &workload, Dialect::Nanotron, None);
        let exported = exported.unwrap_or_else(|e| panic!("{text}: {e}"));
        let mut differs = exported.unmet.iter().filter_map(|of| match of.differs {
            Differs::Overlap { has, .. } => Some(overlap_name(has)),
            _ => None,
        });
        assert_eq!(differs.next().as_deref(), want, "{text}");
    }
}
