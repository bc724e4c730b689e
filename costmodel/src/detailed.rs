//! Detailed predictions, and how far they may be off where factors were learned from a few runs.
//!
//! The runs leave factors uncertain, by a covariance. The variance of the logarithm of a step time
//! is `slopes · covariance · slopes`. A slope says how fast the step time grows with one factor: it
//! is found by predicting again with that factor grown. Where quite other factors would explain the
//! runs as well, the interval includes what they predict.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use catalog::calibration::{Calibration, DEVIATIONS, GROWN, Rate, TimeFactors};
use catalog::residuals::Residual;
use catalog::{Seconds, elementary};
use plans::{Decisions, Prediction, Strategy};

use crate::assemble::Assembled;
use crate::block_cost::{BlockDetail, BlockKey};
use crate::block_set::passes_alone;
use crate::cost_model::{CostModel, Others};
use crate::pipeline::Pipelines;
use crate::predict::{Errors, Simulated, prediction};
use crate::{CostError, Scenario};

impl CostModel {
    /// Simulates a strategy and says in detail where its time and memory go.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn predict(&self, strategy: &Strategy) -> Result<Prediction, CostError> {
        self.reaches_peers(strategy)?;
        self.has_dispatcher(strategy)?;
        self.has_recipe(strategy)?;
        let assembled = self.assembled(strategy)?;
        let outcome = self.simulated(strategy, &assembled)?;
        let program = Pipelines::program(strategy)?;
        let pool_of_rank = self.pools.of_ranks(&self.scenario, strategy)?;
        let details = self.details(strategy, &assembled, &pool_of_rank)?;
        let usual = Errors {
            time: self.scenario.time_residual(strategy),
            ratio: self.scenario.comparison_error(),
        };
        let errors = self.with_factors_open(usual, strategy, outcome.step_time)?;
        let simulated = Simulated {
            assembled: &assembled,
            outcome: &outcome,
            program: &program,
            pools: &self.pools,
            pool_of_rank: &pool_of_rank,
            details: &details,
        };
        Ok(prediction(&self.scenario, strategy, &simulated, errors))
    }

    /// For every pool, the details of the costs of the blocks that run in it.
    fn details(
        &self,
        d: &Decisions,
        assembled: &Assembled,
        pool_of_rank: &[usize],
    ) -> Result<Vec<BTreeMap<BlockKey, BlockDetail>>, CostError> {
        let mut details = vec![BTreeMap::new(); self.pools.all().len()];
        for (stage, &rank) in assembled.rank_of_stage().iter().enumerate() {
            let pool = pool_of_rank[rank as usize];
            for run in assembled.runs(stage) {
                let key = run.cost.key;
                if let Entry::Vacant(entry) = details[pool].entry(key) {
                    let costs = &self.pools.all()[pool];
                    let detail = costs.detail(&key)?;
                    entry.insert(match key.alone() {
                        None => detail,
                        Some(alone) => detail.mixed(costs.detail(&alone)?, passes_alone(d)),
                    });
                }
            }
        }
        Ok(details)
    }

    /// The `usual` errors, widened because measured runs leave factors uncertain; `step` is the
    /// strategy's predicted step time.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub(crate) fn with_factors_open(
        &self,
        usual: Errors,
        strategy: &Strategy,
        step: Seconds,
    ) -> Result<Errors, CostError> {
        let mut errors = usual;
        let [mut least, mut most] = [0.0_f64; 2];
        for others in self.others()? {
            let change = |costs: &CostModel| {
                let changed = costs.score(strategy)?.step_time;
                Ok(elementary::ln(changed / step))
            };
            let mut slopes = [0.0; 4];
            for (slope, grown) in slopes.iter_mut().zip(&others.grown) {
                *slope = change(grown)? / GROWN;
            }
            errors.time = others.learned.widen(errors.time, slopes);
            let open = DEVIATIONS * DEVIATIONS * others.learned.variance(slopes);
            errors.ratio = (errors.ratio * errors.ratio + open.max(0.0)).sqrt();
            for other in &others.alternatives {
                let change: f64 = change(other)?;
                least = least.min(change);
                most = most.max(change);
            }
        }
        Ok(Errors {
            time: Residual {
                low: errors.time.low + least,
                high: errors.time.high + most,
                ..errors.time
            },
            ratio: errors.ratio + most.max(-least),
        })
    }

    /// For every calibration of the cluster, the cost models under other factors.
    fn others(&self) -> Result<&[Others], CostError> {
        if let Some(known) = self.others.get() {
            return Ok(known);
        }
        let calibrations = self.scenario.cluster.calibrations();
        let made = calibrations
            .into_iter()
            .map(|learned| others(&self.scenario, learned));
        let made: Vec<Others> = made.collect::<Result<_, _>>()?;
        Ok(self.others.get_or_init(|| made))
    }
}

/// The cost models of a scenario under other factors than those that a calibration learned.
fn others(scenario: &Scenario, learned: &Calibration) -> Result<Others, CostError> {
    let with = |factors: TimeFactors| {
        CostModel::new(Scenario {
            cluster: scenario.cluster.with_factors(learned, factors),
            ..scenario.clone()
        })
    };
    let factors = learned.time_factors;
    let grown = Rate::ALL.iter().map(|&rate| {
        let factor = factors.of(rate) * elementary::exp(GROWN);
        with(factors.with(rate, factor))
    });
    let alternatives = learned.alternatives.iter().map(|other| with(*other));
    Ok(Others {
        learned: learned.clone(),
        grown: grown.collect::<Result<_, _>>()?,
        alternatives: alternatives.collect::<Result<_, _>>()?,
    })
}
