//! Constants fitted to published runs, with the values that benchmarks alone give and the ranges
//! that a refit searches.

use std::sync::OnceLock;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::SpecError;

const FILE: &str = include_str!("../presets/fitted.yaml");

/// A fitted constant.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Constant {
    /// Time of matrix kernels in training relative to short benchmarks at boost clocks.
    TrainingTime,
    /// Share of the best 8-bit product rate of short benchmarks that training sustains.
    #[serde(rename = "sustained_share_8")]
    SustainedShare8,
}

const COUNT: usize = 2;

/// The value of a constant and where it comes from.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The constant.
    pub name: Constant,
    /// What it means.
    pub what: String,
    /// Its unit.
    pub unit: String,
    /// Value that predictions use.
    pub value: f64,
    /// Value that benchmarks alone give.
    pub prior: f64,
    /// Least and largest value that a refit tries.
    pub range: (f64, f64),
    /// Which runs it was fitted to, and where the prior is from.
    pub source: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[allow(
        dead_code,
        reason = "read so that other versions are refused by the schema"
    )]
    schema_version: u32,
    constants: Vec<Entry>,
}

/// A value for every constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fitted([f64; COUNT]);

impl Fitted {
    /// The value of a constant.
    #[must_use]
    pub fn get(&self, constant: Constant) -> f64 {
        self.0[constant as usize]
    }

    /// What benchmarks alone say.
    #[must_use]
    pub fn of_benchmarks() -> Self {
        let values = Self([0.0; COUNT]);
        let prior = |values: Self, entry: &Entry| values.with(entry.name, entry.prior);
        entries().iter().fold(values, prior)
    }

    /// The same values, except for one constant.
    #[must_use]
    pub fn with(mut self, constant: Constant, value: f64) -> Self {
        self.0[constant as usize] = value;
        self
    }
}

impl Default for Fitted {
    fn default() -> Self {
        let mut values = Self([0.0; COUNT]);
        for entry in entries() {
            values = values.with(entry.name, entry.value);
        }
        values
    }
}

/// The shipped constants.
///
/// # Panics
/// Never: a test parses the embedded file.
#[must_use]
pub fn entries() -> &'static [Entry] {
    static ENTRIES: OnceLock<Vec<Entry>> = OnceLock::new();
    ENTRIES.get_or_init(|| parse(FILE).expect("the embedded file is well-formed, a test shows"))
}

fn parse(text: &str) -> Result<Vec<Entry>, SpecError> {
    let file: File = crate::text::yaml(text, "preset fitted.yaml")?;
    Ok(file.constants)
}

/// Reads constants from a file like `presets/fitted.yaml`; absent ones keep the shipped values.
///
/// # Errors
/// With line and field when it is malformed.
pub fn load(path: &std::path::Path) -> Result<Fitted, SpecError> {
    let text = crate::text::read(path)?;
    let file: File = crate::text::yaml(&text, &path.display().to_string())?;
    let values = file
        .constants
        .iter()
        .fold(Fitted::default(), |values, entry| {
            values.with(entry.name, entry.value)
        });
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_constant_has_one_entry_inside_its_range() {
        let entries = parse(FILE).expect("well-formed");
        for (index, entry) in entries.iter().enumerate() {
            assert_eq!(entry.name as usize, index, "{:?}", entry.name);
            let (low, high) = entry.range;
            for value in [entry.value, entry.prior] {
                assert!((low..=high).contains(&value), "{:?}", entry.name);
            }
        }
        assert_eq!(entries.len(), COUNT);
    }
}
