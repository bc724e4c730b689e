//! Models as Hugging Face writes them: `config.json`.

use costmodel::Scenario;

use crate::outcome::Outcome;
use crate::promises;
use crate::scene::{self, Scene};
use crate::target::{Depth, Target};
use crate::tree::Format;

/// Models whose states would not fit on a thousand devices are not traced for a price.
const MOST_PARAMETERS: u64 = 1 << 40;

/// `config.json` files.
pub(super) fn configs() -> Target {
    Target {
        use_every: 24,
        ..Target::of_text(
            "hf-configs",
            || scene::files("catalog/presets/models", ".json"),
            |pool, rng| Format::Json.mutate(pool, rng),
            read,
        )
    }
}

fn read(text: &str, depth: Depth) -> Outcome {
    let model = match catalog::hf::decode(text, "input", "model") {
        Ok(model) => model,
        Err(error) if Format::Json.parse(text).is_some() => return Outcome::refused(&error),
        Err(error) => return Outcome::malformed(&error),
    };
    let mut outcome = Outcome::accepted(format!(
        "experts {} kv {} attention {:?}",
        model.moe.is_some(),
        model.attention.kv_heads() == model.attention.heads,
        std::mem::discriminant(&model.attention.kind)
    ));
    if depth == Depth::Read {
        return outcome;
    }
    let count = match models::parameter_count(&model) {
        Ok(count) => count,
        Err(error) => {
            outcome.class = Outcome::refused(&error).class;
            return outcome;
        }
    };
    outcome.expect(count > 0, || "no parameters".to_owned());
    let Ok(base) = Scene::default().scenario() else {
        return outcome;
    };
    if count < MOST_PARAMETERS && model.layers <= 512 {
        let scenario = Scenario { model, ..base };
        let (model, w) = (&scenario.model, &scenario.workload);
        for strategy in ["zero=1", "tp=2,zero=1", "pp=2,zero=1"] {
            if let Ok(s) = plans::grammar::parse(strategy, model, w, &scenario.runtime) {
                promises::predicted(&scenario, &s, &mut outcome);
            }
        }
    }
    outcome
}
