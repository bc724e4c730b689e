//! The exact pruned search.
//!
//! A family is a set of strategies that differ only in recomputation. Its members share a lower bound on time (floor),
//! that of recomputing nothing: recomputation only adds work. Families are opened in order of that floor; members that
//! fit are simulated in waves of fixed size. A family (or member) is skipped only if its floor is strictly above the
//! k-th best found, so the result equals brute force. The best found change only between waves, so the result does not
//! depend on threads.

use std::sync::atomic::{AtomicBool, Ordering};

use costmodel::{CostModel, Score};
use plans::prediction::SpaceReport;
use plans::{Candidate, Floors, Recompute, SearchOutcome, Strategy};
use rayon::prelude::*;

use crate::PlannerError;
use crate::explain::why_not_first;
use crate::space::{Family, SearchSpace};

/// Largest number of strategies that an exhaustive search simulates.
const EXHAUSTIVE_LIMIT: u64 = 1_000_000;
/// Strategies simulated between two updates of the best found.
pub(crate) const WAVE: usize = 64;

/// What a search minimises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Objective {
    /// Minimise step time.
    #[default]
    Time,
    /// Minimise peak memory.
    Memory,
}

/// Options of a search.
#[derive(Clone, Copy, Debug)]
pub struct SearchOptions<'a> {
    /// What to minimise. On a fixed number of devices, most tokens per dollar means least time.
    pub objective: Objective,
    /// Number of strategies to return.
    pub top: usize,
    /// Whether to simulate every strategy, without pruning.
    pub exhaustive: bool,
    /// When set from outside, the search stops and returns the best found so far.
    pub cancelled: Option<&'a AtomicBool>,
}

impl Default for SearchOptions<'_> {
    fn default() -> Self {
        Self {
            objective: Objective::Time,
            top: 10,
            exhaustive: false,
            cancelled: None,
        }
    }
}

/// A strategy that was simulated, with its score.
#[derive(Clone, Debug)]
struct Scored {
    strategy: Strategy,
    score: Score,
}

/// Searches a space. `progress` receives the share done, in `[0, 1]`.
///
/// # Errors
/// When a block cannot be priced, or an exhaustive search is too large.
pub fn search(
    costs: &CostModel,
    space: &SearchSpace,
    options: &SearchOptions<'_>,
    progress: &(dyn Fn(f64) + Sync),
) -> Result<SearchOutcome, PlannerError> {
    let mut run = Run {
        costs,
        options,
        report: report(space),
        best: Vec::new(),
    };
    if options.exhaustive {
        run.exhaustive(space, progress)?;
    } else {
        run.pruned(space, progress)?;
    }
    run.finish()
}

fn report(space: &SearchSpace) -> SpaceReport {
    SpaceReport {
        strategies: space.len(),
        illegal: space.illegal.clone(),
        ..SpaceReport::default()
    }
}

struct Run<'a> {
    costs: &'a CostModel,
    options: &'a SearchOptions<'a>,
    report: SpaceReport,
    /// The best found so far, best first, at most `top`.
    best: Vec<Scored>,
}

impl Run<'_> {
    fn exhaustive(
        &mut self,
        space: &SearchSpace,
        progress: &(dyn Fn(f64) + Sync),
    ) -> Result<(), PlannerError> {
        let strategies = space.len();
        if strategies > EXHAUSTIVE_LIMIT {
            return Err(PlannerError::TooLarge {
                strategies,
                limit: EXHAUSTIVE_LIMIT,
            });
        }
        for (index, chunk) in space.families.chunks(WAVE).enumerate() {
            let members: Vec<Strategy> = chunk.iter().flat_map(|f| self.members(f)).collect();
            self.simulate(members)?;
            progress(((index + 1) * WAVE) as f64 / space.families.len() as f64);
            if self.stopped() {
                break;
            }
        }
        Ok(())
    }

    fn pruned(
        &mut self,
        space: &SearchSpace,
        progress: &(dyn Fn(f64) + Sync),
    ) -> Result<(), PlannerError> {
        let bounded: Vec<Option<Floors>> = space
            .families
            .par_iter()
            .map(|family| self.family_floors(family))
            .collect::<Result<_, PlannerError>>()?;
        progress(0.5);
        let mut order: Vec<(usize, Floors)> = Vec::with_capacity(bounded.len());
        for (index, floors) in bounded.into_iter().enumerate() {
            match floors {
                Some(floors) => order.push((index, floors)),
                None => self.prune("memory floor", space.families[index].recompute.len() as u64),
            }
        }
        match self.options.objective {
            Objective::Time => {
                order.sort_by(|a, b| a.1.time.0.total_cmp(&b.1.time.0).then(a.0.cmp(&b.0)))
            }
            Objective::Memory => {
                order.sort_by(|a, b| a.1.memory.cmp(&b.1.memory).then(a.0.cmp(&b.0)))
            }
        }
        let mut at = 0;
        while at < order.len() && !self.stopped() {
            let mut members: Vec<Strategy> = Vec::new();
            while at < order.len() && members.len() < WAVE {
                let (index, floors) = order[at];
                if self.beyond(&floors) {
                    // Families are in order of their floors, so all later ones are too slow as well.
                    for &(rest, _) in &order[at..] {
                        self.prune(self.reason(), space.families[rest].recompute.len() as u64);
                    }
                    at = order.len();
                    break;
                }
                members.extend(self.members(&space.families[index]));
                at += 1;
            }
            self.wave(members)?;
            progress(0.5 + 0.5 * at as f64 / order.len().max(1) as f64);
        }
        Ok(())
    }

    fn reason(&self) -> &'static str {
        match self.options.objective {
            Objective::Time => "time floor above the best found",
            Objective::Memory => "memory floor above the best found",
        }
    }

    /// Lower bounds of a whole family: time with nothing recomputed, memory with everything recomputed. `None` if even
    /// that does not fit.
    fn family_floors(&self, family: &Family) -> Result<Option<Floors>, PlannerError> {
        let lightest = family
            .recompute
            .iter()
            .copied()
            .find(|r| *r == Recompute::Full);
        let time = self.costs.floors(&family.base)?;
        if self.options.objective == Objective::Time && time.memory <= self.costs.capacity() {
            // The bound of the lightest member is no higher, and only whether it fits matters here.
            return Ok(Some(time));
        }
        let memory = match lightest.and_then(|r| family.member(self.costs.scenario(), r)) {
            Some(full) => self.costs.floors(&full)?.memory.min(time.memory),
            None if family.recompute == [Recompute::None] => time.memory,
            // If no member recomputes everything, no member's memory bounds all others from below.
            None => catalog::Bytes(0),
        };
        Ok((memory <= self.costs.capacity()).then_some(Floors {
            time: time.time,
            memory,
        }))
    }

    /// Computes the members' floors, then simulates those that may be among the best.
    fn wave(&mut self, members: Vec<Strategy>) -> Result<(), PlannerError> {
        let floors: Vec<Floors> = members
            .par_iter()
            .map(|m| self.costs.floors(m).map_err(PlannerError::from))
            .collect::<Result<_, _>>()?;
        let mut open = Vec::with_capacity(members.len());
        for (member, floors) in members.into_iter().zip(floors) {
            if floors.memory > self.costs.capacity() {
                self.prune("memory floor", 1);
            } else if self.beyond(&floors) {
                self.prune(self.reason(), 1);
            } else {
                open.push((member, floors));
            }
        }
        // The most promising first, so that the best found may exclude the rest of the wave.
        open.sort_by(|a, b| a.1.time.0.total_cmp(&b.1.time.0));
        for part in open.chunks(16) {
            let (keep, skip): (Vec<_>, Vec<_>) = part.iter().partition(|(_, f)| !self.beyond(f));
            self.prune(self.reason(), skip.len() as u64);
            self.simulate(keep.into_iter().map(|(m, _)| m.clone()).collect())?;
        }
        Ok(())
    }

    fn members(&self, family: &Family) -> Vec<Strategy> {
        family
            .recompute
            .iter()
            .filter_map(|&r| family.member(self.costs.scenario(), r))
            .collect()
    }

    fn simulate(&mut self, members: Vec<Strategy>) -> Result<(), PlannerError> {
        let scores: Vec<Score> = members
            .par_iter()
            .map(|m| self.costs.score(m).map_err(PlannerError::from))
            .collect::<Result<_, _>>()?;
        self.report.simulated += members.len() as u64;
        for (strategy, score) in members.into_iter().zip(scores) {
            if score.fits {
                self.best.push(Scored { strategy, score });
            } else {
                self.report.too_large += 1;
            }
        }
        let objective = self.options.objective;
        self.best.sort_by(|a, b| {
            let time = a.score.step_time.0.total_cmp(&b.score.step_time.0);
            let memory = a.score.peak_memory.cmp(&b.score.peak_memory);
            let first = match objective {
                Objective::Time => time.then(memory),
                Objective::Memory => memory.then(time),
            };
            first.then_with(|| a.strategy.cmp(&b.strategy))
        });
        self.best.truncate(self.options.top.max(1));
        Ok(())
    }

    /// Whether a strategy with these lower bounds is certainly worse than every plan kept so far.
    fn beyond(&self, floors: &Floors) -> bool {
        if self.best.len() < self.options.top.max(1) {
            return false;
        }
        let worst = &self.best[self.best.len() - 1].score;
        match self.options.objective {
            Objective::Time => floors.time > worst.step_time,
            Objective::Memory => floors.memory > worst.peak_memory,
        }
    }

    fn prune(&mut self, reason: &str, count: u64) {
        if count > 0 {
            *self.report.pruned.entry(reason.to_owned()).or_default() += count;
        }
    }

    fn stopped(&self) -> bool {
        self.options
            .cancelled
            .is_some_and(|flag| flag.load(Ordering::Relaxed))
    }

    fn finish(self) -> Result<SearchOutcome, PlannerError> {
        let interrupted = self.stopped();
        let mut top: Vec<Candidate> = Vec::with_capacity(self.best.len());
        for scored in self.best {
            let prediction = self.costs.predict(&scored.strategy)?;
            let why_not_first = top.first().map_or_else(String::new, |first| {
                why_not_first(&first.prediction, &prediction)
            });
            top.push(Candidate {
                strategy: scored.strategy,
                prediction,
                why_not_first,
            });
        }
        Ok(SearchOutcome {
            top,
            space: self.report,
            relax: Vec::new(),
            interrupted,
        })
    }
}
