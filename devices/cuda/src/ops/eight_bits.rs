//! Casts to FP8, and GEMMs of FP8 operands.
//!
//! A tensor is scaled by its current maximum (torchao's tensorwise dynamic scaling), without reading it back to the
//! host. GEMMs need both operands contiguous along the contracted dim, so a cast writes row-major, column-major, or
//! both.

use catalog::DType;

use super::grid::{EACH, THREADS, WAVES, unsupported};
use crate::error::CudaError;
use crate::kernels::{Kernel, Source};
use crate::launcher::{Arguments, Compute, Element, Epilogue, Float8, Operand, Product};
use crate::tensor::{Device, Tensor};
use dtensor::EIGHT_BIT_MULTIPLE;

/// Rows and columns of a tile of the cast kernels.
const TILE: [usize; 2] = [128, 64];

/// In which layouts an FP8 matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lies {
    /// Row-major.
    Rows,
    /// Column-major.
    Columns,
    /// Both row-major and column-major.
    Both,
}

/// A matrix in FP8 with its scale.
#[derive(Clone, Debug)]
pub struct Matrix8 {
    format: Float8,
    /// Rows and columns of the matrix.
    size: [usize; 2],
    /// The number that codes are multiplied by to get values, in 32 bits.
    pub factor: Tensor,
    /// FP8 codes in row-major order.
    pub rows: Option<Tensor>,
    /// FP8 codes in column-major order.
    pub columns: Option<Tensor>,
}

impl Matrix8 {
    /// Whether it is stored in these layouts.
    #[must_use]
    pub fn lies(&self, ways: Lies) -> bool {
        let [rows, columns] = [self.rows.is_some(), self.columns.is_some()];
        match ways {
            Lies::Rows => rows,
            Lies::Columns => columns,
            Lies::Both => rows && columns,
        }
    }

    /// A GEMM operand whose lines run along the contracted dim.
    fn operand(&self, codes: &Option<Tensor>, transposed: bool) -> Result<Operand, CudaError> {
        let codes = codes.as_ref().ok_or_else(|| {
            let reason = format!("{:?} not stored along the contracted dim", self.size);
            unsupported("a product in 8 bits", reason)
        })?;
        Ok(Operand {
            address: codes.address(),
            element: Element::Scaled(self.format, self.factor.address()),
            transposed,
        })
    }
}

impl Device {
    /// Casts a bf16 matrix, whose rows are all dims but the last, to FP8.
    ///
    /// # Errors
    /// When memory or the device fails, or rows or columns are no multiple of 16.
    pub fn cast8(&self, x: &Tensor, format: Float8, ways: Lies) -> Result<Matrix8, CudaError> {
        let [rows, columns] = [x.rows(), x.columns()];
        let fits = |size: usize| size.is_multiple_of(EIGHT_BIT_MULTIPLE as usize);
        if !x.is_bf16() || !fits(rows) || !fits(columns) {
            let reason = format!(
                "{rows} × {columns} of {:?}: expected bf16 and multiples of {EIGHT_BIT_MULTIPLE}",
                x.dtype
            );
            return Err(unsupported("a cast to 8 bits", reason));
        }
        let most = self.launcher.multiprocessors() * WAVES;
        let blocks = x.len().div_ceil(EACH * THREADS as usize).min(most as usize);
        let largest = self.tensor(vec![blocks], DType::F32)?;
        let arguments = Arguments::of(&[&largest, &x]).sizes([x.len()]);
        let kernel = Kernel::plain(Source::EightBits, "largest_bf16");
        self.blocks(kernel, [blocks as u32, 1, 1], THREADS, 0, arguments)?;
        let codes = |wanted: bool, shape: [usize; 2]| match wanted {
            true => self.tensor(shape.to_vec(), DType::F8).map(Some),
            false => Ok(None),
        };
        let made = Matrix8 {
            format,
            size: [rows, columns],
            factor: self.tensor(vec![1], DType::F32)?,
            rows: codes(ways != Lies::Columns, [rows, columns])?,
            columns: codes(ways != Lies::Rows, [columns, rows])?,
        };
        let arguments = Arguments::of(&[&made.rows, &made.columns, &made.factor, &largest])
            .sizes([blocks])
            .with(x.address())
            .sizes([rows, columns]);
        let name = match format {
            Float8::E4m3 => "cast_e4m3",
            Float8::E5m2 => "cast_e5m2",
        };
        let [across, down] = [columns.div_ceil(TILE[1]), rows.div_ceil(TILE[0])];
        let kernel = Kernel::plain(Source::EightBits, name);
        self.blocks(
            kernel,
            [across as u32, down as u32, 1],
            THREADS,
            0,
            arguments,
        )?;
        Ok(made)
    }

    /// `x · wᵀ` in bf16, plus a bias if given; `shape` is the result's.
    ///
    /// # Errors
    /// When memory or the device fails, or an operand is not stored row-major.
    pub fn linear8(
        &self,
        x: &Matrix8,
        w: &Matrix8,
        bias: Option<&Tensor>,
        shape: Vec<usize>,
    ) -> Result<Tensor, CudaError> {
        let out = self.tensor(shape, DType::Bf16)?;
        let operands = [x.operand(&x.rows, false)?, w.operand(&w.rows, true)?];
        let product = Product {
            epilogue: bias.map_or(Epilogue::Nothing, |bias| Epilogue::Bias(bias.address())),
            ..product(operands, &out, [x.size[0], w.size[0], x.size[1]])
        };
        self.launcher.multiply(&product)?;
        Ok(out)
    }

    /// `dy · w` in bf16: the gradient of a linear layer's input, in the given shape.
    ///
    /// # Errors
    /// When memory or the device fails, `dy` is not stored row-major, or `w` not column-major.
    pub fn linear_backward8(
        &self,
        dy: &Matrix8,
        w: &Matrix8,
        shape: Vec<usize>,
    ) -> Result<Tensor, CudaError> {
        let out = self.tensor(shape, DType::Bf16)?;
        let operands = [dy.operand(&dy.rows, false)?, w.operand(&w.columns, true)?];
        let product = product(operands, &out, [dy.size[0], w.size[1], dy.size[1]]);
        self.launcher.multiply(&product)?;
        Ok(out)
    }

    /// `gradient += dyᵀ · x`: the gradient of a linear layer's weight, in 32 bits.
    ///
    /// # Errors
    /// When the device fails, or an operand is not stored column-major.
    pub fn add_linear_gradient8(
        &self,
        gradient: &Tensor,
        dy: &Matrix8,
        x: &Matrix8,
    ) -> Result<(), CudaError> {
        let operands = [
            dy.operand(&dy.columns, false)?,
            x.operand(&x.columns, true)?,
        ];
        self.launcher.multiply(&Product {
            accumulate: true,
            ..product(operands, gradient, [dy.size[1], x.size[1], dy.size[0]])
        })
    }
}

/// A GEMM of FP8 matrices that overwrites its result.
fn product([a, b]: [Operand; 2], to: &Tensor, sizes: [usize; 3]) -> Product {
    Product {
        sizes: sizes.map(|size| size as u64),
        a,
        b,
        c: to.address(),
        dtype: to.dtype,
        compute: Compute::Whole,
        accumulate: false,
        epilogue: Epilogue::Nothing,
    }
}
