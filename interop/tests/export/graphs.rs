//! CUDA graphs in exports.

use catalog::Precision;
use interop::export::Dialect;

use super::{exported, parse, scene};

/// CUDA graphs of layers capture Mamba layers too. `export` refuses them for a Nemotron-H without experts: Megatron Bridge sets a
/// number of experts for every Nemotron-H, and then stops because it finds no dense layer to capture.
#[test]
fn graphs_of_layers_capture_state_spaces() {
    let answer = |name| {
        let (model, workload) = scene(name, 16, Precision::Bf16);
        let strategy = parse("zero=1,graphs=layers", &model, &workload).expect("legal");
        exported(&strategy, &model, &workload, Dialect::MegatronBridge, None)
    };
    let taken = answer("nemotron-3-nano-30b-a3b").expect("taken");
    let text = &taken.files[0].text;
    assert!(
        text.contains(r#"["attn", "mamba", "moe_router", "moe_preprocess"]"#),
        "{text}"
    );
    let refused = answer("nemotron-h-8b").expect_err("refused").to_string();
    assert!(refused.contains("graphs=layers"), "{refused}");
}
