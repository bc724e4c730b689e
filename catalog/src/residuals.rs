//! Prediction errors on published runs whose source was left out of the fit, for intervals.
//!
//! Every published run is predicted with constants that were fitted without its source. The size of the error depends
//! on how many runs of its kind the other sources have, so errors are kept by [`Evidence`]. The 80%
//! interval of memory spans their 10% to 90% quantiles, every source weighing the same. That of the
//! step time is wider, because a new source may err more than all known ones.

use strum::{EnumString, IntoStaticStr};

use std::sync::LazyLock;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::device::Architecture;
use crate::dtype::Precision;
use crate::elementary;
use crate::reach::Reach;

/// Fewest runs with which a kind counts as covered.
pub const FEWEST: usize = 9;

const TABLE: &str = include_str!("../presets/runs/residuals.csv");

/// A predicted quantity whose errors are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, EnumString, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum Quantity {
    /// Step time.
    Time,
    /// Peak memory.
    Memory,
    /// Ratio of two step times of one sweep (same model and devices, another strategy).
    Ratio,
}

/// Properties that decide which published runs count as evidence for a prediction.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kind {
    /// Name of the runtime preset.
    pub runtime: String,
    /// Generation of the GPU.
    pub architecture: Architecture,
    /// Precision of the matrix products.
    pub precision: Precision,
    /// Kind of the model's layers.
    pub model: ModelKind,
}

/// Kinds of models whose predictions err alike.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    JsonSchema,
    EnumString,
    IntoStaticStr,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "lowercase")]
pub enum ModelKind {
    /// Attention and dense feed-forward blocks.
    Dense,
    /// Mixtures of experts.
    Experts,
    /// Models with recurrent layers, whatever else they have.
    Recurrent,
}

impl ModelKind {
    /// Name of the kind in the table.
    fn name(self) -> &'static str {
        self.into()
    }

    /// Models of this kind, in words.
    fn words(self) -> &'static str {
        match self {
            Self::Dense => "dense models",
            Self::Experts => "mixtures of experts",
            Self::Recurrent => "models with recurrent layers",
        }
    }
}

/// How well measured runs cover a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Evidence {
    /// Runs of the user's own system were measured, and predicted times are scaled by what they showed.
    Calibrated {
        /// Number of measured runs.
        runs: usize,
    },
    /// At least [`FEWEST`] runs of the kind.
    Covered {
        /// Number of runs of the kind.
        runs: usize,
    },
    /// Fewer runs of the kind, but at least [`FEWEST`] if those under other runtimes count too.
    OtherRuntimes {
        /// Number of runs, whatever the runtime.
        runs: usize,
    },
    /// Too few runs of either sort.
    Extrapolated,
    /// The cluster has several pools; no published run has such a cluster.
    SeveralPools,
}

/// An 80% interval of `ln(measured / predicted)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Residual {
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
    /// Number of runs that the interval is made from; 0 if there are none.
    pub runs: usize,
}

impl Residual {
    /// The interval around a predicted value.
    #[must_use]
    pub fn around(&self, predicted: f64) -> (f64, f64) {
        (
            predicted * elementary::exp(self.low),
            predicted * elementary::exp(self.high),
        )
    }

    /// Room that a plan leaves in memory: `ln(capacity / needed)` divided by the upper end of this
    /// interval of memory. The same free memory is less room where predictions err more.
    ///
    /// `needed` are the bytes of all tensors, of the device's context and of communicators. What the allocator caches beside them
    /// does not count: PyTorch frees it before it reports that memory ran out
    /// (<https://pytorch.org/docs/stable/notes/cuda.html>, "Memory management").
    #[must_use]
    pub fn room(&self, capacity: f64, needed: f64) -> f64 {
        elementary::ln(capacity / needed) / self.high
    }
}

/// The probability that a plan fits, as a function of the room that it leaves in memory ([`Residual::room`]):
/// `1 / (1 + exp(-(even + slope · room)))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chance {
    /// Logarithm of the odds to fit of a plan that leaves no room.
    pub even: f64,
    /// How much the logarithm of the odds grows with each unit of room.
    pub slope: f64,
    /// Number of published runs that `even` and `slope` were found from.
    pub runs: usize,
}

impl Chance {
    /// The probability that a plan with this much room fits.
    #[must_use]
    pub fn at(self, room: f64) -> f64 {
        1.0 / (1.0 + elementary::exp(-(self.even + self.slope * room)))
    }

    /// The row of `residuals.csv` with these values.
    #[must_use]
    pub fn row(self) -> String {
        format!("fits,{},{:.3},{:.3}", self.runs, self.even, self.slope)
    }
}

impl Evidence {
    /// The evidence from the number of runs of a kind, and of such runs under any runtime.
    #[must_use]
    pub fn new(of_kind: usize, of_any_runtime: usize) -> Self {
        if of_kind >= FEWEST {
            Self::Covered { runs: of_kind }
        } else if of_any_runtime >= FEWEST {
            Self::OtherRuntimes {
                runs: of_any_runtime,
            }
        } else {
            Self::Extrapolated
        }
    }

    /// Name of the evidence in the table.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Calibrated { runs: ..3 } => "after 1 run",
            Self::Calibrated { .. } => "after 3 runs",
            Self::Covered { .. } => "covered",
            Self::OtherRuntimes { .. } => "other runtimes",
            Self::Extrapolated | Self::SeveralPools => "extrapolated",
        }
    }

    /// Describes what an interval was made from: how many errors, and of which runs.
    #[must_use]
    pub fn errors(self, count: usize) -> String {
        let after = match self {
            Self::Calibrated { runs: ..3 } => "one run",
            Self::Calibrated { .. } => "three runs",
            Self::Covered { .. }
            | Self::OtherRuntimes { .. }
            | Self::Extrapolated
            | Self::SeveralPools => {
                return format!("errors on {count} runs of sources left out of the fit");
            }
        };
        format!(
            "errors of {count} predictions of published runs, each after {after} of the same source"
        )
    }

    /// The evidence in words; `beyond` is the reach that weakens it ([`Kind::evidence_for`]).
    #[must_use]
    pub fn words(self, kind: &Kind, beyond: Reach) -> String {
        let far = beyond.words();
        let model = kind.model.words();
        let precision = kind.precision.name();
        let gpu = kind.architecture.name();
        match self {
            Self::Calibrated { runs } => {
                let plural = if runs == 1 { "" } else { "s" };
                format!("calibrated: {runs} measured run{plural} of this very system")
            }
            Self::Covered { runs } => format!(
                "covered: {runs} published runs of {model} in {precision} on {gpu}{far} with the framework of {}",
                kind.runtime
            ),
            Self::OtherRuntimes { runs } => format!(
                "partly covered: {runs} published runs of {model} in {precision} on {gpu}{far}, mostly under other runtimes than {}",
                kind.runtime
            ),
            Self::Extrapolated => format!(
                "extrapolated: fewer than {FEWEST} published runs of {model} in {precision} on {gpu}{far}"
            ),
            Self::SeveralPools => {
                "extrapolated: no published run is on a cluster of several pools".to_owned()
            }
        }
    }
}

impl Kind {
    /// The evidence that published runs give for this kind.
    #[must_use]
    pub fn evidence(&self) -> Evidence {
        self.shown(Reach::default())
    }

    /// The evidence for a run of this kind and reach, and the part of the reach that weakens it
    /// because too few published runs have it (the default if none does).
    #[must_use]
    pub fn evidence_for(&self, reach: Reach) -> (Evidence, Reach) {
        let (usual, found) = (self.evidence(), self.shown(reach));
        if found.name() == usual.name() {
            return (usual, Reach::default());
        }
        let as_weak = |part: &Reach| self.shown(*part).name() == found.name();
        let beyond = reach.parts().into_iter().find(as_weak).unwrap_or(reach);
        (found, beyond)
    }

    /// The evidence from the published runs that count for this reach ([`Reach::shows`]).
    fn shown(&self, asked: Reach) -> Evidence {
        let mut of_kind = 0;
        let mut of_any_runtime = 0;
        for (kind, reach, runs) in &KNOWN.kinds {
            if kind.is_like(self) && reach.shows(asked) {
                of_any_runtime += runs;
                if kind.is_of_framework(self) {
                    of_kind += runs;
                }
            }
        }
        Evidence::new(of_kind, of_any_runtime)
    }

    /// Whether two kinds are equal apart from the runtime.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        (self.architecture, self.precision, self.model)
            == (other.architecture, other.precision, other.model)
    }

    /// Whether both runtimes belong to one framework, as its generations and recipes do.
    #[must_use]
    pub fn is_of_framework(&self, other: &Self) -> bool {
        framework(&self.runtime) == framework(&other.runtime)
    }

    /// The row of the table for runs of this kind and reach, with their number.
    #[must_use]
    pub fn row(&self, reach: Reach, runs: usize) -> String {
        let model = self.model.name();
        let experts = experts(reach.experts_across);
        let tokens = reach.seq_len;
        let (gpu, precision) = (self.architecture.name(), self.precision.name());
        format!(
            "runs,{},{gpu},{precision},{model},{tokens},{experts},{runs}",
            self.runtime
        )
    }
}

impl Quantity {
    /// Name of the quantity in the table.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Assumed half-width of the interval if there are no runs.
    fn assumed(self) -> f64 {
        match self {
            Self::Time => 0.3,
            Self::Memory => 0.15,
            Self::Ratio => 0.05,
        }
    }
}

/// The 80% interval of a quantity with this much evidence; if the table has none, that of the next weaker evidence.
#[must_use]
pub fn of(quantity: Quantity, evidence: Evidence) -> Residual {
    let names = [
        "after 3 runs",
        "after 1 run",
        "covered",
        "other runtimes",
        "extrapolated",
        "any",
    ];
    let own = names.iter().position(|&name| name == evidence.name());
    let mut weaker = names[own.unwrap_or(0)..].iter();
    let found = weaker.find_map(|&name| {
        let mut rows = KNOWN.intervals.iter();
        rows.find(|row| (row.0, row.1) == (quantity, name))
            .map(|row| row.2)
    });
    found.unwrap_or(Residual {
        low: -quantity.assumed(),
        high: quantity.assumed(),
        runs: 0,
    })
}

/// A fitted function for the probability to fit. Its sources list out-of-memory runs too.
///
/// # Panics
/// When the embedded table has no such row, which a test rules out.
#[must_use]
pub fn chance_to_fit() -> Chance {
    KNOWN.chance.expect("the table has the probability to fit")
}

/// The framework of a runtime preset, named by the framework's basic preset.
#[must_use]
pub fn framework(runtime: &str) -> &str {
    match runtime {
        // NeMo runs Megatron-Core with recipes of its own; Megatron-FSDP shards what it runs.
        "nemo" | "megatron-fsdp" => "megatron-core",
        name if name.starts_with("torchtitan") => "torchtitan",
        "megatron-deepspeed-bf16" => "megatron-deepspeed",
        name => name,
    }
}

/// The content of `residuals.csv`: 80% intervals by quantity and evidence, and how many runs of each kind are
/// published.
struct Known {
    intervals: Vec<(Quantity, &'static str, Residual)>,
    chance: Option<Chance>,
    /// Kind and reach of published runs, with the number of such runs.
    kinds: Vec<(Kind, Reach, usize)>,
}

static KNOWN: LazyLock<Known> = LazyLock::new(|| {
    let rows = || {
        TABLE
            .lines()
            .map(|line| line.split(',').collect::<Vec<&str>>())
    };
    Known {
        intervals: rows().filter_map(|cells| interval(&cells)).collect(),
        chance: rows().find_map(|cells| chance(&cells)),
        kinds: rows().filter_map(|cells| runs_of_kind(&cells)).collect(),
    }
});

fn interval(cells: &[&'static str]) -> Option<(Quantity, &'static str, Residual)> {
    let &[name, evidence, runs, low, high] = cells else {
        return None;
    };
    let residual = Residual {
        runs: runs.parse().ok()?,
        low: low.parse().ok()?,
        high: high.parse().ok()?,
    };
    Some((name.parse().ok()?, evidence, residual))
}

fn chance(cells: &[&str]) -> Option<Chance> {
    let &["fits", runs, even, slope] = cells else {
        return None;
    };
    Some(Chance {
        even: even.parse().ok()?,
        slope: slope.parse().ok()?,
        runs: runs.parse().ok()?,
    })
}

/// The table's word for whether experts are across the network.
fn experts(across: bool) -> &'static str {
    match across {
        true => "across",
        false => "within",
    }
}

fn runs_of_kind(cells: &[&str]) -> Option<(Kind, Reach, usize)> {
    let &["runs", runtime, gpu, precision, model, tokens, at, runs] = cells else {
        return None;
    };
    let kind = Kind {
        runtime: runtime.to_owned(),
        architecture: gpu.parse().ok()?,
        precision: precision.parse().ok()?,
        model: model.parse().ok()?,
    };
    let reach = Reach {
        seq_len: tokens.parse().ok()?,
        experts_across: [true, false].into_iter().find(|of| experts(*of) == at)?,
    };
    Some((kind, reach, runs.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_after_measured_runs_are_counted_as_predictions() {
        let words = |evidence: Evidence| evidence.errors(7);
        for (evidence, wanted) in [
            (
                Evidence::Calibrated { runs: 1 },
                "errors of 7 predictions of published runs, each after one run of the same source",
            ),
            (
                Evidence::Calibrated { runs: 4 },
                "errors of 7 predictions of published runs, each after three runs of the same source",
            ),
            (
                Evidence::Covered { runs: 9 },
                "errors on 7 runs of sources left out of the fit",
            ),
        ] {
            assert_eq!(words(evidence), wanted);
        }
    }

    #[test]
    fn less_evidence_gives_an_interval_no_narrower() {
        let width = |evidence| {
            let found = of(Quantity::Time, evidence);
            assert!(
                found.low < 0.0 && found.high > 0.0,
                "{evidence:?} {found:?}"
            );
            found.high - found.low
        };
        let covered = width(Evidence::Covered { runs: FEWEST });
        assert!(covered <= width(Evidence::Extrapolated));
    }

    #[test]
    fn more_room_makes_a_plan_likelier_to_fit() {
        let chance = chance_to_fit();
        assert!(chance.slope > 0.0 && chance.runs >= FEWEST, "{chance:?}");
        assert!(chance.at(-20.0) < 1e-3 && chance.at(20.0) > 0.999);
        assert!((0.2..0.8).contains(&chance.at(0.0)), "{chance:?}");
    }

    #[test]
    fn what_few_published_runs_reach_has_weaker_evidence() {
        for (runtime, model, tokens, across, evidence, says) in [
            ("nemo", ModelKind::Dense, 8192, false, "covered", ""),
            (
                "nemo",
                ModelKind::Dense,
                1 << 20,
                false,
                "extrapolated",
                " on Hopper with at least 524288 tokens per sequence",
            ),
            (
                "nemo",
                ModelKind::Dense,
                32768,
                false,
                "other runtimes",
                " with at least 16384 tokens per sequence, mostly",
            ),
            ("nemo", ModelKind::Experts, 4096, true, "covered", ""),
            (
                "nemo",
                ModelKind::Experts,
                65536,
                true,
                "extrapolated",
                " on Hopper with at least 32768 tokens per sequence",
            ),
        ] {
            let kind = Kind {
                runtime: runtime.to_owned(),
                architecture: Architecture::Hopper,
                precision: Precision::Bf16,
                model,
            };
            let reach = Reach {
                seq_len: tokens,
                experts_across: across,
            };
            let (found, beyond) = kind.evidence_for(reach);
            assert_eq!(found.name(), evidence, "{kind:?} {reach:?}");
            let words = found.words(&kind, beyond);
            assert!(words.contains(says), "{words}");
            assert_eq!(words.contains("tokens"), !says.is_empty(), "{words}");
        }
    }

    #[test]
    fn experts_across_the_network_are_evidence_of_their_own() {
        let kind = Kind {
            runtime: "nemo".to_owned(),
            architecture: Architecture::Blackwell,
            precision: Precision::Fp8,
            model: ModelKind::Experts,
        };
        for (experts_across, evidence) in [(false, "covered"), (true, "extrapolated")] {
            let reach = Reach {
                seq_len: 4096,
                experts_across,
            };
            let (found, beyond) = kind.evidence_for(reach);
            assert_eq!(found.name(), evidence, "{reach:?}");
            let said = found.words(&kind, beyond);
            assert_eq!(
                said.contains("with experts across the network"),
                experts_across
            );
        }
    }

    #[test]
    fn a_kind_that_nobody_published_is_extrapolated() {
        let kind = Kind {
            runtime: "no such runtime".to_owned(),
            architecture: Architecture::Cpu,
            precision: Precision::Fp32,
            model: ModelKind::Experts,
        };
        assert_eq!(kind.evidence(), Evidence::Extrapolated);
    }
}
