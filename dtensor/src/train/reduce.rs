//! Reduction of gradients over data parallelism.
//!
//! Fast mode reduces them in buckets (Li et al. 2020, PyTorch Distributed): runs of whole slots, sent as soon as
//! backward has passed every block that adds to them, so that communication overlaps with backward of the earlier
//! blocks. Exact mode merges trees after backward.

use std::ops::Range;

use catalog::Zero;

use super::buckets::{Bucket, Moving};
use super::device::Device;
use super::partition::{Partition, overlap, owned};
use super::slot::Slot;
use super::states::States;

/// What gradient messages are called in errors.
const WHAT: &str = "gradients";

/// A bucket, and the sum of this rank's part of it.
type Summed<D> = (Bucket, <D as Device>::Flat);

impl<D: Device> States<D> {
    /// Starts to reduce the buckets that are complete once backward has left `block`.
    ///
    /// # Errors
    /// When communication stops.
    pub fn send_gradients(&mut self, device: &D, block: usize) -> Result<(), D::Error> {
        if self.plan.exact {
            return Ok(());
        }
        for at in 0..self.buckets.len() {
            // The first block's buckets have no backward left to overlap with.
            if self.buckets[at].block == block && block > 0 {
                self.send_bucket(device, at)?;
            }
        }
        Ok(())
    }

    /// Completes the reduction of gradients. Under ZeRO-2 and 3 it runs after every micro-batch, otherwise after the
    /// last one; exact mode always waits for the last.
    ///
    /// # Errors
    /// When communication stops.
    pub fn reduce(&mut self, device: &D, last: bool) -> Result<(), D::Error> {
        if self.plan.exact {
            return if last {
                self.reduce_trees(device)
            } else {
                Ok(())
            };
        }
        for at in 0..self.buckets.len() {
            if !self.moving.iter().any(|m| m.bucket == self.buckets[at]) {
                self.send_bucket(device, at)?;
            }
        }
        let mut summed = Vec::with_capacity(self.moving.len());
        for Moving { bucket, terms } in std::mem::take(&mut self.moving) {
            let Some(terms) = terms else { continue };
            let group = self.partitions[bucket.partition].reducing(self.plan.zero);
            let sum = device.reduced(group, WHAT, terms)?;
            summed.push((bucket, sum));
        }
        if self.plan.zero == Zero::Z0 {
            self.gather_sums(device, summed)
        } else {
            self.keep_own(device, &summed)
        }
    }

    /// Starts the reduce-scatter of a bucket.
    fn send_bucket(&mut self, device: &D, at: usize) -> Result<(), D::Error> {
        let bucket = self.buckets[at].clone();
        if self.plan.zero >= Zero::Z2 {
            self.begin_running(device)?;
        }
        self.sum_over_tp(device, &bucket)?;
        let partition = &self.partitions[bucket.partition];
        let mut terms = None;
        let running = self.running[bucket.partition].as_ref();
        if D::size(&partition.sharing.all) > 1 || running.is_some() {
            let gradient = running.unwrap_or(&partition.gradient);
            let group = partition.reducing(self.plan.zero);
            let parts = (0..D::size(group))
                .map(|rank| {
                    let part = partition.part(&bucket.range, rank, self.plan.zero);
                    device.parcel_of(gradient, part)
                })
                .collect::<Result<_, D::Error>>()?;
            terms = Some(device.reduce_scatter(group, WHAT, parts)?);
        }
        self.moving.push(Moving { bucket, terms });
        Ok(())
    }

    /// All-reduces over tensor parallelism the gradients that each rank has from its own tokens.
    fn sum_over_tp(&mut self, device: &D, bucket: &Bucket) -> Result<(), D::Error> {
        let partition = &mut self.partitions[bucket.partition];
        let running = self.running[bucket.partition].as_mut();
        let gradient = running.unwrap_or(&mut partition.gradient);
        let of_own_tokens = |s: &&Slot| s.kind == partition.kind && s.partial_over_tp;
        let slots = self.slots.iter().filter(of_own_tokens);
        let runs: Vec<_> = slots.filter_map(|s| overlap(&bucket.range, s)).collect();
        if runs.is_empty() {
            return Ok(());
        }
        device.all_reduce(&partition.sharing.tp, WHAT, gradient, &runs)
    }

    /// ZeRO-0: all-gathers the sums, so that every rank has all.
    fn gather_sums(&mut self, device: &D, summed: Vec<Summed<D>>) -> Result<(), D::Error> {
        let mut arriving = Vec::with_capacity(summed.len());
        for (bucket, sum) in summed {
            let partition = &self.partitions[bucket.partition];
            let group = partition.reducing(self.plan.zero);
            let part = |rank| partition.part(&bucket.range, rank, self.plan.zero).len();
            let lengths: Vec<usize> = (0..D::size(group)).map(part).collect();
            let own = device.parcel_of(&sum, 0..D::len(&sum))?;
            arriving.push((
                bucket.clone(),
                device.all_gather(group, WHAT, own, &lengths)?,
            ));
        }
        for (bucket, moving) in arriving {
            let whole = device.gathered(moving)?;
            let gradient = &mut self.partitions[bucket.partition].gradient;
            device.put_whole(gradient, bucket.range.start, &whole)?;
        }
        Ok(())
    }

    /// ZeRO-1 to 3: each rank keeps the sums of its own shard, summed over replicas.
    fn keep_own(&mut self, device: &D, summed: &[Summed<D>]) -> Result<(), D::Error> {
        for (p, partition) in self.partitions.iter_mut().enumerate() {
            let here = || summed.iter().filter(|(bucket, _)| bucket.partition == p);
            if here().next().is_none() {
                continue;
            }
            let len = partition.own.len();
            let mut sums = device.zeros(len)?;
            for (bucket, sum) in here() {
                let rank = D::index(&partition.sharing.shard);
                let part = partition.part(&bucket.range, rank, self.plan.zero);
                if !part.is_empty() {
                    device.put(&mut sums, part.start - partition.own.start, sum)?;
                }
            }
            let replicate = &partition.sharing.replicate;
            let whole = 0..len;
            device.all_reduce(replicate, WHAT, &mut sums, std::slice::from_ref(&whole))?;
            if self.plan.zero >= Zero::Z2 {
                device.add(&mut partition.gradient, 0, (&sums, 0..len))?;
                self.running[p] = None;
            } else {
                device.put(&mut partition.gradient, partition.own.start, &sums)?;
            }
        }
        Ok(())
    }

    fn reduce_trees(&mut self, device: &D) -> Result<(), D::Error> {
        for (slot, trees) in self.slots.iter().zip(&mut self.trees) {
            let partition = &mut self.partitions[slot.kind as usize];
            let sharing = &partition.sharing;
            let group = if slot.partial_over_tp {
                &sharing.all_with_tp
            } else {
                &sharing.all
            };
            // Ranks that own nothing of this slot still have terms of it.
            let own = overlap(&partition.own, slot).unwrap_or(slot.offset..slot.offset);
            let at = match own.is_empty() {
                true => 0,
                false => partition.in_gradient(&own).start,
            };
            let own = own.start - slot.offset..own.end - slot.offset;
            let uses = trees.iter_mut().map(std::mem::take).collect();
            device.sum_trees(group, uses, own, (&mut partition.gradient, at))?;
        }
        Ok(())
    }
}

impl<D: Device> Partition<D> {
    /// The group of the reduce-scatter: the ranks that shard states, or under ZeRO-0 the replicas.
    fn reducing(&self, zero: Zero) -> &D::Group {
        match zero {
            Zero::Z0 => &self.sharing.replicate,
            Zero::Z1 | Zero::Z2 | Zero::Z3 => &self.sharing.shard,
        }
    }

    /// The part of a run of elements that a member of the reduce-scatter group sums.
    fn part(&self, run: &Range<usize>, member: usize, zero: Zero) -> Range<usize> {
        let members = D::size(self.reducing(zero));
        let part = match zero {
            Zero::Z0 => {
                let part = owned(run.len(), members, member);
                run.start + part.start..run.start + part.end
            }
            Zero::Z1 | Zero::Z2 | Zero::Z3 => self.owned(member),
        };
        part.start.clamp(run.start, run.end)..part.end.clamp(run.start, run.end)
    }
}
