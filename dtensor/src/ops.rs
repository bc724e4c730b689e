//! Forward operators: shapes, placement propagation, and what each keeps for its backward.

use catalog::model::{Activation, NormKind};
use catalog::{Axis, DType, RopeScaling};

use crate::error::DTensorError;
use crate::placement::{BLOCK_AXES, Placement, Placements};
use crate::tape::{DTensor, Rule, Tape};
use crate::trace::{
    AttentionShape, Collective, CollectiveKind, Detail, OpKind, SoftmaxRule, TensorId, TensorRole,
};

impl Tape<'_> {
    /// `y = x · wᵀ` with `x: […, k]`, `w: [n, k]`. Keeps `x`.
    ///
    /// # Errors
    /// When `x` and `w` are placed so that no product of shards gives a placed result.
    pub fn linear(
        &mut self,
        scope: &str,
        x: &DTensor,
        w: &DTensor,
    ) -> Result<DTensor, DTensorError> {
        let last = x.shape.len() - 1;
        let mut placements = x.placements;
        for axis in BLOCK_AXES {
            if self.mesh().size(axis) == 1 {
                continue;
            }
            let placement = match (x.placements.on(axis), w.placements.on(axis)) {
                (p, Placement::Replicate) if p != Placement::Partial && !shards(p, last) => p,
                (Placement::Replicate, Placement::Shard(0)) => Placement::Shard(last),
                (Placement::Replicate, Placement::Interleaved(0, g)) => {
                    Placement::Interleaved(last, g)
                }
                (p, Placement::Shard(1)) if shards(p, last) => Placement::Partial,
                _ => return Err(no_rule("linear", scope, &[x, w])),
            };
            placements = placements.with(axis, placement);
        }
        let mut shape = x.shape.clone();
        shape[last] = w.shape[0];
        let out = self.tensor(
            &format!("{scope}.output"),
            &shape,
            placements,
            x.dtype,
            TensorRole::Activation,
        );
        let k = *self
            .trace
            .tensor(x.id)
            .shape
            .last()
            .expect("linear inputs have a last dim");
        let rows = self.trace.tensor(x.id).elements() / k;
        let n = self.trace.tensor(w.id).shape[0];
        let kind = OpKind::Matmul { m: rows, n, k };
        self.record(scope, kind, &[x, w], &[&out], &[x.id], Rule::Own);
        Ok(out)
    }

    /// An operator on one tensor that keeps its shape and placement.
    pub fn unary(&mut self, scope: &str, kind: OpKind, x: &DTensor, keeps_input: bool) -> DTensor {
        let out = self.like(scope, x, x.dtype);
        let saved: &[TensorId] = if keeps_input { &[x.id] } else { &[] };
        self.record(scope, kind, &[x], &[&out], saved, Rule::Own);
        out
    }

    /// A nonlinearity. Keeps its input.
    pub fn activation(&mut self, scope: &str, function: Nonlinearity, x: &DTensor) -> DTensor {
        let out = self.unary(scope, OpKind::Activation { gated: false }, x, true);
        self.detail(function.detail());
        out
    }

    /// Rotary positions over `dims` of every `head_dim` columns of `x: [b, s, heads·d]`, from `first` on;
    /// of neighbours, or of columns half of `dims` apart.
    pub fn rope(
        &mut self,
        scope: &str,
        x: &DTensor,
        [head_dim, first, dims]: [u64; 3],
        (theta, scaling, neighbours): (f64, RopeScaling, bool),
    ) -> DTensor {
        let out = self.unary(scope, OpKind::Rope, x, false);
        self.detail(Detail::Rope {
            head_dim,
            first,
            neighbours,
            dims,
            theta,
            scaling,
        });
        out
    }

    /// Adds the rows of a learned table of positions, whose row for position 0 is `first`.
    pub fn positions(&mut self, scope: &str, x: &DTensor, table: &DTensor, first: u64) -> DTensor {
        let out = self.unary(scope, OpKind::Bias, x, false);
        let table = table.id;
        self.detail(Detail::Table { table, first });
        out
    }

    /// Columns of `shared: […, r]` after those of every head of `x: […, heads·d]`. Keeps nothing. The
    /// gradient of `shared` is a sum over heads: of those here, where ranks share them out.
    pub fn join(&mut self, scope: &str, x: &DTensor, shared: &DTensor, heads: u64) -> DTensor {
        let last = x.shape.len() - 1;
        let (own, more) = (x.shape[last] / heads, shared.shape[last]);
        let mut shape = x.shape.clone();
        shape[last] = heads * (own + more);
        let name = format!("{scope}.output");
        let out = self.tensor(&name, &shape, x.placements, x.dtype, TensorRole::Activation);
        self.record(scope, OpKind::Copy, &[x, shared], &[&out], &[], Rule::Own);
        self.detail(Detail::Join { own, shared: more });
        out
    }

    /// Multiplies by a number.
    pub fn scale(&mut self, scope: &str, x: &DTensor, factor: f64) -> DTensor {
        let out = self.unary(scope, OpKind::Scale, x, false);
        self.detail(Detail::Scale { factor });
        out
    }

    /// Bounds smoothly: `c·tanh(x/c)`. Keeps its input.
    pub fn cap(&mut self, scope: &str, x: &DTensor, bound: f64) -> DTensor {
        let out = self.unary(scope, OpKind::Activation { gated: false }, x, true);
        self.detail(Detail::Cap { bound });
        out
    }

    /// Multiplies every row of `x` by the sigmoid of its number in `gate: […, 1]`. Keeps both.
    ///
    /// # Errors
    /// When the gate does not lie where the rows do.
    pub fn gate(
        &mut self,
        scope: &str,
        x: &DTensor,
        gate: &DTensor,
    ) -> Result<DTensor, DTensorError> {
        let aligned = |axis| x.placements.on(axis) == gate.placements.on(axis);
        if BLOCK_AXES
            .into_iter()
            .any(|axis| self.mesh().size(axis) > 1 && !aligned(axis))
        {
            return Err(no_rule("gate", scope, &[x, gate]));
        }
        let out = self.like(scope, x, x.dtype);
        let saved = [x.id, gate.id];
        self.record(scope, OpKind::Scale, &[x, gate], &[&out], &saved, Rule::Own);
        self.detail(Detail::Gate);
        Ok(out)
    }

    /// The nonlinearity of a gated MLP: `act(gate) · up`. Keeps both.
    pub fn gated_activation(
        &mut self,
        scope: &str,
        function: Nonlinearity,
        gate: &DTensor,
        up: &DTensor,
    ) -> DTensor {
        let out = self.like(scope, up, up.dtype);
        let kind = OpKind::Activation { gated: true };
        self.record(
            scope,
            kind,
            &[gate, up],
            &[&out],
            &[gate.id, up.id],
            Rule::Own,
        );
        self.detail(function.detail());
        out
    }

    /// `g·σ(1.702·g)·(u + 1)` of bounded operands, as gpt-oss has it. Keeps both.
    pub fn bounded_glu(
        &mut self,
        scope: &str,
        gate: &DTensor,
        up: &DTensor,
        limit: f64,
    ) -> DTensor {
        let out = self.like(scope, up, up.dtype);
        let kind = OpKind::Activation { gated: true };
        let saved = [gate.id, up.id];
        self.record(scope, kind, &[gate, up], &[&out], &saved, Rule::Own);
        self.detail(Detail::BoundedGlu { limit });
        out
    }

    /// As [`Tape::gated_activation`] on one tensor that holds gate and up, `[…, 2f]` → `[…, f]`.
    pub fn fused_gated_activation(
        &mut self,
        scope: &str,
        function: Nonlinearity,
        both: &DTensor,
    ) -> DTensor {
        let mut shape = both.shape.clone();
        let last = shape.len() - 1;
        shape[last] /= 2;
        let mut placements = both.placements;
        for axis in BLOCK_AXES {
            if let Placement::Interleaved(dim, _) = placements.on(axis) {
                placements = placements.with(axis, Placement::Shard(dim));
            }
        }
        let name = format!("{scope}.output");
        let out = self.tensor(
            &name,
            &shape,
            placements,
            both.dtype,
            TensorRole::Activation,
        );
        let kind = OpKind::Activation { gated: true };
        self.record(scope, kind, &[both], &[&out], &[both.id], Rule::Own);
        self.detail(function.detail());
        out
    }

    /// Layer or RMS norm over the last dim, or over every run of `weight`'s length in it (one head).
    /// Keeps the input and 32-bit statistics per norm (mean and reciprocal deviation, or the latter
    /// alone).
    pub fn norm(
        &mut self,
        scope: &str,
        x: &DTensor,
        weight: &DTensor,
        bias: Option<&DTensor>,
        (kind, epsilon, from_one): (NormKind, f64, bool),
    ) -> DTensor {
        let statistics = match kind {
            NormKind::LayerNorm => 2,
            NormKind::RmsNorm => 1,
        };
        let out = self.like(scope, x, x.dtype);
        let width = weight.shape[0].max(1);
        let rows = self.trace.tensor(x.id).elements() / width;
        let name = format!("{scope}.statistics");
        let stats = self.local_tensor(
            &name,
            vec![rows, statistics],
            DType::F32,
            TensorRole::Activation,
        );
        self.record(
            scope,
            OpKind::Norm,
            &[x, weight],
            &[&out],
            &[x.id, stats],
            Rule::Own,
        );
        let op = self.trace.forward.last_mut().expect("just recorded");
        op.outputs.push(stats);
        self.detail(Detail::Norm {
            kind,
            epsilon,
            bias: bias.map(|b| b.id),
            from_one,
        });
        out
    }

    /// Adds a bias vector.
    pub fn bias(&mut self, scope: &str, x: &DTensor, b: &DTensor) -> DTensor {
        let out = self.like(scope, x, x.dtype);
        self.record(scope, OpKind::Bias, &[x, b], &[&out], &[], Rule::Own);
        out
    }

    /// Adds two tensors of equal placement.
    ///
    /// # Errors
    /// When placements differ.
    pub fn add(&mut self, scope: &str, a: &DTensor, b: &DTensor) -> Result<DTensor, DTensorError> {
        for axis in BLOCK_AXES {
            if self.mesh().size(axis) > 1 && a.placements.on(axis) != b.placements.on(axis) {
                return Err(no_rule("add", scope, &[a, b]));
            }
        }
        let out = self.like(scope, a, a.dtype);
        self.record(scope, OpKind::Add, &[a, b], &[&out], &[], Rule::Own);
        Ok(out)
    }

    /// Dropout; keeps a one-byte mask.
    pub fn dropout(&mut self, scope: &str, x: &DTensor, probability: f64) -> DTensor {
        let out = self.like(scope, x, x.dtype);
        let shape = self.trace.tensor(x.id).shape.clone();
        let mask = self.local_tensor(
            &format!("{scope}.mask"),
            shape,
            DType::U8,
            TensorRole::Activation,
        );
        self.record(scope, OpKind::Dropout, &[x], &[&out], &[mask], Rule::Own);
        self.detail(Detail::Dropout { probability });
        self.trace
            .forward
            .last_mut()
            .expect("just recorded")
            .outputs
            .push(mask);
        out
    }

    /// Copies to another type.
    pub fn cast(&mut self, scope: &str, x: &DTensor, dtype: DType) -> DTensor {
        let out = self.like(&format!("{scope}.cast"), x, dtype);
        self.record(scope, OpKind::Copy, &[x], &[&out], &[], Rule::Own);
        out
    }

    /// Looks rows of `table: [rows, h]` up. With the table sharded by rows the result is partial.
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
        let name = format!("{scope}.output");
        let out = self.tensor(&name, &shape, placements, dtype, TensorRole::Activation);
        self.record(
            scope,
            OpKind::Embedding,
            &[ids],
            &[&out],
            &[ids.id],
            Rule::Own,
        );
        let table = table.id;
        self.detail(Detail::Table { table, first: 0 });
        out
    }

    /// Core attention, unfused: scores, softmax, dropout, context. `q: [b, s, heads·d]` and so on,
    /// sharded by heads; returns `[b, s, heads·d_v]`.
    pub fn attention(
        &mut self,
        scope: &str,
        [q, k, v]: [&DTensor; 3],
        shape: AttentionShape,
        (rule, dropout): (SoftmaxRule, f64),
    ) -> DTensor {
        let scores = self.scores(&format!("{scope}.scores"), q, shape);
        let probabilities = self.scores(&format!("{scope}.probabilities"), q, shape);
        let kind = OpKind::AttentionScores(shape);
        self.record(scope, kind, &[q, k], &[&scores], &[q.id, k.id], Rule::Own);
        let kind = OpKind::Softmax(shape);
        // The derivative of a bound needs what it bounds.
        let saved: &[TensorId] = match rule.cap {
            Some(_) => &[probabilities.id, scores.id],
            None => &[probabilities.id],
        };
        self.record(scope, kind, &[&scores], &[&probabilities], saved, Rule::Own);
        self.detail(Detail::Softmax(rule));
        let weights = if dropout > 0.0 {
            self.dropout(scope, &probabilities, dropout)
        } else {
            probabilities
        };
        let mut out_shape = q.shape.clone();
        let last = out_shape.len() - 1;
        out_shape[last] = q.shape[last] / shape.qk_dim * shape.v_dim;
        let name = format!("{scope}.output");
        let out = self.tensor(
            &name,
            &out_shape,
            q.placements,
            q.dtype,
            TensorRole::Activation,
        );
        let kind = OpKind::AttentionContext(shape);
        self.record(
            scope,
            kind,
            &[&weights, v],
            &[&out],
            &[weights.id, v.id],
            Rule::Own,
        );
        out
    }

    /// A tensor of a number per head, query and key.
    fn scores(&mut self, name: &str, q: &DTensor, shape: AttentionShape) -> DTensor {
        let dims = vec![shape.batch, shape.heads, shape.q_len, shape.kv_len];
        let id = self.local_tensor(name, dims.clone(), q.dtype, TensorRole::Activation);
        let heads = q.shape[2] / shape.qk_dim;
        let global = [shape.batch, heads, q.shape[1], shape.kv_len];
        self.place(id, &global, scores_placements(q.placements));
        DTensor {
            id,
            shape: dims,
            placements: Placements::REPLICATE,
            dtype: q.dtype,
        }
    }

    /// Keys and values travel round the context-parallel ring while attention runs; the operator
    /// sees all of them. One record stands for `cp − 1` steps of the local keys and values.
    pub fn ring_exchange(&mut self, scope: &str, k: &DTensor, v: &DTensor) {
        let bytes = self.trace.tensor(k.id).bytes() + self.trace.tensor(v.id).bytes();
        let collective = Collective {
            kind: CollectiveKind::RingExchange,
            axis: Axis::Cp,
            bytes: bytes.0,
        };
        self.record(
            scope,
            OpKind::Collective(collective),
            &[k, v],
            &[],
            &[],
            Rule::Ring,
        );
    }

    /// Cross-entropy over 32-bit logits, which it keeps. With a sharded vocabulary the maxima,
    /// sums and target logits are reduced: three numbers per token.
    pub fn cross_entropy(&mut self, scope: &str, logits: &DTensor) -> DTensor {
        let rows: u64 = self
            .trace
            .tensor(logits.id)
            .shape
            .iter()
            .rev()
            .skip(1)
            .product();
        let mut reduced = None;
        if self.mesh().tp > 1 && shards(logits.placements.on(Axis::Tp), logits.shape.len() - 1) {
            let sums = self.local_tensor(
                &format!("{scope}.sums"),
                vec![rows, 3],
                DType::F32,
                TensorRole::Activation,
            );
            reduced = Some(sums);
            let bytes = self.trace.tensor(sums).bytes().0;
            let collective = Collective {
                kind: CollectiveKind::AllReduce,
                axis: Axis::Tp,
                bytes,
            };
            self.trace.forward.push(crate::trace::Op {
                scope: scope.to_owned(),
                kind: OpKind::Collective(collective),
                pass: crate::trace::Pass::Forward,
                inputs: vec![sums],
                outputs: vec![sums],
                saved: Vec::new(),
                detail: Detail::VocabularySums { logits: logits.id },
            });
        }
        let name = format!("{scope}.loss");
        let loss = self.tensor(
            &name,
            &[rows],
            Placements::REPLICATE,
            DType::F32,
            TensorRole::Activation,
        );
        self.record(
            scope,
            OpKind::CrossEntropy,
            &[logits],
            &[&loss],
            &[logits.id],
            Rule::Own,
        );
        self.detail(Detail::Loss { sums: reduced });
        loss
    }

    /// Local shape of a tensor.
    #[must_use]
    pub fn local_shape(&self, x: &DTensor) -> &[u64] {
        &self.trace.tensor(x.id).shape
    }

    /// Global shape and placements of the local tensor behind `x`.
    pub(crate) fn layout(&self, x: &DTensor) -> (Vec<u64>, Placements) {
        let info = self.trace.tensor(x.id);
        (info.global.clone(), info.placements)
    }

    pub(crate) fn like(&mut self, scope: &str, x: &DTensor, dtype: DType) -> DTensor {
        let shape = self.trace.tensor(x.id).shape.clone();
        let id = self.local_tensor(
            &format!("{scope}.output"),
            shape,
            dtype,
            TensorRole::Activation,
        );
        let (global, placements) = self.layout(x);
        self.place(id, &global, placements);
        DTensor {
            id,
            shape: x.shape.clone(),
            placements: x.placements,
            dtype,
        }
    }
}

/// Where attention's `[b, heads, q, kv]` lies when its queries `[b, s, heads·d]` lie so.
fn scores_placements(queries: Placements) -> Placements {
    let mut placements = Placements::REPLICATE;
    for axis in BLOCK_AXES {
        let on = match queries.on(axis) {
            Placement::Shard(1) => Placement::Shard(2),
            Placement::Shard(2) => Placement::Shard(1),
            other => other,
        };
        placements = placements.with(axis, on);
    }
    placements
}

/// A nonlinearity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nonlinearity {
    /// Which.
    pub function: Activation,
    /// Whether a GELU is the tanh approximation.
    pub tanh: bool,
}

impl Nonlinearity {
    fn detail(self) -> Detail {
        Detail::Activation {
            function: self.function,
            tanh: self.tanh,
        }
    }
}

pub(crate) fn shards(placement: Placement, dim: usize) -> bool {
    matches!(placement, Placement::Shard(d) | Placement::Interleaved(d, _) if d == dim)
}

pub(crate) fn no_rule(operator: &'static str, scope: &str, inputs: &[&DTensor]) -> DTensorError {
    DTensorError::NoRule {
        operator,
        scope: scope.to_owned(),
        placements: inputs.iter().map(|t| t.placements).collect(),
    }
}
