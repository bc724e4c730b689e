//! Runs a block's passes: one kernel per traced operator.

use std::collections::BTreeMap;
use std::sync::Arc;

use spec::Axis;
use spec::model::NormKind;

use super::attention::Heads;
use super::block::{Block, GradientSink, Half, Keep, Parameters, Saved, Step};
use super::elementwise::{self, Function, each};
use super::experts::{Route, probabilities, probabilities_backward};
use super::gemm::{Matrix, multiply_add, multiply_tree};
use super::machine::{CpuError, Machine, MicroBatch};
use super::redistribute::{put, read_terms, take, write_terms};
use super::tensor::{Tensor, Terms, Value};
use super::tokens;
use super::tree::TreeSum;
use crate::backward::GRADIENT_SUM;
use crate::philox::Stream;
use crate::placement::{BLOCK_AXES, Placement};
use crate::trace::{
    AttentionShape, CollectiveKind, Detail, Op, OpKind, Pass, TensorId, TensorInfo, TensorRole,
    View, ViewKind,
};

/// One pass of one micro-batch through a block.
struct Run<'r> {
    block: &'r Block,
    machine: &'r Machine<'r>,
    batch: &'r MicroBatch<'r>,
    parameters: &'r dyn Parameters,
    values: BTreeMap<u32, Arc<Value>>,
    route: Option<Arc<Route>>,
    /// Keys and values of the whole sequence while attention runs round the ring.
    ring: BTreeMap<u32, Arc<Value>>,
}

/// Who runs a pass, on what, with which parameters.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The rank.
    pub machine: &'a Machine<'a>,
    /// The micro-batch.
    pub batch: &'a MicroBatch<'a>,
    /// The block's parameters.
    pub parameters: &'a dyn Parameters,
}

/// What a block returns from forward.
#[derive(Debug)]
pub struct Forward {
    /// Its output: what the next block reads, or the loss of every token.
    pub output: Tensor,
    /// What it keeps.
    pub saved: Saved,
}

impl Block {
    /// Forward of a micro-batch. `input` is the previous block's output, absent for the embedding.
    ///
    /// # Errors
    /// When communication stops or an operator has no kernel.
    pub fn forward(
        &self,
        context: &Context<'_>,
        input: Option<Tensor>,
    ) -> Result<Forward, CpuError> {
        let mut run = Run::new(self, context);
        if let Some(input) = input {
            run.set_input(input);
        }
        for (index, &step) in self.forward.iter().enumerate() {
            run.forward_step(step)?;
            for storage in &self.forward_dies[index] {
                run.values.remove(storage);
            }
        }
        let output = self.trace.output.expect("a traced block has an output");
        let output = run.tensor(output)?.clone();
        let mut values = run.values;
        values.retain(|storage, _| self.kept.contains(storage));
        let route = (self.keep != Keep::Input).then_some(run.route).flatten();
        Ok(Forward {
            output,
            saved: Saved { values, route },
        })
    }

    /// Backward of a micro-batch, or half of it. `gradient` is that of the output; the loss block
    /// needs none, nor does the weight half. Returns the gradient of the input.
    ///
    /// # Errors
    /// When communication stops or an operator has no kernel.
    pub fn backward(
        &self,
        context: &Context<'_>,
        saved: &mut Saved,
        gradient: Option<Tensor>,
        half: Half,
        sink: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>, CpuError> {
        let mut run = Run::new(self, context);
        run.values = std::mem::take(&mut saved.values);
        run.route = saved.route.take();
        if half != Half::Weight {
            for &index in &self.again {
                run.forward_step(self.forward[index])?;
            }
            if let (Some(gradient), Some(id)) = (gradient, self.trace.output_gradient) {
                run.set(id, Value::Tensor(gradient));
            }
        }
        for (index, &step) in self.backward.iter().enumerate() {
            let weight = matches!(step, Step::Op(op) if self.trace.backward[op].pass == Pass::BackwardWeight);
            match half {
                Half::Input if weight => continue,
                Half::Weight if !weight => continue,
                _ => run.backward_step(step, sink)?,
            }
            for storage in &self.backward_dies[index] {
                if half == Half::Both || !self.weight_reads.contains(storage) {
                    run.values.remove(storage);
                }
            }
        }
        let result = match self.trace.input_gradient.filter(|_| half != Half::Weight) {
            Some(id) => Some(run.tensor(id)?.clone()),
            None => None,
        };
        if half == Half::Input {
            saved.values = run.values;
            saved
                .values
                .retain(|storage, _| self.weight_reads.contains(storage));
            saved.route = run.route;
        }
        Ok(result)
    }
}

impl<'r> Run<'r> {
    fn new(block: &'r Block, context: &Context<'r>) -> Self {
        Self {
            block,
            machine: context.machine,
            batch: context.batch,
            parameters: context.parameters,
            values: BTreeMap::new(),
            route: None,
            ring: BTreeMap::new(),
        }
    }

    fn set_input(&mut self, input: Tensor) {
        let tensors = &self.block.trace.tensors;
        if let Some(info) = tensors.iter().find(|t| t.role == TensorRole::Input) {
            let value = Arc::new(Value::Tensor(input));
            self.values.insert(info.storage.0, value);
        }
    }

    fn info(&self, id: TensorId) -> &'r TensorInfo {
        self.block.trace.tensor(id)
    }

    fn set(&mut self, id: TensorId, value: Value) {
        let storage = self.block.storage(id);
        self.values.insert(storage, Arc::new(value));
    }

    fn value(&self, id: TensorId) -> Result<&Value, CpuError> {
        let storage = self.block.storage(id);
        self.values.get(&storage).map(AsRef::as_ref).ok_or_else(|| {
            let info = self.info(id);
            CpuError::Unsupported {
                operator: "reading".to_owned(),
                scope: info.name.clone(),
                reason: "a tensor that nothing wrote".to_owned(),
            }
        })
    }

    fn tensor(&self, id: TensorId) -> Result<&Tensor, CpuError> {
        if self.info(id).role == TensorRole::Parameter {
            return Ok(self.parameters.parameter(id));
        }
        match self.value(id)? {
            Value::Tensor(tensor) => Ok(tensor),
            _ => Err(CpuError::Unsupported {
                operator: "reading".to_owned(),
                scope: self.info(id).name.clone(),
                reason: "partial sums before they are reduced".to_owned(),
            }),
        }
    }

    fn put_tensor(&mut self, id: TensorId, shape: Vec<usize>, data: Vec<f32>) {
        let dtype = self.info(id).dtype;
        self.set(id, Value::Tensor(Tensor::new(shape, data, dtype)));
    }

    fn threads(&self) -> usize {
        self.machine.threads
    }

    fn stream(&self, op: &Op) -> Stream {
        let operator = format!("{}{}", self.block.prefix, op.scope);
        Stream::new(self.machine.seed, self.batch.step, &operator)
    }

    fn forward_step(&mut self, step: Step) -> Result<(), CpuError> {
        match step {
            Step::Op(op) => {
                let op = &self.block.trace.forward[op];
                self.forward_op(op)
            }
            Step::View(view) => self.forward_view(&self.block.trace.forward_views[view]),
        }
    }

    fn forward_view(&mut self, view: &View) -> Result<(), CpuError> {
        let x = self.tensor(view.from)?;
        let part = match view.kind {
            ViewKind::Shard => self
                .machine
                .shard(x, self.info(view.from), self.info(view.to)),
            ViewKind::Columns { offset, whole } => {
                let (start, columns) = self.columns(x.columns(), offset, whole, view.to);
                let rows: Vec<usize> = (0..x.rows()).collect();
                let picked = (start..start + columns).collect();
                let flat = [x.rows(), x.columns()];
                let mut shape = x.shape.clone();
                *shape.last_mut().expect("sliced tensors have a last dim") = columns;
                let data = take(&x.f32(), &flat, &[rows, picked]);
                Tensor::new(shape, data, x.dtype())
            }
        };
        self.set(view.to, Value::Tensor(part));
        Ok(())
    }

    /// First local column and number of local columns of a part of the last dim.
    fn columns(&self, local: usize, offset: u64, whole: u64, part: TensorId) -> (usize, usize) {
        let share = |columns: u64| (columns * local as u64 / whole) as usize;
        let columns = *self
            .info(part)
            .global
            .last()
            .expect("sliced tensors have a last dim");
        (share(offset), share(columns))
    }

    fn forward_op(&mut self, op: &Op) -> Result<(), CpuError> {
        match op.kind {
            OpKind::Matmul { .. } => self.linear(op),
            OpKind::GroupedMatmul { .. } => self.grouped_linear(op),
            OpKind::AttentionScores(shape) => {
                let (q, k) = (op.inputs[0], op.inputs[1]);
                let positions = self.query_positions(q);
                let heads = self.heads(&shape, &positions, q)?;
                let keys = self.keys(k)?;
                let scores =
                    heads.rows_by_keys(&self.tensor(q)?.f32(), &keys.f32(), shape.qk_dim as usize);
                let dims = vec![heads.batch, heads.heads, positions.len(), heads.kv_len];
                self.put_tensor(op.outputs[0], dims, scores);
                Ok(())
            }
            OpKind::Softmax(shape) => {
                let x = self.tensor(op.inputs[0])?;
                let positions = self.scores_positions(op.inputs[0]);
                let heads = self.heads_of_scores(&shape, &positions, x);
                let out = heads.softmax(&x.f32(), scale(&shape));
                let dims = x.shape.clone();
                self.put_tensor(op.outputs[0], dims, out);
                Ok(())
            }
            OpKind::AttentionContext(shape) => {
                let (w, v) = (op.inputs[0], op.inputs[1]);
                let weights = self.tensor(w)?;
                let positions = self.scores_positions(w);
                let heads = self.heads_of_scores(&shape, &positions, weights);
                let values = self.keys(v)?;
                let dim = shape.v_dim as usize;
                let out = heads.weighted_keys(&weights.f32(), &values.f32(), dim);
                let dims = vec![heads.batch, positions.len(), heads.heads * dim];
                self.put_tensor(op.outputs[0], dims, out);
                Ok(())
            }
            OpKind::Norm => self.norm(op),
            OpKind::Activation { gated } => self.activation(op, gated),
            OpKind::Add => {
                let (a, b) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
                let mut out = a.f32().into_owned();
                let b = b.f32();
                each(&mut out, self.threads(), |i, x| *x += b[i]);
                let shape = a.shape.clone();
                self.put_tensor(op.outputs[0], shape, out);
                Ok(())
            }
            OpKind::Bias => self.bias(op),
            OpKind::Dropout => self.dropout(op),
            OpKind::Rope => self.rope(op, false, op.inputs[0], op.outputs[0]),
            OpKind::Copy => {
                let x = self.tensor(op.inputs[0])?;
                let (shape, data) = (x.shape.clone(), x.f32().into_owned());
                self.put_tensor(op.outputs[0], shape, data);
                Ok(())
            }
            OpKind::Embedding => self.embedding(op),
            OpKind::CrossEntropy => self.cross_entropy(op),
            OpKind::TopK => self.top_k(op),
            OpKind::Permute => self.permute(op),
            OpKind::Unpermute => self.unpermute(op),
            OpKind::Collective(collective) => self.collective(op, collective.kind),
            OpKind::Scale => Err(Machine::unsupported(op, "this scaling")),
        }
    }

    fn collective(&mut self, op: &Op, kind: CollectiveKind) -> Result<(), CpuError> {
        match op.detail {
            Detail::Redistribute { axis, from, to } => {
                let (x, out) = (op.inputs[0], op.outputs[0]);
                let mut info = self.info(x).clone();
                info.placements = info.placements.with(axis, from);
                let value = self.machine.redistribute(
                    &op.scope,
                    self.value(x)?,
                    &info,
                    (axis, from, to),
                )?;
                self.set(out, value);
                Ok(())
            }
            Detail::Dispatch { back } => self.dispatch(op, back),
            Detail::ExpertTensor { gather } => self.expert_tensor(op, gather),
            Detail::VocabularySums { logits } => self.vocabulary_sums(op, logits),
            _ if kind == CollectiveKind::RingExchange => {
                for &id in &op.inputs {
                    self.gather_ring(op, id)?;
                }
                Ok(())
            }
            _ => Err(Machine::unsupported(op, "this collective")),
        }
    }

    // Matrix products.

    /// Whether some axis shards a dim of a parameter, so that contracting it leaves partial sums.
    fn is_split(&self, id: TensorId, dim: usize) -> bool {
        let info = self.info(id);
        BLOCK_AXES.iter().any(|&axis| {
            self.machine.position.mesh.size(axis) > 1
                && matches!(
                    info.placements.on(axis),
                    Placement::Shard(d) | Placement::Interleaved(d, _) if d == dim
                )
        })
    }

    /// `a · b` contracted over dim `dim` of the weight `w`.
    fn product(
        &self,
        a: Matrix<'_>,
        b: Matrix<'_>,
        w: TensorId,
        dim: usize,
        (shape, out): (Vec<usize>, TensorId),
    ) -> Result<Value, CpuError> {
        let dtype = self.info(out).dtype;
        if self.machine.is_exact() {
            let leaves = self.machine.feature_leaves(self.info(w), dim)?;
            let terms = Terms {
                terms: vec![multiply_tree(a, b, &leaves)],
                shape,
                dtype,
            };
            return Ok(if self.is_split(w, dim) {
                Value::Terms(terms)
            } else {
                Value::Tensor(terms.reduce())
            });
        }
        let mut data = vec![0.0; a.rows * b.columns];
        multiply_add(a, b, &mut data, b.columns, self.threads());
        Ok(Value::Tensor(Tensor::new(shape, data, dtype)))
    }

    fn linear(&mut self, op: &Op) -> Result<(), CpuError> {
        let (x, w) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let (n, k) = (w.shape[0], w.shape[1]);
        let mut shape = x.shape.clone();
        *shape.last_mut().expect("linear inputs have a last dim") = n;
        let (data, weight) = (x.f32(), w.f32());
        let a = Matrix::new(&data, x.rows(), k, k);
        let b = Matrix::new(&weight, n, k, k).transposed();
        let value = self.product(a, b, op.inputs[1], 1, (shape, op.outputs[0]))?;
        self.set(op.outputs[0], value);
        Ok(())
    }

    fn linear_backward_input(&mut self, op: &Op) -> Result<(), CpuError> {
        let (dy, w) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let (n, k) = (w.shape[0], w.shape[1]);
        let mut shape = dy.shape.clone();
        *shape.last_mut().expect("gradients have a last dim") = k;
        let (data, weight) = (dy.f32(), w.f32());
        let a = Matrix::new(&data, dy.rows(), n, n);
        let b = Matrix::new(&weight, n, k, k);
        let value = self.product(a, b, op.inputs[1], 0, (shape, op.outputs[0]))?;
        self.set(op.outputs[0], value);
        Ok(())
    }

    fn linear_backward_weight(
        &mut self,
        op: &Op,
        forward: &Op,
        sink: &mut dyn GradientSink,
    ) -> Result<(), CpuError> {
        let (dy, x) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let (n, k, rows) = (dy.columns(), x.columns(), x.rows());
        let (dy, data) = (dy.f32(), x.f32());
        let a = Matrix::new(&dy, rows, n, n).transposed();
        let b = Matrix::new(&data, rows, k, k);
        let weight = forward.inputs[1];
        if self.machine.is_exact() {
            let leaves = self
                .machine
                .token_leaves(self.info(op.inputs[1]), self.batch)?;
            sink.tree(weight, 0..n * k, multiply_tree(a, b, &leaves));
        } else {
            multiply_add(a, b, sink.plain(weight), k, self.threads());
        }
        Ok(())
    }

    // Attention.

    fn query_positions(&self, q: TensorId) -> Vec<u64> {
        let info = self.info(q);
        self.machine.positions(&info.global, &info.placements)
    }

    /// Positions of the query dim of `[b, heads, q, kv]`.
    fn scores_positions(&self, scores: TensorId) -> Vec<u64> {
        let info = self.info(scores);
        self.machine
            .position
            .indices(&info.global, &info.placements, 2)
    }

    fn heads<'p>(
        &self,
        shape: &AttentionShape,
        positions: &'p [u64],
        q: TensorId,
    ) -> Result<Heads<'p>, CpuError> {
        let x = self.tensor(q)?;
        let heads = x.columns() / shape.qk_dim as usize;
        Ok(self.heads_with(shape, positions, x.shape[0], heads))
    }

    fn heads_of_scores<'p>(
        &self,
        shape: &AttentionShape,
        positions: &'p [u64],
        scores: &Tensor,
    ) -> Heads<'p> {
        self.heads_with(shape, positions, scores.shape[0], scores.shape[1])
    }

    fn heads_with<'p>(
        &self,
        shape: &AttentionShape,
        positions: &'p [u64],
        batch: usize,
        heads: usize,
    ) -> Heads<'p> {
        Heads {
            batch,
            heads,
            kv_heads: (heads as u64 * shape.kv_heads / shape.heads) as usize,
            kv_len: shape.kv_len as usize,
            positions,
            window: shape.window,
            exact: self.machine.is_exact(),
            threads: self.threads(),
        }
    }

    /// Keys or values of the whole sequence: as they are, or from round the ring.
    fn keys(&self, id: TensorId) -> Result<&Tensor, CpuError> {
        match self.ring.get(&self.block.storage(id)).map(AsRef::as_ref) {
            Some(Value::Tensor(x)) => Ok(x),
            _ => self.tensor(id),
        }
    }

    fn gather_ring(&mut self, op: &Op, id: TensorId) -> Result<(), CpuError> {
        let storage = self.block.storage(id);
        let whole = self
            .machine
            .ring(&op.scope, self.tensor(id)?, self.info(id))?;
        self.ring.insert(storage, Arc::new(Value::Tensor(whole)));
        Ok(())
    }

    /// Whether keys and values of this attention go round the ring.
    fn is_ring(&self) -> bool {
        self.block.trace.forward.iter().any(
            |op| matches!(op.kind, OpKind::Collective(c) if c.kind == CollectiveKind::RingExchange),
        )
    }

    fn attention_backward(
        &mut self,
        op: &Op,
        forward: &Op,
        input: usize,
        shape: &AttentionShape,
    ) -> Result<(), CpuError> {
        if self.is_ring() {
            let key = forward.inputs[1];
            if !self.ring.contains_key(&self.block.storage(key)) {
                self.gather_ring(forward, key)?;
            }
        }
        let scores = matches!(op.kind, OpKind::AttentionScores(_));
        let dim = if scores { shape.qk_dim } else { shape.v_dim } as usize;
        // The scores' gradients go by [b, h, q, k]; the context's come as [b, q, h·d].
        let by_scores = if scores {
            op.inputs[0]
        } else {
            forward.inputs[0]
        };
        let positions = self.scores_positions(by_scores);
        let heads = self.heads_of_scores(shape, &positions, self.tensor(by_scores)?);
        let (gradient, other) = (op.inputs[0], op.inputs[1]);
        let dims = |columns: usize| vec![heads.batch, heads.kv_len, columns];
        match (scores, input) {
            (true, 0) => {
                let (w, k) = (self.tensor(gradient)?.f32(), self.keys(other)?.f32());
                let data = heads.weighted_keys(&w, &k, dim);
                let shape = vec![heads.batch, positions.len(), heads.heads * dim];
                self.put_tensor(op.outputs[0], shape, data);
            }
            (false, 0) => {
                let (d, v) = (self.tensor(gradient)?.f32(), self.keys(other)?.f32());
                let data = heads.rows_by_keys(&d, &v, dim);
                let shape = vec![heads.batch, heads.heads, positions.len(), heads.kv_len];
                self.put_tensor(op.outputs[0], shape, data);
            }
            _ => {
                let (w, x) = if scores {
                    (gradient, other)
                } else {
                    (other, gradient)
                };
                let (w, x) = (self.tensor(w)?.f32(), self.tensor(x)?.f32());
                let shape = dims(heads.kv_heads * dim);
                let dtype = self.info(op.outputs[0]).dtype;
                let value = if self.machine.is_exact() {
                    let leaves = self
                        .machine
                        .position_leaves(&positions, self.batch.seq_len)?;
                    let terms = Terms {
                        terms: vec![heads.weighted_rows_tree(&w, &x, dim, &leaves)],
                        shape,
                        dtype,
                    };
                    if positions.len() < heads.kv_len {
                        Value::Terms(terms)
                    } else {
                        Value::Tensor(terms.reduce())
                    }
                } else {
                    let data = heads.weighted_rows(&w, &x, dim);
                    Value::Tensor(Tensor::new(shape, data, dtype))
                };
                let value = if self.is_ring() {
                    self.return_ring(forward, value)?
                } else {
                    value
                };
                self.set(op.outputs[0], value);
            }
        }
        Ok(())
    }

    /// Gradients of keys or values back to the ranks that hold them.
    fn return_ring(&self, forward: &Op, value: Value) -> Result<Value, CpuError> {
        let info = self.info(forward.inputs[1]);
        let to = info.placements.on(Axis::Cp);
        let moves = (Axis::Cp, Placement::Partial, to);
        self.machine
            .redistribute(&forward.scope, &value, info, moves)
    }

    // Rows.

    fn norm(&mut self, op: &Op) -> Result<(), CpuError> {
        let Detail::Norm {
            kind,
            epsilon,
            bias,
        } = op.detail
        else {
            return Err(Machine::unsupported(op, "a norm without its kind"));
        };
        let (x, w) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        if w.len() != x.columns() {
            return Err(Machine::unsupported(op, "a norm over part of a row"));
        }
        let data = x.f32();
        let statistics = elementwise::statistics(&data, w.len(), kind, epsilon);
        let bias = bias.map(|b| self.parameters.parameter(b).f32());
        let out = elementwise::norm(
            &data,
            &w.f32(),
            bias.as_deref(),
            &statistics,
            self.threads(),
        );
        let shape = x.shape.clone();
        let rows = statistics.len();
        let (columns, kept) = match kind {
            NormKind::LayerNorm => (2, statistics.into_flattened()),
            NormKind::RmsNorm => (1, statistics.iter().map(|s| s[1]).collect()),
        };
        self.put_tensor(op.outputs[0], shape, out);
        self.put_tensor(op.outputs[1], vec![rows, columns], kept);
        Ok(())
    }

    fn norm_backward(
        &mut self,
        op: &Op,
        forward: &Op,
        sink: &mut dyn GradientSink,
    ) -> Result<(), CpuError> {
        let Detail::Norm { kind, bias, .. } = forward.detail else {
            return Err(Machine::unsupported(op, "a norm without its kind"));
        };
        let (dy, x) = (self.tensor(op.inputs[0])?, self.tensor(forward.inputs[0])?);
        let weight = self.tensor(forward.inputs[1])?;
        let columns = weight.len();
        let statistics: Vec<[f32; 2]> = match kind {
            NormKind::LayerNorm => {
                let kept = self.tensor(forward.outputs[1])?.f32();
                kept.chunks(2).map(|s| [s[0], s[1]]).collect()
            }
            NormKind::RmsNorm => {
                let kept = self.tensor(forward.outputs[1])?.f32();
                kept.iter().map(|&r| [0.0, r]).collect()
            }
        };
        let shape = x.shape.clone();
        let (dy, data) = (dy.f32(), x.f32());
        let w = weight.f32();
        let dx = elementwise::norm_backward(&dy, &data, &w, &statistics, kind, self.threads());
        let hat = |row: usize, j: usize| {
            let [mean, r] = statistics[row];
            dy[row * columns + j] * ((data[row * columns + j] - mean) * r)
        };
        self.token_sum(sink, forward.inputs[1], forward.inputs[0], columns, hat)?;
        if let Some(bias) = bias {
            let plain = |row: usize, j: usize| dy[row * columns + j];
            self.token_sum(sink, bias, forward.inputs[0], columns, plain)?;
        }
        if let Some(&out) = op.outputs.first() {
            self.put_tensor(out, shape, dx);
        }
        Ok(())
    }

    /// Adds to a vector parameter's gradient the sum of `value(row, column)` over the rows of `like`.
    fn token_sum(
        &self,
        sink: &mut dyn GradientSink,
        parameter: TensorId,
        like: TensorId,
        columns: usize,
        value: impl Fn(usize, usize) -> f32,
    ) -> Result<(), CpuError> {
        if self.machine.is_exact() {
            let mut sum = TreeSum::default();
            for (leaf, rows) in self.machine.token_leaves(self.info(like), self.batch)? {
                let mut node = vec![0.0; columns];
                tokens::column_sum(rows, columns, &mut node, &value);
                sum.leaf(leaf, node);
            }
            sink.tree(parameter, 0..columns, sum);
        } else {
            let rows = self.info(like);
            let positions = self.machine.positions(&rows.global, &rows.placements);
            let rows = 0..rows.global[0] as usize * positions.len();
            tokens::column_sum(rows, columns, sink.plain(parameter), value);
        }
        Ok(())
    }

    fn function(op: &Op) -> Result<Function, CpuError> {
        match op.detail {
            Detail::Activation { function, tanh } => Ok(Function { function, tanh }),
            _ => Err(Machine::unsupported(op, "an unnamed function")),
        }
    }

    fn activation(&mut self, op: &Op, gated: bool) -> Result<(), CpuError> {
        let f = Self::function(op)?;
        let threads = self.threads();
        let x = self.tensor(op.inputs[0])?;
        let mut shape = x.shape.clone();
        let mut out;
        if op.inputs.len() == 2 {
            let up = self.tensor(op.inputs[1])?.f32();
            out = x.f32().into_owned();
            each(&mut out, threads, |i, y| *y = f.value(*y) * up[i]);
        } else if gated {
            let columns = x.columns() / 2;
            *shape.last_mut().expect("activations have a last dim") = columns;
            let both = x.f32();
            out = vec![0.0; x.rows() * columns];
            elementwise::each_row(&mut out, columns, threads, |row, y| {
                let (gate, up) = both[row * 2 * columns..][..2 * columns].split_at(columns);
                for ((y, &g), &u) in y.iter_mut().zip(gate).zip(up) {
                    *y = f.value(g) * u;
                }
            });
        } else {
            out = x.f32().into_owned();
            each(&mut out, threads, |_, y| *y = f.value(*y));
        }
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    fn activation_backward(&mut self, op: &Op, forward: &Op) -> Result<(), CpuError> {
        let f = Self::function(forward)?;
        let threads = self.threads();
        let dy = self.tensor(op.inputs[0])?.f32();
        let x = self.tensor(forward.inputs[0])?;
        let shape = x.shape.clone();
        let data = x.f32();
        if forward.inputs.len() == 2 {
            let up = self.tensor(forward.inputs[1])?.f32();
            let mut gate = data.clone().into_owned();
            each(&mut gate, threads, |i, g| {
                *g = dy[i] * up[i] * f.derivative(*g);
            });
            let mut rise = data.into_owned();
            each(&mut rise, threads, |i, u| *u = dy[i] * f.value(*u));
            self.put_tensor(op.outputs[0], shape.clone(), gate);
            self.put_tensor(op.outputs[1], shape, rise);
            return Ok(());
        }
        let mut out = data.into_owned();
        if matches!(forward.kind, OpKind::Activation { gated: true }) {
            let columns = x.columns() / 2;
            elementwise::each_row(&mut out, 2 * columns, threads, |row, both| {
                let (gate, up) = both.split_at_mut(columns);
                let dy = &dy[row * columns..][..columns];
                for ((g, u), d) in gate.iter_mut().zip(up).zip(dy) {
                    (*g, *u) = (d * *u * f.derivative(*g), d * f.value(*g));
                }
            });
        } else {
            each(&mut out, threads, |i, x| *x = dy[i] * f.derivative(*x));
        }
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    fn bias(&mut self, op: &Op) -> Result<(), CpuError> {
        let x = self.tensor(op.inputs[0])?;
        let shape = x.shape.clone();
        let columns = x.columns();
        let mut out = x.f32().into_owned();
        if let Detail::Table { table } = op.detail {
            let info = self.info(op.inputs[0]);
            let positions = self.machine.positions(&info.global, &info.placements);
            let table = self.parameters.parameter(table).f32();
            elementwise::each_row(&mut out, columns, self.threads(), |row, y| {
                let at = positions[row % positions.len()] as usize * columns;
                for (y, t) in y.iter_mut().zip(&table[at..at + columns]) {
                    *y += t;
                }
            });
        } else {
            let b = self.tensor(op.inputs[1])?.f32();
            elementwise::each_row(&mut out, columns, self.threads(), |_, y| {
                for (y, b) in y.iter_mut().zip(b.iter()) {
                    *y += b;
                }
            });
        }
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    fn bias_backward(
        &mut self,
        op: &Op,
        forward: &Op,
        sink: &mut dyn GradientSink,
    ) -> Result<(), CpuError> {
        let dy = self.tensor(op.inputs[0])?;
        let columns = dy.columns();
        let dy = dy.f32();
        let like = forward.inputs[0];
        if let Detail::Table { table } = forward.detail {
            let info = self.info(like);
            let positions = self.machine.positions(&info.global, &info.placements);
            let rows: Vec<u32> = (0..info.global[0])
                .flat_map(|_| positions.iter().map(|&p| p as u32))
                .collect();
            return self.table_gradient(sink, table, &rows, &dy, (columns, 0), like);
        }
        let value = |row: usize, j: usize| dy[row * columns + j];
        self.token_sum(sink, forward.inputs[1], like, columns, value)
    }

    /// Adds the gradients of looked-up rows to a table's.
    fn table_gradient(
        &self,
        sink: &mut dyn GradientSink,
        table: TensorId,
        ids: &[u32],
        dy: &[f32],
        (columns, first): (usize, u64),
        like: TensorId,
    ) -> Result<(), CpuError> {
        if self.machine.is_exact() {
            let info = self.info(table);
            let rows = self
                .machine
                .position
                .indices(&info.global, &info.placements, 0);
            let size = rows.len() * columns;
            let mut sum = TreeSum::default();
            for (leaf, rows) in self.machine.token_leaves(self.info(like), self.batch)? {
                let mut node = vec![0.0; size];
                tokens::scatter(ids, dy, columns, first, rows, &mut node);
                sum.leaf(leaf, node);
            }
            sink.tree(table, 0..size, sum);
        } else {
            let rows = 0..ids.len();
            tokens::scatter(ids, dy, columns, first, rows, sink.plain(table));
        }
        Ok(())
    }

    fn dropout(&mut self, op: &Op) -> Result<(), CpuError> {
        let Detail::Dropout { probability } = op.detail else {
            return Err(Machine::unsupported(op, "no probability"));
        };
        let x = self.tensor(op.inputs[0])?;
        let info = self.info(op.inputs[0]);
        let position = &self.machine.position;
        let mut indices = position.all_indices(&info.global, &info.placements);
        for b in &mut indices[0] {
            *b += self.batch.first_sequence;
        }
        let last = indices.pop().expect("dropout's input has dims");
        let strides = strides(&info.global);
        let first = |mut row: usize| {
            let mut index = 0;
            for (list, stride) in indices.iter().zip(&strides).rev() {
                index += list[row % list.len()] * stride;
                row /= list.len();
            }
            index
        };
        let mask = elementwise::mask(x.rows(), &last, first, probability, self.stream(op));
        let out = dropped(&x.f32(), &mask, probability, self.threads());
        let shape = x.shape.clone();
        self.put_tensor(op.outputs[0], shape, out);
        self.set(op.outputs[1], Value::Mask(mask));
        Ok(())
    }

    fn rope(
        &mut self,
        op: &Op,
        backward: bool,
        from: TensorId,
        to: TensorId,
    ) -> Result<(), CpuError> {
        let Detail::Rope {
            head_dim,
            dims,
            theta,
        } = op.detail
        else {
            return Err(Machine::unsupported(op, "no frequencies"));
        };
        let info = self.info(op.inputs[0]);
        let positions = self.machine.positions(&info.global, &info.placements);
        let x = self.tensor(from)?;
        let (shape, columns) = (x.shape.clone(), x.columns());
        let mut out = x.f32().into_owned();
        let sizes = [head_dim as usize, dims as usize];
        let threads = self.threads();
        elementwise::rope(
            &mut out, columns, sizes, theta, &positions, backward, threads,
        );
        self.put_tensor(to, shape, out);
        Ok(())
    }

    // Tokens.

    fn first_row(&self, table: TensorId) -> u64 {
        let info = self.info(table);
        let rows = self
            .machine
            .position
            .indices(&info.global, &info.placements, 0);
        rows.first().copied().unwrap_or(info.global[0])
    }

    fn embedding(&mut self, op: &Op) -> Result<(), CpuError> {
        let Detail::Table { table: id } = op.detail else {
            return Err(Machine::unsupported(op, "no table"));
        };
        let table = self.parameters.parameter(id);
        let columns = table.columns();
        let out = tokens::lookup(self.batch.ids, &table.f32(), columns, self.first_row(id));
        let batch = self.info(op.outputs[0]).global[0] as usize;
        let shape = vec![batch, self.batch.ids.len() / batch.max(1), columns];
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    fn vocabulary(&self, logits: TensorId) -> (u64, usize) {
        let info = self.info(logits);
        let dim = info.global.len() - 1;
        let held = self
            .machine
            .position
            .indices(&info.global, &info.placements, dim);
        (held.first().copied().unwrap_or(info.global[dim]), dim)
    }

    /// The loss's three numbers per token over the vocabulary shards: the largest logit, the sum of
    /// exponentials, the label's logit.
    fn vocabulary_sums(&mut self, op: &Op, logits: TensorId) -> Result<(), CpuError> {
        let x = self.tensor(logits)?;
        let (columns, rows) = (x.columns(), x.rows());
        let data = x.f32();
        let (first, dim) = self.vocabulary(logits);
        let group = self.machine.group(Axis::Tp);
        let comm = self.machine.comm;
        let gather = |data: Vec<f32>| -> Result<Vec<Vec<f32>>, CpuError> {
            let message = crate::comm::pack(&data);
            let parts = group.all_gather(comm, &op.scope, message)?.wait(comm)?;
            Ok(parts.iter().map(|p| crate::comm::unpack(p)).collect())
        };
        let mut largest = vec![f32::NEG_INFINITY; rows];
        for part in gather(tokens::largest(&data, columns))? {
            for (a, b) in largest.iter_mut().zip(part) {
                *a = a.max(b);
            }
        }
        // Only one rank has the label; −0 from the others changes nothing.
        let mut target = vec![-0.0; rows];
        for part in gather(tokens::targets(&data, columns, self.batch.labels, first))? {
            for (a, b) in target.iter_mut().zip(part) {
                *a += b;
            }
        }
        let sum = if self.machine.is_exact() {
            let leaves = self.machine.feature_leaves(self.info(logits), dim)?;
            let tree = tokens::sums_tree(&data, columns, &largest, &leaves);
            let message = write_terms(std::iter::once(&tree));
            let arrived = group.all_gather(comm, &op.scope, message)?.wait(comm)?;
            let terms = read_terms(&arrived, vec![rows], spec::DType::F32);
            terms.reduce().into_f32()
        } else {
            let mut sum = tokens::sums(&data, columns, &largest, self.threads());
            group.all_reduce(comm, &op.scope, &mut sum)?;
            sum
        };
        let all = [largest, sum, target].concat();
        self.put_tensor(op.outputs[0], vec![3, rows], all);
        Ok(())
    }

    fn cross_entropy(&mut self, op: &Op) -> Result<(), CpuError> {
        let logits = op.inputs[0];
        let x = self.tensor(logits)?;
        let (columns, rows, shape) = (x.columns(), x.rows(), x.shape.clone());
        let mut data = x.f32().into_owned();
        let (first, dim) = self.vocabulary(logits);
        let labels = self.batch.labels;
        let reduced = match op.detail {
            Detail::Loss { sums } => sums,
            _ => None,
        };
        let sums = match reduced {
            Some(sums) => {
                let all = self.tensor(sums)?.f32();
                let part = |i: usize| all[i * rows..(i + 1) * rows].to_vec();
                tokens::RowSums {
                    largest: part(0),
                    sum: part(1),
                    target: part(2),
                }
            }
            None => {
                let largest = tokens::largest(&data, columns);
                let sum = if self.machine.is_exact() {
                    let leaves = self.machine.feature_leaves(self.info(logits), dim)?;
                    let tree = tokens::sums_tree(&data, columns, &largest, &leaves);
                    tree.root().unwrap_or_default()
                } else {
                    tokens::sums(&data, columns, &largest, self.threads())
                };
                let target = tokens::targets(&data, columns, labels, first);
                tokens::RowSums {
                    largest,
                    sum,
                    target,
                }
            }
        };
        let scale = self.batch.loss_scale;
        let threads = self.threads();
        let losses =
            tokens::cross_entropy(&mut data, columns, &sums, labels, first, scale, threads);
        // The logits' place now holds their gradient: backward needs nothing else of them.
        self.put_tensor(logits, shape, data);
        self.put_tensor(op.outputs[0], vec![rows], losses);
        Ok(())
    }

    // Experts.

    fn routing(&self, op: &Op) -> Result<&Arc<Route>, CpuError> {
        self.route
            .as_ref()
            .ok_or_else(|| Machine::unsupported(op, "tokens that were not routed"))
    }

    fn top_k(&mut self, op: &Op) -> Result<(), CpuError> {
        let Detail::Route { normalise } = op.detail else {
            return Err(Machine::unsupported(op, "no rule of choice"));
        };
        let logits = self.tensor(op.inputs[0])?;
        let experts = logits.columns();
        let top_k = *self
            .info(op.outputs[0])
            .shape
            .last()
            .expect("choices have a last dim") as usize;
        let tokens = self.machine.tokens(self.info(op.inputs[0]), self.batch);
        let data = logits.f32();
        let route = Arc::new(Route::new(&data, experts, top_k, &tokens));
        let p = probabilities(&data, experts, &route.chosen, top_k, normalise);
        let mut shape = logits.shape.clone();
        *shape.last_mut().expect("logits have a last dim") = top_k;
        self.put_tensor(op.outputs[0], shape, p);
        // The indices are saved with the operator; the route is what they stand for.
        if let Some(&indices) = op.saved.last() {
            self.set(indices, Value::Route(Arc::clone(&route)));
        }
        self.route = Some(route);
        Ok(())
    }

    fn permute(&mut self, op: &Op) -> Result<(), CpuError> {
        let route = Arc::clone(self.routing(op)?);
        let x = self.tensor(op.inputs[0])?;
        let columns = x.columns();
        let data = x.f32();
        let token = |&source: &u32| source as usize / route.top_k;
        let out: Vec<f32> = route
            .source
            .iter()
            .flat_map(|s| data[token(s) * columns..][..columns].iter().copied())
            .collect();
        let shape = vec![route.source.len(), columns];
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    fn permute_backward(&mut self, op: &Op, forward: &Op) -> Result<(), CpuError> {
        let route = Arc::clone(self.routing(op)?);
        let dy = self.tensor(op.inputs[0])?;
        let columns = dy.columns();
        let data = dy.f32();
        // Choices of a token are added in the order of their slots.
        let mut place = vec![0; route.source.len()];
        for (row, &source) in route.source.iter().enumerate() {
            place[source as usize] = row;
        }
        let tokens = place.len() / route.top_k;
        let mut out = vec![0.0; tokens * columns];
        for (token, out) in out.chunks_mut(columns).enumerate() {
            for slot in 0..route.top_k {
                let row = place[token * route.top_k + slot];
                for (a, b) in out.iter_mut().zip(&data[row * columns..][..columns]) {
                    *a += b;
                }
            }
        }
        let info = self.info(forward.inputs[0]);
        let batch = info.global[0] as usize;
        self.put_tensor(op.outputs[0], vec![batch, tokens / batch, columns], out);
        Ok(())
    }

    fn unpermute(&mut self, op: &Op) -> Result<(), CpuError> {
        let route = Arc::clone(self.routing(op)?);
        let (rows, p) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let columns = rows.columns();
        let (data, p) = (rows.f32(), p.f32());
        let mut place = vec![0; route.source.len()];
        for (row, &source) in route.source.iter().enumerate() {
            place[source as usize] = row;
        }
        let tokens = place.len() / route.top_k;
        let mut out = vec![0.0; tokens * columns];
        for (token, out) in out.chunks_mut(columns).enumerate() {
            for slot in 0..route.top_k {
                let choice = token * route.top_k + slot;
                let row = &data[place[choice] * columns..][..columns];
                for (a, b) in out.iter_mut().zip(row) {
                    *a += p[choice] * b;
                }
            }
        }
        let batch = self.info(op.outputs[0]).global[0] as usize;
        let shape = vec![batch, tokens / batch, columns];
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    fn unpermute_backward(&mut self, op: &Op, forward: &Op) -> Result<(), CpuError> {
        let route = Arc::clone(self.routing(op)?);
        let dy = self.tensor(op.inputs[0])?;
        let rows = self.tensor(forward.inputs[0])?;
        let probabilities = self.tensor(forward.inputs[1])?;
        let columns = rows.columns();
        let (dy, data, p) = (dy.f32(), rows.f32(), probabilities.f32());
        let mut d_rows = vec![0.0; data.len()];
        let mut d_p = vec![0.0; p.len()];
        for (row, &source) in route.source.iter().enumerate() {
            let source = source as usize;
            let dy = &dy[source / route.top_k * columns..][..columns];
            let x = &data[row * columns..][..columns];
            for (d, y) in d_rows[row * columns..][..columns].iter_mut().zip(dy) {
                *d = p[source] * y;
            }
            let along = dy.iter().zip(x).map(|(a, b)| a * b);
            d_p[source] = super::math::row_sum(along);
        }
        let shapes = (rows.shape.clone(), probabilities.shape.clone());
        self.put_tensor(op.outputs[0], shapes.0, d_rows);
        self.put_tensor(op.outputs[1], shapes.1, d_p);
        Ok(())
    }

    /// Number of levels of the rows' way that a collective stands for: the dispatch is the first
    /// after the permutation, the gather over expert tensor parallelism the next.
    fn level(&self, axis: Axis) -> usize {
        match axis {
            Axis::Ep => 1,
            _ => 1 + usize::from(self.machine.position.mesh.ep > 1),
        }
    }

    fn extended(&mut self, op: &Op, axis: Axis) -> Result<Arc<Route>, CpuError> {
        let level = self.level(axis);
        let mut route = Arc::clone(self.routing(op)?);
        if route.levels.len() <= level {
            let mut longer = Route::clone(&route);
            let everyone = axis == Axis::Etp;
            longer.extend(
                self.machine.comm,
                self.machine.group(axis),
                &op.scope,
                everyone,
            )?;
            route = Arc::new(longer);
            self.route = Some(Arc::clone(&route));
        }
        Ok(route)
    }

    fn dispatch(&mut self, op: &Op, back: bool) -> Result<(), CpuError> {
        let route = self.extended(op, Axis::Ep)?;
        let level = &route.levels[self.level(Axis::Ep)];
        let x = self.tensor(op.inputs[0])?;
        let (comm, group) = (self.machine.comm, self.machine.group(Axis::Ep));
        let out = if back {
            level.back(comm, group, &op.scope, x)?
        } else {
            level.forward(comm, group, &op.scope, x)?
        };
        self.set(op.outputs[0], Value::Tensor(out));
        Ok(())
    }

    fn expert_tensor(&mut self, op: &Op, gather: bool) -> Result<(), CpuError> {
        let route = self.extended(op, Axis::Etp)?;
        let level = &route.levels[self.level(Axis::Etp)];
        let (comm, group) = (self.machine.comm, self.machine.group(Axis::Etp));
        let out = match self.value(op.inputs[0])? {
            Value::Tensor(x) if gather => level.forward(comm, group, &op.scope, x)?,
            Value::Tensor(x) => level.back(comm, group, &op.scope, x)?,
            Value::Terms(terms) if !gather => {
                let columns = terms.shape[1];
                let parts = (0..group.size())
                    .map(|peer| {
                        let sliced: Vec<TreeSum> = terms
                            .terms
                            .iter()
                            .map(|t| {
                                t.clone()
                                    .map(|node| level.parts(&node, columns).swap_remove(peer))
                            })
                            .collect();
                        write_terms(sliced.iter())
                    })
                    .collect();
                let arrived = group.all_to_all(comm, &op.scope, parts)?.wait(comm)?;
                let shape = vec![level.rows_before(), columns];
                read_terms(&arrived, shape, terms.dtype).reduce()
            }
            _ => return Err(Machine::unsupported(op, "partial rows")),
        };
        self.set(op.outputs[0], Value::Tensor(out));
        Ok(())
    }

    fn experts_here(&self, op: &Op) -> Result<Vec<std::ops::Range<usize>>, CpuError> {
        let route = self.routing(op)?;
        let ep = self.machine.position.mesh.ep as usize;
        let count = route.experts.div_ceil(ep);
        let first = self.machine.position.index(Axis::Ep) as usize * count;
        Ok(route.groups(first, count))
    }

    /// One product per expert; `backward` multiplies by the weight instead of its transpose.
    fn grouped_product(
        &mut self,
        op: &Op,
        (x, w, out): (TensorId, TensorId, TensorId),
        backward: bool,
    ) -> Result<(), CpuError> {
        let groups = self.experts_here(op)?;
        let (data, weight) = (self.tensor(x)?, self.tensor(w)?);
        let (n, k) = (weight.shape[1], weight.shape[2]);
        let rows = data.rows();
        let (data, weight) = (data.f32(), weight.f32());
        let dim = usize::from(!backward);
        let (inner, columns) = if backward { (n, k) } else { (k, n) };
        let dtype = self.info(out).dtype;
        let mut terms: Option<TreeSum> = None;
        let mut plain = vec![0.0; rows * columns];
        let leaves = if self.machine.is_exact() {
            self.machine.feature_leaves(self.info(w), dim)?
        } else {
            Vec::new()
        };
        if self.machine.is_exact() {
            // One node holds the rows of all experts.
            let mut sum = TreeSum::default();
            for leaf in &leaves {
                let mut node = vec![0.0; rows * columns];
                for (e, range) in groups.iter().enumerate() {
                    let (a, b) = operands(&data, &weight, range, (e, n, k), backward);
                    let one = multiply_tree(a, b, &[(0, leaf.1.clone())]).root();
                    if let Some(one) = one {
                        node[range.start * columns..range.end * columns].copy_from_slice(&one);
                    }
                }
                sum.leaf(leaf.0, node);
            }
            terms = Some(sum);
        } else {
            for (e, range) in groups.iter().enumerate() {
                let (a, b) = operands(&data, &weight, range, (e, n, k), backward);
                let out = &mut plain[range.start * columns..];
                multiply_add(a, b, out, columns, self.machine.threads);
            }
        }
        debug_assert!(inner > 0);
        let shape = vec![rows, columns];
        let value = match terms {
            Some(sum) => {
                let terms = Terms {
                    terms: vec![sum],
                    shape,
                    dtype,
                };
                if self.is_split(w, dim) {
                    Value::Terms(terms)
                } else {
                    Value::Tensor(terms.reduce())
                }
            }
            None => Value::Tensor(Tensor::new(shape, plain, dtype)),
        };
        self.set(out, value);
        Ok(())
    }

    fn grouped_linear(&mut self, op: &Op) -> Result<(), CpuError> {
        self.grouped_product(op, (op.inputs[0], op.inputs[1], op.outputs[0]), false)
    }

    fn grouped_backward_weight(
        &mut self,
        op: &Op,
        forward: &Op,
        sink: &mut dyn GradientSink,
    ) -> Result<(), CpuError> {
        let groups = self.experts_here(op)?;
        let (dy, x) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let (n, k) = (dy.columns(), x.columns());
        let (dy, data) = (dy.f32(), x.f32());
        let weight = forward.inputs[1];
        let exact = self.machine.is_exact();
        for (e, range) in groups.into_iter().enumerate() {
            let rows = range.len();
            let a = Matrix::new(&dy[range.start * n..], rows, n, n).transposed();
            let b = Matrix::new(&data[range.start * k..], rows, k, k);
            let part = e * n * k..(e + 1) * n * k;
            if exact {
                let route = self.routing(op)?;
                let tokens: Vec<u64> = route.at_experts()[range].iter().map(|r| r.token).collect();
                let leaves = super::tree::parts_of_leaves(&tokens, super::tree::TOKEN_LEAF);
                sink.tree(weight, part, multiply_tree(a, b, &leaves));
            } else {
                let out = &mut sink.plain(weight)[part];
                multiply_add(a, b, out, k, self.machine.threads);
            }
        }
        Ok(())
    }

    // Backward.

    fn backward_step(&mut self, step: Step, sink: &mut dyn GradientSink) -> Result<(), CpuError> {
        match step {
            Step::View(view) => self.backward_view(&self.block.trace.backward_views[view]),
            Step::Op(op) => {
                let op = &self.block.trace.backward[op];
                self.backward_op(op, sink)
            }
        }
    }

    fn backward_view(&mut self, view: &View) -> Result<(), CpuError> {
        let part = self.tensor(view.from)?.clone();
        match view.kind {
            ViewKind::Shard => {
                let shard = self
                    .machine
                    .shard(&part, self.info(view.from), self.info(view.to));
                self.set(view.to, Value::Tensor(shard));
            }
            ViewKind::Columns { offset, whole } => {
                let of_part = *self
                    .info(view.from)
                    .global
                    .last()
                    .expect("sliced tensors have a last dim");
                let columns = (part.columns() as u64 * whole / of_part) as usize;
                let rows = part.rows();
                let mut shape = part.shape.clone();
                *shape.last_mut().expect("sliced tensors have a last dim") = columns;
                let mut data = match self.values.remove(&self.block.storage(view.to)) {
                    Some(value) => match Arc::unwrap_or_clone(value) {
                        Value::Tensor(x) => x.into_f32(),
                        _ => vec![0.0; rows * columns],
                    },
                    None => vec![0.0; rows * columns],
                };
                let start = (offset * part.columns() as u64 / of_part) as usize;
                let at = [
                    (0..rows).collect(),
                    (start..start + part.columns()).collect(),
                ];
                put(&mut data, &[rows, columns], &at, &part.f32());
                self.put_tensor(view.to, shape, data);
            }
        }
        Ok(())
    }

    fn backward_op(&mut self, op: &Op, sink: &mut dyn GradientSink) -> Result<(), CpuError> {
        if op.scope == GRADIENT_SUM {
            return self.gradient_sum(op);
        }
        let Detail::Gradient { of, input } = op.detail else {
            return match op.kind {
                OpKind::Collective(c) => self.collective(op, c.kind),
                _ => Err(Machine::unsupported(op, "a gradient of nothing")),
            };
        };
        let block = self.block;
        let forward = &block.trace.forward[of];
        match (op.kind, op.pass) {
            (OpKind::Matmul { .. }, Pass::BackwardWeight) => {
                self.linear_backward_weight(op, forward, sink)
            }
            (OpKind::Matmul { .. }, _) => self.linear_backward_input(op),
            (OpKind::GroupedMatmul { .. }, Pass::BackwardWeight) => {
                self.grouped_backward_weight(op, forward, sink)
            }
            (OpKind::GroupedMatmul { .. }, _) => {
                self.grouped_product(op, (op.inputs[0], op.inputs[1], op.outputs[0]), true)
            }
            (OpKind::AttentionScores(shape) | OpKind::AttentionContext(shape), _) => {
                self.attention_backward(op, forward, input.unwrap_or(0), &shape)
            }
            (OpKind::Softmax(shape), _) => {
                let p = self.tensor(forward.outputs[0])?;
                let positions = self.scores_positions(forward.outputs[0]);
                let heads = self.heads_of_scores(&shape, &positions, p);
                let dp = self.tensor(op.inputs[0])?.f32();
                let out = heads.softmax_backward(&p.f32(), &dp, scale(&shape));
                let dims = p.shape.clone();
                self.put_tensor(op.outputs[0], dims, out);
                Ok(())
            }
            (OpKind::Norm, _) => self.norm_backward(op, forward, sink),
            (OpKind::Activation { .. }, _) => self.activation_backward(op, forward),
            (OpKind::Bias, _) => self.bias_backward(op, forward, sink),
            (OpKind::Dropout, _) => self.dropout_backward(op, forward),
            (OpKind::Rope, _) => self.rope(forward, true, op.inputs[0], op.outputs[0]),
            (OpKind::Copy, _) => {
                let x = self.tensor(op.inputs[0])?;
                let (shape, data) = (x.shape.clone(), x.f32().into_owned());
                self.put_tensor(op.outputs[0], shape, data);
                Ok(())
            }
            (OpKind::Embedding, _) => {
                let Detail::Table { table } = forward.detail else {
                    return Err(Machine::unsupported(op, "no table"));
                };
                let dy = self.tensor(op.inputs[0])?;
                let columns = dy.columns();
                let dy = dy.f32();
                let at = (columns, self.first_row(table));
                // The gradient of a partial output is whole on every rank: rows go by the ids.
                self.table_gradient(sink, table, self.batch.ids, &dy, at, forward.inputs[0])
            }
            (OpKind::CrossEntropy, _) => {
                // Forward left the gradient in the logits' place.
                let x = self.tensor(forward.inputs[0])?;
                let (shape, data) = (x.shape.clone(), x.f32().into_owned());
                self.put_tensor(op.outputs[0], shape, data);
                Ok(())
            }
            (OpKind::TopK, _) => {
                let Detail::Route { normalise } = forward.detail else {
                    return Err(Machine::unsupported(op, "no rule of choice"));
                };
                let route = Arc::clone(self.routing(op)?);
                let logits = self.tensor(forward.inputs[0])?;
                let dy = self.tensor(op.inputs[0])?.f32();
                let chosen = (route.chosen.as_slice(), route.top_k);
                let out =
                    probabilities_backward(&logits.f32(), route.experts, chosen, normalise, &dy);
                let shape = logits.shape.clone();
                self.put_tensor(op.outputs[0], shape, out);
                Ok(())
            }
            (OpKind::Permute, _) => self.permute_backward(op, forward),
            (OpKind::Unpermute, _) => self.unpermute_backward(op, forward),
            // Gradients of keys and values went back as they were made.
            (OpKind::Collective(c), _) if c.kind == CollectiveKind::RingExchange => Ok(()),
            _ => Err(Machine::unsupported(op, "its backward")),
        }
    }

    fn dropout_backward(&mut self, op: &Op, forward: &Op) -> Result<(), CpuError> {
        let Detail::Dropout { probability } = forward.detail else {
            return Err(Machine::unsupported(op, "no probability"));
        };
        let dy = self.tensor(op.inputs[0])?;
        let Value::Mask(mask) = self.value(forward.outputs[1])? else {
            return Err(Machine::unsupported(op, "no mask"));
        };
        let out = dropped(&dy.f32(), mask, probability, self.threads());
        let shape = dy.shape.clone();
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    fn gradient_sum(&mut self, op: &Op) -> Result<(), CpuError> {
        let (a, b) = (self.value(op.inputs[0])?, self.value(op.inputs[1])?);
        let value = match (a, b) {
            (Value::Tensor(a), Value::Tensor(b)) => {
                let mut data = a.f32().into_owned();
                let b = b.f32();
                each(&mut data, self.threads(), |i, x| *x += b[i]);
                let dtype = self.info(op.outputs[0]).dtype;
                Value::Tensor(Tensor::new(a.shape.clone(), data, dtype))
            }
            (Value::Terms(a), Value::Terms(b)) => {
                let mut sum = a.clone();
                sum.terms.extend(b.terms.iter().cloned());
                Value::Terms(sum)
            }
            _ => return Err(Machine::unsupported(op, "a partial and a whole gradient")),
        };
        self.set(op.outputs[0], value);
        Ok(())
    }
}

/// `1/√d` of the scores.
fn scale(shape: &AttentionShape) -> f32 {
    1.0 / (shape.qk_dim as f32).sqrt()
}

/// Kept elements over the probability of keeping them, zero elsewhere.
fn dropped(x: &[f32], mask: &[u8], probability: f64, threads: usize) -> Vec<f32> {
    let keep = (1.0 / (1.0 - probability)) as f32;
    let mut out = x.to_vec();
    each(&mut out, threads, |i, y| {
        *y = if mask[i] == 0 { 0.0 } else { *y * keep };
    });
    out
}

/// Row-major strides of a shape.
fn strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    for i in (0..shape.len().saturating_sub(1)).rev() {
        strides[i] = strides[i + 1] * shape[i + 1];
    }
    strides
}

/// Operands of one expert's product.
fn operands<'a>(
    data: &'a [f32],
    weight: &'a [f32],
    rows: &std::ops::Range<usize>,
    (expert, n, k): (usize, usize, usize),
    backward: bool,
) -> (Matrix<'a>, Matrix<'a>) {
    let inner = if backward { n } else { k };
    let a = Matrix::new(&data[rows.start * inner..], rows.len(), inner, inner);
    let w = Matrix::new(&weight[expert * n * k..], n, k, k);
    (a, if backward { w } else { w.transposed() })
}
