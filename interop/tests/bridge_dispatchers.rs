//! What carries tokens to their experts in recipes of Megatron Bridge.

use catalog::Dispatcher;
use interop::import::{Document, Given, import};

/// `apply_flex_dispatcher_backend` sets the dispatcher if it knows the library that it is given, and does nothing otherwise.
#[test]
fn the_call_that_applies_a_dispatcher_is_evaluated() {
    let backend = "cfg.model.moe_flex_dispatcher_backend";
    let apply = format!("apply_flex_dispatcher_backend(cfg.model, {backend})");
    for (lines, wanted) in [
        (String::new(), Dispatcher::AllToAll),
        (format!("{backend} = \"deepep\""), Dispatcher::AllToAll),
        (format!("{backend} = \"deepep\"\n{apply}"), Dispatcher::DeepEp),
        (format!("{backend} = \"hybridep\"\n{apply}"), Dispatcher::HybridEp),
        (format!("{backend} = None\n{apply}"), Dispatcher::AllToAll),
        // The model's own library.
        (apply.clone(), Dispatcher::DeepEp),
        (
            "apply_flex_dispatcher_backend(\n    cfg.model, moe_flex_dispatcher_backend=\"hybridep\"\n)".to_owned(),
            Dispatcher::HybridEp,
        ),
        (
            "apply_flex_dispatcher_backend(cfg.model, moe_flex_dispatcher_backend=None)".to_owned(),
            Dispatcher::AllToAll,
        ),
        // What follows a call overrides it.
        (
            format!("{apply}\ncfg.model.moe_token_dispatcher_type = \"alltoall\""),
            Dispatcher::AllToAll,
        ),
        ("print(cfg.model, \"deepep\")".to_owned(), Dispatcher::AllToAll),
    ] {
        let lines = format!("cfg.model.expert_model_parallel_size = 8\n{lines}").replace('\n', "\n    ");
        let text = format!(
            "from megatron.bridge.recipes.common import _pretrain_common\n\n\ndef r():\n    cfg = _pretrain_common()\n    {lines}\n    return cfg\n"
        );
        let document = Document::read(&text, "a.py", None, &|_| None).expect("well-formed");
        let model = catalog::load::model("mixtral-8x7b").expect("preset");
        let given = Given {
            model: &model,
            gpus: Some(8),
            seq_len: None,
            gpus_per_node: 8,
        };
        let found = import(&document, &given).expect("imports").decisions.dispatcher;
        assert_eq!(found, Some(wanted), "{lines}");
    }
}
