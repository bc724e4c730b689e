//! The inputs of a pass on the device: buffers whose contents change every step and whose addresses do not, so that
//! captured graphs can read them.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::error::Result;
use crate::launcher::Address;
use crate::memory::Buffer;
use crate::ops::RowOrder;
use crate::tensor::Device;
use cpu_device::MicroBatch;

/// A micro-batch with its buffers on the device.
pub struct Batch<'b> {
    /// The micro-batch on the host.
    pub host: MicroBatch<'b>,
    pub(super) words: Rc<Words>,
}

/// Buffers of one micro-batch.
pub(super) struct Words {
    /// Token ids.
    pub ids: Buffer,
    /// Labels: for every token, the one that follows it.
    pub labels: Buffer,
    /// The step's number, which seeds random numbers.
    pub step: Buffer,
    /// Order of the tokens by embedding row, made on first use.
    order: RefCell<Option<Rc<RowOrder>>>,
    /// The step whose data the buffers hold.
    holds: Cell<u32>,
}

impl<'b> Batch<'b> {
    /// Uploads a micro-batch to a device.
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

    /// Address of the step's number.
    pub(super) fn step(&self) -> Address {
        self.words.step.address
    }

    /// The tokens sorted by the table row (of `rows`) that each adds its gradient to; made once per micro-batch.
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
    /// Uploads the data of another step; does nothing if the buffers already hold that step.
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
