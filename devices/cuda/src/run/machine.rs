//! One rank on a device: its position on the mesh, and the lists derived from it that kernels read.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::rc::Rc;

use super::batch::{Batch, Words};
use super::cut::{Cut, CutOf};
use crate::error::Result;
use crate::links::{HostLinks, Links};
use crate::memory::Buffer;
use crate::ops::{Optimizer, Route, RowOrder};
use crate::tensor::{Device, Tensor};
use cpu_device::MicroBatch;
use dtensor::block;
use dtensor::placement::Placements;
use dtensor::{Rotary, SoftmaxRule, TensorId, TensorInfo};

/// What a block keeps of a micro-batch from forward to backward.
pub type Saved = block::Saved<Tensor, Rc<Route>>;

/// One rank on a device.
pub struct Machine<'m> {
    /// Its device.
    pub device: Device,
    /// Its position, and its communicator on the host.
    pub host: cpu_device::Machine<'m>,
    /// Its links to the devices of its peers.
    pub links: Rc<dyn Links + 'm>,
    /// Index lists that many operators read; a model needs few different ones.
    lists: MadeOnce<ListOf, Rc<Buffer>>,
    /// How tensors are cut among ranks; a model needs few different ones.
    cuts: MadeOnce<CutOf, Rc<Cut>>,
    /// First index and number of the indices that a rank holds, where they are contiguous.
    spans: MadeOnce<ListOf, Option<[u64; 2]>>,
    /// Orders of the rows of position tables, by numbers of rows and tokens.
    orders: MadeOnce<(ListOf, u64, u64), Rc<RowOrder>>,
    /// Input buffers of each micro-batch, by its index in the step.
    words: RefCell<BTreeMap<u32, Rc<Words>>>,
    optimizer: OnceCell<Optimizer>,
}

/// A small cache: values made once for each of a few keys.
struct MadeOnce<K, V>(RefCell<Vec<(K, V)>>);

impl<K: PartialEq, V: Clone> MadeOnce<K, V> {
    fn get<E>(&self, key: K, make: impl FnOnce(&K) -> Result<V, E>) -> Result<V, E> {
        if let Some((_, made)) = self.0.borrow().iter().find(|(known, _)| *known == key) {
            return Ok(made.clone());
        }
        let made = make(&key)?;
        self.0.borrow_mut().push((key, made.clone()));
        Ok(made)
    }
}

/// What a list holds.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Holds {
    /// Positions along a dim of a tensor.
    Positions,
    /// Cosines and sines of rotary embedding.
    Turns(Rotary),
    /// ALiBi slopes of heads.
    Slopes(SoftmaxRule),
}

/// Key of a list: what it holds, and the dim of the tensor that it is for.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ListOf {
    /// Index of the dim, and the tensor's number of dims.
    dim: [usize; 2],
    length: u64,
    placements: Placements,
    holds: Holds,
}

impl ListOf {
    fn new(info: &TensorInfo, dim: usize, holds: Holds) -> Self {
        Self {
            dim: [dim, info.global.len()],
            length: info.global[dim],
            placements: info.placements,
            holds,
        }
    }
}

/// Parameters of a block as this rank holds them, with its sharding.
pub type Parameters<'p> = dyn block::Parameters<Tensor> + 'p;

/// Receives the gradients of weights.
pub trait GradientSink {
    /// The tensor in which a parameter's gradient accumulates, in 32 bits, to add to.
    fn gradient(&mut self, id: TensorId) -> Tensor;
}

/// The inputs of a pass: rank, micro-batch and parameters.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The rank that runs it.
    pub machine: &'a Machine<'a>,
    /// The micro-batch.
    pub batch: &'a Batch<'a>,
    /// The block's parameters.
    pub parameters: &'a Parameters<'a>,
}

impl<'m> Machine<'m> {
    /// A rank whose device exchanges data through the host.
    #[must_use]
    pub fn new(device: Device, host: cpu_device::Machine<'m>) -> Self {
        let links = Rc::new(HostLinks::new(device.clone(), host.comm));
        Self::linked(device, host, links)
    }

    /// A rank with links between devices.
    #[must_use]
    pub fn linked(
        device: Device,
        host: cpu_device::Machine<'m>,
        links: Rc<dyn Links + 'm>,
    ) -> Self {
        Self {
            device,
            host,
            links,
            lists: MadeOnce(RefCell::default()),
            cuts: MadeOnce(RefCell::default()),
            spans: MadeOnce(RefCell::default()),
            orders: MadeOnce(RefCell::default()),
            words: RefCell::default(),
            optimizer: OnceCell::new(),
        }
    }

    /// A cut from the cache, made on first use.
    pub(super) fn cut(&self, of: CutOf) -> Rc<Cut> {
        let make = |of: &CutOf| Ok::<_, Infallible>(Rc::new(Cut::new(&self.host, of)));
        let Ok(cut) = self.cuts.get(of, make);
        cut
    }

    /// The optimizer, created on first use.
    ///
    /// # Errors
    /// When the device's memory is full.
    pub fn optimizer(&self) -> Result<&Optimizer> {
        if let Some(optimizer) = self.optimizer.get() {
            return Ok(optimizer);
        }
        let made = Optimizer::new(&self.device)?;
        Ok(self.optimizer.get_or_init(|| made))
    }

    /// Uploads a micro-batch of a step. A micro-batch's buffers keep their addresses in every step.
    ///
    /// # Errors
    /// When the device's memory is full.
    pub fn batch<'b>(&self, micro_batch: u32, host: MicroBatch<'b>) -> Result<Batch<'b>> {
        if let Some(words) = self.words.borrow().get(&micro_batch) {
            words.update(&self.device, &host)?;
            let words = Rc::clone(words);
            return Ok(Batch { host, words });
        }
        let batch = Batch::new(&self.device, host)?;
        let words = Rc::clone(&batch.words);
        self.words.borrow_mut().insert(micro_batch, words);
        Ok(batch)
    }

    /// Order of a tensor's tokens by the row of the position table that each adds to.
    pub(super) fn position_order(&self, info: &TensorInfo, rows: u64) -> Result<Rc<RowOrder>> {
        let of = ListOf::new(info, 1, Holds::Positions);
        let tokens = info.shape[..2].iter().product();
        self.orders.get((of, rows, tokens), |_| {
            let positions = self.position_list(info, 1);
            let ids: Vec<u32> = (0..info.global[0])
                .flat_map(|_| positions.iter().map(|&p| p as u32))
                .collect();
            Ok(Rc::new(RowOrder::new(&self.device, &ids, 0..rows)?))
        })
    }

    /// Positions in their sequence of a tensor's tokens along `dim`, and how many there are.
    pub(super) fn positions(&self, info: &TensorInfo, dim: usize) -> Result<(Rc<Buffer>, usize)> {
        let list = self.list(ListOf::new(info, dim, Holds::Positions), || {
            self.position_list(info, dim)
                .iter()
                .map(|&p| p as u32)
                .collect()
        })?;
        let count = (list.bytes / 4) as usize;
        Ok((list, count))
    }

    pub(super) fn position_list(&self, info: &TensorInfo, dim: usize) -> Vec<u64> {
        self.host
            .position
            .indices(&info.global, &info.placements, dim)
    }

    /// First index and number of the indices of a tensor along `dim` that this rank holds, if they are contiguous.
    pub(super) fn span(&self, info: &TensorInfo, dim: usize) -> Option<[u64; 2]> {
        let of = ListOf::new(info, dim, Holds::Positions);
        let Ok(span) = self.spans.get(of, |_| {
            let held = self.position_list(info, dim);
            let contiguous = held.windows(2).all(|pair| pair[1] == pair[0] + 1);
            let first = held.first().copied().unwrap_or(0);
            Ok::<_, Infallible>(contiguous.then_some([first, held.len() as u64]))
        });
        span
    }

    /// Cosines and sines of rotary embedding, and the number of tokens per sequence that they cover.
    pub(super) fn turns(&self, info: &TensorInfo, rotary: &Rotary) -> Result<(Rc<Buffer>, usize)> {
        let (_, count) = self.positions(info, 1)?;
        let list = self.list(ListOf::new(info, 1, Holds::Turns(*rotary)), || {
            let frequencies = rotary.scaling.frequencies(rotary.theta, rotary.dims);
            let magnitude = rotary.scaling.magnitude();
            let turn = |position: u64, frequency: f64| {
                let (sin, cos) = (position as f64 * frequency).sin_cos();
                [(magnitude * cos) as f32, (magnitude * sin) as f32].map(f32::to_bits)
            };
            self.position_list(info, 1)
                .iter()
                .flat_map(|&p| frequencies.iter().flat_map(move |&f| turn(p, f)))
                .collect()
        })?;
        Ok((list, count))
    }

    /// ALiBi slopes of this rank's heads: what a score loses per token of distance.
    pub(super) fn slopes(
        &self,
        scores: &TensorInfo,
        rule: SoftmaxRule,
    ) -> Result<Option<Rc<Buffer>>> {
        if rule.alibi.is_none() {
            return Ok(None);
        }
        let of = ListOf::new(scores, 1, Holds::Slopes(rule));
        let list = self.list(of, || {
            let heads = self.position_list(scores, 1);
            let slope = |head| rule.slope(head).map(f32::to_bits);
            heads.into_iter().filter_map(slope).collect()
        })?;
        Ok(Some(list))
    }

    fn list(&self, of: ListOf, make: impl FnOnce() -> Vec<u32>) -> Result<Rc<Buffer>> {
        self.lists
            .get(of, |_| Ok(Rc::new(self.device.indices(&make())?)))
    }
}
