//! Prices the kernels and collectives of a block from tables and models: the time of each when it runs alone.

use catalog::documents::OfLength;
use catalog::runtime::Rewrite;
use catalog::{Axis, Bytes, CpKind, DType, Fp8Recipe, Precision, Seconds};
use dtensor::{AttentionShape, Collective, CollectiveKind, CostClass, Pass};
use plans::{Group, Recompute};

use super::entry::{BlockToPrice, Message, PricedBlock, PricedKernel};
use super::uncaptured::Uncaptured;
use crate::block_cost;
use crate::issue::Order;
use crate::known;
use crate::launches::Launch;
use crate::lower::{FusedAttention, Kernel, KernelKind, Lowered, recomputed};
use crate::price::{MemoryKind, TablePrices, windows};
use crate::spread::Spread;
use crate::states::Elements;

/// A block to be priced from tables.
pub(super) struct Timed<'a> {
    pub(super) of: &'a BlockToPrice<'a>,
    pub(super) prices: &'a TablePrices,
}

impl Timed<'_> {
    /// Prices every kernel and collective alone, and orders them as the runtime issues them.
    pub(super) fn priced(&self) -> PricedBlock {
        self.ordered(self.kernels())
    }

    /// Prices the block for another way to run passes, from its prices `before`. That changes the
    /// order, the parts of split products, and what carries tokens to experts.
    pub(super) fn reissued(&self, before: &PricedBlock) -> PricedBlock {
        let mut kernels = before.kernels.clone();
        let uncaptured = self.uncaptured();
        let Lowered { forward, backward } = self.of.lowered;
        for (priced, kernel) in kernels.iter_mut().zip(forward.iter().chain(backward)) {
            priced.part = None;
            if self.is_of_dispatch(kernel) {
                priced.time = self.time(kernel);
                priced.card = self.card(kernel).min(priced.time);
                priced.host = self.host(kernel);
                priced.graphed = self.graphed(kernel, &uncaptured);
            }
        }
        self.ordered(kernels)
    }

    /// Prices every kernel and collective alone. After those of the block comes one that accumulates gradients, if one does, and then
    /// the products that are recomputed in 8 bits, though forward runs them in 16.
    fn kernels(&self) -> Vec<PricedKernel> {
        let BlockToPrice { trace, lowered, .. } = *self.of;
        let all = lowered.forward.iter().chain(&lowered.backward);
        let epilogue = self.epilogue(lowered);
        let uncaptured = self.uncaptured();
        let mut kernels: Vec<PricedKernel> = all
            .map(|kernel| {
                let time = self.time(kernel) + epilogue * weight_elements(kernel) as f64;
                PricedKernel {
                    time,
                    part: None,
                    host: self.host(kernel),
                    graphed: self.graphed(kernel, &uncaptured),
                    card: self.card(kernel).min(time),
                    spread: self.spread(kernel.kind),
                }
            })
            .collect();
        let accumulation = self.accumulation(block_cost::weights(trace).trained);
        if accumulation.0 > 0.0 {
            kernels.push(PricedKernel {
                time: accumulation,
                ..PricedKernel::default()
            });
        }
        for (index, kind) in self.narrow_again() {
            kernels.push(PricedKernel {
                time: self.kernel_time(kind, Pass::Forward),
                ..kernels[index].clone()
            });
        }
        kernels
    }

    /// Orders kernels as the runtime issues them.
    fn ordered(&self, kernels: Vec<PricedKernel>) -> PricedBlock {
        let BlockToPrice {
            trace,
            lowered,
            lowering,
            key,
            ..
        } = *self.of;
        let forward = lowered.forward.len();
        let end = forward + lowered.backward.len();
        let narrow: Vec<usize> = self.narrow_again().map(|(index, _)| index).collect();
        let first_narrow = kernels.len() - narrow.len();
        let of_pass = |wanted: &[Pass]| -> Vec<usize> {
            let is = |(_, kernel): &(usize, &Kernel)| wanted.contains(&kernel.pass);
            let backward = (forward..).zip(&lowered.backward);
            backward.filter(is).map(|(index, _)| index).collect()
        };
        let order = Order::new(lowering, key, trace, lowered);
        let mut backward = order.issue(&(forward..end).collect::<Vec<usize>>());
        let [input, weight]: [&[Pass]; 2] = [
            &[Pass::Forward, Pass::BackwardInput],
            &[Pass::BackwardWeight],
        ];
        let mut halves = (self.of.scenario.splits_backward())
            .then(|| [input, weight].map(|half| order.issue(&of_pass(half))));
        if first_narrow > end {
            let weight = halves.as_mut().map(|[_, weight]| weight);
            for pass in [&mut backward].into_iter().chain(weight) {
                pass.push(Launch::last(end, pass));
            }
        }
        let again = |&mode: &Recompute| {
            let mut launches = order.issue_again(&recomputed(&lowering, trace, lowered, mode));
            for launch in &mut launches {
                if let Some(nth) = narrow.iter().position(|&kernel| kernel == launch.kernel) {
                    launch.kernel = first_narrow + nth;
                }
            }
            launches
        };
        let passes = PricedBlock {
            forward: order.issue(&(0..forward).collect::<Vec<usize>>()),
            recompute: self.of.modes.iter().map(again).collect(),
            backward,
            halves,
            kernels,
            counts: self.counts_read(),
        };
        self.with_parts(passes)
    }

    /// The products that are recomputed in 8 bits though forward runs them in 16: their indices among the kernels of forward, and the
    /// kernels that recompute them.
    fn narrow_again(&self) -> impl Iterator<Item = (usize, KernelKind)> + '_ {
        let BlockToPrice {
            trace,
            lowered,
            lowering,
            ..
        } = *self.of;
        let narrow = move |kernel: &Kernel| {
            let CostClass::Product(product) = trace.forward[kernel.op].operator.cost() else {
                return None;
            };
            let narrow = lowering.widens(kernel.pass) && lowering.is_eight_bit(trace, product);
            let mut kind = kernel.kind;
            match &mut kind {
                KernelKind::Gemm { low_precision, .. }
                | KernelKind::GroupedGemm { low_precision, .. } => *low_precision = narrow,
                _ => return None,
            }
            narrow.then_some(kind)
        };
        let kernels = lowered.forward.iter().enumerate();
        kernels.filter_map(move |(index, kernel)| Some((index, narrow(kernel)?)))
    }

    /// The operators that no graph of the block captures.
    fn uncaptured(&self) -> Uncaptured {
        Uncaptured::of(self.of.trace, self.orders_arrived())
    }

    /// Names of the kernels and collectives, in the order of their prices.
    pub(super) fn names(&self) -> Vec<String> {
        let BlockToPrice { trace, lowered, .. } = *self.of;
        let all = lowered.forward.iter().chain(&lowered.backward);
        let mut names: Vec<String> = all.map(|kernel| self.name(kernel)).collect();
        if self.accumulation(block_cost::weights(trace).trained).0 > 0.0 {
            names.push("gradient accumulation memory-bound (weight gradient)".to_owned());
        }
        let again = self.narrow_again().map(|(index, _)| index);
        let again: Vec<String> = again
            .map(|index| format!("{} (recomputed)", names[index]))
            .collect();
        names.extend(again);
        names
    }

    /// Adds the price of one part for products that are split to overlap with a collective.
    fn with_parts(&self, mut block: PricedBlock) -> PricedBlock {
        let Lowered { forward, backward } = self.of.lowered;
        let again = block.recompute.iter().flatten();
        let passes = block.forward.iter().chain(again);
        let passes = passes.chain(&block.backward);
        let passes = passes.chain(block.halves.iter().flat_map(|[input, _]| input));
        for launch in passes.filter(|launch| launch.parts > 1) {
            let priced = &mut block.kernels[launch.kernel];
            let kernel = forward.iter().chain(backward).nth(launch.kernel);
            if priced.part.is_none()
                && let Some(&Kernel { mut kind, pass, .. }) = kernel
                && let KernelKind::Gemm { sizes, .. } = &mut kind
            {
                sizes[0] = sizes[0].div_ceil(launch.parts);
                priced.part = Some(self.kernel_time(kind, pass));
            }
        }
        block
    }

    pub(super) fn precision(&self) -> Precision {
        self.of.scenario.workload.precision
    }

    /// Extra time per element of a fused gradient accumulation: the GEMM of a weight gradient adds its result to the
    /// accumulation buffer in its epilogue, which reads and writes more than storing the result would.
    fn epilogue(&self, lowered: &Lowered) -> Seconds {
        let elements: u64 = lowered.backward.iter().map(weight_elements).sum();
        if elements == 0 || !self.of.lowering.has(Rewrite::FuseGradientAccumulation) {
            return Seconds(0.0);
        }
        let (gradient, buffer) = self.gradient_bytes();
        let beside = elements * (2 * buffer).saturating_sub(gradient);
        let bytes = Bytes((beside as f64 * known::EXPOSED_EPILOGUE.factor()) as u64);
        self.prices.memory_bound(MemoryKind::Pointwise, bytes) * (1.0 / elements as f64)
    }

    /// Time of a separate kernel that adds a micro-batch's gradients to a buffer that stays; 0 if GEMMs do so in their epilogue, or
    /// if there is no such buffer.
    fn accumulation(&self, elements: Elements) -> Seconds {
        if self.of.lowering.has(Rewrite::FuseGradientAccumulation)
            || !self.of.lowering.has(Rewrite::AccumulateGradients)
        {
            return Seconds(0.0);
        }
        let (gradient, buffer) = self.gradient_bytes();
        let bytes = Bytes(elements.total() * (gradient + 2 * buffer));
        self.prices.memory_bound(MemoryKind::Pointwise, bytes)
    }

    /// Bytes per element of a gradient, and of the buffer in which gradients accumulate.
    fn gradient_bytes(&self) -> (u64, u64) {
        let gradient = self.precision().activation();
        (gradient.size(), self.of.key.accumulates.size())
    }

    /// Time of a kernel or message by itself.
    fn time(&self, kernel: &Kernel) -> Seconds {
        match kernel.kind {
            KernelKind::Comm(c) if c.axis == Axis::Ep || c.axis == Axis::Etp => {
                self.dispatch(kernel, c)
            }
            KernelKind::Memory { kind, bytes, .. } if self.orders_rows(kernel) => {
                let bytes = bytes + self.summed_by_others(kernel) + self.arrived_beside_own(kernel);
                self.prices.memory_bound(kind, bytes) + self.second_sort()
            }
            kind => self.kernel_time(kind, kernel.pass),
        }
    }

    /// Factor by which a product takes longer with several scales per operand than with one. With
    /// scales by row this is for forward only: backward products run as if the scale was 1.
    fn scaling(&self, dtype: DType, pass: Pass) -> f64 {
        match self.of.lowering.fp8_recipe {
            Fp8Recipe::Rowwise if dtype == DType::F8 && pass == Pass::Forward => {
                known::ROWWISE.factor()
            }
            Fp8Recipe::Blockwise if dtype == DType::F8 => known::BLOCKWISE.factor(),
            Fp8Recipe::Mxfp8 if dtype == DType::F8 => known::MICROSCALED.factor(),
            _ => 1.0,
        }
    }

    fn kernel_time(&self, kind: KernelKind, pass: Pass) -> Seconds {
        let prices = self.prices;
        let wide = self.precision().activation();
        let of_product = |low_precision| match low_precision {
            true => self.precision().matmul(),
            false => wide,
        };
        match kind {
            KernelKind::Gemm {
                sizes,
                low_precision,
            } => {
                let dtype = of_product(low_precision);
                prices.gemm(sizes, dtype, pass) * self.scaling(dtype, pass)
            }
            KernelKind::GroupedGemm {
                groups,
                sizes,
                low_precision,
            } => {
                let dtype = of_product(low_precision);
                let time = prices.grouped_gemm(groups, sizes, dtype, pass);
                let least = match self.of.lowering.has(Rewrite::PortableExperts) {
                    true => prices.portable_grouped(sizes),
                    false => Seconds(0.0),
                };
                time.max(least) * self.scaling(dtype, pass)
            }
            KernelKind::BatchedGemm { batch, sizes } => prices.batched_gemm(batch, sizes, wide),
            KernelKind::Attention(attention) => self.attention_time(attention),
            KernelKind::Scan(sizes) => prices.scan(&sizes, wide, pass != Pass::Forward),
            KernelKind::Memory { kind, bytes, .. } => prices.memory_bound(kind, bytes),
            KernelKind::Comm(collective) => self.collective_time(collective),
        }
    }

    /// Time of core attention on packed documents: the mean, over the tokens, of the time that attention would take if all
    /// documents were as long as the one that holds the token.
    fn attention_time(&self, attention: FusedAttention) -> Seconds {
        let Some(documents) = self.of.scenario.workload.documents_apart() else {
            return self.over(attention);
        };
        let time = |of: &OfLength| self.of_length(of.length, attention) * of.tokens;
        documents.by_length().iter().map(time).sum()
    }

    /// How much the time of one kernel varies from micro-batch to micro-batch. Only attention varies: a micro-batch with
    /// longer documents takes longer.
    ///
    /// A micro-batch of `n` tokens is filled with documents drawn at random. If all its documents had length `l`, the
    /// kernel would take `t(l)`; its mean time is `t`. A document of length `l` moves the time of its micro-batch by
    /// `l/n · (t(l) − t)`. The variance is therefore the mean, over tokens, of `l/n · (t(l) − t)²` (variance of a renewal
    /// reward process).
    fn spread(&self, kind: KernelKind) -> Spread {
        let workload = &self.of.scenario.workload;
        let (Some(documents), KernelKind::Attention(attention)) =
            (workload.documents_apart(), kind)
        else {
            return Spread::default();
        };
        let tokens = (attention.shape.batch * workload.seq_len) as f64;
        let mean = self.attention_time(attention);
        let (mut variance, mut longest) = (0.0, mean);
        for of in documents.by_length() {
            let time = self.of_length(of.length, attention);
            let apart = (time - mean).0;
            variance += of.tokens * (of.length as f64 / tokens) * apart * apart;
            longest = longest.max(time);
        }
        Spread {
            deviation: Seconds(variance.sqrt()),
            most: longest - mean,
        }
    }

    /// Time of core attention if all documents of the micro-batch had the same length. Context parallelism cuts each
    /// document into equal parts.
    fn of_length(&self, length: u64, attention: FusedAttention) -> Seconds {
        let shape = attention.shape;
        let seq_len = self.of.scenario.workload.seq_len;
        let cut = |tokens: u64| (tokens * length).div_ceil(seq_len).max(1);
        let documents = shape.batch as f64 * (seq_len as f64 / length as f64);
        let batch = (documents.round() as u64).max(1);
        let shape = AttentionShape {
            batch,
            q_len: cut(shape.q_len),
            kv_len: cut(shape.kv_len),
            ..shape
        };
        self.over(FusedAttention { shape, ..attention }) * (documents / batch as f64)
    }

    /// Time of core attention over whole sequences. Ring attention runs one kernel per block of keys that arrives, and a window
    /// leaves out a part of their work; other kinds run a single kernel.
    fn over(&self, attention: FusedAttention) -> Seconds {
        let FusedAttention {
            mut shape,
            kernel,
            backward,
        } = attention;
        let blocks = match self.of.key.layout.cp_kind {
            CpKind::Ring => self.of.key.layout.cp,
            CpKind::AllGather | CpKind::AllToAll => 1,
        };
        let mut kernels = blocks as f64;
        if blocks > 1 {
            kernels *= windows::share(&shape);
            shape.kv_len = (shape.kv_len / blocks).max(1);
            shape.window = None;
        }
        let dtype = self.precision().activation();
        self.prices.attention(&shape, kernel, dtype, backward) * kernels
    }

    pub(super) fn group(&self, axis: Axis) -> Group {
        match axis {
            Axis::Cp => self.of.key.groups.cp,
            Axis::Ep => self.of.key.groups.ep,
            Axis::Etp => self.of.key.groups.etp,
            Axis::Tp | Axis::Edp | Axis::DpShard | Axis::DpReplicate | Axis::Pp => {
                self.of.key.groups.tp
            }
        }
    }

    /// Name of a kernel or message in reports.
    fn name(&self, kernel: &Kernel) -> String {
        let op = self.of.trace.op(kernel.pass, kernel.op);
        let what = match kernel.kind {
            KernelKind::Gemm { .. } => "matmul",
            KernelKind::GroupedGemm { .. } => "grouped matmul",
            KernelKind::BatchedGemm { .. } => "batched matmul",
            KernelKind::Attention(_) => "fused attention",
            KernelKind::Scan(_) => "recurrence",
            KernelKind::Memory { .. } => "memory-bound",
            KernelKind::Comm(c) => match self.kind(kernel, c) {
                CollectiveKind::AllReduce => "all-reduce",
                CollectiveKind::AllGather => "all-gather",
                CollectiveKind::ReduceScatter => "reduce-scatter",
                CollectiveKind::AllToAll => "all-to-all",
                CollectiveKind::RingExchange => "ring exchange",
                CollectiveKind::SendRecv => "send/recv",
            },
        };
        let pass = match kernel.pass {
            Pass::Forward => "forward",
            Pass::BackwardInput => "backward",
            Pass::BackwardWeight => "weight gradient",
        };
        format!("{} {what} ({pass})", op.scope)
    }

    fn collective_time(&self, collective: Collective) -> Seconds {
        let group = self.group(collective.axis);
        let bytes = Bytes(collective.bytes);
        let time = self.prices.collective(collective.kind, bytes, group);
        time * steps(collective.kind, group) as f64
    }

    /// Time for which a kernel would occupy the network card if nothing else limited it; none if it is no message. A message to experts counts as none until a
    /// dispatcher is chosen, because the dispatcher decides its size.
    fn card(&self, kernel: &Kernel) -> Seconds {
        let KernelKind::Comm(collective) = kernel.kind else {
            return Seconds(0.0);
        };
        let Message { kind, bytes, group } = match collective.axis {
            Axis::Ep | Axis::Etp => match self.of.key.execution.dispatcher {
                Some(dispatcher) => self.message(dispatcher, kernel, collective),
                None => return Seconds(0.0),
            },
            axis => Message {
                kind: collective.kind,
                bytes: Bytes(collective.bytes),
                group: self.group(axis),
            },
        };
        self.prices.on_card(kind, bytes, group) * steps(kind, group) as f64
    }
}

/// Number of times that a message of the price of one is sent: a ring exchange is priced by the step.
fn steps(kind: CollectiveKind, group: Group) -> u64 {
    match kind {
        CollectiveKind::RingExchange => group.size - 1,
        _ => 1,
    }
}

fn is_product(kernel: &Kernel) -> bool {
    matches!(
        kernel.kind,
        KernelKind::Gemm { .. } | KernelKind::GroupedGemm { .. }
    )
}

pub(super) fn is_weight_gradient(kernel: &Kernel) -> bool {
    is_product(kernel) && kernel.pass == Pass::BackwardWeight
}

/// Elements of the weight gradient that a kernel writes; 0 for other kernels.
fn weight_elements(kernel: &Kernel) -> u64 {
    match kernel.kind {
        _ if !is_weight_gradient(kernel) => 0,
        KernelKind::Gemm {
            sizes: [m, n, _], ..
        } => m * n,
        KernelKind::GroupedGemm {
            groups,
            sizes: [m, n, _],
            ..
        } => groups * m * n,
        _ => 0,
    }
}
