//! Computes the cost of one block under one layout: trace, lower, price, run.

use catalog::runtime::RecomputeMode;
use catalog::{Bytes, CudaGraphs, DType, Dispatcher, Seconds};
use dtensor::{Moves, Operator, Trace};
use models::BlockClass;
use plans::{NamedTime, Recompute};

use crate::block_cost::{BlockCost, BlockDetail, BlockKey, HostTimes, Tensors, weights};
use crate::book::{BlockToPrice, CountsRead, PriceBook, PricedBlock, PricedKernel};
use crate::execution::Execution;
use crate::launches::{Launch, issued};
use crate::lower::{BlockMemory, Lowered, Lowering, casts};
use crate::picoseconds::Picoseconds;
use crate::spread::Spread;
use crate::states::Weights;
use crate::streams::Slowdown;
use crate::task_list::{self, Task};
use crate::work::{Backward, Work};
use crate::{CostError, Scenario};

/// Variants of a block that are priced together, as only the last steps of pricing differ:
/// recomputation modes, gradient types, and ways to run passes.
#[derive(Debug)]
pub(crate) struct Siblings {
    recompute: Vec<Recompute>,
    accumulates: Vec<DType>,
    executions: Vec<Execution>,
}

impl Siblings {
    /// The variant of the key, and the other ways to run passes that the runtime offers.
    pub(crate) fn executed(scenario: &Scenario, key: &BlockKey) -> Self {
        Self {
            recompute: vec![key.recompute],
            accumulates: vec![key.accumulates],
            executions: executions(scenario, key),
        }
    }

    /// All variants that the runtime offers for such a block. For a block of [`is_one_of_several`]
    /// only the ways to run passes, because few of the others are ever asked for.
    pub(crate) fn offered(scenario: &Scenario, key: &BlockKey) -> Self {
        if is_one_of_several(scenario, key) {
            return Self::executed(scenario, key);
        }
        Self {
            recompute: modes(scenario, key),
            accumulates: accumulation_types(scenario, key),
            executions: executions(scenario, key),
        }
    }
}

/// Whether the runtime has several dispatchers for the block's tokens; most bounds use the least.
fn is_one_of_several(scenario: &Scenario, key: &BlockKey) -> bool {
    let sends = key.layout.ep > 1 && key.execution.dispatcher.is_some();
    sends && (scenario.runtime.dispatchers_on(&scenario.cluster, false)).len() > 1
}

/// How a scenario's blocks are lowered if they run in this way.
fn lowering<'a>(scenario: &'a Scenario, execution: &Execution) -> Lowering<'a> {
    Lowering::of(&scenario.runtime, execution)
        .with_padding(scenario.workload.is_padded())
        .on(scenario.cluster.device.architecture)
}

/// The key's way to run passes, then the other ways with the same kernels, which are priced with it.
fn executions(scenario: &Scenario, key: &BlockKey) -> Vec<Execution> {
    let runtime = &scenario.runtime;
    let space = &runtime.space;
    let switches_tp =
        runtime.overlaps_tensor_parallel_on(&scenario.cluster) && key.layout.sequence_parallel;
    let sends = key.layout.ep > 1;
    let dispatchers = match key.execution.dispatcher {
        Some(_) if sends => runtime.dispatchers_on(&scenario.cluster, false),
        _ => Vec::new(),
    };
    let own = key.execution.dispatcher.into_iter();
    let dispatchers = own
        .chain(dispatchers)
        .map(Some)
        .chain([key.execution.dispatcher]);
    let lowering = lowering(scenario, &key.execution);
    let mut all = vec![key.execution];
    for dispatcher in dispatchers {
        for beside_others in [false, true] {
            for overlap_tp in [false, true] {
                let execution = Execution {
                    overlap_tp,
                    beside_others,
                    dispatcher,
                    graphs: CudaGraphs::None,
                    ..key.execution
                };
                // Blocks without a dispatcher are for bounds, which need only one of both values.
                let switches_experts = space.expert_overlap && dispatcher.is_some();
                let possible = (overlap_tp == key.execution.overlap_tp || switches_tp)
                    && (beside_others == key.execution.beside_others || switches_experts)
                    && !(beside_others && dispatcher == Some(Dispatcher::AllGather));
                let execution = key.executed(runtime, execution).execution;
                let is_like = self::lowering(scenario, &execution).is_like(&lowering);
                if possible && is_like && !all.contains(&execution) {
                    all.push(execution);
                }
            }
        }
    }
    all
}

/// Computes the costs of a block for the layout of `key`, one for each combination of its siblings. The block is traced and lowered
/// once for all of them.
///
/// # Errors
/// When the model cannot be traced under the layout, or an operator has no price.
pub(crate) fn price(
    scenario: &Scenario,
    book: &dyn PriceBook,
    key: &BlockKey,
    siblings: &Siblings,
) -> Result<Vec<BlockCost>, CostError> {
    let trace = &trace(scenario, key)?;
    let Siblings {
        recompute,
        accumulates,
        executions,
    } = siblings;
    let lowering = lowering(scenario, &key.execution);
    let lowered = lowering.lower(trace);
    let of = to_price(scenario, key, recompute, trace, &lowered);
    let memory = lowering.memory(trace, &lowered, recompute, key.layout.tp);
    let mut costs = Vec::with_capacity(recompute.len() * accumulates.len() * executions.len());
    for &gradients in accumulates {
        let key = BlockKey {
            accumulates: gradients,
            ..*key
        };
        // Only backward depends on the type of gradients.
        let modes: &[Recompute] = match gradients == accumulates[0] {
            true => recompute,
            false => &[],
        };
        let of = BlockToPrice {
            key: &key,
            modes,
            ..of
        };
        let first = book.block(&of)?;
        for (at, &execution) in executions.iter().enumerate() {
            let key = BlockKey { execution, ..key };
            let of = BlockToPrice { key: &key, ..of };
            let other = match at {
                0 => None,
                _ => Some(book.reissued(&of, &first)?),
            };
            let priced = other.as_ref().unwrap_or(&first);
            if modes.is_empty() {
                let known = at * recompute.len()..(at + 1) * recompute.len();
                let backward = backward(execution.slowdown(scenario), priced);
                let with_gradients = |cost: &BlockCost| cost.with_gradients(gradients, backward);
                let new: Vec<BlockCost> = costs[known].iter().map(with_gradients).collect();
                costs.extend(new);
            } else {
                let memory: Vec<BlockMemory> = (memory.iter())
                    .map(|memory| memory.with_transient(gathered_tokens(&of)))
                    .collect();
                costs.extend(of_key(&of, priced, &memory));
            }
        }
    }
    Ok(costs)
}

/// The costs of a traced block for the type of gradients in its key, one for each mode of recomputation.
fn of_key(of: &BlockToPrice<'_>, priced: &PricedBlock, memory: &[BlockMemory]) -> Vec<BlockCost> {
    let BlockToPrice {
        scenario,
        key,
        modes,
        trace,
        ..
    } = *of;
    let slowdown = key.execution.slowdown(scenario);
    let of_forward = |pass: &[Launch]| Work {
        starved: starved(priced, pass, |kernel| kernel.host),
        ..run(slowdown, priced, pass)
    };
    let forward = of_forward(&priced.forward);
    let backward = backward(slowdown, priced);
    let hosts = graphed_hosts(priced);
    let spread = |passes: [&Vec<Launch>; 3]| {
        let launches = passes.into_iter().flat_map(|pass| issued(pass));
        launches.fold(Spread::default(), |all, launch| {
            all + priced.kernels[launch.kernel].spread
        })
    };
    let weights = Weights {
        copies: casts::of_weights(&of.lowering, trace),
        ..weights(trace)
    };
    let again = modes.iter().zip(&priced.recompute);
    let cost =
        |((&recompute, again), memory): ((&Recompute, &Vec<Launch>), &BlockMemory)| BlockCost {
            key: BlockKey { recompute, ..*key },
            forward,
            backward,
            recompute: of_forward(again),
            graphed: HostTimes {
                recompute: graphed(priced, again),
                starved_recompute: starved(priced, again, |kernel| kernel.graphed),
                ..hosts
            },
            spread: spread([&priced.forward, again, &priced.backward]),
            memory: *memory,
            output: trace.output.map_or(Bytes(0), |id| trace.tensor(id).bytes()),
            weights,
            tensors: Tensors::of(trace),
        };
    again.zip(memory).map(cost).collect()
}

/// Extra memory of the all-gather dispatcher, in bytes: the tokens gathered from all ranks, less
/// the rows that another dispatcher holds instead of them.
fn gathered_tokens(of: &BlockToPrice<'_>) -> Bytes {
    let (layout, execution) = (&of.key.layout, of.key.execution);
    let chosen = of.scenario.model.moe.map_or(1, |experts| experts.top_k);
    let dispatched = of.trace.forward.iter().find_map(|op| match op.operator {
        Operator::Exchange(exchange) if exchange.moves == Moves::Dispatch => Some(op.inputs[0]),
        _ => None,
    });
    match dispatched {
        Some(rows) if execution.dispatcher == Some(Dispatcher::AllGather) => {
            let rows = of.trace.tensor(rows).bytes() * layout.etp;
            Bytes(rows.0 / chosen * layout.ep).saturating_sub(rows)
        }
        _ => Bytes(0),
    }
}

fn backward(slowdown: Slowdown, priced: &PricedBlock) -> Backward {
    let run = |pass: &[Launch]| run(slowdown, priced, pass);
    let whole = run(&priced.backward);
    let [input, weight] = match &priced.halves {
        Some(halves) => halves.each_ref().map(|half| run(half)),
        None => [whole, Work::default()],
    };
    Backward {
        whole,
        input,
        weight,
    }
}

fn run(slowdown: Slowdown, priced: &PricedBlock, pass: &[Launch]) -> Work {
    let mut work = task_list::run(&tasks(priced, pass), slowdown, None);
    for launch in issued(pass) {
        work.card += priced.kernels[launch.kernel].card * (1.0 / launch.parts as f64);
    }
    work
}

/// What passes take on the host if CUDA graphs capture layers, without a recomputation.
fn graphed_hosts(priced: &PricedBlock) -> HostTimes {
    let backward = graphed(priced, &priced.backward);
    let [input, weight] = match &priced.halves {
        Some(halves) => halves.each_ref().map(|half| graphed(priced, half)),
        None => [backward, Seconds(0.0)],
    };
    HostTimes {
        forward: graphed(priced, &priced.forward),
        backward,
        input,
        weight,
        starved_forward: starved(priced, &priced.forward, |kernel| kernel.graphed),
        ..HostTimes::default()
    }
}

/// Time for which the device idles after the host has waited for it to read how many tokens each expert gets; 0 if forward kernels do
/// not send tokens. By then the device has done all that was issued, and the host is ahead of it again only after some more
/// kernels: the device idles for the most by which the host's time up to a kernel exceeds the device's before that kernel. Messages
/// count as if nothing ran beside them.
fn starved(
    priced: &PricedBlock,
    pass: &[Launch],
    host: impl Fn(&PricedKernel) -> Seconds,
) -> Seconds {
    let sends = |counts: &CountsRead| {
        let mut launches = issued(pass);
        launches.position(|launch| launch.kernel == counts.sends)
    };
    let Some((counts, at)) = priced.counts.and_then(|c| Some((c, sends(&c)?))) else {
        return Seconds(0.0);
    };
    let orders = |launch: &&Launch| Some(launch.kernel) == counts.orders;
    let first = issued(pass).find(orders);
    let others = issued(pass).skip(at + usize::from(counts.after));
    let (mut by_host, mut by_device, mut most) = (Seconds(0.0), Seconds(0.0), Seconds(0.0));
    for launch in first.into_iter().chain(others) {
        let kernel = &priced.kernels[launch.kernel];
        by_host += match launch.kernel == counts.sends {
            true => counts.host,
            false => host(kernel),
        };
        most = most.max(by_host - by_device);
        by_device += part(kernel, launch.parts);
    }
    most
}

/// Time that the host takes to issue a pass of layers that are captured in CUDA graphs.
fn graphed(priced: &PricedBlock, pass: &[Launch]) -> Seconds {
    let all = issued(pass).map(|launch| priced.kernels[launch.kernel].graphed);
    all.fold(Seconds(0.0), |sum, host| sum + host)
}

/// Breaks a block's cost down by name: times of kernels, and bytes of saved tensors.
///
/// # Errors
/// When the model cannot be traced under the layout, or an operator has no price.
pub(crate) fn detail(
    scenario: &Scenario,
    book: &dyn PriceBook,
    key: &BlockKey,
) -> Result<BlockDetail, CostError> {
    let modes = [key.recompute];
    let trace = trace(scenario, key)?;
    let lowered = lowering(scenario, &key.execution).lower(&trace);
    let of = to_price(scenario, key, &modes, &trace, &lowered);
    let priced = book.block(&of)?;
    let names = book.names(&of);
    let slowdown = key.execution.slowdown(scenario);
    let mut kernels = Vec::new();
    let mut in_forward = vec![false; names.len()];
    for launch in &priced.forward {
        in_forward[launch.kernel] = true;
    }
    // `again` is appended to the names of kernels that forward runs too.
    let mut add = |pass: &[Launch], again: &str| {
        let mut spent = vec![Seconds(0.0); names.len()];
        let mut add = |task: usize, time| spent[pass[task].kernel] += time;
        task_list::run(&tasks(&priced, pass), slowdown, Some(&mut add));
        let taken = (names.iter().zip(&in_forward).zip(&spent)).filter(|(_, time)| time.0 > 0.0);
        kernels.extend(taken.map(|((name, in_forward), seconds)| NamedTime {
            name: match in_forward {
                true => format!("{name}{again}"),
                false => name.clone(),
            },
            seconds: seconds.0,
        }));
    };
    add(&priced.forward, "");
    add(&priced.recompute[0], " (recomputed)");
    add(&priced.backward, " (repeated in backward)");
    let saved = of.lowering.saved(&trace, key.recompute);
    Ok(BlockDetail { kernels, saved })
}

/// Traces a block under the layout of its key.
fn trace(scenario: &Scenario, key: &BlockKey) -> Result<Trace, CostError> {
    models::trace_block(&scenario.model, key.class, &key.layout)
        .map_err(|e| CostError::Trace(e.to_string()))
}

fn to_price<'a>(
    scenario: &'a Scenario,
    key: &'a BlockKey,
    modes: &'a [Recompute],
    trace: &'a Trace,
    lowered: &'a Lowered,
) -> BlockToPrice<'a> {
    BlockToPrice {
        scenario,
        key,
        modes,
        trace,
        lowering: lowering(scenario, &key.execution),
        lowered,
    }
}

/// Types of the gradient accumulation buffer: the key's, then others that the runtime offers.
fn accumulation_types(scenario: &Scenario, key: &BlockKey) -> Vec<DType> {
    let (runtime, precision) = (&scenario.runtime, scenario.workload.precision);
    let own = runtime.own_gradients(precision).held;
    let others = runtime.other_gradients(precision).map(|types| types.held);
    let mut all = vec![key.accumulates];
    for dtype in [own].into_iter().chain(others) {
        if !all.contains(&dtype) {
            all.push(dtype);
        }
    }
    all
}

/// Recomputation modes of a block: its key's and, for layers, the others that the runtime offers.
fn modes(scenario: &Scenario, key: &BlockKey) -> Vec<Recompute> {
    let runtime = &scenario.runtime;
    let mut modes = vec![key.recompute];
    if !matches!(key.class, BlockClass::Layer(_) | BlockClass::Mtp) {
        return modes;
    }
    let selections = runtime.selections_of(&scenario.model).into_iter();
    let selected: Vec<Recompute> = selections
        .map(Recompute::Modules)
        .filter(|mode| *mode != key.recompute)
        .collect();
    for offered in &runtime.space.recompute {
        let of_layers: &[Recompute] = match offered {
            RecomputeMode::None => &[Recompute::None],
            RecomputeMode::Selective => {
                modes.extend(selected.iter().copied());
                &[Recompute::Selective]
            }
            RecomputeMode::Full => &[Recompute::Full],
            RecomputeMode::Layers | RecomputeMode::Falling => &[Recompute::None, Recompute::Full],
            RecomputeMode::SelectiveOps => &[Recompute::SelectiveOps],
        };
        for mode in of_layers {
            if !modes.contains(mode) {
                modes.push(*mode);
            }
        }
    }
    modes
}

/// Turns the launches of a pass into tasks on streams.
fn tasks(priced: &PricedBlock, pass: &[Launch]) -> Vec<Task> {
    // Per kernel: the number of parts at its latest launch, and the time of one of them.
    let mut parts = vec![(0, Picoseconds::ZERO); priced.kernels.len()];
    let task = |launch: &Launch| {
        let kernel = &priced.kernels[launch.kernel];
        let (known, duration) = &mut parts[launch.kernel];
        if *known != launch.parts {
            *known = launch.parts;
            *duration = part(kernel, launch.parts).into();
        }
        Task {
            stream: launch.stream,
            duration: *duration,
            host: kernel.host,
            waits: launch.waits,
            again: launch.again,
        }
    };
    pass.iter().map(task).collect()
}

/// Time of one part of a kernel that is split into `parts`.
fn part(kernel: &PricedKernel, parts: u64) -> Seconds {
    match parts {
        1 => kernel.time,
        _ => kernel.part.unwrap_or(kernel.time * (1.0 / parts as f64)),
    }
}
