//! The workload: everything about training except the model (sequence length, batch, precision, number of devices).

use std::ops::Deref;

use crate::dtype::Precision;

/// Largest number of devices in a job.
pub const MAX_GPUS: u64 = 1 << 20;
/// Largest number of tokens in a sequence.
pub const MAX_SEQ_LEN: u64 = 1 << 24;
/// Largest number of sequences in an optimizer step.
pub const MAX_GLOBAL_BATCH: u64 = 1 << 24;

/// The sizes of a workload, as plain fields; [`Workload::new`] checks them and makes a [`Workload`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorkloadSizes {
    /// Number of devices in the job.
    pub gpus: u64,
    /// Tokens per sequence.
    pub seq_len: u64,
    /// Sequences per optimizer step, over all devices.
    pub global_batch: u64,
    /// Precision of the linear layers.
    pub precision: Precision,
}

/// A training workload whose sizes were checked. Fields are read through `Deref`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Workload(WorkloadSizes);

/// A size of a workload is out of range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}; expected 1 to {most} {unit}")]
pub struct WorkloadError {
    /// Name of the field of [`WorkloadSizes`].
    pub field: &'static str,
    /// Value of the field.
    pub value: u64,
    /// Largest allowed value.
    pub most: u64,
    /// The unit that the field counts, for messages.
    pub unit: &'static str,
}

impl Workload {
    /// Makes a workload if its sizes are in range, so that products of them cannot overflow.
    ///
    /// # Errors
    /// The first size that is 0 or too large.
    pub fn new(sizes: WorkloadSizes) -> Result<Self, WorkloadError> {
        let ranges = [
            ("gpus", sizes.gpus, MAX_GPUS, "devices"),
            ("seq_len", sizes.seq_len, MAX_SEQ_LEN, "tokens"),
            (
                "global_batch",
                sizes.global_batch,
                MAX_GLOBAL_BATCH,
                "sequences",
            ),
        ];
        for (field, value, most, unit) in ranges {
            if value == 0 || value > most {
                return Err(WorkloadError {
                    field,
                    value,
                    most,
                    unit,
                });
            }
        }
        Ok(Self(sizes))
    }

    /// The same workload on another number of devices.
    ///
    /// # Errors
    /// When that number is out of range.
    pub fn on(self, gpus: u64) -> Result<Self, WorkloadError> {
        Self::new(WorkloadSizes { gpus, ..self.0 })
    }

    /// Tokens per optimizer step: at most 2^48.
    #[must_use]
    pub fn tokens_per_step(&self) -> u64 {
        self.seq_len * self.global_batch
    }
}

impl Deref for Workload {
    type Target = WorkloadSizes;
    fn deref(&self) -> &WorkloadSizes {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_out_of_range_are_refused() {
        let good = WorkloadSizes {
            gpus: 8,
            seq_len: 4096,
            global_batch: 64,
            precision: Precision::Bf16,
        };
        assert!(Workload::new(good).is_ok());
        let bad = [
            WorkloadSizes { gpus: 0, ..good },
            WorkloadSizes {
                gpus: MAX_GPUS + 1,
                ..good
            },
            WorkloadSizes { seq_len: 0, ..good },
            WorkloadSizes {
                seq_len: 1 << 63,
                ..good
            },
            WorkloadSizes {
                global_batch: 0,
                ..good
            },
            WorkloadSizes {
                global_batch: u64::MAX,
                ..good
            },
        ];
        for sizes in bad {
            let error = Workload::new(sizes).expect_err("out of range");
            assert!(error.to_string().contains("expected 1 to"), "{error}");
        }
    }
}
