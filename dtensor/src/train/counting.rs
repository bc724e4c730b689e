//! The counting device: runs a rank's step with buffers that are only sizes, to predict memory. It allocates what the
//! CUDA device and its communication allocate, in the same order, except partial sums of a few rows; where blocks run
//! core attention as separate operators, it keeps what the CPU device keeps.

mod exchange;
mod ledger;
mod run;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ops::Range;
use std::rc::Rc;

use catalog::DType;

use self::ledger::{Ledger, Room, Sure};
use self::run::{Pass, Rooms};
use super::device::{Device, FlatStates, Gradients, Passing, Run};
use crate::block::{Block, Forward, Parameters, pass};

/// 32-bit words per token that a micro-batch has on the device: id and label; with an embedding table, also the order
/// of rows for the scatter-add.
const TOKEN_WORDS: u64 = 2;
const ORDER_WORDS: u64 = 3;

/// A device that only counts memory.
#[derive(Debug)]
pub struct Counting {
    ledger: Rc<Ledger>,
    /// The token buffers that the host fills every step.
    _tokens: Room,
}

/// The tokens that a rank reads in a step.
#[derive(Clone, Copy, Debug)]
pub struct Tokens {
    /// Number of tokens in a step.
    pub count: u64,
    /// Whether the rank has the embedding table.
    pub embeds: bool,
}

impl Counting {
    /// A device on which only the tokens of a step take memory. `library` says whether a fused library kernel runs
    /// core attention where it can.
    #[must_use]
    pub fn new(library: bool, tokens: Tokens) -> Self {
        let ledger = Ledger::new(library);
        let words = TOKEN_WORDS + if tokens.embeds { ORDER_WORDS } else { 0 };
        Self {
            _tokens: ledger.take(4 * tokens.count * words, DType::F32),
            ledger,
        }
    }

    /// The peak of bytes in use since the last call.
    #[must_use]
    pub fn take_peak(&self) -> u64 {
        self.ledger.take_peak()
    }

    fn numbers(&self, count: usize, dtype: DType) -> Room {
        self.ledger.take(count as u64 * dtype.size(), dtype)
    }
}

/// The input buffer of an exchange, kept until it ends; `None` for a group of one rank, which only copies.
fn under_way(group: usize, read: Room) -> Option<Room> {
    (group > 1).then_some(read)
}

impl Device for Counting {
    type Tensor = Room;
    type Flat = Room;
    /// The buffer it lies in, and its number of elements.
    type Parcel = (Room, usize);
    type Sending = Room;
    /// A collective under way: its output buffer and its input buffers.
    type Moving = (Room, Vec<Room>);
    type Whole = Room;
    type Saved = Rooms;
    type Batch<'b> = ();
    /// The number of ranks; the first rank of a group has the largest shards.
    type Group = usize;
    type Trees = ();
    type Error = Infallible;

    fn size(group: &usize) -> usize {
        *group
    }

    fn index(_: &usize) -> usize {
        0
    }

    fn forward(
        &self,
        block: &Block,
        (): &(),
        _: &dyn Parameters<Room>,
        input: Option<Room>,
    ) -> Sure<Forward<Room, Rooms>> {
        pass::forward(block, Pass::new(block, &self.ledger, None), input)
    }

    fn backward(
        &self,
        block: &Block,
        (): &(),
        _: &dyn Parameters<Room>,
        passing: Passing<'_, Self>,
        _: &mut dyn Gradients<Self>,
    ) -> Sure<Option<Room>> {
        let run = Pass::new(block, &self.ledger, Some(passing.half));
        let Passing {
            saved, gradient, ..
        } = passing;
        pass::backward(block, run, saved, gradient, passing.half, &mut ())
    }

    fn saved_bytes(saved: &Rooms) -> u64 {
        let rooms = saved.values.values().chain(saved.route.iter().flatten());
        let rooms: BTreeMap<_, _> = rooms.map(|room| (Rc::as_ptr(room), room.bytes)).collect();
        rooms.values().sum()
    }

    fn elements(tensor: &Room) -> usize {
        (tensor.bytes / tensor.dtype.size()) as usize
    }

    fn flat(&self, len: usize, _: &dyn Fn() -> Vec<f32>) -> Sure<Room> {
        self.zeros(len)
    }

    fn zeros(&self, len: usize) -> Sure<Room> {
        Ok(self.numbers(len, DType::F32))
    }

    fn len(flat: &Room) -> usize {
        Self::elements(flat)
    }

    fn clear(&self, _: &mut Room) -> Sure<()> {
        Ok(())
    }

    fn put(&self, _: &mut Room, _: usize, _: &Room) -> Sure<()> {
        Ok(())
    }

    fn add(&self, _: &mut Room, _: usize, _: (&Room, Range<usize>)) -> Sure<()> {
        Ok(())
    }

    fn rounded(&self, _: &Room, range: Range<usize>, _: Vec<usize>, dtype: DType) -> Sure<Room> {
        Ok(self.numbers(range.len(), dtype))
    }

    fn put_tensor(&self, _: &mut Room, _: usize, _: &Room) -> Sure<()> {
        Ok(())
    }

    fn adamw(&self, _: FlatStates<'_, Self>, _: &[Run], _: &mut [Option<Room>]) -> Sure<()> {
        Ok(())
    }

    fn parcel(&self, tensor: &Room) -> Sure<(Room, usize)> {
        Ok((Rc::clone(tensor), Self::elements(tensor)))
    }

    fn parcel_of(&self, flat: &Room, range: Range<usize>) -> Sure<(Room, usize)> {
        Ok((Rc::clone(flat), range.len()))
    }

    fn send(&self, _: usize, _: u64, _: &str, (x, _): &(Room, usize)) -> Sure<Room> {
        Ok(Rc::clone(x))
    }

    fn sent(&self, _: Room) -> Sure<()> {
        Ok(())
    }

    fn receive(
        &self,
        _: usize,
        _: u64,
        _: &str,
        (shape, dtype): (Vec<usize>, DType),
    ) -> Sure<Room> {
        Ok(self.numbers(shape.iter().product(), dtype))
    }

    fn all_gather(
        &self,
        group: &usize,
        _: &str,
        (own, _): (Room, usize),
        lengths: &[usize],
    ) -> Sure<Self::Moving> {
        let whole = self.numbers(lengths.iter().sum(), own.dtype);
        Ok((whole, under_way(*group, own).into_iter().collect()))
    }

    fn gathered(&self, (whole, _): Self::Moving) -> Sure<Room> {
        Ok(whole)
    }

    fn taken(
        &self,
        whole: &Room,
        range: Range<usize>,
        shape: Vec<usize>,
        dtype: DType,
    ) -> Sure<Room> {
        self.rounded(whole, range, shape, dtype)
    }

    fn put_whole(&self, _: &mut Room, _: usize, _: &Room) -> Sure<()> {
        Ok(())
    }

    fn reduce_scatter(
        &self,
        group: &usize,
        _: &str,
        parts: Vec<(Room, usize)>,
    ) -> Sure<Self::Moving> {
        let own = self.numbers(parts[0].1, DType::F32);
        let read = parts.into_iter().filter_map(|(x, _)| under_way(*group, x));
        Ok((own, read.collect()))
    }

    fn reduced(&self, _: &usize, _: &str, moving: Self::Moving) -> Sure<Room> {
        self.gathered(moving)
    }

    fn all_reduce(&self, group: &usize, _: &str, _: &mut Room, runs: &[Range<usize>]) -> Sure<()> {
        // Runs that are not contiguous are first copied together.
        if *group > 1 && runs.len() > 1 {
            drop(self.numbers(runs.iter().map(Range::len).sum(), DType::F32));
        }
        Ok(())
    }
}
