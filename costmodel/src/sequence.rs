//! The order in which the actions of all pipeline ranks can run one after the other.
//!
//! Every rank runs its actions in the order of the program, and a receive comes after the send of its message. Which
//! actions are ready does not depend on how long they take, so the order is found once for a program, and the engine runs
//! every strategy with this program along it.

use std::num::NonZero;

use plans::{Action, ActionKind, Program};

/// The actions of a program in an order in which they can run.
#[derive(Debug)]
pub(crate) struct Sequence {
    /// The actions in an order in which each finds its messages sent. Those that need no micro-batch of the last two
    /// groups come first, then those that need none of the last group.
    pub(crate) steps: Vec<Step>,
    /// The largest index of a slot that a message uses.
    pub(crate) slots: usize,
    /// Whether the step has passes of each kind, in the order of [`PASSES`].
    pub(crate) kinds: [bool; PASSES.len()],
    /// The last two groups of micro-batches, if the schedule has groups.
    pub(crate) last: Option<LastGroups>,
}

/// Numbers of passes, in the order of [`PASSES`].
pub(crate) type Passes = [u64; PASSES.len()];

/// The kinds of passes, in the order in which their numbers and costs are held.
pub(crate) const PASSES: [ActionKind; 4] =
    [ActionKind::F, ActionKind::B, ActionKind::I, ActionKind::W];

/// An action of a rank. If it is a pass, the message that it needs and the message that it makes belong to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) action: Action,
    pub(crate) rank: u32,
    /// Where the engine finds when the message that the pass needs arrives.
    pub(crate) receives: Option<ArrivalSlot>,
    /// Where the engine writes when the message that the pass makes arrives.
    pub(crate) sends: Option<ArrivalSlot>,
}

/// An index into the list in which the engine keeps when messages between pipeline stages arrive. A message has a slot from when it is
/// sent until it is received; then another message may have it. Indices begin at 1, so that an `Option` of them takes no more bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ArrivalSlot(NonZero<u32>);

/// The moments in a sequence before its last two groups of micro-batches.
#[derive(Debug)]
pub(crate) struct LastGroups {
    /// Number of steps that come before the last group but one, and before the last.
    pub(crate) before: [usize; 2],
    /// For every rank, the index of the action of the program before which it stops at these moments.
    pub(crate) positions: [Vec<usize>; 2],
    /// The slots of the messages under way at the first moment, each with the slot that the same message of the next group has at
    /// the second moment; `None` if the messages under way then are others.
    pub(crate) messages: Option<Vec<[ArrivalSlot; 2]>>,
}

impl ArrivalSlot {
    /// The index as a number.
    pub(crate) fn index(self) -> usize {
        self.0.get() as usize
    }
}

impl Sequence {
    /// Finds the order; `group` is the number of micro-batches after which the schedule repeats itself.
    ///
    /// # Panics
    /// If the program deadlocks; programs are validated where they are built.
    pub(crate) fn new(program: &Program, micro_batches: u32, group: Option<u32>) -> Self {
        let mut search = Search {
            next: vec![0; program.ranks.len()],
            steps: Vec::with_capacity(program.ranks.iter().map(Vec::len).sum::<usize>() / 2),
            under_way: UnderWay::new(program, micro_batches),
            free: Vec::new(),
            slots: 0,
        };
        let group = group.filter(|group| micro_batches > 2 * group);
        let last = group.map(|group| {
            let [first, second] = [2, 1].map(|groups| {
                search.run(program, micro_batches - groups * group);
                let messages = search.under_way.all();
                (search.steps.len(), search.next.clone(), messages)
            });
            LastGroups {
                before: [first.0, second.0],
                positions: [first.1, second.1],
                messages: same_messages(&first.2, &second.2, group),
            }
        });
        search.run(program, micro_batches);
        let actions = program.ranks.iter().map(Vec::len);
        assert!(
            actions.eq(search.next.iter().copied()),
            "validated programs do not deadlock"
        );
        search.steps.shrink_to_fit();
        let has = |kind| search.steps.iter().any(|step| step.action.kind == kind);
        Self {
            kinds: PASSES.map(has),
            steps: search.steps,
            slots: search.slots as usize,
            last,
        }
    }
}

/// For every stage of a program, how many passes of each kind there are.
pub(crate) fn passes(program: &Program) -> Vec<Passes> {
    let mut passes = vec![Passes::default(); stages(program)];
    for action in program.ranks.iter().flatten() {
        if let Some(kind) = PASSES.into_iter().position(|kind| kind == action.kind) {
            passes[action.stage as usize][kind] += 1;
        }
    }
    passes
}

/// Number of virtual stages of a program.
fn stages(program: &Program) -> usize {
    let stages = program.ranks.iter().flatten().map(|action| action.stage);
    stages.max().map_or(0, |last| last as usize + 1)
}

/// Pairs the slot of each earlier message with that of the message which the next group of micro-batches sends in its stead; `None` if
/// a message has no partner. Both lists are as [`UnderWay::all`] returns them.
fn same_messages(
    earlier: &[(usize, ArrivalSlot)],
    later: &[(usize, ArrivalSlot)],
    group: u32,
) -> Option<Vec<[ArrivalSlot; 2]>> {
    let same = |&((before, _), (after, _)): &(&(usize, ArrivalSlot), &(usize, ArrivalSlot))| {
        *after == before + group as usize
    };
    let pairs = || earlier.iter().zip(later);
    let all = earlier.len() == later.len() && pairs().all(|pair| same(&pair));
    all.then(|| pairs().map(|(&(_, then), &(_, now))| [then, now]).collect())
}

/// The messages that are sent and not yet received, each with its slot.
struct UnderWay {
    /// For every message between stages: its slot while it is under way, else `None`. Messages of
    /// forward passes come first, then those of backward passes; within each they are ordered by
    /// the stage that receives them, then by micro-batch.
    slots: Vec<Option<ArrivalSlot>>,
    stages: usize,
    micro_batches: usize,
}

impl UnderWay {
    fn new(program: &Program, micro_batches: u32) -> Self {
        let stages = stages(program);
        let micro_batches = micro_batches as usize;
        Self {
            slots: vec![None; 2 * stages * micro_batches],
            stages,
            micro_batches,
        }
    }

    /// The slot of the message that stage `to` receives: from the stage before it if `forward`, otherwise from the one after it.
    fn of(&mut self, forward: bool, to: u32, micro_batch: u32) -> &mut Option<ArrivalSlot> {
        let direction = usize::from(!forward) * self.stages;
        let number = (direction + to as usize) * self.micro_batches + micro_batch as usize;
        &mut self.slots[number]
    }

    /// All messages under way: their indices in `slots`, and their slots.
    fn all(&self) -> Vec<(usize, ArrivalSlot)> {
        let all = self.slots.iter().enumerate();
        all.filter_map(|(number, slot)| Some((number, (*slot)?)))
            .collect()
    }
}

/// What has been ordered so far.
struct Search {
    /// For every rank, the index of its next action.
    next: Vec<usize>,
    steps: Vec<Step>,
    under_way: UnderWay,
    /// Slots whose messages are received, to be used again.
    free: Vec<ArrivalSlot>,
    slots: u32,
}

impl Search {
    /// Orders all actions that need no micro-batch from `limit` on.
    fn run(&mut self, program: &Program, limit: u32) {
        let ranks = program.ranks.len();
        loop {
            let before = self.steps.len();
            // Forwards go down the ranks, backwards up.
            for rank in (0..ranks).chain((0..ranks).rev()) {
                while self.step(&program.ranks[rank], rank, limit) {}
            }
            if self.steps.len() == before {
                return;
            }
        }
    }

    /// Orders the next action of a rank, with the transfers around it; returns whether it can run already.
    fn step(&mut self, actions: &[Action], rank: usize, limit: u32) -> bool {
        let next = self.next[rank];
        let is_receive =
            |action: &&Action| matches!(action.kind, ActionKind::RecvF | ActionKind::RecvB);
        let is_send =
            |action: &&Action| matches!(action.kind, ActionKind::SendF | ActionKind::SendB);
        let receive = actions.get(next).filter(is_receive);
        // A pass gathers its parameters itself.
        let gathers = |action: &&Action| receive.is_some() && action.kind == ActionKind::Unshard;
        let at = next + usize::from(receive.is_some());
        let at = at + usize::from(actions.get(at).filter(gathers).is_some());
        let Some(&action) = actions.get(at).filter(|action| action.micro_batch < limit) else {
            return false;
        };
        assert!(
            !is_receive(&&action) && !is_send(&&action),
            "programs receive before a pass and send after one"
        );
        let receives = match receive {
            Some(receive) => match self.received(*receive) {
                Some(slot) => Some(slot),
                None => return false,
            },
            None => None,
        };
        // Parameters are freed without taking time.
        let freed = |action: &&Action| action.kind == ActionKind::Reshard;
        let after = at + 1 + usize::from(actions.get(at + 1).filter(freed).is_some());
        let send = actions.get(after).filter(is_send);
        self.next[rank] = after + usize::from(send.is_some());
        let sends = send.map(|&send| self.sent(send));
        self.steps.push(Step {
            action,
            rank: rank as u32,
            receives,
            sends,
        });
        true
    }

    /// The slot of the message that an action receives, which becomes free; `None` if the message is not sent yet.
    fn received(&mut self, action: Action) -> Option<ArrivalSlot> {
        let forward = action.kind == ActionKind::RecvF;
        let message = self.under_way.of(forward, action.stage, action.micro_batch);
        let slot = message.take()?;
        self.free.push(slot);
        Some(slot)
    }

    /// Gives a slot to the message that an action sends.
    fn sent(&mut self, action: Action) -> ArrivalSlot {
        let slot = self.free.pop().unwrap_or_else(|| {
            let slot = ArrivalSlot(NonZero::<u32>::MIN.saturating_add(self.slots));
            self.slots += 1;
            slot
        });
        let forward = action.kind == ActionKind::SendF;
        let to = match forward {
            true => action.stage + 1,
            false => action.stage - 1,
        };
        *self.under_way.of(forward, to, action.micro_batch) = Some(slot);
        slot
    }
}
