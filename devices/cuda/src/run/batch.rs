//! What one pass works on, on the device: the words that change from step to step, each at an address that
//! does not.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::error::Result;
use crate::launcher::Address;
use crate::memory::Buffer;
use crate::ops::RowOrder;
use crate::tensor::Device;
use cpu_device::MicroBatch;

/// A micro-batch.
pub struct Batch<'b> {
    /// As the host knows it.
    pub host: MicroBatch<'b>,
    pub(super) words: Rc<Words>,
}

/// Its words on the device.
pub(super) struct Words {
    /// Tokens.
    pub ids: Buffer,
    /// The tokens that follow them.
    pub labels: Buffer,
    /// The step, which random numbers are of.
    pub step: Buffer,
    /// Rows of the embedding's table that the tokens add to, once they were asked for.
    order: RefCell<Option<Rc<RowOrder>>>,
    /// The step whose words are here.
    holds: Cell<u32>,
}

impl<'b> Batch<'b> {
    /// A micro-batch brought to a device.
    ///
    /// # Errors
    /// When the device's memory is full.
    pub fn new(device: &Device, host: MicroBatch<'b>) -> Result<Self> {
        let words = Words {
            ids: device.indices(host.ids)?,
            labels: device.indices(host.labels)?,
            step: device.indices(&[host.step])?,
            order: RefCell::default(),
            holds: Cell::new(host.step),
        };
        Ok(Self {
            host,
            words: Rc::new(words),
        })
    }

    /// Where the step stands.
    pub(super) fn step(&self) -> Address {
        self.words.step.address
    }

    /// Which of `rows` of a table each token adds to.
    pub(super) fn row_order(
        &self,
        device: &Device,
        rows: std::ops::Range<u64>,
    ) -> Result<Rc<RowOrder>> {
        let known = self.words.order.borrow().clone();
        if let Some(order) = known.filter(|order| *order.rows() == rows) {
            return Ok(order);
        }
        let order = Rc::new(RowOrder::new(device, self.host.ids, rows)?);
        *self.words.order.borrow_mut() = Some(Rc::clone(&order));
        Ok(order)
    }
}

impl Words {
    /// Overwrites them by those of another step; of one step they are the same.
    pub(super) fn update(&self, device: &Device, host: &MicroBatch<'_>) -> Result<()> {
        if self.holds.replace(host.step) == host.step {
            return Ok(());
        }
        let write = |to: &Buffer, words: &[u32]| {
            let launcher = &device.launcher;
            launcher.write(to.address, bytemuck::cast_slice(words))
        };
        write(&self.ids, host.ids)?;
        write(&self.labels, host.labels)?;
        write(&self.step, &[host.step])?;
        match &*self.order.borrow() {
            Some(order) => order.update(device, host.ids),
            None => Ok(()),
        }
    }
}
