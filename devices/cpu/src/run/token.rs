//! Embeddings and the loss of a pass.

use super::state::Run;
use crate::block::GradientSink;
use crate::machine::Result;
use crate::math::add;
use crate::redistribute::{read_terms, write_terms};
use crate::{elementwise, tokens};
use catalog::Axis;
use dtensor::{Gradient, Op, TensorId};

impl Run<'_> {
    fn first_row(&self, table: TensorId) -> u64 {
        self.block.first_index(table, 0, &self.machine.position)
    }

    pub(super) fn embedding_backward(
        &mut self,
        op: &Op<Gradient>,
        forward: &Op,
        table: TensorId,
        sink: &mut dyn GradientSink,
    ) -> Result<()> {
        let dy = self.tensor(op.inputs[0])?;
        let at = (dy.columns(), self.first_row(table));
        // The gradient of a partial output is the same on every rank: rows are found by token id.
        let (ids, like) = (self.batch.ids, forward.inputs[0]);
        self.table_gradient(sink, table, ids, &dy.f32(), at, like)
    }

    pub(super) fn positions_backward(
        &mut self,
        op: &Op<Gradient>,
        forward: &Op,
        (table, first): (TensorId, u64),
        sink: &mut dyn GradientSink,
    ) -> Result<()> {
        let dy = self.tensor(op.inputs[0])?;
        let like = forward.inputs[0];
        let positions = self.positions_of(like);
        let rows: Vec<u32> = (0..self.info(like).global[0])
            .flat_map(|_| positions.iter().map(|&p| (first + p) as u32))
            .collect();
        self.table_gradient(sink, table, &rows, &dy.f32(), (dy.columns(), 0), like)
    }

    pub(super) fn positions(&mut self, op: &Op, table: TensorId, first: u64) -> Result<()> {
        let x = self.tensor(op.inputs[0])?;
        let (shape, columns) = (x.shape.clone(), x.columns());
        let mut out = x.f32().into_owned();
        let positions = self.positions_of(op.inputs[0]);
        let table = self.parameters.parameter(table).f32();
        elementwise::each_row(&mut out, columns, self.threads(), |row, y| {
            let at = (first + positions[row % positions.len()]) as usize * columns;
            add(y, &table[at..at + columns]);
        });
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    /// Adds gradients to the rows of a table that the tokens looked up.
    fn table_gradient(
        &self,
        sink: &mut dyn GradientSink,
        table: TensorId,
        ids: &[u32],
        dy: &[f32],
        (columns, first): (usize, u64),
        like: TensorId,
    ) -> Result<()> {
        // ZeRO-3 may have freed the table: its size is known from its placement.
        let info = self.info(table);
        let position = &self.machine.position;
        let held = position.indices(&info.global, &info.placements, 0);
        let size = held.len() * columns;
        let leaves = || self.machine.token_leaves(self.info(like), self.batch);
        let rows = 0..ids.len();
        self.accumulate(sink, (table, 0..size), (rows, leaves), |rows, out| {
            tokens::scatter(ids, dy, columns, first, rows, out);
        })
    }

    pub(super) fn embedding(&mut self, op: &Op, id: TensorId) -> Result<()> {
        let table = self.parameters.parameter(id);
        let columns = table.columns();
        let out = tokens::lookup(self.batch.ids, &table.f32(), columns, self.first_row(id));
        let batch = self.info(op.outputs[0]).global[0] as usize;
        let shape = vec![batch, self.batch.ids.len() / batch.max(1), columns];
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    fn vocabulary(&self, logits: TensorId) -> (u64, usize) {
        let dim = self.info(logits).global.len() - 1;
        let first = self.block.first_index(logits, dim, &self.machine.position);
        (first, dim)
    }

    /// The loss's three numbers per token over the vocabulary shards: the largest logit, the sum of
    /// exponentials, the label's logit.
    pub(super) fn vocabulary_sums<O>(&mut self, op: &Op<O>, logits: TensorId) -> Result<()> {
        let x = self.tensor(logits)?;
        let (columns, rows) = (x.columns(), x.rows());
        let data = x.f32();
        let (first, dim) = self.vocabulary(logits);
        let group = self.machine.group(Axis::Tp);
        let comm = self.machine.comm;
        let gather = |data: Vec<f32>| -> Result<Vec<Vec<f32>>> {
            let message = comm::pack(&data);
            let parts = group.all_gather(comm, &op.scope, message)?.wait(comm)?;
            Ok(parts.iter().map(|p| comm::unpack(p)).collect())
        };
        let mut largest = vec![f32::NEG_INFINITY; rows];
        for part in gather(tokens::largest(&data, columns, rows))? {
            for (a, b) in largest.iter_mut().zip(part) {
                *a = a.max(b);
            }
        }
        // Only one rank has the label; −0 from the others changes nothing.
        let mut target = vec![-0.0; rows];
        for part in gather(tokens::targets(&data, columns, self.batch.labels, first))? {
            add(&mut target, &part);
        }
        let sum = if self.machine.is_exact() {
            let leaves = self.machine.feature_leaves(self.info(logits), dim)?;
            let tree = tokens::sums_tree(&data, columns, &largest, &leaves);
            let message = write_terms(std::iter::once(&tree));
            let arrived = group.all_gather(comm, &op.scope, message)?.wait(comm)?;
            let terms = read_terms(&arrived, vec![rows], catalog::DType::F32);
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

    pub(super) fn cross_entropy(&mut self, op: &Op, reduced: Option<TensorId>) -> Result<()> {
        let logits = op.inputs[0];
        let x = self.tensor(logits)?;
        let (columns, rows, shape) = (x.columns(), x.rows(), x.shape.clone());
        let mut data = x.f32().into_owned();
        let (first, dim) = self.vocabulary(logits);
        let labels = self.batch.labels;
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
                let largest = tokens::largest(&data, columns, rows);
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
        // The logits are overwritten by their gradient, which is all that backward needs of them.
        self.put_tensor(logits, shape, data);
        self.put_tensor(op.outputs[0], vec![rows], losses);
        Ok(())
    }
}
