//! Memory of a device: pieces given out, taken back and given out again, and counted.
//!
//! All work of a device is in one queue, so a piece may be given out again as soon as its last reader
//! has been queued. Pieces keep their addresses, which a captured graph relies on.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use super::error::CudaError;
use super::launcher::{Address, Launcher};

/// Sizes are rounded up to multiples of this.
const GRAIN: u64 = 512;

/// The memory of a device.
pub struct Memory {
    launcher: Rc<dyn Launcher>,
    state: RefCell<State>,
    /// Whether pieces are filled with NaNs when they are given out.
    poisons: Cell<bool>,
}

#[derive(Debug, Default)]
struct State {
    /// Free pieces by size.
    free: BTreeMap<u64, Vec<Address>>,
    usage: Usage,
}

/// Bytes of a device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// In use by tensors, as they asked.
    pub live: u64,
    /// The most that were in use at a time.
    pub peak: u64,
    /// Taken from the device, rounding and free pieces included.
    pub reserved: u64,
}

/// A piece of memory; dropping it gives it back.
pub struct Buffer {
    memory: Rc<Memory>,
    /// Where it begins.
    pub address: Address,
    /// Its size.
    pub bytes: u64,
}

impl Memory {
    /// The memory of a device of which nothing is in use.
    #[must_use]
    pub fn new(launcher: Rc<dyn Launcher>) -> Rc<Self> {
        Rc::new(Self {
            launcher,
            state: RefCell::default(),
            poisons: Cell::new(cfg!(debug_assertions)),
        })
    }

    /// Fills all memory that `work` asks for with NaNs first, in release builds too: whoever reads what nobody
    /// wrote, or leaves something unwritten, gets numbers that are not numbers.
    pub fn poisoned<T>(&self, work: impl FnOnce() -> T) -> T {
        let before = self.poisons.replace(true);
        let done = work();
        self.poisons.set(before);
        done
    }

    /// A piece of that many bytes.
    ///
    /// # Errors
    /// When the device's memory is full.
    pub fn allocate(self: &Rc<Self>, bytes: u64) -> Result<Buffer, CudaError> {
        let size = rounded(bytes);
        let again = self.take(size);
        let address = match again {
            Some(address) => address,
            None => {
                let address = self.more(size)?;
                self.state.borrow_mut().usage.reserved += size;
                address
            }
        };
        if self.poisons.get() {
            self.launcher.fill(address, 0xFF, size)?;
        }
        let usage = &mut self.state.borrow_mut().usage;
        usage.live += bytes;
        usage.peak = usage.peak.max(usage.live);
        Ok(Buffer {
            memory: Rc::clone(self),
            address,
            bytes,
        })
    }

    fn take(&self, size: u64) -> Option<Address> {
        self.state.borrow_mut().free.get_mut(&size)?.pop()
    }

    /// Memory from the device; when it is full, after free pieces of other sizes went back to it.
    fn more(&self, size: u64) -> Result<Address, CudaError> {
        match self.launcher.allocate(size) {
            Err(CudaError::OutOfMemory { free, .. }) => {
                self.trim()?;
                self.launcher
                    .allocate(size)
                    .map_err(|_| CudaError::OutOfMemory {
                        asked: size,
                        live: self.usage().live,
                        free,
                    })
            }
            other => other,
        }
    }

    /// Gives free pieces back to the device.
    ///
    /// # Errors
    /// When the device fails.
    pub fn trim(&self) -> Result<(), CudaError> {
        let free = std::mem::take(&mut self.state.borrow_mut().free);
        for (size, pieces) in free {
            for address in pieces {
                self.launcher.free(address)?;
                self.state.borrow_mut().usage.reserved -= size;
            }
        }
        Ok(())
    }

    /// What is in use.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.state.borrow().usage
    }

    /// Counts the peak anew from what is in use now.
    pub fn reset_peak(&self) {
        let usage = &mut self.state.borrow_mut().usage;
        usage.peak = usage.live;
    }
}

fn rounded(bytes: u64) -> u64 {
    bytes.max(1).div_ceil(GRAIN) * GRAIN
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let state = &mut *self.memory.state.borrow_mut();
        state.usage.live -= self.bytes;
        let free = state.free.entry(rounded(self.bytes)).or_default();
        free.push(self.address);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // The device may be gone: what it says no longer matters.
        let _ = self.trim();
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes at {:#x}", self.bytes, self.address)
    }
}
