//! Bookkeeping of a device's memory with buffers that are only sizes.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::rc::Rc;

use catalog::DType;

/// The bytes of a device's memory in use, and their peak.
#[derive(Debug, Default)]
pub struct Ledger {
    live: Cell<u64>,
    peak: Cell<u64>,
    /// Whether a fused library kernel runs core attention where it can.
    pub(super) library: bool,
    /// Names of the lists that have been allocated for good.
    lists: RefCell<BTreeSet<String>>,
}

/// An allocation of which only the size exists; dropping it frees the bytes.
#[derive(Debug)]
pub struct Piece {
    ledger: Rc<Ledger>,
    pub(super) bytes: u64,
    pub(super) dtype: DType,
}

/// The buffer of a tensor; several may share one.
pub type Room = Rc<Piece>;

/// A result that cannot fail: counting never runs out of memory.
pub type Sure<T> = Result<T, Infallible>;

impl Ledger {
    /// A device with no memory in use; `library` says whether a fused library kernel runs core attention where it can.
    #[must_use]
    pub fn new(library: bool) -> Rc<Self> {
        Rc::new(Self {
            library,
            ..Self::default()
        })
    }

    /// Allocates a buffer.
    #[must_use]
    pub fn take(self: &Rc<Self>, bytes: u64, dtype: DType) -> Room {
        self.grow(bytes);
        Rc::new(Piece {
            ledger: Rc::clone(self),
            bytes,
            dtype,
        })
    }

    /// The peak of bytes in use since the last call.
    #[must_use]
    pub fn take_peak(&self) -> u64 {
        self.peak.replace(self.live.get())
    }

    /// Allocates a list once and for good that many operators read, such as positions and rotary tables.
    pub(super) fn list(&self, name: String, bytes: u64) {
        if self.lists.borrow_mut().insert(name) {
            self.grow(bytes);
        }
    }

    fn grow(&self, bytes: u64) {
        self.live.set(self.live.get() + bytes);
        self.peak.set(self.peak.get().max(self.live.get()));
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let live = &self.ledger.live;
        live.set(live.get() - self.bytes);
    }
}
