//! NVIDIA's libraries as `cudarc` declares them: types, constants and function signatures. Functions are called by
//! [`call`], which finds them by `loading`: `cudarc`'s own loader takes no path, and aborts where a library or a
//! function is missing.

#![allow(unsafe_code, reason = "functions of C libraries")]

use std::ffi::{CStr, c_char};

use crate::error::CudaError;
use crate::library::Name;
use crate::loading::{Found, function};

/// The CUDA driver.
pub(crate) mod driver {
    pub(crate) use cudarc::driver::sys::*;
    pub(crate) const NAME: crate::library::Name = crate::library::Name::Driver;
}

/// The compiler of CUDA C kernels. It needs no device.
pub(crate) mod nvrtc {
    pub(crate) use cudarc::nvrtc::sys::*;
    pub(crate) const NAME: crate::library::Name = crate::library::Name::Nvrtc;
}

/// GEMMs.
pub(crate) mod cublaslt {
    pub(crate) use cudarc::cublaslt::sys::*;
    pub(crate) const NAME: crate::library::Name = crate::library::Name::CublasLt;
}

/// Graphs of operators (cuDNN 9's backend functions).
pub(crate) mod cudnn {
    pub(crate) use cudarc::cudnn::sys::*;
    pub(crate) const NAME: crate::library::Name = crate::library::Name::Cudnn;
}

/// Collectives and point-to-point messages.
pub(crate) mod nccl {
    pub(crate) use cudarc::nccl::sys::*;
    pub(crate) const NAME: crate::library::Name = crate::library::Name::Nccl;
}

/// Calls a function of a library, such as `call!(driver::cuMemFree_v2(address))`, and checks what it returns.
///
/// Unsafe: arguments must be as NVIDIA's documentation of the function requires.
macro_rules! call {
    ($library:ident::$function:ident($($argument:expr),* $(,)?)) => {{
        use $crate::sys::$library;
        static FOUND: $crate::loading::Found = $crate::loading::Found::new();
        let (library, name) = ($library::NAME, stringify!($function));
        let declared: unsafe fn($($crate::sys::any!($argument)),*) -> _ = $library::$function;
        $crate::loading::function(Some(declared), library, name, &FOUND)
            .and_then(|function| $crate::sys::checked(library, name, function($($argument),*)))
    }};
}
pub(crate) use call;

/// An inferred type (`_`), for macros.
macro_rules! any {
    ($argument:expr) => {
        _
    };
}
pub(crate) use any;

/// Turns the code that a call returned into a result.
pub(crate) fn checked(library: Name, call: &'static str, code: i32) -> Result<(), CudaError> {
    if code == 0 {
        return Ok(());
    }
    Err(CudaError::Call {
        library,
        call,
        code,
        reason: reason(library, code),
    })
}

/// Description of a code, from the library's headers.
fn reason(library: Name, code: i32) -> String {
    let known: &[(i32, &str)] = match library {
        Name::Driver => return driver_reason(code),
        Name::Nvrtc => &[
            (1, "out of memory"),
            (2, "the program could not be created"),
            (3, "invalid input"),
            (4, "invalid program"),
            (5, "invalid option"),
            (6, "compilation failed"),
            (7, "a builtin operation failed"),
            (11, "internal error"),
        ],
        Name::CublasLt => &[
            (1, "not initialised"),
            (3, "allocation failed"),
            (7, "invalid value"),
            (8, "the device is too old"),
            (11, "mapping error"),
            (13, "execution failed"),
            (14, "internal error"),
            (15, "no algorithm for these operands"),
        ],
        // The thousands of a code say its kind.
        Name::Cudnn => &[
            (1, "not initialised"),
            (2, "bad parameter"),
            (3, "not supported"),
            (4, "internal error"),
            (5, "execution failed"),
        ],
        Name::Nccl => &[
            (1, "a CUDA call inside failed"),
            (2, "a system call failed; NCCL_DEBUG=WARN says which"),
            (3, "internal error"),
            (4, "invalid argument"),
            (5, "invalid usage"),
            (6, "a peer failed"),
            (7, "in progress"),
        ],
        // `nvml_wrapper` calls it.
        Name::Nvml => &[],
    };
    let wanted = match library {
        Name::Cudnn => code / 1000,
        _ => code,
    };
    let found = known.iter().find(|(code, _)| *code == wanted);
    found.map_or("unknown error", |(_, text)| text).to_owned()
}

/// The driver's name of a code: a static string that it owns.
fn driver_reason(code: i32) -> String {
    // `cudarc`'s enum of codes cannot represent codes of newer drivers.
    type Named = unsafe fn(i32, *mut *const c_char) -> i32;
    static FOUND: Found = Found::new();
    let named = function(None::<Named>, Name::Driver, "cuGetErrorName", &FOUND);
    let mut name = std::ptr::null();
    // SAFETY: writes a pointer to text that ends in 0, or leaves it null.
    let found = named.is_ok_and(|named| unsafe { named(code, &raw mut name) } == 0);
    if !found || name.is_null() {
        return "unknown error".to_owned();
    }
    // SAFETY: as above.
    let text = unsafe { CStr::from_ptr(name) };
    text.to_string_lossy().into_owned()
}

/// Allocates memory on the device whose context is current.
///
/// # Errors
/// When it is full.
pub(crate) fn take(bytes: u64) -> Result<u64, CudaError> {
    let mut address = 0;
    // SAFETY: writes one address.
    let result = unsafe { call!(driver::cuMemAlloc_v2(&raw mut address, bytes as usize)) };
    match result {
        Err(CudaError::Call { code, .. })
            if code == driver::CUresult::CUDA_ERROR_OUT_OF_MEMORY as i32 =>
        {
            let (mut free, mut total) = (0, 0);
            // SAFETY: writes two numbers.
            unsafe { call!(driver::cuMemGetInfo_v2(&raw mut free, &raw mut total)) }?;
            Err(CudaError::OutOfMemory {
                asked: bytes,
                live: (total - free) as u64,
                free: free as u64,
            })
        }
        other => other.map(|()| address),
    }
}
