//! Memory of exchanges between ranks: their outputs, and staging copies of parts that are not contiguous.

use catalog::{Axis, DType};

use super::ledger::Room;
use super::run::Pass;
use crate::layout::is_sequence;
use crate::operator::{Exchange, Moves};
use crate::placement::Placement;
use crate::tensor::{TensorId, TensorInfo};
use crate::trace::Op;

impl Pass<'_> {
    pub(super) fn exchange<O>(&mut self, op: &Op<O>, exchange: Exchange) {
        let ends = op.inputs.first().zip(op.outputs.first());
        let Some((&read, &made)) = ends.filter(|_| exchange.moves != Moves::Ring) else {
            return op.inputs.iter().for_each(|&id| self.gather_ring(id));
        };
        let beside = self
            .ledger
            .take(self.beside(exchange, read, made), DType::U8);
        op.outputs.iter().for_each(|&id| self.make(id));
        drop(beside);
    }

    /// Bytes that an exchange needs in addition to its input and output.
    fn beside(&self, exchange: Exchange, read: TensorId, made: TensorId) -> u64 {
        let [from_bytes, to_bytes] = [self.get(read).bytes, self.info(made).bytes().0];
        match exchange.moves {
            Moves::Redistribute { from, to } => {
                let axis = exchange.collective.axis;
                let [read, made] = [read, made].map(|id| self.info(id));
                let sent = apart((read, from_bytes), &made.shape, (axis, to));
                sent + apart((made, to_bytes), &read.shape, (axis, from))
            }
            // A copy of the rows in the order they are sent, by rank, beside the order by expert.
            Moves::Dispatch | Moves::ExpertGather => to_bytes,
            Moves::Combine | Moves::ExpertReduce => from_bytes,
            Moves::VocabularySums(_) | Moves::Ring => 0,
        }
    }

    /// Allocates the keys or values of the whole sequence.
    fn gather_ring(&mut self, id: TensorId) {
        let (whole, parts) = self.around(id);
        let dtype = self.get(id).dtype;
        let whole = self.ledger.take(whole, dtype);
        drop(self.ledger.take(parts, dtype));
        self.ring.insert(self.block.storage(id), whole);
    }

    /// Bytes of keys or values of the whole sequence, and of other ranks' parts that need a staging copy.
    fn around(&self, id: TensorId) -> (u64, u64) {
        let info = self.info(id);
        let mut whole = info.clone();
        whole.shape[1] = info.global[1];
        let bytes = self.get(id).bytes * info.global[1] / info.shape[1].max(1);
        let shards = (Axis::Cp, info.placements.on(Axis::Cp));
        (bytes, apart((&whole, bytes), &info.shape, shards))
    }

    /// Gathers the keys and values again before backward of an attention that exchanges them around the ring.
    pub(super) fn ring_again(&mut self, ids: [TensorId; 2]) {
        for id in ids {
            if self.block.has_ring() && !self.ring.contains_key(&self.block.storage(id)) {
                self.gather_ring(id);
            }
        }
    }

    /// The keys or values of the whole sequence if they were gathered, else the local tensor.
    pub(super) fn keys(&self, id: TensorId) -> &Room {
        let whole = self.ring.get(&self.block.storage(id));
        whole.unwrap_or_else(|| self.get(id))
    }

    /// Sends the gradient of the gathered keys or values back to the ranks that hold them.
    pub(super) fn return_ring(&self, of: TensorId, gradient: Room) -> Room {
        if !self.ring.contains_key(&self.block.storage(of)) {
            return gradient;
        }
        let parts = self.ledger.take(self.around(of).1, gradient.dtype);
        let own = self.ledger.take(self.get(of).bytes, gradient.dtype);
        drop(parts);
        own
    }
}

/// Bytes of the ranks' parts of a tensor that are not contiguous in it and need a staging copy: shards of an inner
/// dim, and zig-zag shards of a sequence, which are a piece from either end.
fn apart(
    (whole, bytes): (&TensorInfo, u64),
    part: &[u64],
    (axis, shards): (Axis, Placement),
) -> u64 {
    match shards {
        Placement::Shard(dim) if whole.shape[..dim].iter().product::<u64>() == 1 => {
            let ranks = whole.shape[dim].div_ceil(part[dim].max(1)).max(1);
            let from_both_ends = axis == Axis::Cp && is_sequence(part.len(), dim);
            if from_both_ends {
                bytes - bytes / ranks
            } else {
                0
            }
        }
        Placement::Shard(_) | Placement::Interleaved(..) => bytes,
        Placement::Replicate | Placement::Partial => 0,
    }
}
