//! The tokens of a rank's micro-batches.

use cpu_device::MicroBatch;

use super::member::Rank;
use crate::device::Device;

impl<D: Device> Rank<'_, D> {
    fn first_sequence(&self, micro_batch: u32) -> u64 {
        let s = &self.job.strategy;
        let replica = self.place.dp_replicate * s.dp_shard + self.place.dp_shard;
        (replica * s.num_micro_batches + u64::from(micro_batch)) * s.micro_batch
    }

    pub(super) fn micro_batch<'d>(
        &self,
        micro_batch: u32,
        step: u64,
        ids: &'d [u32],
        labels: &'d [u32],
    ) -> MicroBatch<'d> {
        let tokens = self.job.global_batch * self.job.seq_len;
        MicroBatch {
            ids,
            labels,
            first_sequence: self.first_sequence(micro_batch),
            seq_len: self.job.seq_len,
            step: step as u32,
            loss_scale: 1.0 / tokens as f32,
        }
    }

    /// Token ids and labels of this rank's part of a micro-batch.
    pub(super) fn tokens(&self, micro_batch: u32, step: u64) -> (Vec<u32>, Vec<u32>) {
        let (job, data) = (self.job, &self.job.data);
        let placements =
            dtensor::Placements::REPLICATE.with(catalog::Axis::Cp, dtensor::Placement::Shard(1));
        let global = [job.strategy.micro_batch, job.seq_len];
        let positions = self.position.indices(&global, &placements, 1);
        let first = step * job.global_batch + self.first_sequence(micro_batch);
        let places = (first..first + job.strategy.micro_batch).flat_map(|sequence| {
            let start = data.start(job.settings.seed, sequence, job.seq_len);
            positions.iter().map(move |&p| start + p as usize)
        });
        places
            .map(|at| (data.token(at), data.token(at + 1)))
            .unzip()
    }
}
