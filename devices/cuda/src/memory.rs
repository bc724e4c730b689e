//! Caching allocator of device memory: freed pieces are reused, and bytes in use are counted.
//!
//! All work of a device is in one stream, so a piece can be reused as soon as its last reader was queued. Pieces keep
//! their addresses.
//!
//! A captured graph replays at the addresses it was recorded with, so it owns every piece that it touched: pieces
//! allocated during capture, and pieces from before that were freed meanwhile. During capture the former are reused as
//! always, since one replay is ordered in itself; the latter are not, since the next replay reads them first. No one
//! else gets them until the graph is dropped. PyTorch's private pools for CUDA graphs work the same way.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

use super::error::CudaError;
use super::launcher::{Address, Launcher, Located};

/// Sizes are rounded up to multiples of this many bytes.
const GRAIN: u64 = 512;

/// Allocator of one device's memory.
pub struct Memory {
    launcher: Rc<dyn Launcher>,
    state: RefCell<State>,
    /// Whether pieces are filled with NaNs when they are allocated.
    poisons: Cell<bool>,
}

#[derive(Debug, Default)]
struct State {
    /// Addresses of free pieces, by size.
    free: BTreeMap<u64, Vec<Address>>,
    recording: Option<Recording>,
    /// Pieces owned by captured graphs.
    captured: HashMap<Address, Captured>,
    usage: Usage,
}

/// State of a capture under way.
#[derive(Debug, Default)]
struct Recording {
    /// Its pieces that are free for reuse within the capture, by size.
    free: BTreeMap<u64, Vec<Address>>,
    /// All pieces that it owns.
    pieces: BTreeSet<Address>,
}

/// A piece owned by a captured graph.
#[derive(Clone, Copy, Debug)]
struct Captured {
    size: u64,
    /// Whether a [`Buffer`] still holds it.
    in_use: bool,
}

/// The pieces of a captured graph; dropping this frees them.
pub struct Reserved {
    memory: Rc<Memory>,
    pieces: BTreeSet<Address>,
}

/// Counts of device memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// In use by tensors, as requested.
    pub live: u64,
    /// The largest `live` so far.
    pub peak: u64,
    /// Allocated from the device, rounding and free pieces included.
    pub reserved: u64,
}

/// A piece of device memory; dropping it frees the piece.
pub struct Buffer {
    memory: Rc<Memory>,
    /// Address of its first byte.
    pub address: Address,
    /// Size in bytes, as requested.
    pub bytes: u64,
}

impl Memory {
    /// An allocator that has allocated nothing yet.
    #[must_use]
    pub fn new(launcher: Rc<dyn Launcher>) -> Rc<Self> {
        Rc::new(Self {
            launcher,
            state: RefCell::default(),
            poisons: Cell::new(cfg!(debug_assertions)),
        })
    }

    /// Runs `work` with all newly allocated memory filled with NaNs, in release builds too: reading what nobody wrote,
    /// or leaving a result unwritten, then yields NaN.
    pub fn poisoned<T>(&self, work: impl FnOnce() -> T) -> T {
        let before = self.poisons.replace(true);
        let done = work();
        self.poisons.set(before);
        done
    }

    /// Allocates a piece of this many bytes.
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

    /// Begins a capture: from here on it owns every piece touched.
    pub(super) fn begin_recording(&self) {
        self.state.borrow_mut().recording = Some(Recording::default());
    }

    /// Ends the capture; returns its pieces, to be kept as long as the graph.
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

    /// Allocates from the device; if full, frees cached pieces and retries, except during capture.
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

    /// Returns all free pieces to the device.
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

    /// Current byte counts.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.state.borrow().usage
    }

    /// Resets the peak to what is in use now.
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
            // The captured graph may read it on every replay.
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
            // A buffer that still holds a piece frees it when dropped.
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
        // The device may have failed: the error no longer matters.
        let _ = self.trim();
    }
}

impl Located for Buffer {
    fn located(&self) -> Address {
        self.address
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes at {:#x}", self.bytes, self.address)
    }
}
