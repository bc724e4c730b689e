//! A graph of operators, as cuDNN is told of one, and the plan that it makes of it.

#![allow(unsafe_code, reason = "functions of cuDNN")]

use std::ffi::{c_int, c_void};
use std::rc::Rc;

use crate::error::CudaError;
use crate::library::Name;
use crate::sys::cudnn::{
    BEST, Cudnn, Element, Handle, Kind, Pointwise, Reduction, Type, attribute,
};

/// Bytes that every tensor in memory begins at a multiple of.
pub(super) const ALIGNMENT: i64 = 16;
/// How many of the library's choices are tried.
const CHOICES: usize = 8;

/// Something the library knows of by a handle.
pub(super) struct Descriptor {
    library: Rc<Cudnn>,
    handle: Handle,
}

impl Descriptor {
    pub(super) fn new(library: &Rc<Cudnn>, kind: Kind) -> Result<Self, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: destroyed when dropped.
        unsafe { library.create_descriptor(kind as c_int, &raw mut handle) }?;
        Ok(Self {
            library: Rc::clone(library),
            handle,
        })
    }

    /// Says one thing of it; `T` is what the type says in C.
    pub(super) fn with<T>(self, name: c_int, of: Type, values: &[T]) -> Result<Self, CudaError> {
        let count = values.len() as i64;
        // SAFETY: so many values of the attribute's type.
        unsafe {
            let values = values.as_ptr().cast();
            self.library
                .set(self.handle, name, of as c_int, count, values)
        }?;
        Ok(self)
    }

    /// Refers to others.
    pub(super) fn of(self, name: c_int, others: &[&Self]) -> Result<Self, CudaError> {
        let handles: Vec<Handle> = others.iter().map(|other| other.handle).collect();
        self.with(name, Type::Descriptor, &handles)
    }

    /// Has the library check it; nothing is said of it after.
    pub(super) fn finish(self) -> Result<Self, CudaError> {
        // SAFETY: made above.
        unsafe { self.library.finish(self.handle) }?;
        Ok(self)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made by this library, used no more. Nothing can be done where it fails.
        let _ = unsafe { self.library.destroy_descriptor(self.handle) };
    }
}

/// Where a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In memory that a call names.
    Memory,
    /// Within a kernel.
    Within,
    /// A number that a call gives.
    Number,
}

/// Sizes and strides of a tensor of batch, heads, rows and columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) sizes: [i64; 4],
    pub(super) strides: [i64; 4],
}

impl Shape {
    /// One after the other.
    pub(super) fn packed(sizes: [i64; 4]) -> Self {
        let [_, heads, rows, columns] = sizes;
        Self {
            sizes,
            strides: [heads * rows * columns, rows * columns, columns, 1],
        }
    }

    /// Heads beside each other in the rows of memory.
    pub(super) fn by_rows(sizes: [i64; 4]) -> Self {
        let [_, heads, rows, columns] = sizes;
        Self {
            sizes,
            strides: [rows * heads * columns, columns, heads * columns, 1],
        }
    }

    /// The same numbers, rows as columns.
    pub(super) fn transposed(self) -> Self {
        let swap = |[a, b, c, d]: [i64; 4]| [a, b, d, c];
        Self {
            sizes: swap(self.sizes),
            strides: swap(self.strides),
        }
    }
}

/// A tensor of a graph; its number names it in calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Id(pub(super) i64);

/// Operators and tensors said so far.
pub(super) struct Graph {
    library: Rc<Cudnn>,
    tensors: Vec<Descriptor>,
    /// What operators are, and the operators.
    kinds: Vec<Descriptor>,
    operators: Vec<Descriptor>,
}

/// Where a plan runs.
pub(super) enum Target<'t> {
    /// On the device of a handle.
    Device(Handle),
    /// On a device described by the library's own JSON.
    Described(&'t Descriptor),
}

impl Graph {
    pub(super) fn new(library: &Rc<Cudnn>) -> Self {
        Self {
            library: Rc::clone(library),
            tensors: Vec::new(),
            kinds: Vec::new(),
            operators: Vec::new(),
        }
    }

    fn describe(&self, kind: Kind) -> Result<Descriptor, CudaError> {
        Descriptor::new(&self.library, kind)
    }

    pub(super) fn tensor(
        &mut self,
        element: Element,
        shape: Shape,
        place: Place,
    ) -> Result<Id, CudaError> {
        let id = self.tensors.len() as i64 + 1;
        let [alignment, kind, sizes, strides, unique, within, number] = attribute::TENSOR;
        let tensor = self
            .describe(Kind::Tensor)?
            .with(alignment, Type::Int64, &[ALIGNMENT])?
            .with(kind, Type::Element, &[element as c_int])?
            .with(sizes, Type::Int64, &shape.sizes)?
            .with(strides, Type::Int64, &shape.strides)?
            .with(unique, Type::Int64, &[id])?
            .with(within, Type::Boolean, &[place == Place::Within])?
            .with(number, Type::Boolean, &[place == Place::Number])?
            .finish()?;
        self.tensors.push(tensor);
        Ok(Id(id))
    }

    /// A tensor in 32 bits that no memory holds.
    pub(super) fn within(&mut self, sizes: [i64; 4]) -> Result<Id, CudaError> {
        self.tensor(Element::F32, Shape::packed(sizes), Place::Within)
    }

    /// A number that calls give.
    pub(super) fn number(&mut self, element: Element) -> Result<Id, CudaError> {
        self.tensor(element, Shape::packed([1; 4]), Place::Number)
    }

    fn at(&self, Id(id): Id) -> &Descriptor {
        &self.tensors[id as usize - 1]
    }

    fn operator(
        &mut self,
        kind: Kind,
        says: &[(c_int, Id)],
        what: Option<(c_int, Descriptor)>,
    ) -> Result<(), CudaError> {
        let mut operator = self.describe(kind)?;
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
        let what = self
            .describe(Kind::Product)?
            .with(attribute::PRODUCT, Type::Element, &[Element::F32 as c_int])?
            .finish()?;
        let [first, second, result, of] = attribute::PRODUCT_OPERATION;
        self.operator(
            Kind::ProductOperation,
            &[(first, a), (second, b), (result, c)],
            Some((of, what)),
        )
    }

    fn pointwise_kind(
        &self,
        mode: Pointwise,
        element: Element,
        axis: Option<i64>,
    ) -> Result<Descriptor, CudaError> {
        let [name, precision, along] = attribute::POINTWISE;
        let what = self
            .describe(Kind::Pointwise)?
            .with(name, Type::Pointwise, &[mode as c_int])?
            .with(precision, Type::Element, &[element as c_int])?;
        match axis {
            Some(axis) => what.with(along, Type::Int64, &[axis])?.finish(),
            None => what.finish(),
        }
    }

    /// `y = mode(x)`, or `mode(x, b)`.
    pub(super) fn pointwise(
        &mut self,
        mode: Pointwise,
        x: Id,
        b: Option<Id>,
        y: Id,
    ) -> Result<(), CudaError> {
        let element = match mode {
            Pointwise::Above | Pointwise::NotBelow => Element::Boolean,
            _ => Element::F32,
        };
        let what = self.pointwise_kind(mode, element, None)?;
        let [of, first, second, result, _] = attribute::POINTWISE_OPERATION;
        let says = [(first, x), (result, y)];
        let second = b.map(|b| (second, b));
        let says: Vec<_> = says.into_iter().chain(second).collect();
        self.operator(Kind::PointwiseOperation, &says, Some((of, what)))
    }

    /// The index of every element of `x` along an axis.
    pub(super) fn index(&mut self, x: Id, axis: i64, y: Id) -> Result<(), CudaError> {
        let what = self.pointwise_kind(Pointwise::Index, Element::F32, Some(axis))?;
        let [of, first, _, result, _] = attribute::POINTWISE_OPERATION;
        let says = [(first, x), (result, y)];
        self.operator(Kind::PointwiseOperation, &says, Some((of, what)))
    }

    /// `y = x` where `condition` holds, else `b`.
    pub(super) fn select(&mut self, x: Id, b: Id, condition: Id, y: Id) -> Result<(), CudaError> {
        let what = self.pointwise_kind(Pointwise::Select, Element::F32, None)?;
        let [of, first, second, result, third] = attribute::POINTWISE_OPERATION;
        let says = [(first, x), (second, b), (third, condition), (result, y)];
        self.operator(Kind::PointwiseOperation, &says, Some((of, what)))
    }

    /// `x` reduced along the axes in which `y` has one element, or fewer heads.
    pub(super) fn reduce(&mut self, how: Reduction, x: Id, y: Id) -> Result<(), CudaError> {
        let [name, precision] = attribute::REDUCTION;
        let what = self
            .describe(Kind::Reduction)?
            .with(name, Type::Reduction, &[how as c_int])?
            .with(precision, Type::Element, &[Element::F32 as c_int])?
            .finish()?;
        let [from, to, of] = attribute::REDUCTION_OPERATION;
        let says = [(from, x), (to, y)];
        self.operator(Kind::ReductionOperation, &says, Some((of, what)))
    }

    /// The same numbers as another shape has them.
    pub(super) fn reshape(&mut self, x: Id, y: Id) -> Result<(), CudaError> {
        let [from, to] = attribute::RESHAPE_OPERATION;
        let says = [(from, x), (to, y)];
        self.operator(Kind::ReshapeOperation, &says, None)
    }

    /// The first of the library's choices that can be made ready.
    ///
    /// # Errors
    /// When it has none: what it says of the last.
    pub(super) fn plan(self, target: &Target<'_>) -> Result<Plan, CudaError> {
        let [device, operators] = attribute::GRAPH;
        let mut graph = self.describe(Kind::Graph)?;
        if let Target::Device(handle) = target {
            graph = graph.with(device, Type::Handle, &[*handle])?;
        }
        let all: Vec<&Descriptor> = self.operators.iter().collect();
        let graph = graph.of(operators, &all)?.finish()?;
        let [mode, of, _, described] = attribute::HEURISTICS;
        let mut heuristics = self.describe(Kind::Heuristics)?.of(of, &[&graph])?.with(
            mode,
            Type::Heuristics,
            &[BEST],
        )?;
        if let Target::Described(properties) = target {
            heuristics = heuristics.of(described, &[properties])?;
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
        let engines = (0..CHOICES).map(|_| self.describe(Kind::Engine));
        let mut engines: Vec<Descriptor> = engines.collect::<Result<_, _>>()?;
        let mut handles: Vec<Handle> = engines.iter().map(|e| e.handle).collect();
        let mut found = 0;
        let [_, _, results, _] = attribute::HEURISTICS;
        // SAFETY: room for as many descriptors as are asked for, all of that kind.
        unsafe {
            self.library.get(
                heuristics.handle,
                results,
                Type::Descriptor as c_int,
                CHOICES as i64,
                &raw mut found,
                handles.as_mut_ptr().cast(),
            )
        }?;
        engines.truncate(found.clamp(0, CHOICES as i64) as usize);
        Ok(engines)
    }

    fn ready(&self, engine: &Descriptor, target: &Target<'_>) -> Result<Plan, CudaError> {
        let [device, choice, size, described] = attribute::PLAN;
        let plan = self.describe(Kind::Plan)?;
        let plan = match target {
            Target::Device(handle) => plan.with(device, Type::Handle, &[*handle])?,
            Target::Described(properties) => plan.of(described, &[properties])?,
        };
        let plan = plan.of(choice, &[engine])?.finish()?;
        let (mut workspace, mut found) = (0i64, 0);
        // SAFETY: writes one number of 64 bits.
        unsafe {
            self.library.get(
                plan.handle,
                size,
                Type::Int64 as c_int,
                1,
                &raw mut found,
                (&raw mut workspace).cast(),
            )
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

/// A graph made ready to run.
pub(super) struct Plan {
    descriptor: Descriptor,
    /// Bytes that it asks for beside its tensors.
    pub(super) workspace: u64,
}

impl Plan {
    /// Runs it: every tensor in memory and every number with its pointer.
    ///
    /// # Errors
    /// When the library refuses it.
    ///
    /// # Safety
    /// Pointers are of what the graph says, the workspace of as many bytes as were asked for.
    pub(super) unsafe fn run(
        &self,
        handle: Handle,
        operands: &[(Id, *const c_void)],
        workspace: *const c_void,
    ) -> Result<(), CudaError> {
        let ids: Vec<i64> = operands.iter().map(|&(Id(id), _)| id).collect();
        let pointers: Vec<*const c_void> = operands.iter().map(|&(_, pointer)| pointer).collect();
        let [unique, addresses, room] = attribute::PACK;
        let library = &self.descriptor.library;
        let pack = Descriptor::new(library, Kind::Pack)?
            .with(addresses, Type::Pointer, &pointers)?
            .with(unique, Type::Int64, &ids)?
            .with(room, Type::Pointer, &[workspace])?
            .finish()?;
        // SAFETY: passed on to the caller.
        unsafe { library.execute(handle, self.descriptor.handle, pack.handle) }
    }
}
