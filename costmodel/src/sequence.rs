//! The order in which the actions of all pipeline ranks can run one after the other.
//!
//! Every rank runs its actions in the order of the program, and a receive comes after the send of its message. Which
//! actions are ready does not depend on how long they take, so the order is found once for a program, and the engine runs
//! every strategy with this program along it.

use std::collections::BTreeMap;

use plans::{Action, ActionKind, Program};

/// A program with an order of all its actions.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) program: Program,
    /// The actions in an order in which each finds its messages sent. Those that need no micro-batch of the last two
    /// groups come first, then those that need none of the last group.
    pub(crate) steps: Vec<Step>,
    /// Number of places for messages that are under way.
    pub(crate) places: usize,
    /// For every stage, the number of passes of each kind.
    pub(crate) passes: Vec<Passes>,
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

/// An action of a rank, with the receive that comes before it and the send that comes after it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) action: Action,
    pub(crate) rank: u32,
    pub(crate) receives: Option<Message>,
    pub(crate) sends: Option<Message>,
}

/// A message between two neighbouring stages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Message {
    /// The earlier of the two stages.
    pub(crate) before: u32,
    /// Where the time of its arrival is kept.
    pub(crate) place: u32,
}

/// The moments in a sequence before its last two groups of micro-batches.
#[derive(Debug)]
pub(crate) struct LastGroups {
    /// Number of steps that come before the last group but one, and before the last.
    pub(crate) before: [usize; 2],
    /// Places of the messages under way at the first moment, each with that of the same message of the next group at the
    /// second; `None` if other messages are under way then.
    pub(crate) messages: Option<Vec<[usize; 2]>>,
}

/// What tells messages apart: whether it goes to a later stage, the stage that receives it, and its micro-batch.
type MessageKey = (bool, u32, u32);

impl Sequence {
    /// Finds the order; `group` is the number of micro-batches after which the schedule repeats itself.
    ///
    /// # Panics
    /// If the program deadlocks; programs are validated where they are built.
    pub(crate) fn new(program: Program, micro_batches: u32, group: Option<u32>) -> Self {
        let mut search = Search {
            next: vec![0; program.ranks.len()],
            steps: Vec::with_capacity(program.ranks.iter().map(Vec::len).sum::<usize>() / 2),
            sent: BTreeMap::new(),
            free: Vec::new(),
            places: 0,
        };
        let group = group.filter(|group| micro_batches > 2 * group);
        let last = group.map(|group| {
            let [first, second] = [2, 1].map(|groups| {
                search.run(&program, micro_batches - groups * group);
                (search.steps.len(), search.sent.clone())
            });
            LastGroups {
                before: [first.0, second.0],
                messages: same_messages(&first.1, &second.1, group),
            }
        });
        search.run(&program, micro_batches);
        let actions = program.ranks.iter().map(Vec::len);
        assert!(
            actions.eq(search.next.iter().copied()),
            "validated programs do not deadlock"
        );
        let passes = passes(&program, &search.steps);
        Self {
            kinds: std::array::from_fn(|kind| passes.iter().any(|of_stage| of_stage[kind] > 0)),
            passes,
            program,
            steps: search.steps,
            places: search.places,
            last,
        }
    }
}

/// For every stage of a program, how many passes of each kind there are among these steps.
fn passes(program: &Program, steps: &[Step]) -> Vec<Passes> {
    let stages = program.ranks.iter().flatten().map(|action| action.stage);
    let mut passes = vec![Passes::default(); stages.max().map_or(0, |last| last as usize + 1)];
    for Step { action, .. } in steps {
        if let Some(kind) = PASSES.into_iter().position(|kind| kind == action.kind) {
            passes[action.stage as usize][kind] += 1;
        }
    }
    passes
}

/// Pairs every message with the same one of the next group; `None` if one of either has no partner.
fn same_messages(
    earlier: &BTreeMap<MessageKey, u32>,
    later: &BTreeMap<MessageKey, u32>,
    group: u32,
) -> Option<Vec<[usize; 2]>> {
    let pair = |(&(forward, stage, micro_batch), &place): (&MessageKey, &u32)| {
        let next = later.get(&(forward, stage, micro_batch + group))?;
        Some([place as usize, *next as usize])
    };
    let all = earlier.len() == later.len();
    all.then(|| earlier.iter().map(pair).collect()).flatten()
}

/// What has been ordered so far.
struct Search {
    /// For every rank, the index of its next action.
    next: Vec<usize>,
    steps: Vec<Step>,
    /// Places of the messages under way.
    sent: BTreeMap<MessageKey, u32>,
    /// Places without a message.
    free: Vec<u32>,
    places: usize,
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
        let at = next + usize::from(receive.is_some());
        let Some(&action) = actions.get(at).filter(|action| action.micro_batch < limit) else {
            return false;
        };
        assert!(
            !is_receive(&&action) && !is_send(&&action),
            "programs receive before a pass and send after one"
        );
        let receives = match receive {
            Some(receive) => match self.received(*receive) {
                Some(message) => Some(message),
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

    /// The message that an action receives; `None` if it is not sent yet.
    fn received(&mut self, action: Action) -> Option<Message> {
        let forward = action.kind == ActionKind::RecvF;
        let key = (forward, action.stage, action.micro_batch);
        let place = self.sent.remove(&key)?;
        self.free.push(place);
        let before = action.stage - u32::from(forward);
        Some(Message { before, place })
    }

    /// The message that an action sends.
    fn sent(&mut self, action: Action) -> Message {
        let forward = action.kind == ActionKind::SendF;
        let place = self.free.pop().unwrap_or_else(|| {
            self.places += 1;
            self.places as u32 - 1
        });
        let (to, before) = match forward {
            true => (action.stage + 1, action.stage),
            false => (action.stage - 1, action.stage - 1),
        };
        self.sent.insert((forward, to, action.micro_batch), place);
        Message { before, place }
    }
}
