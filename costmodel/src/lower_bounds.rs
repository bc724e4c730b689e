//! Lower bounds on time and memory, with which a search avoids simulations: for a layout, for a
//! layout with a pipeline, and for one strategy.

use std::sync::Arc;

use catalog::{AxisOrder, Bytes, Cluster, Offload, Seconds};
use plans::{Decisions, Floors, Strategy};

use crate::assemble::Assembled;
use crate::blocks::BlockCosts;
use crate::bounds::{self, Fullest, LayoutBounds, Lightest, PipelineFloors, Senders};
use crate::cost_model::{CostModel, Score, finite};
use crate::crossings::Way;
use crate::execution::{Execution, MONOTONE_SLOWDOWN};
use crate::message_bounds::{Level, Messages};
use crate::offload::HostStep;
use crate::shape::{Shape, ShapeKey};
use crate::traffic::DataParallel;
use crate::{CostError, floors, offload};

impl CostModel {
    /// How often the ranks of a pipeline run and hold each kind of block. Only schedule, stages,
    /// micro-batches and recomputed layers of `d` are read.
    ///
    /// # Errors
    /// When there is no such schedule.
    pub fn shape(&self, d: &Decisions) -> Result<Arc<Shape>, CostError> {
        self.shapes.get(&ShapeKey::of(d), || {
            let pipeline = self.pipelines.pipeline(d)?;
            let pool_of_rank = self.pools.of_ranks(&self.scenario, d)?;
            let (first, pools) = (self.pools.first(), self.pools.all().len());
            Ok(Shape::new(first, d, &pipeline, &pool_of_rank, pools))
        })
    }

    /// Least costs of all strategies that have the layout and recomputation of `among`, and issue
    /// kernels and messages as one of them does. `lightest` are the ways to shard states that leave
    /// least on a rank; `orders` are the axis orders that the strategies may have.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn layout_bounds(
        &self,
        among: &[Decisions],
        lightest: &Lightest,
        orders: &[AxisOrder],
    ) -> Result<LayoutBounds, CostError> {
        let bounds = self.least_of(among, |costs, execution| {
            let blocks = costs.executed(&among[0], execution)?;
            LayoutBounds::new(costs, &among[0], &blocks, lightest, orders)
        })?;
        Ok(self.crossing_pools(&among[0], bounds))
    }

    /// The same bounds, with what a pipeline sends over the link between pools.
    fn crossing_pools(&self, d: &Decisions, mut bounds: LayoutBounds) -> LayoutBounds {
        let pools = self.scenario.cluster.pools.as_ref();
        let link = pools.and_then(|pools| pools.between.as_ref());
        bounds.over_link = link.map(|link| Way::new(link, &self.scenario, d, bounds.handed));
        bounds
    }

    /// A lower bound on the step time of all strategies with the layout of `among`, one of the axis
    /// orders `orders` and one of the pipelines `shapes`. `among` recompute nothing, and the
    /// prediction module is left out, so that one cost of each block is enough.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn least_time<'a>(
        &self,
        among: &[Decisions],
        orders: &[AxisOrder],
        shapes: impl Iterator<Item = &'a Shape>,
    ) -> Result<Seconds, CostError> {
        let bounds = self.least_of(among, |costs, execution| {
            let blocks = costs.fewest(&among[0], execution)?;
            LayoutBounds::new(costs, &among[0], &blocks, &Lightest::default(), orders)
        })?;
        let bounds = self.crossing_pools(&among[0], bounds);
        let times = shapes.map(|shape| bounds.least_time(shape, None).0);
        Ok(Seconds(times.fold(f64::INFINITY, f64::min)))
    }

    /// The data-parallel messages of a layout, for [`CostModel::pipeline_floors`]: one for each of `ways`, which say how states
    /// are sharded and in which order axes lie. `among` are decisions with that layout, which differ in how passes run.
    ///
    /// Messages have no bound and count as 0 if there are several pools, ranks share cores,
    /// messages slow kernels to under half speed, or only some of `among` overlap them with passes.
    ///
    /// # Errors
    /// If a block cannot be traced, or a profile has no measurement of a message.
    pub fn messages(
        &self,
        among: &[Decisions],
        ways: &[Decisions],
    ) -> Result<Vec<Messages>, CostError> {
        let hides = |d: &Decisions| (d.overlap.grad_reduce, d.overlap.param_gather);
        let alike = among.iter().all(|d| hides(d) == hides(&among[0]));
        let costs = match self.pools.all() {
            [costs] if alike && self.overlap_is_monotone() => costs,
            _ => return Ok(ways.iter().map(Messages::of_no_time).collect()),
        };
        // However blocks are run, they have the same weights.
        let any = Execution::least_of(self.scenario(), among)[0];
        let blocks = costs.executed(&among[0], any)?;
        let of_kind = blocks.of_kind();
        let messages = ways.iter().map(|way| Messages::new(costs, way, &of_kind));
        messages.collect()
    }

    /// Whether a kernel that starts later never ends sooner, whatever communication runs beside it.
    fn overlap_is_monotone(&self) -> bool {
        let slowdown = self.scenario().slowdown_beside_nccl();
        !self.scenario().shares_cores() && slowdown <= MONOTONE_SLOWDOWN
    }

    /// A lower bound on the step time of all strategies with a layout and a pipeline, from their passes alone: data-parallel
    /// messages are not counted.
    #[must_use]
    pub fn passes_floor(&self, layout: &LayoutBounds, shape: &Shape) -> Seconds {
        layout.least_time(shape, None)
    }

    /// Lower bounds on time and memory of all strategies with a layout and a pipeline; only those
    /// that send one of `messages`, if any are given, and whose memory is below the `limit`. If
    /// these all have states in host memory, the bound on time has the hosts' update.
    ///
    /// # Errors
    /// When the cluster's file does not describe the host.
    pub fn pipeline_floors(
        &self,
        layout: &LayoutBounds,
        shape: &Shape,
        messages: &[Messages],
        limit: Option<Bytes>,
    ) -> Result<PipelineFloors, CostError> {
        let fullest = layout.fullest(self.pools.first(), shape);
        let at = |level| self.memory_floor(layout, (shape, &fullest), limit, level);
        let (memory, on_host) = at(None)?;
        let mut senders = Senders::ALL;
        let mut least: Option<Seconds> = None;
        let mut without: Option<Seconds> = None;
        let mut known: Vec<(Level, bool)> = Vec::new();
        for (index, messages) in messages.iter().enumerate() {
            let of_level = known.iter().find(|(level, _)| *level == messages.level);
            let fits = match (of_level, limit) {
                (Some(&(_, fits)), _) => fits,
                (None, Some(limit)) => {
                    let fits = at(Some(messages.level))?.0 <= limit;
                    known.push((messages.level, fits));
                    fits
                }
                (None, None) => true,
            };
            if fits {
                let time = match messages.take_no_time() {
                    true => *without.get_or_insert_with(|| layout.least_time(shape, None)),
                    false => layout.least_time(shape, Some(messages)),
                };
                least = Some(least.map_or(time, |least| least.min(time)));
            } else {
                senders = senders.without(index);
            }
        }
        let least = least.or(without);
        let time = least.unwrap_or_else(|| layout.least_time(shape, None)) + on_host;
        Ok(PipelineFloors {
            floors: Floors {
                time,
                memory,
                fits_host: true,
            },
            on_host,
            senders,
        })
    }

    /// Lower bounds on a device's memory and on the time of the host's optimizer update, for all
    /// strategies with this layout and pipeline, at one ZeRO `level` or at any (`None`). The time
    /// is 0 unless strategies are within `limit` only with states in host memory.
    fn memory_floor(
        &self,
        layout: &LayoutBounds,
        (shape, fullest): (&Shape, &Fullest),
        limit: Option<Bytes>,
        level: Option<Level>,
    ) -> Result<(Bytes, Seconds), CostError> {
        let costs = self.pools.first();
        // The hosts of other pools may be faster, or have more memory.
        let alike = self.pools.all().len() == 1;
        let as_on_first = |pool, bytes| self.pools.as_on_first(pool, bytes);
        let mut memory = layout.least_memory(costs, fullest, as_on_first, level);
        let mut on_host = Seconds(0.0);
        if limit.is_none_or(|limit| memory > limit)
            && let Some((lighter, time)) =
                layout.on_host(costs, (shape, fullest), as_on_first, alike, level)?
        {
            if alike && limit.is_some_and(|limit| lighter <= limit) {
                on_host = time;
            }
            memory = memory.min(lighter);
        }
        Ok((memory, on_host))
    }

    /// Bounds that hold for all of these decisions, from the costs of blocks on each pool.
    fn least_of(
        &self,
        among: &[Decisions],
        bounds: impl Fn(&BlockCosts, Execution) -> Result<LayoutBounds, CostError>,
    ) -> Result<LayoutBounds, CostError> {
        let executions = Execution::least_of(self.scenario(), among);
        let of_pool = |costs: &BlockCosts| {
            let mut least = bounds(costs, executions[0])?;
            for &execution in &executions[1..] {
                least = least.or_least(&bounds(costs, execution)?);
            }
            Ok::<_, CostError>(least)
        };
        let mut all = of_pool(self.pools.first())?;
        for other in &self.pools.all()[1..] {
            all = all.with_pool(of_pool(other)?);
        }
        Ok(all)
    }

    /// Whether no pass of the blocks of `d` waits for the host, however states are sharded, with any of these axis orders: CUDA
    /// graphs then spare no time.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn host_keeps_up(&self, d: &Decisions, orders: &[AxisOrder]) -> Result<bool, CostError> {
        for costs in self.pools.all() {
            for &axis_order in orders {
                let d = Decisions {
                    axis_order,
                    ..d.clone()
                };
                for execution in Execution::least_of(self.scenario(), std::slice::from_ref(&d)) {
                    let blocks = costs.executed(&d, execution)?;
                    if blocks.all().any(|block| block.waits_for_host()) {
                        return Ok(false);
                    }
                }
            }
        }
        Ok(true)
    }

    /// A lower bound on the memory of all strategies with the sizes of `d`, from their states alone.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn states_floor(&self, d: &Decisions, lightest: &Lightest) -> Result<Bytes, CostError> {
        let alike = self.pools.all().len() == 1;
        let bytes = bounds::states_floor(self.pools.first(), d, lightest, alike)?;
        Ok(self.pools.at_least_on_first(bytes))
    }

    /// Simulates a step under `d` without its optimizer, and says when the last pass or data-parallel message ends. That is a
    /// lower bound on the step of every strategy that differs from `d` only in larger types of gradients, in how optimizer
    /// states are held, or in which optimizer states lie in host memory: its passes and messages take as long or longer.
    ///
    /// `None` if a longer pass or message may let another end sooner, so that this is no bound: if ranks share cores, or if
    /// communication slows kernels to less than half their speed.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn passes(&self, d: &Decisions) -> Result<Option<Seconds>, CostError> {
        if !self.overlap_is_monotone() {
            return Ok(None);
        }
        let pipeline = self.pipelines.pipeline(d)?;
        let parallel = |cluster: &Cluster| DataParallel::new(d, cluster);
        let mut assembled = (self.pools).assembled(&self.scenario, d, parallel, &pipeline)?;
        for rank in &mut assembled.ranks {
            rank.optimizer = Seconds(0.0);
            rank.host = HostStep::default();
        }
        let mut outcome = self.outcome(d, &assembled)?;
        outcome.step_time -= self
            .scenario()
            .by_host(&self.scenario().runtime.overheads.step);
        Ok(Some(finite(outcome)?.step_time))
    }

    /// Lower bounds on time and memory, without simulation. `passes` is the result of
    /// [`CostModel::passes`], if known. The bound on time also holds if the optimizer states of
    /// `later`, or more, are in host memory.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn floors(
        &self,
        strategy: &Strategy,
        passes: Option<Seconds>,
        later: Option<Offload>,
    ) -> Result<Floors, CostError> {
        let mut assembled = self.assembled(strategy)?;
        if let Some(later) = later {
            let updates = (self.pools).on_hosts(&self.scenario, strategy, later, &assembled)?;
            for (rank, later) in assembled.ranks.iter_mut().zip(updates) {
                rank.optimizer = rank.optimizer.min(later);
            }
        }
        self.floors_of(strategy, &assembled, passes)
    }

    /// Lower bounds of an assembled strategy, as [`CostModel::floors`] gives them.
    fn floors_of(
        &self,
        strategy: &Strategy,
        assembled: &Assembled,
        passes: Option<Seconds>,
    ) -> Result<Floors, CostError> {
        let scenario = &self.scenario;
        let held = floors::memory(assembled);
        let held = held.map(|bytes| scenario.with_fragmentation(bytes));
        let waits = self.waits(strategy, assembled)?.total();
        Ok(Floors {
            time: floors::time(scenario, strategy, assembled, passes, waits),
            memory: self.pools.fullest(scenario, strategy, held)?,
            fits_host: self.fits_host(strategy, assembled)?,
        })
    }

    /// The strategy's score if it takes at most `time`, needs at most `memory` on a device and fits
    /// host memory; else `None`. It is not simulated if its lower bounds already exceed these.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn score_within(
        &self,
        strategy: &Strategy,
        time: Seconds,
        memory: Bytes,
    ) -> Result<Option<Score>, CostError> {
        let assembled = self.assembled(strategy)?;
        let floors = self.floors_of(strategy, &assembled, None)?;
        if floors.time > time || !floors.may_fit(memory) {
            return Ok(None);
        }
        let score = self.score_of(strategy, &assembled)?;
        let is_within = score.step_time <= time && score.peak_memory <= memory && score.fits_host;
        Ok(is_within.then_some(score))
    }

    /// Whether a step certainly takes longer with `later`, more optimizer states than the
    /// strategy's own, in host memory: every rank then updates later, and all before that is equal.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn updates_before(&self, strategy: &Strategy, later: Offload) -> Result<bool, CostError> {
        let assembled = self.assembled(strategy)?;
        let ranks = assembled.ranks.iter();
        let own = ranks.map(|rank| rank.update() + offload::ROUNDING);
        let others = (self.pools).on_hosts(&self.scenario, strategy, later, &assembled)?;
        Ok(own.zip(others).all(|(own, later)| own < later))
    }
}
