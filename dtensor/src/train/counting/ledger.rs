//! The memory of a device, as buffers that are no more than their sizes.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::rc::Rc;

use catalog::DType;

/// Bytes of a device's memory as they are taken and given back.
#[derive(Debug, Default)]
pub struct Ledger {
    live: Cell<u64>,
    peak: Cell<u64>,
    /// Whether a library runs core attention where it may.
    pub(super) library: bool,
    /// Lists that stay, by what they are of.
    lists: RefCell<BTreeSet<String>>,
}

/// A buffer that is no more than its size.
#[derive(Debug)]
pub struct Piece {
    ledger: Rc<Ledger>,
    pub(super) bytes: u64,
    pub(super) dtype: DType,
}

/// The buffer of a tensor; several may share one.
pub type Room = Rc<Piece>;

/// What can never fail: there is always room for sizes.
pub type Sure<T> = Result<T, Infallible>;

impl Ledger {
    /// A device of which nothing is in use, whose core attention a library runs where it may, or never.
    #[must_use]
    pub fn new(library: bool) -> Rc<Self> {
        Rc::new(Self {
            library,
            ..Self::default()
        })
    }

    /// Takes a buffer.
    #[must_use]
    pub fn take(self: &Rc<Self>, bytes: u64, dtype: DType) -> Room {
        self.grow(bytes);
        Rc::new(Piece {
            ledger: Rc::clone(self),
            bytes,
            dtype,
        })
    }

    /// The most that were in use since the last call.
    #[must_use]
    pub fn take_peak(&self) -> u64 {
        self.peak.replace(self.live.get())
    }

    /// Takes the buffer of a list that many operators read and that stays: positions, and turns of rotary ones.
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
