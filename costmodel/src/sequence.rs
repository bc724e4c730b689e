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
    /// The last two groups of micro-batches, if the schedule has groups.
    pub(crate) last: Option<LastGroups>,
}

/// An action of a rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) action: Action,
    pub(crate) rank: u32,
    /// Of a send or a receive, the place of its message.
    pub(crate) place: u32,
}

/// The moments in a sequence before its last two groups of micro-batches.
#[derive(Debug)]
pub(crate) struct LastGroups {
    /// Number of actions that come before the last group but one, and before the last.
    pub(crate) before: [usize; 2],
    /// Places of the messages under way at the first moment, each with that of the same message of the next group at the
    /// second; `None` if other messages are under way then.
    pub(crate) messages: Option<Vec<[usize; 2]>>,
}

/// A message: whether it goes to a later stage, the stage that receives it, and its micro-batch.
type Message = (bool, u32, u32);

impl Sequence {
    /// Finds the order; `group` is the number of micro-batches after which the schedule repeats itself.
    ///
    /// # Panics
    /// If the program deadlocks; programs are validated where they are built.
    pub(crate) fn new(program: Program, micro_batches: u32, group: Option<u32>) -> Self {
        let mut search = Search {
            next: vec![0; program.ranks.len()],
            steps: Vec::with_capacity(program.ranks.iter().map(Vec::len).sum()),
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
        Self {
            program,
            steps: search.steps,
            places: search.places,
            last,
        }
    }
}

/// Pairs every message with the same one of the next group; `None` if one of either has no partner.
fn same_messages(
    earlier: &BTreeMap<Message, u32>,
    later: &BTreeMap<Message, u32>,
    group: u32,
) -> Option<Vec<[usize; 2]>> {
    let pair = |(&(forward, stage, micro_batch), &place): (&Message, &u32)| {
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
    sent: BTreeMap<Message, u32>,
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
                while let Some(&action) = program.ranks[rank].get(self.next[rank])
                    && action.micro_batch < limit
                    && let Some(place) = self.place(action)
                {
                    let rank_number = rank as u32;
                    self.steps.push(Step {
                        action,
                        rank: rank_number,
                        place,
                    });
                    self.next[rank] += 1;
                }
            }
            if self.steps.len() == before {
                return;
            }
        }
    }

    /// The place of an action's message, 0 if it has none; `None` if its message is not sent yet.
    fn place(&mut self, action: Action) -> Option<u32> {
        let Action {
            kind,
            stage,
            micro_batch,
        } = action;
        match kind {
            ActionKind::SendF => Some(self.send((true, stage + 1, micro_batch))),
            ActionKind::SendB => Some(self.send((false, stage - 1, micro_batch))),
            ActionKind::RecvF | ActionKind::RecvB => {
                let message = (kind == ActionKind::RecvF, stage, micro_batch);
                let place = self.sent.remove(&message)?;
                self.free.push(place);
                Some(place)
            }
            ActionKind::F
            | ActionKind::B
            | ActionKind::I
            | ActionKind::W
            | ActionKind::Unshard
            | ActionKind::Reshard
            | ActionKind::ReduceGrad
            | ActionKind::Optim => Some(0),
        }
    }

    fn send(&mut self, message: Message) -> u32 {
        let place = self.free.pop().unwrap_or_else(|| {
            self.places += 1;
            self.places as u32 - 1
        });
        self.sent.insert(message, place);
        place
    }
}
