//! Memory of a device: pieces given out, taken back and given out again, and counted.
//!
//! All work of a device is in one queue, so a piece may be given out again as soon as its last reader
//! has been queued. Pieces keep their addresses.
//!
//! Captured work runs again at the addresses it was recorded with, so every piece that it touched is its own
//! from then on: pieces given out while it was recorded, and pieces from before that were given back
//! meanwhile. While recording, the former are given out again as always, since one run of the work is
//! ordered in itself; the latter are not, since the next run reads them first. None is given to anyone else
//! until the captured work is dropped. PyTorch has such private pools for its CUDA graphs.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
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
    recording: Option<Recording>,
    /// Pieces of captured work.
    captured: HashMap<Address, Captured>,
    usage: Usage,
}

/// Work that is being recorded.
#[derive(Debug, Default)]
struct Recording {
    /// Those of its pieces that it may take again, by size.
    free: BTreeMap<u64, Vec<Address>>,
    /// All of its pieces.
    pieces: BTreeSet<Address>,
}

/// A piece of captured work.
#[derive(Clone, Copy, Debug)]
struct Captured {
    size: u64,
    /// Whether a buffer has it.
    in_use: bool,
}

/// The pieces of captured work; dropping it gives them back.
pub struct Reserved {
    memory: Rc<Memory>,
    pieces: BTreeSet<Address>,
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
        let state = &mut *self.state.borrow_mut();
        if let Some(recording) = &mut state.recording {
            let piece = Captured { size, in_use: true };
            state.captured.insert(address, piece);
            recording.pieces.insert(address);
        }
        let usage = &mut state.usage;
        usage.live += bytes;
        usage.peak = usage.peak.max(usage.live);
        Ok(Buffer {
            memory: Rc::clone(self),
            address,
            bytes,
        })
    }

    fn take(&self, size: u64) -> Option<Address> {
        let state = &mut *self.state.borrow_mut();
        let pop = |free: &mut BTreeMap<u64, Vec<Address>>| free.get_mut(&size)?.pop();
        let recording = state.recording.as_mut();
        let again = recording.and_then(|recording| pop(&mut recording.free));
        again.or_else(|| pop(&mut state.free))
    }

    /// Reserves every piece touched from here on for what is recorded.
    pub(super) fn begin_recording(&self) {
        self.state.borrow_mut().recording = Some(Recording::default());
    }

    /// Ends it; returns the pieces, to be kept as long as what was recorded.
    #[must_use]
    pub(super) fn end_recording(self: &Rc<Self>) -> Reserved {
        let recording = self.state.borrow_mut().recording.take();
        Reserved {
            memory: Rc::clone(self),
            pieces: recording.unwrap_or_default().pieces,
        }
    }

    fn is_recording(&self) -> bool {
        self.state.borrow().recording.is_some()
    }

    /// Memory from the device; when it is full, after free pieces of other sizes went back to it.
    fn more(&self, size: u64) -> Result<Address, CudaError> {
        match self.launcher.allocate(size) {
            Err(CudaError::OutOfMemory { free, .. }) if !self.is_recording() => {
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
        let size = rounded(self.bytes);
        let address = self.address;
        let recording = state.recording.as_mut();
        match (state.captured.get_mut(&address), recording) {
            (Some(piece), recording) => {
                piece.in_use = false;
                if let Some(recording) = recording.filter(|r| r.pieces.contains(&address)) {
                    recording.free.entry(size).or_default().push(address);
                }
            }
            // What is recorded may read it, each time it runs.
            (None, Some(recording)) => {
                let in_use = false;
                state.captured.insert(address, Captured { size, in_use });
                recording.pieces.insert(address);
            }
            (None, None) => state.free.entry(size).or_default().push(address),
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let state = &mut *self.memory.state.borrow_mut();
        for address in &self.pieces {
            // A buffer that still has one gives it back itself.
            if let Some(piece) = state.captured.remove(address)
                && !piece.in_use
            {
                state.free.entry(piece.size).or_default().push(*address);
            }
        }
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
