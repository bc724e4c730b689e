//! Mixture of experts of a pass: routing, dispatch, grouped products.

use super::state::Run;
use crate::block::GradientSink;
use crate::experts::{Route, ranking, weights, weights_backward};
use crate::gemm::{Matrix, multiply_add, multiply_part, multiply_tree};
use crate::machine::{Leaves, Machine, Result};
use crate::math::add;
use crate::redistribute::{read_terms, write_terms};
use crate::tensor::Tensor;
use crate::tokens;
use crate::tree::{TOKEN_LEAF, TreeSum, parts_of_leaves};
use crate::value::Value;
use catalog::Axis;
use dtensor::{self, Gradient, Op, TensorId};
use std::ops::Range;
use std::sync::Arc;

impl Run<'_> {
    fn routing(&self, scope: &str) -> Result<&Arc<Route>> {
        let route = self.held.route.as_ref();
        route.ok_or_else(|| Machine::unsupported("routing", scope, "tokens that were not routed"))
    }

    pub(super) fn top_k(&mut self, op: &Op, rule: &dtensor::Route) -> Result<()> {
        let logits = self.tensor(op.inputs[0])?;
        let experts = logits.columns();
        let top_k = *self
            .info(op.outputs[0])
            .shape
            .last()
            .expect("choices have a last dim") as usize;
        let tokens = self.machine.tokens(self.info(op.inputs[0]), self.batch);
        let data = logits.f32();
        let bias = rule.bias.map(|b| self.parameters.parameter(b).f32());
        let ranks = ranking(&data, experts, &rule.router, bias.as_deref());
        let route = Arc::new(Route::new(&ranks, experts, top_k, &tokens));
        let p = weights(&data, experts, (&route.chosen, top_k), &rule.router);
        let shape = logits.with_columns(top_k);
        self.put_tensor(op.outputs[0], shape, p);
        // The saved indices tensor holds the route, so that its bytes count; backward reads `held`.
        if let Some(&indices) = op.saved.last() {
            self.set(indices, Value::Route(Arc::clone(&route)));
        }
        self.held.route = Some(route);
        Ok(())
    }

    pub(super) fn top_k_backward(
        &mut self,
        op: &Op<Gradient>,
        forward: &Op,
        rule: &dtensor::Route,
    ) -> Result<()> {
        let route = Arc::clone(self.routing(&op.scope)?);
        let logits = self.tensor(forward.inputs[0])?;
        let dy = self.tensor(op.inputs[0])?.f32();
        let chosen = (route.chosen.as_slice(), route.top_k);
        let out = weights_backward(&logits.f32(), route.experts, chosen, &rule.router, &dy);
        let shape = logits.shape.clone();
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    /// Copies tokens to rows; with a second input, the router's weights, every row is multiplied by its own.
    pub(super) fn permute(&mut self, op: &Op) -> Result<()> {
        let route = Arc::clone(self.routing(&op.scope)?);
        let x = self.tensor(op.inputs[0])?;
        let columns = x.columns();
        let data = x.f32();
        let weights = (op.inputs.get(1)).map(|&p| self.tensor(p)).transpose()?;
        let weights = weights.map(Tensor::f32);
        let mut out = Vec::with_capacity(route.source.len() * columns);
        for &source in &route.source {
            let row = &data[source as usize / route.top_k * columns..][..columns];
            match &weights {
                Some(p) => out.extend(row.iter().map(|x| p[source as usize] * x)),
                None => out.extend_from_slice(row),
            }
        }
        let shape = vec![route.source.len(), columns];
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    pub(super) fn permute_backward(&mut self, op: &Op<Gradient>, forward: &Op) -> Result<()> {
        let route = Arc::clone(self.routing(&op.scope)?);
        let dy = self.tensor(op.inputs[0])?;
        let columns = dy.columns();
        let data = dy.f32();
        let weighted = forward.inputs.get(1).copied();
        let weights = weighted.map(|p| self.tensor(p)).transpose()?;
        let out = combined(&route, &data, columns, weights.map(Tensor::f32).as_deref());
        if let Some(weights) = weights {
            let x = self.tensor(forward.inputs[0])?.f32();
            let mut d_p = vec![0.0; weights.f32().len()];
            for (row, &source) in route.source.iter().enumerate() {
                let source = source as usize;
                let x = &x[source / route.top_k * columns..][..columns];
                let along = data[row * columns..][..columns].iter().zip(x);
                d_p[source] = crate::math::row_sum(along.map(|(a, b)| a * b));
            }
            let shape = weights.shape.clone();
            self.put_tensor(op.outputs[1], shape, d_p);
        }
        let batch = self.info(forward.inputs[0]).global[0] as usize;
        let shape = vec![batch, out.len() / columns / batch, columns];
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    pub(super) fn unpermute(&mut self, op: &Op) -> Result<()> {
        let route = Arc::clone(self.routing(&op.scope)?);
        let rows = self.tensor(op.inputs[0])?;
        let weights = (op.inputs.get(1)).map(|&p| self.tensor(p)).transpose()?;
        let (columns, data) = (rows.columns(), rows.f32());
        let out = combined(&route, &data, columns, weights.map(Tensor::f32).as_deref());
        let batch = self.info(op.outputs[0]).global[0] as usize;
        let shape = vec![batch, out.len() / columns / batch, columns];
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    pub(super) fn unpermute_backward(&mut self, op: &Op<Gradient>, forward: &Op) -> Result<()> {
        let route = Arc::clone(self.routing(&op.scope)?);
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
            d_p[source] = crate::math::row_sum(along);
        }
        let shapes = (rows.shape.clone(), probabilities.shape.clone());
        self.put_tensor(op.outputs[0], shapes.0, d_rows);
        self.put_tensor(op.outputs[1], shapes.1, d_p);
        Ok(())
    }

    pub(super) fn plain_unpermute_backward(&mut self, op: &Op<Gradient>) -> Result<()> {
        let route = Arc::clone(self.routing(&op.scope)?);
        let dy = self.tensor(op.inputs[0])?;
        let (columns, dy) = (dy.columns(), dy.f32());
        let token = |&source: &u32| source as usize / route.top_k;
        let rows = route.source.iter();
        let out = rows.flat_map(|s| dy[token(s) * columns..][..columns].iter().copied());
        let (shape, out) = (vec![route.source.len(), columns], out.collect());
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    /// Level of the dispatch that a collective corresponds to: the all-to-all is the first after the permutation, the
    /// gather over expert tensor parallelism the next.
    fn level(&self, axis: Axis) -> usize {
        match axis {
            Axis::Ep => 1,
            _ => 1 + usize::from(self.machine.position.mesh.ep > 1),
        }
    }

    fn extended(&mut self, scope: &str, axis: Axis) -> Result<Arc<Route>> {
        let level = self.level(axis);
        let mut route = Arc::clone(self.routing(scope)?);
        if route.levels.len() <= level {
            let mut longer = Route::clone(&route);
            let everyone = axis == Axis::Etp;
            longer.extend(self.machine.comm, self.machine.group(axis), scope, everyone)?;
            route = Arc::new(longer);
            self.held.route = Some(Arc::clone(&route));
        }
        Ok(route)
    }

    /// Sends rows on to the ranks of their experts, or back to the ranks of their tokens.
    pub(super) fn dispatch<O>(&mut self, op: &Op<O>, axis: Axis, back: bool) -> Result<()> {
        let route = self.extended(&op.scope, axis)?;
        let level = &route.levels[self.level(axis)];
        let (comm, group) = (self.machine.comm, self.machine.group(axis));
        let out = match self.value(op.inputs[0])? {
            Value::Tensor(x) if back => level.back(comm, group, &op.scope, x)?,
            Value::Tensor(x) => level.forward(comm, group, &op.scope, x)?,
            Value::Terms(terms) if back => {
                let columns = terms.shape[1];
                let parts = (0..group.size())
                    .map(|peer| {
                        let part = |node: Vec<f32>| level.parts(&node, columns).swap_remove(peer);
                        write_terms(terms.map(part))
                    })
                    .collect();
                let arrived = group.all_to_all(comm, &op.scope, parts)?.wait(comm)?;
                let shape = vec![level.rows_before(), columns];
                read_terms(&arrived, shape, terms.dtype).reduce()
            }
            _ => {
                let (operator, reason) = ("expert gather", "partial rows");
                return Err(Machine::unsupported(operator, &op.scope, reason));
            }
        };
        self.set(op.outputs[0], Value::Tensor(out));
        Ok(())
    }

    fn experts_here(&self, scope: &str) -> Result<Vec<Range<usize>>> {
        let route = self.routing(scope)?;
        let ep = self.machine.position.mesh.ep as usize;
        let count = route.experts.div_ceil(ep);
        let first = self.machine.position.index(Axis::Ep) as usize * count;
        Ok(route.groups(first, count))
    }

    /// One product per expert; `backward` multiplies by the weight instead of its transpose.
    pub(super) fn grouped_product(
        &mut self,
        scope: &str,
        (x, w, out): (TensorId, TensorId, TensorId),
        backward: bool,
    ) -> Result<()> {
        let groups = self.experts_here(scope)?;
        let (data, weight) = (self.tensor(x)?, self.tensor(w)?);
        let (n, k) = (weight.shape[1], weight.shape[2]);
        let rows = data.rows();
        let (data, weight) = (data.f32(), weight.f32());
        let dim = usize::from(!backward);
        let columns = if backward { k } else { n };
        let operands = |(e, range)| operands(&data, &weight, range, (e, n, k), backward);
        let shape = vec![rows, columns];
        let value = if self.machine.is_exact() {
            let leaves = self.machine.feature_leaves(self.info(w), dim)?;
            // One node holds the rows of all experts.
            let sum = TreeSum::of(&leaves, rows * columns, |part, node| {
                for (e, range) in groups.iter().enumerate() {
                    let (a, b) = operands((e, range));
                    let out = &mut node[range.start * columns..];
                    multiply_part(a, b, part.clone(), out, columns);
                }
            });
            self.settled(sum, (w, dim), (shape, out))
        } else {
            let mut plain = vec![0.0; rows * columns];
            for (e, range) in groups.iter().enumerate() {
                let (a, b) = operands((e, range));
                let out = &mut plain[range.start * columns..];
                multiply_add(a, b, out, columns, self.machine.threads);
            }
            Value::Tensor(Tensor::new(shape, plain, self.info(out).dtype))
        };
        self.set(out, value);
        Ok(())
    }

    pub(super) fn grouped_linear(&mut self, op: &Op) -> Result<()> {
        let operands = (op.inputs[0], op.inputs[1], op.outputs[0]);
        self.grouped_product(&op.scope, operands, false)
    }

    /// Leaves of tokens that an expert's rows belong to; ranges are relative to the first of these rows.
    fn leaves_of_rows(&self, scope: &str, rows: Range<usize>) -> Result<Leaves> {
        let rows = &self.routing(scope)?.at_experts()[rows];
        let tokens: Vec<u64> = rows.iter().map(|r| r.token).collect();
        Ok(parts_of_leaves(&tokens, TOKEN_LEAF))
    }

    /// Adds every expert's bias to its rows.
    pub(super) fn expert_bias(&mut self, op: &Op) -> Result<()> {
        let groups = self.experts_here(&op.scope)?;
        let (x, b) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let (columns, shape) = (x.columns(), x.shape.clone());
        let (mut out, b) = (x.f32().into_owned(), b.f32());
        for (e, range) in groups.into_iter().enumerate() {
            let bias = &b[e * columns..(e + 1) * columns];
            for row in out[range.start * columns..range.end * columns].chunks_mut(columns) {
                add(row, bias);
            }
        }
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    pub(super) fn expert_bias_backward(
        &mut self,
        op: &Op<Gradient>,
        forward: &Op,
        sink: &mut dyn GradientSink,
    ) -> Result<()> {
        let groups = self.experts_here(&op.scope)?;
        let dy = self.tensor(op.inputs[0])?;
        let columns = dy.columns();
        let dy = dy.f32();
        let bias = forward.inputs[1];
        for (e, range) in groups.into_iter().enumerate() {
            let (part, rows) = (e * columns..(e + 1) * columns, 0..range.len());
            let dy = &dy[range.start * columns..];
            let leaves = || self.leaves_of_rows(&op.scope, range);
            self.accumulate(sink, (bias, part), (rows, leaves), |rows, out| {
                tokens::column_sum(rows, out, |row, j| dy[row * columns + j]);
            })?;
        }
        Ok(())
    }

    pub(super) fn grouped_backward_weight(
        &mut self,
        op: &Op<Gradient>,
        forward: &Op,
        sink: &mut dyn GradientSink,
    ) -> Result<()> {
        let groups = self.experts_here(&op.scope)?;
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
                let leaves = self.leaves_of_rows(&op.scope, range)?;
                sink.tree(weight, part, multiply_tree(a, b, &leaves));
            } else {
                let out = &mut sink.plain(weight)[part];
                multiply_add(a, b, out, k, self.machine.threads);
            }
        }
        Ok(())
    }
}

/// Rows added up to tokens in the order of their slots, each multiplied by its weight if there are weights.
fn combined(route: &Route, rows: &[f32], columns: usize, weights: Option<&[f32]>) -> Vec<f32> {
    let place = route.places();
    let mut out = vec![0.0; place.len() / route.top_k * columns];
    for (token, out) in out.chunks_mut(columns).enumerate() {
        for choice in token * route.top_k..(token + 1) * route.top_k {
            let row = &rows[place[choice] * columns..][..columns];
            for (a, b) in out.iter_mut().zip(row) {
                *a += weights.map_or(*b, |p| p[choice] * b);
            }
        }
    }
    out
}

/// Operands of one expert's GEMM.
fn operands<'a>(
    data: &'a [f32],
    weight: &'a [f32],
    rows: &Range<usize>,
    (expert, n, k): (usize, usize, usize),
    backward: bool,
) -> (Matrix<'a>, Matrix<'a>) {
    let inner = if backward { n } else { k };
    let a = Matrix::new(&data[rows.start * inner..], rows.len(), inner, inner);
    let w = Matrix::new(&weight[expert * n * k..], n, k, k);
    (a, if backward { w } else { w.transposed() })
}
