//! Elementwise operators, each one pass over its tensors.

use catalog::DType;
use catalog::model::Activation;

use super::grid::EACH;
use crate::error::CudaError;
use crate::kernels::{Kernel, Source, typed};
use crate::launcher::{Arguments, Place, TurningArgument};
use crate::memory::Buffer;
use crate::tensor::{Device, Tensor};
use dtensor::Nonlinearity;

/// The number by which the CUDA sources identify a nonlinearity.
fn number(f: Nonlinearity) -> i32 {
    match f.function {
        Activation::Gelu if f.tanh => 0,
        Activation::Gelu => 1,
        Activation::Silu => 2,
        Activation::Relu => 3,
        Activation::Relu2 => 4,
    }
}

fn pieces(rows: usize, columns: usize) -> usize {
    rows * columns.div_ceil(EACH)
}

impl Device {
    /// `a + b`, of the type of `a`.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn add(&self, a: &Tensor, b: &Tensor) -> Result<Tensor, CudaError> {
        let out = self.tensor(a.shape.clone(), a.dtype)?;
        self.sum(&out, a, b)?;
        Ok(out)
    }

    /// `a += b`.
    ///
    /// # Errors
    /// When the device fails.
    pub fn add_into(&self, a: &Tensor, b: &Tensor) -> Result<(), CudaError> {
        self.sum(a, a, b)
    }

    fn sum(&self, out: &Tensor, a: &Tensor, b: &Tensor) -> Result<(), CudaError> {
        let arguments = Arguments::of(&[&out, &a, &b]).sizes([a.len()]);
        let kernel = typed!(Elementwise, "add", a.is_bf16());
        self.flat(kernel, a.len().div_ceil(EACH), arguments)
    }

    /// Applies a nonlinearity elementwise.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn activation(&self, f: Nonlinearity, x: &Tensor) -> Result<Tensor, CudaError> {
        let out = self.tensor(x.shape.clone(), x.dtype)?;
        self.activate(f, &out, x)?;
        Ok(out)
    }

    /// Applies a nonlinearity, and writes the result to an existing tensor, which may be `x`.
    pub(super) fn activate(
        &self,
        f: Nonlinearity,
        out: &Tensor,
        x: &Tensor,
    ) -> Result<(), CudaError> {
        let arguments = Arguments::of(&[&out, &x]).sizes([x.len()]).with(number(f));
        let kernel = typed!(Elementwise, "activation", x.is_bf16());
        self.flat(kernel, x.len().div_ceil(EACH), arguments)
    }

    /// `dy · f'(x)`.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn activation_backward(
        &self,
        f: Nonlinearity,
        dy: &Tensor,
        x: &Tensor,
    ) -> Result<Tensor, CudaError> {
        let out = self.tensor(x.shape.clone(), x.dtype)?;
        self.activate_backward(f, &out, dy, x)?;
        Ok(out)
    }

    /// Writes `dy · f'(x)` to an existing tensor, which may be `dy`.
    pub(super) fn activate_backward(
        &self,
        f: Nonlinearity,
        out: &Tensor,
        dy: &Tensor,
        x: &Tensor,
    ) -> Result<(), CudaError> {
        let arguments = Arguments::of(&[&out, &dy, &x])
            .sizes([x.len()])
            .with(number(f));
        let kernel = typed!(Elementwise, "activation_backward", x.is_bf16());
        self.flat(kernel, x.len().div_ceil(EACH), arguments)
    }

    /// `f(gate) · up`; without `up`, gate and up are the halves of every row of `gate`.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn gated(
        &self,
        f: Nonlinearity,
        gate: &Tensor,
        up: Option<&Tensor>,
    ) -> Result<Tensor, CudaError> {
        let (columns, upper) = halves(gate, up);
        let out = self.tensor(gate.with_columns(columns), gate.dtype)?;
        let arguments = Arguments::of(&[&out, &gate, &upper])
            .sizes([gate.rows(), columns, gate.columns()])
            .with(number(f));
        let kernel = typed!(Elementwise, "gated", gate.is_bf16());
        self.flat(kernel, pieces(gate.rows(), columns), arguments)?;
        Ok(out)
    }

    /// Gradients of gate and up; without `up`, both as halves of one tensor.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn gated_backward(
        &self,
        f: Nonlinearity,
        dy: &Tensor,
        gate: &Tensor,
        up: Option<&Tensor>,
    ) -> Result<(Tensor, Option<Tensor>), CudaError> {
        let (columns, upper) = halves(gate, up);
        let d_gate = self.tensor(gate.shape.clone(), gate.dtype)?;
        let d_up = match up {
            Some(up) => Some(self.tensor(up.shape.clone(), up.dtype)?),
            None => None,
        };
        let (_, d_upper) = halves(&d_gate, d_up.as_ref());
        let arguments = Arguments::of(&[&d_gate, &d_upper, &dy, &gate, &upper])
            .sizes([gate.rows(), columns, gate.columns()])
            .with(number(f));
        let kernel = typed!(Elementwise, "gated_backward", gate.is_bf16());
        self.flat(kernel, pieces(gate.rows(), columns), arguments)?;
        Ok((d_gate, d_up))
    }

    /// Adds a vector to every row; with positions, the row of the table at each token's position.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn bias(
        &self,
        x: &Tensor,
        table: &Tensor,
        positions: Option<(&Buffer, usize)>,
    ) -> Result<Tensor, CudaError> {
        let out = self.tensor(x.shape.clone(), x.dtype)?;
        let (rows, columns) = (x.rows(), x.columns());
        let (positions, sequence) = positions.unzip();
        let arguments = Arguments::of(&[&out, &x, &table, &positions]).sizes([
            rows,
            columns,
            sequence.unwrap_or(1),
        ]);
        let kernel = typed!(Elementwise, "bias", x.is_bf16());
        self.flat(kernel, pieces(rows, columns), arguments)?;
        Ok(out)
    }

    /// Copies columns `start..start + columns` of every row.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn copy_columns(
        &self,
        x: &Tensor,
        start: usize,
        columns: usize,
    ) -> Result<Tensor, CudaError> {
        let out = self.tensor(x.with_columns(columns), x.dtype)?;
        self.move_part((&out, 0), (x, start), columns)?;
        Ok(out)
    }

    /// Writes a tensor to columns `start..` of every row of `whole`.
    ///
    /// # Errors
    /// When the device fails.
    pub fn put_part(&self, whole: &Tensor, start: usize, part: &Tensor) -> Result<(), CudaError> {
        self.move_part((whole, start), (part, 0), part.columns())
    }

    /// Copies a range of columns of every row to a range of columns of another tensor.
    ///
    /// # Errors
    /// When the device fails.
    pub fn move_part(
        &self,
        (to, to_start): (&Tensor, usize),
        (from, from_start): (&Tensor, usize),
        columns: usize,
    ) -> Result<(), CudaError> {
        let rows = from.rows();
        let element = |x: &Tensor, start: usize| x.address() + start as u64 * x.dtype.size();
        let arguments = Arguments::of(&[&element(to, to_start), &element(from, from_start)])
            .sizes([rows, columns, to.columns(), from.columns()]);
        let kernel = typed!(Elementwise, "columns", from.is_bf16());
        self.flat(kernel, pieces(rows, columns), arguments)
    }

    /// The same elements in another type.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn cast(&self, x: &Tensor, dtype: DType) -> Result<Tensor, CudaError> {
        let out = self.tensor(x.shape.clone(), dtype)?;
        if x.dtype == dtype {
            self.launcher.copy(out.address(), x.address(), x.bytes())?;
            return Ok(out);
        }
        let name = if x.is_bf16() {
            "cast_bf16_f32"
        } else {
            "cast_f32_bf16"
        };
        let arguments = Arguments::of(&[&out, &x]).sizes([x.len()]);
        let kernel = Kernel::plain(Source::Elementwise, name);
        self.flat(kernel, x.len().div_ceil(EACH), arguments)?;
        Ok(out)
    }

    /// Dropout: the kept elements, scaled, with zeros elsewhere; and the mask of those kept. `positions` are those of this
    /// rank's tokens in their sequence.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn dropout(
        &self,
        x: &Tensor,
        place: Place,
        positions: &Buffer,
    ) -> Result<(Tensor, Tensor), CudaError> {
        let out = self.tensor(x.shape.clone(), x.dtype)?;
        let mask = self.tensor(x.shape.clone(), DType::U8)?;
        let arguments = Arguments::of(&[&out, &mask, &x, &positions])
            .sizes([x.rows()])
            .with(place);
        let kernel = typed!(Elementwise, "dropout", x.is_bf16());
        self.flat(kernel, pieces(x.rows(), x.columns()), arguments)?;
        Ok((out, mask))
    }

    /// Elements where the mask is set, scaled, with zeros elsewhere.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn masked(&self, x: &Tensor, mask: &Tensor, scale: f32) -> Result<Tensor, CudaError> {
        let out = self.tensor(x.shape.clone(), x.dtype)?;
        let arguments = Arguments::of(&[&out, &x, &mask])
            .with(scale)
            .sizes([x.len()]);
        let kernel = typed!(Elementwise, "masked", x.is_bf16());
        self.flat(kernel, x.len().div_ceil(EACH), arguments)?;
        Ok(out)
    }

    /// Rotary embedding; `turns` holds the cosine and sine of every angle, by position in the sequence and pair of
    /// dimensions, in 32 bits.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn rope(
        &self,
        x: &Tensor,
        turns: &Buffer,
        turning: TurningArgument,
    ) -> Result<Tensor, CudaError> {
        let out = self.tensor(x.shape.clone(), x.dtype)?;
        let [head_dim, first, dims] = turning.dims.map(|n| n as usize);
        let arguments = Arguments::of(&[&out, &x, &turns])
            .sizes([x.rows()])
            .with(turning);
        let kernel = typed!(Elementwise, "rope", x.is_bf16());
        let turned = dims / if turning.neighbours == 1 { 1 } else { 2 };
        let parts = [first, turned, head_dim - first - dims];
        let each: usize = parts.iter().map(|columns| columns.div_ceil(EACH)).sum();
        self.flat(kernel, x.rows() * turning.heads as usize * each, arguments)?;
        Ok(out)
    }
}

/// Columns of the gate, and the address of the up projection: beside the gate, or in its own tensor.
fn halves(gate: &Tensor, up: Option<&Tensor>) -> (usize, u64) {
    match up {
        Some(up) => (gate.columns(), up.address()),
        None => {
            let columns = gate.columns() / 2;
            let upper = gate.address() + columns as u64 * gate.dtype.size();
            (columns, upper)
        }
    }
}
