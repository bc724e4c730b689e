//! The backward pass: the records in reverse, each by its rule.

use catalog::Axis;
use rustc_hash::FxHashMap;

use crate::error::DTensorError;
use crate::ops::shards;
use crate::placement::{Placement, Placements};
use crate::tape::{DTensor, Record, Rule, Tape, transfer};
use crate::trace::{
    Collective, CollectiveKind, Columns, Detail, Op, OpKind, Pass, TensorId, TensorRole, View,
    ViewKind,
};

/// Scope of the additions where a tensor has several readers.
pub const GRADIENT_SUM: &str = "gradient_sum";

/// Gradients so far, by the tensor they belong to.
type Gradients = FxHashMap<TensorId, DTensor>;

impl Tape<'_> {
    /// Appends the backward pass of everything recorded.
    pub(crate) fn backward(&mut self, output: &DTensor) -> Result<(), DTensorError> {
        let mut gradients = Gradients::default();
        let seed = self.gradient("output", output);
        self.trace.output_gradient = Some(seed.id);
        gradients.insert(output.id, seed);
        let records = std::mem::take(&mut self.records);
        for record in records.iter().rev() {
            let start = self.trace.backward.len();
            self.backward_of(record, &mut gradients)?;
            self.say_whose(record, start);
        }
        self.records = records;
        let input = |id: &TensorId| {
            let info = self.trace.tensor(*id);
            info.role == TensorRole::Input && info.storage == *id
        };
        self.trace.input_gradient = gradients
            .iter()
            .find(|(id, _)| input(id))
            .map(|(_, gradient)| gradient.id);
        Ok(())
    }

    /// Ties the backward operators pushed since `start` to the forward operator they belong to.
    fn say_whose(&mut self, record: &Record, start: usize) {
        let mut nth = 0;
        for op in &mut self.trace.backward[start..] {
            if op.detail != Detail::None || op.scope == GRADIENT_SUM {
                continue;
            }
            let each = matches!(
                op.kind,
                OpKind::AttentionScores(_) | OpKind::AttentionContext(_)
            );
            op.detail = Detail::Gradient {
                of: record.op,
                input: each.then_some(nth),
            };
            nth += 1;
        }
    }

    /// What a record's output gradient makes of the gradients of its inputs.
    fn backward_of(
        &mut self,
        record: &Record,
        gradients: &mut Gradients,
    ) -> Result<(), DTensorError> {
        if record.rule == Rule::Ring {
            self.ring_backward(record);
            return Ok(());
        }
        let Some(output) = record.outputs.first() else {
            return Ok(());
        };
        let Some(gradient) = gradients.remove(&output.id) else {
            return Ok(());
        };
        match record.rule {
            Rule::Slice(columns) => {
                self.slice_backward(columns, &record.inputs[0], &gradient, gradients);
            }
            Rule::Redistribute { axis, from, to } => {
                let back = self.transpose(record, &gradient, axis, from, to)?;
                self.accumulate(gradients, &record.inputs[0], back);
            }
            _ if record.op == usize::MAX => {
                let input = &record.inputs[0];
                let view = DTensor {
                    shape: input.shape.clone(),
                    ..gradient
                };
                self.accumulate(gradients, input, view);
            }
            _ => self.operator_backward(record, gradient, gradients),
        }
        Ok(())
    }

    /// The gradient of a part is written into that of the whole.
    fn slice_backward(
        &mut self,
        columns: Columns,
        whole: &DTensor,
        gradient: &DTensor,
        gradients: &mut Gradients,
    ) {
        let parts = gradients
            .entry(whole.id)
            .or_insert_with(|| self.gradient("parts", whole));
        self.trace.backward_views.push(View {
            before: self.trace.backward.len(),
            from: gradient.id,
            to: parts.id,
            kind: ViewKind::Columns(columns),
        });
    }

    /// The backward operators of a forward one, by its kind.
    fn operator_backward(&mut self, record: &Record, gradient: DTensor, gradients: &mut Gradients) {
        let op = self.trace.forward[record.op].clone();
        match op.kind {
            OpKind::Matmul { m, n, k } => {
                let kind = |m, n, k| OpKind::Matmul { m, n, k };
                let kinds = [kind(m, k, n), kind(n, k, m)];
                self.product_backward(&op, record, &gradient, gradients, kinds);
            }
            OpKind::GroupedMatmul { groups, m, n, k } => {
                let kind = |m, n, k| OpKind::GroupedMatmul { groups, m, n, k };
                let kinds = [kind(m, k, n), kind(n, k, m)];
                self.product_backward(&op, record, &gradient, gradients, kinds);
            }
            OpKind::AttentionScores(_) | OpKind::AttentionContext(_) => {
                self.attention_backward(&op, record, &gradient, gradients);
            }
            OpKind::Bias => {
                let reads = vec![gradient.id];
                self.push(&op, Pass::BackwardWeight, OpKind::Bias, reads, Vec::new());
                self.accumulate(gradients, &record.inputs[0], gradient);
            }
            OpKind::Add => {
                for input in &record.inputs {
                    self.accumulate(gradients, input, gradient.clone());
                }
            }
            OpKind::Embedding => {
                let reads = vec![gradient.id];
                let out = self.gradient("rows", &gradient);
                self.push(&op, Pass::BackwardWeight, op.kind, reads, vec![out.id]);
            }
            _ => self.elementwise_backward(&op, record, &gradient, gradients),
        }
    }

    /// Both factors of a product of attention: each one's gradient reads the other.
    fn attention_backward(
        &mut self,
        op: &Op,
        record: &Record,
        gradient: &DTensor,
        gradients: &mut Gradients,
    ) {
        for (index, input) in record.inputs.iter().enumerate() {
            let other = record.inputs[1 - index].id;
            let mut out = self.gradient(&input_name(op, index), input);
            if index == 1 && self.splits_queries(op, input) {
                out.placements = out.placements.with(Axis::Cp, Placement::Partial);
            }
            let reads = vec![gradient.id, other];
            self.push(op, Pass::BackwardInput, op.kind, reads, vec![out.id]);
            self.accumulate(gradients, input, out);
        }
    }

    /// Whether keys or values that every context-parallel rank holds whole meet the queries of one
    /// rank only, so that each rank has a term of their gradient.
    fn splits_queries(&self, op: &Op, keys: &DTensor) -> bool {
        let scores = match op.kind {
            OpKind::AttentionScores(_) => op.outputs[0],
            _ => op.inputs[0],
        };
        self.plan.mesh.cp > 1
            && self.trace.tensor(scores).placements.on(Axis::Cp) == Placement::Shard(2)
            && keys.placements.on(Axis::Cp) == Placement::Replicate
    }

    /// Operators whose backward is one kernel that reads the gradient and what was kept, and writes
    /// a gradient per activation input.
    fn elementwise_backward(
        &mut self,
        op: &Op,
        record: &Record,
        gradient: &DTensor,
        gradients: &mut Gradients,
    ) {
        let mut reads = vec![gradient.id];
        reads.extend(&op.saved);
        let mut writes = Vec::new();
        let mut made = Vec::new();
        for (index, input) in record.inputs.iter().enumerate() {
            let role = self.trace.tensor(input.id).role;
            if matches!(role, TensorRole::Activation | TensorRole::Input) {
                let mut out = self.gradient(&input_name(op, index), input);
                if index == 1 && matches!(op.detail, Detail::Join { .. }) {
                    out.placements = self.summed_over_heads(out.placements, &record.inputs[0]);
                }
                writes.push(out.id);
                made.push((input.clone(), out));
            }
        }
        self.push(op, Pass::BackwardInput, op.kind, reads, writes);
        for (input, out) in made {
            self.accumulate(gradients, &input, out);
        }
    }

    /// Placements of a sum over attention heads: partial on every axis that shards the heads.
    fn summed_over_heads(&self, mut placements: Placements, heads: &DTensor) -> Placements {
        let last = heads.shape.len() - 1;
        for axis in crate::placement::BLOCK_AXES {
            if self.plan.mesh.size(axis) > 1 && shards(heads.placements.on(axis), last) {
                placements = placements.with(axis, Placement::Partial);
            }
        }
        placements
    }

    fn product_backward(
        &mut self,
        op: &Op,
        record: &Record,
        gradient: &DTensor,
        gradients: &mut Gradients,
        [input_kind, weight_kind]: [OpKind; 2],
    ) {
        let (x, w) = (&record.inputs[0], &record.inputs[1]);
        let mut back = self.gradient(&input_name(op, 0), x);
        for axis in crate::placement::BLOCK_AXES {
            // A weight sharded by columns leaves each rank with one term of the input's gradient.
            if matches!(
                w.placements.on(axis),
                Placement::Shard(0) | Placement::Interleaved(0, _)
            ) {
                back.placements = back.placements.with(axis, Placement::Partial);
            }
        }
        let reads = vec![gradient.id, w.id];
        self.push(op, Pass::BackwardInput, input_kind, reads, vec![back.id]);
        self.accumulate(gradients, x, back);
        let shape = self.trace.tensor(w.id).shape.clone();
        let name = format!("{}.weight_gradient", op.scope);
        let out = self.local_tensor(&name, shape, w.dtype, TensorRole::Gradient);
        let reads = vec![gradient.id, x.id];
        self.push(op, Pass::BackwardWeight, weight_kind, reads, vec![out]);
    }

    /// Backward of a redistribution on one mesh axis, from placement `from` to placement `to`: turns the gradient of the
    /// result into the gradient of the input.
    fn transpose(
        &mut self,
        record: &Record,
        gradient: &DTensor,
        axis: Axis,
        from: Placement,
        to: Placement,
    ) -> Result<DTensor, DTensorError> {
        let have = match gradient.placements.on(axis) {
            Placement::Partial => Placement::Partial,
            _ if to == Placement::Partial => Placement::Replicate,
            _ => to,
        };
        let want = if from == Placement::Partial {
            Placement::Replicate
        } else {
            from
        };
        let all_to_all = matches!((from, to), (Placement::Shard(_), Placement::Shard(_)))
            && record.op != usize::MAX;
        let scope = self.scope_of(record);
        let kind = if all_to_all {
            Some(CollectiveKind::AllToAll)
        } else {
            transfer(have, want).ok_or_else(|| DTensorError::NoRedistribution {
                name: format!("{scope} gradient"),
                axis,
                from: have,
                to: want,
            })?
        };
        Ok(match kind {
            Some(kind) => self.collective_backward(record, gradient, kind, (axis, have, want)),
            None => self.shard_backward(record, gradient, (axis, have, want)),
        })
    }

    /// Backward of a redistribution that needs no message: the input's gradient is the gradient that this rank has, or a
    /// shard of it.
    fn shard_backward(
        &mut self,
        record: &Record,
        gradient: &DTensor,
        (axis, have, want): (Axis, Placement, Placement),
    ) -> DTensor {
        let input = &record.inputs[0];
        let mut id = gradient.id;
        if have == Placement::Replicate && want != Placement::Replicate {
            let name = format!("{}.gradient", self.scope_of(record));
            id = self.gradient(&name, input).id;
            self.trace.backward_views.push(View {
                before: self.trace.backward.len(),
                from: gradient.id,
                to: id,
                kind: ViewKind::Shard,
            });
        }
        DTensor {
            id,
            placements: gradient.placements.with(axis, want),
            shape: input.shape.clone(),
            dtype: gradient.dtype,
        }
    }

    /// Backward of a redistribution that needs a collective: `kind` turns the gradient's placement `have` into `want`.
    fn collective_backward(
        &mut self,
        record: &Record,
        gradient: &DTensor,
        kind: CollectiveKind,
        (axis, have, want): (Axis, Placement, Placement),
    ) -> DTensor {
        let input = &record.inputs[0];
        let scope = self.scope_of(record);
        let placements = gradient.placements.with(axis, want);
        let mut out = self.gradient(&format!("{scope}.gradient"), input);
        out.placements = placements;
        self.place(out.id, &input.shape, placements);
        let collective = self.collective(kind, axis, gradient.id, out.id);
        self.trace.backward.push(Op {
            scope,
            kind: OpKind::Collective(collective),
            pass: Pass::BackwardInput,
            inputs: vec![gradient.id],
            outputs: vec![out.id],
            saved: Vec::new(),
            detail: match self.trace.forward.get(record.op).map(|op| op.detail) {
                Some(Detail::Dispatch { back }) => Detail::Dispatch { back: !back },
                Some(Detail::ExpertTensor { gather }) => Detail::ExpertTensor { gather: !gather },
                _ => Detail::Redistribute {
                    axis,
                    from: have,
                    to: want,
                },
            },
        });
        out
    }

    fn scope_of(&self, record: &Record) -> String {
        self.trace
            .forward
            .get(record.op)
            .map_or_else(|| "input".to_owned(), |op| op.scope.clone())
    }

    /// Keys and values go round again, with their gradients beside them.
    fn ring_backward(&mut self, record: &Record) {
        let op = self.trace.forward[record.op].clone();
        let OpKind::Collective(c) = op.kind else {
            return;
        };
        let kind = OpKind::Collective(Collective {
            bytes: 2 * c.bytes,
            ..c
        });
        self.push(
            &op,
            Pass::BackwardInput,
            kind,
            op.inputs.clone(),
            Vec::new(),
        );
    }

    /// Adds a gradient to what a tensor has; a second one costs an addition.
    fn accumulate(&mut self, gradients: &mut Gradients, input: &DTensor, gradient: DTensor) {
        let role = self.trace.tensor(input.id).role;
        if !matches!(role, TensorRole::Activation | TensorRole::Input) {
            return;
        }
        let Some(first) = gradients.remove(&input.id) else {
            gradients.insert(input.id, gradient);
            return;
        };
        let sum = self.gradient("sum", input);
        let sum = DTensor {
            placements: gradient.placements,
            ..sum
        };
        self.trace.backward.push(Op {
            scope: GRADIENT_SUM.to_owned(),
            kind: OpKind::Add,
            pass: Pass::BackwardInput,
            inputs: vec![first.id, gradient.id],
            outputs: vec![sum.id],
            saved: Vec::new(),
            detail: Detail::None,
        });
        gradients.insert(input.id, sum);
    }

    /// A gradient tensor with the local shape of `x`.
    fn gradient(&mut self, name: &str, x: &DTensor) -> DTensor {
        let shape = self.trace.tensor(x.id).shape.clone();
        let id = self.local_tensor(
            &format!("{name}.gradient"),
            shape,
            x.dtype,
            TensorRole::Gradient,
        );
        let (global, placements) = self.layout(x);
        self.place(id, &global, placements);
        DTensor { id, ..x.clone() }
    }

    fn push(
        &mut self,
        op: &Op,
        pass: Pass,
        kind: OpKind,
        inputs: Vec<TensorId>,
        outputs: Vec<TensorId>,
    ) {
        let scope = op.scope.clone();
        self.trace.backward.push(Op {
            scope,
            kind,
            pass,
            inputs,
            outputs,
            saved: Vec::new(),
            detail: Detail::None,
        });
    }
}

fn input_name(op: &Op, index: usize) -> String {
    if index == 0 {
        format!("{}.input", op.scope)
    } else {
        format!("{}.input{index}", op.scope)
    }
}
