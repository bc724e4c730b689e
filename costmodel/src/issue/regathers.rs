//! Gathers that backward repeats, because their results are not kept.

use std::ops::Range;

use catalog::Axis;
use catalog::runtime::Rewrite;
use dtensor::{CollectiveKind, Pass};

use super::{Order, Regather};

impl Order<'_> {
    /// Finds gathers whose result is not kept, so that backward repeats them: of inputs under sequence parallelism, beside the product
    /// before the one that needs them, and of keys and values under context parallelism, right before attention.
    pub(super) fn regathers(&self) -> Vec<Regather> {
        if !self.lowering.has(Rewrite::RegatherSequenceParallelInput) {
            return Vec::new();
        }
        let layout = &self.key.layout;
        let splits_sequences = layout.sequence_parallel && layout.tp > 1;
        let again = |message: usize| match self.message(message)? {
            c if c.kind != CollectiveKind::AllGather => None,
            c if c.axis == Axis::Cp => self.regather_before_attention(message),
            c if c.axis == Axis::Tp && splits_sequences => self.regather_beside_product(message),
            _ => None,
        };
        (0..self.lowered.forward.len()).filter_map(again).collect()
    }

    /// The repetition of a gather of a product's input. The product of the weight's gradient waits for it; it runs beside the product of
    /// the input's gradient.
    fn regather_beside_product(&self, message: usize) -> Option<Regather> {
        let backward = self.backward();
        let gathered = self.kernel(message).writes[0];
        let until = backward.clone().find(|&kernel| {
            let kernel = self.kernel(kernel);
            self.is_product(kernel)
                && kernel.pass == Pass::BackwardWeight
                && self.among(&kernel.reads, gathered)
        })?;
        let is_data_gradient = |&kernel: &usize| {
            let kernel = self.kernel(kernel);
            self.is_product(kernel) && kernel.pass == Pass::BackwardInput
        };
        Some(Regather {
            message,
            before: (backward.start..until).rfind(is_data_gradient)?,
            until,
        })
    }

    /// The repetition of a gather of keys and values (Transformer Engine `context_parallel.py`, `AttnFuncWithCPAndKVAllGather.backward`).
    fn regather_before_attention(&self, message: usize) -> Option<Regather> {
        let gathered = self.kernel(message).writes[0];
        let reads = |&kernel: &usize| {
            self.is_attention(kernel) && self.among(&self.kernel(kernel).reads, gathered)
        };
        let before = self.backward().find(reads)?;
        Some(Regather {
            message,
            before,
            until: before,
        })
    }

    /// Indices of the kernels of backward.
    fn backward(&self) -> Range<usize> {
        let forward = self.lowered.forward.len();
        forward..forward + self.lowered.backward.len()
    }
}
