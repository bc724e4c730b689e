//! Links of one rank alone on its device: a message from a peer is what was sent to that peer.
//!
//! For measuring a rank's work around exchanges, such as packing. Real peers would send messages of
//! the same size.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};

use super::lines::{Collective, Links, Ticket};
use crate::error::CudaError;
use crate::tensor::{Device, Tensor};
use comm::Group;

/// Links whose peers echo what they are sent.
pub struct EchoLinks {
    device: Device,
    carries: Cell<bool>,
    sent: RefCell<HashMap<(usize, u64), VecDeque<Tensor>>>,
}

impl EchoLinks {
    /// Links of a device to itself.
    #[must_use]
    pub fn new(device: Device) -> Self {
        Self {
            device,
            carries: Cell::new(true),
            sent: RefCell::default(),
        }
    }

    /// Sets whether messages carry data. If not, exchanges take no time and write no results.
    pub fn carry(&self, carries: bool) {
        self.carries.set(carries);
    }

    /// Copies a message to its result; if the result is longer, the rest is zeros.
    fn echo(&self, from: &Tensor, to: &Tensor) -> Result<(), CudaError> {
        if !self.carries.get() || from.address() == to.address() {
            return Ok(());
        }
        let launcher = &self.device.launcher;
        if from.bytes() < to.bytes() {
            launcher.fill(to.address(), 0, to.bytes())?;
        }
        let bytes = from.bytes().min(to.bytes());
        launcher.copy(to.address(), from.address(), bytes)
    }
}

impl Links for EchoLinks {
    fn collective(
        &self,
        kind: Collective,
        group: &Group,
        _: &str,
        from: &[Tensor],
        to: &[Tensor],
    ) -> Result<Ticket, CudaError> {
        let own = match kind {
            Collective::ReduceScatter => &from[group.index..=group.index],
            _ => from,
        };
        for (from, to) in own.iter().cycle().zip(to) {
            self.echo(from, to)?;
        }
        Ok(Ticket::done())
    }

    fn wait(&self, _: Ticket) -> Result<(), CudaError> {
        Ok(())
    }

    fn meet(&self, _: &[(usize, u64)]) -> Result<(), CudaError> {
        Ok(())
    }

    fn send(&self, to: usize, channel: u64, _: &str, x: &Tensor) -> Result<Ticket, CudaError> {
        let mut sent = self.sent.borrow_mut();
        sent.entry((to, channel)).or_default().push_back(x.clone());
        Ok(Ticket::done())
    }

    fn receive(&self, from: usize, channel: u64, what: &str, x: &Tensor) -> Result<(), CudaError> {
        let mut sent = self.sent.borrow_mut();
        let echo = sent.get_mut(&(from, channel)).and_then(VecDeque::pop_front);
        match echo {
            Some(echo) => self.echo(&echo, x),
            None => {
                let reason = "a message that was not sent first";
                Err(CudaError::unsupported("receiving", what, reason))
            }
        }
    }

    fn settle(&self, _: &str) -> Result<(), CudaError> {
        self.device.launcher.synchronize()
    }

    fn captures(&self) -> Result<(), &'static str> {
        Ok(())
    }
}
