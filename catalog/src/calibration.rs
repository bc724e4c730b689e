//! What a few measured steps tell about a user's own system: how much longer or shorter four kinds of work take there
//! than predicted. A cluster file carries these factors (`extension`); predicted times on that cluster are multiplied
//! by them, and predictions say that they are calibrated.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantArray};

use crate::elementary;
use crate::error::{Wrong, in_range};
use crate::residuals::Residual;

/// Factors outside this range are refused: they come from a wrong plan or log, not from a system.
const PLAUSIBLE: std::ops::RangeInclusive<f64> = 0.1..=10.0;

/// The kinds of work that a calibration tells apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Rate {
    /// Matrix products and fused attention.
    Compute,
    /// Kernels bound by device memory, the optimizer's among them.
    Memory,
    /// Collectives and transfers between devices.
    Network,
    /// The host: launching kernels, and its work between steps.
    Host,
}

impl Rate {
    /// All kinds, in the order of arrays that hold one value for each.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// The kind's name, as a cluster file spells it.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// Times over predicted times by kind of work; 1 is as predicted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TimeFactors {
    /// Of matrix products and fused attention.
    pub compute: f64,
    /// Of kernels bound by device memory.
    pub memory: f64,
    /// Of collectives and transfers between devices.
    pub network: f64,
    /// Of launching kernels and of the host's work between steps.
    pub host: f64,
}

impl Default for TimeFactors {
    fn default() -> Self {
        Self {
            compute: 1.0,
            memory: 1.0,
            network: 1.0,
            host: 1.0,
        }
    }
}

impl TimeFactors {
    /// The factor of a kind of work.
    #[must_use]
    pub fn of(&self, rate: Rate) -> f64 {
        match rate {
            Rate::Compute => self.compute,
            Rate::Memory => self.memory,
            Rate::Network => self.network,
            Rate::Host => self.host,
        }
    }

    /// The factors whose natural logarithms these are, in the order of [`Rate::ALL`].
    #[must_use]
    pub fn from_logs([compute, memory, network, host]: [f64; 4]) -> Self {
        Self {
            compute: elementary::exp(compute),
            memory: elementary::exp(memory),
            network: elementary::exp(network),
            host: elementary::exp(host),
        }
    }
}

/// What the factors leave unexplained: measured step times over those that the factors give.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Unexplained {
    /// The least of all runs, at most 1.
    pub least: f64,
    /// The most of all runs, at least 1.
    pub most: f64,
}

impl Default for Unexplained {
    fn default() -> Self {
        Self {
            least: 1.0,
            most: 1.0,
        }
    }
}

impl Unexplained {
    /// The least and the most of several ratios.
    #[must_use]
    pub fn of(ratios: impl Iterator<Item = f64>) -> Self {
        ratios.fold(Self::default(), |found, ratio| Self {
            least: found.least.min(ratio),
            most: found.most.max(ratio),
        })
    }

    /// Widens an interval of step times by the unexplained error. The two errors are taken to be independent, so the squares of
    /// their logarithms are added; the measured runs always lie inside the result.
    #[must_use]
    pub fn widen(self, interval: Residual) -> Residual {
        let both = |usual: f64, own: f64| {
            let own = elementary::ln(own);
            (usual * usual + own * own).sqrt()
        };
        Residual {
            low: -both(interval.low, self.least),
            high: both(interval.high, self.most),
            ..interval
        }
    }
}

/// How long work takes on a cluster, learned from measured steps of the user's own runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// Runtime of the runs. Its host's time and evidence are that runtime's own; the other factors hold for all.
    pub runtime: String,
    /// Number of runs that were measured.
    pub runs: u64,
    /// Measured over predicted times.
    pub time_factors: TimeFactors,
    /// What these factors leave unexplained of the runs.
    #[serde(default)]
    pub unexplained: Unexplained,
    /// The runs.
    pub source: String,
}

impl Calibration {
    /// The factors that hold under a runtime: the host's is 1 unless the runtime is the one that was measured.
    #[must_use]
    pub fn factors(&self, runtime: &str) -> TimeFactors {
        let host = if self.runtime == runtime {
            self.time_factors.host
        } else {
            1.0
        };
        TimeFactors {
            host,
            ..self.time_factors
        }
    }

    /// Checks that the factors are plausible.
    ///
    /// # Errors
    /// The field, and what is wrong with it.
    pub(crate) fn check(&self) -> Result<(), Wrong> {
        if self.runs == 0 {
            return Err(("runs", "0; expected at least one measured run".to_owned()));
        }
        for &rate in Rate::ALL {
            in_range(self.time_factors.of(rate), PLAUSIBLE)
                .map_err(|wrong| (rate.name(), wrong))?;
        }
        let Unexplained { least, most } = self.unexplained;
        for (name, ratio, range) in [
            ("least", least, *PLAUSIBLE.start()..=1.0),
            ("most", most, 1.0..=*PLAUSIBLE.end()),
        ] {
            in_range(ratio, range).map_err(|wrong| (name, wrong))?;
        }
        Ok(())
    }
}
