//! The price book of our own executor on a measured machine: every operator costs what its kernel was measured to take,
//! and work outside blocks is counted pass by pass as `dtensor::train::States` does it.
//!
//! If ranks share cores, communication is work of their own cores, so nothing overlaps with it. Between GPUs, an
//! exchange inside a block costs the measured time of packing it plus that of the message; data-parallel messages
//! overlap with compute as on any cluster (`assemble`).

use catalog::profile::Kernel;
use catalog::{Axis, Bytes, DType, Origin, Precision, Runtime, Seconds, Sourced};
use dtensor::{AnyOp, CollectiveKind, CostClass, Epilogues, Pass};
use plans::{Decisions, Group, Recompute, UsedConstant, Zero};

use super::entry::{BlockToPrice, PriceBook, PricedBlock, PricedKernel, Update};
use crate::block_cost::BlockKey;
use crate::launches::{Launch, Queue};
use crate::lower::recomputed;
use crate::messages::measured;
use crate::price::ProfilePrices;
use crate::stage::{Run, StageWork};
use crate::stage_traffic::Traffic;
use crate::states::{Elements, Weights};
use crate::traffic::DataParallel;
use crate::{CostError, Scenario, stage_traffic};

/// Runtimes of our executor: on CPU cores, and on GPUs.
const OURS: [&str; 2] = ["vescale", "vescale-cuda"];

/// Bytes of one 64-bit number.
const NUMBER: Bytes = Bytes(8);

/// The runtime without what measurements already contain or this machine does not have: launch times are part of what
/// was measured, and ranks that share cores are threads, without CUDA contexts or communicator buffers.
///
/// # Errors
/// If the runtime is not our executor's: a profile measures only our operators. Where several of them share a kernel on
/// a GPU, the first was measured with the time of all.
pub(crate) fn adapted(mut runtime: Runtime, gpus: bool) -> Result<Runtime, CostError> {
    if !OURS.contains(&runtime.name.as_str()) {
        return Err(CostError::Prices {
            device: "cpu".to_owned(),
            reason: format!(
                "runtime {} runs other kernels than a profile measures; use --runtime vescale, or --runtime vescale-cuda for a profile of a GPU",
                runtime.name
            ),
        });
    }
    let overheads = &mut runtime.overheads;
    for time in [&mut overheads.launch, &mut overheads.step] {
        *time = here(Seconds(0.0), "part of every measured kernel");
    }
    if gpus {
        return Ok(runtime);
    }
    for bytes in [
        &mut overheads.context,
        &mut overheads.workspace,
        &mut overheads.communicators,
    ] {
        *bytes = here(Bytes(0), "ranks are threads of one process");
    }
    overheads.fragmentation = here(1.0, "the executor counts bytes that it uses");
    Ok(runtime)
}

fn here<T>(value: T, source: &str) -> Sourced<T> {
    Sourced {
        value,
        origin: Origin::Assumed,
        source: source.to_owned(),
    }
}

impl PriceBook for ProfilePrices {
    fn block(&self, of: &BlockToPrice<'_>) -> Result<PricedBlock, CostError> {
        let trace = of.trace;
        let epilogues = Epilogues::of(trace);
        let ops: Vec<AnyOp<'_>> = trace.ops().collect();
        let mut kernels = Vec::with_capacity(ops.len());
        for &op in &ops {
            kernels.push(self.operator(of, &epilogues, op)?);
        }
        let issue = |wanted: &[Pass]| {
            let of_pass = (0..ops.len()).filter(|&op| wanted.contains(&ops[op].pass));
            in_order(&ops, of_pass)
        };
        let again = |&mode: &Recompute| {
            let kernels = recomputed(&of.lowering, trace, of.lowered, mode).into_iter();
            in_order(&ops, kernels.map(|kernel| of.lowered.forward[kernel].op))
        };
        Ok(PricedBlock {
            forward: issue(&[Pass::Forward]),
            recompute: of.modes.iter().map(again).collect(),
            backward: issue(&[Pass::BackwardInput, Pass::BackwardWeight]),
            halves: (of.scenario.splits_backward())
                .then(|| [Pass::BackwardInput, Pass::BackwardWeight].map(|pass| issue(&[pass]))),
            kernels,
            counts: None,
        })
    }

    fn names(&self, of: &BlockToPrice<'_>) -> Vec<String> {
        let epilogues = Epilogues::of(of.trace);
        let name = |op: AnyOp<'_>| format!("{} {}", op.scope, self.kernel(of, &epilogues, op).name);
        of.trace.ops().map(name).collect()
    }

    /// Between GPUs this overlaps with compute, as on any cluster; if ranks share cores it is work of those cores.
    fn data_parallel(
        &self,
        traffic: &mut Traffic<'_>,
        runs: &[Run],
        stage: &mut StageWork,
    ) -> Result<(), CostError> {
        let (strategy, parallel) = (traffic.strategy, traffic.parallel);
        if self.of_gpus && parallel.ranks() > 1 {
            let message = |kind, bytes, group: Group| measured(self, kind, bytes, group.size);
            stage_traffic::add_layers(traffic, &message, runs, stage)?;
            stage_traffic::plan(traffic, runs, stage);
            return Ok(());
        }
        let mut weights = Weights::default();
        for run in runs {
            weights += run.cost.weights * run.count;
        }
        if strategy.zero != Zero::Z0 {
            let elements = weights.gathered(strategy.zero);
            let gathered = self.gather(parallel, elements, traffic.scenario.workload.precision)?;
            stage.exposed_gather = Some(gathered);
        }
        stage.exposed_reduce = Some(self.reduce(parallel, weights.trained)?);
        Ok(())
    }

    /// 0: measured reductions include these copies.
    fn gradient_copies(&self, _: &Update<'_>) -> Seconds {
        Seconds(0.0)
    }

    /// Includes the copy of the parameters that kernels read.
    fn optimizer(&self, of: &Update<'_>) -> Result<Seconds, CostError> {
        let zero = of.strategy.zero;
        let whole = of.elements.dense + of.elements.expert;
        let own = of.parallel.sharding.shard(of.elements);
        let world = of.scenario.workload.gpus;
        let norm = self.price(&Kernel::new("gradient norm", [own.max(1)]))?;
        let update = self.price(&Kernel::new("adamw", [own.max(1)]))?;
        let held = if zero >= Zero::Z2 { own } else { whole };
        // Clearing the gradients writes without reading: half the price of a copy.
        let clear = self.copy(held)? * 0.5;
        let anew = match zero {
            Zero::Z0 => self.copy(whole)?,
            Zero::Z3 => self.copy(own)?,
            Zero::Z1 | Zero::Z2 => Seconds(0.0),
        };
        let meeting = match self.of_gpus {
            // Needed twice: once to sum the norm, once to share the result.
            true => measured(self, CollectiveKind::AllReduce, NUMBER, world)?,
            false => self.barrier(world)?,
        };
        Ok(norm + update + clear + anew + meeting * 2.0)
    }

    /// Both ends send each other their gradients.
    fn sum_over_ends(&self, _strategy: &Decisions, table: Bytes) -> Result<Seconds, CostError> {
        self.to_other_rank(table)
    }

    fn transfer(
        &self,
        _scenario: &Scenario,
        _strategy: &Decisions,
        bytes: Bytes,
    ) -> Result<Seconds, CostError> {
        self.to_other_rank(bytes)
    }

    fn across_domains(
        &self,
        _scenario: &Scenario,
        bytes: Bytes,
        domains: u64,
    ) -> Result<Seconds, CostError> {
        measured(self, CollectiveKind::AllReduce, bytes, domains)
    }

    fn provenance(&self) -> Vec<UsedConstant> {
        self.constants()
    }
}

/// Launches operators one after the other, each waiting for the one before: our executor does not overlap a block's
/// messages.
fn in_order(ops: &[AnyOp<'_>], indices: impl Iterator<Item = usize>) -> Vec<Launch> {
    let mut queue = Queue::with_room(ops.len());
    for index in indices {
        match ops[index].cost() {
            CostClass::Collective(collective) => queue.exchange(index, collective.axis),
            _ => queue.compute(index, 1),
        }
    }
    queue.launches()
}

impl ProfilePrices {
    /// Time in which a rank sends `bytes` bytes to another rank, and receives as many from it. If
    /// ranks share cores, send and receive were measured together, and half of that is one rank's.
    fn to_other_rank(&self, bytes: Bytes) -> Result<Seconds, CostError> {
        if self.of_gpus {
            return measured(self, CollectiveKind::SendRecv, bytes, 2);
        }
        let elements = (bytes.0 / DType::F32.size()).max(1);
        let kernel = Kernel::new("send and receive", [2, elements]);
        Ok(self.message(&kernel, 2)? * 0.5)
    }

    /// What an operator runs, by the name and sizes that profiles list.
    fn kernel(&self, of: &BlockToPrice<'_>, epilogues: &Epilogues, op: AnyOp<'_>) -> Kernel {
        let ranks = |axis| size(of.key, axis);
        match self.of_gpus {
            true => of.trace.kernel_on_gpu(op, epilogues, ranks),
            false => of.trace.kernel(op, ranks),
        }
    }

    /// Measured time of an operator; it includes the host's time.
    fn operator(
        &self,
        of: &BlockToPrice<'_>,
        epilogues: &Epilogues,
        op: AnyOp<'_>,
    ) -> Result<PricedKernel, CostError> {
        let mut time = self.price(&self.kernel(of, epilogues, op))?;
        if let CostClass::Collective(collective) = op.cost() {
            let ranks = size(of.key, collective.axis);
            time += match self.of_gpus {
                true => measured(self, collective.kind, Bytes(collective.bytes), ranks)?,
                false => self.barrier(ranks)?,
            };
        }
        Ok(PricedKernel {
            time,
            ..PricedKernel::default()
        })
    }

    fn price(&self, kernel: &Kernel) -> Result<Seconds, CostError> {
        self.measured_by(kernel, self.ranks)
    }

    /// Measured time of a kernel while `ranks` ranks compute.
    fn measured_by(&self, kernel: &Kernel, ranks: u64) -> Result<Seconds, CostError> {
        let time = self.time(kernel, ranks);
        time.ok_or_else(|| CostError::NotMeasured {
            kernel: kernel.name.clone(),
        })
    }

    /// Time of a message between `ranks` ranks, scaled down to what it would be if every rank had a core of its own.
    fn message(&self, kernel: &Kernel, ranks: u64) -> Result<Seconds, CostError> {
        let time = self.measured_by(kernel, ranks)?;
        Ok(time * (self.cores as f64 / ranks as f64).min(1.0))
    }

    /// Measured time of a barrier of that many ranks.
    fn barrier(&self, ranks: u64) -> Result<Seconds, CostError> {
        if ranks == 1 {
            return Ok(Seconds(0.0));
        }
        self.message(&Kernel::new("barrier", [ranks]), ranks)
    }

    fn copy(&self, elements: u64) -> Result<Seconds, CostError> {
        if elements == 0 {
            return Ok(Seconds(0.0));
        }
        // Copies were measured on 32-bit elements.
        self.price(&Kernel::new("copy", [elements]))
    }

    /// Dense and expert elements, each with the number of ranks that share them.
    fn kinds(parallel: &DataParallel, elements: Elements) -> [(u64, u64); 2] {
        let (dense, expert) = parallel.shared_by();
        [(elements.dense, dense), (elements.expert, expert)]
    }

    /// Time to gather a stage's sharded parameters into whole tensors.
    ///
    /// # Errors
    /// When messages were not measured.
    fn gather(
        &self,
        parallel: &DataParallel,
        elements: Elements,
        precision: Precision,
    ) -> Result<Seconds, CostError> {
        let narrow = precision.activation().size() as f64 / DType::F32.size() as f64;
        let mut time = Seconds(0.0);
        for (count, ranks) in Self::kinds(parallel, elements) {
            if count > 0 && ranks > 1 {
                let kernel = Kernel::new("all-gather", [ranks, count]);
                time += self.message(&kernel, ranks)? * narrow;
            } else {
                time += self.copy(count)?;
            }
        }
        Ok(time)
    }

    /// Time to reduce a stage's gradients.
    ///
    /// # Errors
    /// When messages were not measured.
    fn reduce(&self, parallel: &DataParallel, elements: Elements) -> Result<Seconds, CostError> {
        let mut time = Seconds(0.0);
        for (count, ranks) in Self::kinds(parallel, elements) {
            if count == 0 {
                continue;
            }
            let (own, copies) = match parallel.sharding.zero {
                Zero::Z0 => (count, ranks),
                _ => (count.div_ceil(ranks), parallel.replicas()),
            };
            if parallel.sharding.zero != Zero::Z0 && ranks > 1 {
                let kernel = Kernel::new("reduce-scatter", [ranks, count]);
                time += self.message(&kernel, ranks)?;
            }
            if copies > 1 {
                let kernel = Kernel::new("all-reduce", [copies, own]);
                time += self.message(&kernel, copies)?;
            }
            // One copy out of the all-reduce's buffer, one into the accumulated gradient.
            let accumulates = parallel.sharding.zero >= Zero::Z2;
            if copies > 1 || ranks > 1 || accumulates {
                time += self.copy(own)? * 2.0;
            }
        }
        Ok(time)
    }
}

fn size(key: &BlockKey, axis: Axis) -> u64 {
    let layout = &key.layout;
    match axis {
        Axis::Cp => layout.cp,
        Axis::Ep => layout.ep,
        Axis::Etp => layout.etp,
        _ => layout.tp,
    }
}
