//! What the user fixes, bounds or forbids. [`Constraints`] checks that the wishes do not contradict
//! each other; [`crate::legal_values`] checks that some strategy can have a value.

use std::collections::BTreeMap;
use std::str::FromStr;

use catalog::runtime::RecomputeMode;
use catalog::{
    CpKind, CudaGraphs, Dispatcher, Fp8Recipe, Mistake, Offload, OptimizerStates, Precision,
    Runtime, ScheduleKind, Zero,
};
use plans::grammar::{OVERLAPS, overlap_name, read_overlap, recompute_name};
use plans::{Decisions, Recompute};
use serde::{Deserialize, Serialize};

use crate::PlannerError;
use crate::constraints_file::ConstraintsFile;

/// Numeric dimensions.
pub const DIMENSIONS: [&str; 11] = [
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
    "groups",
];
/// Dimensions whose values are compared as text.
pub const CHOICES: [&str; 14] = [
    "cp_kind",
    "zero",
    "schedule",
    "recompute",
    "sp",
    "grad_dtype",
    "optim_states",
    "offload",
    "offload_layers",
    "overlap",
    "prefetch",
    "dispatcher",
    "graphs",
    "fp8_recipe",
];

/// Largest value of a numeric dimension.
const MAX_SIZE: u64 = 1 << 24;
/// Most layers by which a stage at an end may be lighter.
const MAX_UNEVEN: u64 = 64;

/// Bounds on the dimensions of a strategy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(from = "ConstraintsFile")]
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

impl From<ConstraintsFile> for Constraints {
    fn from(file: ConstraintsFile) -> Self {
        let ConstraintsFile {
            min,
            mut max,
            fix,
            forbid,
            uneven,
        } = file;
        max.extend(forbid.0.into_iter().map(|key| (key, 1)));
        let fix = fix.into_iter().map(|(key, words)| (key, words.0));
        Self {
            min,
            max,
            fix: fix.collect(),
            uneven,
        }
    }
}

impl Constraints {
    /// The command-line flags (without dashes) and values of these constraints, except `uneven`.
    #[must_use]
    pub fn flags(&self) -> Vec<(&'static str, String)> {
        let fix = self.fix.iter();
        let fix = fix.map(|(key, values)| ("fix", format!("{key}={}", values.join("|"))));
        let bounds = [("min", &self.min), ("max", &self.max)];
        let bounds = bounds.into_iter().flat_map(|(flag, bounds)| {
            let bounds = bounds.iter();
            bounds.map(move |(key, size)| (flag, format!("{key}={size}")))
        });
        fix.chain(bounds).collect()
    }

    /// Constraints written as texts: fixed values, lower bounds, upper bounds, forbidden dimensions.
    ///
    /// # Errors
    /// Unknown keys, values of a wrong form, keys that are given twice.
    pub fn parse(
        fix: &[String],
        at_least: &[String],
        at_most: &[String],
        forbid: &[String],
    ) -> Result<Self, PlannerError> {
        let mut constraints = Self::default();
        fix.iter().try_for_each(|text| constraints.fix(text))?;
        (at_least.iter()).try_for_each(|text| constraints.at_least(text))?;
        (at_most.iter()).try_for_each(|text| constraints.at_most(text))?;
        (forbid.iter()).try_for_each(|text| constraints.forbid(text))?;
        Ok(constraints)
    }

    /// Adds `key=value[|value…]`.
    ///
    /// # Errors
    /// Unknown keys with the nearest known one; a key that is fixed already.
    pub fn fix(&mut self, text: &str) -> Result<(), PlannerError> {
        for part in text.split(',') {
            let (key, value) = split(part)?;
            known(part, key, &all())?;
            let values: Vec<String> = value.split('|').map(|v| v.trim().to_owned()).collect();
            values_of(part, key, &values)?;
            if self.fix.insert(key.to_owned(), values).is_some() {
                return wrong(
                    part,
                    format!("`{key}` is fixed twice; expected {key}=A|B for a choice"),
                );
            }
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
        for key in text.split(',').map(str::trim) {
            known(text, key, &DIMENSIONS)?;
            self.max.insert(key.to_owned(), 1);
        }
        Ok(())
    }

    /// These constraints; where `other` constrains the same key, `other` wins.
    #[must_use]
    pub fn overridden_by(mut self, other: Self) -> Self {
        self.min.extend(other.min);
        self.max.extend(other.max);
        self.fix.extend(other.fix);
        self.uneven = other.uneven.or(self.uneven);
        self
    }

    /// Checks that keys are known, values have the form of their key, and none contradict.
    ///
    /// # Errors
    /// The first violation.
    pub fn check(&self) -> Result<(), PlannerError> {
        for (key, bound) in self.min.iter().chain(&self.max) {
            known(key, key, &DIMENSIONS)?;
            number(key, &bound.to_string())?;
        }
        for (key, values) in &self.fix {
            known(key, key, &all())?;
            values_of(key, key, values)?;
        }
        if let Some(uneven) = self.uneven.filter(|&n| n > MAX_UNEVEN) {
            return wrong(
                &format!("uneven={uneven}"),
                format!("expected 0 to {MAX_UNEVEN} layers"),
            );
        }
        for key in DIMENSIONS {
            self.contradicts(key)?;
        }
        Ok(())
    }

    /// Refuses bounds that leave a dimension no value, or none of its fixed values.
    fn contradicts(&self, key: &str) -> Result<(), PlannerError> {
        let (min, max) = (self.min.get(key), self.max.get(key));
        if let (Some(min), Some(max)) = (min, max)
            && min > max
        {
            let text = format!("{key} from {min} to {max}");
            return wrong(
                &text,
                "the lower bound is above the upper; expected one at or below it".to_owned(),
            );
        }
        let Some(values) = self.fix.get(key) else {
            return Ok(());
        };
        let allowed = |v: &String| v.parse().is_ok_and(|size| self.allows(key, size));
        if values.iter().any(allowed) {
            return Ok(());
        }
        let bound = match (min, max) {
            (_, Some(1)) => "forbidden, or at most 1".to_owned(),
            (Some(min), None) => format!("at least {min}"),
            (None, Some(max)) => format!("at most {max}"),
            (Some(min), Some(max)) => format!("from {min} to {max}"),
            (None, None) => return Ok(()),
        };
        let text = format!("{key}={}", values.join("|"));
        wrong(
            &text,
            format!("contradicts that `{key}` is {bound}; expected one of the two"),
        )
    }

    /// The values that a dimension is fixed to, as `read` reads them; none if there is no such constraint.
    pub(crate) fn read_fixed<T>(
        &self,
        key: &str,
        read: impl Fn(&str) -> Option<T>,
    ) -> impl Iterator<Item = T> {
        let values = self.fix.get(key).map_or(&[][..], Vec::as_slice);
        values.iter().filter_map(move |value| read(value))
    }

    /// The values that a dimension is fixed to, where each value has a name.
    pub(crate) fn fixed_among<T: FromStr>(&self, key: &str) -> impl Iterator<Item = T> {
        self.read_fixed(key, |text| text.parse().ok())
    }

    /// Fixed counts of recomputed layers: 3 of `recompute=layers:3` for the prefix `layers:`.
    pub(crate) fn fixed_layers(&self, prefix: &str) -> impl Iterator<Item = u64> {
        let counts = self.read_fixed("recompute", move |v| v.strip_prefix(prefix)?.parse().ok());
        counts.filter(|&n| n > 0)
    }

    /// Sizes that a dimension is fixed to.
    pub(crate) fn fixed(&self, key: &str) -> impl Iterator<Item = u64> {
        self.read_fixed(key, |value| value.parse().ok())
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

    /// Whether some strategy of a recompute mode is allowed.
    pub(crate) fn allows_mode(&self, mode: RecomputeMode) -> bool {
        let kind = match mode {
            RecomputeMode::Layers => "layers",
            RecomputeMode::Falling => "falling",
            _ => mode.name(),
        };
        let of_kind = |v: &String| v.split(':').next() == Some(kind);
        let fixed = self.fix.get("recompute");
        fixed.is_none_or(|values| values.iter().any(of_kind))
    }

    /// Whether a whole strategy is allowed, for a runtime and a precision.
    #[must_use]
    pub fn allow(&self, d: &Decisions, runtime: &Runtime, precision: Precision) -> bool {
        let has = |key: &str| match key {
            "overlap" => self.allows_overlap(d),
            "dispatcher" if d.ep == 1 => true,
            "fp8_recipe" if precision != Precision::Fp8 => true,
            _ => value(d, key, runtime, precision).is_some_and(|name| self.allows_name(key, &name)),
        };
        let mut choices = CHOICES.iter().filter(|key| self.fix.contains_key(**key));
        sizes(d).iter().all(|&(key, size)| self.allows(key, size)) && choices.all(|key| has(key))
    }

    /// Whether a constraint on `overlap` allows a strategy. Messages that the strategy never sends are not compared: without
    /// tensor parallelism `grad` and `grad+tp` are the same.
    fn allows_overlap(&self, d: &Decisions) -> bool {
        let as_fixed = |fixed| {
            let other = Decisions {
                overlap: fixed,
                ..d.clone()
            };
            other.canonical_overlap() == d.canonical_overlap()
        };
        self.read_fixed("overlap", read_overlap).any(as_fixed)
    }

    /// Whether what a strategy recomputes is allowed.
    pub(crate) fn allow_recompute(&self, recompute: Recompute) -> bool {
        !self.fix.contains_key("recompute")
            || self.allows_name("recompute", &recompute_name(recompute))
    }

    /// The constraints for one group of replicas: all but those on the number of groups.
    #[must_use]
    pub fn of_one_group(&self) -> Self {
        let mut constraints = self.clone();
        constraints.fix.remove("groups");
        constraints.min.remove("groups");
        constraints.max.remove("groups");
        constraints
    }

    /// Whether nothing is constrained.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.min.is_empty() && self.max.is_empty() && self.fix.is_empty() && self.uneven.is_none()
    }
}

/// The sizes of a strategy, as constraints name them.
pub(crate) fn sizes(d: &Decisions) -> [(&'static str, u64); 11] {
    [
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
        // A strategy describes one group of replicas.
        ("groups", 1),
    ]
}

/// How many blocks ahead parameters are gathered, as constraints name it; `None` counts as 1.
pub(crate) fn prefetch_name(prefetch: Option<u64>) -> String {
    prefetch.unwrap_or(1).to_string()
}

/// The value that a strategy has for a dimension, for a runtime and a precision; `None` if there is no such dimension.
pub(crate) fn value(
    d: &Decisions,
    key: &str,
    runtime: &Runtime,
    precision: Precision,
) -> Option<String> {
    let own_gradients = || runtime.own_gradients(precision);
    let name = match key {
        "cp_kind" => d.cp_kind.name(),
        "zero" => zero_name(d.zero),
        "schedule" => d.schedule.name(),
        "sp" => switch_name(d.sequence_parallel),
        "optim_states" => (d.optimizer_states).map_or(OptimizerStates::OWN, OptimizerStates::name),
        "dispatcher" => d.dispatcher.unwrap_or(runtime.dispatcher).name(),
        "graphs" => d.graphs.unwrap_or(runtime.graphs).name(),
        "fp8_recipe" => d.fp8_recipe.unwrap_or(runtime.fp8_recipe).name(),
        "recompute" => return Some(recompute_name(d.recompute)),
        "grad_dtype" => return Some(d.gradients.unwrap_or_else(own_gradients).name()),
        "offload" => return Some(d.offload.map_or(Offload::NONE.to_owned(), Offload::name)),
        "offload_layers" => return Some(d.offload_layers.to_string()),
        "overlap" => return Some(overlap_name(d.overlap)),
        "prefetch" => return Some(prefetch_name(d.prefetch)),
        _ => {
            let size = sizes(d).into_iter().find(|(name, _)| *name == key);
            return size.map(|(_, size)| size.to_string());
        }
    };
    Some(name.to_owned())
}

/// A ZeRO level as constraints name it.
pub(crate) fn zero_name(zero: Zero) -> &'static str {
    match zero {
        Zero::Z0 => "0",
        Zero::Z1 => "1",
        Zero::Z2 => "2",
        Zero::Z3 => "3",
    }
}

/// A switch as constraints name it.
pub(crate) fn switch_name(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

/// The names of a choice whose values do not depend on the question; none of other dimensions.
pub(crate) fn names_of(key: &str) -> Vec<&'static str> {
    match key {
        "zero" => vec!["0", "1", "2", "3"],
        "sp" => vec!["on", "off"],
        "schedule" => ScheduleKind::ALL.map(ScheduleKind::name).to_vec(),
        "cp_kind" => CpKind::ALL.iter().map(Into::into).collect(),
        "optim_states" => [OptimizerStates::OWN]
            .into_iter()
            .chain(OptimizerStates::ALL.iter().map(Into::into))
            .collect(),
        "graphs" => CudaGraphs::ALL.iter().map(Into::into).collect(),
        "fp8_recipe" => Fp8Recipe::ALL.iter().map(Into::into).collect(),
        "dispatcher" => Dispatcher::ALL.iter().map(Into::into).collect(),
        _ => Vec::new(),
    }
}

fn all() -> Vec<&'static str> {
    DIMENSIONS.iter().chain(&CHOICES).copied().collect()
}

fn wrong<T>(text: &str, reason: String) -> Result<T, PlannerError> {
    Err(mistake(text, Mistake::of_sentence(&reason)))
}

/// An error about the constraint `text`.
pub(crate) fn mistake(text: &str, mistake: Mistake) -> PlannerError {
    let mistake = mistake.at(format!("constraint `{text}`"));
    PlannerError::Constraint(mistake.example("--fix tp=8,zero=1 --max pp=4 --forbid cp"))
}

/// Checks the values of a key: at least one, numbers for sizes, and known names where listed here.
fn values_of(text: &str, key: &str, values: &[String]) -> Result<(), PlannerError> {
    if values.is_empty() || values.iter().any(String::is_empty) {
        let none = Mistake::new("no value is given");
        return Err(mistake(text, none.expected(format!("a value of `{key}`"))));
    }
    if DIMENSIONS.contains(&key) {
        for value in values {
            number(text, value)?;
        }
    }
    let unknown = values.iter().find(|v| read_overlap(v).is_none());
    if let Some(unknown) = unknown.filter(|_| key == "overlap") {
        let wrong = Mistake::new(format!("`{unknown}` is not a value of `overlap`"));
        return Err(mistake(text, wrong.expected(OVERLAPS)));
    }
    let what = match key {
        "dispatcher" => Some("dispatcher"),
        "graphs" => Some("part of a step that is captured"),
        "fp8_recipe" => Some("way to scale 8-bit products"),
        _ => None,
    };
    let names = names_of(key);
    let unknown = values.iter().find(|v| !names.contains(&v.as_str()));
    if let Some((what, unknown)) = what.zip(unknown) {
        let wrong = Mistake::new(format!("`{unknown}` is no {what}"))
            .expected(format!("one of {}", names.join(", ")))
            .nearest(catalog::suggest::nearest(unknown, names));
        return Err(mistake(text, wrong));
    }
    let expected = match key {
        "offload_layers" => "a number of layers",
        "prefetch" => "a number of blocks",
        _ => return Ok(()),
    };
    match values.iter().find(|v| v.parse::<u64>().is_err()) {
        None => Ok(()),
        Some(unknown) => {
            let wrong = Mistake::new(format!("`{unknown}` is not a number"));
            Err(mistake(text, wrong.expected(expected)))
        }
    }
}

fn split(part: &str) -> Result<(&str, &str), PlannerError> {
    part.split_once('=')
        .map(|(k, v)| (k.trim(), v.trim()))
        .ok_or_else(|| {
            mistake(
                part,
                Mistake::new("no value is given").expected("key=value"),
            )
        })
}

fn known(text: &str, key: &str, keys: &[&str]) -> Result<(), PlannerError> {
    if keys.contains(&key) {
        return Ok(());
    }
    if CHOICES.contains(&key) {
        let named = format!("`{key}` has no sizes; expected `--fix {key}=…`");
        return wrong(text, named);
    }
    let unknown = Mistake::new(format!("unknown dimension `{key}`"))
        .expected(format!("one of {}", keys.join(", ")))
        .nearest(catalog::suggest::nearest(key, keys));
    Err(mistake(text, unknown))
}

fn number(text: &str, value: &str) -> Result<u64, PlannerError> {
    value
        .parse::<u64>()
        .ok()
        .filter(|n| (1..=MAX_SIZE).contains(n))
        .ok_or_else(|| {
            let wrong = Mistake::new(format!("`{value}` is no size"));
            mistake(
                text,
                wrong.expected(format!("a whole number from 1 to {MAX_SIZE}")),
            )
        })
}

fn bound(bounds: &mut BTreeMap<String, u64>, text: &str) -> Result<(), PlannerError> {
    for part in text.split(',') {
        let (key, value) = split(part)?;
        known(part, key, &DIMENSIONS)?;
        if bounds
            .insert(key.to_owned(), number(part, value)?)
            .is_some()
        {
            return wrong(part, format!("`{key}` is bounded twice"));
        }
    }
    Ok(())
}
