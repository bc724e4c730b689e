//! Which ways to hold and shard states need not be tried where another fits.
//!
//! The optimizer is the last that a rank does in a step. So two strategies that differ only in how their optimizer states are
//! held run the same passes at the same times, and which of them takes longer follows from their updates alone. Smaller
//! states are updated sooner; and a host, whose memory is slower than a device's, takes the longer the more of them it has.

use catalog::{Offload, OffloadKind, OptimizerStates, Runtime, Zero};

use crate::choices::ShardingChoice;

/// The ways to hold and shard the states of a layout.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shardings {
    /// All ways.
    pub(crate) all: Vec<ShardingChoice>,
    /// Those that are tried, by index in `all`; each stands in one chain.
    pub(crate) chains: Vec<Chain>,
    /// The ways by the data-parallel messages of a step.
    pub(crate) traffic: Vec<Traffic>,
}

/// Ways to shard states whose ranks send the same data-parallel messages, except that gradients may have other types.
#[derive(Clone, Debug)]
pub(crate) struct Traffic {
    /// The way with these messages that has the runtime's own types of gradients and optimizer states. It keeps nothing in host
    /// memory, unless these are the messages of parameters that lie there.
    pub(crate) of: ShardingChoice,
    /// Their chains, by index.
    pub(crate) chains: Vec<u32>,
    /// Number of ways that are not tried, as another differs from each only in smaller optimizer states.
    pub(crate) larger: u64,
}

/// Ways that differ only in how optimizer states are held: each next one keeps more of them in host memory, and is updated
/// later. All but the first are tried only where those before do not fit.
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
                // States on the device come before those on the host, the largest first.
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

/// Whether all that a way decides of the optimizer is how many states it holds, and where. Moments in 8 bits are updated by
/// other kernels, plain data parallelism has other traffic, and passes wait for parameters in host memory, or for gradients
/// that are added up there.
fn is_comparable(way: &ShardingChoice, runtime: &Runtime) -> bool {
    let completes = OptimizerStates::completes_parameters;
    let leaves_passes = |offload: Offload| {
        let option = runtime.offload_option(offload, way.zero);
        option.is_some_and(|o| o.states == OffloadKind::Optimizer && !o.accumulation_waits)
    };
    way.zero != Zero::Z0
        && way.optimizer_states.is_none_or(completes)
        && way.offload.is_none_or(leaves_passes)
}

/// All that a way decides of data-parallel messages, but for the type of gradients. Parameters in host memory are gathered
/// at other times.
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
