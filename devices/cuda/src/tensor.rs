//! Tensors in device memory.

use std::rc::Rc;

use catalog::DType;

use super::error::CudaError;
use super::launcher::{Address, AttentionBy, Compute, Launcher, Located};
use super::memory::{Buffer, Memory};

/// A device: its stream of work and its memory.
#[derive(Clone)]
pub struct Device {
    /// Runs kernels, copies and GEMMs.
    pub launcher: Rc<dyn Launcher>,
    /// Allocates memory.
    pub memory: Rc<Memory>,
    /// How 32-bit GEMM operands are rounded.
    pub compute: Compute,
    /// What runs core attention.
    pub attention_by: AttentionBy,
}

/// A dense row-major tensor; several may share a buffer.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Local shape.
    pub shape: Vec<usize>,
    /// Element type: 32 bits, bf16, or bytes.
    pub dtype: DType,
    buffer: Rc<Buffer>,
    /// Offset in bytes from the start of the buffer.
    start: u64,
}

impl Device {
    /// A device that runs its work through `launcher`.
    #[must_use]
    pub fn new(launcher: Rc<dyn Launcher>) -> Self {
        let memory = Memory::new(Rc::clone(&launcher));
        Self {
            launcher,
            memory,
            compute: Compute::Whole,
            attention_by: AttentionBy::Library,
        }
    }

    /// The same device, with 32-bit GEMM operands rounded as `compute` says.
    #[must_use]
    pub fn with_compute(self, compute: Compute) -> Self {
        Self { compute, ..self }
    }

    /// The same device, with core attention run as `attention_by` says.
    #[must_use]
    pub fn with_attention(self, attention_by: AttentionBy) -> Self {
        Self {
            attention_by,
            ..self
        }
    }

    /// Allocates an unwritten tensor.
    ///
    /// # Errors
    /// When the device's memory is full.
    pub fn tensor(&self, shape: Vec<usize>, dtype: DType) -> Result<Tensor, CudaError> {
        let elements = shape.iter().product::<usize>() as u64;
        let buffer = self.memory.allocate(elements * dtype.size())?;
        Ok(Tensor {
            shape,
            dtype,
            buffer: Rc::new(buffer),
            start: 0,
        })
    }

    /// A tensor of zeros.
    ///
    /// # Errors
    /// When the device's memory is full.
    pub fn zeros(&self, shape: Vec<usize>, dtype: DType) -> Result<Tensor, CudaError> {
        let tensor = self.tensor(shape, dtype)?;
        self.launcher.fill(tensor.address(), 0, tensor.bytes())?;
        Ok(tensor)
    }

    /// Copies a tensor from the host.
    ///
    /// # Errors
    /// When the device's memory is full.
    pub fn upload(&self, tensor: &cpu_device::Tensor) -> Result<Tensor, CudaError> {
        let here = self.tensor(tensor.shape.clone(), tensor.dtype())?;
        self.launcher.write(here.address(), &tensor.pack())?;
        Ok(here)
    }

    /// Overwrites a 32-bit tensor.
    ///
    /// # Errors
    /// When the device fails.
    pub fn write(&self, to: &Tensor, values: &[f32]) -> Result<(), CudaError> {
        debug_assert_eq!((to.len(), to.dtype), (values.len(), DType::F32));
        self.launcher
            .write(to.address(), bytemuck::cast_slice(values))
    }

    /// Copies a list of indices from the host.
    ///
    /// # Errors
    /// When the device's memory is full.
    pub fn indices(&self, indices: &[u32]) -> Result<Buffer, CudaError> {
        let bytes: &[u8] = bytemuck::cast_slice(indices);
        let buffer = self.memory.allocate(bytes.len() as u64)?;
        self.launcher.write(buffer.address, bytes)?;
        Ok(buffer)
    }

    /// Copies a tensor to the host.
    ///
    /// # Errors
    /// When earlier work failed.
    pub fn download(&self, tensor: &Tensor) -> Result<cpu_device::Tensor, CudaError> {
        let mut bytes = vec![0; tensor.bytes() as usize];
        self.launcher.read(tensor.address(), &mut bytes)?;
        Ok(cpu_device::Tensor::unpack(
            tensor.shape.clone(),
            &bytes,
            tensor.dtype,
        ))
    }
}

impl Tensor {
    /// Address of the first element.
    #[must_use]
    pub fn address(&self) -> Address {
        self.buffer.address + self.start
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of its elements.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.len() as u64 * self.dtype.size()
    }

    /// Length of the last dim.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Its shape with another last dim.
    ///
    /// # Panics
    /// When it has no dims.
    #[must_use]
    pub fn with_columns(&self, columns: usize) -> Vec<usize> {
        let mut shape = self.shape.clone();
        *shape.last_mut().expect("a tensor of rows has a last dim") = columns;
        shape
    }

    /// Product of all dims but the last.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }

    /// Whether its element type is bf16.
    #[must_use]
    pub fn is_bf16(&self) -> bool {
        self.dtype == DType::Bf16
    }

    /// The buffer that it shares with other tensors.
    pub(super) fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Whether both tensors share a buffer.
    #[must_use]
    pub fn shares_memory_with(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.buffer, &other.buffer)
    }

    /// A view of the elements from `first` on.
    #[must_use]
    pub fn part(&self, first: usize, shape: Vec<usize>) -> Self {
        debug_assert!(first + shape.iter().product::<usize>() <= self.len());
        Self {
            shape,
            start: self.start + first as u64 * self.dtype.size(),
            ..self.clone()
        }
    }

    /// A view `times` as long from the same first element; `None` if the buffer is too small.
    pub(super) fn extended(&self, times: usize) -> Option<Self> {
        let end = self.start + times as u64 * self.bytes();
        (end <= self.buffer.bytes).then(|| Self {
            shape: vec![times * self.len()],
            ..self.clone()
        })
    }

    /// A view of the same elements with another shape.
    #[must_use]
    pub fn reshaped(&self, shape: Vec<usize>) -> Self {
        debug_assert_eq!(shape.iter().product::<usize>(), self.len());
        Self {
            shape,
            ..self.clone()
        }
    }
}

impl Located for Tensor {
    fn located(&self) -> Address {
        self.address()
    }
}
