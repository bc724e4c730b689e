//! Local tensors in host memory.

use std::borrow::Cow;
use std::sync::Arc;

use catalog::DType;
use half::bf16;
use half::slice::HalfFloatSliceExt;

use comm::Message;

/// A dense row-major tensor. Arithmetic is in 32 bits; storage may be bf16, rounded once.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Local shape.
    pub shape: Vec<usize>,
    data: Data,
}

#[derive(Clone, Debug, PartialEq)]
enum Data {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl Tensor {
    /// A tensor of `data`, rounded when `dtype` is bf16 and kept in 32 bits otherwise.
    #[must_use]
    pub fn new(shape: Vec<usize>, data: Vec<f32>, dtype: DType) -> Self {
        debug_assert_eq!(shape.iter().product::<usize>(), data.len());
        let data = match dtype {
            DType::Bf16 => {
                let mut rounded = vec![bf16::ZERO; data.len()];
                rounded.convert_from_f32_slice(&data);
                Data::Bf16(rounded)
            }
            _ => Data::F32(data),
        };
        Self { shape, data }
    }

    /// Element type of its storage.
    #[must_use]
    pub fn dtype(&self) -> DType {
        match self.data {
            Data::F32(_) => DType::F32,
            Data::Bf16(_) => DType::Bf16,
        }
    }

    /// Its elements widened to 32 bits, borrowed where they already are.
    #[must_use]
    pub fn f32(&self) -> Cow<'_, [f32]> {
        match &self.data {
            Data::F32(data) => Cow::Borrowed(data),
            Data::Bf16(data) => Cow::Owned(data.to_f32_vec()),
        }
    }

    /// Its elements in 32 bits, consuming the tensor.
    #[must_use]
    pub fn into_f32(self) -> Vec<f32> {
        match self.data {
            Data::F32(data) => data,
            Data::Bf16(data) => data.to_f32_vec(),
        }
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.data {
            Data::F32(data) => data.len(),
            Data::Bf16(data) => data.len(),
        }
    }

    /// Whether it has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of storage.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.len() as u64 * self.dtype().size()
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

    /// Product of all dims but the last, which may be 0.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }

    /// Its storage as bytes, to send to another rank.
    #[must_use]
    pub fn pack(&self) -> Message {
        Arc::new(match &self.data {
            Data::F32(data) => bytemuck::cast_slice(data).to_vec(),
            Data::Bf16(data) => bytemuck::cast_slice(data).to_vec(),
        })
    }

    /// Numbers as bytes, rounded to this type, to send to another rank.
    #[must_use]
    pub fn message(data: Vec<f32>, dtype: DType) -> Message {
        Self::new(vec![data.len()], data, dtype).pack()
    }

    /// The numbers of this type in bytes that [`Tensor::pack`] wrote.
    #[must_use]
    pub fn numbers(bytes: &[u8], dtype: DType) -> Vec<f32> {
        Self::unpack(Vec::new(), bytes, dtype).into_f32()
    }

    /// A tensor of this type from bytes that [`Tensor::pack`] wrote.
    #[must_use]
    pub fn unpack(shape: Vec<usize>, bytes: &[u8], dtype: DType) -> Self {
        let data = match dtype {
            DType::Bf16 => Data::Bf16(bytemuck::pod_collect_to_vec(bytes)),
            _ => Data::F32(bytemuck::pod_collect_to_vec(bytes)),
        };
        Self { shape, data }
    }

    /// A tensor of this type from several messages of [`Tensor::pack`], concatenated.
    #[must_use]
    pub fn from_pieces<'b>(
        shape: Vec<usize>,
        pieces: impl IntoIterator<Item = &'b [u8]>,
        dtype: DType,
    ) -> Self {
        let len = shape.iter().product();
        let mut data = match dtype {
            DType::Bf16 => Data::Bf16(vec![bf16::ZERO; len]),
            _ => Data::F32(vec![0.0; len]),
        };
        let mut bytes: &mut [u8] = match &mut data {
            Data::F32(data) => bytemuck::cast_slice_mut(data),
            Data::Bf16(data) => bytemuck::cast_slice_mut(data),
        };
        for piece in pieces {
            let (here, rest) = bytes.split_at_mut(piece.len());
            here.copy_from_slice(piece);
            bytes = rest;
        }
        Self { shape, data }
    }
}
