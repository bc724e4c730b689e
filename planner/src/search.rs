//! The exact pruned search: best first over the tree of the space.
//!
//! Every entry stands for a set of strategies and has a lower bound on what is minimised. An entry is opened when its
//! bound is the least: a layout with a pipeline becomes the ways to run its passes; each is simulated without data-parallel
//! traffic, which raises its bound, then becomes its strategies, each with a bound of its own; a strategy is simulated. Sets are left out if their memory
//! floor does not fit, or if their bound is strictly above the k-th best found, so the result equals brute force.
//! Entries are opened in waves of fixed size and the best found changes only between waves, so the result does not
//! depend on threads.

use std::collections::{BTreeMap, BinaryHeap, btree_map};
use std::sync::atomic::Ordering;

use catalog::{Bytes, Seconds};
use costmodel::{CostModel, Lightest, PipelineFloors, Score};
use plans::prediction::SpaceReport;
use plans::{Candidate, Decisions, Floors, SearchOutcome, Strategy};
use rayon::prelude::*;

use crate::PlannerError;
use crate::chains::Chain;
use crate::contest::{self, Contest, Scored};
use crate::explain::why_not_first;
use crate::layouts::Layout;
use crate::options::{Objective, SearchOptions, limit};
use crate::sets::{Bounded, Chained, Entry, Opened, Set};
use crate::shapes::Shapes;
use crate::simplicity;
use crate::space::{SearchSpace, with_pipeline};

/// Largest number of strategies that an exhaustive search simulates.
const EXHAUSTIVE_LIMIT: u64 = 100_000_000;
/// Entries opened between two updates of the best found.
const WAVE: usize = 32;
/// Layouts bounded before the first wave.
const FIRST_CHUNK: usize = 128;
/// Layouts bounded between two later waves.
const CHUNK: usize = 512;
/// Waves after a chunk of layouts, as long as fewer plans are known than wanted.
const FIRST_WAVES: usize = 16;
/// Why strategies are left out of which another differs only in smaller optimizer states.
const LARGER_STATES: &str = "larger optimizer states, with which no step is faster";
/// Why strategies are left out of which another, which fits, differs only in keeping less in host memory.
const MORE_ON_HOST: &str = "more states in host memory than needed, with which steps take longer";
/// Share of the work, as progress is shown, after which all layouts are bounded.
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
    let mut run = Run {
        costs,
        space,
        options,
        limit: limit(costs, options),
        report: SpaceReport {
            strategies: space.len(),
            illegal: space.illegal.clone(),
            ..SpaceReport::default()
        },
        best: Vec::new(),
        wanted: options.top.max(contest::LAYOUTS),
        shapes: Shapes::new(costs, space)?,
        open: BinaryHeap::new(),
    };
    if options.exhaustive {
        run.exhaustive(progress)?;
    } else {
        run.pruned(progress)?;
    }
    let mut outcome = run.finish()?;
    if options.top > 1 && options.objective == Objective::Time && !outcome.interrupted {
        outcome
            .wishes
            .extend(restricted(costs, space, options, &outcome.top)?);
    }
    Ok(outcome)
}

/// The best plans without an axis that the best of all has.
fn restricted(
    costs: &CostModel,
    space: &SearchSpace,
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
    let mut found = Vec::new();
    let wishes = [
        ("no pipeline", "pp", best.strategy.pp),
        ("no context parallelism", "cp", best.strategy.cp),
    ];
    for (wish, axis, size) in wishes {
        if size > 1 {
            let space = space.without(axis);
            let outcome = search(costs, &space, &options, &|_| {})?;
            let plan = outcome.top.into_iter().next();
            found.extend(plan.map(|mut plan| {
                plan.why_not_first = why_not_first(&best.prediction, &plan.prediction, "");
                (wish.to_owned(), plan)
            }));
        }
    }
    Ok(found)
}

struct Run<'a> {
    costs: &'a CostModel,
    space: &'a SearchSpace,
    options: &'a SearchOptions<'a>,
    limit: Bytes,
    report: SpaceReport,
    /// The best plans of the best layouts found so far, best first, at most `wanted`.
    best: Vec<([u64; 7], Scored)>,
    /// Number of layouts that are compared in the end.
    wanted: usize,
    /// The shapes of the space's pipelines.
    shapes: Shapes,
    /// What is still to be opened.
    open: BinaryHeap<Entry>,
}

impl Run<'_> {
    fn exhaustive(&mut self, progress: &(dyn Fn(f64) + Sync)) -> Result<(), PlannerError> {
        let strategies = self.space.len();
        if strategies > EXHAUSTIVE_LIMIT {
            return Err(PlannerError::TooLarge {
                strategies,
                limit: EXHAUSTIVE_LIMIT,
            });
        }
        let layouts = self.space.layouts();
        for (index, layout) in layouts.iter().enumerate() {
            if self.stopped() {
                break;
            }
            let members = self.space.strategies(layout);
            let score = |m: &Strategy| self.costs.score(m).map_err(PlannerError::from);
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
            if self.stopped() {
                return Ok(());
            }
            let size = if rest.len() == layouts.len() {
                FIRST_CHUNK
            } else {
                CHUNK
            };
            let (chunk, after) = rest.split_at(size.min(rest.len()));
            rest = after;
            let lazily = self.best.len() >= self.wanted;
            let bounded: Vec<Bounded> = chunk
                .par_iter()
                .map(|&at| match lazily {
                    true => self.as_a_whole(at),
                    false => self.bounded(at),
                })
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
        while !self.stopped() && self.wave()? {
            opened += WAVE;
            let known = (opened + self.open.len()) as f64;
            progress(BOUNDED + (1.0 - BOUNDED) * opened as f64 / known);
        }
        if !self.stopped() {
            while let Some(entry) = self.open.pop() {
                self.prune(self.reason(), self.count(&entry));
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

    fn bound(&self, floors: &Floors) -> f64 {
        match self.options.objective {
            Objective::Time => floors.time.0,
            Objective::Memory => floors.memory.as_f64(),
        }
    }

    /// The indices of all layouts, first some of all parts of the space: good plans that are found early leave out most of
    /// it.
    fn spread_out(&self) -> Vec<u32> {
        let layouts = self.space.layouts().len();
        let step = layouts.div_ceil(FIRST_CHUNK).max(1);
        let (mut order, others): (Vec<u32>, Vec<u32>) =
            (0..layouts as u32).partition(|&at| (at as usize).is_multiple_of(step));
        order.extend(others);
        order
    }

    /// Bounds a layout by what all its pipelines take at least.
    fn as_a_whole(&self, at: u32) -> Result<Bounded, PlannerError> {
        let layout = &self.space.layouts()[at as usize];
        let base = self.space.decisions(layout);
        let states = (self.costs).states_floor(&base, &self.space.lightest(layout, &base))?;
        if states > self.limit {
            return Ok(Bounded {
                too_large: self.space.members(layout),
                ..Bounded::default()
            });
        }
        let bound = match self.options.objective {
            Objective::Memory => states.as_f64(),
            Objective::Time => {
                let time = self.shapes.least_time(self.costs, self.space, layout)?;
                time.0
            }
        };
        Ok(Bounded::of(Entry {
            bound,
            place: [at, 0, 0, 0, 0],
            of: Set::Layout,
        }))
    }

    /// Bounds all pipelines of a layout.
    fn bounded(&self, at: u32) -> Result<Bounded, PlannerError> {
        let layout = &self.space.layouts()[at as usize];
        let base = self.space.decisions(layout);
        let lightest = self.space.lightest(layout, &base);
        let orders = self.space.orders(layout);
        let executed = self.space.executed(layout);
        let beside = executed.len() as u64 * self.space.beside(layout);
        let pipelines = self.space.pipelines(layout);
        let mut bounded = Bounded::default();
        if self.costs.states_floor(&base, &lightest)? > self.limit {
            bounded.too_large = self.space.members(layout);
            return Ok(bounded);
        }
        let mut costs = BTreeMap::new();
        let shapes = self.shapes.of(layout);
        // If it is memory that is minimised, the least of all is wanted.
        let limit = (self.options.objective == Objective::Time).then_some(self.limit);
        for (index, pipeline) in pipelines.iter().enumerate() {
            for (mode, &activations) in pipeline.activations.iter().enumerate() {
                let recompute = activations.recompute;
                let kind = (recompute.of_layer(0), recompute.of_layer(u64::MAX));
                let bounds = match costs.entry(kind) {
                    btree_map::Entry::Occupied(known) => known.into_mut(),
                    btree_map::Entry::Vacant(new) => {
                        let recomputing = |d: &Decisions| Decisions {
                            recompute,
                            ..d.clone()
                        };
                        let among: Vec<Decisions> = executed.iter().map(recomputing).collect();
                        new.insert(self.costs.layout_bounds(&among, &lightest, orders)?)
                    }
                };
                let shape = &shapes[index][mode];
                let PipelineFloors { floors, on_host } =
                    self.costs.pipeline_floors(bounds, shape, limit)?;
                if floors.memory > self.limit {
                    bounded.too_large += beside;
                } else {
                    bounded.entries.push(Entry {
                        bound: self.bound(&floors),
                        place: [at, index as u32, mode as u32, 0, 0],
                        of: Set::Pipeline { on_host },
                    });
                }
            }
        }
        Ok(bounded)
    }

    fn layout(&self, entry: &Entry) -> &Layout {
        &self.space.layouts()[entry.place[0] as usize]
    }

    /// Number of strategies that an entry stands for.
    fn count(&self, entry: &Entry) -> u64 {
        match &entry.of {
            Set::Layout => self.space.members(self.layout(entry)),
            Set::Chain(chain) => 1 + chain.later.len() as u64,
            Set::Pipeline { .. } => {
                let layout = self.layout(entry);
                self.space.executions(layout).len() as u64 * self.space.beside(layout)
            }
            Set::Execution { .. } | Set::Simulated(_) => self.space.beside(self.layout(entry)),
        }
    }

    /// Keeps what a set consists of; `bound` is the set's own.
    fn take(&mut self, bounded: Bounded, bound: f64) {
        self.prune("memory floor", bounded.too_large);
        self.prune(LARGER_STATES, bounded.larger);
        self.prune(MORE_ON_HOST, bounded.more_on_host);
        for entry in bounded.entries {
            self.push(Entry {
                bound: entry.bound.max(bound),
                ..entry
            });
        }
    }

    fn push(&mut self, entry: Entry) {
        if self.beyond(entry.bound) {
            self.prune(self.reason(), self.count(&entry));
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
        {
            entries.extend(self.open.pop());
        }
        let opened: Vec<Opened> = entries
            .par_iter()
            .map(|entry| self.opened(entry))
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

    fn opened(&self, entry: &Entry) -> Result<Opened, PlannerError> {
        let sets = match &entry.of {
            Set::Chain(chain) => return self.scored(entry, chain),
            Set::Layout => self.bounded(entry.place[0])?,
            &Set::Pipeline { on_host } => match self.executions(entry, on_host)? {
                Some(executions) => executions,
                None => self.simulated(entry, on_host)?,
            },
            &Set::Execution { on_host } => self.simulated(entry, on_host)?,
            Set::Simulated(passes) => self.strategies(entry, *passes)?,
        };
        Ok(Opened { score: None, sets })
    }

    /// What an entry fixes: of a set, those of its first member.
    fn decisions(&self, entry: &Entry) -> Decisions {
        let layout = self.layout(entry);
        let pipeline = &self.space.pipelines(layout)[entry.place[1] as usize];
        let activations = pipeline.activations[entry.place[2] as usize];
        let d = with_pipeline(&self.space.decisions(layout), pipeline, activations);
        self.space.executions(layout)[entry.place[3] as usize].of(&d)
    }

    /// The ways to run the passes of a pipeline, each with its bound; `None` if there is only one.
    fn executions(&self, entry: &Entry, on_host: Seconds) -> Result<Option<Bounded>, PlannerError> {
        let layout = self.layout(entry);
        let executions = self.space.executions(layout).len();
        if executions == 1 {
            return Ok(None);
        }
        let orders = self.space.orders(layout);
        let [at, pipeline, mode, ..] = entry.place;
        let shape = &self.shapes.of(layout)[pipeline as usize][mode as usize];
        let mut bounded = Bounded::default();
        for execution in 0..executions as u32 {
            let mut execution = Entry {
                bound: entry.bound,
                place: [at, pipeline, mode, execution, 0],
                of: Set::Execution { on_host },
            };
            if self.options.objective == Objective::Time {
                let d = self.decisions(&execution);
                let bounds = self
                    .costs
                    .layout_bounds(&[d], &Lightest::default(), orders)?;
                let least = self.costs.pipeline_floors(&bounds, shape, None)?.floors;
                execution.bound = (least.time + on_host).0;
            }
            bounded.entries.push(execution);
        }
        Ok(Some(bounded))
    }

    /// The same strategies with a bound from the simulated passes, where time is minimised.
    fn simulated(&self, entry: &Entry, on_host: Seconds) -> Result<Bounded, PlannerError> {
        if self.options.objective == Objective::Memory {
            return self.strategies(entry, None);
        }
        let orders = self.space.orders(self.layout(entry));
        let passes = self.costs.passes(&self.decisions(entry), orders)?;
        Ok(Bounded::of(Entry {
            bound: passes.map_or(0.0, |time| (time + on_host).0),
            place: entry.place,
            of: Set::Simulated(passes),
        }))
    }

    /// The strategies with a pipeline, recomputation and way to run passes, with their bounds.
    fn strategies(&self, of: &Entry, passes: Option<Seconds>) -> Result<Bounded, PlannerError> {
        let layout = self.layout(of);
        let d = &self.decisions(of);
        let ways = self.space.ways(layout);
        let orders = self.space.orders(layout);
        let [at, pipeline, mode, execution, _] = of.place;
        let mut found = Bounded {
            // The optimizer is the last that a rank does: with smaller states all else is alike, and the step is neither
            // longer nor takes more memory.
            larger: ways.larger * orders.len() as u64,
            ..Bounded::default()
        };
        // If it is memory that is minimised, each way is tried by itself.
        let together = match self.options.objective {
            Objective::Time => usize::MAX,
            Objective::Memory => 1,
        };
        let mut index = 0;
        for chain in ways.chains.iter().flat_map(|Chain(of)| of.chunks(together)) {
            for &order in orders {
                let place = [at, pipeline, mode, execution, index];
                let of = |&way: &u32| self.space.with_sharding(d, &ways.all[way as usize], order);
                self.add_chain(chain, of, place, passes, &mut found)?;
                index += 1;
            }
        }
        Ok(found)
    }

    /// Adds the first strategy of a chain that may fit, with those after it. `of` makes the strategies.
    fn add_chain(
        &self,
        mut chain: &[u32],
        of: impl Fn(&u32) -> Strategy,
        place: [u32; 5],
        passes: Option<Seconds>,
        found: &mut Bounded,
    ) -> Result<(), PlannerError> {
        let ways = self.space.ways(&self.space.layouts()[place[0] as usize]);
        while let Some((first, later)) = chain.split_first() {
            let first = of(first);
            let next = later
                .first()
                .and_then(|&way| ways.all[way as usize].offload);
            let floors = self.costs.floors(&first, passes, next)?;
            if floors.may_fit(self.limit) {
                let bound = self.bound(&floors);
                let later = later.to_vec();
                let of = Set::Chain(Box::new(Chained {
                    first,
                    later,
                    passes,
                }));
                found.entries.push(Entry { bound, place, of });
                break;
            }
            found.too_large += 1;
            chain = later;
        }
        Ok(())
    }

    /// Simulates the first strategy of a chain. Those after it are left out if it fits and is faster.
    fn scored(&self, entry: &Entry, chain: &Chained) -> Result<Opened, PlannerError> {
        let score = self.costs.score(&chain.first)?;
        let ways = self.space.ways(self.layout(entry));
        let order = chain.first.axis_order;
        let of = |&way: &u32| {
            let way = &ways.all[way as usize];
            self.space.with_sharding(&chain.first, way, order)
        };
        let mut sets = Bounded::default();
        let mut add = |later| self.add_chain(later, of, entry.place, chain.passes, &mut sets);
        let next = (chain.later.first()).and_then(|&way| ways.all[way as usize].offload);
        match next {
            Some(next) if self.fits(&score) => {
                // With still more on the host it takes still longer.
                if self.costs.updates_before(&chain.first, next)? {
                    sets.more_on_host += chain.later.len() as u64;
                } else {
                    chain.later.chunks(1).try_for_each(add)?;
                }
            }
            _ => add(&chain.later)?,
        }
        Ok(Opened {
            score: Some(score),
            sets,
        })
    }

    fn fits(&self, score: &Score) -> bool {
        score.peak_memory <= self.limit && score.fits_host
    }

    /// Takes simulated strategies into the best found.
    fn rank(&mut self, scored: impl Iterator<Item = (Strategy, Score)>) {
        let objective = self.options.objective;
        for (strategy, score) in scored {
            self.report.simulated += 1;
            if !self.fits(&score) {
                self.report.too_large += 1;
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
        if self.best.len() < self.wanted {
            return false;
        }
        let worst = &self.best[self.best.len() - 1].1.score;
        bound
            > match self.options.objective {
                Objective::Time => worst.step_time.0,
                Objective::Memory => worst.peak_memory.as_f64(),
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
        let best: Vec<Scored> = self.best.into_iter().map(|(_, scored)| scored).collect();
        let ranked = Contest {
            costs: self.costs,
            space: self.space,
            options: self.options,
            shapes: &self.shapes,
            limit: self.limit,
        };
        let ranked = ranked.ranked(&best)?;
        let mut top: Vec<Candidate> = Vec::with_capacity(ranked.plans.len());
        for plan in ranked.plans {
            let first = top.first();
            top.push(candidate(self.costs, plan, first)?);
        }
        let mut wishes = Vec::with_capacity(ranked.wishes.len());
        for (wish, plan) in ranked.wishes {
            wishes.push((wish.to_owned(), candidate(self.costs, plan, top.first())?));
        }
        Ok(SearchOutcome {
            top,
            wishes,
            space: self.report,
            relax: Vec::new(),
            interrupted,
        })
    }
}

/// A plan with its prediction, compared with the first.
fn candidate(
    costs: &CostModel,
    plan: Scored,
    first: Option<&Candidate>,
) -> Result<Candidate, PlannerError> {
    let prediction = costs.predict(&plan.strategy)?;
    let runtime = &costs.scenario().runtime;
    let why_not_first = first.map_or_else(String::new, |first| {
        let more = simplicity::beyond(&plan.strategy, &first.strategy, runtime);
        why_not_first(&first.prediction, &prediction, &more)
    });
    Ok(Candidate {
        strategy: plan.strategy,
        prediction,
        why_not_first,
    })
}
