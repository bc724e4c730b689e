//! GEMMs of linear layers.

use catalog::DType;
use catalog::model::Activation;

use crate::error::CudaError;
use crate::launcher::{Element, Epilogue, Operand, Product};
use crate::tensor::{Device, Tensor};
use dtensor::Nonlinearity;

/// The GELU that a GEMM can fuse: the tanh approximation.
const GELU: Nonlinearity = Nonlinearity {
    function: Activation::Gelu,
    tanh: true,
};

fn operand(x: &Tensor, transposed: bool) -> Operand {
    Operand {
        address: x.address(),
        element: Element::Plain(x.dtype),
        transposed,
    }
}

impl Device {
    /// A tensor in 32 bits, because both operands of a GEMM have the same type.
    fn widened(&self, x: &Tensor) -> Result<Tensor, CudaError> {
        self.as_type(x, DType::F32)
    }

    /// A tensor in a given type: itself if it already has it.
    fn as_type(&self, x: &Tensor, dtype: DType) -> Result<Tensor, CudaError> {
        match x.dtype == dtype {
            true => Ok(x.clone()),
            false => self.cast(x, dtype),
        }
    }

    /// `x · wᵀ`, plus a bias; in 32 bits where the weight is in 32 bits and `x` is not, as in a router.
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
        let out = self.tensor(x.with_columns(w.shape[0]), dtype)?;
        let bias = bias.map(Tensor::address);
        let epilogue = bias.map_or(Epilogue::Nothing, Epilogue::Bias);
        self.multiply([operand(x, false), operand(w, true)], &out, w, epilogue)?;
        Ok(out)
    }

    /// The GELU (tanh approximation) of `x · wᵀ` plus a bias; also the GELU's input, if that `stays`. All in bf16, with
    /// the columns of operands and result in multiples of 8. Where no GEMM algorithm can fuse the GELU, a separate
    /// kernel applies it.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn linear_gelu(
        &self,
        x: &Tensor,
        w: &Tensor,
        bias: Option<&Tensor>,
        stays: bool,
    ) -> Result<(Tensor, Option<Tensor>), CudaError> {
        let made = || self.tensor(x.with_columns(w.shape[0]), DType::Bf16);
        let (out, input) = (made()?, stays.then(made).transpose()?);
        let bias = bias.map(Tensor::address);
        let epilogue = Epilogue::Gelu {
            bias,
            input: input.as_ref().map(Tensor::address),
        };
        let operands = [operand(x, false), operand(w, true)];
        let product = self.product(operands, &out, w, epilogue);
        if self.launcher.takes(&product)? {
            self.launcher.multiply(&product)?;
        } else {
            // An input that is not kept is written to the result, and overwritten there.
            let before = input.as_ref().unwrap_or(&out);
            let epilogue = bias.map_or(Epilogue::Nothing, Epilogue::Bias);
            self.multiply(operands, before, w, epilogue)?;
            self.activate(GELU, &out, before)?;
        }
        Ok((out, input))
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
        let out = self.tensor(dy.with_columns(w.shape[1]), dtype)?;
        let operands = [operand(dy, false), operand(w, false)];
        self.multiply(operands, &out, w, Epilogue::Nothing)?;
        Ok(out)
    }

    /// `dy · w` times the derivative of the GELU at `input`: the gradient of the GELU's input, where the GELU's output
    /// is the linear layer's input. All in bf16, with columns in multiples of 8. See [`Device::linear_gelu`] for GEMMs
    /// that cannot fuse it.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn linear_gelu_backward(
        &self,
        dy: &Tensor,
        w: &Tensor,
        input: &Tensor,
    ) -> Result<Tensor, CudaError> {
        let out = self.tensor(dy.with_columns(w.shape[1]), DType::Bf16)?;
        let epilogue = Epilogue::GeluGradient {
            input: input.address(),
        };
        let operands = [operand(dy, false), operand(w, false)];
        let product = self.product(operands, &out, w, epilogue);
        if self.launcher.takes(&product)? {
            self.launcher.multiply(&product)?;
        } else {
            self.multiply(operands, &out, w, Epilogue::Nothing)?;
            self.activate_backward(GELU, &out, &out, input)?;
        }
        Ok(out)
    }

    /// A GEMM with a weight, contracted over the weight's dim that the result lacks.
    fn product(
        &self,
        [a, b]: [Operand; 2],
        out: &Tensor,
        w: &Tensor,
        epilogue: Epilogue,
    ) -> Product {
        let contracted = w.shape[usize::from(b.transposed)];
        Product {
            sizes: [out.rows(), out.columns(), contracted].map(|size| size as u64),
            a,
            b,
            c: out.address(),
            dtype: out.dtype,
            compute: self.compute,
            accumulate: false,
            epilogue,
        }
    }

    fn multiply(
        &self,
        operands: [Operand; 2],
        out: &Tensor,
        w: &Tensor,
        epilogue: Epilogue,
    ) -> Result<(), CudaError> {
        let product = self.product(operands, out, w, epilogue);
        self.launcher.multiply(&product)
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
            epilogue: Epilogue::Nothing,
        })
    }
}
