//! Checks that no model family is forgotten: each has a small model whose parameters' names, outputs and gradients other tests compare
//! with Transformers, or it is listed here with the reason why it has none.

use std::fs;
use std::path::Path;

use catalog::model::Family;

/// Families without a small model in `tests/pytorch/models`, each with the reason.
const NOT_COMPARED: [Family; 3] = [
    // Its gradients are compared with differences (`tests/tests/executor/gradients.rs`).
    Family::Mixtral,
    // The executor does not train models with recurrent layers.
    Family::NemotronH,
    // Llama's attention with GPT-2's feed-forward block, both of which are compared.
    Family::Starcoder2,
];

/// Parameters' names, outputs and gradients of the small models in `tests/pytorch/models` are compared with those of
/// Transformers (`tests/tests/executor/pytorch.rs`); GPT-2 and Llama are written out there.
#[test]
fn every_family_has_a_small_model() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/pytorch/models");
    let mut compared = vec![Family::Gpt2, Family::Llama];
    compared.extend(NOT_COMPARED);
    for file in fs::read_dir(folder).expect("a folder") {
        let path = file.expect("an entry").path();
        let text = fs::read_to_string(&path).expect("readable");
        let model = catalog::hf::decode(&text, &path.display().to_string(), "small");
        compared.push(model.expect("a model").family);
    }
    for info in catalog::load::model_names() {
        let family = catalog::load::model(&info.name).expect("listed").family;
        assert!(
            compared.contains(&family),
            "{}: no file in tests/pytorch/models is of its family, {family:?}",
            info.name
        );
    }
}
