//! Embeddings and the loss.

use std::ops::Range;

use catalog::DType;

use super::grid::{THREADS, threads_of};
use crate::error::CudaError;
use crate::kernels::{Kernel, Source, typed};
use crate::launcher::Arguments;
use crate::memory::Buffer;
use crate::tensor::{Device, Tensor};

/// Most threads per row.
const MOST: u32 = 1024;

/// Inputs of the loss beside the logits.
#[derive(Clone, Copy, Debug)]
pub struct Losses<'l> {
    /// Labels: one token id per row.
    pub labels: &'l Buffer,
    /// Vocabulary index of the first column on this rank.
    pub first: u64,
    /// Derivative of the batch's loss with respect to one token's loss.
    pub scale: f32,
}

/// The tokens that add to each row of a table: token indices sorted by row, the offset of each row's tokens, and the
/// rows that have any. There is room for as many rows as tokens; unused entries are empty.
#[derive(Debug)]
pub struct RowOrder {
    tokens: Buffer,
    starts: Buffer,
    distinct: Buffer,
    count: usize,
    rows: Range<u64>,
}

impl RowOrder {
    /// Sorts tokens by id, for the part `rows` of a table.
    ///
    /// # Errors
    /// When the device's memory is full.
    pub fn new(device: &Device, ids: &[u32], rows: Range<u64>) -> Result<Self, CudaError> {
        let words = |count: usize| device.memory.allocate(4 * count as u64);
        let order = Self {
            tokens: words(ids.len())?,
            starts: words(ids.len() + 1)?,
            distinct: words(ids.len())?,
            count: ids.len(),
            rows,
        };
        order.update(device, ids)?;
        Ok(order)
    }

    /// The range of table rows that the order covers.
    #[must_use]
    pub fn rows(&self) -> &Range<u64> {
        &self.rows
    }

    /// Overwrites the order with that of another batch of equally many tokens.
    ///
    /// # Errors
    /// When the device fails.
    pub fn update(&self, device: &Device, ids: &[u32]) -> Result<(), CudaError> {
        debug_assert_eq!(ids.len(), self.count);
        let row = |id: u32| self.rows.contains(&u64::from(id));
        let first = self.rows.start;
        let mut order: Vec<(u32, u32)> = (0u32..)
            .zip(ids)
            .filter(|&(_, &id)| row(id))
            .map(|(token, &id)| ((u64::from(id) - first) as u32, token))
            .collect();
        order.sort_unstable();
        let mut starts = Vec::with_capacity(self.count + 1);
        let mut distinct: Vec<u32> = Vec::with_capacity(self.count);
        for (at, &(row, _)) in (0u32..).zip(&order) {
            if distinct.last() != Some(&row) {
                distinct.push(row);
                starts.push(at);
            }
        }
        starts.resize(self.count + 1, order.len() as u32);
        distinct.resize(self.count, 0);
        let mut tokens: Vec<u32> = order.into_iter().map(|(_, token)| token).collect();
        tokens.resize(self.count, 0);
        let lists = [
            (&self.tokens, tokens),
            (&self.starts, starts),
            (&self.distinct, distinct),
        ];
        for (to, words) in lists {
            let launcher = &device.launcher;
            launcher.write(to.address, bytemuck::cast_slice(&words))?;
        }
        Ok(())
    }
}

impl Device {
    /// Looks up rows by id in a shard of a table that begins at row `first`.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn embedding(
        &self,
        ids: &Buffer,
        table: &Tensor,
        first: u64,
        shape: Vec<usize>,
    ) -> Result<Tensor, CudaError> {
        let out = self.tensor(shape, table.dtype)?;
        let columns = table.columns();
        let arguments = Arguments::of(&[&out, &table, &ids])
            .with(first as i64)
            .sizes([table.rows(), columns]);
        let kernel = typed!(Token, "embedding", table.is_bf16());
        let threads = threads_of(columns, 256);
        self.blocks(kernel, [out.rows() as u32, 1, 1], threads, 0, arguments)?;
        Ok(out)
    }

    /// Adds the gradients of looked-up rows to the table's gradient; the tokens of a row are added in their order.
    ///
    /// # Errors
    /// When the device fails.
    pub fn add_embedding_gradient(
        &self,
        gradient: &Tensor,
        dy: &Tensor,
        order: &RowOrder,
    ) -> Result<(), CudaError> {
        let columns = dy.columns();
        let arguments = Arguments::of(&[
            &gradient,
            &dy,
            &order.tokens,
            &order.starts,
            &order.distinct,
        ])
        .sizes([columns]);
        let kernel = typed!(Token, "embedding_backward", dy.is_bf16());
        let grid = [order.count as u32, 1, 1];
        self.blocks(kernel, grid, threads_of(columns, 256), 0, arguments)
    }

    /// For every row, the largest logit, the sum of exponentials relative to it, and the label's logit: `[3, rows]`.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn loss_sums(&self, logits: &Tensor, losses: &Losses<'_>) -> Result<Tensor, CudaError> {
        let sums = self.tensor(vec![3, logits.rows()], DType::F32)?;
        self.loss_kernel(logits, losses, (None, &sums), [true, false])?;
        Ok(sums)
    }

    /// Merges the sums of [`Device::loss_sums`] of all vocabulary shards, which `shards` holds one after the other.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn merged_sums(&self, shards: &Tensor, rows: usize) -> Result<Tensor, CudaError> {
        let sums = self.tensor(vec![3, rows], DType::F32)?;
        let arguments = Arguments::of(&[&sums, &shards]).sizes([shards.rows(), rows]);
        let kernel = Kernel::plain(Source::Token, "loss_merge");
        let grid = [rows.div_ceil(THREADS as usize) as u32, 1, 1];
        self.blocks(kernel, grid, THREADS, 0, arguments)?;
        Ok(sums)
    }

    /// Returns the loss of every row; overwrites the logits by their gradients. `sums` are the
    /// merged sums of all shards if the vocabulary is sharded.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn loss(
        &self,
        logits: &Tensor,
        losses: &Losses<'_>,
        sums: Option<&Tensor>,
    ) -> Result<Tensor, CudaError> {
        let out = self.tensor(vec![logits.rows()], DType::F32)?;
        match sums {
            Some(sums) => {
                self.loss_kernel(logits, losses, (Some(&out), sums), [false, true])?;
            }
            None => {
                let sums = self.tensor(vec![3, logits.rows()], DType::F32)?;
                self.loss_kernel(logits, losses, (Some(&out), &sums), [true, true])?;
            }
        }
        Ok(out)
    }

    fn loss_kernel(
        &self,
        logits: &Tensor,
        losses: &Losses<'_>,
        (out, sums): (Option<&Tensor>, &Tensor),
        [measure, finish]: [bool; 2],
    ) -> Result<(), CudaError> {
        let arguments = Arguments::of(&[&logits, &out, &sums, &losses.labels])
            .sizes([logits.rows(), logits.columns()])
            .with(losses.first as i64)
            .with(losses.scale)
            .with(i32::from(measure))
            .with(i32::from(finish));
        let kernel = typed!(Token, "loss", logits.is_bf16());
        let threads = threads_of(logits.columns(), MOST);
        let grid = [logits.rows() as u32, 1, 1];
        self.blocks(kernel, grid, threads, 0, arguments)
    }
}
