//! The most that a rank of our executor has in use on its GPU, buffer by buffer: states, what is kept for
//! backward, and what a pass has besides, by running the passes of every stage on sizes
//! (`dtensor::block::sizes`). Without the driver's context, libraries' workspaces and rounding, which are no
//! buffers, and what messages pass through.

use std::rc::Rc;

use catalog::runtime::AttentionKernel;
use catalog::{Bytes, DType, Zero};
use dtensor::TensorRole;
use dtensor::block::sizes::{self, Ledger, Room, Rooms};
use dtensor::block::{Attention, Block, Half, Keep};
use models::{BlockClass, BlockLayout};
use plans::program::{Arrived, Program};
use plans::{Action, ActionKind, Recompute, Strategy};
use rustc_hash::FxHashMap;

use crate::CostError;
use crate::assemble::Assembled;
use crate::blocks::BlockCosts;
use crate::states::Elements;
use crate::traffic::DataParallel;

/// Words of 32 bits per token that a micro-batch has on the device: its id and its label; and where it reads
/// a table of embeddings, the order of the rows that it adds to.
const TOKEN_WORDS: u64 = 2;
const ORDER_WORDS: u64 = 3;

/// What an action needs, and what it leaves.
#[derive(Clone, Copy, Debug, Default)]
struct Change {
    /// The most in use meanwhile, beyond what was before.
    most: u64,
    /// What is in use after it, beyond what was before.
    left: i64,
}

/// Blocks of a stage, and the changes that its actions make.
type Changes = FxHashMap<ActionKind, Change>;

/// The peak of every pipeline rank's heaviest peer.
pub(crate) fn peaks(
    costs: &BlockCosts,
    strategy: &Strategy,
    assembled: &Assembled,
    program: &Program,
) -> Result<Vec<Bytes>, CostError> {
    let mut made = Made::default();
    let library = costs.scenario().runtime.attention == AttentionKernel::CudnnElseTwoPass;
    let arrived = program.arrived(&assembled.rank_of_stage);
    let ranks = (0u32..).zip(&program.ranks).zip(&assembled.states);
    ranks
        .map(|((rank, actions), states)| {
            let ledger = Ledger::new(library);
            let mut changes: FxHashMap<u32, Changes> = FxHashMap::default();
            let owned = (0u32..).zip(assembled.rank_of_stage.iter());
            for (stage, _) in owned.filter(|&(_, &owner)| owner == rank) {
                let blocks = made.blocks(costs, strategy, u64::from(stage))?;
                let is_last = stage as usize + 1 == strategy.stages.0.len();
                changes.insert(stage, of_stage(&ledger, &blocks, is_last));
            }
            let mut live = (states.total().0 + ledger.lists()) as i64;
            live += words(costs, strategy, assembled, rank) as i64;
            let mut most = live;
            let mut apart = Apart::new(costs, strategy, &arrived[rank as usize]);
            for (index, &action) in actions.iter().enumerate() {
                let elements = |stage| assembled.elements(costs, strategy, stage);
                let around = apart.around(action, &actions[index + 1..], &elements);
                // The optimizer is of all stages, and takes nothing.
                let of_stage = changes.get(&action.stage);
                let change = of_stage.and_then(|changes| changes.get(&action.kind));
                let change = change.copied().unwrap_or_default();
                most = most.max(live + (around.most + change.most) as i64);
                live += around.left + change.left + apart.keep(action, change);
            }
            Ok(Bytes(most as u64))
        })
        .collect()
}

/// Ranks with the parameters of one kind, dense or of experts.
#[derive(Clone, Copy, Debug)]
struct Sharers {
    /// Those that share states.
    shards: u64,
    /// Those whose gradients are summed.
    all: u64,
    /// Whether gradients of a micro-batch are apart from their sums.
    is_apart: bool,
}

/// What a rank of several has beside the buffers of passes: under ZeRO gathered parameters and gradients of the running
/// micro-batch, and what travels.
struct Apart<'p> {
    zero: Zero,
    kinds: [Sharers; 2],
    /// Bytes of a parameter as kernels read it.
    size: u64,
    /// Parameters on their way, of the stage whose turn is next.
    coming: u64,
    /// Gradients of a running micro-batch, by stage.
    running: FxHashMap<u32, u64>,
    /// What is sent, until a receive tells that it has arrived.
    sending: FxHashMap<Action, i64>,
    arrived: &'p Arrived,
}

impl<'p> Apart<'p> {
    fn new(costs: &BlockCosts, strategy: &Strategy, arrived: &'p Arrived) -> Self {
        let scenario = costs.scenario();
        let sharding = DataParallel::new(strategy, &scenario.cluster).sharding;
        let kinds = [
            (sharding.dense, strategy.dp() * strategy.cp),
            (sharding.expert, strategy.edp()),
        ];
        Self {
            zero: strategy.zero,
            kinds: kinds.map(|(shards, all)| Sharers {
                shards,
                all,
                is_apart: strategy.zero >= Zero::Z2 && (all > 1 || strategy.tp > 1),
            }),
            size: scenario.workload.precision.activation().size(),
            coming: 0,
            running: FxHashMap::default(),
            sending: FxHashMap::default(),
            arrived,
        }
    }

    /// Bytes of those parameters of a stage that other ranks have shards of.
    fn shared(&self, elements: Elements) -> u64 {
        let kinds = self.kinds.iter().zip([elements.dense, elements.expert]);
        let shared = kinds.filter(|(of, _)| of.shards > 1);
        shared.map(|(_, elements)| elements * self.size).sum()
    }

    /// What an action takes meanwhile and leaves, beside the passes' own; `elements` are a stage's parameters.
    fn around(
        &mut self,
        action: Action,
        later: &[Action],
        elements: &dyn Fn(u32) -> Elements,
    ) -> Change {
        match action.kind {
            ActionKind::Unshard => {
                // What came is cut into parameters, and let go of.
                let came = self.shared(elements(action.stage));
                // Values of ZeRO-1 and 2 count as states.
                let values = if self.zero == Zero::Z3 { came } else { 0 };
                let here = std::mem::take(&mut self.coming);
                Change {
                    most: came - here + values,
                    left: values as i64 - here as i64,
                }
            }
            ActionKind::Reshard => Change {
                most: 0,
                left: -(self.shared(elements(action.stage)) as i64),
            },
            ActionKind::F | ActionKind::B | ActionKind::I | ActionKind::W => {
                let mut more = 0;
                let next = later.iter().find(|a| a.kind == ActionKind::Unshard);
                if let Some(next) = next.filter(|_| self.coming == 0) {
                    self.coming = self.shared(elements(next.stage));
                    more += self.coming;
                }
                let is_first = !self.running.contains_key(&action.stage);
                if action.kind != ActionKind::F && is_first {
                    let kinds = self.gradients(elements(action.stage));
                    let running = kinds.into_iter().filter(|(of, _)| of.is_apart);
                    let running = running.map(|(_, bytes)| bytes).sum();
                    self.running.insert(action.stage, running);
                    more += running;
                }
                Change {
                    most: more,
                    left: more as i64,
                }
            }
            ActionKind::ReduceGrad => {
                let running = self.running.remove(&action.stage);
                Change {
                    most: self.reduced(elements(action.stage)),
                    left: -(running.unwrap_or(0) as i64),
                }
            }
            ActionKind::RecvF | ActionKind::RecvB => {
                let arrived = self.arrived.get(&action).into_iter().flatten();
                let gone = arrived.filter_map(|send| self.sending.remove(send));
                Change {
                    most: 0,
                    left: -gone.sum::<i64>(),
                }
            }
            _ => Change::default(),
        }
    }

    /// Bytes of gradients by kind.
    fn gradients(&self, elements: Elements) -> [(Sharers, u64); 2] {
        let bytes = |elements| elements * DType::F32.size();
        let [dense, expert] = self.kinds;
        [
            (dense, bytes(elements.dense)),
            (expert, bytes(elements.expert)),
        ]
    }

    /// The most that sums of gradients take.
    fn reduced(&self, elements: Elements) -> u64 {
        let kinds = self.gradients(elements);
        let kinds = || kinds.iter().filter(|(of, _)| of.all > 1 || of.is_apart);
        if self.zero == Zero::Z0 {
            // Own sums, and those of all.
            return kinds().map(|(of, bytes)| bytes / of.all + bytes).sum();
        }
        // Own sums as they came, and next to each other; after a kind's what was apart of it is gone.
        let came: u64 = kinds().map(|(of, bytes)| bytes / of.shards).sum();
        let mut gone = 0;
        let mut most = 0;
        for (of, bytes) in kinds() {
            most = most.max((came + bytes / of.shards).saturating_sub(gone));
            gone += if of.is_apart { *bytes } else { 0 };
        }
        most
    }

    /// What is sent stays until it has arrived.
    fn keep(&mut self, action: Action, sent: Change) -> i64 {
        match action.kind {
            ActionKind::SendF | ActionKind::SendB => {
                self.sending.insert(action, -sent.left);
                -sent.left
            }
            _ => 0,
        }
    }
}

/// Bytes of what the host writes every step and of what it reads: tokens, and losses.
fn words(costs: &BlockCosts, strategy: &Strategy, assembled: &Assembled, rank: u32) -> u64 {
    let seq_len = costs.scenario().workload.seq_len;
    let tokens = strategy.micro_batch * seq_len / strategy.cp;
    let owners = &assembled.rank_of_stage;
    let (first, last) = (owners.first(), owners.last());
    let mut words = TOKEN_WORDS;
    if first == Some(&rank) {
        words += ORDER_WORDS;
    }
    if last == Some(&rank) {
        words += 1;
    }
    4 * tokens * words * strategy.num_micro_batches
}

/// Blocks made so far: those of a class that keep the same are equal.
#[derive(Default)]
struct Made(FxHashMap<(BlockClass, Keep), Rc<Block>>);

impl Made {
    /// The blocks of a virtual stage, in order.
    fn blocks(
        &mut self,
        costs: &BlockCosts,
        strategy: &Strategy,
        stage: u64,
    ) -> Result<Vec<Rc<Block>>, CostError> {
        let model = &costs.scenario().model;
        let stages = &strategy.stages.0;
        let mut wanted = Vec::new();
        if stage == 0 {
            wanted.push((BlockClass::Embedding, Keep::All));
        }
        let first: u64 = stages[..stage as usize].iter().sum();
        for offset in 0..stages[stage as usize] {
            let keep = match strategy.recompute.of_layer(offset) {
                Recompute::None | Recompute::Layers(_) => Keep::All,
                Recompute::Selective | Recompute::SelectiveOps => Keep::NotAttention,
                Recompute::Full => Keep::Input,
            };
            wanted.push((BlockClass::Layer(model.layer_class(first + offset)), keep));
        }
        if stage + 1 == stages.len() as u64 {
            wanted.push((BlockClass::Head, Keep::All));
        }
        let made = wanted.into_iter();
        made.map(|(class, keep)| self.block(costs, strategy, class, keep))
            .collect()
    }

    fn block(
        &mut self,
        costs: &BlockCosts,
        strategy: &Strategy,
        class: BlockClass,
        keep: Keep,
    ) -> Result<Rc<Block>, CostError> {
        let key = (class, keep);
        if let Some(block) = self.0.get(&key) {
            return Ok(Rc::clone(block));
        }
        let scenario = costs.scenario();
        let workload = &scenario.workload;
        let layout = BlockLayout::of(strategy, workload.seq_len, workload.precision);
        let trace = models::trace_block(&scenario.model, class, &layout)
            .map_err(|e| CostError::Trace(e.to_string()))?;
        let block = Block::with_attention(trace, "", None, keep, Attention::Fused);
        let block = Rc::new(block);
        self.0.insert(key, Rc::clone(&block));
        Ok(block)
    }
}

/// Runs one micro-batch through a stage, whole and with backward in halves.
fn of_stage(ledger: &Rc<Ledger>, blocks: &[Rc<Block>], is_last: bool) -> Changes {
    let mut changes = Changes::default();
    let mut note = |kind: ActionKind, work: &mut dyn FnMut()| {
        let before = ledger.live();
        let _ = ledger.take_peak();
        work();
        let change = Change {
            most: ledger.take_peak() - before,
            left: ledger.live() as i64 - before as i64,
        };
        changes.insert(kind, change);
    };
    let room = |block: Option<&Rc<Block>>, role: TensorRole| {
        let mut tensors = block?.trace.tensors.iter();
        let info = tensors.find(|info| info.role == role)?;
        Some(ledger.take(info.bytes().0, info.dtype))
    };
    for halves in [&[Half::Both][..], &[Half::Input, Half::Weight]] {
        let mut input: Option<Room> = None;
        let mut output: Option<Room> = None;
        let mut saved: Vec<Rooms> = Vec::new();
        note(ActionKind::RecvF, &mut || {
            input = room(blocks.first(), TensorRole::Input);
        });
        note(ActionKind::F, &mut || {
            let mut x = input.take();
            for block in blocks {
                let forward = sizes::forward(block, ledger, x.take());
                saved.push(forward.saved);
                x = Some(forward.output);
            }
            // Losses are kept with the words of the step.
            output = x.filter(|_| !is_last);
        });
        let sent = output.as_ref().map(|room| (room.bytes(), room.dtype()));
        note(ActionKind::SendF, &mut || output = None);
        let mut gradient: Option<Room> = None;
        note(ActionKind::RecvB, &mut || {
            gradient = sent.map(|(bytes, dtype)| ledger.take(bytes, dtype));
        });
        for &half in halves {
            let kind = match half {
                Half::Both => ActionKind::B,
                Half::Input => ActionKind::I,
                Half::Weight => ActionKind::W,
            };
            let mut result: Option<Room> = None;
            note(kind, &mut || {
                let mut x = gradient.take();
                for (block, saved) in blocks.iter().zip(&mut saved).rev() {
                    x = sizes::backward(block, ledger, saved, x.take(), half);
                }
                result = x;
                if half != Half::Input {
                    saved.clear();
                }
            });
            if half != Half::Weight {
                note(ActionKind::SendB, &mut || result = None);
            }
        }
    }
    changes
}
