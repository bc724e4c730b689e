//! Exchanges between ranks: redistributions that the sharding plan asks for, dispatch of rows to experts, the ring of
//! context parallelism.

use catalog::Axis;

use crate::error::DTensorError;
use crate::gradients::Backward;
use crate::operator::{
    Class, Collective, CollectiveKind, CostClass, Exchange, Gradient, Moves, Name, Operator,
};
use crate::placement::{Placement, Placements};
use crate::plan::{RoutedRows, Routing};
use crate::tape::{DTensor, Record, Recorded, Redistribution, Tape};
use crate::tensor::{TensorId, TensorRole, ViewKind};
use crate::trace::Pass;

/// The collective that a redistribution needs; `None` if every rank already holds what it needs.
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
    /// Redistributes a module's input or output as the plan says; `name` is `module.input` or `module.output`. Without
    /// an entry in the plan the tensor is returned as it is.
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

    /// An alias of `x` for a branch off a stream of the model. The branch's gradients are summed
    /// first, then added to the stream's, whether or not the branch starts with a redistribution.
    pub fn branch(&mut self, x: &DTensor) -> DTensor {
        let (out, placement) = (self.alias(x, x.placements), x.placements.on(Axis::Tp));
        self.redistributed((Axis::Tp, placement, placement), None, [x, &out]);
        out
    }

    /// Redistributes a tensor on one axis. Recorded even when forward moves nothing, because its transpose in backward
    /// may reduce gradients.
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
        let on = (axis, from, to);
        let Some(kind) = message(|| name.to_owned(), axis, from, to)? else {
            let out = self.alias(x, placements);
            if from == Placement::Replicate && to != Placement::Replicate {
                self.seen(x, &out, ViewKind::Shard);
            }
            self.redistributed(on, None, [x, &out]);
            return Ok(out);
        };
        let (label, role) = ([name, " redistributed"].concat(), TensorRole::Activation);
        let out = self.tensor(label, &x.shape, placements, x.dtype, role);
        let scope = name.rsplit_once('.').map_or(name, |(scope, _)| scope);
        let how = (kind, Moves::Redistribute { from, to });
        self.exchange(scope, how, on, [x, &out]);
        Ok(out)
    }

    /// Appends an exchange of one tensor to forward.
    fn exchange(
        &mut self,
        scope: &str,
        (kind, moves): (CollectiveKind, Moves),
        on: (Axis, Placement, Placement),
        [x, out]: [&DTensor; 2],
    ) {
        let collective = self.collective(kind, on.0, [x.id, out.id]);
        let exchange = Operator::Exchange(Exchange { collective, moves });
        let by = self.push(scope, exchange, [&[x.id], &[out.id], &[]]);
        self.redistributed(on, Some((by, moves)), [x, out]);
    }

    fn redistributed(
        &mut self,
        (axis, from, to): (Axis, Placement, Placement),
        by: Option<(usize, Moves)>,
        [x, out]: [&DTensor; 2],
    ) {
        let what = Recorded::Redistribute(Redistribution { axis, from, to, by });
        self.remember(what, &[x], Some(out));
    }

    /// The collective between two local tensors, with its size as [`Collective::bytes`] defines it.
    fn collective(&self, kind: CollectiveKind, axis: Axis, ends: [TensorId; 2]) -> Collective {
        let [from, to] = ends.map(|id| self.trace.tensor(id).bytes().0);
        let bytes = match kind {
            CollectiveKind::AllGather | CollectiveKind::ReduceScatter => from.max(to),
            _ => from,
        };
        Collective { kind, axis, bytes }
    }

    /// Sends rows to the expert-parallel ranks of their experts, or back; then `home` is the tensor they came from.
    pub fn dispatch(&mut self, scope: &str, rows: &DTensor, home: Option<&DTensor>) -> DTensor {
        if self.mesh().ep == 1 {
            return rows.clone();
        }
        let out = self.moved_rows((scope, "exchanged"), rows, (home, 1), |r| r.dispatched);
        let moves = match home {
            None => Moves::Dispatch,
            Some(_) => Moves::Combine,
        };
        let on = (Axis::Ep, Placement::Shard(0), Placement::Shard(0));
        self.exchange(scope, (CollectiveKind::AllToAll, moves), on, [rows, &out]);
        out
    }

    /// Gathers the rows of all expert-tensor-parallel peers; with `home`, sums and scatters them back to the layout of
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
        let mut out = self.moved_rows((scope, "gathered"), rows, (home, etp), |r| r.gathered);
        out.placements = Placements::REPLICATE;
        let shard = Placement::Shard(0);
        let (how, from, to) = match home {
            None => {
                let how = (CollectiveKind::AllGather, Moves::ExpertGather);
                (how, shard, Placement::Replicate)
            }
            Some(_) => {
                let how = (CollectiveKind::ReduceScatter, Moves::ExpertReduce);
                (how, Placement::Partial, shard)
            }
        };
        self.exchange(scope, how, (Axis::Etp, from, to), [rows, &out]);
        out
    }

    /// The rows after an exchange: as many as in `home`, else the recorded number, else `times` as many as before.
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
        let mut out = self.rows(&format!("{scope}.{moved}"), shape, rows.dtype);
        out.placements = rows.placements;
        out
    }

    /// Records that keys and values go around the context-parallel ring while attention runs, so that it sees all of
    /// them. One record stands for `cp − 1` steps of the local keys and values.
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
        self.remember(Recorded::Ring(by, collective), &[k, v], None);
    }
}

impl Redistribution {
    /// Derives the gradient of the input from the gradient of the output.
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
        let scope = match by {
            Some((op, _)) => backward.tape.trace.forward[op].scope.clone(),
            None => "input".to_owned(),
        };
        let kind = match (from, to, by) {
            (Placement::Shard(_), Placement::Shard(_), Some(_)) => Some(CollectiveKind::AllToAll),
            _ => message(|| format!("{scope} gradient"), axis, have, want)?,
        };
        let input = &record.inputs[0];
        let placements = gradient.placements.with(axis, want);
        let back = match kind {
            // No message: the gradient as it is, or this rank's shard of it.
            None => {
                let mut back = gradient.clone();
                if have == Placement::Replicate && want != Placement::Replicate {
                    back.id = backward.gradient(&format!("{scope}.gradient"), input).id;
                    backward.view(gradient.id, back.id, ViewKind::Shard);
                }
                back.shape.clone_from(&input.shape);
                back.placements = placements;
                back
            }
            Some(kind) => {
                let mut out = backward.gradient(&format!("{scope}.gradient"), input);
                out.placements = placements;
                let tape = &mut *backward.tape;
                tape.place(out.id, &input.shape, placements);
                let collective = tape.collective(kind, axis, [gradient.id, out.id]);
                let (from, to) = (have, want);
                let moves = match by {
                    Some((_, moves)) => moves.undone(from, to),
                    None => Moves::Redistribute { from, to },
                };
                let operator = Gradient::Exchange(Exchange { collective, moves });
                let tensors = [vec![gradient.id], vec![out.id]];
                backward.append(scope, Pass::BackwardInput, operator, tensors);
                out
            }
        };
        backward.accumulate(input, back);
        Ok(())
    }
}

impl Moves {
    /// The exchange that reverses this one; a redistribution is replaced by one between the given placements.
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
}

impl Exchange {
    /// Name in profiles and cost class.
    pub(super) fn class(self) -> Class {
        let name = match self.moves {
            Moves::Redistribute { from, to } => Name::Moves(from, to),
            Moves::Dispatch => "dispatch".into(),
            Moves::Combine => "combine".into(),
            Moves::ExpertGather => "expert gather".into(),
            Moves::ExpertReduce => "expert reduce".into(),
            Moves::VocabularySums(_) => "vocabulary sums".into(),
            Moves::Ring => "ring exchange".into(),
        };
        (name, CostClass::Collective(self.collective))
    }
}
