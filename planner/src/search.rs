//! The exact pruned search: best first over the tree of the space.
//!
//! Every entry stands for a set of strategies and has a lower bound on what is minimised. An entry is opened when its
//! bound is the least: a layout with a pipeline is simulated without data-parallel traffic, which raises its bound, then
//! becomes its strategies, each with a bound of its own; a strategy is simulated. Sets are left out if their memory
//! floor does not fit, or if their bound is strictly above the k-th best found, so the result equals brute force.
//! Entries are opened in waves of fixed size and the best found changes only between waves, so the result does not
//! depend on threads.

use std::cmp::Ordering as Order;
use std::collections::{BTreeMap, BinaryHeap, btree_map};
use std::sync::atomic::Ordering;

use catalog::{Bytes, Seconds, Zero};
use costmodel::{CostModel, Score, Shape};
use plans::prediction::SpaceReport;
use plans::{Candidate, Decisions, Floors, SearchOutcome, Strategy};
use rayon::prelude::*;

use crate::PlannerError;
use crate::choices::PipelineChoice;
use crate::contest::{self, Contest, Scored};
use crate::explain::why_not_first;
use crate::options::{Objective, SearchOptions, limit};
use crate::simplicity;
use crate::space::{Layout, SearchSpace, with_pipeline};

/// Largest number of strategies that an exhaustive search simulates.
const EXHAUSTIVE_LIMIT: u64 = 100_000_000;
/// Entries opened between two updates of the best found.
const WAVE: usize = 32;
/// Layouts bounded between two waves.
const CHUNK: usize = 512;
/// Waves after a chunk of layouts, as long as fewer plans are known than wanted.
const FIRST_WAVES: usize = 4;
/// Why strategies are left out of which another differs only in smaller optimizer states.
const LARGER_STATES: &str = "larger optimizer states, with which no step is faster";
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
    /// What is still to be opened.
    open: BinaryHeap<Entry>,
}

/// The shapes of pipelines, by their ranks and micro-batches: for every pipeline, one for each recomputation.
type Shapes = BTreeMap<(u64, u64), Vec<Vec<Shape>>>;

/// A set of strategies.
#[derive(Debug)]
struct Entry {
    /// Lower bound on what is minimised.
    bound: f64,
    /// Where it stands in the order of enumeration, which breaks ties.
    place: [u32; 4],
    of: Set,
}

#[derive(Debug)]
enum Set {
    /// All strategies of a layout with one pipeline and recomputation.
    Pipeline,
    /// The same, after the time at which passes end was simulated.
    Simulated(Option<Seconds>),
    /// One strategy.
    Single(Box<Strategy>),
}

/// What an entry turned out to be.
enum Opened {
    /// The same set, with the end of passes simulated, and the bound that it gives.
    Passes(Option<Seconds>, f64),
    /// Strategies.
    Strategies(Bounded<(f64, Strategy)>),
    /// A simulated strategy.
    Score(Score),
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Order::Equal
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Order> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    /// A heap gives its greatest entry: the one with the least bound.
    fn cmp(&self, other: &Self) -> Order {
        let bounds = other.bound.total_cmp(&self.bound);
        bounds.then_with(|| other.place.cmp(&self.place))
    }
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
        let shapes = self.shapes()?;
        let layouts = self.space.layouts();
        for (index, chunk) in layouts.chunks(CHUNK).enumerate() {
            if self.stopped() {
                return Ok(());
            }
            let first = index * CHUNK;
            let bounded: Vec<Bounded<Entry>> = chunk
                .par_iter()
                .enumerate()
                .map(|(at, layout)| self.bounded((first + at) as u32, layout, &shapes))
                .collect::<Result<_, _>>()?;
            for bounded in bounded {
                self.prune("memory floor", bounded.too_large);
                for entry in bounded.entries {
                    self.push(entry);
                }
            }
            let mut waves = 0;
            while self.best.len() < self.wanted && waves < FIRST_WAVES && self.wave()? {
                waves += 1;
            }
            progress(BOUNDED * (first + chunk.len()) as f64 / layouts.len() as f64);
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

    /// The shapes of all pipelines of the space.
    fn shapes(&self) -> Result<Shapes, PlannerError> {
        let of_sizes = |(&(pp, num_micro_batches), pipelines): (&(u64, u64), &_)| {
            let pipelines: &Vec<PipelineChoice> = pipelines;
            let layout = Layout {
                pp,
                num_micro_batches,
                ..self.space.layouts()[0]
            };
            let base = self.space.decisions(&layout);
            let of_pipeline = |pipeline: &PipelineChoice| {
                let shape =
                    |&recompute: &_| (self.costs).shape(&with_pipeline(&base, pipeline, recompute));
                pipeline.recompute.iter().map(shape).collect()
            };
            let shapes: Result<Vec<Vec<Shape>>, _> = pipelines.iter().map(of_pipeline).collect();
            Ok(((pp, num_micro_batches), shapes?))
        };
        if self.space.is_empty() {
            return Ok(Shapes::new());
        }
        let all: Vec<_> = self.space.all_pipelines().iter().collect();
        let all = all
            .into_par_iter()
            .map(|(sizes, pipelines)| of_sizes((sizes, &**pipelines)));
        all.collect()
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

    /// Bounds all pipelines of a layout.
    fn bounded(
        &self,
        at: u32,
        layout: &Layout,
        shapes: &Shapes,
    ) -> Result<Bounded<Entry>, PlannerError> {
        let base = self.space.decisions(layout);
        let lightest = self.space.lightest(layout, &base);
        let orders = self.space.orders(layout);
        let beside = self.beside(layout);
        let pipelines = self.space.pipelines(layout);
        let members: usize = pipelines.iter().map(|p| p.recompute.len()).sum();
        let mut bounded = Bounded::default();
        if self.costs.states_floor(&base, &lightest)? > self.limit {
            bounded.too_large = members as u64 * beside;
            return Ok(bounded);
        }
        let mut costs = BTreeMap::new();
        let shapes = &shapes[&(layout.pp, layout.num_micro_batches)];
        for (index, pipeline) in pipelines.iter().enumerate() {
            for (mode, &recompute) in pipeline.recompute.iter().enumerate() {
                let kind = (recompute.of_layer(0), recompute.of_layer(u64::MAX));
                let bounds = match costs.entry(kind) {
                    btree_map::Entry::Occupied(known) => known.into_mut(),
                    btree_map::Entry::Vacant(new) => {
                        let d = Decisions {
                            recompute,
                            ..base.clone()
                        };
                        new.insert(self.costs.layout_bounds(&d, &lightest, orders)?)
                    }
                };
                let floors = self.costs.pipeline_floors(bounds, &shapes[index][mode]);
                if floors.memory > self.limit {
                    bounded.too_large += beside;
                } else {
                    bounded.entries.push(Entry {
                        bound: self.bound(&floors),
                        place: [at, index as u32, mode as u32, 0],
                        of: Set::Pipeline,
                    });
                }
            }
        }
        Ok(bounded)
    }

    /// Number of strategies of a layout for every pipeline and recomputation.
    fn beside(&self, layout: &Layout) -> u64 {
        (self.space.shardings(layout).len() * self.space.orders(layout).len()) as u64
    }

    fn layout(&self, entry: &Entry) -> &Layout {
        &self.space.layouts()[entry.place[0] as usize]
    }

    /// Number of strategies that an entry stands for.
    fn count(&self, entry: &Entry) -> u64 {
        match entry.of {
            Set::Single(_) => 1,
            Set::Pipeline | Set::Simulated(_) => self.beside(self.layout(entry)),
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
            match (opened, entry.of) {
                (Opened::Score(score), Set::Single(strategy)) => scored.push((*strategy, score)),
                (Opened::Passes(passes, bound), _) => found.push(Entry {
                    bound: bound.max(entry.bound),
                    of: Set::Simulated(passes),
                    ..entry
                }),
                (Opened::Strategies(bounded), _) => {
                    self.prune("memory floor", bounded.too_large);
                    self.prune(LARGER_STATES, bounded.larger);
                    let [layout, pipeline, mode, _] = entry.place;
                    for (index, (bound, strategy)) in (0u32..).zip(bounded.entries) {
                        found.push(Entry {
                            bound: bound.max(entry.bound),
                            place: [layout, pipeline, mode, index],
                            of: Set::Single(Box::new(strategy)),
                        });
                    }
                }
                (Opened::Score(_), Set::Pipeline | Set::Simulated(_)) => {
                    unreachable!("only single strategies have a score")
                }
            }
        }
        self.rank(scored.into_iter());
        for entry in found {
            self.push(entry);
        }
        Ok(any)
    }

    fn opened(&self, entry: &Entry) -> Result<Opened, PlannerError> {
        let layout = self.layout(entry);
        let decisions = || {
            let pipeline = &self.space.pipelines(layout)[entry.place[1] as usize];
            let recompute = pipeline.recompute[entry.place[2] as usize];
            with_pipeline(&self.space.decisions(layout), pipeline, recompute)
        };
        match &entry.of {
            Set::Single(strategy) => Ok(Opened::Score(self.costs.score(strategy)?)),
            Set::Pipeline if self.options.objective == Objective::Time => {
                let passes = self.costs.passes(&decisions(), self.space.orders(layout))?;
                Ok(Opened::Passes(passes, passes.map_or(0.0, |time| time.0)))
            }
            Set::Pipeline => self.strategies(layout, &decisions(), None),
            Set::Simulated(passes) => self.strategies(layout, &decisions(), *passes),
        }
    }

    /// The strategies with a pipeline and recomputation, with their bounds.
    fn strategies(
        &self,
        layout: &Layout,
        d: &Decisions,
        passes: Option<Seconds>,
    ) -> Result<Opened, PlannerError> {
        let smallest = self.space.optimizer_states().pop().flatten();
        let mut found = Bounded::default();
        for strategy in self.space.of_pipeline(layout, d) {
            // The optimizer is the last that a rank does: with smaller states all else is alike, and the step is neither
            // longer nor takes more memory.
            if strategy.zero != Zero::Z0 && strategy.optimizer_states != smallest {
                found.larger += 1;
                continue;
            }
            let floors = self.costs.floors(&strategy, passes)?;
            if floors.memory > self.limit {
                found.too_large += 1;
            } else {
                found.entries.push((self.bound(&floors), strategy));
            }
        }
        Ok(Opened::Strategies(found))
    }

    /// Takes simulated strategies into the best found.
    fn rank(&mut self, scored: impl Iterator<Item = (Strategy, Score)>) {
        let objective = self.options.objective;
        for (strategy, score) in scored {
            self.report.simulated += 1;
            if score.peak_memory > self.limit {
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

/// What a set consists of, less what is left out.
struct Bounded<T> {
    entries: Vec<T>,
    /// Number of strategies whose memory floor does not fit.
    too_large: u64,
    /// Number of strategies of which another holds its optimizer states in less memory.
    larger: u64,
}

impl<T> Default for Bounded<T> {
    fn default() -> Self {
        Self {
            entries: Vec::new(),
            too_large: 0,
            larger: 0,
        }
    }
}
