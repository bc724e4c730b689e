//! Collectives among ranks, built on point-to-point messages.

use std::sync::Arc;

use super::communicator::{CommError, Communicator, Message};

/// The ranks that communicate along one mesh axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Global ranks in the order of the axis.
    pub ranks: Vec<usize>,
    /// This rank's index among them.
    pub index: usize,
    /// Channel that separates this group's messages from those of groups with common members.
    pub channel: u64,
}

/// A collective under way: one message to this rank from each member.
#[must_use = "a collective ends when its handle is waited for"]
#[derive(Debug)]
pub struct Pending {
    group: Group,
    own: Message,
    what: String,
}

impl Group {
    /// The group of one rank only.
    #[must_use]
    pub fn single(rank: usize) -> Self {
        Self {
            ranks: vec![rank],
            index: 0,
            channel: 0,
        }
    }

    /// The same ranks on a separate channel.
    #[must_use]
    pub fn on(&self, channel: u64) -> Self {
        Self {
            channel,
            ..self.clone()
        }
    }

    /// Number of ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// Starts to send `data` to every member.
    ///
    /// # Errors
    /// When the job has failed.
    pub fn all_gather(
        &self,
        comm: &dyn Communicator,
        what: &str,
        data: Message,
    ) -> Result<Pending, CommError> {
        self.all_to_all(comm, what, vec![data; self.size()])
    }

    /// Starts to send the `i`-th part to the `i`-th member.
    ///
    /// # Errors
    /// When the job has failed.
    pub fn all_to_all(
        &self,
        comm: &dyn Communicator,
        what: &str,
        mut parts: Vec<Message>,
    ) -> Result<Pending, CommError> {
        for (index, &to) in self.ranks.iter().enumerate() {
            if index != self.index {
                comm.send(to, self.channel, what, Arc::clone(&parts[index]))?;
            }
        }
        Ok(Pending {
            group: self.clone(),
            own: parts.swap_remove(self.index),
            what: what.to_owned(),
        })
    }

    /// Reduce-scatter: each member gets its chunk of the sum, added in member order.
    ///
    /// # Errors
    /// When a peer fails, or sends a message of the wrong size.
    pub fn reduce_scatter(
        &self,
        comm: &dyn Communicator,
        what: &str,
        data: &[f32],
    ) -> Result<Vec<f32>, CommError> {
        let chunk = data.len().div_ceil(self.size());
        let parts = (0..self.size())
            .map(|i| {
                let start = (i * chunk).min(data.len());
                pack(&data[start..(start + chunk).min(data.len())])
            })
            .collect();
        let parts = self.all_to_all(comm, what, parts)?.wait(comm)?;
        self.sum(comm, what, &parts)
    }

    /// Sums the members' parts in member order.
    ///
    /// # Errors
    /// When their lengths differ: members run different programs.
    pub fn sum(
        &self,
        comm: &dyn Communicator,
        what: &str,
        parts: &[Message],
    ) -> Result<Vec<f32>, CommError> {
        let mut total = unpack(&parts[0]);
        for (index, part) in parts.iter().enumerate().skip(1) {
            let ends = [comm.rank(), self.ranks[index]];
            CommError::check_size(ends, what, part.len(), total.len() * 4)?;
            for (sum, bytes) in total.iter_mut().zip(part.chunks_exact(4)) {
                *sum += f32::from_le_bytes(bytes.try_into().expect("chunks of four"));
            }
        }
        Ok(total)
    }

    /// All-reduce: every member gets the sum, added in member order.
    ///
    /// # Errors
    /// When a peer fails, or sends a message of the wrong size.
    pub fn all_reduce(
        &self,
        comm: &dyn Communicator,
        what: &str,
        data: &mut [f32],
    ) -> Result<(), CommError> {
        if self.size() == 1 {
            return Ok(());
        }
        let own = self.reduce_scatter(comm, what, data)?;
        let all = self.all_gather(comm, what, pack(&own))?.wait(comm)?;
        let mut at = 0;
        for part in &all {
            let part = unpack(part);
            let Some(to) = data.get_mut(at..at + part.len()) else {
                break;
            };
            to.copy_from_slice(&part);
            at += part.len();
        }
        Ok(())
    }

    /// Broadcast: every member gets the `root`-th member's message.
    ///
    /// # Errors
    /// When a peer fails.
    pub fn broadcast(
        &self,
        comm: &dyn Communicator,
        what: &str,
        root: usize,
        data: Option<Message>,
    ) -> Result<Message, CommError> {
        let Some(data) = data else {
            return comm.receive(self.ranks[root], self.channel, what);
        };
        let sent = self.all_gather(comm, what, data)?;
        Ok(sent.own)
    }

    /// Barrier: returns once every member has called it.
    ///
    /// # Errors
    /// When a peer fails.
    pub fn barrier(&self, comm: &dyn Communicator) -> Result<(), CommError> {
        self.all_gather(comm, "barrier", Message::default())?
            .wait(comm)
            .map(|_| ())
    }
}

impl Pending {
    /// Waits for all messages; returns them in member order.
    ///
    /// # Errors
    /// When a peer fails.
    pub fn wait(self, comm: &dyn Communicator) -> Result<Vec<Message>, CommError> {
        let message = |(index, &from): (usize, &usize)| match index == self.group.index {
            true => Ok(Arc::clone(&self.own)),
            false => comm.receive(from, self.group.channel, &self.what),
        };
        self.group.ranks.iter().enumerate().map(message).collect()
    }
}

/// Converts floats to bytes.
#[must_use]
pub fn pack(data: &[f32]) -> Message {
    Arc::new(bytemuck::cast_slice(data).to_vec())
}

/// Converts bytes to floats.
#[must_use]
pub fn unpack(bytes: &[u8]) -> Vec<f32> {
    bytemuck::pod_collect_to_vec(bytes)
}
