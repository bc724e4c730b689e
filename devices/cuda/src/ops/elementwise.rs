//! Operators of one pass.

use catalog::DType;
use catalog::model::Activation;

use super::grid::EACH;
use crate::error::CudaError;
use crate::kernels::{Kernel, Source, typed};
use crate::launcher::{Arguments, Place, TurningArgument};
use crate::memory::Buffer;
use crate::tensor::{Device, Tensor};
use dtensor::Nonlinearity;

/// Which elements dropout keeps.
#[derive(Clone, Copy, Debug)]
pub struct Dropout<'d> {
    /// Where the elements lie in the global tensor, and the random stream.
    pub place: Place,
    /// Positions of this rank's tokens in their sequence.
    pub positions: &'d Buffer,
}

/// Rotary positions.
#[derive(Clone, Copy, Debug)]
pub struct Rope<'r> {
    /// Cosine and sine by token of a sequence and pair, in 32 bits.
    pub turns: &'r Buffer,
    /// Tokens of a sequence here.
    pub sequence: usize,
    /// Dimensions per head, the first that turns, and how many turn.
    pub dims: [usize; 3],
    /// Whether neighbours turn together, rather than dimensions half of those that turn apart.
    pub neighbours: bool,
    /// Whether to turn back.
    pub backward: bool,
}

/// The number that kernels know a nonlinearity by.
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
        let arguments = Arguments::default()
            .with(out.address())
            .with(a.address())
            .with(b.address())
            .with(a.len() as i64);
        let kernel = typed!(Elementwise, "add", a.is_bf16());
        self.flat(kernel, a.len().div_ceil(EACH), arguments)
    }

    /// A nonlinearity.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn activation(&self, f: Nonlinearity, x: &Tensor) -> Result<Tensor, CudaError> {
        let out = self.tensor(x.shape.clone(), x.dtype)?;
        self.activate(f, &out, x)?;
        Ok(out)
    }

    /// A nonlinearity into a tensor that is there, or in place.
    pub(super) fn activate(
        &self,
        f: Nonlinearity,
        out: &Tensor,
        x: &Tensor,
    ) -> Result<(), CudaError> {
        let arguments = Arguments::default()
            .with(out.address())
            .with(x.address())
            .with(x.len() as i64)
            .with(number(f));
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

    /// `dy · f'(x)` into a tensor that is there, or in place of `dy`.
    pub(super) fn activate_backward(
        &self,
        f: Nonlinearity,
        out: &Tensor,
        dy: &Tensor,
        x: &Tensor,
    ) -> Result<(), CudaError> {
        let arguments = Arguments::default()
            .with(out.address())
            .with(dy.address())
            .with(x.address())
            .with(x.len() as i64)
            .with(number(f));
        let kernel = typed!(Elementwise, "activation_backward", x.is_bf16());
        self.flat(kernel, x.len().div_ceil(EACH), arguments)
    }

    /// `f(gate) · up`; without `up`, the halves of every row of `gate`.
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
        let mut shape = gate.shape.clone();
        *shape.last_mut().expect("activations have a last dim") = columns;
        let out = self.tensor(shape, gate.dtype)?;
        let arguments = Arguments::default()
            .with(out.address())
            .with(gate.address())
            .with(upper)
            .with(gate.rows() as i64)
            .with(columns as i64)
            .with(gate.columns() as i64)
            .with(number(f));
        let kernel = typed!(Elementwise, "gated", gate.is_bf16());
        self.flat(kernel, pieces(gate.rows(), columns), arguments)?;
        Ok(out)
    }

    /// Gradients of gate and up; without `up`, both in one tensor.
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
        let arguments = Arguments::default()
            .with(d_gate.address())
            .with(d_upper)
            .with(dy.address())
            .with(gate.address())
            .with(upper)
            .with(gate.rows() as i64)
            .with(columns as i64)
            .with(gate.columns() as i64)
            .with(number(f));
        let kernel = typed!(Elementwise, "gated_backward", gate.is_bf16());
        self.flat(kernel, pieces(gate.rows(), columns), arguments)?;
        Ok((d_gate, d_up))
    }

    /// Adds a row to every row; with positions, the table's row of each token's position.
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
        let arguments = Arguments::default()
            .with(out.address())
            .with(x.address())
            .with(table.address())
            .with(positions.map_or(0, |(p, _)| p.address))
            .with(rows as i64)
            .with(columns as i64)
            .with(positions.map_or(1, |(_, sequence)| sequence) as i64);
        let kernel = typed!(Elementwise, "bias", x.is_bf16());
        self.flat(kernel, pieces(rows, columns), arguments)?;
        Ok(out)
    }

    /// Columns `start..` of every row.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn part(&self, x: &Tensor, start: usize, columns: usize) -> Result<Tensor, CudaError> {
        let mut shape = x.shape.clone();
        *shape.last_mut().expect("sliced tensors have a last dim") = columns;
        let out = self.tensor(shape, x.dtype)?;
        self.move_part((&out, 0), (x, start), columns)?;
        Ok(out)
    }

    /// Writes a part into columns `start..` of every row of a whole.
    ///
    /// # Errors
    /// When the device fails.
    pub fn put_part(&self, whole: &Tensor, start: usize, part: &Tensor) -> Result<(), CudaError> {
        self.move_part((whole, start), (part, 0), part.columns())
    }

    /// Copies so many columns of every row, from one on, to columns of another tensor from one on.
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
        let arguments = Arguments::default()
            .with(element(to, to_start))
            .with(element(from, from_start))
            .with(rows as i64)
            .with(columns as i64)
            .with(to.columns() as i64)
            .with(from.columns() as i64);
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
        let arguments = Arguments::default()
            .with(out.address())
            .with(x.address())
            .with(x.len() as i64);
        let kernel = Kernel::plain(Source::Elementwise, name);
        self.flat(kernel, x.len().div_ceil(EACH), arguments)?;
        Ok(out)
    }

    /// Kept elements scaled, and the mask of what was kept.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn dropout(
        &self,
        x: &Tensor,
        dropout: &Dropout<'_>,
    ) -> Result<(Tensor, Tensor), CudaError> {
        let out = self.tensor(x.shape.clone(), x.dtype)?;
        let mask = self.tensor(x.shape.clone(), DType::U8)?;
        let arguments = Arguments::default()
            .with(out.address())
            .with(mask.address())
            .with(x.address())
            .with(dropout.positions.address)
            .with(x.rows() as i64)
            .with(dropout.place);
        let kernel = typed!(Elementwise, "dropout", x.is_bf16());
        self.flat(kernel, pieces(x.rows(), x.columns()), arguments)?;
        Ok((out, mask))
    }

    /// Elements where a mask is set, scaled.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn masked(&self, x: &Tensor, mask: &Tensor, scale: f32) -> Result<Tensor, CudaError> {
        let out = self.tensor(x.shape.clone(), x.dtype)?;
        let arguments = Arguments::default()
            .with(out.address())
            .with(x.address())
            .with(mask.address())
            .with(scale)
            .with(x.len() as i64);
        let kernel = typed!(Elementwise, "masked", x.is_bf16());
        self.flat(kernel, x.len().div_ceil(EACH), arguments)?;
        Ok(out)
    }

    /// Rotary positions.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn rope(&self, x: &Tensor, rope: &Rope<'_>) -> Result<Tensor, CudaError> {
        let out = self.tensor(x.shape.clone(), x.dtype)?;
        let [head_dim, first, dims] = rope.dims;
        let heads = x.columns() / head_dim;
        let arguments = Arguments::default()
            .with(out.address())
            .with(x.address())
            .with(rope.turns.address)
            .with(x.rows() as i64)
            .with(TurningArgument {
                sequence: rope.sequence as i64,
                heads: heads as i64,
                dims: rope.dims.map(|n| n as i64),
                neighbours: i32::from(rope.neighbours),
                direction: if rope.backward { -1.0 } else { 1.0 },
            });
        let kernel = typed!(Elementwise, "rope", x.is_bf16());
        let turned = if rope.neighbours { dims } else { dims / 2 };
        let parts = [first, turned, head_dim - first - dims];
        let each: usize = parts.iter().map(|columns| columns.div_ceil(EACH)).sum();
        self.flat(kernel, x.rows() * heads * each, arguments)?;
        Ok(out)
    }
}

/// Columns of a gate, and where the up projection lies: beside it, or in a tensor of its own.
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
