//! Configures the allocator: how long it keeps freed pages before the operating system has them back.

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `mi_option_purge_delay` of mimalloc's `mi_option_t`, which the binding does not name.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

/// Returns freed pages after a tenth of a second. With mimalloc's own delay, a second, a search
/// over parts of its space takes a tenth more memory (measured for DeepSeek-V3 on 16,384 GPUs).
pub(crate) fn release() {
    delay(100);
}

/// Keeps freed pages for the life of the process. Training frees and allocates the same buffers every step: returning pages to
/// the operating system in between would cost a fifth of the step in page faults and zeroing.
pub(crate) fn keep() {
    delay(-1);
}

/// Sets mimalloc's purge delay in milliseconds; −1 keeps freed pages for ever.
#[allow(
    unsafe_code,
    reason = "the binding is a C function; any value of an option is allowed"
)]
fn delay(milliseconds: std::ffi::c_long) {
    // SAFETY: sets a number in the allocator.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, milliseconds) };
}
