//! Epilogues: operators that a GEMM kernel can run on its output before writing it.

use std::collections::BTreeMap;

use catalog::DType;
use catalog::model::Activation;

use crate::operator::{Factor, Gemm, Gradient, Nonlinearity, Operator, Pointwise, Product};
use crate::tensor::{TensorId, View};
use crate::trace::{Op, Trace};

/// Columns and contracted length of a product with a fused GELU must be multiples of this: cuBLASLt
/// requires it of the leading dimension of the GELU's input
/// (`CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD`), and rows of a multiple of 16 bytes elsewhere.
const GELU_MULTIPLE: u64 = 8;

/// Operators fused into products: maps from the index of a product to that of the fused operator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Epilogues {
    biases: BTreeMap<usize, usize>,
    gelus: BTreeMap<usize, usize>,
    gelu_gradients: BTreeMap<usize, usize>,
}

impl Epilogues {
    /// Finds the epilogues of a trace. Only bf16 GELUs with the tanh approximation are fused: the rounding of a fused
    /// GELU in fp32 is undocumented, and FP8 products are not documented to have one with bf16 output.
    #[must_use]
    pub fn of(trace: &Trace) -> Self {
        let mut found = Self::default();
        for (place, op) in trace.forward.iter().enumerate() {
            if let Operator::Product(product @ Product::Matmul(..)) = op.operator {
                let bias = bias_after(trace, place);
                found.biases.extend(bias.map(|bias| (place, bias)));
                if fits(trace, op, product) {
                    let gelu = gelu_after(trace, bias.unwrap_or(place));
                    found.gelus.extend(gelu.map(|gelu| (place, gelu)));
                }
            }
        }
        for (place, op) in trace.backward.iter().enumerate() {
            if let Gradient::Product(_, product, Factor::First) = op.operator
                && fits(trace, op, product)
            {
                let gelu = gelu_gradient_after(trace, place);
                found.gelu_gradients.extend(gelu.map(|gelu| (place, gelu)));
            }
        }
        found
    }

    /// The bias operator fused into a forward product.
    #[must_use]
    pub fn bias(&self, product: usize) -> Option<usize> {
        self.biases.get(&product).copied()
    }

    /// The GELU fused into a forward product, applied after its bias.
    #[must_use]
    pub fn gelu(&self, product: usize) -> Option<usize> {
        self.gelus.get(&product).copied()
    }

    /// The GELU whose gradient is fused into a backward product.
    #[must_use]
    pub fn gelu_gradient(&self, product: usize) -> Option<usize> {
        self.gelu_gradients.get(&product).copied()
    }

    /// Whether a forward operator is a bias fused into a product.
    #[must_use]
    pub fn is_bias(&self, op: usize) -> bool {
        self.biases.values().any(|&bias| bias == op)
    }

    /// Whether a forward operator is a GELU fused into a product.
    #[must_use]
    pub fn is_gelu(&self, op: usize) -> bool {
        self.gelus.values().any(|&gelu| gelu == op)
    }

    /// Whether a backward operator is a GELU's gradient fused into a product.
    #[must_use]
    pub fn is_gelu_gradient(&self, op: usize) -> bool {
        self.gelu_gradients.values().any(|&gelu| gelu == op)
    }
}

/// The GELU with the tanh approximation.
const GELU: Pointwise = Pointwise::Activation(Nonlinearity {
    function: Activation::Gelu,
    tanh: true,
});

fn bias_after(trace: &Trace, product: usize) -> Option<usize> {
    let made = trace.forward[product].outputs[0];
    let next = trace.forward.get(product + 1)?;
    let adds = next.operator == Operator::Pointwise(Pointwise::Bias) && next.inputs[0] == made;
    let mut views = trace.forward_views.iter();
    (adds && !views.any(|view| view.from == made)).then_some(product + 1)
}

/// The GELU that directly follows operator `last` (a product or its bias) and alone reads its output.
fn gelu_after(trace: &Trace, last: usize) -> Option<usize> {
    let made = trace.forward[last].outputs[0];
    let next = trace.forward.get(last + 1)?;
    let takes = next.operator == Operator::Pointwise(GELU) && next.inputs == [made];
    let alone = only_reader(trace, &trace.forward, &trace.forward_views, made) == Some(last + 1);
    (takes && alone).then_some(last + 1)
}

fn gelu_gradient_after(trace: &Trace, product: usize) -> Option<usize> {
    let made = trace.backward[product].outputs[0];
    let reader = only_reader(trace, &trace.backward, &trace.backward_views, made)?;
    let Gradient::Pointwise(of, GELU) = trace.backward[reader].operator else {
        return None;
    };
    let narrow = trace.tensor(trace.forward[of].inputs[0]).dtype == DType::Bf16;
    (narrow && reader > product).then_some(reader)
}

/// The index of the operator that reads a tensor, if it is the only reader; `None` if a view or another block reads
/// it.
fn only_reader<O>(trace: &Trace, ops: &[Op<O>], views: &[View], made: TensorId) -> Option<usize> {
    let storage = trace.tensor(made).storage;
    let same = |id: &TensorId| trace.tensor(*id).storage == storage;
    let leaves = trace.output.iter().chain(&trace.input_gradient).any(same);
    let seen = views.iter().any(|view| same(&view.from) || same(&view.to));
    let mut readers = (0..).zip(ops).filter(|(_, op)| op.inputs.iter().any(same));
    let (reader, _) = readers.next()?;
    (!leaves && !seen && readers.next().is_none()).then_some(reader)
}

/// Whether the type and sizes of a linear layer's product allow a fused GELU.
fn fits<O>(trace: &Trace, op: &Op<O>, product: Product) -> bool {
    let Product::Matmul(Gemm { n, k, .. }, _) = product else {
        return false;
    };
    let mut tensors = op.inputs.iter().chain(&op.outputs);
    let narrow = tensors.all(|&id| trace.tensor(id).dtype == DType::Bf16);
    let sizes = [n, k].iter().all(|size| size.is_multiple_of(GELU_MULTIPLE));
    narrow && sizes && !trace.is_eight_bit(product)
}
