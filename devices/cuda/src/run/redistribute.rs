//! Moves parts of tensors on a device and between ranks.

use super::cut::{CutOf, Piece};
use super::machine::Machine;
use crate::error::{CudaError, Result};
use crate::links::Collective;
use crate::tensor::{Device, Tensor};
use catalog::{Axis, DType};
use dtensor::TensorInfo;
use dtensor::placement::{Placement, Placements};
use std::slice::from_ref;

/// A tensor seen as rows of one dim: number of rows, and elements per index of that dim.
fn grid(shape: &[usize], dim: usize) -> (usize, usize) {
    let rows = shape[..dim].iter().product();
    (rows, shape[dim + 1..].iter().product())
}

impl Device {
    /// The part of `x` along one dim: a view where it is contiguous, else a copy.
    fn piece(&self, x: &Tensor, piece: &Piece) -> Result<Tensor> {
        if let Some(view) = in_place(x, piece) {
            return Ok(view);
        }
        let out = self.tensor(piece.of(&x.shape), x.dtype)?;
        self.along(x, piece, &out, |x, out, start, at, n| {
            self.move_part((out, at), (x, start), n)
        })?;
        Ok(out)
    }

    /// Writes a part of `whole` along one dim.
    fn put_piece(&self, whole: &Tensor, piece: &Piece, part: &Tensor) -> Result<()> {
        if let Some(to) = in_place(whole, piece) {
            if to.address() != part.address() {
                let bytes = part.bytes();
                self.launcher.copy(to.address(), part.address(), bytes)?;
            }
            return Ok(());
        }
        self.along(whole, piece, part, |whole, part, start, at, n| {
            self.move_part((whole, start), (part, at), n)
        })
    }

    /// Calls `each` for every range of a piece, with whole and part as matrices, the first column of the range in each,
    /// and the number of columns.
    fn along(
        &self,
        whole: &Tensor,
        piece: &Piece,
        part: &Tensor,
        mut each: impl FnMut(&Tensor, &Tensor, usize, usize, usize) -> Result<()>,
    ) -> Result<()> {
        let (rows, inner) = grid(&whole.shape, piece.dim);
        if rows * inner == 0 || piece.len() == 0 {
            return Ok(());
        }
        let by_rows = |x: &Tensor| x.reshaped(vec![rows, x.len() / rows]);
        let (whole, part) = (by_rows(whole), by_rows(part));
        let mut at = 0;
        for run in &piece.runs {
            let n = run.len() * inner;
            each(&whole, &part, run.start * inner, at, n)?;
            at += n;
        }
        Ok(())
    }
}

/// The part as a view, if it is contiguous.
fn in_place(x: &Tensor, piece: &Piece) -> Option<Tensor> {
    let (rows, inner) = grid(&x.shape, piece.dim);
    match (rows, piece.runs.as_slice()) {
        (1, [run]) => Some(x.part(run.start * inner, piece.of(&x.shape))),
        _ => None,
    }
}

impl Machine<'_> {
    /// This rank's shard of a tensor that it holds whole on the axes where `to` shards it.
    pub(super) fn shard(&self, x: &Tensor, from: &TensorInfo, to: &TensorInfo) -> Result<Tensor> {
        let cut = self.cut(CutOf::alone(from, to));
        let part = self.cut_out(x, &cut.members[0])?;
        if part.bytes() == x.bytes() || !part.shares_memory_with(x) {
            return Ok(part);
        }
        // Copied, so that the memory of the whole tensor can be freed.
        self.device.cast(&part, part.dtype)
    }

    fn cut_out(&self, x: &Tensor, pieces: &[Piece]) -> Result<Tensor> {
        let mut part = x.clone();
        for piece in pieces {
            part = self.device.piece(&part, piece)?;
        }
        Ok(part)
    }

    /// The same tensor with another placement on one axis.
    pub(super) fn redistribute(
        &self,
        what: &str,
        x: &Tensor,
        info: &TensorInfo,
        (axis, from, to): (Axis, Placement, Placement),
    ) -> Result<Tensor> {
        match (from, to) {
            (Placement::Partial, Placement::Replicate) => {
                let out = self.device.tensor(x.shape.clone(), x.dtype)?;
                let group = self.host.group(axis);
                let (from, to) = (from_ref(x), from_ref(&out));
                let kind = Collective::AllReduce;
                self.links.exchange(kind, group, what, from, to)?;
                Ok(out)
            }
            (Placement::Partial, to) => self.reduce_scatter(what, x, info, (axis, to)),
            (from, Placement::Replicate) => self.all_gather(what, x, info, (axis, from)),
            (from, to) => self.all_to_all(what, x, info, (axis, from, to)),
        }
    }

    fn reduce_scatter(
        &self,
        what: &str,
        x: &Tensor,
        info: &TensorInfo,
        (axis, to): (Axis, Placement),
    ) -> Result<Tensor> {
        let cut = self.cut(CutOf::among(info, axis, to));
        let group = self.host.group(axis);
        let parts = cut.members.iter().map(|pieces| self.cut_out(x, pieces));
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let own = parts[group.index].shape.clone();
        let own = self.device.tensor(own, x.dtype)?;
        let kind = Collective::ReduceScatter;
        self.links
            .exchange(kind, group, what, &parts, from_ref(&own))?;
        Ok(own)
    }

    /// Gathers the whole of a tensor that is sharded on an axis, in global order.
    pub(super) fn all_gather(
        &self,
        what: &str,
        x: &Tensor,
        info: &TensorInfo,
        (axis, from): (Axis, Placement),
    ) -> Result<Tensor> {
        let cut = self.cut(CutOf::among(info, axis, from));
        let whole = info.placements.with(axis, Placement::Replicate);
        let whole = self.empty(info, &whole, x.dtype)?;
        let group = self.host.group(axis);
        self.assembled(&cut.members, &whole, |parts| {
            let kind = Collective::AllGather;
            self.links.exchange(kind, group, what, from_ref(x), parts)
        })?;
        Ok(whole)
    }

    /// All-to-all from shards along one dim to shards along another.
    fn all_to_all(
        &self,
        what: &str,
        x: &Tensor,
        info: &TensorInfo,
        (axis, from, to): (Axis, Placement, Placement),
    ) -> Result<Tensor> {
        let group = self.host.group(axis);
        let there = self.cut(CutOf::among(info, axis, to));
        let send = there.members.iter().map(|pieces| self.cut_out(x, pieces));
        let send = send.collect::<Result<Vec<_>, _>>()?;
        let after = info.placements.with(axis, to);
        let out = self.empty(info, &after, x.dtype)?;
        let here = self.cut(CutOf::among(info, axis, from));
        self.assembled(&here.members, &out, |parts| {
            let kind = Collective::AllToAll;
            self.links.exchange(kind, group, what, &send, parts)
        })?;
        Ok(out)
    }

    /// An unwritten tensor of this rank's local shape under some placements.
    fn empty(&self, info: &TensorInfo, placements: &Placements, dtype: DType) -> Result<Tensor> {
        let held = self.host.position.all_indices(&info.global, placements);
        let shape = held.iter().map(Vec::len).collect();
        self.device.tensor(shape, dtype)
    }

    /// Lets `fill` write the ranks' parts of a tensor, in place where they are contiguous, else to buffers that are
    /// copied.
    fn assembled(
        &self,
        members: &[Vec<Piece>],
        whole: &Tensor,
        fill: impl FnOnce(&[Tensor]) -> Result<()>,
    ) -> Result<()> {
        let part = |pieces: &Vec<Piece>| match pieces.as_slice() {
            [] => Ok(whole.clone()),
            [piece] => match in_place(whole, piece) {
                Some(part) => Ok(part),
                None => self.device.tensor(piece.of(&whole.shape), whole.dtype),
            },
            _ => {
                let reason = "shards along several dims";
                Err(CudaError::unsupported(
                    "an exchange",
                    "the cuda device",
                    reason,
                ))
            }
        };
        let parts = members
            .iter()
            .map(part)
            .collect::<Result<Vec<_>, CudaError>>()?;
        fill(&parts)?;
        for (pieces, part) in members.iter().zip(&parts) {
            for piece in pieces {
                self.device.put_piece(whole, piece, part)?;
            }
        }
        Ok(())
    }
}
