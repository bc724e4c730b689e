//! Configures the allocator. Training frees and allocates the same buffers every step: returning pages to the operating
//! system in between would cost a fifth of the step in page faults and zeroing.

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
