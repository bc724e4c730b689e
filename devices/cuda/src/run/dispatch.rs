//! Dispatch of rows to the ranks of their experts, and back.

use std::ops::Range;
use std::rc::Rc;

use super::state::Run;
use crate::error::{CudaError, Result};
use crate::links::Collective;
use crate::ops::{Level, Route};
use crate::tensor::{Device, Tensor};
use catalog::Axis;
use comm::{Group, Message};
use cpu_device::CpuError;
use dtensor::Op;
use dtensor::plan::RoutedRows;

impl Run<'_> {
    /// Number of exchanges before the exchange of an axis.
    fn exchanges_before(&self, axis: Axis) -> usize {
        usize::from(axis == Axis::Etp && self.machine.host.position.mesh.ep > 1)
    }

    /// Sends rows to the ranks of their experts, or back to the ranks of their tokens: by all-to-all over expert
    /// parallelism; over expert tensor parallelism all ranks gather all rows, and reduce-scatter them on the way back.
    pub(super) fn dispatch<O>(&mut self, op: &Op<O>, axis: Axis, back: bool) -> Result<()> {
        let gathers = axis == Axis::Etp;
        let level = self.level(&op.scope, axis)?;
        let group = self.machine.host.group(axis);
        let (device, links) = (self.device(), &self.machine.links);
        let x = self.tensor(op.inputs[0])?;
        let columns = x.columns();
        let out = if back {
            let there = device.rows_of(x, (&level.inverse, 1))?;
            let from = parts(&there, &level.received);
            let (kind, rows) = match gathers {
                true => (Collective::ReduceScatter, level.received[group.index].len()),
                false => (Collective::AllToAll, level.sent.last().map_or(0, |r| r.end)),
            };
            let out = device.tensor(vec![rows, columns], x.dtype)?;
            let to = match gathers {
                true => vec![out.clone()],
                false => parts(&out, &level.sent),
            };
            links.exchange(kind, group, &op.scope, &from, &to)?;
            out
        } else {
            let here = device.tensor(vec![level.rows(), columns], x.dtype)?;
            let to = parts(&here, &level.received);
            let (kind, from) = match gathers {
                true => (Collective::AllGather, vec![x.clone()]),
                false => (Collective::AllToAll, parts(x, &level.sent)),
            };
            links.exchange(kind, group, &op.scope, &from, &to)?;
            device.rows_of(&here, (&level.order, 1))?
        };
        self.set(op.outputs[0], out);
        Ok(())
    }

    /// The exchange of an axis; row counts are exchanged on first use.
    fn level(&self, scope: &str, axis: Axis) -> Result<Rc<Level>> {
        let route = self.routing(scope)?;
        let before = self.exchanges_before(axis);
        if let Some(level) = route.levels.borrow().get(before) {
            return Ok(Rc::clone(level));
        }
        if route.levels.borrow().len() < before {
            return Err(CudaError::unsupported(
                "expert gather",
                scope,
                "rows that have not reached their rank",
            ));
        }
        let counts = match route.last() {
            Some(level) => level.counts.clone(),
            None => self.counts(scope, &route)?,
        };
        let everyone = self.everyones(scope, self.machine.host.group(axis), &counts)?;
        let level = Rc::new(self.exchanged(axis, &counts, &everyone)?);
        route.levels.borrow_mut().push(Rc::clone(&level));
        Ok(level)
    }

    /// Number of rows of every expert before any exchange.
    fn counts(&self, what: &str, route: &Route) -> Result<Vec<u32>> {
        let mut offsets = vec![0u32; route.experts + 1];
        self.machine.links.settle(what)?;
        let bytes = bytemuck::cast_slice_mut(&mut offsets);
        self.device().launcher.read(route.offsets.address, bytes)?;
        Ok(offsets.windows(2).map(|pair| pair[1] - pair[0]).collect())
    }

    /// Gathers the row counts by expert of every rank of the group.
    fn everyones(&self, what: &str, group: &Group, counts: &[u32]) -> Result<Vec<Vec<u32>>> {
        let comm = self.machine.host.comm;
        let own: Message = std::sync::Arc::new(bytemuck::cast_slice(counts).to_vec());
        let pending = group.all_gather(comm, what, own).map_err(CpuError::from)?;
        let arrived = pending.wait(comm).map_err(CpuError::from)?;
        let counts = arrived
            .iter()
            .map(|part| bytemuck::pod_collect_to_vec(part));
        Ok(counts.collect())
    }

    /// Range of experts on a rank of the expert-parallel group.
    fn experts_of(&self, experts: usize, rank: usize) -> Range<usize> {
        let ranks = self.machine.host.position.mesh.ep as usize;
        let per_rank = experts.div_ceil(ranks);
        let first = (rank * per_rank).min(experts);
        first..(first + per_rank).min(experts)
    }

    fn exchanged(&self, axis: Axis, counts: &[u32], everyone: &[Vec<u32>]) -> Result<Level> {
        let sum = |counts: &[u32]| counts.iter().sum::<u32>() as usize;
        let here = self.experts_of(
            counts.len(),
            self.machine.host.position.index(Axis::Ep) as usize,
        );
        let sent: Vec<usize> = (0..everyone.len())
            .map(|member| match axis {
                Axis::Etp => sum(counts),
                _ => sum(&counts[self.experts_of(counts.len(), member)]),
            })
            .collect();
        let received: Vec<usize> = everyone.iter().map(|c| sum(&c[here.clone()])).collect();
        let lists = Lists::new(everyone, &here);
        let device: &Device = self.device();
        Ok(Level {
            sent: ranges(&sent),
            received: ranges(&received),
            counts: lists.counts,
            order: device.indices(&lists.order)?,
            inverse: device.indices(&lists.inverse)?,
            offsets: device.indices(&lists.offsets)?,
        })
    }

    /// Numbers of rows that reached this rank's experts.
    pub(super) fn routed_rows(&self) -> Option<RoutedRows> {
        let route = self.held.route.as_ref()?;
        let rows = |exchanges| route.rows_after(exchanges) as u64;
        let dispatches = usize::from(self.machine.host.position.mesh.ep > 1);
        Some(RoutedRows {
            dispatched: rows(dispatches),
            gathered: rows(route.levels.borrow().len()),
        })
    }
}

/// Slices a tensor by ranges of rows.
fn parts(x: &Tensor, rows: &[Range<usize>]) -> Vec<Tensor> {
    let columns = x.columns();
    rows.iter()
        .map(|rows| x.part(rows.start * columns, vec![rows.len(), columns]))
        .collect()
}

/// Consecutive ranges of these lengths.
fn ranges(lengths: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    let range = |&len: &usize| {
        end += len;
        end - len..end
    };
    lengths.iter().map(range).collect()
}

/// Order of rows received from several ranks: by expert, then by rank.
struct Lists {
    counts: Vec<u32>,
    order: Vec<u32>,
    inverse: Vec<u32>,
    offsets: Vec<u32>,
}

impl Lists {
    /// From the row counts by expert that every rank sent, for the experts `here`.
    fn new(everyone: &[Vec<u32>], here: &Range<usize>) -> Self {
        let mut place = 0;
        // Offset of every rank's rows of every expert among the received rows.
        let starts: Vec<Vec<u32>> = everyone
            .iter()
            .map(|counts| {
                let of = counts[here.clone()].iter();
                of.map(|count| {
                    place += count;
                    place - count
                })
                .collect()
            })
            .collect();
        let mut lists = Self {
            counts: vec![0; everyone[0].len()],
            order: Vec::with_capacity(place as usize),
            inverse: vec![0; place as usize],
            offsets: vec![0],
        };
        for (at, expert) in here.clone().enumerate() {
            for (counts, starts) in everyone.iter().zip(&starts) {
                let count = counts[expert];
                for place in starts[at]..starts[at] + count {
                    lists.inverse[place as usize] = lists.order.len() as u32;
                    lists.order.push(place);
                }
                lists.counts[expert] += count;
            }
            lists.offsets.push(lists.order.len() as u32);
        }
        lists
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_lie_by_expert_then_by_rank() {
        // Two ranks' rows of four experts, of which the last two are here.
        let lists = Lists::new(&[vec![5, 0, 2, 1], vec![1, 1, 1, 2]], &(2..4));
        assert_eq!(lists.counts, [0, 0, 3, 3]);
        // The first rank sent expert 2 twice and 3 once, the second 2 once and 3 twice.
        assert_eq!(lists.order, [0, 1, 3, 2, 4, 5]);
        assert_eq!(lists.inverse, [0, 1, 3, 2, 4, 5]);
        assert_eq!(lists.offsets, [0, 3, 6]);
        let none = Lists::new(&[vec![3, 0], vec![2, 0]], &(1..2));
        assert!(none.order.is_empty());
        assert_eq!(none.offsets, [0, 0]);
    }
}
