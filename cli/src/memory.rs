//! The allocator. Training frees and asks for the same buffers every step: pages that went back to the
//! operating system in between would be faulted in and zeroed again, a fifth of the step.

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `mi_option_purge_delay` of mimalloc's `mi_option_t`, which the binding does not name.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

/// Keeps freed pages for the life of the process.
#[allow(
    unsafe_code,
    reason = "the binding is a C function; any value of an option is allowed"
)]
pub(crate) fn keep() {
    // SAFETY: sets a number in the allocator before any other thread runs.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) };
}
