//! Chains of ways to hold and shard states. A way is tried only if those before it in the chain do not
//! fit or may be slower.
//!
//! A rank runs the optimizer last in a step. So two strategies that differ only in how optimizer
//! states are held run the same passes, and only their updates decide which is slower. Smaller
//! states are updated faster; a host is slower than a device, the more so the more states it holds.

use catalog::{Offload, OffloadKind, OffloadOption, OptimizerStates, Runtime, Zero};

use crate::choices::ShardingChoice;

/// The ways to hold and shard the states of a layout.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shardings {
    /// All ways to hold and shard the states.
    pub(crate) all: Vec<ShardingChoice>,
    /// The ways that are tried, by index in `all`. Each is in one chain.
    pub(crate) chains: Vec<Chain>,
    /// The ways, grouped by the data-parallel messages of a step.
    pub(crate) traffic: Vec<Traffic>,
}

/// Ways to shard states whose ranks send the same data-parallel messages, except that gradients may have other types.
#[derive(Clone, Debug)]
pub(crate) struct Traffic {
    /// The way with these messages that has the runtime's own types of gradients and optimizer
    /// states. Nothing is in host memory, or only the parameters that the messages gather.
    pub(crate) of: ShardingChoice,
    /// Indices of this group's chains.
    pub(crate) chains: Vec<u32>,
    /// Number of ways left out because another differs only in smaller optimizer states.
    pub(crate) larger: u64,
}

/// Ways that differ only in how optimizer states are held. Each keeps more of them in host memory
/// than the one before; it is tried only if those before do not fit or may be slower.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chain(pub(crate) Vec<u32>);

impl Shardings {
    /// Sorts the ways of a runtime into chains.
    pub(crate) fn new(all: Vec<ShardingChoice>, runtime: &Runtime) -> Self {
        let mut chains: Vec<Chain> = Vec::with_capacity(all.len());
        let mut traffic: Vec<Traffic> = Vec::new();
        for (index, way) in (0u32..).zip(&all) {
            let of = messages(way);
            let at = traffic.iter().position(|known| known.of == of);
            let at = at.unwrap_or_else(|| {
                traffic.push(Traffic {
                    of,
                    chains: Vec::new(),
                    larger: 0,
                });
                traffic.len() - 1
            });
            let traffic = &mut traffic[at];
            let known = chains.iter_mut().find(|chain| {
                let first = &all[chain.0[0] as usize];
                but_optimizer(way) == but_optimizer(first)
                    && [way, first].iter().all(|way| is_comparable(way, runtime))
            });
            match known {
                None => {
                    traffic.chains.push(chains.len() as u32);
                    chains.push(Chain(vec![index]));
                }
                // Ways without offload come first, largest first: each replaces the last.
                Some(chain) if way.offload.is_none() => {
                    chain.0[0] = index;
                    traffic.larger += 1;
                }
                Some(chain) => chain.0.push(index),
            }
        }
        Self {
            all,
            chains,
            traffic,
        }
    }
}

impl Traffic {
    /// Whether a way has these messages.
    pub(crate) fn has(&self, way: &ShardingChoice) -> bool {
        self.of == messages(way)
    }
}

/// Whether a way's choice for the optimizer decides only the size and place of states. It does not
/// for 8-bit moments (other kernels), plain data parallelism (other traffic), or host memory that
/// passes or reductions wait for (parameters, or gradients added up there or by the device).
fn is_comparable(way: &ShardingChoice, runtime: &Runtime) -> bool {
    let completes = OptimizerStates::completes_parameters;
    let leaves_passes = |offload: Offload| {
        let option = runtime.offload_option(offload, way.zero);
        let waits = |o: &OffloadOption| o.accumulation_waits || o.device_adds_gradients;
        option.is_some_and(|o| o.states == OffloadKind::Optimizer && !waits(o))
    };
    way.zero != Zero::Z0
        && way.optimizer_states.is_none_or(completes)
        && way.offload.is_none_or(leaves_passes)
}

/// Reduces a way to what decides its data-parallel messages, without the type of gradients.
/// Parameters in host memory count, because they are gathered at other times.
fn messages(way: &ShardingChoice) -> ShardingChoice {
    ShardingChoice {
        gradients: None,
        offload: way.offload.filter(|&of| of == Offload::Parameters),
        ..but_optimizer(way)
    }
}

/// This way to shard states, with its choices about the optimizer removed.
fn but_optimizer(way: &ShardingChoice) -> ShardingChoice {
    ShardingChoice {
        optimizer_states: None,
        offload: None,
        ..*way
    }
}
