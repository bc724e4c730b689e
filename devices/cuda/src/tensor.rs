//! Tensors in a device's memory.

use std::rc::Rc;

use catalog::DType;

use super::error::CudaError;
use super::launcher::{Address, AttentionBy, Compute, Launcher};
use super::memory::{Buffer, Memory};

/// A device: its queue of work and its memory.
#[derive(Clone)]
pub struct Device {
    /// Runs kernels.
    pub launcher: Rc<dyn Launcher>,
    /// Gives memory.
    pub memory: Rc<Memory>,
    /// How it multiplies matrices in 32 bits.
    pub compute: Compute,
    /// Who runs core attention.
    pub attention_by: AttentionBy,
}

/// A dense row-major tensor; several may share memory.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Local shape.
    pub shape: Vec<usize>,
    /// Element type: 32 bits, bf16, or bytes.
    pub dtype: DType,
    buffer: Rc<Buffer>,
    /// Byte of the buffer at which it begins.
    start: u64,
}

impl Device {
    /// A device that runs its work by `launcher`.
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

    /// The same, with products of matrices in 32 bits as `compute` says.
    #[must_use]
    pub fn with_compute(self, compute: Compute) -> Self {
        Self { compute, ..self }
    }

    /// The same, with core attention as `attention_by` says.
    #[must_use]
    pub fn with_attention(self, attention_by: AttentionBy) -> Self {
        Self {
            attention_by,
            ..self
        }
    }

    /// A tensor that nothing has written.
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

    /// A tensor of the host's.
    ///
    /// # Errors
    /// When the device's memory is full.
    pub fn upload(&self, tensor: &cpu_device::Tensor) -> Result<Tensor, CudaError> {
        let here = self.tensor(tensor.shape.clone(), tensor.dtype())?;
        self.launcher.write(here.address(), &tensor.pack())?;
        Ok(here)
    }

    /// Overwrites a tensor by elements in 32 bits.
    ///
    /// # Errors
    /// When the device fails.
    pub fn write(&self, to: &Tensor, values: &[f32]) -> Result<(), CudaError> {
        debug_assert_eq!((to.len(), to.dtype), (values.len(), DType::F32));
        self.launcher
            .write(to.address(), bytemuck::cast_slice(values))
    }

    /// Indices.
    ///
    /// # Errors
    /// When the device's memory is full.
    pub fn indices(&self, indices: &[u32]) -> Result<Buffer, CudaError> {
        let bytes: &[u8] = bytemuck::cast_slice(indices);
        let buffer = self.memory.allocate(bytes.len() as u64)?;
        self.launcher.write(buffer.address, bytes)?;
        Ok(buffer)
    }

    /// A tensor's elements on the host.
    ///
    /// # Errors
    /// When work before failed.
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
    /// First element.
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

    /// Product of all dims but the last.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }

    /// Whether elements are bf16.
    #[must_use]
    pub fn is_bf16(&self) -> bool {
        self.dtype == DType::Bf16
    }

    /// The memory it shares with others.
    pub(super) fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Whether both lie in one piece of memory.
    #[must_use]
    pub fn shares_memory_with(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.buffer, &other.buffer)
    }

    /// The elements from `first` on, in the same memory.
    #[must_use]
    pub fn part(&self, first: usize, shape: Vec<usize>) -> Self {
        debug_assert!(first + shape.iter().product::<usize>() <= self.len());
        Self {
            shape,
            start: self.start + first as u64 * self.dtype.size(),
            ..self.clone()
        }
    }

    /// As many elements again and again as there are in this tensor, from its first on, where its memory holds
    /// them.
    pub(super) fn extended(&self, times: usize) -> Option<Self> {
        let end = self.start + times as u64 * self.bytes();
        (end <= self.buffer.bytes).then(|| Self {
            shape: vec![times * self.len()],
            ..self.clone()
        })
    }

    /// The same elements under another shape.
    #[must_use]
    pub fn reshaped(&self, shape: Vec<usize>) -> Self {
        debug_assert_eq!(shape.iter().product::<usize>(), self.len());
        Self {
            shape,
            ..self.clone()
        }
    }
}
