//! cuBLASLt: matrix products.

#![allow(unsafe_code, reason = "functions of a C library")]

use std::ffi::{c_int, c_void};

use crate::library::Name;
use crate::loading::functions;

/// An opaque handle: library, product, layout, preference.
pub type Handle = *mut c_void;

/// `CUDA_R_32F`.
pub const R_32F: c_int = 0;
/// `CUDA_R_16BF`.
pub const R_16BF: c_int = 14;
/// `CUDA_R_8F_E4M3`.
pub const R_8F_E4M3: c_int = 28;
/// `CUDA_R_8F_E5M2`.
pub const R_8F_E5M2: c_int = 29;
/// `CUBLAS_COMPUTE_32F`.
pub const COMPUTE_32F: c_int = 68;
/// `CUBLAS_COMPUTE_32F_FAST_TF32`.
pub const COMPUTE_TF32: c_int = 77;
/// `CUBLASLT_MATMUL_DESC_TRANSA`.
pub const TRANSPOSE_A: c_int = 3;
/// `CUBLASLT_MATMUL_DESC_TRANSB`.
pub const TRANSPOSE_B: c_int = 4;
/// `CUBLASLT_MATMUL_DESC_EPILOGUE`.
pub const EPILOGUE: c_int = 7;
/// `CUBLASLT_MATMUL_DESC_BIAS_POINTER`.
pub const BIAS_POINTER: c_int = 8;
/// `CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER`.
pub const AUX_POINTER: c_int = 11;
/// `CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD`.
pub const AUX_STRIDE: c_int = 12;
/// `CUBLASLT_MATMUL_DESC_A_SCALE_POINTER`.
pub const A_SCALE_POINTER: c_int = 17;
/// `CUBLASLT_MATMUL_DESC_B_SCALE_POINTER`.
pub const B_SCALE_POINTER: c_int = 18;
/// `CUBLASLT_EPILOGUE_DEFAULT`.
pub const EPILOGUE_DEFAULT: c_int = 1;
/// `CUBLASLT_EPILOGUE_BIAS`; in sums, a bias before what else.
pub const EPILOGUE_BIAS: c_int = 4;
/// `CUBLASLT_EPILOGUE_GELU`.
pub const EPILOGUE_GELU: c_int = 32;
/// What `CUBLASLT_EPILOGUE_GELU_AUX` has beyond it.
pub const EPILOGUE_AUX: c_int = 128;
/// `CUBLASLT_EPILOGUE_DGELU`.
pub const EPILOGUE_DGELU: c_int = 192;
/// `CUBLAS_OP_N`.
pub const PLAIN: c_int = 0;
/// `CUBLAS_OP_T`.
pub const TRANSPOSED: c_int = 1;
/// `CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES`.
pub const MAX_WORKSPACE_BYTES: c_int = 1;

/// `CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES`, `…_B_BYTES`, `…_C_BYTES`, `…_D_BYTES`.
pub const MIN_ALIGNMENTS: [c_int; 4] = [5, 6, 7, 8];
/// `CUBLAS_STATUS_NOT_SUPPORTED`.
pub const NOT_SUPPORTED: c_int = 15;

/// `cublasLtMatmulAlgo_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Algorithm {
    data: [u64; 8],
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Heuristic {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Bytes of workspace it needs.
    pub workspace: usize,
    /// Whether it can run: 0.
    pub state: i32,
    /// Waves of blocks.
    pub waves: f32,
    reserved: [c_int; 4],
}

functions! {
    /// Functions of cuBLASLt.
    CublasLt of Name::CublasLt;
    fn create = "cublasLtCreate"(handle: *mut Handle);
    fn destroy = "cublasLtDestroy"(handle: Handle);
    fn create_product = "cublasLtMatmulDescCreate"(product: *mut Handle, compute: c_int, scale: c_int);
    fn destroy_product = "cublasLtMatmulDescDestroy"(product: Handle);
    fn set_product = "cublasLtMatmulDescSetAttribute"(
        product: Handle, attribute: c_int, value: *const c_void, bytes: usize,
    );
    fn create_layout = "cublasLtMatrixLayoutCreate"(
        layout: *mut Handle, element: c_int, rows: u64, columns: u64, stride: i64,
    );
    fn destroy_layout = "cublasLtMatrixLayoutDestroy"(layout: Handle);
    fn create_preference = "cublasLtMatmulPreferenceCreate"(preference: *mut Handle);
    fn destroy_preference = "cublasLtMatmulPreferenceDestroy"(preference: Handle);
    fn set_preference = "cublasLtMatmulPreferenceSetAttribute"(
        preference: Handle, attribute: c_int, value: *const c_void, bytes: usize,
    );
    fn heuristic = "cublasLtMatmulAlgoGetHeuristic"(
        handle: Handle, product: Handle, a: Handle, b: Handle, c: Handle, d: Handle,
        preference: Handle, asked: c_int, results: *mut Heuristic, found: *mut c_int,
    );
    fn multiply = "cublasLtMatmul"(
        handle: Handle, product: Handle, alpha: *const c_void,
        a: u64, a_layout: Handle, b: u64, b_layout: Handle, beta: *const c_void,
        c: u64, c_layout: Handle, d: u64, d_layout: Handle,
        algorithm: *const Algorithm, workspace: u64, bytes: usize, stream: *mut c_void,
    );
}

impl CublasLt {
    /// `cublasStatus_t` of the header.
    #[allow(clippy::unused_self, reason = "every table says its reasons")]
    fn reason(&self, code: i32) -> String {
        match code {
            1 => "not initialised",
            3 => "allocation failed",
            7 => "invalid value",
            8 => "the device is too old",
            11 => "mapping error",
            13 => "execution failed",
            14 => "internal error",
            NOT_SUPPORTED => "no algorithm for these operands",
            _ => "unknown error",
        }
        .to_owned()
    }
}
