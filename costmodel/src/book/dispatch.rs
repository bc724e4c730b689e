//! Prices of what carries tokens to their experts and back, by dispatcher.
//!
//! A trace sends a row for every expert that a token chose, by an all-to-all over the expert-parallel ranks, and gathers the
//! rows of expert-tensor-parallel peers. A dispatcher that deduplicates sends fewer rows. One that gathers moves every token to
//! all ranks instead, and sums what their experts return: rows are then summed into a place for every token of all ranks. Around an
//! all-to-all, rows may be ordered a second time ([`SecondSort`]).
//!
//! Only the all-to-all has messages of its own between expert-tensor-parallel peers. The other dispatchers send tokens straight to
//! all ranks that hold a part of a chosen expert, in one message over both axes (NVIDIA/Megatron-LM@d98e8a6, `token_dispatcher.py`:
//! `_DeepepManager` and `MoEAllGatherTokenDispatcher` work on `tp_ep_group`).

use catalog::dispatcher::SecondSort;
use catalog::model::Router;
use catalog::runtime::Rewrite;
use catalog::{Axis, Bytes, Dispatcher, Seconds, elementary};
use dtensor::{
    Collective, CollectiveKind, CostClass, Exchange, Moves, Operator, Pass, Product, TensorId,
};
use plans::Group;

use super::block_times::Timed;
use super::entry::{CountsRead, Message};
use crate::lower::{Kernel, KernelKind};
use crate::price::MemoryKind;

/// Bytes of a 64-bit integer.
const WIDE_INTEGER: u64 = 8;

impl Timed<'_> {
    /// Whether the price of a kernel or message depends on the dispatcher.
    pub(super) fn is_of_dispatch(&self, kernel: &Kernel) -> bool {
        match kernel.kind {
            KernelKind::Comm(c) => c.axis == Axis::Ep || c.axis == Axis::Etp,
            _ => self.orders_rows(kernel),
        }
    }

    /// Whether a kernel copies tokens to rows in the order of their experts, or sums rows into tokens.
    pub(super) fn orders_rows(&self, kernel: &Kernel) -> bool {
        let ordering = MemoryKind::Permute;
        matches!(kernel.kind, KernelKind::Memory { kind, .. } if kind == ordering)
    }

    /// Time that the second sort adds to a kernel of [`Self::orders_rows`]; 0 if there is none. It
    /// copies whole runs of neighbouring rows, as fast as other copies (Transformer Engine,
    /// `_sort_chunks_by_map_kernel`).
    pub(super) fn second_sort(&self) -> Seconds {
        match self.sorts_again() {
            true => (self.prices).memory_bound(MemoryKind::Pointwise, self.rows_of_experts() * 2),
            false => Seconds(0.0),
        }
    }

    /// Whether rows are sorted a second time around the all-to-all: by expert when they arrive, and
    /// by sender before they return. Both sorts run in forward and again in backward. The time of
    /// each is added to that of one permute or unpermute kernel ([`Self::orders_rows`]).
    pub(super) fn sorts_again(&self) -> bool {
        self.of.key.execution.dispatcher == Some(Dispatcher::AllToAll)
            && match self.of.scenario.runtime.second_sort {
                SecondSort::Never => false,
                SecondSort::Always => true,
                SecondSort::AfterExchange => self.of.key.layout.ep > 1,
                SecondSort::SeveralExperts => {
                    self.experts().is_some_and(|(experts, _)| experts > 1)
                }
            }
    }

    /// Bytes of the rows that experts read.
    fn rows_of_experts(&self) -> Bytes {
        let rows = self.experts().map(|(_, rows)| rows);
        rows.map_or(Bytes(0), |rows| self.of.trace.tensor(rows).bytes())
    }

    /// Number of experts of a rank, and the rows that they read.
    fn experts(&self) -> Option<(u64, TensorId)> {
        let mut ops = self.of.trace.forward.iter();
        ops.find_map(|op| match op.operator {
            Operator::Product(Product::GroupedMatmul(_, experts)) => Some((experts, op.inputs[0])),
            _ => None,
        })
    }

    /// Bytes that are written for other ranks by a kernel that sums the rows that experts return, or the gradients of the rows that they
    /// were sent; 0 for other kernels, and without all-gather.
    pub(super) fn summed_by_others(&self, kernel: &Kernel) -> Bytes {
        let sums = match kernel.pass {
            Pass::Forward => CostClass::Unpermute,
            _ => CostClass::Permute,
        };
        let class = self.of.trace.op(kernel.pass, kernel.op).cost();
        if class != sums || self.of.key.execution.dispatcher != Some(Dispatcher::AllGather) {
            return Bytes(0);
        }
        let trace = self.of.trace;
        let written = kernel.writes.iter().map(|&id| trace.tensor(id).bytes());
        written.sum::<Bytes>() * (self.sharers() - 1)
    }

    /// Whether the receiving rank orders tokens by expert, not the sender. DeepEP and HybridEP, which send a token only once to a rank,
    /// leave the order to the receiver (NVIDIA/Megatron-LM@d98e8a6, `token_dispatcher.py`, `get_permuted_hidden_states_by_experts`).
    pub(super) fn orders_arrived(&self) -> bool {
        let dispatcher = self.of.key.execution.dispatcher;
        self.of.key.layout.ep > 1 && dispatcher.is_some_and(Dispatcher::deduplicates)
    }

    /// Bytes that a kernel of [`Self::orders_rows`] reads or writes beyond those of the rank's own tokens, where it orders tokens
    /// that have arrived: a token arrives at every rank that has a part of one of its experts.
    pub(super) fn arrived_beside_own(&self, kernel: &Kernel) -> Bytes {
        let (Some(experts), true) = (&self.of.scenario.model.moe, self.sends_over_both_axes())
        else {
            return Bytes(0);
        };
        let KernelKind::Memory { launches, .. } = kernel.kind else {
            return Bytes(0);
        };
        let layout = self.of.key.layout;
        let rows_of_peers = self.rows_sent() * (layout.etp - 1);
        let tokens = match self.orders_arrived() {
            true => {
                let router = self.of.scenario.model.constants.router;
                let places = places_of_a_token(layout.ep, experts.top_k, router);
                // Rows are a token's for each of its experts.
                let own = self.rows_sent().as_f64() / experts.top_k as f64;
                Bytes((own * (places * layout.etp as f64 - 1.0)) as u64)
            }
            false => Bytes(0),
        };
        (rows_of_peers + tokens) * u64::from(launches)
    }

    /// Whether one message carries tokens over the ranks of expert parallelism and of expert tensor parallelism together.
    fn sends_over_both_axes(&self) -> bool {
        let dispatcher = self.of.key.execution.dispatcher;
        self.of.key.layout.ep > 1 && dispatcher.is_some_and(|chosen| chosen != Dispatcher::AllToAll)
    }

    /// Bytes of the rows that the rank's own tokens are sent as without deduplication.
    fn rows_sent(&self) -> Bytes {
        let mut ops = self.of.trace.forward.iter();
        let sent = ops.find_map(|op| match op.operator {
            Operator::Exchange(of) if of.moves == Moves::Dispatch => Some(op.inputs[0]),
            _ => None,
        });
        sent.map_or(Bytes(0), |rows| self.of.trace.tensor(rows).bytes())
    }

    /// Where the host waits to read how many tokens each expert gets. Without a dispatcher, which only bounds ask for, and where
    /// another micro-batch's kernels keep the device busy, the wait costs no time. Without expert parallelism, only the sizes of
    /// products that are launched apart are read.
    ///
    /// DeepEP waits for the numbers before it sends tokens, as an all-to-all does; HybridEP and an all-gather after (deepseek-ai/DeepEP,
    /// `buffer.dispatch`; NVIDIA/Megatron-LM@d98e8a6, `fused_a2a.py` and `token_dispatcher.py`).
    pub(super) fn counts_read(&self) -> Option<CountsRead> {
        let lowering = &self.of.lowering;
        let dispatcher = self.of.key.execution.dispatcher?;
        if !lowering.has(Rewrite::ReadTokenCounts) || self.of.key.execution.beside_others {
            return None;
        }
        let mut forward = self.of.lowered.forward.iter();
        let orders = forward.position(|kernel| {
            matches!(
                self.of.trace.op(kernel.pass, kernel.op).cost(),
                CostClass::Permute
            )
        })?;
        let sends = forward.position(|kernel| self.tells_counts(kernel));
        match sends.map(|beyond| orders + 1 + beyond) {
            Some(sends) => Some(CountsRead {
                sends,
                host: self.after_counts(&self.of.lowered.forward[sends]),
                after: matches!(dispatcher, Dispatcher::HybridEp | Dispatcher::AllGather),
                orders: self.orders_arrived().then_some(orders),
            }),
            None => lowering
                .has(Rewrite::LaunchExpertsApart)
                .then_some(CountsRead {
                    sends: orders,
                    host: Seconds(0.0),
                    after: true,
                    orders: None,
                }),
        }
    }

    /// Number of ranks that share one copy of the experts.
    fn sharers(&self) -> u64 {
        self.of.key.layout.ep * self.of.key.layout.etp
    }

    /// Time of a message to experts or back; of the cheapest dispatcher, if the key has none.
    pub(super) fn dispatch(&self, kernel: &Kernel, collective: Collective) -> Seconds {
        let scenario = self.of.scenario;
        let time = |dispatcher| self.dispatched_by(dispatcher, kernel, collective);
        match self.of.key.execution.dispatcher {
            Some(dispatcher) => time(dispatcher),
            None => {
                let all = scenario.runtime.dispatchers_on(&scenario.cluster, false);
                all.into_iter()
                    .map(time)
                    .reduce(Seconds::min)
                    .unwrap_or_default()
            }
        }
    }

    fn dispatched_by(
        &self,
        dispatcher: Dispatcher,
        kernel: &Kernel,
        collective: Collective,
    ) -> Seconds {
        let Message { kind, bytes, group } = self.message(dispatcher, kernel, collective);
        let time = self.prices.collective(kind, bytes, group);
        match dispatcher {
            Dispatcher::AllToAll => time + self.small_messages(kernel, group),
            Dispatcher::AllGather => time + self.routing(kernel, group),
            Dispatcher::DeepEp | Dispatcher::HybridEp => {
                time.max(self.forwarded(kind, collective, group))
            }
        }
    }

    /// Time in which the ranks of a domain pass on to each other what arrives from other domains, while more arrives: every token goes
    /// to all of them that have one of its experts (deepseek-ai/DeepEP, internode dispatch). 0 if the group lies in one domain.
    fn forwarded(&self, kind: CollectiveKind, collective: Collective, group: Group) -> Seconds {
        let inside = Group {
            size: group.ranks_per_domain(self.of.scenario.domain()),
            ..group
        };
        if inside.size == group.size || collective.axis != Axis::Ep {
            return Seconds(0.0);
        }
        let copies = self.of_choices(group.size);
        let received = Bytes((collective.bytes as f64 * copies) as u64);
        self.prices.collective(kind, received, inside)
    }

    /// Time in which an all-gather dispatcher gathers the routing of all tokens: for every token and expert whether it was chosen, one
    /// byte, and its probability. In backward the gradients of the probabilities are reduced back (NVIDIA/Megatron-LM@d98e8a6,
    /// `token_dispatcher.py`, `MoEAllGatherTokenDispatcher.token_dispatch`).
    fn routing(&self, kernel: &Kernel, group: Group) -> Seconds {
        if !self.brings_tokens(kernel) {
            return Seconds(0.0);
        }
        let Some(experts) = self.of.scenario.model.moe else {
            return Seconds(0.0);
        };
        let rows = (self.of.trace).tensor(self.of.trace.op(kernel.pass, kernel.op).inputs[0]);
        let hidden = rows.shape.last().copied().unwrap_or(1).max(1);
        let entries = rows.elements() / hidden / experts.top_k * experts.experts * group.size;
        let probability = self.of.lowering.router_weights(rows.dtype).size();
        let gather = |bytes| (self.prices).collective(CollectiveKind::AllGather, bytes, group);
        match kernel.pass {
            Pass::Forward => gather(Bytes(entries)) + gather(Bytes(entries * probability)),
            Pass::BackwardInput | Pass::BackwardWeight => (self.prices).collective(
                CollectiveKind::ReduceScatter,
                Bytes(entries * probability),
                group,
            ),
        }
    }

    /// Time of the small messages that go with an all-to-all of rows: before it, ranks gather how
    /// many rows each expert gets, and where experts weight their rows themselves, the router's
    /// weights follow it (NVIDIA/Megatron-LM@d98e8a6, `token_dispatcher.py`, `preprocess` and
    /// `token_dispatch`).
    fn small_messages(&self, kernel: &Kernel, group: Group) -> Seconds {
        let mut time = Seconds(0.0);
        let op = self.of.trace.op(kernel.pass, kernel.op);
        if self.tells_counts(kernel) {
            let experts = self.of.scenario.model.moe.map_or(0, |moe| moe.experts);
            let counts = Bytes(experts * WIDE_INTEGER * group.size);
            time += (self.prices).collective(CollectiveKind::AllGather, counts, group);
        }
        if self.sends_weights(kernel) {
            let rows = self.of.trace.tensor(op.inputs[0]);
            let number = rows.elements() / rows.shape.last().copied().unwrap_or(1).max(1);
            let weights = Bytes(number * self.of.lowering.router_weights(rows.dtype).size());
            time += (self.prices).collective(CollectiveKind::AllToAll, weights, group);
        }
        time
    }

    /// The message that a dispatcher sends in place of a traced collective of experts. It is empty for a collective of expert tensor
    /// parallelism whose data is sent over both axes at once.
    pub(super) fn message(
        &self,
        dispatcher: Dispatcher,
        kernel: &Kernel,
        collective: Collective,
    ) -> Message {
        let traced = Message {
            kind: collective.kind,
            bytes: Bytes(collective.bytes),
            group: self.group(collective.axis),
        };
        let layout = self.of.key.layout;
        if dispatcher == Dispatcher::AllToAll || layout.ep == 1 {
            return traced;
        }
        if collective.axis == Axis::Etp {
            let bytes = Bytes(0);
            return Message { bytes, ..traced };
        }
        let group = match layout.etp {
            1 => traced.group,
            etp => Group {
                size: layout.ep * etp,
                stride: self.group(Axis::Etp).stride,
            },
        };
        match dispatcher {
            Dispatcher::AllGather => self.gathered(kernel, collective, group),
            _ => Message {
                bytes: Bytes((collective.bytes as f64 * self.copies_sent(group)) as u64),
                group,
                ..traced
            },
        }
    }

    /// The kind of collective that is sent where the trace has `collective`. For messages to
    /// experts the dispatcher may replace it, for example an all-to-all by an all-gather.
    pub(super) fn kind(&self, kernel: &Kernel, collective: Collective) -> CollectiveKind {
        match (self.of.key.execution.dispatcher, collective.axis) {
            (Some(dispatcher), Axis::Ep | Axis::Etp) => {
                self.message(dispatcher, kernel, collective).kind
            }
            _ => collective.kind,
        }
    }

    /// The message that replaces an all-to-all where ranks gather all tokens instead: it has a row for every token of all ranks together.
    fn gathered(&self, kernel: &Kernel, collective: Collective, group: Group) -> Message {
        let operator = self.of.trace.op(kernel.pass, kernel.op).operator;
        let kind = match operator {
            Operator::Exchange(Exchange {
                moves: Moves::Combine | Moves::ExpertReduce,
                ..
            }) => CollectiveKind::ReduceScatter,
            _ => CollectiveKind::AllGather,
        };
        let model = &self.of.scenario.model;
        let chosen = model.moe.map_or(1, |experts| experts.top_k);
        let tokens = collective.bytes / chosen;
        let bytes = Bytes(tokens * group.size);
        Message { kind, bytes, group }
    }

    /// Copies of a token that are sent, over the number of experts that it is routed to. With deduplication a token is sent once to each
    /// rank that has a part of one of its experts; across domains once to each domain, which passes it on inside.
    fn copies_sent(&self, group: Group) -> f64 {
        let together = group.ranks_per_domain(self.of.scenario.domain());
        match group.size.div_ceil(together) {
            1 => self.of_choices(group.size),
            domains => self.of_choices(domains),
        }
    }

    /// How many of `places` receive a token, over the number of experts that it is routed to. Places are ranks, or domains that hold
    /// all ranks of an expert. The ranks among which tensor parallelism splits an expert receive the same tokens.
    fn of_choices(&self, places: u64) -> f64 {
        let Some(experts) = &self.of.scenario.model.moe else {
            return 1.0;
        };
        let layout = self.of.key.layout;
        let peers = (places / layout.ep).max(1);
        let router = self.of.scenario.model.constants.router;
        let apart = places_of_a_token(places / peers, experts.top_k, router);
        apart * peers as f64 / experts.top_k as f64
    }
}

/// Expected number of `places` with an expert of a token routed to `chosen` experts. Places hold
/// experts in order; the router may choose from a few groups only, and does so evenly.
///
/// `k` choices among `m` places reach `m·(1 − (1 − 1/m)^k)` of them (DeepEP's arithmetic). That holds within each chosen group if a group
/// has places of its own. If a place has several groups, it is reached unless none of the chosen ones is there.
fn places_of_a_token(places: u64, chosen: u64, router: Router) -> f64 {
    let (places, groups, best) = (places as f64, router.groups as f64, router.best_groups);
    if places >= groups {
        let own = places / groups;
        let choices = chosen as f64 / best as f64;
        return best as f64 * own * (1.0 - elementary::powf(1.0 - 1.0 / own, choices));
    }
    let elsewhere = groups - groups / places;
    let missed = (0..best).map(|taken| (elsewhere - taken as f64) / (groups - taken as f64));
    let missed: f64 = missed.map(|share| share.max(0.0)).product();
    places * (1.0 - missed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_reach_the_places_of_the_chosen_groups() {
        // Counted for 3,000 tokens with random scores, 256 experts in 8 groups of which 4 are chosen from, 8 choices.
        let grouped = [(2, 1.97), (4, 3.13), (8, 3.97), (16, 5.71), (64, 7.49)];
        let of_groups = Router {
            groups: 8,
            best_groups: 4,
            ..Router::default()
        };
        for (places, counted) in grouped {
            let reached = places_of_a_token(places, 8, of_groups);
            let error = reached / counted - 1.0;
            assert!(error.abs() < 0.06, "{places} places: {reached}, {counted}");
        }
        let without = places_of_a_token(8, 8, Router::default());
        assert!((without - 5.25).abs() < 0.01, "{without}");
    }
}
