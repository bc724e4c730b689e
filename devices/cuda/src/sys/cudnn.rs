//! cuDNN's graphs of operators ("backend" functions; cuDNN 9).

#![allow(unsafe_code, reason = "functions of a C library")]

use std::ffi::{c_int, c_void};

use crate::library::Name;
use crate::loading::functions;

/// An opaque handle: the library on a device, or a descriptor.
pub type Handle = *mut c_void;

/// `cudnnBackendDescriptorType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Kind {
    /// `CUDNN_BACKEND_POINTWISE_DESCRIPTOR`.
    Pointwise = 0,
    /// `CUDNN_BACKEND_ENGINECFG_DESCRIPTOR`.
    Engine = 3,
    /// `CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR`.
    Heuristics = 4,
    /// `CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR`.
    Plan = 5,
    /// `CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR`.
    PointwiseOperation = 13,
    /// `CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR`.
    Graph = 15,
    /// `CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR`.
    Pack = 16,
    /// `CUDNN_BACKEND_TENSOR_DESCRIPTOR`.
    Tensor = 17,
    /// `CUDNN_BACKEND_MATMUL_DESCRIPTOR`.
    Product = 18,
    /// `CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR`.
    ProductOperation = 19,
    /// `CUDNN_BACKEND_REDUCTION_DESCRIPTOR`.
    Reduction = 21,
    /// `CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR`.
    ReductionOperation = 22,
    /// `CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR`.
    ReshapeOperation = 31,
    /// `CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR`.
    Properties = 38,
}

/// `cudnnBackendAttributeType_t`, and the type in C of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Type {
    /// `CUDNN_TYPE_HANDLE`.
    Handle = 0,
    /// `CUDNN_TYPE_DATA_TYPE`: `int`.
    Element = 1,
    /// `CUDNN_TYPE_BOOLEAN`: `bool`.
    Boolean = 2,
    /// `CUDNN_TYPE_INT64`.
    Int64 = 3,
    /// `CUDNN_TYPE_VOID_PTR`.
    Pointer = 6,
    /// `CUDNN_TYPE_HEUR_MODE`: `int`.
    Heuristics = 8,
    /// `CUDNN_TYPE_POINTWISE_MODE`: `int`.
    Pointwise = 14,
    /// `CUDNN_TYPE_BACKEND_DESCRIPTOR`.
    Descriptor = 15,
    /// `CUDNN_TYPE_REDUCTION_OPERATOR_TYPE`: `int`.
    Reduction = 18,
    /// `CUDNN_TYPE_CHAR`.
    Character = 24,
}

/// `cudnnDataType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Element {
    /// `CUDNN_DATA_FLOAT`.
    F32 = 0,
    /// `CUDNN_DATA_INT32`.
    I32 = 4,
    /// `CUDNN_DATA_BFLOAT16`.
    Bf16 = 9,
    /// `CUDNN_DATA_BOOLEAN`.
    Boolean = 11,
}

/// `cudnnPointwiseMode_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Pointwise {
    /// `CUDNN_POINTWISE_ADD`.
    Add = 0,
    /// `CUDNN_POINTWISE_MUL`.
    Multiply = 1,
    /// `CUDNN_POINTWISE_DIV`.
    Divide = 6,
    /// `CUDNN_POINTWISE_SUB`.
    Subtract = 9,
    /// `CUDNN_POINTWISE_EXP`.
    Exponential = 13,
    /// `CUDNN_POINTWISE_LOG`.
    Logarithm = 15,
    /// `CUDNN_POINTWISE_IDENTITY`.
    Same = 21,
    /// `CUDNN_POINTWISE_CMP_GT`.
    Above = 302,
    /// `CUDNN_POINTWISE_CMP_GE`.
    NotBelow = 303,
    /// `CUDNN_POINTWISE_GEN_INDEX`.
    Index = 501,
    /// `CUDNN_POINTWISE_BINARY_SELECT`.
    Select = 601,
}

/// `cudnnReduceTensorOp_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Reduction {
    /// `CUDNN_REDUCE_TENSOR_ADD`.
    Sum = 0,
    /// `CUDNN_REDUCE_TENSOR_MAX`.
    Maximum = 3,
}

/// `CUDNN_HEUR_MODE_A`: the best of the library's choices.
pub const BEST: c_int = 3;

/// `CUDNN_ATTR_…` of `cudnnBackendAttributeName_t`, by what they are of.
pub mod attribute {
    use std::ffi::c_int;

    /// `POINTWISE_MODE`, `POINTWISE_MATH_PREC`, `POINTWISE_AXIS`.
    pub const POINTWISE: [c_int; 3] = [0, 1, 9];
    /// `ENGINEHEUR_MODE`, `ENGINEHEUR_OPERATION_GRAPH`, `ENGINEHEUR_RESULTS`, `ENGINEHEUR_DEVICEPROP`.
    pub const HEURISTICS: [c_int; 4] = [200, 201, 202, 204];
    /// `EXECUTION_PLAN_HANDLE`, `EXECUTION_PLAN_ENGINE_CONFIG`, `EXECUTION_PLAN_WORKSPACE_SIZE`,
    /// `EXECUTION_PLAN_DEVICEPROP`.
    pub const PLAN: [c_int; 4] = [400, 401, 402, 407];
    /// `OPERATION_POINTWISE_PW_DESCRIPTOR`, `…_XDESC`, `…_BDESC`, `…_YDESC`, `…_TDESC`.
    pub const POINTWISE_OPERATION: [c_int; 5] = [750, 751, 752, 753, 758];
    /// `OPERATIONGRAPH_HANDLE`, `OPERATIONGRAPH_OPS`.
    pub const GRAPH: [c_int; 2] = [800, 801];
    /// `TENSOR_BYTE_ALIGNMENT`, `TENSOR_DATA_TYPE`, `TENSOR_DIMENSIONS`, `TENSOR_STRIDES`,
    /// `TENSOR_UNIQUE_ID`, `TENSOR_IS_VIRTUAL`, `TENSOR_IS_BY_VALUE`.
    pub const TENSOR: [c_int; 7] = [900, 901, 902, 903, 906, 907, 908];
    /// `VARIANT_PACK_UNIQUE_IDS`, `VARIANT_PACK_DATA_POINTERS`, `VARIANT_PACK_WORKSPACE`.
    pub const PACK: [c_int; 3] = [1000, 1001, 1003];
    /// `MATMUL_COMP_TYPE`.
    pub const PRODUCT: c_int = 1500;
    /// `OPERATION_MATMUL_ADESC`, `…_BDESC`, `…_CDESC`, `…_DESC`.
    pub const PRODUCT_OPERATION: [c_int; 4] = [1520, 1521, 1522, 1523];
    /// `REDUCTION_OPERATOR`, `REDUCTION_COMP_TYPE`.
    pub const REDUCTION: [c_int; 2] = [1600, 1601];
    /// `OPERATION_REDUCTION_XDESC`, `…_YDESC`, `…_DESC`.
    pub const REDUCTION_OPERATION: [c_int; 3] = [1610, 1611, 1612];
    /// `OPERATION_RESHAPE_XDESC`, `…_YDESC`.
    pub const RESHAPE_OPERATION: [c_int; 2] = [2200, 2201];
    /// `DEVICEPROP_JSON_REPRESENTATION`.
    pub const PROPERTIES: c_int = 2702;
}

functions! {
    /// Functions of cuDNN.
    Cudnn of Name::Cudnn;
    fn property = "cudnnGetProperty"(which: c_int, value: *mut c_int);
    fn create = "cudnnCreate"(handle: *mut Handle);
    fn destroy = "cudnnDestroy"(handle: Handle);
    fn set_stream = "cudnnSetStream"(handle: Handle, stream: *mut c_void);
    fn create_descriptor = "cudnnBackendCreateDescriptor"(kind: c_int, descriptor: *mut Handle);
    fn destroy_descriptor = "cudnnBackendDestroyDescriptor"(descriptor: Handle);
    fn finish = "cudnnBackendFinalize"(descriptor: Handle);
    fn set = "cudnnBackendSetAttribute"(
        descriptor: Handle, attribute: c_int, of: c_int, count: i64, values: *const c_void,
    );
    fn get = "cudnnBackendGetAttribute"(
        descriptor: Handle, attribute: c_int, of: c_int, asked: i64, found: *mut i64, values: *mut c_void,
    );
    fn execute = "cudnnBackendExecute"(handle: Handle, plan: Handle, pack: Handle);
}

impl Cudnn {
    /// `cudnnStatus_t` of the header, by its thousands.
    #[allow(clippy::unused_self, reason = "every table says its reasons")]
    fn reason(&self, code: i32) -> String {
        match code / 1000 {
            1 => "not initialised",
            2 => "bad parameter",
            3 => "not supported",
            4 => "internal error",
            5 => "execution failed",
            _ => "unknown error",
        }
        .to_owned()
    }
}
