//! Our executor on a machine that was measured: every operator at the price its kernel was measured at, and what
//! ranks do beside blocks, pass by pass as `executor::states` does it.
//!
//! Where ranks share cores, communication is their own work, so nothing overlaps with it. Between GPUs an exchange
//! of a block costs what packing it was measured to take, and the message; messages of data parallelism run beside
//! compute as on any cluster (`assemble`).

use catalog::profile::Kernel;
use catalog::{Axis, Bytes, DType, Origin, Precision, Runtime, Seconds, Sourced};
use dtensor::{CollectiveKind, Epilogues, OpKind, Pass, Trace};
use plans::{NamedTime, Strategy, Zero};

use crate::CostError;
use crate::block_cost::{BlockCost, BlockKey};
use crate::messages::measured;
use crate::price::ProfilePrices;
use crate::states::Elements;
use crate::traffic::DataParallel;
use crate::work::Work;

/// Our executor, on the cpu and on GPUs.
const OURS: [&str; 2] = ["vescale", "vescale-cuda"];

/// A number in 64 bits.
const NUMBER: Bytes = Bytes(8);

/// The runtime as it is on this machine: launches are part of what was measured. Ranks that share cores are threads,
/// which have no contexts or communicator buffers.
///
/// # Errors
/// When the runtime is another's than the executor's: a profile measures the operators of ours. Where those of
/// a GPU share a kernel, the first of them took the time of all.
pub(crate) fn adapted(mut runtime: Runtime, gpus: bool) -> Result<Runtime, CostError> {
    if !OURS.contains(&runtime.name.as_str()) {
        return Err(CostError::Prices {
            device: "cpu".to_owned(),
            reason: format!(
                "runtime {} runs other kernels than a profile measures; use --runtime vescale, or vescale-cuda for one of a GPU",
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
    for bytes in [&mut overheads.context, &mut overheads.workspace] {
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

/// Prices of a strategy on this machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Local<'p> {
    pub(crate) prices: &'p ProfilePrices,
    pub(crate) precision: Precision,
}

impl Local<'_> {
    fn price(&self, kernel: &Kernel) -> Result<Seconds, CostError> {
        let time = self.prices.time(kernel, self.prices.ranks());
        time.ok_or_else(|| CostError::NotMeasured {
            kernel: kernel.name.clone(),
        })
    }

    /// A message of `ranks` ranks, as long as it would take if every rank had a core.
    fn message(&self, kernel: &Kernel, ranks: u64) -> Result<Seconds, CostError> {
        let time = self.prices.time(kernel, ranks);
        let time = time.ok_or_else(|| CostError::NotMeasured {
            kernel: kernel.name.clone(),
        })?;
        Ok(time * (self.prices.cores() as f64 / ranks as f64).min(1.0))
    }

    /// How long ranks take to meet.
    fn barrier(&self, ranks: u64) -> Result<Seconds, CostError> {
        if ranks == 1 {
            return Ok(Seconds(0.0));
        }
        self.message(&Kernel::new("barrier", [ranks]), ranks)
    }

    /// Times of a block's operators. `again` are the forward operators that run again.
    ///
    /// # Errors
    /// When nothing like one of them was measured.
    pub(crate) fn block(
        &self,
        trace: &Trace,
        key: &BlockKey,
        again: &[usize],
        cost: &mut BlockCost,
    ) -> Result<(), CostError> {
        let mut forward = Vec::with_capacity(trace.forward.len());
        let epilogues = Epilogues::of(trace);
        for op in trace.forward.iter().chain(&trace.backward) {
            let ranks = |axis| size(key, axis);
            let kernel = match self.prices.is_of_gpus() {
                true => trace.kernel_on_gpu(op, &epilogues, ranks),
                false => trace.kernel(op, ranks),
            };
            let mut time = self.price(&kernel)?;
            let mut work = Work::default();
            if let OpKind::Collective(collective) = op.kind {
                let ranks = size(key, collective.axis);
                time += match self.prices.is_of_gpus() {
                    true => {
                        let bytes = Bytes(collective.bytes);
                        measured(self.prices, collective.kind, bytes, ranks)?
                    }
                    false => self.barrier(ranks)?,
                };
                match collective.axis {
                    Axis::Cp => work.cp = time,
                    Axis::Ep => work.ep = time,
                    _ => work.tp = time,
                }
            } else {
                work.compute = time;
            }
            match op.pass {
                Pass::Forward => {
                    cost.forward += work;
                    forward.push((work, kernel.name.clone()));
                }
                Pass::BackwardInput => cost.backward_input += work,
                Pass::BackwardWeight => cost.backward_weight += work,
            }
            cost.kernels.push(NamedTime {
                name: format!("{} {}", op.scope, kernel.name),
                seconds: time.0,
            });
        }
        for &index in again {
            let (work, name) = &forward[index];
            cost.recompute += *work;
            cost.kernels.push(NamedTime {
                name: format!("{} {name} (recomputed)", trace.forward[index].scope),
                seconds: work.device().0,
            });
        }
        Ok(())
    }

    fn copy(&self, elements: u64) -> Result<Seconds, CostError> {
        if elements == 0 {
            return Ok(Seconds(0.0));
        }
        // Prices are of 32-bit elements.
        self.price(&Kernel::new("copy", [elements]))
    }

    /// Each of dense and expert elements with the ranks that share them.
    fn kinds(parallel: &DataParallel, elements: Elements) -> [(u64, u64); 2] {
        let (dense, expert) = parallel.shared_by();
        [(elements.dense, dense), (elements.expert, expert)]
    }

    /// Gathering a stage's parameters into tensors.
    ///
    /// # Errors
    /// When messages were not measured.
    pub(crate) fn gather(
        &self,
        parallel: &DataParallel,
        elements: Elements,
    ) -> Result<Seconds, CostError> {
        let narrow = self.precision.activation().size() as f64 / DType::F32.size() as f64;
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

    /// Reducing a stage's gradients.
    ///
    /// # Errors
    /// When messages were not measured.
    pub(crate) fn reduce(
        &self,
        parallel: &DataParallel,
        elements: Elements,
    ) -> Result<Seconds, CostError> {
        let mut time = Seconds(0.0);
        for (count, ranks) in Self::kinds(parallel, elements) {
            if count == 0 {
                continue;
            }
            let own = if parallel.sharding.zero == Zero::Z0 {
                count
            } else {
                count.div_ceil(ranks)
            };
            let copies = if parallel.sharding.zero == Zero::Z0 {
                ranks
            } else {
                if ranks > 1 {
                    let kernel = Kernel::new("reduce-scatter", [ranks, count]);
                    time += self.message(&kernel, ranks)?;
                }
                parallel.replicas()
            };
            if copies > 1 {
                let kernel = Kernel::new("all-reduce", [copies, own]);
                time += self.message(&kernel, copies)?;
            }
            // Once out of the sum's buffer, and into the accumulated gradient.
            let accumulates = parallel.sharding.zero >= Zero::Z2;
            if copies > 1 || ranks > 1 || accumulates {
                time += self.copy(own)? * 2.0;
            }
        }
        Ok(time)
    }

    /// Gradient norm, update, and the parameters that kernels read anew. `whole` and `own` are the
    /// elements a rank holds and those it updates.
    ///
    /// # Errors
    /// When the optimizer was not measured.
    pub(crate) fn optimizer(
        &self,
        strategy: &Strategy,
        whole: u64,
        own: u64,
        world: u64,
    ) -> Result<Seconds, CostError> {
        let norm = self.price(&Kernel::new("gradient norm", [own.max(1)]))?;
        let update = self.price(&Kernel::new("adamw", [own.max(1)]))?;
        let held = if strategy.zero >= Zero::Z2 {
            own
        } else {
            whole
        };
        // Gradients are cleared: half a copy.
        let clear = self.copy(held)? * 0.5;
        let anew = match strategy.zero {
            Zero::Z0 => self.copy(whole)?,
            Zero::Z3 => self.copy(own)?,
            Zero::Z1 | Zero::Z2 => Seconds(0.0),
        };
        let meeting = match self.prices.is_of_gpus() {
            // The norm's sum, and the news of it.
            true => measured(self.prices, CollectiveKind::AllReduce, NUMBER, world)?,
            false => self.barrier(world)?,
        };
        Ok(norm + update + clear + anew + meeting * 2.0)
    }

    /// One rank's part of handing an activation of `bytes` to the next stage.
    ///
    /// # Errors
    /// When messages were not measured.
    pub(crate) fn transfer(&self, bytes: Bytes) -> Result<Seconds, CostError> {
        if self.prices.is_of_gpus() {
            return measured(self.prices, CollectiveKind::SendRecv, bytes, 2);
        }
        let elements = (bytes.0 / DType::F32.size()).max(1);
        let kernel = Kernel::new("send and receive", [2, elements]);
        Ok(self.message(&kernel, 2)? * 0.5)
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
