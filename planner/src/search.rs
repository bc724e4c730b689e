//! The exact pruned search: best first over the tree of the space.
//!
//! Every entry is a set of strategies with a lower bound on the objective. The entry with the least
//! bound is opened: a layout splits into pipelines, a pipeline into ways to run passes, each with
//! data-parallel messages. These are simulated, which raises the bound, and split into strategies
//! with their own bounds; a strategy is simulated. Sets are left out if their memory floor does not
//! fit, or their bound is strictly above the k-th best found, so the result equals brute force. The
//! best found changes only between waves of a fixed number of entries, so threads do not matter.

use std::collections::BinaryHeap;

use catalog::Bytes;
use costmodel::{CostModel, Score};
use plans::prediction::SpaceReport;
use plans::{Candidate, Decisions, SearchOutcome, Strategy};
use rayon::prelude::*;

use crate::PlannerError;
use crate::branches::Branches;
use crate::constraints::Constraints;
use crate::contest::{self, Contest, Scored};
use crate::executions;
use crate::explain::why_not_first;
use crate::layouts::Layout;
use crate::options::{Objective, SearchOptions};
use crate::sets::{Bounded, Entry, Opened, Set};
use crate::simplicity;
use crate::space::SearchSpace;

/// Largest number of strategies that an exhaustive search simulates.
const EXHAUSTIVE_LIMIT: u64 = 100_000_000;
/// Entries opened between two updates of the best found.
const WAVE: usize = 32;
/// Layouts bounded before the first wave.
const FIRST_CHUNK: usize = 128;
/// Layouts bounded between two later waves.
const CHUNK: usize = 512;
/// Most waves after a chunk of layouts, while fewer plans are known than wanted.
const FIRST_WAVES: usize = 32;
/// Why a strategy is left out if another differs from it only in smaller optimizer states.
const LARGER_STATES: &str = "larger optimizer states, with which no step is faster";
/// Why a strategy is left out if a fitting one differs only in keeping less in host memory.
const MORE_ON_HOST: &str = "more states in host memory than needed, with which steps take longer";
/// Why a strategy is left out if its CUDA graphs take memory and save no time that is waited for.
const SPARED_NOTHING: &str = "CUDA graphs of kernels that do not wait for the host";
/// Share of the progress shown when all layouts are bounded.
const BOUNDED: f64 = 0.7;

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
    let wanted = options.top.max(contest::LAYOUTS);
    let branches = Branches::new(costs, space, options)?;
    let run = Run::new(&branches, options, wanted, f64::INFINITY);
    let mut outcome = run.searched(progress)?.settled()?;
    if options.top > 1 && options.objective == Objective::Time && !outcome.interrupted {
        let without_axes = restricted(&branches, options, &outcome.top)?;
        outcome.wishes.extend(without_axes);
    }
    Ok(outcome)
}

/// The peak memory of the lightest strategy; `None` if there is no strategy.
///
/// # Errors
/// When a block cannot be priced.
pub(crate) fn least_memory(
    costs: &CostModel,
    constraints: &Constraints,
    options: &SearchOptions<'_>,
) -> Result<Option<Bytes>, PlannerError> {
    let lightest = SearchOptions {
        objective: Objective::Memory,
        risk: None,
        ..*options
    };
    let scenario = costs.scenario();
    let plain = executions::plain(scenario, constraints).map(CostModel::new);
    let plain = plain.transpose()?;
    let costs = plain.as_ref().unwrap_or(costs);
    let space = SearchSpace::new(costs.scenario(), constraints);
    let branches = Branches {
        only_memory: true,
        ..Branches::new(costs, &space, &lightest)?
    };
    let mut run = Run::new(&branches, &lightest, 1, f64::INFINITY);
    run.pruned(&|_| {})?;
    let lightest = run.best.first();
    Ok(lightest.map(|(_, lightest)| lightest.score.peak_memory))
}

/// Whether a space has a plan that takes at most `within` seconds. This is faster than finding the
/// best plan, because all bounds above `within` are left out.
///
/// # Errors
/// When a block cannot be priced.
pub fn has_within(
    costs: &CostModel,
    space: &SearchSpace,
    options: &SearchOptions<'_>,
    within: f64,
) -> Result<bool, PlannerError> {
    let options = SearchOptions {
        objective: Objective::Time,
        exhaustive: false,
        ..*options
    };
    Ok(first(costs, space, &options, within)?.0.is_some())
}

/// The best plan, simple or not, if one takes at most `within` seconds, or bytes where memory is minimised; and what became of
/// the space.
///
/// # Errors
/// When a block cannot be priced, or an exhaustive search is too large.
pub(crate) fn first(
    costs: &CostModel,
    space: &SearchSpace,
    options: &SearchOptions<'_>,
    within: f64,
) -> Result<(Option<Scored>, SpaceReport), PlannerError> {
    let branches = Branches::new(costs, space, options)?;
    let run = Run::new(&branches, options, 1, within).searched(&|_| {})?;
    let best = run.best.into_iter().next();
    Ok((best.map(|(_, scored)| scored), run.report))
}

/// The best plan without a pipeline and that without CP; each only if the best plan uses the axis.
fn restricted(
    branches: &Branches<'_>,
    options: &SearchOptions<'_>,
    top: &[Candidate],
) -> Result<Vec<(String, Candidate)>, PlannerError> {
    let Some(best) = top.first() else {
        return Ok(Vec::new());
    };
    let options = SearchOptions {
        top: 1,
        exhaustive: false,
        ..*options
    };
    type Size = fn(&Layout) -> u64;
    let wishes: [(&str, u64, Size); 2] = [
        ("no pipeline", best.strategy.pp, |layout| layout.pp),
        ("no context parallelism", best.strategy.cp, |l| l.cp),
    ];
    let of_wish = |&(wish, of_best, size): &(&str, u64, Size)| {
        if of_best == 1 {
            return Ok(None);
        }
        let mut run = Run::new(branches, &options, contest::LAYOUTS, f64::INFINITY);
        run.only_ties = true;
        let layouts = branches.space.layouts();
        run.layouts.retain(|&at| size(&layouts[at as usize]) == 1);
        let outcome = run.searched(&|_| {})?.settled()?;
        let plan = outcome.top.into_iter().next();
        Ok(plan.map(|mut plan| {
            plan.why_not_first = why_not_first(&best.prediction, &plan.prediction, "");
            (wish.to_owned(), plan)
        }))
    };
    let found = wishes.par_iter().map(of_wish);
    let found: Vec<Option<_>> = found.collect::<Result<_, PlannerError>>()?;
    Ok(found.into_iter().flatten().collect())
}

struct Run<'a> {
    branches: &'a Branches<'a>,
    options: &'a SearchOptions<'a>,
    /// Indices, in the space's list, of the layouts that this search covers.
    layouts: Vec<u32>,
    report: SpaceReport,
    /// The best plans of the best layouts found so far, best first, at most `wanted`.
    best: Vec<([u64; 7], Scored)>,
    /// Number of layouts that are compared in the end.
    wanted: usize,
    /// Plans beyond this value of what is minimised are not wanted.
    within: f64,
    /// Whether only the plan shown first is wanted: the best, or a simpler one that ties with it.
    only_ties: bool,
    /// What is still to be opened.
    open: BinaryHeap<Entry>,
}

impl<'a> Run<'a> {
    /// A search of all layouts of the space.
    fn new(
        branches: &'a Branches<'a>,
        options: &'a SearchOptions<'a>,
        wanted: usize,
        within: f64,
    ) -> Self {
        let space = branches.space;
        Self {
            branches,
            options,
            layouts: (0..space.layouts().len() as u32).collect(),
            report: SpaceReport {
                strategies: space.len(),
                illegal: space.illegal.clone(),
                ..SpaceReport::default()
            },
            best: Vec::new(),
            wanted,
            within,
            only_ties: false,
            open: BinaryHeap::new(),
        }
    }

    /// Searches all its layouts and returns itself.
    fn searched(mut self, progress: &(dyn Fn(f64) + Sync)) -> Result<Self, PlannerError> {
        match self.options.exhaustive {
            true => self.exhaustive(progress)?,
            false => self.pruned(progress)?,
        }
        Ok(self)
    }

    fn exhaustive(&mut self, progress: &(dyn Fn(f64) + Sync)) -> Result<(), PlannerError> {
        let strategies = self.branches.space.len();
        if strategies > EXHAUSTIVE_LIMIT {
            return Err(PlannerError::TooLarge {
                strategies,
                limit: EXHAUSTIVE_LIMIT,
            });
        }
        let layouts = self.branches.space.layouts();
        for (index, layout) in layouts.iter().enumerate() {
            if self.options.stopped() {
                break;
            }
            let members = self.branches.space.strategies(layout);
            let score = |m: &Strategy| self.branches.costs.score(m).map_err(PlannerError::from);
            let scores: Vec<Score> = members.par_iter().map(score).collect::<Result<_, _>>()?;
            self.rank(members.into_iter().zip(scores));
            progress((index + 1) as f64 / layouts.len() as f64);
        }
        Ok(())
    }

    fn pruned(&mut self, progress: &(dyn Fn(f64) + Sync)) -> Result<(), PlannerError> {
        let layouts = self.spread_out();
        let mut rest = &layouts[..];
        while !rest.is_empty() {
            if self.options.stopped() {
                return Ok(());
            }
            let first = rest.len() == layouts.len();
            let size = if first { FIRST_CHUNK } else { CHUNK };
            let (chunk, after) = rest.split_at(size.min(rest.len()));
            rest = after;
            let bounded: Vec<Bounded> = chunk
                .par_iter()
                .with_max_len(1)
                .map(|&at| self.branches.as_a_whole(at))
                .collect::<Result<_, _>>()?;
            for bounded in bounded {
                self.take(bounded, 0.0);
            }
            let mut waves = 0;
            while self.best.len() < self.wanted && waves < FIRST_WAVES && self.wave()? {
                waves += 1;
            }
            progress(BOUNDED * (layouts.len() - rest.len()) as f64 / layouts.len() as f64);
        }
        let mut opened = 0;
        while !self.options.stopped() && self.wave()? {
            opened += WAVE;
            let known = (opened + self.open.len()) as f64;
            progress(BOUNDED + (1.0 - BOUNDED) * opened as f64 / known);
        }
        if !self.options.stopped() {
            while let Some(entry) = self.open.pop() {
                self.prune(self.reason(), entry.members);
            }
        }
        Ok(())
    }

    fn reason(&self) -> &'static str {
        match self.options.objective {
            Objective::Time => "time floor above the best found",
            Objective::Memory => "memory floor above the best found",
        }
    }

    /// The layouts in the order in which they are bounded: first a few from every part of the space, then the others. The sooner a
    /// good plan is found, the more of the space its time rules out.
    fn spread_out(&self) -> Vec<u32> {
        let step = self.layouts.len().div_ceil(FIRST_CHUNK).max(1);
        let first = self.layouts.iter().step_by(step);
        let others = self.layouts.chunks(step).flat_map(|part| &part[1..]);
        first.chain(others).copied().collect()
    }

    /// Queues the parts of an opened set and counts those left out; `bound` is the set's own.
    fn take(&mut self, bounded: Bounded, bound: f64) {
        self.prune("memory floor", bounded.too_large);
        self.prune(self.reason(), bounded.beyond);
        self.prune(LARGER_STATES, bounded.larger);
        self.prune(MORE_ON_HOST, bounded.more_on_host);
        self.prune(SPARED_NOTHING, bounded.captured);
        for entry in bounded.entries {
            self.push(Entry {
                bound: entry.bound.max(bound),
                ..entry
            });
        }
    }

    fn push(&mut self, entry: Entry) {
        if self.beyond(entry.bound) || self.beyond_own(&entry) {
            self.prune(self.reason(), entry.members);
        } else {
            self.open.push(entry);
        }
    }

    /// Opens the entries with the least bounds; returns whether there were any.
    fn wave(&mut self) -> Result<bool, PlannerError> {
        let mut entries = Vec::with_capacity(WAVE);
        while entries.len() < WAVE
            && self
                .open
                .peek()
                .is_some_and(|entry| !self.beyond(entry.bound))
            && let Some(entry) = self.open.pop()
        {
            if self.beyond_own(&entry) {
                self.prune(self.reason(), entry.members);
            } else {
                entries.push(entry);
            }
        }
        let opened: Vec<Opened> = entries
            .par_iter()
            .with_max_len(1)
            .map(|entry| self.branches.opened(entry, self.most(entry)))
            .collect::<Result<_, _>>()?;
        let any = !entries.is_empty();
        let mut scored = Vec::new();
        let mut found = Vec::new();
        for (entry, opened) in entries.into_iter().zip(opened) {
            match (opened.score, entry.of) {
                (Some(score), Set::Chain(chain)) => scored.push((chain.first, score)),
                (None, _) => {}
                (Some(_), _) => unreachable!("only strategies have a score"),
            }
            found.push((opened.sets, entry.bound));
        }
        self.rank(scored.into_iter());
        for (entries, bound) in found {
            self.take(entries, bound);
        }
        Ok(any)
    }

    /// Counts simulated strategies and adds those that fit to the best found, one per layout.
    fn rank(&mut self, scored: impl Iterator<Item = (Strategy, Score)>) {
        let objective = self.options.objective;
        for (strategy, score) in scored {
            self.report.simulated += 1;
            if !self.branches.fits(&score) {
                self.report.too_large += 1;
                continue;
            }
            if self.minimised(&score) > self.within {
                continue;
            }
            let layout = simplicity::layout(&strategy);
            let scored = Scored { strategy, score };
            match self.best.iter_mut().find(|(known, _)| *known == layout) {
                Some((_, known)) if scored.order(known, objective).is_lt() => *known = scored,
                Some(_) => {}
                None => self.best.push((layout, scored)),
            }
        }
        (self.best).sort_by(|(_, a), (_, b)| a.order(b, objective));
        self.best.truncate(self.wanted);
    }

    /// Whether a strategy with this lower bound is certainly worse than every plan kept so far.
    fn beyond(&self, bound: f64) -> bool {
        if bound > self.within {
            return true;
        }
        let ties = || 1.0 + contest::tie(self.branches.costs, self.options);
        if self.only_ties
            && let Some((_, best)) = self.best.first()
            && bound > self.minimised(&best.score) * ties()
        {
            return true;
        }
        if self.best.len() < self.wanted {
            return false;
        }
        let worst = self.minimised(&self.best[self.best.len() - 1].1.score);
        // A set with the same bound as the worst plan kept may hold one that ranks before it.
        bound > worst || bound == worst && self.branches.only_memory
    }

    /// Whether the strategies of an entry are certainly worse than the best known of their own layout.
    fn beyond_own(&self, entry: &Entry) -> bool {
        let own = self.best_own(entry);
        own.is_some_and(|best| entry.bound > self.minimised(&best.score))
    }

    /// The best plan known of an entry's own layout.
    fn best_own(&self, entry: &Entry) -> Option<&Scored> {
        let layout = self.branches.layout(entry).sizes();
        let own = self.best.iter().find(|(known, _)| *known == layout);
        own.map(|(_, plan)| plan)
    }

    /// The largest value of the objective at which a strategy of an entry can be among the best.
    /// Above it, [`Self::beyond`] or [`Self::beyond_own`] leaves it out.
    fn most(&self, entry: &Entry) -> f64 {
        let full = self.best.len() >= self.wanted;
        let worst = self.best.last().filter(|_| full);
        let known = self
            .best_own(entry)
            .into_iter()
            .chain(worst.map(|(_, plan)| plan));
        let known = known.map(|plan| self.minimised(&plan.score));
        known.fold(self.within, f64::min)
    }

    /// The value of the search's objective for a plan.
    fn minimised(&self, score: &Score) -> f64 {
        (self.options.objective).of(score.step_time, score.peak_memory)
    }

    fn prune(&mut self, reason: &str, count: u64) {
        if count > 0 {
            *self.report.pruned.entry(reason.to_owned()).or_default() += count;
        }
    }

    /// Searches the best layouts again with every number of layers, and returns the plans to show.
    fn settled(self) -> Result<SearchOutcome, PlannerError> {
        let best = self.best.iter().map(|(_, plan)| plan.strategy.decisions());
        let best: Vec<&Decisions> = best.collect();
        let finer = match self.options.objective {
            Objective::Time if !self.options.stopped() => self.branches.space.finer(&best),
            Objective::Time | Objective::Memory => None,
        };
        let Some(finer) = finer else {
            return self.finish();
        };
        let branches = Branches::new(self.branches.costs, &finer, self.options)?;
        let again = Run {
            only_ties: self.only_ties,
            best: self.best,
            ..Run::new(&branches, self.options, self.wanted, self.within)
        };
        let again = again.searched(&|_| {})?;
        let report = self.report;
        Run { report, ..again }.finish()
    }

    fn finish(self) -> Result<SearchOutcome, PlannerError> {
        let interrupted = self.options.stopped();
        let best: Vec<Scored> = self.best.into_iter().map(|(_, scored)| scored).collect();
        let Branches {
            costs,
            space,
            limit,
            ref shapes,
            ..
        } = *self.branches;
        let ranked = Contest {
            costs,
            space,
            options: self.options,
            shapes,
            limit,
        };
        let ranked = ranked.ranked(&best)?;
        let (names, wished): (Vec<_>, Vec<_>) = ranked.wishes.into_iter().unzip();
        let wanted = ranked.plans.len();
        let plans: Vec<Scored> = ranked.plans.into_iter().chain(wished).collect();
        let mut top = candidates(costs, plans)?;
        let wished = top.split_off(wanted);
        let names = names.into_iter().map(str::to_owned);
        let wishes = names.zip(wished).collect();
        Ok(SearchOutcome {
            top,
            wishes,
            space: self.report,
            relax: Vec::new(),
            interrupted,
        })
    }
}

/// Predicts the step time and memory of every plan. Every plan after the first also gets a line that says why it ranks lower.
fn candidates(costs: &CostModel, plans: Vec<Scored>) -> Result<Vec<Candidate>, PlannerError> {
    let predicted = |plan: Scored| {
        Ok(Candidate {
            prediction: costs.predict(&plan.strategy)?,
            strategy: plan.strategy,
            why_not_first: String::new(),
        })
    };
    let all = plans.into_par_iter().map(predicted);
    let mut all: Vec<Candidate> = all.collect::<Result<_, PlannerError>>()?;
    let runtime = &costs.scenario().runtime;
    if let Some((first, others)) = all.split_first_mut() {
        for plan in others {
            let more = simplicity::beyond(&plan.strategy, &first.strategy, runtime);
            plan.why_not_first = why_not_first(&first.prediction, &plan.prediction, &more);
        }
    }
    Ok(all)
}
