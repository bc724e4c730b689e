//! What to measure: the blocks, optimizer states and messages of a rank.

use std::path::Path;

use catalog::{CpKind, DType, Model};
use dtensor::{BlockMesh, BlockPosition};
use models::{BlockClass, BlockLayout};
use profiler::{BlockRequest, Effort, cuda};

use crate::args::SuiteArg;
use crate::commands::plan;
use crate::error::CliError;

/// Most equal layers to run in a row: beyond this, caches have forgotten the first.
const MOST_DEPTH: u64 = 8;

/// A measurement, and how many ranks make it side by side.
pub(super) struct Request {
    pub(super) what: What,
    pub(super) ranks: u64,
    pub(super) threads: usize,
}

impl Request {
    /// A measurement by `ranks` ranks, with `threads` threads each.
    pub(super) fn new(what: What, (ranks, threads): (u64, usize)) -> Self {
        Self {
            what,
            ranks,
            threads,
        }
    }
}

pub(super) enum What {
    Block(Box<BlockRequest>),
    States(u64),
    Messages(u64),
}

impl What {
    /// The request for one GPU; `None` if it needs several.
    pub(super) fn on_one_gpu(self) -> Option<cuda::Request> {
        match self {
            Self::Block(block) => Some(cuda::Request::Block(block)),
            Self::States(elements) => Some(cuda::Request::States(elements)),
            Self::Messages(_) => None,
        }
    }
}

/// How long to measure each request.
pub(super) fn effort(suite: SuiteArg) -> Effort {
    match suite {
        SuiteArg::Quick => Effort::QUICK,
        SuiteArg::Full => Effort::FULL,
    }
}

/// The shapes that a plan runs.
pub(super) fn of_plan(path: &Path, cores: u64) -> Result<Vec<Request>, CliError> {
    let loaded = plan::load(path)?;
    let scenario = loaded.costs.scenario();
    let (model, s) = (&scenario.model, &loaded.strategy);
    let layout = BlockLayout::of(s, scenario.workload.seq_len, scenario.workload.precision);
    let world = scenario.workload.gpus;
    let (ranks, threads) = shares(world, cores);
    let deepest = s.stages.0.iter().copied().max().unwrap_or(1);
    let depth = deepest.min(MOST_DEPTH);
    let mut requests = blocks_of(model, &layout, depth, (ranks, threads))?;
    let parameters =
        models::parameter_count(model).map_err(|e| CliError::wrong(&model.name, e.to_string()))?;
    let held = (parameters / (s.tp * s.pp)).max(1);
    let states = [held, held.div_ceil(s.dp_shard)];
    requests.extend(states.map(|n| Request::new(What::States(n), (ranks, threads))));
    let activation = s.micro_batch * layout.seq_len * model.hidden / s.cp;
    for size in [s.dp_shard * s.cp, s.dp_replicate, s.pp, world] {
        if size > 1 {
            let messages = [activation, held];
            requests.extend(messages.map(|n| Request::new(What::Messages(n), (size, threads))));
        }
    }
    Ok(requests)
}

/// Number of ranks that compute side by side, and threads for each.
pub(super) fn shares(world: u64, cores: u64) -> (u64, usize) {
    (world.min(cores), (cores / world).max(1) as usize)
}

/// Every kind of block of a model under a layout.
pub(super) fn blocks_of(
    model: &Model,
    layout: &BlockLayout,
    depth: u64,
    shares: (u64, usize),
) -> Result<Vec<Request>, CliError> {
    let mut classes = vec![BlockClass::Embedding, BlockClass::Head];
    classes.extend((0..model.layers).map(|i| BlockClass::Layer(model.layer_class(i))));
    classes.sort_unstable();
    classes.dedup();
    classes
        .into_iter()
        .map(|class| {
            let trace = models::trace_block(model, class, layout)
                .map_err(|e| CliError::wrong(&model.name, e.to_string()))?;
            let position = BlockPosition {
                mesh: BlockMesh {
                    tp: layout.tp,
                    cp: layout.cp,
                    ep: layout.ep,
                    etp: layout.etp,
                },
                at: [0; 4],
            };
            let block = BlockRequest {
                trace,
                position,
                micro_batch: layout.micro_batch,
                seq_len: layout.seq_len,
                vocab: model.vocab,
                depth: match class {
                    BlockClass::Layer(_) => depth,
                    _ => 1,
                },
            };
            Ok(Request::new(What::Block(Box::new(block)), shares))
        })
        .collect()
}

/// Layouts on one rank, and split in two by every axis that shards tokens: sizes determine the compute, the axis
/// determines the work around communication.
pub(super) fn layouts(model: &Model, tokens: &[[u64; 2]], dtype: DType) -> Vec<BlockLayout> {
    let mut layouts = Vec::new();
    for &[micro_batch, seq_len] in tokens {
        let alone = BlockLayout::alone(micro_batch, seq_len, dtype);
        let experts = if model.moe.is_some() { 2 } else { 1 };
        layouts.push(alone);
        for sequence_parallel in [false, true] {
            layouts.push(BlockLayout {
                tp: 2,
                sequence_parallel,
                ep: experts,
                ..alone
            });
        }
        for cp_kind in [CpKind::Ring, CpKind::AllGather, CpKind::AllToAll] {
            layouts.push(BlockLayout {
                cp: 2,
                cp_kind,
                ep: experts,
                ..alone
            });
        }
    }
    layouts
}
