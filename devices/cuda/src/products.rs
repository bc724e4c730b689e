//! GEMMs by cuBLASLt, with the algorithm that its heuristics choose for a shape cached.

#![allow(unsafe_code, reason = "functions of cuBLASLt")]

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use catalog::DType;

use super::error::CudaError;
use super::launcher::{Address, Compute, Element, Epilogue, Float8, Operand, Product};
use super::library::Name;
use super::sys::cublaslt::{
    cublasComputeType_t as Computed, cublasLtEpilogue_t as Fused, cublasLtHandle_t,
    cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t::{self, *},
    cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t::*,
    cublasLtMatrixLayout_t, cublasLtReductionScheme_t, cublasStatus_t, cudaDataType,
};
use super::sys::driver::CUstream;
use super::sys::{call, take};

/// Bytes of workspace: NVIDIA's recommendation for Hopper.
const WORKSPACE: usize = 32 << 20;

/// `CUBLAS_OP_N` and `CUBLAS_OP_T`, which `cudarc` declares with cuBLAS, not with cuBLASLt.
const OP_N: c_int = 0;
const OP_T: c_int = 1;

/// The first compute capability whose tensor cores multiply FP8: Ada's.
pub const EIGHT_BITS: [u32; 2] = [8, 9];

/// Major compute capabilities of GPUs on which fusing a GELU into a GEMM pays: Hopper and data-centre Blackwell. On Ada
/// and smaller Blackwell GPUs, cuBLASLt was measured to be slower with it than with a separate kernel
/// (karpathy/llm.c#591, sgl-project/sglang#34350).
const FUSES_GELU: [u32; 2] = [9, 10];

/// cuBLASLt with its workspace, and the plans made so far.
pub(super) struct Products {
    handle: cublasLtHandle_t,
    workspace: u64,
    /// The device's compute capability.
    capability: [u32; 2],
    plans: RefCell<HashMap<Shape, Plan>>,
}

/// The properties of a GEMM that determine its algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    sizes: [u64; 3],
    types: [cudaDataType; 3],
    transposed: [bool; 2],
    compute: Compute,
    accumulate: bool,
    epilogue: Fused,
    /// Alignment in bytes of both operands, the result, and the tensors that the epilogue reads or writes.
    alignments: [u32; 5],
}

/// A GEMM with its descriptors. cuBLASLt is column-major: it computes `cᵀ = bᵀ · aᵀ`, so its first operand is our
/// second.
#[derive(Clone, Copy)]
struct Plan {
    product: cublasLtMatmulDesc_t,
    layouts: [cublasLtMatrixLayout_t; 3],
    /// The algorithm; `None` where cuBLASLt has none.
    algorithm: Option<cublasLtMatmulAlgo_t>,
}

impl Shape {
    fn of(product: &Product) -> Self {
        let (epilogue, [bias, matrix]) = epilogue(product.epilogue);
        let addresses = [
            product.a.address,
            product.b.address,
            product.c,
            bias,
            matrix,
        ];
        Self {
            sizes: product.sizes,
            types: [
                element(&product.a),
                element(&product.b),
                number(product.dtype),
            ],
            transposed: [product.a.transposed, product.b.transposed],
            compute: product.compute,
            accumulate: product.accumulate,
            epilogue,
            alignments: addresses.map(alignment),
        }
    }
}

/// The largest power of two that divides an address, at most 256.
fn alignment(address: Address) -> u32 {
    1 << address.trailing_zeros().min(8)
}

fn number(dtype: DType) -> cudaDataType {
    match dtype {
        DType::Bf16 => cudaDataType::CUDA_R_16BF,
        _ => cudaDataType::CUDA_R_32F,
    }
}

fn element(operand: &Operand) -> cudaDataType {
    match operand.element {
        Element::Plain(dtype) => number(dtype),
        Element::Scaled(Float8::E4m3, _) => cudaDataType::CUDA_R_8F_E4M3,
        Element::Scaled(Float8::E5m2, _) => cudaDataType::CUDA_R_8F_E5M2,
    }
}

/// cuBLASLt's name of an epilogue, and the addresses of its bias and auxiliary matrix; 0 for none.
fn epilogue(of: Epilogue) -> (Fused, [Address; 2]) {
    match of {
        Epilogue::Nothing => (Fused::CUBLASLT_EPILOGUE_DEFAULT, [0, 0]),
        Epilogue::Bias(bias) => (Fused::CUBLASLT_EPILOGUE_BIAS, [bias, 0]),
        Epilogue::Gelu { bias, input } => {
            let fused = match (bias, input) {
                (None, None) => Fused::CUBLASLT_EPILOGUE_GELU,
                (Some(_), None) => Fused::CUBLASLT_EPILOGUE_GELU_BIAS,
                (None, Some(_)) => Fused::CUBLASLT_EPILOGUE_GELU_AUX,
                (Some(_), Some(_)) => Fused::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            };
            (fused, [bias, input].map(Option::unwrap_or_default))
        }
        Epilogue::GeluGradient { input } => (Fused::CUBLASLT_EPILOGUE_DGELU, [0, input]),
    }
}

/// The error of a failed search for an algorithm.
fn failed(code: c_int, what: &str, shape: &Shape) -> CudaError {
    CudaError::Call {
        library: Name::CublasLt,
        call: "cublasLtMatmulAlgoGetHeuristic",
        code,
        reason: format!("{what} for {shape:?}"),
    }
}

impl Products {
    pub(super) fn new(capability: [u32; 2]) -> Result<Self, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: a context is current.
        unsafe { call!(cublaslt::cublasLtCreate(&raw mut handle)) }?;
        Ok(Self {
            handle,
            workspace: take(WORKSPACE as u64)?,
            capability,
            plans: RefCell::default(),
        })
    }

    pub(super) fn fuses_gelu(&self) -> bool {
        FUSES_GELU.contains(&self.capability[0])
    }

    /// Whether cuBLASLt has an algorithm for a GEMM.
    pub(super) fn takes(&self, product: &Product) -> Result<bool, CudaError> {
        Ok(product.sizes.contains(&0) || self.plan(product)?.algorithm.is_some())
    }

    pub(super) fn multiply(&self, product: &Product, stream: CUstream) -> Result<(), CudaError> {
        if product.sizes.contains(&0) {
            return self.nothing(product);
        }
        let plan = self.plan(product)?;
        let Some(algorithm) = plan.algorithm else {
            return Err(failed(
                cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as i32,
                "no algorithm",
                &Shape::of(product),
            ));
        };
        self.set_addresses(plan.product, product)?;
        let (one, beta) = (1.0f32, f32::from(u8::from(product.accumulate)));
        let [first, second, result] = plan.layouts;
        // SAFETY: operands are as the plan's layouts say, and the workspace is as large as it may ask for.
        unsafe {
            call!(cublaslt::cublasLtMatmul(
                self.handle,
                plan.product,
                (&raw const one).cast(),
                product.b.address as *const c_void,
                first,
                product.a.address as *const c_void,
                second,
                (&raw const beta).cast(),
                product.c as *const c_void,
                result,
                product.c as *mut c_void,
                result,
                &raw const algorithm,
                self.workspace as *mut c_void,
                WORKSPACE,
                stream.cast(),
            ))
        }
    }

    /// A GEMM over an empty dim: one that accumulates adds nothing, one that overwrites is an error.
    fn nothing(&self, product: &Product) -> Result<(), CudaError> {
        let [m, n, _] = product.sizes;
        if m == 0 || n == 0 || product.accumulate {
            return Ok(());
        }
        let reason = "an empty contracted dim";
        Err(CudaError::unsupported("a product", "cuBLASLt", reason))
    }

    /// Refuses FP8 on a device whose tensor cores do not support it.
    fn check_capability(&self, product: &Product) -> Result<(), CudaError> {
        let scaled = matches!(product.a.element, Element::Scaled(..));
        if !scaled || self.capability >= EIGHT_BITS {
            return Ok(());
        }
        let [major, minor] = self.capability;
        let reason = format!("compute capability {major}.{minor}: expected 8.9 or above");
        let operator = "a product in 8 bits";
        Err(CudaError::unsupported(operator, "cuBLASLt", reason))
    }

    fn plan(&self, product: &Product) -> Result<Plan, CudaError> {
        let shape = Shape::of(product);
        if let Some(&plan) = self.plans.borrow().get(&shape) {
            return Ok(plan);
        }
        let plan = self.make(product, &shape)?;
        self.plans.borrow_mut().insert(shape, plan);
        Ok(plan)
    }

    fn make(&self, product: &Product, shape: &Shape) -> Result<Plan, CudaError> {
        let [m, n, k] = product.sizes;
        self.check_capability(product)?;
        let mut handle = std::ptr::null_mut();
        let compute = match (product.compute, product.a.element) {
            (Compute::Tf32, Element::Plain(DType::F32)) => Computed::CUBLAS_COMPUTE_32F_FAST_TF32,
            _ => Computed::CUBLAS_COMPUTE_32F,
        };
        // SAFETY: `release` destroys it, with its plan.
        unsafe {
            call!(cublaslt::cublasLtMatmulDescCreate(
                &raw mut handle,
                compute,
                cudaDataType::CUDA_R_32F
            ))
        }?;
        let transpose = |operand: &Operand| match operand.transposed {
            true => OP_T,
            false => OP_N,
        };
        self.set(handle, CUBLASLT_MATMUL_DESC_TRANSA, &transpose(&product.b))?;
        self.set(handle, CUBLASLT_MATMUL_DESC_TRANSB, &transpose(&product.a))?;
        self.set(handle, CUBLASLT_MATMUL_DESC_EPILOGUE, &shape.epilogue)?;
        if epilogue(product.epilogue).1[1] != 0 {
            // The auxiliary matrix has the result's layout.
            self.set(handle, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &n)?;
        }
        self.set_addresses(handle, product)?;
        // A row-major `[rows, columns]` is a column-major `[columns, rows]`.
        let layout = |kind, rows: u64, columns: u64| -> Result<_, CudaError> {
            let mut layout = std::ptr::null_mut();
            let stride = columns as i64;
            // SAFETY: `release` destroys it, with its plan.
            unsafe {
                call!(cublaslt::cublasLtMatrixLayoutCreate(
                    &raw mut layout,
                    kind,
                    columns,
                    rows,
                    stride
                ))
            }?;
            Ok(layout)
        };
        let operand = |x: &Operand, rows: u64, columns: u64| match x.transposed {
            true => layout(element(x), columns, rows),
            false => layout(element(x), rows, columns),
        };
        let layouts = [
            operand(&product.b, k, n)?,
            operand(&product.a, m, k)?,
            layout(number(product.dtype), m, n)?,
        ];
        Ok(Plan {
            product: handle,
            layouts,
            algorithm: self.algorithm(handle, layouts, shape)?,
        })
    }

    /// Sets the addresses, which differ between GEMMs of the same shape.
    fn set_addresses(
        &self,
        handle: cublasLtMatmulDesc_t,
        product: &Product,
    ) -> Result<(), CudaError> {
        let (_, [bias, matrix]) = epilogue(product.epilogue);
        for (attribute, address) in [
            (CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias),
            (CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, matrix),
        ] {
            if address != 0 {
                self.set(handle, attribute, &address)?;
            }
        }
        let factors = [
            (CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &product.b),
            (CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &product.a),
        ];
        for (attribute, operand) in factors {
            if let Element::Scaled(_, factor) = operand.element {
                self.set(handle, attribute, &factor)?;
            }
        }
        Ok(())
    }

    /// Workspace size and alignments that an algorithm may rely on, and partial sums in 32 bits:
    /// the default allows sums in the result's type, which on an H200 were two bf16 roundings off.
    fn preference(&self, alignments: [u32; 4]) -> Result<cublasLtMatmulPreference_t, CudaError> {
        let mut preference = std::ptr::null_mut();
        // SAFETY: the caller destroys it.
        unsafe {
            call!(cublaslt::cublasLtMatmulPreferenceCreate(
                &raw mut preference
            ))
        }?;
        let set = |attribute, value: *const c_void, size: usize| {
            // SAFETY: the attributes are a size and numbers of 32 bits, by the header.
            unsafe {
                call!(cublaslt::cublasLtMatmulPreferenceSetAttribute(
                    preference, attribute, value, size
                ))
            }
        };
        let workspace = WORKSPACE;
        set(
            CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            (&raw const workspace).cast(),
            size_of::<usize>(),
        )?;
        let schemes = cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        set(
            CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
            (&raw const schemes).cast(),
            size_of::<u32>(),
        )?;
        let attributes = [
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        for (attribute, bytes) in attributes.into_iter().zip(&alignments) {
            let value = std::ptr::from_ref(bytes).cast();
            set(attribute, value, size_of::<u32>())?;
        }
        Ok(preference)
    }

    fn algorithm(
        &self,
        product: cublasLtMatmulDesc_t,
        layouts: [cublasLtMatrixLayout_t; 3],
        shape: &Shape,
    ) -> Result<Option<cublasLtMatmulAlgo_t>, CudaError> {
        let [first, second, result, ..] = shape.alignments;
        let preference = self.preference([second, first, result, result])?;
        let mut best = MaybeUninit::<cublasLtMatmulHeuristicResult_t>::zeroed();
        let mut found = 0;
        let [a, b, c] = layouts;
        // SAFETY: room for the one result that is asked for.
        let asked = unsafe {
            call!(cublaslt::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                product,
                a,
                b,
                c,
                c,
                preference,
                1,
                best.as_mut_ptr(),
                &raw mut found,
            ))
        };
        // SAFETY: made above, used no more.
        unsafe { call!(cublaslt::cublasLtMatmulPreferenceDestroy(preference)) }?;
        let unsupported = cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as i32;
        // cuBLASLt reports "no algorithm" by its status, by an empty list, or by the state of the entry.
        match asked {
            Err(CudaError::Call { code, .. }) if code == unsupported => return Ok(None),
            other => other?,
        }
        let best = best.as_ptr();
        // SAFETY: written above where one was found, else zeros. The state is read as a number: it may be a code that is
        // newer than its type.
        let (algorithm, state) = unsafe {
            (
                (*best).algo,
                (&raw const (*best).state).cast::<i32>().read(),
            )
        };
        match state {
            _ if found == 0 => Ok(None),
            0 => Ok(Some(algorithm)),
            code if code == unsupported => Ok(None),
            code => Err(failed(code, "an algorithm that does not run", shape)),
        }
    }

    fn set<T>(
        &self,
        product: cublasLtMatmulDesc_t,
        attribute: cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> Result<(), CudaError> {
        let pointer = std::ptr::from_ref(value).cast();
        // SAFETY: the attribute has the type of the value, by the header.
        unsafe {
            call!(cublaslt::cublasLtMatmulDescSetAttribute(
                product,
                attribute,
                pointer,
                size_of::<T>()
            ))
        }
    }

    /// Destroys all plans and the handle.
    ///
    /// # Safety
    /// No queued work may still use it, and it must not be used afterwards.
    pub(super) unsafe fn release(&self) {
        for plan in self.plans.borrow_mut().drain().map(|(_, plan)| plan) {
            // SAFETY: made here, used no more; a failure here cannot be handled.
            unsafe {
                let _ = call!(cublaslt::cublasLtMatmulDescDestroy(plan.product));
                for layout in plan.layouts {
                    let _ = call!(cublaslt::cublasLtMatrixLayoutDestroy(layout));
                }
            }
        }
        // SAFETY: as above.
        unsafe {
            let _ = call!(cublaslt::cublasLtDestroy(self.handle));
            let _ = call!(driver::cuMemFree_v2(self.workspace));
        }
    }
}
