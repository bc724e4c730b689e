//! Watches: called after every operator, they may stop their rank.

use std::borrow::Cow;

use crate::micro_batch::MicroBatch;
use crate::tensor::Tensor;
use dtensor::block::Block;
use dtensor::{AnyOp, CostClass, Pass, TensorId, TensorInfo};

/// Why a watch stopped a rank.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum WatchError {
    /// An operator wrote a number that is infinite or NaN.
    #[error(
        "rank {rank}: {operator} ({pass}) made {value} at element {element} of {tensor}, placed {placement}; everything before it was finite"
    )]
    NotFinite {
        /// Rank that ran it.
        rank: usize,
        /// Full name of the operator, with its kind.
        operator: String,
        /// Pass in words.
        pass: &'static str,
        /// Name of the tensor that it wrote.
        tensor: String,
        /// Placement of that tensor on the mesh.
        placement: String,
        /// Index of the element in the local tensor.
        element: usize,
        /// The number written there.
        value: f32,
    },
    /// The watch was told to stop at this operator.
    #[error("stopped at {operator}")]
    Stopped {
        /// Full name of the operator.
        operator: String,
    },
}

/// Called after every operator that has run.
pub trait Watch {
    /// An operator and the views that it reads through have run. On a device that fuses operators, the first of a fused
    /// group runs all of them.
    ///
    /// # Errors
    /// To stop the rank.
    fn ran(&self, seen: &Seen<'_>) -> Result<(), WatchError>;

    /// Whether it reads tensors. If not, a product may skip writing the input of a fused GELU, as it does unwatched.
    fn reads(&self) -> bool {
        true
    }
}

/// The tensors of a running pass.
pub trait Tensors {
    /// The value of a traced tensor, copied to the host; `None` where it is not a dense tensor, such as partial sums of
    /// exact mode.
    fn on_host(&self, id: TensorId) -> Option<Cow<'_, Tensor>>;
}

/// An operator that has just run.
pub struct Seen<'s> {
    /// The tensors that the watch may read.
    pub tensors: &'s dyn Tensors,
    /// The operator.
    pub op: AnyOp<'s>,
    /// The block that the operator belongs to.
    pub block: &'s Block,
    /// The micro-batch it ran on.
    pub micro_batch: &'s MicroBatch<'s>,
    /// The rank that ran it.
    pub rank: usize,
}

impl Seen<'_> {
    /// Its full name, such as `model.layers.3.self_attn.q_proj`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}{}", self.block.prefix, self.op.scope)
    }

    /// Its name with its kind, such as `model.layers.3.self_attn.q_proj Matmul`.
    #[must_use]
    pub fn title(&self) -> String {
        let kind = match self.op.cost() {
            CostClass::Product(product) => format!("{product:?}"),
            class => format!("{class:?}"),
        };
        let end = kind.find([' ', '(', '{']).unwrap_or(kind.len());
        format!("{} {}", self.name(), &kind[..end])
    }

    /// Its pass in words.
    #[must_use]
    pub fn pass(&self) -> &'static str {
        match self.op.pass {
            Pass::Forward => "forward",
            Pass::BackwardInput => "backward",
            Pass::BackwardWeight => "weight gradient",
        }
    }

    /// Those tensors of a list that are dense now, with their traced descriptions.
    pub fn tensors<'t>(
        &'t self,
        ids: &'t [TensorId],
    ) -> impl Iterator<Item = (&'t TensorInfo, Cow<'t, Tensor>)> {
        ids.iter().filter_map(|&id| {
            let tensor = self.tensors.on_host(id)?;
            Some((self.block.trace.tensor(id), tensor))
        })
    }
}

/// Stops a rank at the first operator that makes a number that is not finite.
#[derive(Clone, Copy, Debug)]
pub struct FirstNonFinite;

impl Watch for FirstNonFinite {
    fn ran(&self, seen: &Seen<'_>) -> Result<(), WatchError> {
        for (info, tensor) in seen.tensors(seen.op.outputs) {
            let values = tensor.f32();
            let Some(element) = values.iter().position(|x| !x.is_finite()) else {
                continue;
            };
            return Err(WatchError::NotFinite {
                rank: seen.rank,
                operator: seen.title(),
                pass: seen.pass(),
                tensor: info.name.clone(),
                placement: info.placements.to_string(),
                element,
                value: values[element],
            });
        }
        Ok(())
    }
}
