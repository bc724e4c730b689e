//! Switches of Hugging Face's Trainer that the prediction assumes: TF32 units, and which of PyTorch's checkpoints runs.

use catalog::Precision;
use interop::export::{Dialect, Exported, Launcher};

use super::{exported_on, parse, scene};

/// The export of a plan of Llama 3 8B on 16 GPUs that was predicted for the Trainer.
fn of(cluster: &str, text: &str, precision: Precision, dialect: Dialect) -> Exported {
    let (model, workload) = scene("llama3-8b", 16, precision);
    let strategy = parse(text, &model, &workload).expect("legal");
    let launcher = Some(Launcher::Torchrun);
    exported_on(
        cluster,
        "hf-trainer",
        &strategy,
        &model,
        &workload,
        dialect,
        launcher,
    )
    .expect("taken")
}

/// 32-bit products are predicted on TF32 units where the GPU has them; PyTorch leaves them off, and the Trainer refuses them
/// elsewhere.
#[test]
fn tf32_is_switched_on_where_it_is_predicted() {
    use Dialect::{Accelerate, Axolotl, LlamaFactory, Transformers, TransformersDeepSpeed};
    for (dialect, text, line) in [
        (Transformers, "zero=3", "\"tf32\": true"),
        (TransformersDeepSpeed, "zero=1", "\"tf32\": true"),
        (LlamaFactory, "zero=1", "tf32: true"),
        (Axolotl, "zero=3", "tf32: true"),
        (Accelerate, "zero=3", "--tf32 true"),
    ] {
        for (cluster, precision, switched) in [
            ("dgx-h100", Precision::Fp32, true),
            ("dgx-a100", Precision::Fp32, true),
            ("dgx2-v100", Precision::Fp32, false),
            ("dgx-h100", Precision::Bf16, false),
        ] {
            let exported = of(cluster, text, precision, dialect);
            let found = exported.files.iter().any(|file| file.text.contains(line));
            assert_eq!(
                found,
                switched,
                "{} {cluster} {precision:?}",
                dialect.name()
            );
        }
    }
}

/// axolotl's checkpoints are re-entrant unless its file says otherwise.
#[test]
fn axolotls_checkpoints_are_those_that_were_predicted() {
    for (text, line) in [
        ("zero=3,recompute=full", Some("use_reentrant: false")),
        ("zero=3", None),
    ] {
        let exported = of("dgx-h100", text, Precision::Bf16, Dialect::Axolotl);
        let file = &exported.files[0].text;
        let found = file.lines().find(|line| line.contains("use_reentrant"));
        assert_eq!(found.map(str::trim), line, "{file}");
    }
}
