//! What the user fixes, bounds or forbids.

use std::collections::BTreeMap;

use plans::Decisions;
use plans::grammar::recompute_name;
use serde::{Deserialize, Serialize};

use crate::PlannerError;

/// Numeric dimensions.
pub const DIMENSIONS: [&str; 10] = [
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "etp",
    "dp",
    "dp_shard",
    "dp_replicate",
    "mbs",
];
/// Dimensions of names.
pub const CHOICES: [&str; 5] = ["cp_kind", "zero", "schedule", "recompute", "sp"];

/// Bounds on the dimensions of a strategy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Constraints {
    /// Smallest value of a numeric dimension.
    pub min: BTreeMap<String, u64>,
    /// Largest value of a numeric dimension.
    pub max: BTreeMap<String, u64>,
    /// Allowed values of a dimension, by name.
    pub fix: BTreeMap<String, Vec<String>>,
    /// Most by which a stage at either end may be lighter than the others, in layers.
    pub uneven: Option<u64>,
}

impl Constraints {
    /// Adds `key=value[|value…]`.
    ///
    /// # Errors
    /// Unknown keys with the nearest known one.
    pub fn fix(&mut self, text: &str) -> Result<(), PlannerError> {
        for part in text.split(',').filter(|p| !p.trim().is_empty()) {
            let (key, value) = split(part)?;
            known(part, key, &all())?;
            let values: Vec<String> = value.split('|').map(|v| v.trim().to_owned()).collect();
            if DIMENSIONS.contains(&key) {
                for value in &values {
                    number(part, value)?;
                }
            }
            self.fix.insert(key.to_owned(), values);
        }
        Ok(())
    }

    /// Adds `key=number` as a lower bound.
    ///
    /// # Errors
    /// Unknown keys, values that are not numbers.
    pub fn at_least(&mut self, text: &str) -> Result<(), PlannerError> {
        bound(&mut self.min, text)
    }

    /// Adds `key=number` as an upper bound.
    ///
    /// # Errors
    /// Unknown keys, values that are not numbers.
    pub fn at_most(&mut self, text: &str) -> Result<(), PlannerError> {
        bound(&mut self.max, text)
    }

    /// Forbids a dimension: its size is 1.
    ///
    /// # Errors
    /// Unknown keys.
    pub fn forbid(&mut self, text: &str) -> Result<(), PlannerError> {
        for key in text.split(',').map(str::trim).filter(|k| !k.is_empty()) {
            known(text, key, &DIMENSIONS)?;
            self.max.insert(key.to_owned(), 1);
        }
        Ok(())
    }

    /// Whether every key is known; for constraints read from a file.
    ///
    /// # Errors
    /// The first unknown key.
    pub fn check(&self) -> Result<(), PlannerError> {
        for key in self.min.keys().chain(self.max.keys()) {
            known(key, key, &DIMENSIONS)?;
        }
        for (key, values) in &self.fix {
            known(key, key, &all())?;
            if DIMENSIONS.contains(&key.as_str()) {
                for value in values {
                    number(key, value)?;
                }
            }
        }
        Ok(())
    }

    /// Whether a numeric dimension may have this size.
    #[must_use]
    pub fn allows(&self, key: &str, size: u64) -> bool {
        self.min.get(key).is_none_or(|&min| size >= min)
            && self.max.get(key).is_none_or(|&max| size <= max)
            && self
                .fix
                .get(key)
                .is_none_or(|v| v.iter().any(|v| v.parse() == Ok(size)))
    }

    /// Whether a named dimension may have this value.
    #[must_use]
    pub fn allows_name(&self, key: &str, name: &str) -> bool {
        self.fix.get(key).is_none_or(|values| {
            values
                .iter()
                .any(|v| v == name || name.starts_with(&format!("{v}:")))
        })
    }

    /// Whether a whole strategy is allowed.
    #[must_use]
    pub fn allow(&self, d: &Decisions) -> bool {
        let sizes = [
            ("tp", d.tp),
            ("pp", d.pp),
            ("vpp", d.vpp),
            ("cp", d.cp),
            ("ep", d.ep),
            ("etp", d.etp),
            ("dp", d.dp()),
            ("dp_shard", d.dp_shard),
            ("dp_replicate", d.dp_replicate),
            ("mbs", d.micro_batch),
        ];
        sizes.iter().all(|&(key, size)| self.allows(key, size))
            && self.allows_name("recompute", &recompute_name(d.recompute))
    }

    /// Whether nothing is constrained.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.min.is_empty() && self.max.is_empty() && self.fix.is_empty() && self.uneven.is_none()
    }
}

fn all() -> Vec<&'static str> {
    DIMENSIONS.iter().chain(&CHOICES).copied().collect()
}

fn split(part: &str) -> Result<(&str, &str), PlannerError> {
    part.split_once('=')
        .map(|(k, v)| (k.trim(), v.trim()))
        .ok_or_else(|| PlannerError::Constraint {
            text: part.to_owned(),
            reason: "expected key=value".to_owned(),
        })
}

fn known(text: &str, key: &str, keys: &[&str]) -> Result<(), PlannerError> {
    if keys.contains(&key) {
        return Ok(());
    }
    let reason = spec::suggest::nearest(key, keys.iter().copied()).map_or_else(
        || format!("unknown dimension `{key}`; there are {}", keys.join(", ")),
        |near| format!("unknown dimension `{key}`; did you mean `{near}`?"),
    );
    Err(PlannerError::Constraint {
        text: text.to_owned(),
        reason,
    })
}

fn number(text: &str, value: &str) -> Result<u64, PlannerError> {
    value
        .parse::<u64>()
        .ok()
        .filter(|n| (1..=1 << 24).contains(n))
        .ok_or_else(|| {
            let reason = format!("`{value}` is not a whole number from 1 to {}", 1 << 24);
            PlannerError::Constraint {
                text: text.to_owned(),
                reason,
            }
        })
}

fn bound(bounds: &mut BTreeMap<String, u64>, text: &str) -> Result<(), PlannerError> {
    for part in text.split(',').filter(|p| !p.trim().is_empty()) {
        let (key, value) = split(part)?;
        known(part, key, &DIMENSIONS)?;
        bounds.insert(key.to_owned(), number(part, value)?);
    }
    Ok(())
}
