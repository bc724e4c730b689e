//! Runs a pass of a block without data, on the sizes of its buffers alone, and follows which
//! buffers each operator's kernels allocate and free.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::rc::Rc;

use catalog::DType;

use super::ledger::{Ledger, Room, Sure};
use crate::block::{self, Block, Half, Saved, pass};
use crate::operator::{
    Attention, AttentionPiece, Exchange, Expert, Factor, Gradient, Moves, Operator, Pointwise,
    Product, Token,
};
use crate::tensor::{TensorId, TensorInfo, TensorRole};
use crate::trace::{self, AttentionPieces, Op};

/// What a block keeps for backward, as counted buffers.
pub type Rooms = Saved<Room, Vec<Room>>;

/// One pass of a block.
pub(super) struct Pass<'r> {
    pub(super) block: &'r Block,
    pub(super) ledger: &'r Rc<Ledger>,
    pub(super) held: Rooms,
    /// Keys and values gathered from the whole ring, by storage.
    pub(super) ring: BTreeMap<u32, Room>,
    /// An empty buffer for every parameter: they are counted with the states.
    pub(super) parameter: Room,
    /// Which half of backward runs; `None` in forward.
    pub(super) half: Option<Half>,
    /// The activation and the gradient last cast to FP8, and whether by rows, by columns, or both.
    pub(super) casts: [Option<(TensorId, [bool; 2], Room)>; 2],
}

/// Indices in [`Pass::casts`] of the last cast activation and of the last cast gradient.
const ACTIVATION: usize = 0;
const GRADIENT: usize = 1;

impl<'r> Pass<'r> {
    pub(super) fn new(block: &'r Block, ledger: &'r Rc<Ledger>, half: Option<Half>) -> Self {
        Self {
            block,
            ledger,
            held: Rooms::default(),
            ring: BTreeMap::new(),
            parameter: ledger.take(0, DType::F32),
            half,
            casts: [None, None],
        }
    }

    pub(super) fn info(&self, id: TensorId) -> &'r TensorInfo {
        self.block.trace.tensor(id)
    }

    pub(super) fn get(&self, id: TensorId) -> &Room {
        let value = self.held.values.get(&self.block.storage(id));
        value.unwrap_or(&self.parameter)
    }

    pub(super) fn set(&mut self, id: TensorId, value: Room) {
        self.held.values.insert(self.block.storage(id), value);
    }

    /// Allocates a tensor's buffer at its traced size.
    pub(super) fn make(&mut self, id: TensorId) {
        let info = self.info(id);
        let value = self.ledger.take(info.bytes().0, info.dtype);
        self.set(id, value);
    }

    fn alias(&mut self, id: TensorId, of: TensorId) {
        let value = Rc::clone(self.get(of));
        self.set(id, value);
    }

    /// A copy to another type; an alias where the type stays the same, or where any type will do.
    fn copy(&mut self, from: TensorId, to: TensorId, any: bool) {
        if any || self.get(from).dtype == self.info(to).dtype {
            self.alias(to, from);
        } else {
            self.make(to);
        }
    }

    /// The FP8 elements of a tensor (`copies` of them) and their scale.
    fn codes(&self, id: TensorId, copies: u64) -> Room {
        let bytes = self.info(id).elements() * copies + 4;
        self.ledger.take(bytes, DType::F8)
    }

    /// Casts an activation or a gradient to FP8; the result stays until the next cast.
    fn cast(&mut self, place: usize, id: TensorId, ways: [bool; 2]) {
        let lies = |has: &[bool; 2]| (0..2).all(|way| has[way] || !ways[way]);
        let last = self.casts[place].take();
        let cast = last.filter(|(of, has, _)| *of == id && lies(has));
        let copies = ways.iter().filter(|&&way| way).count() as u64;
        let cast = cast.unwrap_or_else(|| (id, ways, self.codes(id, copies)));
        self.casts[place] = Some(cast);
    }

    /// An FP8 product: casts of its operands, and its output.
    fn product_in_8_bits<O>(&mut self, op: &Op<O>, to: Option<TensorId>) {
        let [first, second] = [op.inputs[0], op.inputs[1]];
        let weight = match op.pass {
            trace::Pass::Forward => {
                self.cast(ACTIVATION, first, [true, false]);
                Some(self.codes(second, 1))
            }
            trace::Pass::BackwardInput => {
                self.cast(GRADIENT, first, [true, self.half == Some(Half::Both)]);
                Some(self.codes(second, 1))
            }
            trace::Pass::BackwardWeight => {
                self.cast(GRADIENT, first, [false, true]);
                self.cast(ACTIVATION, second, [false, true]);
                None
            }
        };
        if let Some(to) = to {
            self.make(to);
        }
        drop(weight);
    }

    /// Counts `words` 32-bit words that are in use only while one kernel runs.
    fn passing(&self, words: u64) {
        drop(self.ledger.take(4 * words, DType::F32));
    }

    /// Number of rows of a tensor: the product of all dims but the last.
    pub(super) fn rows(&self, id: TensorId) -> u64 {
        let shape = &self.info(id).shape;
        shape[..shape.len().saturating_sub(1)].iter().product()
    }

    fn attention(&mut self, pieces: AttentionPieces) {
        let forward = &self.block.trace.forward;
        let [scores, context] = [pieces.scores, pieces.context].map(|piece| &forward[piece]);
        let (out, sums) = (context.outputs[0], scores.outputs[0]);
        let info = self.info(out);
        let dtype = self.get(scores.inputs[0]).dtype;
        let value = self.ledger.take(info.elements() * dtype.size(), dtype);
        self.set(out, value);
        let value = self.ledger.take(4 * self.rows(sums), DType::F32);
        self.set(sums, value);
    }

    fn attention_backward(&mut self, attention: Attention) {
        let block = self.block;
        let forward = &block.trace.forward;
        let AttentionPieces {
            scores, context, ..
        } = block.trace.attentions[attention.of];
        let library = block.causal_attentions[attention.of];
        let passing = match library.filter(|_| self.ledger.library) {
            Some(library) => library.backward_workspace(),
            None => 4 * self.rows(forward[scores].outputs[0]),
        };
        let passing = self.ledger.take(passing, DType::F32);
        let [q, k, v] = [
            forward[scores].inputs[0],
            forward[scores].inputs[1],
            forward[context].inputs[1],
        ];
        self.ring_again([k, v]);
        let gradients = [q, k, v].map(|like| self.keys(like));
        let gradients = gradients.map(|like| self.ledger.take(like.bytes, like.dtype));
        drop(passing);
        let pieces = [
            (scores, Factor::First, q),
            (scores, Factor::Second, k),
            (context, Factor::Second, v),
        ];
        for ((piece, factor, of), gradient) in pieces.into_iter().zip(gradients) {
            let gradient = self.return_ring(of, gradient);
            if let Some(id) = block.gradient_of(piece, factor) {
                self.set(id, gradient);
            }
        }
    }

    pub(super) fn routed(&mut self, op: &Op) {
        let experts = *self.info(op.inputs[0]).shape.last().unwrap_or(&0);
        let choices = self.info(op.outputs[0]).elements();
        let lists = 4 * (3 * choices + experts + 1);
        self.held.route = Some(vec![self.ledger.take(lists, DType::F32)]);
        self.make(op.outputs[0]);
        self.passing(experts * choices.div_ceil(1024));
    }

    /// Allocates the bookkeeping of rows received from other ranks: per row its permuted place and the inverse, and
    /// where the rows of each local expert begin and end.
    fn rows_came(&mut self, op: &Op, exchange: Exchange) {
        if matches!(exchange.moves, Moves::Dispatch | Moves::ExpertGather) {
            let mut ops = self.block.trace.forward.iter();
            let experts = ops.find_map(|op| match op.operator {
                Operator::Product(Product::GroupedMatmul(_, experts)) => Some(experts),
                _ => None,
            });
            let rows = self.info(op.outputs[0]).shape[0];
            let words = 2 * rows + experts.unwrap_or(0) + 1;
            let lists = self.ledger.take(4 * words, DType::F32);
            self.held.route.get_or_insert_default().push(lists);
        }
    }

    /// Allocates the list of positions, once for all blocks.
    pub(super) fn positions(&self, x: TensorId) {
        let info = self.info(x);
        if let Some(&tokens) = info.shape.get(1) {
            self.ledger.list(format!("positions {tokens}"), 4 * tokens);
        }
    }

    /// Allocates the outputs of an operator that runs unfused, and what it saves for backward, such as routing.
    fn forward_in_pieces(&mut self, op: &Op) {
        self.make_all(op);
        for &id in &op.saved {
            let is_made = self.held.values.contains_key(&self.block.storage(id));
            if !is_made && self.info(id).role == TensorRole::Activation {
                self.make(id);
            }
        }
    }

    pub(super) fn forward_kernels(&mut self, index: usize) {
        let block = self.block;
        let op = &block.trace.forward[index];
        if block.attention == block::Attention::Pieces {
            return self.forward_in_pieces(op);
        }
        if block.epilogues.is_bias(index) || block.epilogues.is_gelu(index) {
            return;
        }
        match op.operator {
            Operator::Attention(Attention { of, piece, .. }) => {
                if piece == AttentionPiece::Scores {
                    self.positions(op.inputs[0]);
                    self.attention(block.trace.attentions[of]);
                }
            }
            Operator::Product(product @ Product::Matmul(..)) => self.linear(index, op, product),
            Operator::Pointwise(Pointwise::Copy) => {
                let (from, to) = (op.inputs[0], op.outputs[0]);
                self.copy(from, to, block.is_only_for_the_loss(to));
            }
            Operator::Pointwise(Pointwise::Rope(rotary)) => {
                let tokens = self.info(op.inputs[0]).shape[1];
                let name = format!("turns {tokens} {rotary:?}");
                self.ledger.list(name, 4 * tokens * rotary.dims);
                self.positions(op.inputs[0]);
                self.make_all(op);
            }
            Operator::Pointwise(Pointwise::Dropout(_))
            | Operator::Token(Token::Positions { .. }) => {
                self.positions(op.inputs[0]);
                self.make_all(op);
            }
            Operator::Token(Token::CrossEntropy(sums)) => {
                self.make(op.outputs[0]);
                if sums.is_none() {
                    self.passing(3 * self.rows(op.inputs[0]));
                }
            }
            Operator::Expert(Expert::Route(_)) => self.routed(op),
            Operator::Exchange(exchange) => {
                self.exchange(op, exchange);
                self.rows_came(op, exchange);
            }
            Operator::Product(Product::GroupedMatmul(..))
            | Operator::Norm(_)
            | Operator::Pointwise(_)
            | Operator::Token(Token::Embedding(_))
            | Operator::Expert(_)
            | Operator::Recurrent(_)
            | Operator::Add => self.make_all(op),
        }
    }

    /// Allocates all outputs of an operator at their traced sizes.
    fn make_all<O>(&mut self, op: &Op<O>) {
        op.outputs.iter().for_each(|&id| self.make(id));
    }

    fn linear(&mut self, index: usize, op: &Op, product: Product) {
        let block = self.block;
        let to = block.made_by(index);
        let gelu = block.epilogues.gelu(index);
        if block.trace.is_eight_bit(product) {
            self.product_in_8_bits(op, Some(to));
        } else if gelu.is_none() || block.stays(to, self.half) {
            self.make(to);
        }
        if let Some(gelu) = gelu {
            self.make(block.trace.forward[gelu].outputs[0]);
        }
    }

    pub(super) fn backward_kernels(&mut self, index: usize) {
        let block = self.block;
        let op = &block.trace.backward[index];
        if block.attention == block::Attention::Pieces {
            return self.make_all(op);
        }
        if block.epilogues.is_gelu_gradient(index) {
            return;
        }
        if let Some(gelu) = block.epilogues.gelu_gradient(index) {
            return self.make(block.trace.backward[gelu].outputs[0]);
        }
        match op.operator {
            Gradient::Attention(_, attention, factor) => {
                if (attention.piece, factor) == (AttentionPiece::Context, Factor::First) {
                    self.attention_backward(attention);
                }
            }
            Gradient::Product(_, product, factor) => match factor {
                _ if block.trace.is_eight_bit(product) => {
                    let to = (factor == Factor::First).then(|| op.outputs[0]);
                    self.product_in_8_bits(op, to);
                }
                Factor::First => self.make(op.outputs[0]),
                // Gradients of weights are added into the sums that already exist.
                Factor::Second => {}
            },
            Gradient::Norm(..) => op.outputs.iter().take(1).for_each(|&id| self.make(id)),
            Gradient::Pointwise(_, Pointwise::Copy | Pointwise::Join { .. }) => {
                self.copy(op.inputs[0], op.outputs[0], false);
            }
            Gradient::Token(of, Token::CrossEntropy(_)) => {
                self.alias(op.outputs[0], block.trace.forward[of].inputs[0]);
            }
            // These are gradients of weights, too.
            Gradient::Pointwise(_, Pointwise::Bias)
            | Gradient::Expert(_, Expert::Bias)
            | Gradient::Token(_, Token::Embedding(_) | Token::Positions { .. })
            | Gradient::Ring(_) => {}
            Gradient::Pointwise(..)
            | Gradient::Expert(..)
            | Gradient::Recurrent(..)
            | Gradient::Sum => self.make_all(op),
            Gradient::Exchange(exchange) => self.exchange(op, exchange),
        }
    }
}

impl pass::Pass for Pass<'_> {
    type Tensor = Room;
    type Value = Room;
    type Route = Vec<Room>;
    type Sink = ();
    type Error = Infallible;

    fn value(tensor: Room) -> Room {
        tensor
    }

    fn held(&mut self) -> &mut Rooms {
        &mut self.held
    }

    fn tensor(&self, id: TensorId) -> Sure<&Room> {
        Ok(self.get(id))
    }

    fn forward_op(&mut self, op: usize) -> Sure<()> {
        self.forward_kernels(op);
        Ok(())
    }

    fn forward_view(&mut self, view: usize) -> Sure<()> {
        self.make(self.block.trace.forward_views[view].to);
        Ok(())
    }

    fn backward_op(&mut self, op: usize, (): &mut ()) -> Sure<()> {
        self.backward_kernels(op);
        Ok(())
    }

    fn backward_view(&mut self, view: usize) -> Sure<()> {
        let to = self.block.trace.backward_views[view].to;
        if !self.held.values.contains_key(&self.block.storage(to)) {
            self.make(to);
        }
        Ok(())
    }
}
