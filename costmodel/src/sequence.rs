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
    /// The largest number of an entry that a message uses.
    pub(crate) places: usize,
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

/// An action of a rank. A pass comes with the message that it receives and the one that it sends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) action: Action,
    pub(crate) rank: u32,
    pub(crate) receives: Option<Place>,
    pub(crate) sends: Option<Place>,
}

/// Which entry of the engine's list of arrival times belongs to a message between two pipeline stages, from when it is sent until it
/// is received. Entries are used again, and entry 0 belongs to no message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place(NonZero<u32>);

/// The moments in a sequence before its last two groups of micro-batches.
#[derive(Debug)]
pub(crate) struct LastGroups {
    /// Number of steps that come before the last group but one, and before the last.
    pub(crate) before: [usize; 2],
    /// For every rank, the index of the action of the program before which it stops at these moments.
    pub(crate) positions: [Vec<usize>; 2],
    /// Places of the messages under way at the first moment, each with that of the same message of the next group at the
    /// second; `None` if other messages are under way then.
    pub(crate) messages: Option<Vec<[Place; 2]>>,
}

impl Place {
    /// The number of the entry.
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
            places: 0,
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
            places: search.places as usize,
            last,
        }
    }
}

/// For every stage of a program, how many passes of each kind there are.
pub(crate) fn passes(program: &Program) -> Vec<Passes> {
    let actions = || program.ranks.iter().flatten();
    let last = actions().map(|action| action.stage).max();
    let mut passes = vec![Passes::default(); last.map_or(0, |last| last as usize + 1)];
    for action in actions() {
        if let Some(kind) = PASSES.into_iter().position(|kind| kind == action.kind) {
            passes[action.stage as usize][kind] += 1;
        }
    }
    passes
}

/// Pairs each message with the one that the next group of micro-batches has in its stead; `None` if one is left over. Both lists are
/// in the order of [`UnderWay::all`].
fn same_messages(
    earlier: &[(usize, Place)],
    later: &[(usize, Place)],
    group: u32,
) -> Option<Vec<[Place; 2]>> {
    let same = |&((before, _), (after, _)): &(&(usize, Place), &(usize, Place))| {
        *after == before + group as usize
    };
    let pairs = || earlier.iter().zip(later);
    let all = earlier.len() == later.len() && pairs().all(|pair| same(&pair));
    all.then(|| pairs().map(|(&(_, then), &(_, now))| [then, now]).collect())
}

/// The messages that are sent and not yet received, each with its entry in the list of arrival times.
struct UnderWay {
    /// The entry of every message, or `None` if it is not under way. Messages of forward passes come first; then they are in order of
    /// the stage that receives them, then of their micro-batch.
    places: Vec<Option<Place>>,
    stages: usize,
    micro_batches: usize,
}

impl UnderWay {
    fn new(program: &Program, micro_batches: u32) -> Self {
        let stages = program.ranks.iter().flatten().map(|action| action.stage);
        let stages = stages.max().map_or(0, |last| last as usize + 1);
        let micro_batches = micro_batches as usize;
        Self {
            places: vec![None; 2 * stages * micro_batches],
            stages,
            micro_batches,
        }
    }

    /// The entry of the message that stage `to` receives: from the stage before it if `forward`, otherwise from the one after it.
    fn of(&mut self, forward: bool, to: u32, micro_batch: u32) -> &mut Option<Place> {
        let direction = usize::from(!forward) * self.stages;
        let number = (direction + to as usize) * self.micro_batches + micro_batch as usize;
        &mut self.places[number]
    }

    /// All messages, by their index in `places`, with their entries.
    fn all(&self) -> Vec<(usize, Place)> {
        let all = self.places.iter().enumerate();
        all.filter_map(|(number, place)| Some((number, (*place)?)))
            .collect()
    }
}

/// What has been ordered so far.
struct Search {
    /// For every rank, the index of its next action.
    next: Vec<usize>,
    steps: Vec<Step>,
    under_way: UnderWay,
    /// Places without a message.
    free: Vec<Place>,
    places: u32,
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
                Some(place) => Some(place),
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

    /// The entry of the message that an action receives; `None` if it is not sent yet.
    fn received(&mut self, action: Action) -> Option<Place> {
        let forward = action.kind == ActionKind::RecvF;
        let message = self.under_way.of(forward, action.stage, action.micro_batch);
        let place = message.take()?;
        self.free.push(place);
        Some(place)
    }

    /// The entry for the message that an action sends.
    fn sent(&mut self, action: Action) -> Place {
        let place = self.free.pop().unwrap_or_else(|| {
            let place = Place(NonZero::<u32>::MIN.saturating_add(self.places));
            self.places += 1;
            place
        });
        let forward = action.kind == ActionKind::SendF;
        let to = match forward {
            true => action.stage + 1,
            false => action.stage - 1,
        };
        *self.under_way.of(forward, to, action.micro_batch) = Some(place);
        place
    }
}
