//! NVRTC: the compiler of kernels. It needs no device.

#![allow(unsafe_code, reason = "functions of a C library")]

use std::ffi::{c_char, c_int, c_void};

use crate::library::Name;
use crate::loading::functions;

/// A program being compiled.
pub type Program = *mut c_void;

functions! {
    /// Functions of NVRTC.
    Nvrtc of Name::Nvrtc;
    fn version = "nvrtcVersion"(major: *mut c_int, minor: *mut c_int);
    fn create = "nvrtcCreateProgram"(
        program: *mut Program, source: *const c_char, name: *const c_char,
        headers: c_int, sources: *const *const c_char, names: *const *const c_char,
    );
    fn compile = "nvrtcCompileProgram"(program: Program, count: c_int, options: *const *const c_char);
    fn destroy = "nvrtcDestroyProgram"(program: *mut Program);
    fn log_size = "nvrtcGetProgramLogSize"(program: Program, size: *mut usize);
    fn log = "nvrtcGetProgramLog"(program: Program, log: *mut c_char);
    fn cubin_size = "nvrtcGetCUBINSize"(program: Program, size: *mut usize);
    fn cubin = "nvrtcGetCUBIN"(program: Program, cubin: *mut c_char);
}

impl Nvrtc {
    /// `nvrtcResult` of the header.
    #[allow(clippy::unused_self, reason = "every table says its reasons")]
    fn reason(&self, code: i32) -> String {
        match code {
            1 => "out of memory",
            2 => "the program could not be created",
            3 => "invalid input",
            4 => "invalid program",
            5 => "invalid option",
            6 => "compilation failed",
            7 => "a builtin operation failed",
            11 => "internal error",
            _ => "unknown error",
        }
        .to_owned()
    }
}
