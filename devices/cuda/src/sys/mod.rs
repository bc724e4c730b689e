//! Functions of NVIDIA's libraries, with the types and constants of their headers (CUDA 13.0, cuDNN
//! 9.19, NCCL 2.28). One file per library.

pub mod cublaslt;
pub mod cudnn;
pub mod driver;
pub mod nccl;
pub mod nvml;
pub mod nvrtc;

use std::ffi::{CStr, c_char};

/// What a library calls an error: text it owns, which lives as long as the program.
#[allow(unsafe_code, reason = "a C string")]
fn text(pointer: *const c_char) -> Option<String> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: the libraries return strings of their own tables, ended by 0.
    let text = unsafe { CStr::from_ptr(pointer) };
    Some(text.to_string_lossy().into_owned())
}
