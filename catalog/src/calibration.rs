//! Calibration of a cluster from a few measured steps: one time factor (measured over predicted)
//! for each of four kinds of work. A cluster file carries the factors (`extension`). Predicted
//! times on that cluster are multiplied by them, and predictions say that they are calibrated.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantArray};

use crate::elementary;
use crate::error::{Wrong, in_range};
use crate::residuals::Residual;

/// Factors outside this range are refused: they come from a wrong plan or log, not from a system.
const PLAUSIBLE: std::ops::RangeInclusive<f64> = 0.1..=10.0;

/// A kind of work that has a calibration factor of its own.
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

/// Measured over predicted time for each kind of work; 1 means as predicted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TimeFactors {
    /// Factor of matrix products and fused attention.
    pub compute: f64,
    /// Factor of kernels bound by device memory.
    pub memory: f64,
    /// Factor of collectives and transfers between devices.
    pub network: f64,
    /// Factor of kernel launches and of the host's work between steps.
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

    /// Makes factors from their natural logarithms, given in the order of [`Rate::ALL`].
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

/// The error that remains after calibration: range of measured over calibrated step times.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Unexplained {
    /// The smallest ratio of all runs, at most 1.
    pub least: f64,
    /// The largest ratio of all runs, at least 1.
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
    /// The smallest and the largest of these ratios and 1.
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

/// Time factors of a cluster, learned from measured steps of the user's own runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// Runtime of the runs. The host factor and `unexplained` hold for it alone, the rest for all.
    pub runtime: String,
    /// Number of runs that were measured.
    pub runs: u64,
    /// Measured over predicted times.
    pub time_factors: TimeFactors,
    /// The error on these runs that the factors leave.
    #[serde(default)]
    pub unexplained: Unexplained,
    /// The measured runs in words, such as `run.log: 90 steps`.
    pub source: String,
}

impl Calibration {
    /// The factors under a runtime: the host factor is 1 unless this runtime was the measured one.
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
