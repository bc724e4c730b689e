//! What a set of strategies consists of: smaller sets, each with its bound, or one strategy with its score.

use std::collections::{BTreeMap, btree_map};

use catalog::{Bytes, CudaGraphs, Seconds};
use costmodel::{CostModel, Lightest, PipelineFloors, Score};
use plans::{Decisions, Floors, Strategy};

use crate::PlannerError;
use crate::chains::Chain;
use crate::choices::{ActivationChoice, PipelineChoice};
use crate::executions::ExecutionChoice;
use crate::layouts::Layout;
use crate::options::Objective;
use crate::sets::{Bounded, Chained, Entry, Opened, Set};
use crate::shapes::Shapes;
use crate::space::{SearchSpace, with_pipeline};

/// Opens the sets of a search.
pub(crate) struct Branches<'a> {
    pub(crate) costs: &'a CostModel,
    pub(crate) space: &'a SearchSpace,
    pub(crate) objective: Objective,
    /// Memory that a plan may take.
    pub(crate) limit: Bytes,
    /// The shapes of the space's pipelines.
    pub(crate) shapes: Shapes,
}

impl Branches<'_> {
    fn bound(&self, floors: &Floors) -> f64 {
        match self.objective {
            Objective::Time => floors.time.0,
            Objective::Memory => floors.memory.as_f64(),
        }
    }

    /// Bounds a layout by what all its pipelines take at least.
    pub(crate) fn as_a_whole(&self, at: u32) -> Result<Bounded, PlannerError> {
        let layout = &self.space.layouts()[at as usize];
        let base = self.space.decisions(layout);
        let states = (self.costs).states_floor(&base, &self.space.lightest(layout, &base))?;
        if states > self.limit {
            return Ok(Bounded {
                too_large: self.space.members(layout),
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
            of: Set::Layout,
        }))
    }

    /// Bounds all pipelines of a layout.
    pub(crate) fn bounded(&self, at: u32) -> Result<Bounded, PlannerError> {
        let layout = &self.space.layouts()[at as usize];
        let base = self.space.decisions(layout);
        let lightest = self.space.lightest(layout, &base);
        let orders = self.space.orders(layout);
        let pipelines = self.space.pipelines(layout);
        let mut bounded = Bounded::default();
        if self.costs.states_floor(&base, &lightest)? > self.limit {
            bounded.too_large = self.space.members(layout);
            return Ok(bounded);
        }
        let mut costs = BTreeMap::new();
        let shapes = self.shapes.of(layout);
        // If it is memory that is minimised, the least of all is wanted.
        let limit = (self.objective == Objective::Time).then_some(self.limit);
        for (index, pipeline) in pipelines.iter().enumerate() {
            for (mode, &activations) in pipeline.activations.iter().enumerate() {
                let recompute = activations.recompute;
                let kind = (recompute.of_layer(0), recompute.of_layer(u64::MAX));
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
                        let executions = self.space.executions(layout, pipeline, activations);
                        new.insert((self.space.beside(layout, &executions), bounds))
                    }
                };
                let Some(bounds) = bounds else { continue };
                let shape = &shapes[index][mode];
                let PipelineFloors { floors, on_host } =
                    self.costs.pipeline_floors(bounds, shape, limit)?;
                if floors.memory > self.limit {
                    bounded.too_large += *beside;
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

    pub(crate) fn layout(&self, entry: &Entry) -> &Layout {
        &self.space.layouts()[entry.place[0] as usize]
    }

    /// Number of strategies that an entry stands for.
    pub(crate) fn count(&self, entry: &Entry) -> u64 {
        match &entry.of {
            Set::Layout => self.space.members(self.layout(entry)),
            Set::Chain(chain) => 1 + chain.later.len() as u64,
            Set::Pipeline { .. } => self.space.beside(self.layout(entry), &self.ways(entry)),
            Set::Execution { .. } | Set::Simulated(_) => {
                self.space.beside(self.layout(entry), &[self.way(entry)])
            }
        }
    }

    pub(crate) fn opened(&self, entry: &Entry) -> Result<Opened, PlannerError> {
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

    /// The pipeline of an entry, and what becomes of its activations.
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

    /// The way to run passes that an entry fixes: of a set, the first.
    fn way(&self, entry: &Entry) -> ExecutionChoice {
        self.ways(entry)[entry.place[3] as usize]
    }

    /// The decisions of an entry with one way to run passes.
    fn decisions(&self, entry: &Entry) -> Decisions {
        self.run_as(entry, self.way(entry))
    }

    /// The decisions of an entry's pipeline, run in a way.
    fn run_as(&self, entry: &Entry, way: ExecutionChoice) -> Decisions {
        let (pipeline, activations) = self.pipeline(entry);
        let base = self.space.decisions(self.layout(entry));
        way.of(&with_pipeline(&base, pipeline, activations))
    }

    /// The ways to run the passes of a pipeline, each with its bound; `None` if there is only one.
    fn executions(&self, entry: &Entry, on_host: Seconds) -> Result<Option<Bounded>, PlannerError> {
        let layout = self.layout(entry);
        let ways = self.ways(entry);
        if ways.len() == 1 {
            return Ok(None);
        }
        let orders = self.space.orders(layout);
        let [at, pipeline, mode, ..] = entry.place;
        let shape = &self.shapes.of(layout)[pipeline as usize][mode as usize];
        let mut bounded = Bounded::default();
        let spare_nothing = self.captures_that_spare_nothing(entry, &ways)?;
        for ((execution, &way), spares_nothing) in (0u32..).zip(&ways).zip(spare_nothing) {
            if spares_nothing {
                bounded.captured += self.space.beside(layout, &[way]);
                continue;
            }
            let mut execution = Entry {
                bound: entry.bound,
                place: [at, pipeline, mode, execution, 0],
                of: Set::Execution { on_host },
            };
            if self.objective == Objective::Time {
                let d = self.run_as(entry, way);
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

    /// For every way to run the passes of a pipeline, whether it captures CUDA graphs that spare no time: without them a step
    /// takes as long, and less memory.
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
                keeps_up.push((way.overlap, way.dispatcher));
            }
        }
        let spares_nothing = |way: &ExecutionChoice| {
            captures(way) && keeps_up.contains(&(way.overlap, way.dispatcher))
        };
        Ok(ways.iter().map(spares_nothing).collect())
    }

    /// The same strategies with a bound from the simulated passes, where time is minimised.
    fn simulated(&self, entry: &Entry, on_host: Seconds) -> Result<Bounded, PlannerError> {
        if self.objective == Objective::Memory {
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
        let together = match self.objective {
            Objective::Time => usize::MAX,
            Objective::Memory => 1,
        };
        let mut index = 0;
        let way = self.way(of);
        let leaves = |chain: &&Chain| way.leaves(&ways.all[chain.0[0] as usize]);
        let chains = ways.chains.iter().filter(leaves);
        for chain in chains.flat_map(|Chain(of)| of.chunks(together)) {
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

    pub(crate) fn fits(&self, score: &Score) -> bool {
        score.peak_memory <= self.limit && score.fits_host
    }
}
