//! The workload: everything about training except the model (sequence length, batch, precision, number of devices).

use std::ops::Deref;
use std::sync::Arc;

use crate::documents::{DocumentTooLong, Documents, OfLength, Packing};
use crate::dtype::Precision;
use crate::lengths::{Lengths, MAX_SEQ_LEN};

/// Largest number of devices in a job.
pub const MAX_GPUS: u64 = 1 << 20;
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
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    sizes: WorkloadSizes,
    documents: Option<Arc<Documents>>,
    alike_tokens: bool,
}

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
        Ok(Self {
            sizes,
            documents: None,
            alike_tokens: false,
        })
    }

    /// The same workload with sequences of these documents; by default a sequence is one document.
    ///
    /// # Errors
    /// When a document is longer than a sequence.
    pub fn of_documents(
        &self,
        lengths: Lengths,
        packing: Packing,
    ) -> Result<Self, DocumentTooLong> {
        let documents = Documents::new(lengths, packing, self.seq_len)?;
        Ok(Self {
            sizes: self.sizes,
            documents: Some(Arc::new(documents)),
            ..self.clone()
        })
    }

    /// The same workload on data whose tokens, and their positions, are all the same, as in some benchmarks on made-up data.
    #[must_use]
    pub fn of_alike_tokens(mut self) -> Self {
        self.alike_tokens = true;
        self
    }

    /// Whether all tokens and their positions are the same, so that all rows of an activation are.
    #[must_use]
    pub fn has_alike_tokens(&self) -> bool {
        self.alike_tokens
    }

    /// The same workload on another number of devices.
    ///
    /// # Errors
    /// When that number is out of range.
    pub fn with_gpus(&self, gpus: u64) -> Result<Self, WorkloadError> {
        self.sized(WorkloadSizes { gpus, ..self.sizes })
    }

    /// The same workload with another number of sequences per step.
    ///
    /// # Errors
    /// When that number is out of range.
    pub fn with_batch(&self, global_batch: u64) -> Result<Self, WorkloadError> {
        self.sized(WorkloadSizes {
            global_batch,
            ..self.sizes
        })
    }

    /// The same workload with linear layers in another precision.
    #[must_use]
    pub fn with_precision(mut self, precision: Precision) -> Self {
        self.sizes.precision = precision;
        self
    }

    /// This workload with other sizes; its documents stay. `seq_len` must not change.
    fn sized(&self, sizes: WorkloadSizes) -> Result<Self, WorkloadError> {
        let checked = Self::new(sizes)?;
        Ok(Self {
            sizes: checked.sizes,
            ..self.clone()
        })
    }

    /// The documents of its sequences; `None` if each sequence is one document.
    #[must_use]
    pub fn documents(&self) -> Option<&Documents> {
        self.documents.as_deref()
    }

    /// The documents that attention stays within; `None` if tokens attend to the whole sequence.
    #[must_use]
    pub fn documents_apart(&self) -> Option<&Documents> {
        self.documents()
            .filter(|of| of.packing() == Packing::Within)
    }

    /// Whether sequences end in padding: each is one document, and documents are shorter than sequences.
    #[must_use]
    pub fn is_padded(&self) -> bool {
        self.documents()
            .is_some_and(|of| of.packing() == Packing::Padded && of.mean() < self.seq_len as f64)
    }

    /// The lengths of the texts in which tokens attend to each other, each with its share of all
    /// tokens except padding.
    #[must_use]
    pub fn contexts(&self) -> Vec<OfLength> {
        match self
            .documents()
            .filter(|of| of.packing() != Packing::Across)
        {
            Some(documents) => documents.by_length().to_vec(),
            None => vec![OfLength {
                length: self.seq_len,
                tokens: 1.0,
            }],
        }
    }

    /// Mean number of tokens per optimizer step, without padding.
    #[must_use]
    pub fn real_tokens_per_step(&self) -> f64 {
        let tokens = self.tokens_per_step() as f64;
        match self
            .documents()
            .filter(|of| of.packing() == Packing::Padded)
        {
            Some(documents) => tokens * (documents.mean() / self.seq_len as f64),
            None => tokens,
        }
    }

    /// Tokens per optimizer step, with padding: at most 2^48.
    #[must_use]
    pub fn tokens_per_step(&self) -> u64 {
        self.seq_len * self.global_batch
    }
}

impl Deref for Workload {
    type Target = WorkloadSizes;
    fn deref(&self) -> &WorkloadSizes {
        &self.sizes
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
