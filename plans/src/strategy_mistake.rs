//! What to write instead of a strategy that breaks a rule.

use catalog::Mistake;

use crate::legality::{StrategyError, divisors, divisors_listed};
use crate::strategy_words::{EXAMPLE, KEYS};

/// A strategy that every runtime takes.
const ANYWHERE: &str = "--strategy mbs=1";

impl StrategyError {
    /// Splits the error into its parts: the rule that is broken, what would satisfy it and, where
    /// one exists, the nearest size that does.
    #[must_use]
    pub fn mistake(&self) -> Mistake {
        let said = self.to_string();
        // What follows a semicolon says what to do instead.
        let (what, _) = said.split_once("; ").unwrap_or((&said, ""));
        let wrong = Mistake::new(what);
        let wrong = match self {
            Self::Syntax(mistake) => return mistake.clone(),
            Self::Zero { field } => wrong
                .expected("sizes that start at 1")
                .nearest(Some(format!("{field}=1"))),
            Self::World {
                tp, cp, pp, gpus, ..
            } => wrong
                .expected("sizes that multiply to the number of GPUs")
                .nearest(for_the_world(
                    *gpus,
                    [("tp", *tp), ("pp", *pp), ("cp", *cp)],
                )),
            Self::Divides {
                what,
                value,
                by,
                divisor,
            } => divided(wrong, (what, *value), (by, *divisor)),
            Self::Batch {
                global_batch,
                dp,
                micro_batch,
                ..
            } => wrong
                .expected("dp · micro-batch · micro-batches that is the global batch")
                .nearest(micro_batches(*global_batch, *dp, *micro_batch)),
            Self::Stages {
                wanted_stages,
                layers,
                ..
            } => wrong.expected(format!(
                "{wanted_stages} stages with {layers} layers in all"
            )),
            Self::Passes { .. } => wrong.expected("a larger micro-batch or a smaller global batch"),
            Self::Elements { .. } => wrong.expected("a smaller micro-batch"),
            Self::Runtime { has, .. } => wrong.expected(has.clone()),
            Self::Schedule(_) | Self::Conflict(_) => {
                wrong.expected("choices that go together (`vescale-plan doc strategies`)")
            }
        };
        // The usual example may hold what the runtime has just been found to lack.
        let lacking = matches!(self, Self::Runtime { .. });
        wrong.example(if lacking { ANYWHERE } else { EXAMPLE })
    }
}

/// What to write so that sizes multiply to the number of GPUs: the number of replicas, if the given
/// sizes divide it; else the first size that can be changed alone, with the nearest right value.
fn for_the_world(gpus: u64, sizes: [(&str, u64); 3]) -> Option<String> {
    let product = |without: &str| {
        let others = sizes.iter().filter(|(name, _)| *name != without);
        others.fold(1u64, |all, (_, size)| all.saturating_mul(*size))
    };
    let room = |others: u64| {
        let fits = others > 0 && gpus.is_multiple_of(others);
        fits.then(|| gpus / others)
    };
    let replicas = room(product("dp")).map(|dp| format!("dp={dp}"));
    replicas.or_else(|| {
        sizes.iter().find_map(|&(name, size)| {
            let right = nearest(divisors(room(product(name))?), size)?;
            Some(format!("{name}={right}"))
        })
    })
}

/// The size of a micro-batch that divides the sequences of a replica and is nearest to the one given.
fn micro_batches(global_batch: u64, dp: u64, micro_batch: u64) -> Option<String> {
    let fits = dp > 0 && global_batch.is_multiple_of(dp);
    let nearest = fits.then(|| nearest(divisors(global_batch / dp), micro_batch));
    nearest.flatten().map(|size| format!("mbs={size}"))
}

/// Adds to a mistake about a size that does not divide another which sizes would.
fn divided(wrong: Mistake, (what, value): (&str, u64), (by, divisor): (&str, u64)) -> Mistake {
    if KEYS.contains(&what) {
        let multiple = value.div_ceil(divisor).saturating_mul(divisor);
        return wrong
            .expected(format!("`{what}` that is a multiple of {divisor}"))
            .nearest(Some(format!("{what}={multiple}")));
    }
    let wrong = wrong.expected(format!("`{by}` of {}", divisors_listed(value)));
    match KEYS.contains(&by) {
        true => wrong.nearest(nearest(divisors(value), divisor).map(|size| format!("{by}={size}"))),
        false => wrong,
    }
}

/// The size nearest to one that is wrong; of two that are equally near the smaller.
fn nearest(right: impl Iterator<Item = u64>, wrong: u64) -> Option<u64> {
    right.min_by_key(|size| size.abs_diff(wrong))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_size_is_named() {
        let heads = StrategyError::Divides {
            what: "attention heads",
            value: 32,
            by: "tp",
            divisor: 3,
        };
        let world = |tp| StrategyError::World {
            tp,
            cp: 1,
            pp: 1,
            dp: 1,
            product: tp,
            gpus: 8,
        };
        let batch = StrategyError::Batch {
            global_batch: 512,
            dp: 8,
            micro_batch: 3,
            count: 21,
        };
        let few = StrategyError::Divides {
            what: "tp",
            value: 6,
            by: "key/value heads",
            divisor: 4,
        };
        for (error, nearest) in [
            (heads, Some("tp=2")),
            (world(4), Some("dp=2")),
            (world(3), Some("tp=2")),
            (batch, Some("mbs=2")),
            (few, Some("tp=8")),
        ] {
            let mistake = error.mistake();
            assert_eq!(mistake.nearest.as_deref(), nearest, "{error}");
            assert!(mistake.expected.is_some() && mistake.example.is_some());
        }
    }
}
