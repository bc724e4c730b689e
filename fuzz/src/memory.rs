//! An allocator that counts the bytes of each thread, to measure the peak of an input.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Most bytes that one thread may hold. A request beyond it is refused, which ends the worker process; the
/// process that started the worker then reports the input.
const MOST: i64 = 8 << 30;

thread_local! {
    static HELD: Cell<i64> = const { Cell::new(0) };
    static PEAK: Cell<i64> = const { Cell::new(0) };
}

/// The system's allocator, counted.
pub struct Counting;

fn add(bytes: i64) -> bool {
    HELD.try_with(|held| {
        let now = held.get() + bytes;
        if now > MOST {
            return false;
        }
        held.set(now);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(now)));
        true
    })
    .unwrap_or(true)
}

#[allow(
    unsafe_code,
    reason = "an allocator is an unsafe trait; every call goes to the system's"
)]
// SAFETY: memory comes from `System` with the caller's layout and goes back to it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !add(layout.size() as i64) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promises are those that `System` asks.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !add(layout.size() as i64) {
            return std::ptr::null_mut();
        }
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        add(-(layout.size() as i64));
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !add(size as i64 - layout.size() as i64) {
            return std::ptr::null_mut();
        }
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Runs `work` and says how many bytes this thread held at most beyond what it held before. Zero
/// where another allocator is installed.
pub fn peak_of<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let before = HELD.get();
    PEAK.set(before);
    let result = work();
    let peak = PEAK.get() - before;
    (result, u64::try_from(peak).unwrap_or(0))
}
