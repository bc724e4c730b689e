//! Mixture of experts: routing, permutation of rows by expert, and grouped GEMMs.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use catalog::DType;
use catalog::model::Router;

use super::grid::{THREADS, threads_of, unsupported};
use crate::error::CudaError;
use crate::kernels::{Kernel, Source, typed};
use crate::launcher::{Arguments, RouterArgument};
use crate::memory::Buffer;
use crate::tensor::{Device, Tensor};

/// Most experts that the router's kernels support.
const MOST_EXPERTS: usize = 256;
/// Most expert groups that they support: one per lane of a warp.
const MOST_GROUPS: usize = 32;
/// Choices that a block of `route_count` and `route_place` processes; it has eight warps.
const CHUNK: usize = 1024;
/// Rows and columns of a tile of the bf16 GEMMs, the part of the contracted length held at a time, and the padding that
/// avoids bank conflicts.
const TILE: usize = 128;
const DEEP: usize = 32;
const PAD: usize = 8;
/// Rows and columns of a tile of the 32-bit GEMMs.
const SMALL: usize = 16;

/// A router's choices for the tokens of a micro-batch, on the device.
#[derive(Debug)]
pub struct Route {
    /// Experts per token.
    pub top_k: usize,
    /// Number of experts of the layer, over all ranks.
    pub experts: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// Chosen experts of every token, best first.
    pub chosen: Buffer,
    /// For every row, the choice it stands for: `token · k + slot`.
    pub source: Buffer,
    /// For every choice (`token · k + slot`), the row that holds the token for the chosen expert.
    pub place: Buffer,
    /// Offsets of each expert's rows, with the end of the last.
    pub offsets: Buffer,
    /// Exchanges that sent the rows on to the ranks of their experts, in order.
    pub levels: RefCell<Vec<Rc<Level>>>,
}

/// Rows after an exchange between ranks, sorted by expert and by the rank that sent them.
#[derive(Debug)]
pub struct Level {
    /// For every rank of the group, the range of previous rows that were sent to it.
    pub sent: Vec<Range<usize>>,
    /// For every rank of the group, the range of received rows that came from it.
    pub received: Vec<Range<usize>>,
    /// Number of rows of every expert on this rank.
    pub counts: Vec<u32>,
    /// For every row, its index among the received rows.
    pub order: Buffer,
    /// For every received row, its index after sorting.
    pub inverse: Buffer,
    /// Offsets of the rows of each expert on this rank, with the end of the last.
    pub offsets: Buffer,
}

impl Level {
    /// Number of rows after the exchange.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.received.last().map_or(0, |range| range.end)
    }

    /// Bytes of its index lists.
    fn bytes(&self) -> u64 {
        let lists = [&self.order, &self.inverse, &self.offsets];
        lists.iter().map(|list| list.bytes).sum()
    }
}

impl Route {
    /// The last exchange, if there was any.
    #[must_use]
    pub fn last(&self) -> Option<Rc<Level>> {
        self.levels.borrow().last().map(Rc::clone)
    }

    /// Calls `read` with the offsets of each expert's rows on the rank that holds the experts.
    pub fn at_experts<T>(&self, read: impl FnOnce(&Buffer) -> T) -> T {
        match self.last() {
            Some(level) => read(&level.offsets),
            None => read(&self.offsets),
        }
    }

    /// Number of rows after the first `exchanges` exchanges.
    #[must_use]
    pub fn rows_after(&self, exchanges: usize) -> usize {
        match exchanges.checked_sub(1) {
            Some(level) => self.levels.borrow()[level].rows(),
            None => self.rows(),
        }
    }

    /// Number of rows before any exchange: one per choice.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.tokens * self.top_k
    }

    /// Bytes of its index lists.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let lists = [&self.chosen, &self.source, &self.place, &self.offsets];
        let levels = self.levels.borrow();
        let exchanged: u64 = levels.iter().map(|level| level.bytes()).sum();
        exchanged + lists.iter().map(|list| list.bytes).sum::<u64>()
    }
}

/// A router's rule in the form its kernels take.
///
/// # Errors
/// When the router has more experts or groups than the kernels support, or chooses more than there are.
fn argument(router: &Router, experts: usize, top_k: usize) -> Result<RouterArgument, CudaError> {
    let [groups, best] = [router.groups, router.best_groups].map(|n| n as usize);
    let refused = |reason| Err(unsupported("a router", reason));
    if experts > MOST_EXPERTS {
        return refused(format!("{experts} experts, more than {MOST_EXPERTS}"));
    }
    if groups > MOST_GROUPS || !experts.is_multiple_of(groups.max(1)) {
        return refused(format!(
            "{experts} experts in {groups} groups of unequal size, or over {MOST_GROUPS} groups"
        ));
    }
    if best > groups || top_k > experts / groups.max(1) * best {
        return refused(format!(
            "{top_k} of the experts in the best {best} of {groups} groups of {experts} experts"
        ));
    }
    Ok(RouterArgument {
        experts: [experts, top_k].map(|n| n as i32),
        rule: [router.sigmoid, router.normalise].map(i32::from),
        groups: [groups, best].map(|n| n as i32),
        scale: router.scale as f32,
    })
}

/// Warps per block, each of which processes a token.
const WARPS: usize = THREADS as usize / 32;

impl Device {
    /// Chooses the `top_k` best experts of every row of logits, with their weights; `bias` is added to scores only for
    /// the choice.
    ///
    /// # Errors
    /// When memory or the device fails, or the kernels do not support the router.
    pub fn route(
        &self,
        logits: &Tensor,
        top_k: usize,
        (router, bias): (&Router, Option<&Tensor>),
    ) -> Result<(Route, Tensor), CudaError> {
        let (tokens, experts) = (logits.rows(), logits.columns());
        let rule = argument(router, experts, top_k)?;
        // Plain softmax routing ranks experts by their logits and ignores the bias.
        let bias = bias.filter(|_| router.sigmoid || router.groups > 1);
        let narrow = bias.filter(|bias| bias.is_bf16());
        let widened = narrow.map(|bias| self.cast(bias, DType::F32)).transpose()?;
        let bias = widened.as_ref().or(bias);
        let choices = tokens * top_k;
        let words = |count: usize| self.memory.allocate(4 * count as u64);
        let route = Route {
            top_k,
            experts,
            tokens,
            chosen: words(choices)?,
            source: words(choices)?,
            place: words(choices)?,
            offsets: words(experts + 1)?,
            levels: RefCell::default(),
        };
        let weights = self.tensor(logits.with_columns(top_k), DType::F32)?;
        let arguments = Arguments::of(&[&route.chosen, &weights, &logits, &bias])
            .sizes([tokens])
            .with(rule);
        let kernel = typed!(Expert, "top_k", logits.is_bf16());
        let grid = [tokens.div_ceil(WARPS) as u32, 1, 1];
        self.blocks(kernel, grid, THREADS, 0, arguments)?;
        self.order(&route)?;
        Ok((route, weights))
    }

    /// Sorts the choices by expert, then by token.
    fn order(&self, route: &Route) -> Result<(), CudaError> {
        let (choices, experts) = (route.rows(), route.experts);
        let chunks = choices.div_ceil(CHUNK);
        let counts = self.memory.allocate(4 * (experts * chunks) as u64)?;
        let plain = |name| Kernel::plain(Source::Expert, name);
        let grid = [chunks as u32, 1, 1];
        let count = Arguments::of(&[&counts, &route.chosen])
            .sizes([choices])
            .with(experts as i32);
        self.blocks(plain("route_count"), grid, THREADS, 0, count)?;
        let scan = Arguments::of(&[&counts, &route.offsets])
            .with(experts as i32)
            .with(chunks as i32);
        self.blocks(plain("route_scan"), [1, 1, 1], THREADS, 0, scan)?;
        let place = Arguments::of(&[&route.source, &route.place, &counts, &route.chosen])
            .sizes([choices])
            .with(experts as i32);
        self.blocks(plain("route_place"), grid, THREADS, 0, place)
    }

    /// Gradient of the router's logits from the gradient of the chosen experts' weights.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn route_backward(
        &self,
        route: &Route,
        gradient: &Tensor,
        (logits, weights): (&Tensor, &Tensor),
        router: &Router,
    ) -> Result<Tensor, CudaError> {
        let rule = argument(router, route.experts, route.top_k)?;
        let out = self.tensor(logits.shape.clone(), logits.dtype)?;
        let arguments = Arguments::of(&[&out, &gradient, &route.chosen, &weights, &logits])
            .sizes([route.tokens])
            .with(rule);
        let kernel = typed!(Expert, "top_k_backward", logits.is_bf16());
        let grid = [route.tokens.div_ceil(WARPS) as u32, 1, 1];
        self.blocks(kernel, grid, THREADS, 0, arguments)?;
        Ok(out)
    }

    /// Copies tokens to one row per choice, sorted by expert.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn permute(&self, route: &Route, x: &Tensor) -> Result<Tensor, CudaError> {
        self.rows_of(x, (&route.source, route.top_k))
    }

    /// Gathers rows: row `i` of the result is row `sources[i] / k` of `x`.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn rows_of(&self, x: &Tensor, (sources, k): (&Buffer, usize)) -> Result<Tensor, CudaError> {
        let (rows, columns) = (sources.bytes as usize / 4, x.columns());
        let out = self.tensor(vec![rows, columns], x.dtype)?;
        let arguments = Arguments::of(&[&out, &x, &sources]).sizes([k, columns]);
        let kernel = typed!(Expert, "permute", x.is_bf16());
        let grid = [rows as u32, 1, 1];
        self.blocks(kernel, grid, threads_of(columns, 256), 0, arguments)?;
        Ok(out)
    }

    /// Adds the rows of each token in the order of their slots, weighted by their probabilities if given.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn combine(
        &self,
        route: &Route,
        rows: &Tensor,
        probabilities: Option<&Tensor>,
        shape: Vec<usize>,
    ) -> Result<Tensor, CudaError> {
        let columns = rows.columns();
        let out = self.tensor(shape, rows.dtype)?;
        let arguments = Arguments::of(&[&out, &rows, &probabilities, &route.place])
            .sizes([route.top_k, columns]);
        let kernel = typed!(Expert, "combine", rows.is_bf16());
        let grid = [route.tokens as u32, 1, 1];
        self.blocks(kernel, grid, threads_of(columns, 256), 0, arguments)?;
        Ok(out)
    }

    /// Gradients of the rows and of the probabilities of [`Device::combine`].
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn combine_backward(
        &self,
        route: &Route,
        dy: &Tensor,
        rows: &Tensor,
        probabilities: &Tensor,
    ) -> Result<[Tensor; 2], CudaError> {
        let columns = rows.columns();
        let d_rows = self.tensor(rows.shape.clone(), rows.dtype)?;
        let d_probabilities = self.tensor(probabilities.shape.clone(), DType::F32)?;
        let arguments = Arguments::of(&[
            &d_rows,
            &d_probabilities,
            &dy,
            &rows,
            &probabilities,
            &route.source,
        ])
        .sizes([route.top_k, columns]);
        let kernel = typed!(Expert, "combine_backward", rows.is_bf16());
        let grid = [route.rows() as u32, 1, 1];
        self.blocks(kernel, grid, threads_of(columns, 256), 0, arguments)?;
        Ok([d_rows, d_probabilities])
    }

    /// Rows plus the bias of their expert, `b: [experts, n]`.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn expert_bias(
        &self,
        offsets: &Buffer,
        x: &Tensor,
        b: &Tensor,
    ) -> Result<Tensor, CudaError> {
        let columns = x.columns();
        let out = self.tensor(x.shape.clone(), x.dtype)?;
        let arguments = Arguments::of(&[&out, &x, &b, &offsets])
            .with(b.rows() as i32)
            .sizes([columns]);
        let kernel = typed!(Expert, "expert_bias", x.is_bf16());
        let grid = [x.rows() as u32, 1, 1];
        self.blocks(kernel, grid, threads_of(columns, 256), 0, arguments)?;
        Ok(out)
    }

    /// `gradient[e] += Σ` rows of expert `e`.
    ///
    /// # Errors
    /// When the device fails.
    pub fn add_expert_bias_gradient(
        &self,
        offsets: &Buffer,
        gradient: &Tensor,
        dy: &Tensor,
    ) -> Result<(), CudaError> {
        let columns = dy.columns();
        let arguments = Arguments::of(&[&gradient, &dy, &offsets]).sizes([columns]);
        let kernel = typed!(Expert, "expert_bias_backward", dy.is_bf16());
        let across = columns.div_ceil(THREADS as usize) as u32;
        let grid = [across, gradient.rows() as u32, 1];
        self.blocks(kernel, grid, THREADS, 0, arguments)
    }

    /// Grouped GEMM: one product per expert, `x · wᵀ`, or in backward `x · w`, with `w: [experts, n, k]`.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn grouped(
        &self,
        offsets: &Buffer,
        x: &Tensor,
        w: &Tensor,
        backward: bool,
    ) -> Result<Tensor, CudaError> {
        let (experts, n, k) = (w.shape[0], w.shape[1], w.shape[2]);
        let (columns, length) = if backward { (k, n) } else { (n, k) };
        let out = self.tensor(vec![x.rows(), columns], x.dtype)?;
        let arguments = Arguments::of(&[&out, &x, &w, &offsets])
            .with(experts as i32)
            .sizes([columns, length]);
        let kernel = if backward {
            typed!(Grouped, "grouped_backward", x.is_bf16())
        } else {
            typed!(Grouped, "grouped_forward", x.is_bf16())
        };
        let tile = if x.is_bf16() { TILE } else { SMALL };
        // The rows of every expert may end in a partly filled tile.
        let down = x.rows() / tile + experts;
        let grid = [down as u32, columns.div_ceil(tile) as u32, 1];
        let shared = if x.is_bf16() {
            shared(false, backward)
        } else {
            0
        };
        self.blocks(kernel, grid, THREADS, shared, arguments)?;
        Ok(out)
    }

    /// `gradient[e] += dyᵀ · x` over the rows of expert `e`.
    ///
    /// # Errors
    /// When the device fails.
    pub fn add_grouped_gradient(
        &self,
        offsets: &Buffer,
        gradient: &Tensor,
        dy: &Tensor,
        x: &Tensor,
    ) -> Result<(), CudaError> {
        let experts = gradient.shape[0];
        let (m, n) = (dy.columns(), x.columns());
        let arguments = Arguments::of(&[&gradient, &dy, &x, &offsets]).sizes([m, n]);
        let kernel = typed!(Grouped, "grouped_weight", x.is_bf16());
        let tile = if x.is_bf16() { TILE } else { SMALL };
        let grid = [
            m.div_ceil(tile) as u32,
            n.div_ceil(tile) as u32,
            experts as u32,
        ];
        let shared = if x.is_bf16() { shared(true, true) } else { 0 };
        self.blocks(kernel, grid, THREADS, shared, arguments)
    }
}

/// Bytes of shared memory for two bf16 tiles of A and two of B. `a_transposed` and `b_by_length` say that a tile of that operand
/// has the contracted dim as its rows (`DEEP × TILE`), not as its columns.
fn shared(a_transposed: bool, b_by_length: bool) -> u32 {
    let tile = |deep: bool| {
        if deep {
            DEEP * (TILE + PAD)
        } else {
            TILE * (DEEP + PAD)
        }
    };
    (2 * 2 * (tile(a_transposed) + tile(b_by_length))) as u32
}
