//! Mixture of experts: routing, permutation of rows, combination.

use catalog::{Axis, DType};

use crate::error::DTensorError;
use crate::gradients::{Backward, Of};
use crate::operator::{Class, CostClass, Expert, Gradient, Operator, Route};
use crate::placement::Placement;
use crate::tape::{DTensor, Tape, no_rule};
use crate::tensor::TensorRole;

impl Tape<'_> {
    /// Whether tensor-parallel ranks share the rows of experts ([`crate::ShardingPlan::shares_rows`]).
    #[must_use]
    pub fn shares_rows(&self) -> bool {
        self.mesh().tp > 1 && self.plan.shares_rows
    }

    /// Number of a rank's rows: one for each of its tokens and each of `k` experts.
    fn chosen_rows(&self, x: &DTensor, k: u64) -> [u64; 2] {
        let local = &self.trace.tensor(x.id).shape;
        let h = *local.last().expect("tokens have a width");
        let rows = local.iter().product::<u64>() / h * k;
        match self.shares_rows() && self.mesh().etp == 1 {
            true => [rows / self.mesh().tp, h],
            false => [rows, h],
        }
    }

    /// Tokens like these, or parts of their sum if ranks share rows.
    fn combined(&mut self, scope: &str, like: &DTensor) -> DTensor {
        let mut out = self.like(scope, like, like.dtype);
        if self.shares_rows() {
            out.placements = out.placements.with(Axis::Tp, Placement::Partial);
        }
        out
    }

    /// Top-k routing over `logits: […, experts]`. Returns the weights of the chosen experts; saves
    /// the logits, these weights and the chosen indices.
    pub fn top_k(&mut self, scope: &str, logits: &DTensor, k: u64, route: Route) -> DTensor {
        let mut shape = logits.shape.clone();
        *shape.last_mut().expect("logits have a last dim") = k;
        let (name, role) = (format!("{scope}.probabilities"), TensorRole::Activation);
        let chosen = self.tensor(&name, &shape, logits.placements, DType::F32, role);
        let local = self.trace.tensor(chosen.id).shape.clone();
        let indices = self.local_tensor(&format!("{scope}.indices"), local, DType::I64, role);
        let saved = [logits.id, chosen.id, indices];
        let operator = Operator::Expert(Expert::Route(route));
        self.record(scope, operator, &[logits], &chosen, &saved);
        chosen
    }

    /// Adds each expert's bias to the expert's rows.
    ///
    /// # Errors
    /// When rows are partial sums: the bias would be added once per rank.
    pub fn expert_bias(
        &mut self,
        scope: &str,
        rows: &DTensor,
        b: &DTensor,
    ) -> Result<DTensor, DTensorError> {
        if self.mesh().etp > 1 && rows.placements.on(Axis::Etp) == Placement::Partial {
            return Err(no_rule("expert bias", scope, &[rows, b]));
        }
        let out = self.like(scope, rows, rows.dtype);
        let operator = Operator::Expert(Expert::Bias);
        self.record(scope, operator, &[rows, b], &out, &[]);
        Ok(out)
    }

    /// Tokens copied to one row per choice, ordered by expert: `[b, s, h]` → `[b·s·k, h]`.
    pub fn permute(&mut self, scope: &str, x: &DTensor, k: u64) -> DTensor {
        let shape = self.chosen_rows(x, k).to_vec();
        let out = self.rows(&format!("{scope}.permuted"), shape, x.dtype);
        self.record(scope, Operator::Expert(Expert::Permute), &[x], &out, &[]);
        out
    }

    /// Like [`Self::permute`], with each row multiplied by its weight of `weights: […, k]`; saves
    /// the tokens for the router's gradient.
    pub fn permute_weighted(&mut self, scope: &str, x: &DTensor, weights: &DTensor) -> DTensor {
        let k = *weights.shape.last().expect("weights have a last dim");
        let shape = self.chosen_rows(x, k).to_vec();
        let out = self.rows(&format!("{scope}.permuted"), shape, x.dtype);
        let operator = Operator::Expert(Expert::WeightedPermute);
        self.record(scope, operator, &[x, weights], &out, &[x.id]);
        out
    }

    /// Adds up rows into tokens, without weights.
    pub fn unpermute_plain(&mut self, scope: &str, rows: &DTensor, like: &DTensor) -> DTensor {
        let out = self.combined(scope, like);
        let operator = Operator::Expert(Expert::PlainUnpermute);
        self.record(scope, operator, &[rows], &out, &[]);
        out
    }

    /// Combines rows into tokens, weighted by the router; saves the rows for the router's gradient.
    pub fn unpermute(
        &mut self,
        scope: &str,
        rows: &DTensor,
        probabilities: &DTensor,
        like: &DTensor,
    ) -> DTensor {
        let out = self.combined(scope, like);
        let (operator, inputs) = (Operator::Expert(Expert::Unpermute), [rows, probabilities]);
        self.record(scope, operator, &inputs, &out, &[rows.id]);
        out
    }
}

impl Expert {
    /// One operator. A bias passes the gradient on; its own is the sum of each expert's rows.
    pub(super) fn backward(self, to: &mut Backward<'_, '_>, of: Of<'_>, gradient: DTensor) {
        let operator = Gradient::Expert(of.index, self);
        match self {
            Self::Bias => to.push_sum(of, gradient, (operator, of.record.inputs[1].id)),
            Self::Route(_)
            | Self::Permute
            | Self::WeightedPermute
            | Self::Unpermute
            | Self::PlainUnpermute => {
                // Partial gradients of rows are added up to partial gradients of tokens.
                let permutes = matches!(self, Self::Permute | Self::WeightedPermute);
                let partial = permutes
                    && to.tape.mesh().etp > 1
                    && gradient.placements.on(Axis::Etp) == Placement::Partial;
                to.push_one(of, &gradient, operator, |_, placed| match partial {
                    true => placed.with(Axis::Tp, Placement::Partial),
                    false => placed,
                });
            }
        }
    }

    /// Name in profiles and cost class.
    pub(super) fn class(self) -> Class {
        match self {
            Self::Route(_) => ("routing".into(), CostClass::TopK),
            Self::Permute | Self::WeightedPermute => ("permute".into(), CostClass::Permute),
            Self::Unpermute | Self::PlainUnpermute => ("unpermute".into(), CostClass::Unpermute),
            Self::Bias => ("bias".into(), CostClass::Bias),
        }
    }
}
