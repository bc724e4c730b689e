//! Casts of operands to 8 bits in compiled linear layers: torchao's under `torch.compile`, and XLA's. If every row has a scale,
//! layers that are not compiled are counted in the same way.
//!
//! If scales follow from the operand's own magnitudes, one for the tensor or one for each row, the bytes per element are those of
//! torchao's own estimate (pytorch/ao@36027d8, `torchao/testing/training/roofline_utils.py`, `get_tensor_memory_traffic_ovhd_s`).
//! Two facts that its developers report are added:
//! - A kernel that casts a tensor both ways reads it twice (pytorch/pytorch issue 133242: 1.4 TB/s on an H100 where other casts
//!   reach 2.2).
//! - Backward products of operands that are scaled by row run as if their scale was 1, and another kernel scales each result
//!   (pytorch/ao issue 2184).

use catalog::{Bytes, Fp8Recipe};
use dtensor::{AnyOp, CostClass, Pass, TensorId, TensorRole, Trace};

use super::kernel::Chain;
use super::lowering::Lowering;

/// Bytes of a number in 16 bits.
const WIDE: u64 = 2;
/// Bytes of a number in 8 bits.
const NARROW: u64 = 1;
/// Bytes per element of a pass that reads 16 bits and writes 8.
const CAST: u64 = WIDE + NARROW;
/// Bytes per element of a cast by columns: the kernel that casts by rows also writes the transpose in 16 bits, and another kernel
/// casts that.
const CAST_COLUMNS: u64 = WIDE + CAST;
/// Bytes per element of a cast of a weight by columns: one kernel transposes it in 16 bits, another casts the transpose.
const CAST_WEIGHT_COLUMNS: u64 = 2 * WIDE + CAST;
/// Bytes per element of scaling a product's result.
const RESCALE: u64 = 2 * WIDE;

/// Bytes of memory traffic, and number of launches, of the kernels that cast a product's operands. The kernel that scales the result
/// of a backward product is among them, if operands are scaled by row.
pub(super) fn of_product(lowering: &Lowering<'_>, trace: &Trace, op: &AnyOp<'_>) -> Chain {
    let frozen = |id: &TensorId| trace.tensor(*id).role == TensorRole::Frozen;
    let product = Operands {
        lowering,
        trace,
        trained: !op.inputs.iter().any(frozen),
    };
    match op.pass {
        Pass::BackwardWeight => [product.read_by_columns(op), product.rescaled(op)]
            .into_iter()
            .sum(),
        Pass::Forward | Pass::BackwardInput => {
            let operands = op.inputs.iter().copied();
            let casts = operands.map(|id| match trace.tensor(id).role.is_weight() {
                true => product.weight(op, id),
                false => product.activation(op, id),
            });
            casts.chain([product.rescaled(op)]).sum()
        }
    }
}

/// What the casts of one product's operands depend on apart from the product itself.
struct Operands<'a> {
    lowering: &'a Lowering<'a>,
    trace: &'a Trace,
    /// Whether the product's weight has a gradient, for which its operands are cast a second way.
    trained: bool,
}

impl<'a> Operands<'a> {
    /// Whether an earlier product of the same pass over the block reads the same activation in 8 bits: the compiler casts it
    /// only once.
    fn cast_before(&self, op: &AnyOp<'_>, id: TensorId) -> bool {
        let mut earlier = (0..op.index).map(|index| self.trace.op(op.pass, index));
        let narrow = |of: &AnyOp<'_>| match of.cost() {
            CostClass::Product(product) => self.lowering.is_eight_bit(self.trace, product),
            _ => false,
        };
        earlier.any(|of| of.inputs.contains(&id) && of.pass == op.pass && narrow(&of))
    }

    /// Whether a compiled pointwise kernel makes this tensor. With a scale for each row, the same kernel also casts the tensor to 8 bits.
    /// With one scale for the whole tensor, it only finds the largest magnitude, and a second kernel casts.
    fn fused(&self, id: TensorId) -> bool {
        self.lowering.made_by_compiled_pointwise(self.trace, id)
    }

    /// Casts of an activation that a product reads: in forward the input of the layer, in backward the gradient of its output.
    fn activation(&self, op: &AnyOp<'_>, id: TensorId) -> Chain {
        if self.cast_before(op, id) {
            return Chain::default();
        }
        let elements = self.trace.tensor(id).elements();
        let second_way = u64::from(self.trained);
        match self.lowering.fp8_recipe {
            Fp8Recipe::Delayed => Chain {
                bytes: Bytes((NARROW + NARROW * second_way) * elements),
                launches: 1,
            },
            Fp8Recipe::Tensorwise => self.activation_of_one_scale(id),
            Fp8Recipe::Rowwise | Fp8Recipe::Blockwise | Fp8Recipe::Mxfp8 => {
                let rows = if self.fused(id) { NARROW } else { CAST };
                // The gradient of the output is needed by rows and by columns. The input is needed by columns in backward alone
                // (`read_by_columns`).
                let columns = match op.pass {
                    Pass::Forward => 0,
                    _ => self.by_columns() * second_way,
                };
                Chain {
                    bytes: Bytes((rows + columns) * elements),
                    launches: 1 + if columns > 0 { 2 } else { 0 },
                }
            }
        }
    }

    /// Bytes that are read and written for each element to cast an activation by columns. If a scale is for 32 or 128 numbers, one
    /// kernel is enough: it finds their largest magnitude and casts them.
    fn by_columns(&self) -> u64 {
        match self.lowering.fp8_recipe {
            Fp8Recipe::Rowwise => CAST_COLUMNS,
            _ => CAST,
        }
    }

    /// Casts of an activation that has one scale. Its largest magnitude comes first: a pointwise kernel that makes the tensor finds
    /// it, or else a pass of its own. Then the tensor is cast by rows, and by columns too if the weight is trained. If tensor
    /// parallelism gathers the tensor in 8 bits, each rank casts its part by rows; the cast by columns is a transpose of what was
    /// gathered.
    fn activation_of_one_scale(&self, id: TensorId) -> Chain {
        let gather = self.lowering.quantised_gather(self.trace, id);
        let part = gather.as_ref().map_or(id, |gather| gather.inputs[0]);
        let searched = u64::from(!self.fused(part));
        let [part, whole] = [part, id].map(|id| self.trace.tensor(id).elements());
        let second_way = match (self.trained, gather.is_some()) {
            (false, _) => 0,
            (true, false) => CAST * whole,
            (true, true) => 2 * NARROW * whole,
        };
        Chain {
            bytes: Bytes((CAST + WIDE * searched) * part + second_way),
            launches: 2 + searched as u32,
        }
    }

    /// Casts of a weight, for the product of the forward pass or for the gradient of its input.
    fn weight(&self, op: &AnyOp<'_>, id: TensorId) -> Chain {
        let forward = op.pass == Pass::Forward;
        let (each, launches) = match self.lowering.fp8_recipe {
            // Assumed: each rank casts its shard before it is gathered, which takes little.
            Fp8Recipe::Delayed => return Chain::default(),
            // Assumed: a system that gathers activations in 8 bits gathers weights in 8 bits too (pytorch/torchtitan@820504e,
            // docs/float8.md, where the second is optional). Forward then casts no weight, and backward transposes it.
            Fp8Recipe::Tensorwise if self.lowering.gathers_quantised() => match forward {
                true => return Chain::default(),
                false => (2 * NARROW, 1),
            },
            Fp8Recipe::Tensorwise if forward => (WIDE + CAST, 3),
            Fp8Recipe::Rowwise if !forward => (CAST_WEIGHT_COLUMNS, 2),
            _ => (CAST, 1),
        };
        Chain {
            bytes: Bytes(each * self.trace.tensor(id).elements()),
            launches,
        }
    }

    /// The kernel that scales the result of a backward product whose operands were scaled by row.
    fn rescaled(&self, op: &AnyOp<'_>) -> Chain {
        if op.pass == Pass::Forward || self.lowering.fp8_recipe != Fp8Recipe::Rowwise {
            return Chain::default();
        }
        let elements = self.trace.tensor(op.outputs[0]).elements();
        Chain {
            bytes: Bytes(RESCALE * elements),
            launches: 1,
        }
    }

    /// Casts by columns of a forward product's input, which the gradient of the weight reads. An input that has one scale was cast
    /// by columns in the forward pass already.
    fn read_by_columns(&self, op: &AnyOp<'_>) -> Chain {
        let of_one_scale = [Fp8Recipe::Delayed, Fp8Recipe::Tensorwise];
        let input = op.inputs[1];
        if of_one_scale.contains(&self.lowering.fp8_recipe) || self.cast_before(op, input) {
            return Chain::default();
        }
        Chain {
            bytes: Bytes(self.by_columns() * self.trace.tensor(input).elements()),
            launches: 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use catalog::DType;
    use models::BlockLayout;

    use super::*;
    use crate::lower::testing::{HIDDEN, INNER, KEYS, TOKENS, layer, model, runtime};

    /// Bytes of the casts of each pass over a layer of Llama's kind, split over `tp` ranks.
    fn casts(recipe: Fp8Recipe, tp: u64) -> [u64; 3] {
        let runtime = runtime("torchtitan-compile");
        let layout = BlockLayout {
            tp,
            sequence_parallel: tp > 1,
            eight_bits: true,
            ..BlockLayout::alone(1, TOKENS, DType::Bf16)
        };
        let trace = layer(&model("llama", ""), &layout);
        let lowering = Lowering::new(&runtime, recipe);
        let narrow = |op: &AnyOp<'_>| matches!(op.cost(), CostClass::Product(of) if lowering.is_eight_bit(&trace, of));
        [Pass::Forward, Pass::BackwardInput, Pass::BackwardWeight].map(|pass| {
            let products = trace.ops().filter(|op| op.pass == pass && narrow(op));
            products
                .map(|op| of_product(&lowering, &trace, &op).bytes.0)
                .sum()
        })
    }

    /// Norms, the activation and rotary positions are pointwise kernels. They make the inputs of queries, gate and down, and the
    /// gradients of queries, keys, output, gate and up. With a scale for each row, or of earlier steps, they also cast them; with one
    /// scale they find the largest magnitude. Other kernels make the input of the output projection, the gradient of values and
    /// that of the last product.
    #[test]
    fn pointwise_kernels_help_to_cast_what_they_make() {
        let [x, keys, inner] = [HIDDEN, KEYS, INNER].map(|columns| TOKENS * columns);
        let weights = HIDDEN * (2 * HIDDEN + 2 * KEYS + 3 * INNER);
        let (input, gradient) = (3 * x + inner, 3 * x + 2 * keys + 2 * inner);
        let (apart, gradient_apart) = (x, x + keys);
        let rows = [
            (Fp8Recipe::Delayed, [2 * input, 2 * gradient, 0]),
            (
                Fp8Recipe::Tensorwise,
                [
                    6 * input + 2 * apart,
                    6 * gradient + 2 * gradient_apart + 2 * weights,
                    0,
                ],
            ),
            (
                Fp8Recipe::Rowwise,
                [
                    input + 2 * apart + 3 * weights,
                    6 * gradient + 2 * gradient_apart + 7 * weights + 4 * input_gradients(),
                    5 * input + 4 * weights,
                ],
            ),
        ];
        for (recipe, wanted) in rows {
            assert_eq!(casts(recipe, 1), wanted, "{recipe:?}");
        }
    }

    /// Elements of the gradients of inputs that the products of backward return: those of queries, keys, values, gate and up, of
    /// the output projection, and of the last product.
    fn input_gradients() -> u64 {
        TOKENS * (5 * HIDDEN + HIDDEN + INNER)
    }

    #[test]
    fn one_scale_is_found_before_the_gather_and_scales_of_rows_after_it() {
        let [x, inner] = [HIDDEN, INNER].map(|columns| TOKENS * columns);
        // The inputs of queries and gate are gathered. The output projection and down read what their own rank made.
        let forward = 2 * (3 * x / 2 + 2 * x) + 8 * x / 2 + 6 * inner / 2;
        assert_eq!(casts(Fp8Recipe::Tensorwise, 2)[0], forward);
        let weights = HIDDEN * (2 * HIDDEN + 2 * KEYS + 3 * INNER) / 2;
        let forward = 2 * 3 * x + 3 * x / 2 + inner / 2 + 3 * weights;
        assert_eq!(casts(Fp8Recipe::Rowwise, 2)[0], forward);
    }
}
