//! A virtual stage on one rank: its blocks, its states, and its passes.

use std::collections::HashMap;
use std::sync::Arc;

use super::device::{Device, Passing};
use super::states::States;
use crate::block::{Block, Half};
use crate::plan::RoutedRows;

/// A virtual stage on one rank.
pub struct Stage<D: Device> {
    blocks: Vec<Arc<Block>>,
    made: Option<Made<D::Error>>,
    /// Parameters, gradients and optimizer states.
    pub states: States<D>,
    /// What blocks keep for backward, by micro-batch.
    saved: HashMap<u32, Vec<Kept<D>>>,
    /// Row counts of this rank's experts since they were last taken.
    routed: Vec<Routed>,
}

/// Makes the block at an index for a micro-batch, where blocks are traced anew for each.
pub type Made<E> = Box<dyn Fn(u32, usize) -> Result<Arc<Block>, E>>;

/// A block that has run forward, and what it keeps for backward.
type Kept<D> = (Arc<Block>, <D as Device>::Saved);

/// Number of rows (one per token and chosen expert) that reached a rank's experts in one forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Routed {
    /// Number of the micro-batch.
    pub micro_batch: u32,
    /// Number of the layer.
    pub layer: u64,
    /// The row counts.
    pub rows: RoutedRows,
}

/// A backward pass.
#[derive(Clone, Copy, Debug)]
pub struct Backward {
    /// Which half of backward runs, or both.
    pub half: Half,
    /// Whether gradients are complete after it, so that their reduction starts block by block.
    pub reduces: bool,
}

impl<D: Device> Stage<D> {
    /// A stage of these blocks; `made`, if given, makes them anew for every micro-batch.
    #[must_use]
    pub fn new(blocks: Vec<Arc<Block>>, made: Option<Made<D::Error>>, states: States<D>) -> Self {
        Self {
            blocks,
            made,
            states,
            saved: HashMap::new(),
            routed: Vec::new(),
        }
    }

    /// Bytes kept for backward by all micro-batches in flight.
    #[must_use]
    pub fn saved_bytes(&self) -> u64 {
        let kept = self.saved.values().flatten();
        kept.map(|(_, saved)| D::saved_bytes(saved)).sum()
    }

    /// Takes the row counts of this rank's experts recorded so far.
    pub fn take_routed(&mut self) -> Vec<Routed> {
        std::mem::take(&mut self.routed)
    }

    /// Forward of a micro-batch. Only the first stage has no input.
    pub fn forward(
        &mut self,
        device: &D,
        batch: &D::Batch<'_>,
        micro_batch: u32,
        input: Option<D::Tensor>,
    ) -> Result<D::Tensor, D::Error> {
        let mut kept = Vec::with_capacity(self.blocks.len());
        let mut x = input;
        for (index, block) in self.blocks.iter().enumerate() {
            let block = match &self.made {
                None => Arc::clone(block),
                Some(made) => made(micro_batch, index)?,
            };
            let parameters = self.states.parameters(index);
            let forward = device.forward(&block, batch, &parameters, x.take())?;
            if let (Some(rows), Some(layer)) = (forward.routed, block.layer) {
                self.routed.push(Routed {
                    micro_batch,
                    layer,
                    rows,
                });
            }
            kept.push((block, forward.saved));
            x = Some(forward.output);
        }
        self.saved.insert(micro_batch, kept);
        // A stage without blocks passes its input through.
        Ok(x.expect("the first stage has the embedding, every other an input"))
    }

    /// Backward of a micro-batch, or half of it. Returns the gradient of the stage's input.
    pub fn backward(
        &mut self,
        device: &D,
        batch: &D::Batch<'_>,
        micro_batch: u32,
        gradient: Option<D::Tensor>,
        pass: Backward,
    ) -> Result<Option<D::Tensor>, D::Error> {
        let mut kept = self.saved.remove(&micro_batch).unwrap_or_default();
        let mut gradient = gradient;
        for (index, (block, saved)) in kept.iter_mut().enumerate().rev() {
            let (parameters, mut gradients) = self.states.block(device, index)?;
            let passing = Passing {
                saved,
                gradient: gradient.take(),
                half: pass.half,
            };
            gradient = device.backward(block, batch, &parameters, passing, &mut gradients)?;
            if pass.reduces {
                self.states.send_gradients(device, index)?;
            }
        }
        if pass.half == Half::Input {
            self.saved.insert(micro_batch, kept);
        }
        Ok(gradient)
    }
}
