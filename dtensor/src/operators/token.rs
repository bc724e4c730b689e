//! Embeddings and the loss: operators driven by token ids, positions and labels.

use catalog::{Axis, DType};

use crate::gradients::{Backward, Of};
use crate::operator::{
    Class, Collective, CollectiveKind, CostClass, Exchange, Gradient, Moves, Operator, Token,
};
use crate::placement::{BLOCK_AXES, Placement, Placements};
use crate::tape::{DTensor, Tape};
use crate::tensor::TensorRole;
use crate::trace::Pass;

impl Tape<'_> {
    /// Looks up rows of `table: [rows, h]`. With the table sharded by rows the result is partial.
    pub fn embedding(
        &mut self,
        scope: &str,
        ids: &DTensor,
        table: &DTensor,
        dtype: DType,
    ) -> DTensor {
        let mut shape = ids.shape.clone();
        shape.push(table.shape[1]);
        let mut placements = ids.placements;
        for axis in BLOCK_AXES {
            if table.placements.on(axis) == Placement::Shard(0) {
                placements = placements.with(axis, Placement::Partial);
            }
        }
        let out = self.output(scope, &shape, placements, dtype);
        let token = Token::Embedding(table.id);
        self.record(scope, Operator::Token(token), &[ids], &out, &[ids.id]);
        out
    }

    /// Adds the rows of a learned position table; row `first` belongs to position 0.
    pub fn positions(&mut self, scope: &str, x: &DTensor, table: &DTensor, first: u64) -> DTensor {
        let out = self.like(scope, x, x.dtype);
        let table = table.id;
        let token = Token::Positions { table, first };
        self.record(scope, Operator::Token(token), &[x], &out, &[]);
        out
    }

    /// Cross-entropy over fp32 logits, which it saves. With a sharded vocabulary the maxima, sums and target logits
    /// are all-reduced: three numbers per token.
    pub fn cross_entropy(&mut self, scope: &str, logits: &DTensor) -> DTensor {
        let shape = &self.trace.tensor(logits.id).shape;
        let vocabulary = shape.len() - 1;
        let rows: u64 = shape[..vocabulary].iter().product();
        let sharded = self.mesh().tp > 1 && logits.placements.on(Axis::Tp).shards(vocabulary);
        let sums = sharded.then(|| {
            let name = format!("{scope}.sums");
            let shape = vec![rows, 3];
            let sums = self.local_tensor(&name, shape, DType::F32, TensorRole::Activation);
            let collective = Collective {
                kind: CollectiveKind::AllReduce,
                axis: Axis::Tp,
                bytes: self.trace.tensor(sums).bytes().0,
            };
            let moves = Moves::VocabularySums(logits.id);
            let exchange = Exchange { collective, moves };
            self.push(scope, Operator::Exchange(exchange), [&[sums], &[sums], &[]]);
            sums
        });
        let (name, whole) = (format!("{scope}.loss"), Placements::REPLICATE);
        let loss = self.tensor(&name, &[rows], whole, DType::F32, TensorRole::Activation);
        let operator = Operator::Token(Token::CrossEntropy(sums));
        self.record(scope, operator, &[logits], &loss, &[logits.id]);
        loss
    }
}

impl Token {
    /// A table's gradient is added to the gradient sums; the logits' overwrote them in forward.
    pub(super) fn backward(self, to: &mut Backward<'_, '_>, of: Of<'_>, gradient: DTensor) {
        let operator = Gradient::Token(of.index, self);
        match self {
            Self::Embedding(table) if to.tape.is_frozen(table) => {}
            Self::Embedding(_) => {
                let rows = to.gradient("rows", &gradient);
                let tensors = [vec![gradient.id], vec![rows.id]];
                to.push(of.index, Pass::BackwardWeight, operator, tensors);
            }
            Self::Positions { table, .. } => to.push_sum(of, gradient, (operator, table)),
            Self::CrossEntropy(_) => {
                to.push_one(of, &gradient, operator, |_, placed| placed);
            }
        }
    }

    /// Name in profiles and cost class.
    pub(super) fn class(self) -> Class {
        match self {
            Self::Embedding(_) => ("embedding".into(), CostClass::Embedding),
            Self::Positions { .. } => ("bias".into(), CostClass::Bias),
            Self::CrossEntropy(_) => ("cross-entropy".into(), CostClass::CrossEntropy),
        }
    }
}
