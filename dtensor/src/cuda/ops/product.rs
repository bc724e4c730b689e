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
    /// `x · wᵀ`, plus a bias.
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
