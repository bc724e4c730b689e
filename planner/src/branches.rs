//! Splits a set of strategies into smaller sets with bounds, or scores it if one strategy is left.

use std::collections::{BTreeMap, btree_map};

use catalog::{Bytes, CudaGraphs, Seconds};
use costmodel::{
    CostModel, LayoutBounds, Lightest, Messages, PipelineFloors, Score, Senders, Shape,
};
use plans::{Decisions, Floors, Strategy};

use crate::PlannerError;
use crate::chains::{Chain, Traffic};
use crate::choices::{ActivationChoice, PipelineChoice};
use crate::executions::ExecutionChoice;
use crate::layouts::Layout;
use crate::options::{Objective, SearchOptions, limit};
use crate::sets::{Bounded, Chained, Entry, Opened, Sent, Set};
use crate::shapes::Shapes;
use crate::space::{SearchSpace, with_pipeline};

/// Splits ("opens") the sets of strategies of a search.
pub(crate) struct Branches<'a> {
    pub(crate) costs: &'a CostModel,
    pub(crate) space: &'a SearchSpace,
    pub(crate) objective: Objective,
    /// Largest peak memory per device that a plan may have.
    pub(crate) limit: Bytes,
    /// Whether only the bytes of the lightest strategy are wanted, not which strategy it is.
    pub(crate) only_memory: bool,
    /// Block counts per rank of every pipeline in the space.
    pub(crate) shapes: Shapes,
}

impl<'a> Branches<'a> {
    /// Prepares the search of a space with these options.
    ///
    /// # Errors
    /// When the space has a schedule that does not exist for its sizes.
    pub(crate) fn new(
        costs: &'a CostModel,
        space: &'a SearchSpace,
        options: &SearchOptions<'_>,
    ) -> Result<Self, PlannerError> {
        Ok(Self {
            costs,
            space,
            objective: options.objective,
            limit: limit(costs, options),
            only_memory: false,
            shapes: Shapes::new(costs, space)?,
        })
    }

    fn bound(&self, floors: &Floors) -> f64 {
        self.objective.of(floors.time, floors.memory)
    }

    /// Lower bound of the objective for a whole layout; too large if its states exceed the limit.
    pub(crate) fn as_a_whole(&self, at: u32) -> Result<Bounded, PlannerError> {
        let layout = &self.space.layouts()[at as usize];
        let base = self.space.decisions(layout);
        let states = (self.costs).states_floor(&base, &self.space.lightest(layout, &base))?;
        if states > self.limit {
            return Ok(Bounded {
                too_large: self.space.members(at),
                ..Bounded::default()
            });
        }
        let bound = match self.objective {
            Objective::Memory => states.as_f64(),
            Objective::Time => {
                let time = self.shapes.least_time(self.costs, self.space, layout)?;
                time.0
            }
        };
        Ok(Bounded::of(Entry {
            bound,
            place: [at, 0, 0, 0, 0],
            members: self.space.members(at),
            of: Set::Layout,
        }))
    }

    /// Bounds all pipelines of a layout. Those whose bound is above `most` are left out.
    fn bounded(&self, at: u32, most: f64) -> Result<Bounded, PlannerError> {
        let layout = &self.space.layouts()[at as usize];
        let base = self.space.decisions(layout);
        let lightest = self.space.lightest(layout, &base);
        let orders = self.space.orders(layout);
        let pipelines = self.space.pipelines(layout);
        let mut bounded = Bounded::default();
        if self.costs.states_floor(&base, &lightest)? > self.limit {
            bounded.too_large = self.space.members(at);
            return Ok(bounded);
        }
        let mut costs = BTreeMap::new();
        let mut messages = None;
        let shapes = self.shapes.of(layout);
        for (index, pipeline) in pipelines.iter().enumerate() {
            for (mode, &activations) in pipeline.activations.iter().enumerate() {
                let recompute = activations.recompute;
                let kind = recompute.of_first_and_others();
                let allows = self.space.allows(layout, pipeline, activations);
                let (beside, bounds) = match costs.entry((kind, allows)) {
                    btree_map::Entry::Occupied(known) => known.into_mut(),
                    btree_map::Entry::Vacant(new) => {
                        let mut among = self.space.executed(layout, allows);
                        among.iter_mut().for_each(|d| d.recompute = recompute);
                        let bounds = match among.is_empty() {
                            true => None,
                            false => Some(self.costs.layout_bounds(&among, &lightest, orders)?),
                        };
                        if messages.is_none() && !among.is_empty() {
                            messages = Some(self.messages(layout, &among)?);
                        }
                        let executions = self.space.executions(layout, pipeline, activations);
                        new.insert((self.space.beside(layout, &executions), bounds))
                    }
                };
                let (Some(bounds), Some(messages)) = (bounds, &messages) else {
                    continue;
                };
                let shape = &shapes[index][mode];
                let Some(of) = self.floors(bounds, shape, messages, most)? else {
                    bounded.beyond += *beside;
                    continue;
                };
                let (on_host, senders) = (of.on_host, of.senders);
                if of.floors.memory > self.limit {
                    bounded.too_large += *beside;
                } else {
                    bounded.entries.push(Entry {
                        bound: self.bound(&of.floors),
                        place: [at, index as u32, mode as u32, 0, 0],
                        members: *beside,
                        of: Set::Pipeline { on_host, senders },
                    });
                }
            }
        }
        Ok(bounded)
    }

    /// Bounds a pipeline of a layout; `None` if its time is above `most` (found out before memory).
    fn floors(
        &self,
        bounds: &LayoutBounds,
        shape: &Shape,
        messages: &[Messages],
        most: f64,
    ) -> Result<Option<PipelineFloors>, PlannerError> {
        // Where memory is minimised, the bound must hold for strategies of any size.
        let limit = match self.objective {
            Objective::Memory => None,
            Objective::Time if self.costs.passes_floor(bounds, shape).0 > most => return Ok(None),
            Objective::Time => Some(self.limit),
        };
        Ok(Some(
            (self.costs).pipeline_floors(bounds, shape, messages, limit)?,
        ))
    }

    pub(crate) fn layout(&self, entry: &Entry) -> &Layout {
        &self.space.layouts()[entry.place[0] as usize]
    }

    /// Number of a layout's strategies that run passes this way and send these data-parallel messages.
    fn sending(&self, layout: &Layout, way: ExecutionChoice, sent: Sent) -> u64 {
        match sent {
            Sent::Any => self.space.beside(layout, &[way]),
            Sent::One { traffic, .. } => {
                let ways = self.space.ways(layout);
                let traffic = &ways.traffic[traffic as usize];
                let runtime = &self.costs.scenario().runtime;
                let members = ways.all.iter();
                members
                    .filter(|of| traffic.has(of) && way.leaves(of, runtime))
                    .count() as u64
            }
        }
    }

    /// Decisions that cover a layout's data-parallel traffic: one for each kind of messages and
    /// axis order. All else is as in `d`, types of gradients included.
    fn senders(&self, layout: &Layout, d: &Decisions) -> Vec<(Sent, Decisions)> {
        let traffic = (0u32..).zip(&self.space.ways(layout).traffic);
        let with_order = |(traffic, of): (u32, &Traffic)| {
            let of = of.of.of(d);
            let orders = (0u32..).zip(self.space.orders(layout));
            let gradients = d.gradients;
            orders.map(move |(order, &axis_order)| {
                let d = Decisions {
                    axis_order,
                    gradients,
                    ..of.clone()
                };
                (Sent::One { traffic, order }, d)
            })
        };
        traffic.flat_map(with_order).collect()
    }

    /// The data-parallel messages that these decisions may send; empty where memory is minimised.
    fn messages(
        &self,
        layout: &Layout,
        among: &[Decisions],
    ) -> Result<Vec<Messages>, PlannerError> {
        if self.objective == Objective::Memory {
            return Ok(Vec::new());
        }
        let senders = self.senders(layout, &among[0]).into_iter();
        let senders: Vec<Decisions> = senders.map(|(_, d)| d).collect();
        Ok(self.costs.messages(among, &senders)?)
    }

    /// Splits or scores an entry. Strategies above `most` in the objective may be left out.
    pub(crate) fn opened(&self, entry: &Entry, most: f64) -> Result<Opened, PlannerError> {
        let sets = match &entry.of {
            Set::Chain(chain) => return self.scored(entry, chain),
            Set::Layout => self.bounded(entry.place[0], most)?,
            &Set::Pipeline { on_host, senders } => self.executions(entry, on_host, senders)?,
            &Set::Execution { on_host, way, sent } => self.simulated(entry, on_host, way, sent)?,
            &Set::Simulated { way, sent, end } => self.strategies(entry, way, sent, end)?,
        };
        Ok(Opened { score: None, sets })
    }

    /// The pipeline of an entry, and the choice for its activations.
    fn pipeline(&self, entry: &Entry) -> (&PipelineChoice, ActivationChoice) {
        let pipelines = self.space.pipelines(self.layout(entry));
        let pipeline = &pipelines[entry.place[1] as usize];
        (pipeline, pipeline.activations[entry.place[2] as usize])
    }

    /// The ways to run the passes of an entry's pipeline.
    fn ways(&self, entry: &Entry) -> Vec<ExecutionChoice> {
        let (pipeline, activations) = self.pipeline(entry);
        let layout = self.layout(entry);
        self.space.executions(layout, pipeline, activations)
    }

    /// The decisions of an entry's pipeline whose passes run as `way`.
    fn run_as(&self, entry: &Entry, way: ExecutionChoice) -> Decisions {
        let (pipeline, activations) = self.pipeline(entry);
        let base = self.space.decisions(self.layout(entry));
        way.of(&with_pipeline(&base, pipeline, activations))
    }

    /// Splits a pipeline by ways to run passes and, where time is minimised, by messages.
    fn executions(
        &self,
        entry: &Entry,
        on_host: Seconds,
        senders: Senders,
    ) -> Result<Bounded, PlannerError> {
        let layout = self.layout(entry);
        let ways = self.ways(entry);
        let [layout_at, pipeline, mode, ..] = entry.place;
        let of_way = |at: usize, sent: Sent, members: u64, bound: f64| Entry {
            bound,
            place: [layout_at, pipeline, mode, at as u32, 0],
            members,
            of: Set::Execution {
                on_host,
                way: ways[at],
                sent,
            },
        };
        let any = |way: ExecutionChoice| self.space.beside(layout, &[way]);
        let runtime = &self.costs.scenario().runtime;
        let lightest = ways.iter().position(|way| way.holds_least(runtime));
        if let Some(at) = lightest.filter(|_| self.only_memory) {
            let members = any(ways[at]);
            return Ok(Bounded::of(of_way(at, Sent::Any, members, entry.bound)));
        }
        let among: Vec<Decisions> = ways.iter().map(|&way| self.run_as(entry, way)).collect();
        let messages = self.messages(layout, &among)?;
        let spare_nothing = self.captures_that_spare_nothing(entry, &ways)?;
        let mut bounded = Bounded::default();
        for (at, &way) in ways.iter().enumerate() {
            if spare_nothing[at] {
                bounded.captured += any(way);
                continue;
            }
            if self.objective == Objective::Memory {
                let all = of_way(at, Sent::Any, any(way), entry.bound);
                bounded.entries.push(all);
                continue;
            }
            let times = self.times(entry, &among[at..=at], &messages)?;
            let sent = self.senders(layout, &among[at]).into_iter();
            for (index, (sent, _)) in sent.enumerate() {
                let bound = (times[index] + on_host).0;
                match self.sending(layout, way, sent) {
                    0 => {}
                    members if !senders.has(index) => bounded.too_large += members,
                    members => bounded.entries.push(of_way(at, sent, members, bound)),
                }
            }
        }
        Ok(bounded)
    }

    /// Lower bounds on the time of an entry's pipeline run as `d`, one for each of `messages`.
    fn times(
        &self,
        entry: &Entry,
        d: &[Decisions],
        messages: &[Messages],
    ) -> Result<Vec<Seconds>, PlannerError> {
        let layout = self.layout(entry);
        let [_, pipeline, mode, ..] = entry.place;
        let shape = &self.shapes.of(layout)[pipeline as usize][mode as usize];
        let orders = self.space.orders(layout);
        let bounds = (self.costs).layout_bounds(d, &Lightest::default(), orders)?;
        let time = |messages: &Messages| {
            let messages = std::slice::from_ref(messages);
            let least = (self.costs).pipeline_floors(&bounds, shape, messages, None)?;
            Ok(least.floors.time)
        };
        messages.iter().map(time).collect()
    }

    /// For every way to run passes: whether it captures CUDA graphs in vain, because the same way
    /// without graphs is as fast and takes less memory.
    fn captures_that_spare_nothing(
        &self,
        entry: &Entry,
        ways: &[ExecutionChoice],
    ) -> Result<Vec<bool>, PlannerError> {
        let own = self.costs.scenario().runtime.graphs;
        let captures = |way: &ExecutionChoice| way.graphs.unwrap_or(own) != CudaGraphs::None;
        let orders = self.space.orders(self.layout(entry));
        let mut keeps_up = Vec::with_capacity(ways.len());
        for way in ways.iter().filter(|way| !captures(way)) {
            let d = self.run_as(entry, *way);
            if self.costs.host_keeps_up(&d, orders)? {
                keeps_up.push((way.overlap, way.dispatcher, way.fp8_recipe));
            }
        }
        let spares_nothing = |way: &ExecutionChoice| {
            captures(way) && keeps_up.contains(&(way.overlap, way.dispatcher, way.fp8_recipe))
        };
        Ok(ways.iter().map(spares_nothing).collect())
    }

    /// Raises an entry's bound by simulating passes and messages; splits it if memory is minimised.
    fn simulated(
        &self,
        entry: &Entry,
        on_host: Seconds,
        way: ExecutionChoice,
        sent: Sent,
    ) -> Result<Bounded, PlannerError> {
        let Sent::One { .. } = sent else {
            return self.strategies(entry, way, sent, None);
        };
        let layout = self.layout(entry);
        let mut senders = self.senders(layout, &self.run_as(entry, way)).into_iter();
        let sender = senders.find(|(of, _)| *of == sent);
        let (_, d) = sender.expect("messages of the layout");
        let end = self.costs.passes(&d)?;
        Ok(Bounded::of(Entry {
            bound: end.map_or(0.0, |end| (end + on_host).0),
            place: entry.place,
            members: entry.members,
            of: Set::Simulated { way, sent, end },
        }))
    }

    /// Lists the strategies of an entry, which share passes and messages, with their bounds.
    fn strategies(
        &self,
        of: &Entry,
        way: ExecutionChoice,
        sent: Sent,
        end: Option<Seconds>,
    ) -> Result<Bounded, PlannerError> {
        let layout = self.layout(of);
        let d = &self.run_as(of, way);
        let runtime = &self.costs.scenario().runtime;
        let ways = self.space.ways(layout);
        let [at, pipeline, mode, execution, _] = of.place;
        let has = |chain: u32, at_order: u32| match sent {
            Sent::Any => true,
            Sent::One { traffic, order } => {
                order == at_order && ways.traffic[traffic as usize].chains.contains(&chain)
            }
        };
        // A rank runs the optimizer last, so smaller states change nothing before it. The step
        // takes no more time or memory.
        let larger = match sent {
            Sent::Any => {
                let sent = ways.traffic.iter().filter(|of| way.leaves(&of.of, runtime));
                let all: u64 = sent.map(|of| of.larger).sum();
                all * self.space.orders(layout).len() as u64
            }
            Sent::One { traffic, .. } => ways.traffic[traffic as usize].larger,
        };
        let mut found = Bounded {
            larger,
            ..Bounded::default()
        };
        // Where memory is minimised, each way is tried by itself.
        let together = match self.objective {
            Objective::Time => usize::MAX,
            Objective::Memory => 1,
        };
        let mut index = 0;
        for (number, Chain(chain)) in (0u32..).zip(&ways.chains) {
            if !way.leaves(&ways.all[chain[0] as usize], runtime) {
                continue;
            }
            for chain in chain.chunks(together) {
                for (at_order, &order) in (0u32..).zip(self.space.orders(layout)) {
                    let place = [at, pipeline, mode, execution, index];
                    index += 1;
                    if has(number, at_order) {
                        let of = |&way: &u32| {
                            self.space.with_sharding(d, &ways.all[way as usize], order)
                        };
                        self.add_chain(chain, of, place, end, &mut found)?;
                    }
                }
            }
        }
        Ok(found)
    }

    /// Adds an entry: a chain's first strategy that may fit, and all later ones. `of` makes them.
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
                found.entries.push(Entry {
                    bound,
                    place,
                    members: 1 + later.len() as u64,
                    of: Set::Chain(Box::new(Chained {
                        first,
                        later: later.to_vec(),
                        passes,
                    })),
                });
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
                // Later strategies keep more on the host and take longer still.
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

    pub(crate) fn fits(&self, score: &Score) -> bool {
        score.peak_memory <= self.limit && score.fits_host
    }
}
