//! A cuDNN graph of operators, and the execution plan that cuDNN makes of it.

#![allow(unsafe_code, reason = "functions of cuDNN")]

use std::ffi::c_void;

use crate::error::CudaError;
use crate::library::Name;
use crate::sys::call;
use crate::sys::cudnn::{
    cudnnBackendAttributeName_t::{self, *},
    cudnnBackendAttributeType_t::{self, *},
    cudnnBackendDescriptor_t,
    cudnnBackendDescriptorType_t::{self, *},
    cudnnBackendHeurMode_t,
    cudnnDataType_t::{self, *},
    cudnnHandle_t,
    cudnnPointwiseMode_t::{self, *},
    cudnnReduceTensorOp_t,
};

/// Alignment in bytes of every tensor in memory.
pub(super) const ALIGNMENT: i64 = 16;
/// How many engine configurations proposed by cuDNN's heuristics are tried.
const CHOICES: usize = 8;

/// A C type of attributes, with cuDNN's name of it.
pub(super) trait Attribute {
    const TYPE: cudnnBackendAttributeType_t;
}

macro_rules! attributes {
    ($($kind:ty: $name:ident),* $(,)?) => {$(
        impl Attribute for $kind {
            const TYPE: cudnnBackendAttributeType_t = $name;
        }
    )*};
}
attributes! {
    bool: CUDNN_TYPE_BOOLEAN,
    u8: CUDNN_TYPE_CHAR,
    i64: CUDNN_TYPE_INT64,
    *const c_void: CUDNN_TYPE_VOID_PTR,
    cudnnHandle_t: CUDNN_TYPE_HANDLE,
    cudnnBackendDescriptor_t: CUDNN_TYPE_BACKEND_DESCRIPTOR,
    cudnnBackendHeurMode_t: CUDNN_TYPE_HEUR_MODE,
    cudnnDataType_t: CUDNN_TYPE_DATA_TYPE,
    cudnnPointwiseMode_t: CUDNN_TYPE_POINTWISE_MODE,
    cudnnReduceTensorOp_t: CUDNN_TYPE_REDUCTION_OPERATOR_TYPE,
}

/// A cuDNN backend descriptor: an object that the library knows by a handle.
pub(super) struct Descriptor {
    handle: cudnnBackendDescriptor_t,
}

impl Descriptor {
    pub(super) fn new(kind: cudnnBackendDescriptorType_t) -> Result<Self, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: destroyed when dropped.
        unsafe { call!(cudnn::cudnnBackendCreateDescriptor(kind, &raw mut handle)) }?;
        Ok(Self { handle })
    }

    /// Sets one attribute.
    pub(super) fn with<T: Attribute>(
        self,
        name: cudnnBackendAttributeName_t,
        values: &[T],
    ) -> Result<Self, CudaError> {
        let (of, count) = (T::TYPE, values.len() as i64);
        // SAFETY: `values` has `count` values of the attribute's type.
        unsafe {
            let values = values.as_ptr().cast();
            call!(cudnn::cudnnBackendSetAttribute(
                self.handle,
                name,
                of,
                count,
                values
            ))
        }?;
        Ok(self)
    }

    /// Sets an attribute to other descriptors.
    pub(super) fn of(
        self,
        name: cudnnBackendAttributeName_t,
        others: &[&Self],
    ) -> Result<Self, CudaError> {
        let handles: Vec<cudnnBackendDescriptor_t> =
            others.iter().map(|other| other.handle).collect();
        self.with(name, &handles)
    }

    /// Finalizes the descriptor: the library checks it, and no attribute can be set afterwards.
    pub(super) fn finish(self) -> Result<Self, CudaError> {
        // SAFETY: made above.
        unsafe { call!(cudnn::cudnnBackendFinalize(self.handle)) }?;
        Ok(self)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made by this library, used no more. A failure here cannot be handled.
        let _ = unsafe { call!(cudnn::cudnnBackendDestroyDescriptor(self.handle)) };
    }
}

/// Where a tensor is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In device memory, at an address that each call supplies.
    Memory,
    /// Virtual: it exists only within a kernel.
    Within,
    /// A scalar that each call supplies by value.
    Number,
}

/// Sizes and strides of a tensor `[batch, heads, rows, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) sizes: [i64; 4],
    pub(super) strides: [i64; 4],
}

impl Shape {
    /// Contiguous in the order of its dims.
    pub(super) fn packed(sizes: [i64; 4]) -> Self {
        let [_, heads, rows, columns] = sizes;
        Self {
            sizes,
            strides: [heads * rows * columns, rows * columns, columns, 1],
        }
    }

    /// With memory laid out as `[batch, rows, heads, columns]`.
    pub(super) fn by_rows(sizes: [i64; 4]) -> Self {
        let [_, heads, rows, columns] = sizes;
        Self {
            sizes,
            strides: [rows * heads * columns, columns, heads * columns, 1],
        }
    }

    /// The transpose: the same memory with rows and columns exchanged.
    pub(super) fn transposed(self) -> Self {
        let swap = |[a, b, c, d]: [i64; 4]| [a, b, d, c];
        Self {
            sizes: swap(self.sizes),
            strides: swap(self.strides),
        }
    }
}

/// A tensor of a graph; its number identifies it in calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Id(pub(super) i64);

/// Operators and tensors added so far.
#[derive(Default)]
pub(super) struct Graph {
    tensors: Vec<Descriptor>,
    /// cuDNN descriptors of the operators' parameters, to which the operators refer.
    kinds: Vec<Descriptor>,
    operators: Vec<Descriptor>,
}

/// The device that a plan is made for.
pub(super) enum Target<'t> {
    /// The device of a cuDNN handle.
    Device(cudnnHandle_t),
    /// A device described in cuDNN's own JSON, which need not be present.
    Described(&'t Descriptor),
}

impl Graph {
    pub(super) fn tensor(
        &mut self,
        element: cudnnDataType_t,
        shape: Shape,
        place: Place,
    ) -> Result<Id, CudaError> {
        let id = self.tensors.len() as i64 + 1;
        let tensor = Descriptor::new(CUDNN_BACKEND_TENSOR_DESCRIPTOR)?
            .with(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[ALIGNMENT])?
            .with(CUDNN_ATTR_TENSOR_DATA_TYPE, &[element])?
            .with(CUDNN_ATTR_TENSOR_DIMENSIONS, &shape.sizes)?
            .with(CUDNN_ATTR_TENSOR_STRIDES, &shape.strides)?
            .with(CUDNN_ATTR_TENSOR_UNIQUE_ID, &[id])?
            .with(CUDNN_ATTR_TENSOR_IS_VIRTUAL, &[place == Place::Within])?
            .with(CUDNN_ATTR_TENSOR_IS_BY_VALUE, &[place == Place::Number])?
            .finish()?;
        self.tensors.push(tensor);
        Ok(Id(id))
    }

    /// Adds virtual tensors in 32 bits, which are never written to memory.
    pub(super) fn within<const N: usize>(&mut self, sizes: [i64; 4]) -> Result<[Id; N], CudaError> {
        let mut ids = [Id(0); N];
        for id in &mut ids {
            *id = self.tensor(CUDNN_DATA_FLOAT, Shape::packed(sizes), Place::Within)?;
        }
        Ok(ids)
    }

    /// Adds a scalar that each call supplies.
    pub(super) fn number(&mut self, element: cudnnDataType_t) -> Result<Id, CudaError> {
        self.tensor(element, Shape::packed([1; 4]), Place::Number)
    }

    fn at(&self, Id(id): Id) -> &Descriptor {
        &self.tensors[id as usize - 1]
    }

    fn operator(
        &mut self,
        kind: cudnnBackendDescriptorType_t,
        says: &[(cudnnBackendAttributeName_t, Id)],
        what: Option<(cudnnBackendAttributeName_t, Descriptor)>,
    ) -> Result<(), CudaError> {
        let mut operator = Descriptor::new(kind)?;
        for &(name, tensor) in says {
            operator = operator.of(name, &[self.at(tensor)])?;
        }
        if let Some((name, what)) = what {
            operator = operator.of(name, &[&what])?;
            self.kinds.push(what);
        }
        self.operators.push(operator.finish()?);
        Ok(())
    }

    /// `c = a · b`.
    pub(super) fn product(&mut self, a: Id, b: Id, c: Id) -> Result<(), CudaError> {
        let what = Descriptor::new(CUDNN_BACKEND_MATMUL_DESCRIPTOR)?
            .with(CUDNN_ATTR_MATMUL_COMP_TYPE, &[CUDNN_DATA_FLOAT])?
            .finish()?;
        self.operator(
            CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR,
            &[
                (CUDNN_ATTR_OPERATION_MATMUL_ADESC, a),
                (CUDNN_ATTR_OPERATION_MATMUL_BDESC, b),
                (CUDNN_ATTR_OPERATION_MATMUL_CDESC, c),
            ],
            Some((CUDNN_ATTR_OPERATION_MATMUL_DESC, what)),
        )
    }

    fn pointwise_kind(
        &self,
        mode: cudnnPointwiseMode_t,
        element: cudnnDataType_t,
        axis: Option<i64>,
    ) -> Result<Descriptor, CudaError> {
        let what = Descriptor::new(CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?
            .with(CUDNN_ATTR_POINTWISE_MODE, &[mode])?
            .with(CUDNN_ATTR_POINTWISE_MATH_PREC, &[element])?;
        match axis {
            Some(axis) => what.with(CUDNN_ATTR_POINTWISE_AXIS, &[axis])?.finish(),
            None => what.finish(),
        }
    }

    /// `y = mode(x)`, or `mode(x, b)`.
    pub(super) fn pointwise(
        &mut self,
        mode: cudnnPointwiseMode_t,
        x: Id,
        b: Option<Id>,
        y: Id,
    ) -> Result<(), CudaError> {
        let element = match mode {
            CUDNN_POINTWISE_CMP_GT | CUDNN_POINTWISE_CMP_GE => CUDNN_DATA_BOOLEAN,
            _ => CUDNN_DATA_FLOAT,
        };
        let what = self.pointwise_kind(mode, element, None)?;
        self.elementwise(what, [Some(x), b, Some(y), None])
    }

    /// `y` is the index of every element of `x` along an axis.
    pub(super) fn index(&mut self, x: Id, axis: i64, y: Id) -> Result<(), CudaError> {
        let what = self.pointwise_kind(CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_FLOAT, Some(axis))?;
        self.elementwise(what, [Some(x), None, Some(y), None])
    }

    /// `y = x` where `condition` holds, else `b`.
    pub(super) fn select(&mut self, x: Id, b: Id, condition: Id, y: Id) -> Result<(), CudaError> {
        let what = self.pointwise_kind(CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, None)?;
        self.elementwise(what, [Some(x), Some(b), Some(y), Some(condition)])
    }

    /// Adds a pointwise operator with operands `x` and `b`, its result and a condition.
    fn elementwise(
        &mut self,
        what: Descriptor,
        operands: [Option<Id>; 4],
    ) -> Result<(), CudaError> {
        let names = [
            CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
            CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
            CUDNN_ATTR_OPERATION_POINTWISE_YDESC,
            CUDNN_ATTR_OPERATION_POINTWISE_TDESC,
        ];
        let says = names.into_iter().zip(operands);
        let says: Vec<_> = says.filter_map(|(name, id)| Some((name, id?))).collect();
        self.operator(
            CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR,
            &says,
            Some((CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, what)),
        )
    }

    /// Reduces `x` to `y` along the axes where `y` is smaller: of size one, or with fewer heads.
    pub(super) fn reduce(
        &mut self,
        how: cudnnReduceTensorOp_t,
        x: Id,
        y: Id,
    ) -> Result<(), CudaError> {
        let what = Descriptor::new(CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?
            .with(CUDNN_ATTR_REDUCTION_OPERATOR, &[how])?
            .with(CUDNN_ATTR_REDUCTION_COMP_TYPE, &[CUDNN_DATA_FLOAT])?
            .finish()?;
        let says = [
            (CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x),
            (CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y),
        ];
        self.operator(
            CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR,
            &says,
            Some((CUDNN_ATTR_OPERATION_REDUCTION_DESC, what)),
        )
    }

    /// Views the same elements in another shape.
    pub(super) fn reshape(&mut self, x: Id, y: Id) -> Result<(), CudaError> {
        let says = [
            (CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x),
            (CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y),
        ];
        self.operator(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, &says, None)
    }

    /// Makes a plan of the first engine configuration, as heuristics rank them, that cuDNN accepts.
    ///
    /// # Errors
    /// When none is accepted: the error of the last one.
    pub(super) fn plan(self, target: &Target<'_>) -> Result<Plan, CudaError> {
        let mut graph = Descriptor::new(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
        if let Target::Device(handle) = target {
            graph = graph.with(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, &[*handle])?;
        }
        let all: Vec<&Descriptor> = self.operators.iter().collect();
        let graph = graph.of(CUDNN_ATTR_OPERATIONGRAPH_OPS, &all)?.finish()?;
        let mut heuristics = Descriptor::new(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?
            .of(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[&graph])?
            .with(
                CUDNN_ATTR_ENGINEHEUR_MODE,
                &[cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A],
            )?;
        if let Target::Described(properties) = target {
            heuristics = heuristics.of(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, &[properties])?;
        }
        let heuristics = heuristics.finish()?;
        let mut last = none();
        for engine in self.engines(&heuristics)? {
            match self.ready(&engine, target) {
                Ok(plan) => return Ok(plan),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn engines(&self, heuristics: &Descriptor) -> Result<Vec<Descriptor>, CudaError> {
        let engines = (0..CHOICES).map(|_| Descriptor::new(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR));
        let mut engines: Vec<Descriptor> = engines.collect::<Result<_, _>>()?;
        let mut handles: Vec<_> = engines.iter().map(|e| e.handle).collect();
        let mut found = 0;
        // SAFETY: `handles` has room for `CHOICES` descriptors, all of that kind.
        unsafe {
            call!(cudnn::cudnnBackendGetAttribute(
                heuristics.handle,
                CUDNN_ATTR_ENGINEHEUR_RESULTS,
                CUDNN_TYPE_BACKEND_DESCRIPTOR,
                CHOICES as i64,
                &raw mut found,
                handles.as_mut_ptr().cast(),
            ))
        }?;
        engines.truncate(found.clamp(0, CHOICES as i64) as usize);
        Ok(engines)
    }

    fn ready(&self, engine: &Descriptor, target: &Target<'_>) -> Result<Plan, CudaError> {
        let plan = Descriptor::new(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
        let plan = match target {
            Target::Device(handle) => plan.with(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, &[*handle])?,
            Target::Described(properties) => {
                plan.of(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, &[properties])?
            }
        };
        let plan = plan
            .of(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[engine])?
            .finish()?;
        let (mut workspace, mut found) = (0i64, 0);
        // SAFETY: writes one number of 64 bits.
        unsafe {
            call!(cudnn::cudnnBackendGetAttribute(
                plan.handle,
                CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                CUDNN_TYPE_INT64,
                1,
                &raw mut found,
                (&raw mut workspace).cast(),
            ))
        }?;
        Ok(Plan {
            descriptor: plan,
            workspace: workspace.max(0) as u64,
        })
    }
}

fn none() -> CudaError {
    CudaError::Call {
        library: Name::Cudnn,
        call: "cudnnBackendGetAttribute",
        code: 3000,
        reason: "no engine for this graph".to_owned(),
    }
}

/// An execution plan, ready to run.
pub(super) struct Plan {
    descriptor: Descriptor,
    /// Bytes of workspace that a run needs beside its tensors.
    pub(super) workspace: u64,
}

impl Plan {
    /// Runs the plan; every tensor in memory and every scalar is given with a pointer.
    ///
    /// # Errors
    /// When the library refuses it.
    ///
    /// # Safety
    /// Each pointer must be valid for its tensor as the graph describes it, and the workspace as large as the plan asks
    /// for.
    pub(super) unsafe fn run(
        &self,
        handle: cudnnHandle_t,
        operands: &[(Id, *const c_void)],
        workspace: *const c_void,
    ) -> Result<(), CudaError> {
        let ids: Vec<i64> = operands.iter().map(|&(Id(id), _)| id).collect();
        let pointers: Vec<*const c_void> = operands.iter().map(|&(_, pointer)| pointer).collect();
        let pack = Descriptor::new(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?
            .with(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, &pointers)?
            .with(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &ids)?
            .with(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, &[workspace])?
            .finish()?;
        // SAFETY: passed on to the caller.
        unsafe {
            call!(cudnn::cudnnBackendExecute(
                handle,
                self.descriptor.handle,
                pack.handle
            ))
        }
    }
}
