//! Types of weights and products in files for Hugging Face's Trainer and LLaMA-Factory.

use catalog::Precision;
use interop::import::{Document, Given, Imported, import};

/// A YAML file of the Trainer's arguments, with these lines.
fn read(lines: &str) -> Imported {
    let text = format!("per_device_train_batch_size: 1\nmax_length: 2048\n{lines}\n");
    let document = Document::read(&text, "a.yaml", None, &|_| None).expect("well-formed");
    let model = catalog::load::model("llama3-8b").expect("preset");
    let given = Given {
        model: &model,
        gpus: Some(8),
        seq_len: None,
        gpus_per_node: 8,
    };
    import(&document, &given).expect(lines)
}

fn says(imported: &Imported, words: &str) -> bool {
    imported.notes.iter().any(|note| note.contains(words))
}

/// LLaMA-Factory without a switch: only weights that are trained are copied to 32 bits, and BAdam's are not.
#[test]
fn llama_factory_computes_in_the_checkpoints_type() {
    let told = "computes in the type of the checkpoint, which is taken as bf16";
    for (lines, precision) in [
        ("stage: sft", Precision::Bf16),
        ("finetuning_type: lora", Precision::Bf16),
        ("finetuning_type: full", Precision::Fp32),
        ("finetuning_type: full\nuse_badam: true", Precision::Bf16),
        ("finetuning_type: lora\nfp16: true", Precision::Fp16),
        (
            "finetuning_type: lora\nmixed_precision: 'no'",
            Precision::Fp32,
        ),
        (
            "finetuning_type: lora\ndeepspeed: {zero_optimization: {stage: 2}}",
            Precision::Bf16,
        ),
        (
            "finetuning_type: lora\ndeepspeed: {zero_optimization: {stage: 3}}",
            Precision::Fp32,
        ),
    ] {
        let read = read(&format!("cutoff_len: 2048\n{lines}"));
        assert_eq!(read.workload.precision, precision, "{lines}");
        let by_checkpoint = precision == Precision::Bf16;
        assert_eq!(
            says(&read, told),
            by_checkpoint,
            "{lines}: {:?}",
            read.notes
        );
        let whole = "use_badam true: no plan can express weights and states in 16 bits alone";
        assert_eq!(says(&read, whole), lines.contains("badam"), "{lines}");
    }
}

/// The Trainer trains weights in the type in which they were loaded, unless FSDP or DeepSpeed copies them to 32 bits.
#[test]
fn sixteen_bit_weights_of_the_trainer_are_told() {
    let plain = "no plan can express weights and states in 16 bits alone";
    let loaded = "Transformers 5 loads and trains weights in the type of the checkpoint";
    let named = "model_name_or_path: a/b";
    for (lines, told) in [
        ("bf16: true\ndtype: bfloat16".to_owned(), Some(plain)),
        ("bf16: true\ntorch_dtype: auto".to_owned(), Some(plain)),
        ("bf16: true\ndtype: float32".to_owned(), None),
        (format!("bf16: true\n{named}"), Some(loaded)),
        (format!("bf16: true\n{named}\ndtype: float32"), None),
        ("bf16: true\nconfig_name: a/b".to_owned(), None),
        (
            format!("bf16: true\n{named}\nuse_peft: true\nlora_r: 8"),
            None,
        ),
        (format!("bf16: true\n{named}\nfsdp: full_shard"), None),
        (
            format!("bf16: true\n{named}\ndeepspeed: {{zero_optimization: {{stage: 2}}}}"),
            None,
        ),
    ] {
        let read = read(&lines);
        for words in [plain, loaded] {
            let found = says(&read, words);
            assert_eq!(found, told == Some(words), "{lines}: {:?}", read.notes);
        }
    }
}

/// Products in 32 bits are predicted on TF32 units, which PyTorch leaves off.
#[test]
fn products_without_tf32_are_told() {
    let told = "products in 32 bits are predicted on TF32 units";
    for (lines, noted) in [
        ("", true),
        ("tf32: false", true),
        ("tf32: true", false),
        ("torch_compile: true", false),
        ("torch_compile: true\ntf32: false", true),
        ("bf16: true", false),
    ] {
        let read = read(lines);
        assert_eq!(says(&read, told), noted, "{lines}: {:?}", read.notes);
    }
}
