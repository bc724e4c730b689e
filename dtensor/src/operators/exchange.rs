//! Exchanges between ranks: redistributions that the sharding plan asks for, rows of experts, the ring of context
//! parallelism.

use catalog::Axis;

use crate::error::DTensorError;
use crate::gradients::Backward;
use crate::operator::{Collective, CollectiveKind, Exchange, Gradient, Moves, Operator};
use crate::placement::{Placement, Placements};
use crate::plan::{RoutedRows, Routing};
use crate::tape::{DTensor, Record, Recorded, Redistribution, Tape};
use crate::tensor::{TensorId, TensorRole, ViewKind};

/// The message that a redistribution takes; none where every rank has what it will hold.
///
/// # Errors
/// When there is no such redistribution.
fn message(
    name: impl FnOnce() -> String,
    axis: Axis,
    from: Placement,
    to: Placement,
) -> Result<Option<CollectiveKind>, DTensorError> {
    use CollectiveKind::{AllGather, AllReduce, AllToAll, ReduceScatter};
    use Placement::{Interleaved, Partial, Replicate, Shard};
    match (from, to) {
        (Replicate, Replicate | Shard(_) | Interleaved(..)) => Ok(None),
        (Partial, Partial) => Ok(None),
        (Shard(a), Shard(b)) if a == b => Ok(None),
        (Shard(_) | Interleaved(..), Replicate) => Ok(Some(AllGather)),
        (Partial, Replicate) => Ok(Some(AllReduce)),
        (Partial, Shard(_)) => Ok(Some(ReduceScatter)),
        (Shard(_), Shard(_)) => Ok(Some(AllToAll)),
        (Interleaved(a, p), Interleaved(b, q)) if (a, p) == (b, q) => Ok(None),
        (Replicate | Shard(_) | Interleaved(..), Partial)
        | (Partial | Shard(_) | Interleaved(..), Interleaved(..))
        | (Interleaved(..), Shard(_)) => Err(DTensorError::NoRedistribution {
            name: name(),
            axis,
            from,
            to,
        }),
    }
}

impl Tape<'_> {
    /// Redistributes a module's input or output as the plan says; `name` is `module.input` or
    /// `module.output`. Without an entry the tensor passes as it is.
    ///
    /// # Errors
    /// When the plan asks for a redistribution that does not exist.
    pub fn at(&mut self, name: &str, mut x: DTensor) -> Result<DTensor, DTensorError> {
        let targets = self.plan.forward(name).unwrap_or_default();
        for &(axis, to) in targets {
            if self.plan.mesh.size(axis) > 1 {
                x = self.redistribute(name, &x, axis, to)?;
            }
        }
        Ok(x)
    }

    /// One redistribution on one axis. Also recorded when nothing moves forward, because its
    /// transpose may reduce gradients.
    ///
    /// # Errors
    /// When no such redistribution exists.
    pub fn redistribute(
        &mut self,
        name: &str,
        x: &DTensor,
        axis: Axis,
        to: Placement,
    ) -> Result<DTensor, DTensorError> {
        let from = x.placements.on(axis);
        let placements = x.placements.with(axis, to);
        let (out, by) = match message(|| name.to_owned(), axis, from, to)? {
            None => {
                let out = self.alias(x, placements);
                if from == Placement::Replicate && to != Placement::Replicate {
                    self.seen(x, &out, ViewKind::Shard);
                }
                (out, None)
            }
            Some(kind) => {
                let label = format!("{name} redistributed");
                let role = TensorRole::Activation;
                let out = self.tensor(&label, &x.shape, placements, x.dtype, role);
                let scope = name.rsplit_once('.').map_or(name, |(scope, _)| scope);
                let moves = Moves::Redistribute { from, to };
                let by = self.exchange(scope, (kind, axis, moves), x, &out);
                (out, Some(by))
            }
        };
        let what = Recorded::Redistribute(Redistribution { axis, from, to, by });
        self.remember(what, &[x], Some(&out));
        Ok(out)
    }

    /// Appends an exchange of one tensor; returns its place.
    fn exchange(
        &mut self,
        scope: &str,
        (kind, axis, moves): (CollectiveKind, Axis, Moves),
        x: &DTensor,
        out: &DTensor,
    ) -> usize {
        let collective = self.collective(kind, axis, x.id, out.id);
        let exchange = Exchange { collective, moves };
        let tensors: [&[_]; 3] = [&[x.id], &[out.id], &[]];
        self.push(scope, Operator::Exchange(exchange), tensors)
    }

    /// A message between two local tensors, with bytes by its convention.
    fn collective(
        &self,
        kind: CollectiveKind,
        axis: Axis,
        from: TensorId,
        to: TensorId,
    ) -> Collective {
        let [from, to] = [from, to].map(|id| self.trace.tensor(id).bytes().0);
        let bytes = match kind {
            CollectiveKind::AllGather | CollectiveKind::ReduceScatter => from.max(to),
            _ => from,
        };
        Collective { kind, axis, bytes }
    }

    /// Rows exchanged between expert ranks, or back to where they were as `home`.
    pub fn dispatch(&mut self, scope: &str, rows: &DTensor, home: Option<&DTensor>) -> DTensor {
        if self.mesh().ep == 1 {
            return rows.clone();
        }
        let out = self.moved_rows((scope, "exchanged"), rows, (home, 1), |r| r.dispatched);
        let shard = Placement::Shard(0);
        let moves = match home {
            None => Moves::Dispatch,
            Some(_) => Moves::Combine,
        };
        let how = (CollectiveKind::AllToAll, Axis::Ep, moves);
        self.exchange_rows(scope, how, [shard, shard], [rows, &out]);
        out
    }

    /// Rows of all expert-tensor-parallel peers together, or summed and shared out as they were as
    /// `home`.
    pub fn expert_tensor_exchange(
        &mut self,
        scope: &str,
        rows: &DTensor,
        home: Option<&DTensor>,
    ) -> DTensor {
        let etp = self.mesh().etp;
        if etp == 1 {
            return rows.clone();
        }
        let (kind, moves, placements) = match home {
            None => {
                let placements = [Placement::Shard(0), Placement::Replicate];
                (CollectiveKind::AllGather, Moves::ExpertGather, placements)
            }
            Some(_) => {
                let placements = [Placement::Partial, Placement::Shard(0)];
                (
                    CollectiveKind::ReduceScatter,
                    Moves::ExpertReduce,
                    placements,
                )
            }
        };
        let mut out = self.moved_rows((scope, "gathered"), rows, (home, etp), |r| r.gathered);
        out.placements = Placements::REPLICATE;
        let how = (kind, Axis::Etp, moves);
        self.exchange_rows(scope, how, placements, [rows, &out]);
        out
    }

    /// Rows after an exchange: as many as `home` has, or `times` as many, or as were recorded.
    fn moved_rows(
        &mut self,
        (scope, moved): (&str, &str),
        rows: &DTensor,
        (home, times): (Option<&DTensor>, u64),
        recorded: fn(RoutedRows) -> u64,
    ) -> DTensor {
        let mut shape = self.trace.tensor(rows.id).shape.clone();
        shape[0] = match (home, self.plan.routing) {
            (Some(home), _) => home.shape[0],
            (None, Routing::Balanced) => shape[0] * times,
            (None, Routing::Recorded(rows)) => recorded(rows),
        };
        let out = self.rows(&format!("{scope}.{moved}"), shape, rows.dtype);
        DTensor {
            placements: rows.placements,
            ..out
        }
    }

    fn exchange_rows(
        &mut self,
        scope: &str,
        how: (CollectiveKind, Axis, Moves),
        [from, to]: [Placement; 2],
        [rows, out]: [&DTensor; 2],
    ) {
        let by = Some(self.exchange(scope, how, rows, out));
        let axis = how.1;
        let what = Recorded::Redistribute(Redistribution { axis, from, to, by });
        self.remember(what, &[rows], Some(out));
    }

    /// Keys and values travel round the context-parallel ring while attention runs; the operator
    /// sees all of them. One record stands for `cp − 1` steps of the local keys and values.
    pub fn ring_exchange(&mut self, scope: &str, k: &DTensor, v: &DTensor) {
        let bytes = self.trace.tensor(k.id).bytes() + self.trace.tensor(v.id).bytes();
        let collective = Collective {
            kind: CollectiveKind::RingExchange,
            axis: Axis::Cp,
            bytes: bytes.0,
        };
        let moves = Moves::Ring;
        let operator = Operator::Exchange(Exchange { collective, moves });
        let by = self.push(scope, operator, [&[k.id, v.id], &[], &[]]);
        self.remember(Recorded::Ring(by), &[k, v], None);
    }
}

impl Redistribution {
    /// Turns the gradient of the result into that of the input.
    pub(super) fn backward(
        self,
        backward: &mut Backward<'_, '_>,
        record: &Record,
        gradient: &DTensor,
    ) -> Result<(), DTensorError> {
        let Self { axis, from, to, by } = self;
        let have = match gradient.placements.on(axis) {
            Placement::Partial => Placement::Partial,
            _ if to == Placement::Partial => Placement::Replicate,
            _ => to,
        };
        let want = if from == Placement::Partial {
            Placement::Replicate
        } else {
            from
        };
        let all_to_all =
            matches!((from, to), (Placement::Shard(_), Placement::Shard(_))) && by.is_some();
        let scope = match by {
            Some(op) => backward.tape.trace.forward[op].scope.clone(),
            None => "input".to_owned(),
        };
        let kind = match all_to_all {
            true => Some(CollectiveKind::AllToAll),
            false => message(|| format!("{scope} gradient"), axis, have, want)?,
        };
        let input = &record.inputs[0];
        let placements = gradient.placements.with(axis, want);
        let back = match kind {
            // The gradient that this rank has, or a shard of it.
            None => {
                let mut id = gradient.id;
                if have == Placement::Replicate && want != Placement::Replicate {
                    id = backward.gradient(&format!("{scope}.gradient"), input).id;
                    backward.view(gradient.id, id, ViewKind::Shard);
                }
                DTensor {
                    id,
                    placements,
                    shape: input.shape.clone(),
                    dtype: gradient.dtype,
                }
            }
            Some(kind) => {
                let mut out = backward.gradient(&format!("{scope}.gradient"), input);
                out.placements = placements;
                let tape = &mut *backward.tape;
                tape.place(out.id, &input.shape, placements);
                let collective = tape.collective(kind, axis, gradient.id, out.id);
                let undone = by.map(|op| tape.trace.forward[op].operator);
                let moves = match undone {
                    Some(Operator::Exchange(exchange)) => exchange.moves.undone(have, want),
                    _ => Moves::Redistribute {
                        from: have,
                        to: want,
                    },
                };
                let operator = Gradient::Exchange(Exchange { collective, moves });
                let (reads, writes) = (vec![gradient.id], vec![out.id]);
                backward.push_in(scope, operator, reads, writes);
                out
            }
        };
        backward.accumulate(input, back);
        Ok(())
    }
}

impl Moves {
    /// What undoes it; a redistribution, between these placements.
    fn undone(self, from: Placement, to: Placement) -> Self {
        match self {
            Self::Dispatch => Self::Combine,
            Self::Combine => Self::Dispatch,
            Self::ExpertGather => Self::ExpertReduce,
            Self::ExpertReduce => Self::ExpertGather,
            Self::Redistribute { .. } | Self::VocabularySums(_) | Self::Ring => {
                Self::Redistribute { from, to }
            }
        }
    }

    /// Its name in profiles.
    pub(super) fn key(self) -> String {
        let placement = |p: Placement| match p {
            Placement::Replicate => "replicate".to_owned(),
            Placement::Partial => "partial".to_owned(),
            Placement::Shard(dim) | Placement::Interleaved(dim, _) => format!("shard {dim}"),
        };
        let name = match self {
            Self::Redistribute { from, to } => {
                return format!("{} to {}", placement(from), placement(to));
            }
            Self::Dispatch => "dispatch",
            Self::Combine => "combine",
            Self::ExpertGather => "expert gather",
            Self::ExpertReduce => "expert reduce",
            Self::VocabularySums(_) => "vocabulary sums",
            Self::Ring => "ring exchange",
        };
        name.to_owned()
    }
}

/// Keys and values go round again, with their gradients beside them.
pub(super) fn ring_backward(backward: &mut Backward<'_, '_>, of: usize, record: &Record) {
    let forward = &backward.tape.trace.forward[of].operator;
    if let Operator::Exchange(Exchange { collective, .. }) = *forward {
        let operator = Gradient::Ring(Collective {
            bytes: 2 * collective.bytes,
            ..collective
        });
        let reads = record.inputs.iter().map(|x| x.id).collect();
        backward.push(of, operator, reads, Vec::new());
    }
}
