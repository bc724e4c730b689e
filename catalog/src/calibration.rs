//! What a few measured steps tell about a user's own system: how much longer or shorter four kinds of work take there
//! than predicted. A cluster file carries these factors (`extension`), how far the measured runs leave them open, and the runs
//! themselves. Predicted times on that cluster are multiplied by the factors. Predictions for jobs like the runs say that they are
//! calibrated; others rest on published runs, as without factors.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantArray};

use crate::adapters::Adapters;
use crate::documents::Packing;
use crate::dtype::Precision;
use crate::elementary;
use crate::error::{Wrong, in_range};
use crate::names;
use crate::reach::Reach;
use crate::residuals::{Kind, ModelKind, Residual};

/// Factors outside this range are refused: they come from a wrong plan or log, not from a system.
const PLAUSIBLE: std::ops::RangeInclusive<f64> = 0.1..=10.0;

/// Largest variance of a factor's logarithm: far above what leaves a factor between the bounds open.
const MOST_VARIANCE: f64 = 100.0;

/// How many standard deviations of a normal distribution lie on each side of its mean in an 80% interval.
pub const DEVIATIONS: f64 = 1.2816;

/// Logarithm by which a factor grows to see how fast a step time grows with it.
pub const GROWN: f64 = 0.05;

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

    /// These factors, with `factor` for one kind of work.
    #[must_use]
    pub fn with(self, rate: Rate, factor: f64) -> Self {
        let mut factors = self;
        *match rate {
            Rate::Compute => &mut factors.compute,
            Rate::Memory => &mut factors.memory,
            Rate::Network => &mut factors.network,
            Rate::Host => &mut factors.host,
        } = factor;
        factors
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
}

/// A run whose measured step time factors were learned from, with what predicting it again takes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MeasuredRun {
    /// The run in words.
    pub about: String,
    /// Measured seconds of one step.
    pub step_time_s: f64,
    /// Model preset, or the name of the model that `model_config` defines.
    pub model: String,
    /// The fields of the `config.json` that define a model that is no preset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_config: Option<serde_json::Value>,
    /// Adapters that were trained in place of the weights; absent where all weights were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapters: Option<Adapters>,
    /// What the model's layers are.
    pub model_kind: ModelKind,
    /// Precision of linear layers.
    pub precision: Precision,
    /// Devices.
    pub gpus: u64,
    /// Tokens per sequence.
    pub seq_len: u64,
    /// Sequences per step.
    pub global_batch: u64,
    /// Lengths of the documents that sequences were made of, as `--lengths` takes them; absent if each sequence was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lengths: Option<String>,
    /// How documents became sequences; given where lengths are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packing: Option<Packing>,
    /// Whether tokens were sent to experts over the network.
    pub experts_across: bool,
    /// The strategy, as `--strategy` takes it.
    pub strategy: String,
}

impl MeasuredRun {
    /// Whether it is evidence for a question of this kind and reach under the same runtime, as a published run would be.
    fn shows(&self, kind: &Kind, asked: Reach) -> bool {
        let own = Reach {
            seq_len: self.seq_len,
            experts_across: self.experts_across,
        };
        (self.model_kind, self.precision) == (kind.model, kind.precision) && own.shows(asked)
    }

    /// Whether another run repeats this one: the same strategy of the same job, whatever time was measured.
    #[must_use]
    pub fn repeats(&self, other: &Self) -> bool {
        *self
            == Self {
                about: self.about.clone(),
                step_time_s: self.step_time_s,
                ..other.clone()
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
    /// How far the runs leave the factors open: the covariance of their natural logarithms, in the order compute, memory, network,
    /// host. Zeros in files of older versions.
    #[serde(default)]
    pub covariance: [[f64; 4]; 4],
    /// Where a factor is far from 1: other factors, with one kind of work alone changed, that explain the runs as well.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub alternatives: Vec<TimeFactors>,
    /// The runs that the factors were learned from. Empty in files of older versions, whose factors count as learned from other jobs
    /// than those that are asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measured: Vec<MeasuredRun>,
    /// The runs in words.
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

    /// How many of its runs are evidence for a question of this kind and reach. Runs that repeat another are not: files of older versions
    /// may have some.
    #[must_use]
    pub fn runs_like(&self, kind: &Kind, asked: Reach) -> usize {
        let own = self
            .measured
            .iter()
            .filter(|_| self.runtime == kind.runtime);
        let own: Vec<_> = own.filter(|run| run.shows(kind, asked)).collect();
        let repeats = |at: usize| own[..at].iter().any(|earlier| earlier.repeats(own[at]));
        (0..own.len()).filter(|at| !repeats(*at)).count()
    }

    /// Widens an interval of step times by what the factors leave unexplained of the runs, and by how far the runs leave the factors
    /// open; `slopes` say how fast the logarithm of the step time grows with that of each factor. The errors are taken to be
    /// independent, so the squares of their logarithms are added. The measured runs always lie inside the result.
    #[must_use]
    pub fn widen(&self, interval: Residual, slopes: [f64; 4]) -> Residual {
        let open = (DEVIATIONS * DEVIATIONS * self.variance(slopes)).max(0.0);
        let all = |usual: f64, own: f64| {
            let own = elementary::ln(own);
            (usual * usual + own * own + open).sqrt()
        };
        let Unexplained { least, most } = self.unexplained;
        Residual {
            low: -all(interval.low, least),
            high: all(interval.high, most),
            ..interval
        }
    }

    /// The variance of the logarithm of a step time that the factors' uncertainty makes, given how fast that logarithm grows with the
    /// logarithm of each factor.
    #[must_use]
    pub fn variance(&self, slopes: [f64; 4]) -> f64 {
        let rows = self.covariance.iter().zip(slopes);
        rows.map(|(row, of)| of * row.iter().zip(slopes).map(|(c, to)| c * to).sum::<f64>())
            .sum()
    }

    /// What its factors were learned from, where they apply to other jobs than its runs'.
    #[must_use]
    pub fn words(&self) -> String {
        let runs = match self.runs {
            1 => "1 measured run".to_owned(),
            runs => format!("{runs} measured runs"),
        };
        let which = match self.measured.is_empty() {
            true => "that the cluster file does not list",
            false => "of other jobs",
        };
        format!(
            "times are multiplied by factors learned from {runs} {which} under {}",
            self.runtime
        )
    }

    /// Checks that the factors are plausible.
    ///
    /// # Errors
    /// The field, and what is wrong with it.
    pub(crate) fn check(&self) -> Result<(), Wrong> {
        self.check_names()?;
        self.check_runs()?;
        let all = std::iter::once(&self.time_factors).chain(&self.alternatives);
        for (factors, &rate) in all.flat_map(|of| Rate::ALL.iter().map(move |rate| (of, rate))) {
            in_range(factors.of(rate), PLAUSIBLE).map_err(|wrong| (rate.name(), wrong))?;
        }
        for (at, row) in self.covariance.iter().enumerate() {
            for (other, entry) in row.iter().enumerate() {
                let least = if at == other { 0.0 } else { -MOST_VARIANCE };
                if !(least..=MOST_VARIANCE).contains(entry) {
                    let message =
                        format!("{entry} is out of range; expected {least} to {MOST_VARIANCE}");
                    return Err(("covariance", message));
                }
            }
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

    /// Checks that the names that reports print can be printed.
    fn check_names(&self) -> Result<(), Wrong> {
        let own = std::iter::once(("runtime", &self.runtime));
        let of_runs = self.measured.iter();
        let of_runs = of_runs.flat_map(|run| [("about", &run.about), ("model", &run.model)]);
        own.chain(of_runs).try_for_each(|(field, name)| {
            names::printable(name).map_err(|message| (field, message))
        })
    }

    /// Checks that there are runs, and that the listed ones are complete and have a time.
    fn check_runs(&self) -> Result<(), (&'static str, String)> {
        let listed = self.measured.len();
        if self.runs == 0 {
            return Err(("runs", "0; expected at least one measured run".to_owned()));
        }
        if listed > 0 && listed as u64 != self.runs {
            return Err((
                "runs",
                format!("{}; expected the {listed} listed in `measured`", self.runs),
            ));
        }
        let mut times = self.measured.iter().map(|run| run.step_time_s);
        match times.find(|time| !(*time > 0.0 && time.is_finite())) {
            None => Ok(()),
            Some(time) => Err((
                "step_time_s",
                format!("{time} is out of range; expected above 0"),
            )),
        }
    }
}
