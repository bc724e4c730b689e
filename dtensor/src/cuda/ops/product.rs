//! Matrix products.

use spec::DType;

use crate::cuda::error::CudaError;
use crate::cuda::launcher::{Element, Operand, Product};
use crate::cuda::tensor::{Device, Tensor};

fn operand(x: &Tensor, transposed: bool) -> Operand {
    Operand {
        address: x.address(),
        element: Element::Plain(x.dtype),
        transposed,
    }
}

impl Device {
    /// Products have operands of one type: a tensor in 32 bits.
    fn widened(&self, x: &Tensor) -> Result<Tensor, CudaError> {
        self.as_type(x, DType::F32)
    }

    /// A tensor in a type: itself if it has it.
    fn as_type(&self, x: &Tensor, dtype: DType) -> Result<Tensor, CudaError> {
        match x.dtype == dtype {
            true => Ok(x.clone()),
            false => self.cast(x, dtype),
        }
    }

    /// `x · wᵀ`, plus a bias; in 32 bits where the weight is and `x` is not, as a router's.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn linear(
        &self,
        x: &Tensor,
        w: &Tensor,
        bias: Option<&Tensor>,
        dtype: DType,
    ) -> Result<Tensor, CudaError> {
        if x.dtype != w.dtype {
            let bias = bias.map(|bias| self.widened(bias)).transpose()?;
            let (x, w) = (self.widened(x)?, self.widened(w)?);
            let out = self.linear(&x, &w, bias.as_ref(), DType::F32)?;
            return self.as_type(&out, dtype);
        }
        let (n, k) = (w.shape[0], w.shape[1]);
        let mut shape = x.shape.clone();
        *shape.last_mut().expect("linear inputs have a last dim") = n;
        let out = self.tensor(shape, dtype)?;
        self.launcher.multiply(&Product {
            sizes: [x.rows() as u64, n as u64, k as u64],
            a: operand(x, false),
            b: operand(w, true),
            c: out.address(),
            dtype,
            compute: self.compute,
            accumulate: false,
            bias: bias.map(Tensor::address),
        })?;
        Ok(out)
    }

    /// `dy · w`: the gradient of a linear layer's input.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn linear_backward(
        &self,
        dy: &Tensor,
        w: &Tensor,
        dtype: DType,
    ) -> Result<Tensor, CudaError> {
        if dy.dtype != w.dtype {
            let (dy, w) = (self.widened(dy)?, self.widened(w)?);
            let out = self.linear_backward(&dy, &w, DType::F32)?;
            return self.as_type(&out, dtype);
        }
        let (n, k) = (w.shape[0], w.shape[1]);
        let mut shape = dy.shape.clone();
        *shape.last_mut().expect("gradients have a last dim") = k;
        let out = self.tensor(shape, dtype)?;
        self.launcher.multiply(&Product {
            sizes: [dy.rows() as u64, k as u64, n as u64],
            a: operand(dy, false),
            b: operand(w, false),
            c: out.address(),
            dtype,
            compute: self.compute,
            accumulate: false,
            bias: None,
        })?;
        Ok(out)
    }

    /// `gradient += dyᵀ · x`: the gradient of a linear layer's weight, in 32 bits.
    ///
    /// # Errors
    /// When the device fails.
    pub fn add_linear_gradient(
        &self,
        gradient: &Tensor,
        dy: &Tensor,
        x: &Tensor,
    ) -> Result<(), CudaError> {
        self.launcher.multiply(&Product {
            sizes: [dy.columns() as u64, x.columns() as u64, x.rows() as u64],
            a: operand(dy, true),
            b: operand(x, false),
            c: gradient.address(),
            dtype: DType::F32,
            compute: self.compute,
            accumulate: true,
            bias: None,
        })
    }
}
