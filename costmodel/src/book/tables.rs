//! The price book of a cluster, from tables and models of its device and network.

use catalog::runtime::Rewrite;
use catalog::{Axis, Bytes, DType, Fp8Recipe, Seconds, Zero};
use dtensor::CollectiveKind;
use plans::{Decisions, Group, UsedConstant};

use super::block_times::Timed;
use super::entry::{BlockToPrice, PriceBook, PricedBlock, Update};
use crate::execution::Execution;
use crate::lower::casts;
use crate::messages::{scatters_transfers, sent_to_next_stage};
use crate::offload::Offloaded;
use crate::price::{MemoryKind, TablePrices};
use crate::shared_tables::SharedTables;
use crate::stage::{Run, StageWork};
use crate::stage_traffic::Traffic;
use crate::states::{Elements, Weights};
use crate::work::Work;
use crate::{
    CostError, Scenario, clipping, known, module_visits, stage_traffic, states, tensorwise,
};

impl PriceBook for TablePrices {
    fn block(&self, of: &BlockToPrice<'_>) -> Result<PricedBlock, CostError> {
        Ok(Timed { of, prices: self }.priced())
    }

    fn reissued(
        &self,
        of: &BlockToPrice<'_>,
        before: &PricedBlock,
    ) -> Result<PricedBlock, CostError> {
        Ok(Timed { of, prices: self }.reissued(before))
    }

    fn names(&self, of: &BlockToPrice<'_>) -> Vec<String> {
        Timed { of, prices: self }.names()
    }

    fn data_parallel(
        &self,
        traffic: &mut Traffic<'_>,
        runs: &[Run],
        stage: &mut StageWork,
    ) -> Result<(), CostError> {
        let (scenario, strategy) = (traffic.scenario, traffic.strategy);
        let ranks = traffic.parallel.ranks();
        let visits = strategy.zero == Zero::Z3
            && (scenario.runtime.rewrites).contains(&Rewrite::VisitModules);
        let visited = visits.then(|| module_visits::add(scenario, ranks, runs, stage));
        let runs = visited.as_deref().unwrap_or(runs);
        let copies = strategy.offload.is_some() || strategy.offload_layers > 0;
        if ranks > 1 || copies {
            self.traffic(traffic, runs, stage)?;
        }
        // After the traffic is added: the blocks' shares of the stage's time are taken without these casts.
        self.autocast(traffic, runs, stage);
        self.quantise_weights(traffic, runs, stage);
        self.accumulate(traffic, runs, stage);
        Ok(())
    }

    fn optimizer(&self, of: &Update<'_>) -> Result<Seconds, CostError> {
        let (scenario, strategy, elements) = (of.scenario, of.strategy, of.elements);
        let precision = scenario.workload.precision;
        let types = &strategy.state_types(&scenario.runtime, precision);
        let sharding = &of.parallel.sharding;
        let offloaded = Offloaded::of(scenario, strategy);
        let on_device = |bytes: Bytes| offloaded.map_or(bytes, |host| host.left(bytes));
        let traffic = on_device(sharding.optimizer_traffic(elements, types, precision));
        let kind = if types.momentum == DType::U8 {
            MemoryKind::EightBitOptimizer
        } else if scenario.runtime.rewrites.contains(&Rewrite::FusedOptimizer) {
            MemoryKind::Optimizer
        } else {
            MemoryKind::UnfusedOptimizer
        };
        let owned = sharding.shard(elements) * states::gradient_type(types, precision).size();
        let clipped = Bytes(of.gradients.0.min(owned)) * clipping::passes(scenario);
        let clipped = offloaded.map_or(clipped, |host| host.clipped_by_device(clipped));
        let elementary = scenario.runtime.overheads.optimizer_bytes.value;
        let update = match elementary > 0.0 {
            true => {
                let bytes = Bytes((sharding.updated(elements) as f64 * elementary) as u64);
                self.memory_bound(MemoryKind::Pointwise, bytes)
            }
            false => self.memory_bound(kind, traffic),
        };
        let mut time = update + self.memory_bound(MemoryKind::Pointwise, clipped);
        if states::copies_for_step(&scenario.runtime, strategy, precision) {
            // Gradients are read and copied to 32 bits; the optimizer reads the copies instead.
            let copied = on_device(Bytes(sharding.updated(elements) * 2 * DType::F32.size()));
            time += self.memory_bound(MemoryKind::Pointwise, copied);
        }
        time += self.buffer_passes(of);
        time = self.tensor_after_tensor(of, time);
        let whole = elements.total() * types.reduce.size();
        if offloaded.is_none() {
            time += self.gradient_copies(of);
        }
        Ok(time + scenario.runtime.overheads.gradient_byte.value * whole as f64)
    }

    fn gradient_copies(&self, of: &Update<'_>) -> Seconds {
        if of.parallel.ranks() == 1 {
            return Seconds(0.0);
        }
        let (scenario, strategy) = (of.scenario, of.strategy);
        let types = strategy.state_types(&scenario.runtime, scenario.workload.precision);
        let whole = of.elements.total() * types.reduce.size();
        let bytes = Bytes(bucket_passes(scenario, strategy) * 2 * whole);
        self.memory_bound(MemoryKind::Pointwise, bytes)
    }

    fn sum_over_ends(&self, strategy: &Decisions, table: Bytes) -> Result<Seconds, CostError> {
        let stages = strategy.group(Axis::Pp);
        let ends = Group {
            size: 2,
            stride: stages.stride * (stages.size - 1),
        };
        Ok(self.collective(CollectiveKind::AllReduce, table, ends))
    }

    /// Every tensor-parallel rank sends its shard. If all hold the whole activation, each may send a part, which the
    /// receivers then all-gather.
    fn transfer(
        &self,
        scenario: &Scenario,
        strategy: &Decisions,
        output: Bytes,
    ) -> Result<Seconds, CostError> {
        let stages = strategy.group(Axis::Pp);
        let beside = scenario.by_host(&scenario.runtime.overheads.transfer);
        let bytes = sent_to_next_stage(scenario, strategy, output);
        let sent = beside + self.collective(CollectiveKind::SendRecv, bytes, stages);
        if !scatters_transfers(scenario, strategy) {
            return Ok(sent);
        }
        let gather = self.collective(CollectiveKind::AllGather, output, strategy.group(Axis::Tp));
        Ok(sent + gather)
    }

    fn across_domains(
        &self,
        scenario: &Scenario,
        bytes: Bytes,
        domains: u64,
    ) -> Result<Seconds, CostError> {
        let group = Group {
            size: domains,
            stride: scenario.cluster.scale_up_domain,
        };
        Ok(self.collective(CollectiveKind::AllReduce, bytes, group))
    }

    fn provenance(&self) -> Vec<UsedConstant> {
        self.constants()
    }
}

impl TablePrices {
    /// Time of the passes over a rank's whole gradient buffers, once per step: the next step's sums begin at zero, so the buffers are
    /// cleared, and [`Rewrite::ScaleGradients`] reads and writes them before they are reduced.
    fn buffer_passes(&self, of: &Update<'_>) -> Seconds {
        let (scenario, strategy) = (of.scenario, of.strategy);
        let runtime = &scenario.runtime;
        let precision = scenario.workload.precision;
        let held = states::accumulation_type(runtime, strategy, precision).size();
        let buffers = Bytes(of.gradients.0.min(of.elements.total() * held));
        let cleared = u64::from(states::keeps_gradient_buffers(runtime));
        let scales = runtime.rewrites.contains(&Rewrite::ScaleGradients) && of.parallel.ranks() > 1;
        let passes = cleared + 2 * u64::from(scales);
        self.memory_bound(MemoryKind::Pointwise, buffers * passes)
    }

    /// Time of an optimizer step: `time` on the device, and the host's work tensor by tensor.
    fn tensor_after_tensor(&self, of: &Update<'_>, time: Seconds) -> Seconds {
        let scenario = of.scenario;
        let overheads = &scenario.runtime.overheads;
        let rewrites = &scenario.runtime.rewrites;
        let launches =
            |of_tensor: f64| scenario.by_host(&overheads.launch) * (of_tensor * of.tensors as f64);
        let mut time = time;
        if rewrites.contains(&Rewrite::OptimizerByTensor) {
            time = time.max(launches(known::KERNELS_PER_TENSOR.factor()));
        }
        if states::buckets_after_backward(scenario, of.strategy) {
            time += launches(known::CALLS_PER_BUCKETED_GRADIENT.factor());
        }
        let waits = scenario.by_host(&overheads.optimizer_tensor) * of.tensors as f64;
        time + waits + self.whole_gradients(of)
    }

    /// Time in which clipping gathers the gradients that tensor parallelism shards; 0 if the runtime does not gather them. Host and
    /// device work at the same time, and the slower one decides. The device sends the gradients, puts them together and reads them to
    /// find their norms. Assumed: only half of them arrive in pieces that must be copied. That ZeRO shards them too is not counted.
    fn whole_gradients(&self, of: &Update<'_>) -> Seconds {
        let (scenario, strategy) = (of.scenario, of.strategy);
        let by_host = scenario.by_host(&scenario.runtime.overheads.whole_gradient);
        if strategy.tp == 1 || by_host == Seconds(0.0) {
            return Seconds(0.0);
        }
        let types = strategy.state_types(&scenario.runtime, scenario.workload.precision);
        let size = states::gradient_type(&types, scenario.workload.precision).size();
        let whole = Bytes(of.divided * strategy.tp * size);
        let gather = self.collective(CollectiveKind::AllGather, whole, strategy.group(Axis::Tp));
        let device = gather + self.memory_bound(MemoryKind::Pointwise, whole * 2);
        device.max(by_host * of.tensors as f64)
    }

    /// Adds the gathers and reductions of a stage, and the copies around them.
    fn traffic(
        &self,
        traffic: &mut Traffic<'_>,
        runs: &[Run],
        stage: &mut StageWork,
    ) -> Result<(), CostError> {
        let strategy = traffic.strategy;
        let message = |kind, bytes, group: Group| Ok(self.collective(kind, bytes, group));
        stage_traffic::add_layers(traffic, &message, runs, stage)?;
        let gathers_for_every_pass = strategy.zero == Zero::Z3 && strategy.reshard_after_forward;
        let has = |rewrite| traffic.scenario.runtime.rewrites.contains(&rewrite);
        if gathers_for_every_pass && has(Rewrite::GatherTensorByTensor) {
            tensorwise::expose(traffic, self, &message, runs, stage)?;
        } else {
            stage_traffic::plan(traffic, runs, stage);
        }
        if has(Rewrite::BroadcastParameters) {
            let tensors = runs.iter().map(|run| run.cost.tensors.reduced * run.count);
            let elements = runs
                .iter()
                .map(|run| run.cost.weights.trained.total() * run.count);
            let size = traffic.scenario.workload.precision.activation().size();
            let parameters = Bytes(elements.sum::<u64>() * size);
            let parallel = traffic.parallel;
            stage_traffic::broadcast(parallel, tensors.sum(), parameters, &message, stage)?;
        }
        // After the traffic is added: the blocks' shares of the stage's time are taken without these copies.
        if gathers_for_every_pass {
            self.copies(traffic, runs, stage);
        }
        Ok(())
    }

    /// Adds the casts of whole parameters that compute in 16 bits and are held in 32, as `torch.autocast` makes them: of
    /// every weight once in forward and once in recomputation, of every gradient once in backward.
    fn autocast(&self, traffic: &Traffic<'_>, runs: &[Run], stage: &mut StageWork) {
        let scenario = traffic.scenario;
        if !states::casts_in_passes(scenario, traffic.strategy.zero) {
            return;
        }
        let compute = scenario.workload.precision.activation().size();
        let held =
            states::parameter_type(&scenario.runtime.states, scenario.workload.precision).size();
        let casts = |of: fn(&Run) -> bool| {
            let runs = runs.iter().filter(|run| of(run));
            let elements = runs.map(|run| run.cost.weights.trained.total() * run.count);
            let bytes = Bytes(elements.sum::<u64>() * (held + compute));
            self.memory_bound(MemoryKind::Pointwise, bytes)
        };
        let all = casts(|_| true);
        stage.forward.compute += all;
        stage.recompute.compute += casts(|run| run.cost.recompute.duration().0 > 0.0);
        stage.backward.add_weight(Work {
            compute: all,
            ..Work::default()
        });
    }

    /// Adds the casts of weights to 8 bits where a runtime keeps the copies for all micro-batches of a step. It makes them in the first
    /// one; their time is spread evenly over all forward passes. A cast reads 16 bits and writes every copy (Transformer Engine,
    /// `cast_transpose`). A scale of the weight's own largest magnitude takes one more pass, which finds it.
    fn quantise_weights(&self, traffic: &Traffic<'_>, runs: &[Run], stage: &mut StageWork) {
        let (scenario, strategy) = (traffic.scenario, traffic.strategy);
        let written = runs.iter().map(|run| run.cost.weights.copies * run.count);
        let written = written.sum::<Bytes>();
        let recipe = Execution::of(scenario, strategy).fp8_recipe;
        let copies = casts::copies_of_a_weight(recipe, scenario.cluster.device.architecture);
        let reads = match recipe {
            Fp8Recipe::Tensorwise => 2,
            _ => 1,
        };
        let read = Bytes(written.0 / copies) * (reads * DType::Bf16.size());
        let time = self.memory_bound(MemoryKind::Pointwise, written + read);
        stage.forward.compute += time * (1.0 / strategy.num_micro_batches as f64);
    }

    /// Adds the time to sum gradients over micro-batches, if gradients are freed after every step. Then a step's first micro-batch has
    /// nothing to add to, and the time of the later ones is spread evenly over all backward passes. (Where gradients stay in a buffer,
    /// every micro-batch adds to it, which is part of a block's price.)
    fn accumulate(&self, traffic: &Traffic<'_>, runs: &[Run], stage: &mut StageWork) {
        let (scenario, strategy) = (traffic.scenario, traffic.strategy);
        let micro_batches = strategy.num_micro_batches;
        let frees = (scenario.runtime.rewrites).contains(&Rewrite::ReleaseGradients);
        if !frees || micro_batches == 1 {
            return;
        }
        let sharding = &traffic.parallel.sharding;
        let tables = SharedTables::of(scenario, strategy, runs);
        let of_run = |run: &Run| {
            let trained = tables.own(run).trained;
            let elements = [trained.total(), sharding.shard(trained)];
            states::added_gradients(scenario, strategy, elements) * run.count
        };
        let bytes = runs.iter().map(of_run).sum();
        let sums = (micro_batches - 1) as f64 / micro_batches as f64;
        stage.backward.add_weight(Work {
            compute: self.memory_bound(MemoryKind::Pointwise, bytes) * sums,
            ..Work::default()
        });
    }

    /// Adds the copies of whole parameters and gradients between a runtime's collective buffers and the tensors that
    /// kernels use.
    fn copies(&self, traffic: &Traffic<'_>, runs: &[Run], stage: &mut StageWork) {
        let scenario = traffic.scenario;
        let has = |rewrite| scenario.runtime.rewrites.contains(&rewrite);
        let precision = scenario.workload.precision;
        let compute = precision.activation().size();
        let types = (traffic.strategy).state_types(&scenario.runtime, precision);
        let reduce = types.reduce.size();
        let cast = if reduce == compute {
            0
        } else {
            compute + reduce
        };
        let gathered_in = states::gathered_type(&scenario.runtime, precision).size();
        let (gathered, reduced) = if has(Rewrite::CopyShards) {
            (2 * gathered_in, compute + reduce)
        } else if has(Rewrite::FlattenGradients) {
            (0, 4 * compute + cast)
        } else {
            return;
        };
        let pass = |of: fn(Weights) -> Elements, bytes: u64| {
            let elements = |run: &Run| of(run.cost.weights).total() * run.count;
            let whole: u64 = runs.iter().map(elements).sum();
            self.memory_bound(MemoryKind::Pointwise, Bytes(whole * bytes))
        };
        let gathers = pass(Weights::all, gathered);
        stage.forward.compute += gathers;
        let backward = Work {
            compute: gathers + pass(|weights| weights.trained, reduced),
            ..Work::default()
        };
        stage.backward.add_weight(backward);
    }
}

/// How many times a step reads and writes all gradients of a rank because they are reduced in buckets: once to copy them into the
/// buckets, once to divide by the number of ranks, and once more to copy sums back where every rank gets them and uses them. (DeepSpeed
/// under ZeRO-1 and 2 copies only its share out of the sums.) Under ZeRO-2 this happens for every micro-batch. ZeRO-3 reduces block by
/// block, which is counted with its passes.
fn bucket_passes(scenario: &Scenario, strategy: &Decisions) -> u64 {
    let has = |rewrite| scenario.runtime.rewrites.contains(&rewrite);
    if !has(Rewrite::FlattenGradients) || strategy.zero == Zero::Z3 {
        return 0;
    }
    let own_share = states::is_deepspeed(&scenario.runtime) && strategy.zero != Zero::Z0;
    let back = has(Rewrite::AllReduceGradients) && !own_share;
    let passes = 2 + u64::from(back);
    match strategy.zero {
        Zero::Z2 => passes * strategy.num_micro_batches,
        _ => passes,
    }
}
