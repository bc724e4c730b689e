//! GEMMs with weights: linear layers and grouped GEMMs of experts.

use catalog::Axis;

use crate::error::DTensorError;
use crate::gradients::{Backward, Of};
use crate::operator::{Class, CostClass, Factor, Gemm, Gradient, Operator, Product, Site};
use crate::placement::{BLOCK_AXES, Placement};
use crate::tape::{DTensor, Tape, no_rule};
use crate::tensor::{TensorId, TensorRole};
use crate::trace::{Pass, Trace};

/// All sizes of an FP8 product must be multiples of this, for rows of 16 bytes (cuBLAS, "FP8 data types": 16-byte
/// alignment of all dimensions).
pub const EIGHT_BIT_MULTIPLE: u64 = 16;

impl Tape<'_> {
    /// Linear layer `y = x · wᵀ` with `x: […, k]`, `w: [n, k]`. Saves `x` for the gradient of `w`, if `w` is trained.
    ///
    /// # Errors
    /// When no product of the local shards of `x` and `w` gives a valid placement.
    pub fn linear(
        &mut self,
        scope: &str,
        x: &DTensor,
        w: &DTensor,
        site: Site,
    ) -> Result<DTensor, DTensorError> {
        let last = x.shape.len() - 1;
        let mut placements = x.placements;
        for axis in BLOCK_AXES {
            if self.mesh().size(axis) == 1 {
                continue;
            }
            let placement = match (x.placements.on(axis), w.placements.on(axis)) {
                (p, Placement::Replicate) if p != Placement::Partial && !p.shards(last) => p,
                (Placement::Replicate, Placement::Shard(0)) => Placement::Shard(last),
                (Placement::Replicate, Placement::Interleaved(0, g)) => {
                    Placement::Interleaved(last, g)
                }
                (p, Placement::Shard(1)) if p.shards(last) => Placement::Partial,
                _ => return Err(no_rule("linear", scope, &[x, w])),
            };
            placements = placements.with(axis, placement);
        }
        let mut shape = x.shape.clone();
        shape[last] = w.shape[0];
        let out = self.output(scope, &shape, placements, x.dtype);
        let input = self.trace.tensor(x.id);
        let k = *input.shape.last().expect("linear inputs have a last dim");
        let m = input.elements() / k;
        let n = self.trace.tensor(w.id).shape[0];
        let product = Operator::Product(Product::Matmul(Gemm { m, n, k }, site));
        let saved: &[TensorId] = if self.is_frozen(w.id) { &[] } else { &[x.id] };
        self.record(scope, product, &[x, w], &out, saved);
        Ok(out)
    }

    /// One GEMM per local expert: `x: [rows, k]` ordered by expert, one `w: [n, k]` per expert. Saves `x` for the
    /// gradient of `w`, if `w` is trained.
    ///
    /// # Errors
    /// When the shards of `x` and `w` do not match.
    pub fn grouped_linear(
        &mut self,
        scope: &str,
        x: &DTensor,
        w: &DTensor,
        groups: u64,
    ) -> Result<DTensor, DTensorError> {
        let etp = self.mesh().etp;
        let placement = match (x.placements.on(Axis::Etp), w.placements.on(Axis::Etp)) {
            _ if etp == 1 => Placement::Replicate,
            (Placement::Replicate, Placement::Shard(0)) => Placement::Shard(1),
            (Placement::Replicate, Placement::Interleaved(0, g)) => Placement::Interleaved(1, g),
            (p, Placement::Shard(1)) if p.shards(1) => Placement::Partial,
            _ => return Err(no_rule("grouped_linear", scope, &[x, w])),
        };
        let placements = x.placements.with(Axis::Etp, placement);
        let out = self.output(scope, &[x.shape[0], w.shape[0]], placements, x.dtype);
        let [m, k] = [0, 1].map(|dim| self.trace.tensor(x.id).shape[dim]);
        let n = self.trace.tensor(w.id).shape[0];
        let product = Operator::Product(Product::GroupedMatmul(Gemm { m, n, k }, groups));
        let saved: &[TensorId] = if self.is_frozen(w.id) { &[] } else { &[x.id] };
        self.record(scope, product, &[x, w], &out, saved);
        Ok(out)
    }
}

impl Gemm {
    /// Sizes of the GEMM that computes the gradient of one factor.
    fn gradient(self, factor: Factor) -> Self {
        let Self { m, n, k } = self;
        match factor {
            Factor::First => Self { m, n: k, k: n },
            Factor::Second => Self { m: n, n: k, k: m },
        }
    }
}

impl Product {
    /// Appends two GEMMs: the gradient of the input (dgrad) and, unless the weight is frozen, the
    /// gradient of the weight (wgrad), which is added to the gradient sums.
    pub(super) fn backward(
        self,
        to: &mut Backward<'_, '_>,
        Of { index: of, record }: Of<'_>,
        gradient: &DTensor,
    ) {
        let (x, w) = (&record.inputs[0], &record.inputs[1]);
        let operator = |factor| {
            let product = match self {
                Self::Matmul(gemm, site) => Self::Matmul(gemm.gradient(factor), site),
                Self::GroupedMatmul(gemm, n) => Self::GroupedMatmul(gemm.gradient(factor), n),
            };
            Gradient::Product(of, product, factor)
        };
        let mut back = to.of_input(of, 0, x);
        for axis in BLOCK_AXES {
            // A weight sharded by columns leaves each rank with a partial sum of the input's gradient.
            if w.placements.on(axis).shards(0) {
                back.placements = back.placements.with(axis, Placement::Partial);
            }
        }
        let (first, tensors) = (
            operator(Factor::First),
            [vec![gradient.id, w.id], vec![back.id]],
        );
        to.push(of, Pass::BackwardInput, first, tensors);
        to.accumulate(x, back);
        let tape = &mut *to.tape;
        if tape.is_frozen(w.id) {
            return;
        }
        let name = format!("{}.weight_gradient", tape.trace.forward[of].scope);
        let shape = tape.trace.tensor(w.id).shape.clone();
        let out = tape.local_tensor(&name, shape, w.dtype, TensorRole::Gradient);
        let (second, tensors) = (
            operator(Factor::Second),
            [vec![gradient.id, x.id], vec![out]],
        );
        to.push(of, Pass::BackwardWeight, second, tensors);
    }

    /// Name in profiles and cost class.
    pub(super) fn class(self) -> Class {
        let name = match self {
            Self::Matmul(..) => "matmul",
            Self::GroupedMatmul(..) => "grouped matmul",
        };
        (name.into(), CostClass::Product(self))
    }
}

impl Trace {
    /// Whether a product runs in FP8: a linear layer whose sizes allow it. The router never does: it chooses experts
    /// by small differences. Nor do adapters: Megatron-Bridge makes them of Megatron-Core's own linear layers, not of
    /// Transformer Engine's (`peft/utils.py` at 067f987, `ParallelLinearAdapter`). Nor does a head, of the model or of a prediction
    /// module: Megatron-Core runs it outside the context of 8 bits (`multi_token_prediction.py`, `process_mtp_loss`).
    #[must_use]
    pub fn is_eight_bit(&self, product: Product) -> bool {
        match product {
            Product::Matmul(_, Site::Router | Site::Adapter | Site::Vocabulary)
            | Product::GroupedMatmul(..) => false,
            Product::Matmul(Gemm { m, n, k }, _) => {
                let fits = |size: u64| size.is_multiple_of(EIGHT_BIT_MULTIPLE);
                self.eight_bits && [m, n, k].into_iter().all(fits)
            }
        }
    }
}
