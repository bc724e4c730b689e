//! Values of traced tensors on the cpu device.

use std::sync::Arc;

use catalog::DType;

use super::experts::Route;
use super::math::add;
use super::tensor::Tensor;
use super::tree::TreeSum;

/// The value of a traced tensor.
#[derive(Clone, Debug)]
pub enum Value {
    /// A dense tensor.
    Tensor(Tensor),
    /// Exact mode's partial sums: terms, added in order once each is reduced over its tree.
    Terms(Terms),
    /// A dropout mask: 1 where an element is kept.
    Mask(Vec<u8>),
    /// A router's choices.
    Route(Arc<Route>),
}

/// Partial sums that are not reduced yet.
#[derive(Clone, Debug)]
pub struct Terms {
    /// The sums, in the order in which they are added once reduced.
    pub terms: Vec<TreeSum>,
    /// Shape of each sum.
    pub shape: Vec<usize>,
    /// Type that each sum is rounded to at the root of its tree.
    pub dtype: DType,
}

impl Terms {
    /// The sums with a function applied to every node; it must act elementwise, such as a slice.
    pub(crate) fn map(
        &self,
        change: impl Fn(Vec<f32>) -> Vec<f32>,
    ) -> impl ExactSizeIterator<Item = TreeSum> {
        let sums = self.terms.iter();
        sums.map(move |sum| sum.clone().map(&change))
    }

    /// The reduced tensor, once all leaves are on this rank.
    #[must_use]
    pub fn reduce(self) -> Tensor {
        let elements = self.shape.iter().product();
        let zero = || Tensor::new(self.shape.clone(), vec![0.0; elements], self.dtype);
        let rounded = |sum: TreeSum| {
            sum.root().map_or_else(zero, |root| {
                Tensor::new(self.shape.clone(), root, self.dtype)
            })
        };
        let mut terms = self.terms.into_iter().map(rounded);
        let first = terms.next().unwrap_or_else(zero);
        terms.fold(first, |sum, term| {
            let mut data = sum.into_f32();
            add(&mut data, &term.f32());
            Tensor::new(self.shape.clone(), data, self.dtype)
        })
    }
}

impl Value {
    /// The value of a sum: reduced to a tensor if this rank holds the `whole` sum, else partial
    /// terms.
    pub(crate) fn summed(sum: TreeSum, shape: Vec<usize>, dtype: DType, whole: bool) -> Self {
        let terms = Terms {
            terms: vec![sum],
            shape,
            dtype,
        };
        match whole {
            true => Self::Tensor(terms.reduce()),
            false => Self::Terms(terms),
        }
    }

    /// Bytes of storage.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Tensor(tensor) => tensor.bytes(),
            Self::Terms(terms) => terms.shape.iter().product::<usize>() as u64 * terms.dtype.size(),
            Self::Mask(mask) => mask.len() as u64,
            Self::Route(route) => route.bytes(),
        }
    }
}
