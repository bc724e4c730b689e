//! What of a model a runtime cannot divide between ranks.

use catalog::model::{ModelConfig, WindowPattern};
use catalog::runtime::RuntimeSpace;
use catalog::{CpKind, PredictionModules};

use crate::decisions::Decisions;

/// What of the model's attention does not run under the strategy's kind of context parallelism, and the kinds that it runs under;
/// `None` if all of it runs.
#[must_use]
pub fn unfit_context<'a>(
    d: &Decisions,
    model: &ModelConfig,
    space: &'a RuntimeSpace,
) -> Option<(&'static str, &'a [CpKind])> {
    let attention = &model.attention;
    let windows = attention.window != WindowPattern::Full;
    let limits = [
        (attention.sinks, "sinks", &space.sink_cp_kinds),
        (windows, "a sliding window", &space.window_cp_kinds),
    ];
    let (_, what, kinds) = (limits.into_iter())
        .find(|(has, _, kinds)| d.cp > 1 && *has && !kinds.contains(&d.cp_kind))?;
    Some((what, kinds))
}

/// A way to divide the model that the runtime does not have beside prediction modules, and the size that it has instead.
#[must_use]
pub fn beside_predictions(
    d: &Decisions,
    model: &ModelConfig,
    space: &RuntimeSpace,
) -> Option<(&'static str, &'static str)> {
    let undivided = space.prediction_modules == PredictionModules::Undivided;
    if model.mtp_layers == 0 || !undivided {
        None
    } else if d.pp > 1 {
        Some(("pipeline parallelism", "pp=1"))
    } else if d.cp > 1 {
        Some(("context parallelism", "cp=1"))
    } else {
        None
    }
}
