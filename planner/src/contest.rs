//! Ranks plans: the best layouts that a search found, each by its simplest variant, and the plans
//! that are best by other measures.
//!
//! A layout is as good as its best plan. Each of the [`LAYOUTS`] best layouts (more if more plans
//! are asked for) is shown by the simplest variant that ties with its best plan. The simplest of
//! these that ties with the best plan of all comes first; the others follow by the objective. Two
//! plans tie if their times differ by no more than [`SearchOptions::tie`]. Memory never ties.

use std::collections::{BTreeMap, btree_map};

use catalog::{AxisOrder, Bytes, Seconds, elementary};
use costmodel::{CostModel, Lightest, Scenario, Score};
use plans::{Decisions, Strategy};
use rayon::prelude::*;

use crate::PlannerError;
use crate::choices::{ActivationChoice, ShardingChoice};
use crate::layouts::Layout;
use crate::options::{Objective, SearchOptions};
use crate::shapes::Shapes;
use crate::simplicity::{self, Complexity};
use crate::space::{SearchSpace, with_pipeline};

/// Layouts that are compared, if no more plans are asked for.
pub const LAYOUTS: usize = 10;
/// Largest relative difference of step times that can be a tie, whatever the error of comparisons.
pub const TIE: f64 = 0.01;
/// Largest share by which a plan named as the simplest may be slower than the fastest.
const SIMPLE_WITHIN: f64 = 0.02;

/// Smallest relative gain in step time for which the fastest plan is listed in addition to the
/// first.
const NOTICED: f64 = 0.0005;

/// A strategy that was simulated, with its score.
#[derive(Clone, Debug)]
pub(crate) struct Scored {
    pub(crate) strategy: Strategy,
    pub(crate) score: Score,
}

impl Scored {
    /// Compares by the objective, then by the other measure, then by the strategy itself.
    pub(crate) fn order(&self, other: &Self, objective: Objective) -> std::cmp::Ordering {
        let [a, b] = [self, other].map(|of| (of.score.step_time, of.score.peak_memory));
        (objective.order(a, b)).then_with(|| self.strategy.cmp(&other.strategy))
    }
}

/// Plans in the order in which they are shown.
#[derive(Debug, Default)]
pub(crate) struct Ranked {
    pub(crate) plans: Vec<Scored>,
    /// Plans that are best by another measure than step time, each with that measure in words, such as `least memory`.
    pub(crate) wishes: Vec<(&'static str, Scored)>,
}

/// Ranks plans found by a search.
pub(crate) struct Contest<'a> {
    pub(crate) costs: &'a CostModel,
    pub(crate) space: &'a SearchSpace,
    pub(crate) options: &'a SearchOptions<'a>,
    /// Block counts per rank of every pipeline in the space.
    pub(crate) shapes: &'a Shapes,
    /// Memory of a device that a plan may use at most.
    pub(crate) limit: Bytes,
}

/// Largest relative difference at which two plans count as equally good.
pub(crate) fn tie(costs: &CostModel, options: &SearchOptions<'_>) -> f64 {
    match options.objective {
        Objective::Time => options.tie.unwrap_or_else(|| {
            let error = costs.scenario().comparison_error();
            (elementary::exp(error) - 1.0).min(TIE)
        }),
        Objective::Memory => 0.0,
    }
}

impl Contest<'_> {
    /// Ranks the best plans of the best layouts, given best first.
    ///
    /// # Errors
    /// When a block cannot be priced.
    pub(crate) fn ranked(&self, best: &[Scored]) -> Result<Ranked, PlannerError> {
        let Some(fastest) = best.first() else {
            return Ok(Ranked::default());
        };
        let simplest = best.par_iter().map(|scored| self.simplest(scored));
        let mut plans: Vec<Scored> = simplest.collect::<Result<_, _>>()?;
        let within = |plan: &Scored, share: f64| {
            plan.score.step_time.0 <= fastest.score.step_time.0 * (1.0 + share)
        };
        let simplest = |share: f64| {
            let tied = (0..plans.len()).filter(|&at| within(&plans[at], share));
            tied.min_by_key(|&at| self.complexity(&plans[at].strategy))
        };
        let mut wishes = Vec::new();
        let objective = self.options.objective;
        if objective == Objective::Time {
            let first = &plans[simplest(self.tie()).unwrap_or(0)];
            let gained = 1.0 - fastest.score.step_time.0 / first.score.step_time.0;
            if gained >= NOTICED {
                wishes.push(("fastest and cheapest", fastest.clone()));
            }
            if let Some(at) = simplest(SIMPLE_WITHIN) {
                wishes.push(("simplest within 2%", plans[at].clone()));
            }
            // `plans` lists simple plans; the fastest plan need not be among them.
            let these = || plans.iter().chain([fastest]);
            let lightest = these().min_by_key(|plan| plan.score.peak_memory);
            wishes.extend(lightest.map(|plan| ("least memory of these", plan.clone())));
            let of_replica =
                |plan: &&Scored| plan.strategy.tp * plan.strategy.cp * plan.strategy.pp;
            let smallest = these().min_by_key(of_replica);
            let wish = "fewest GPUs per replica of these";
            wishes.extend(smallest.map(|plan| (wish, plan.clone())));
            let first = simplest(self.tie()).unwrap_or(0);
            let first = plans.remove(first);
            plans.sort_by(|a, b| a.order(b, objective));
            plans.insert(0, first);
        }
        plans.truncate(self.options.top.max(1));
        wishes.retain(|(_, plan)| plan.strategy != plans[0].strategy);
        Ok(Ranked { plans, wishes })
    }

    fn tie(&self) -> f64 {
        tie(self.costs, self.options)
    }

    fn complexity(&self, strategy: &Strategy) -> Complexity {
        simplicity::complexity(strategy, &self.costs.scenario().runtime)
    }

    /// The simplest variant of a plan that ties with it; of equally simple ones the best.
    fn simplest(&self, best: &Scored) -> Result<Scored, PlannerError> {
        if self.options.objective == Objective::Memory {
            return Ok(best.clone());
        }
        let slowest = best.score.step_time.0 * (1.0 + self.tie());
        let mut variants = self.simpler(&best.strategy, slowest)?;
        variants.sort();
        for group in variants.chunk_by(|a, b| a.0 == b.0) {
            let scored = group
                .par_iter()
                .map(|(_, variant)| self.tied(variant, slowest));
            let scored: Vec<Option<Scored>> = scored.collect::<Result<_, _>>()?;
            let found = scored.into_iter().flatten();
            if let Some(found) = found.min_by(|a, b| a.order(b, self.options.objective)) {
                return Ok(found);
            }
        }
        Ok(best.clone())
    }

    /// The score of a variant, if it fits and its step takes no more than `slowest` seconds.
    fn tied(&self, variant: &Strategy, slowest: f64) -> Result<Option<Scored>, PlannerError> {
        let score = (self.costs).score_within(variant, Seconds(slowest), self.limit)?;
        Ok(score.map(|score| Scored {
            strategy: variant.clone(),
            score,
        }))
    }

    /// The simpler variants of a strategy in the space. Some above `slowest` seconds are left out.
    fn simpler(
        &self,
        of: &Strategy,
        slowest: f64,
    ) -> Result<Vec<(Complexity, Strategy)>, PlannerError> {
        let mut simpler = Vec::new();
        for layout in self.space.layouts().iter().filter(|l| l.has_sizes_of(of)) {
            self.simpler_of(layout, of, slowest, &mut simpler)?;
        }
        Ok(simpler)
    }

    /// Adds the simpler variants of `of` in one layout to `simpler`.
    fn simpler_of(
        &self,
        layout: &Layout,
        of: &Strategy,
        slowest: f64,
        simpler: &mut Vec<(Complexity, Strategy)>,
    ) -> Result<(), PlannerError> {
        let alike = |activations: &&ActivationChoice| {
            let kinds = [of.recompute, activations.recompute].map(simplicity::kind);
            let recomputes_alike = kinds[0] == kinds[1];
            recomputes_alike && (activations.offload_layers > 0) == (of.offload_layers > 0)
        };
        let shards_alike = |sharding: &&ShardingChoice| {
            sharding.zero == of.zero
                && sharding.reshard_after_forward == of.reshard_after_forward
                && sharding.dp_replicate == of.dp_replicate
        };
        let shardings = self.space.shardings(layout).iter();
        let shardings: Vec<&ShardingChoice> = shardings.filter(shards_alike).collect();
        let orders = self.space.orders(layout);
        let shapes = self.shapes.of(layout);
        let runtime = &self.costs.scenario().runtime;
        let (base, most) = (self.space.decisions(layout), self.complexity(of));
        let mut bounds = BTreeMap::new();
        let none = Lightest::default();
        for (pipeline, shapes) in self.space.pipelines(layout).iter().zip(shapes) {
            let activations = pipeline.activations.iter().zip(shapes);
            for (&activations, shape) in activations.filter(|(of, _)| alike(of)) {
                let recompute = activations.recompute;
                for execution in self.space.executions(layout, pipeline, activations) {
                    let d = execution.of(&with_pipeline(&base, pipeline, activations));
                    let ways = shardings.iter();
                    let shardings = ways.filter(|way| execution.leaves(way, runtime));
                    let mut found = self.simpler_beneath(&d, shardings, orders, most);
                    if found.is_empty() {
                        continue;
                    }
                    let kind = recompute.of_first_and_others();
                    let bounds = match bounds.entry((execution, kind)) {
                        btree_map::Entry::Occupied(known) => known.into_mut(),
                        btree_map::Entry::Vacant(new) => {
                            let d = Decisions {
                                recompute,
                                ..execution.of(&base)
                            };
                            new.insert(self.costs.layout_bounds(&[d], &none, orders)?)
                        }
                    };
                    let least = self.costs.pipeline_floors(bounds, shape, &[], None)?.floors;
                    if least.time.0 <= slowest {
                        simpler.append(&mut found);
                    }
                }
            }
        }
        Ok(())
    }

    /// The strategies with the pipeline and execution of `d` that are simpler than `most`.
    fn simpler_beneath<'s>(
        &self,
        d: &Decisions,
        shardings: impl Iterator<Item = &'s &'s ShardingChoice> + Clone,
        orders: &[AxisOrder],
        most: Complexity,
    ) -> Vec<(Complexity, Strategy)> {
        let Scenario {
            model,
            workload,
            runtime,
            ..
        } = self.costs.scenario();
        let mut found = Vec::new();
        for &axis_order in orders {
            for sharding in shardings.clone() {
                let d = Decisions {
                    axis_order,
                    ..sharding.of(d)
                };
                let complexity = simplicity::complexity(&d, runtime);
                if complexity < most {
                    let strategy = Strategy::new(d, model, workload).ok();
                    found.extend(strategy.map(|strategy| (complexity, strategy)));
                }
            }
        }
        found
    }
}
