//! Redistributions: every rank knows which global elements it and its peers hold before and after,
//! and moves what differs.

use std::borrow::Borrow;
use std::sync::Arc;

use catalog::{Axis, DType};

use super::machine::{CpuError, Machine};
use super::math::add;
use super::tensor::Tensor;
use super::tree::{TreeSum, word};
use super::value::{Terms, Value};
use comm::Message;
use dtensor::TensorInfo;
use dtensor::placement::{Placement, Placements};

/// Elements of `src` at the Cartesian product of `indices` (one list per dim).
pub(crate) fn take(src: &[f32], shape: &[usize], indices: &[Vec<usize>]) -> Vec<f32> {
    let mut out = Vec::with_capacity(indices.iter().map(Vec::len).product());
    visit(shape, indices, &mut |at, run| {
        out.extend_from_slice(&src[at..at + run])
    });
    out
}

/// Writes the numbers of `src`, in order, to the elements of `out` whose index along each dimension is in that dimension's list
/// of `indices`.
pub(crate) fn put(out: &mut [f32], shape: &[usize], indices: &[Vec<usize>], src: &[f32]) {
    let mut from = 0;
    visit(shape, indices, &mut |at, run| {
        out[at..at + run].copy_from_slice(&src[from..from + run]);
        from += run;
    });
}

/// Calls `run(offset, length)` for every run of consecutive elements in the product of `indices`.
fn visit(shape: &[usize], indices: &[Vec<usize>], run: &mut impl FnMut(usize, usize)) {
    fn go(
        base: usize,
        shape: &[usize],
        indices: &[Vec<usize>],
        runs: &[(usize, usize)],
        run: &mut impl FnMut(usize, usize),
    ) {
        if indices.len() == 1 {
            for &(start, length) in runs {
                run(base + start, length);
            }
            return;
        }
        let stride: usize = shape[1..].iter().product();
        for &i in &indices[0] {
            go(base + i * stride, &shape[1..], &indices[1..], runs, run);
        }
    }
    let Some(last) = indices.last() else { return };
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &i in last {
        match runs.last_mut() {
            Some((start, length)) if *start + *length == i => *length += 1,
            _ => runs.push((i, 1)),
        }
    }
    go(0, shape, indices, &runs, run);
}

/// Positions in `whole` of the elements of `part` (both are lists of global indices of one dim).
#[must_use]
pub fn places(whole: &[u64], part: &[u64]) -> Vec<usize> {
    let size = whole.iter().max().map_or(0, |&m| m as usize + 1);
    let mut at = vec![None; size];
    for (place, &index) in whole.iter().enumerate() {
        at[index as usize] = Some(place);
    }
    let found = |&index: &u64| at[index as usize].expect("a part lies within its whole");
    part.iter().map(found).collect()
}

/// [`places`] for every dim.
fn all_places(whole: &[Vec<u64>], part: &[Vec<u64>]) -> Vec<Vec<usize>> {
    whole.iter().zip(part).map(|(w, p)| places(w, p)).collect()
}

fn lengths<T>(indices: &[Vec<T>]) -> Vec<usize> {
    indices.iter().map(Vec::len).collect()
}

impl Machine<'_> {
    /// The same tensor with another placement on one axis.
    pub(crate) fn redistribute(
        &self,
        what: &str,
        value: &Value,
        info: &TensorInfo,
        (axis, from, to): (Axis, Placement, Placement),
    ) -> Result<Value, CpuError> {
        let before = info.placements.with(axis, from);
        let after = info.placements.with(axis, to);
        match (value, from) {
            (Value::Terms(terms), _) => self.reduce_terms(what, terms, info, axis, to),
            (Value::Tensor(x), Placement::Partial) => self.reduce_plain(what, x, info, axis, to),
            (Value::Tensor(x), _) => self.exchange(what, x, &info.global, axis, [before, after]),
            _ => Err(CpuError::Unsupported {
                operator: "redistribution".to_owned(),
                scope: what.to_owned(),
                reason: "tensors of this kind".to_owned(),
            }),
        }
    }

    /// Moves a tensor to another sharding: by all-gather if that is whole, else by all-to-all.
    fn exchange(
        &self,
        what: &str,
        x: &Tensor,
        global: &[u64],
        axis: Axis,
        [before, after]: [Placements; 2],
    ) -> Result<Value, CpuError> {
        let group = self.group(axis);
        let at = |peer: usize, placements: &Placements| {
            self.position
                .with(axis, peer as u64)
                .all_indices(global, placements)
        };
        let common = |a: &[Vec<u64>], b: &[Vec<u64>]| -> Vec<Vec<u64>> {
            a.iter().zip(b).map(|(a, b)| intersection(a, b)).collect()
        };
        let mine = at(group.index, &before);
        let values = x.f32();
        let whole_here = after.on(axis) == Placement::Replicate;
        let pending = if whole_here {
            group.all_gather(self.comm, what, x.pack())?
        } else {
            let parts = (0..group.size())
                .map(|peer| {
                    let part = common(&mine, &at(peer, &after));
                    let data = take(&values, &x.shape, &all_places(&mine, &part));
                    Tensor::message(data, x.dtype())
                })
                .collect();
            group.all_to_all(self.comm, what, parts)?
        };
        let arrived = pending.wait(self.comm)?;
        let target = at(group.index, &after);
        let shape = lengths(&target);
        let mut out = vec![0.0; shape.iter().product()];
        for (peer, bytes) in arrived.iter().enumerate() {
            let part = common(&at(peer, &before), &target);
            let data = Tensor::numbers(bytes, x.dtype());
            put(&mut out, &shape, &all_places(&target, &part), &data);
        }
        Ok(Value::Tensor(Tensor::new(shape, out, x.dtype())))
    }

    /// Reduces plain partial sums, added in rank order.
    fn reduce_plain(
        &self,
        what: &str,
        x: &Tensor,
        info: &TensorInfo,
        axis: Axis,
        to: Placement,
    ) -> Result<Value, CpuError> {
        let group = self.group(axis);
        if to == Placement::Replicate {
            let mut data = x.f32().into_owned();
            group.all_reduce(self.comm, what, &mut data)?;
            let sum = Tensor::new(x.shape.clone(), data, x.dtype());
            return Ok(Value::Tensor(sum));
        }
        let slices = self.slices(info, axis, to);
        let values = x.f32();
        let parts = slices
            .iter()
            .map(|part| Tensor::message(take(&values, &x.shape, part), x.dtype()))
            .collect();
        let arrived = group.all_to_all(self.comm, what, parts)?.wait(self.comm)?;
        let mut sum = Tensor::numbers(&arrived[0], x.dtype());
        for bytes in &arrived[1..] {
            add(&mut sum, &Tensor::numbers(bytes, x.dtype()));
        }
        let shape = lengths(&slices[group.index]);
        Ok(Value::Tensor(Tensor::new(shape, sum, x.dtype())))
    }

    /// Reduces tree nodes of exact mode, which merge wherever siblings meet.
    fn reduce_terms(
        &self,
        what: &str,
        terms: &Terms,
        info: &TensorInfo,
        axis: Axis,
        to: Placement,
    ) -> Result<Value, CpuError> {
        let group = self.group(axis);
        let (shape, arrived) = if to == Placement::Replicate {
            let message = write_terms(terms.terms.iter());
            let arrived = group
                .all_gather(self.comm, what, message)?
                .wait(self.comm)?;
            (terms.shape.clone(), arrived)
        } else {
            let slices = self.slices(info, axis, to);
            let parts = slices
                .iter()
                .map(|part| write_terms(terms.map(|node| take(&node, &terms.shape, part))))
                .collect();
            let arrived = group.all_to_all(self.comm, what, parts)?.wait(self.comm)?;
            (lengths(&slices[group.index]), arrived)
        };
        Ok(Value::Tensor(
            read_terms(&arrived, shape, terms.dtype).reduce(),
        ))
    }

    /// For every peer of an axis, the local indices of its shard of a tensor that this rank holds whole on that axis.
    fn slices(&self, info: &TensorInfo, axis: Axis, to: Placement) -> Vec<Vec<Vec<usize>>> {
        let here = info.placements.with(axis, Placement::Replicate);
        let mine = self.position.all_indices(&info.global, &here);
        let after = info.placements.with(axis, to);
        (0..self.group(axis).size())
            .map(|peer| {
                let position = self.position.with(axis, peer as u64);
                all_places(&mine, &position.all_indices(&info.global, &after))
            })
            .collect()
    }

    /// This rank's shard of a tensor it holds whole on the axes where `info` shards it.
    pub(crate) fn shard(&self, x: &Tensor, from: &TensorInfo, info: &TensorInfo) -> Tensor {
        let mine = self.position.all_indices(&from.global, &from.placements);
        let after = self.position.all_indices(&info.global, &info.placements);
        let data = take(&x.f32(), &x.shape, &all_places(&mine, &after));
        Tensor::new(lengths(&after), data, x.dtype())
    }

    /// Gathers keys or values of the whole sequence, in global order, round the context-parallel ring: `cp − 1` times
    /// every rank passes on what it received last.
    pub(crate) fn ring(
        &self,
        what: &str,
        x: &Tensor,
        info: &TensorInfo,
    ) -> Result<Tensor, CpuError> {
        let group = self.group(Axis::Cp);
        let size = group.size();
        let next = group.ranks[(group.index + 1) % size];
        let previous = group.ranks[(group.index + size - 1) % size];
        let whole = info.placements.with(Axis::Cp, Placement::Replicate);
        let target = self.position.all_indices(&info.global, &whole);
        let shape = lengths(&target);
        let mut out = vec![0.0; shape.iter().product()];
        let mut block = x.pack();
        for step in 0..size {
            let owner = (group.index + size - step) % size;
            let theirs = self
                .position
                .with(Axis::Cp, owner as u64)
                .all_indices(&info.global, &info.placements);
            let at = all_places(&target, &theirs);
            if step + 1 < size {
                self.comm
                    .send(next, group.channel, what, Arc::clone(&block))?;
            }
            put(&mut out, &shape, &at, &Tensor::numbers(&block, x.dtype()));
            if step + 1 < size {
                block = self.comm.receive(previous, group.channel, what)?;
            }
        }
        Ok(Tensor::new(shape, out, x.dtype()))
    }
}

fn intersection(a: &[u64], b: &[u64]) -> Vec<u64> {
    if a == b {
        return a.to_vec();
    }
    let held: std::collections::HashSet<u64> = a.iter().copied().collect();
    b.iter().copied().filter(|i| held.contains(i)).collect()
}

/// Serialises tree sums into a message.
pub(super) fn write_terms(terms: impl ExactSizeIterator<Item = impl Borrow<TreeSum>>) -> Message {
    let mut bytes = (terms.len() as u64).to_le_bytes().to_vec();
    for term in terms {
        term.borrow().write(&mut bytes);
    }
    Arc::new(bytes)
}

/// Reads the tree sums of all peers and merges them term by term.
pub(super) fn read_terms(arrived: &[Message], shape: Vec<usize>, dtype: DType) -> Terms {
    let mut terms: Vec<TreeSum> = Vec::new();
    for bytes in arrived {
        let mut bytes = bytes.as_slice();
        let count = word(&mut bytes) as usize;
        terms.resize_with(terms.len().max(count), TreeSum::default);
        for term in &mut terms[..count] {
            bytes = term.read(bytes);
        }
    }
    Terms {
        terms,
        shape,
        dtype,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::Numerics;
    use comm::{Group, local};
    use dtensor::layout::BlockPosition;
    use dtensor::placement::BlockMesh;
    use dtensor::{TensorId, TensorRole};

    /// A placement on one axis of a tensor with three dims.
    fn placement() -> impl Strategy<Value = Placement> {
        prop_oneof![
            Just(Placement::Replicate),
            (0usize..3).prop_map(Placement::Shard),
            Just(Placement::Partial),
        ]
    }

    fn info(global: &[u64], placements: Placements) -> TensorInfo {
        TensorInfo {
            name: "x".to_owned(),
            shape: global.to_vec(),
            dtype: DType::F32,
            role: TensorRole::Activation,
            storage: TensorId(0),
            global: global.to_vec(),
            placements,
        }
    }

    /// The values that a rank holds of a tensor whose element `i` is `i`; under `Partial` the ranks' values add up to
    /// it.
    fn held(position: &BlockPosition, global: &[u64], placements: &Placements) -> Tensor {
        let indices = position.all_indices(global, placements);
        let mut data = Vec::new();
        for &a in &indices[0] {
            for &b in &indices[1] {
                for &c in &indices[2] {
                    data.push(((a * global[1] + b) * global[2] + c) as f32);
                }
            }
        }
        if placements.on(Axis::Tp) == Placement::Partial && position.index(Axis::Tp) > 0 {
            data.fill(0.0);
        }
        Tensor::new(lengths(&indices), data, DType::F32)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn every_rank_ends_with_what_the_placement_says(
            shape in prop::array::uniform3(1u64..9),
            size in 2u64..5,
            from in placement(),
            to in placement(),
            numerics in prop_oneof![Just(Numerics::Fast), Just(Numerics::Exact)],
        ) {
            prop_assume!(to != Placement::Partial);
            prop_assume!(!matches!((from, to), (Placement::Replicate, _)));
            let mesh = BlockMesh { tp: size, cp: 1, ep: 1, etp: 1 };
            let before = Placements::REPLICATE.with(Axis::Tp, from);
            let after = Placements::REPLICATE.with(Axis::Tp, to);
            let world = local::world(size as usize, Duration::from_secs(20));
            let results: Vec<bool> = std::thread::scope(|scope| {
                let handles: Vec<_> = world
                    .iter()
                    .enumerate()
                    .map(|(rank, comm)| {
                        scope.spawn(move || {
                            let tp = Group { ranks: (0..size as usize).collect(), index: rank, channel: 1 };
                            let alone = Group::single(rank);
                            let machine = Machine {
                                comm,
                                groups: [tp, alone.clone(), alone.clone(), alone],
                                position: BlockPosition { mesh, at: [rank as u64, 0, 0, 0] },
                                numerics,
                                threads: 1,
                                seed: 0,
                                watch: None,
                            };
                            let x = held(&machine.position, &shape, &before);
                            let value = if from == Placement::Partial && numerics == Numerics::Exact {
                                let mut node = TreeSum::default();
                                node.leaf(rank as u64, x.f32().into_owned());
                                Value::Terms(Terms { terms: vec![node], shape: x.shape.clone(), dtype: DType::F32 })
                            } else {
                                Value::Tensor(x)
                            };
                            let moves = (Axis::Tp, from, to);
                            let got = machine.redistribute("x", &value, &info(&shape, before), moves);
                            let want = held(&machine.position, &shape, &after);
                            matches!(got, Ok(Value::Tensor(got)) if got == want)
                        })
                    })
                    .collect();
                handles.into_iter().map(|h| h.join().unwrap_or(false)).collect()
            });
            prop_assert!(results.into_iter().all(|right| right));
        }
    }
}
