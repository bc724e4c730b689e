//! Times of a block's passes by tables and models: every kernel, with what runs beside it taken out.

use catalog::runtime::{AttentionKernel, Rewrite};
use catalog::{Axis, Bytes, DType, Precision, Seconds};
use dtensor::{Collective, CollectiveKind, Pass, Trace};
use plans::{Group, NamedTime, Recompute};

use super::entry::BlockToPrice;
use crate::block_cost::BlockCost;
use crate::known;
use crate::lower::{Kernel, KernelKind, Lowered, recomputed};
use crate::price::{MemoryKind, TablePrices};
use crate::states::{self, Elements};
use crate::work::Work;

/// A block priced by tables.
pub(super) struct Timed<'a> {
    pub(super) of: &'a BlockToPrice<'a>,
    pub(super) prices: &'a TablePrices,
}

impl Timed<'_> {
    /// Adds the times of its passes to a block's cost.
    pub(super) fn time(&self, cost: &mut BlockCost) {
        let BlockToPrice { trace, lowered, .. } = *self.of;
        let forward = self.pass_times(&lowered.forward);
        let backward = self.pass_times(&lowered.backward);
        for (kernel, work) in lowered.forward.iter().zip(&forward) {
            cost.forward += *work;
            let name = name(trace, kernel);
            cost.kernels.push(NamedTime {
                name,
                seconds: work.device().0,
            });
        }
        for (kernel, work) in lowered.backward.iter().zip(&backward) {
            match kernel.pass {
                Pass::BackwardWeight => cost.backward_weight += *work,
                Pass::Forward | Pass::BackwardInput => cost.backward_input += *work,
            }
            let name = name(trace, kernel);
            cost.kernels.push(NamedTime {
                name,
                seconds: work.device().0,
            });
        }
        for index in recomputed(&self.of.lowering, trace, lowered, self.of.key.recompute) {
            cost.recompute += forward[index];
            let name = format!("{} (recomputed)", name(trace, &lowered.forward[index]));
            cost.kernels.push(NamedTime {
                name,
                seconds: forward[index].device().0,
            });
        }
        if self.regathers() {
            cost.backward_input += self.regather(trace);
        }
        let accumulation = self.accumulation(lowered, cost.elements);
        if accumulation.0 > 0.0 {
            cost.backward_weight.compute += accumulation;
            cost.kernels.push(NamedTime {
                name: "gradient accumulation memory-bound (weight gradient)".to_owned(),
                seconds: accumulation.0,
            });
        }
    }

    fn precision(&self) -> Precision {
        self.of.scenario.workload.precision
    }

    /// Adding weight gradients to the buffer that gathers them over micro-batches: read and written
    /// in the product's epilogue where the runtime fuses it, by a pass over gradient and buffer where
    /// it does not.
    fn accumulation(&self, lowered: &Lowered, elements: Elements) -> Seconds {
        let precision = self.precision();
        let gradient = precision.activation().size();
        let buffer = states::gradient_type(&self.of.scenario.runtime.states, precision).size();
        let bytes = if self.of.lowering.has(Rewrite::FuseGradientAccumulation) {
            let written: u64 = lowered.backward.iter().map(weight_elements).sum();
            let beside = written * (2 * buffer).saturating_sub(gradient);
            Bytes((beside as f64 * self.prices.exposed_epilogue()) as u64)
        } else if self.of.lowering.has(Rewrite::AccumulateGradients) {
            Bytes((elements.dense + elements.expert) * (gradient + 2 * buffer))
        } else {
            Bytes(0)
        };
        self.prices.memory_bound(MemoryKind::Pointwise, bytes).time
    }

    /// Work of each kernel of a pass, with hidden communication taken out.
    fn pass_times(&self, kernels: &[Kernel]) -> Vec<Work> {
        let raw: Vec<Seconds> = kernels.iter().map(|k| self.kernel_time(k)).collect();
        let mut works = Vec::with_capacity(kernels.len());
        for (index, kernel) in kernels.iter().enumerate() {
            let time = raw[index];
            let host = self.host(kernel);
            let mut work = Work {
                host,
                ..Work::default()
            };
            match kernel.kind {
                KernelKind::Comm(collective) => {
                    let exposed = self.exposed(collective, kernels, &raw, index);
                    *self.bucket(&mut work, collective.axis) = exposed;
                }
                _ => work.compute = time,
            }
            works.push(work);
        }
        works
    }

    fn bucket<'w>(&self, work: &'w mut Work, axis: Axis) -> &'w mut Seconds {
        match axis {
            Axis::Tp | Axis::Etp => &mut work.tp,
            Axis::Cp => &mut work.cp,
            Axis::Ep => &mut work.ep,
            Axis::Edp | Axis::DpShard | Axis::DpReplicate | Axis::Pp => &mut work.compute,
        }
    }

    fn host(&self, kernel: &Kernel) -> Seconds {
        if self.of.lowering.has(Rewrite::CudaGraph) {
            return Seconds(0.0);
        }
        let launches = match kernel.kind {
            KernelKind::Memory { launches, .. } => launches,
            _ => 1,
        };
        self.of.scenario.runtime.overheads.launch.value * f64::from(launches)
    }

    fn kernel_time(&self, kernel: &Kernel) -> Seconds {
        let prices = self.prices;
        let wide = self.precision().activation();
        let narrow = self.precision().matmul();
        match kernel.kind {
            KernelKind::Gemm {
                m,
                n,
                k,
                layout,
                low_precision,
            } => {
                let dtype = if low_precision { narrow } else { wide };
                let slower = if dtype == DType::F8 && self.of.lowering.has(Rewrite::RowwiseScaling)
                {
                    known::ROWWISE.factor()
                } else {
                    1.0
                };
                prices.gemm(m, n, k, dtype, layout).time * slower
            }
            KernelKind::GroupedGemm {
                groups,
                m,
                n,
                k,
                layout,
                low_precision,
            } => {
                let dtype = if low_precision { narrow } else { wide };
                prices.grouped_gemm(groups, m, n, k, dtype, layout).time
            }
            KernelKind::BatchedGemm { batch, m, n, k } => {
                prices.batched_gemm(batch, m, n, k, wide).time
            }
            KernelKind::Attention {
                shape,
                kernel,
                backward,
            } => self.attention_time(shape, kernel, backward),
            KernelKind::Memory { kind, bytes, .. } => prices.memory_bound(kind, bytes).time,
            KernelKind::Comm(collective) => self.collective_time(collective),
        }
    }

    /// Ring attention runs one kernel per block of keys that arrives; the others run one in all.
    fn attention_time(
        &self,
        shape: dtensor::AttentionShape,
        kernel: AttentionKernel,
        backward: bool,
    ) -> Seconds {
        let dtype = self.precision().activation();
        let cp = self.of.key.layout.cp;
        if cp == 1 || self.of.key.layout.cp_kind != catalog::CpKind::Ring {
            return self.prices.attention(&shape, kernel, dtype, backward).time;
        }
        let block = dtensor::AttentionShape {
            kv_len: shape.kv_len / cp,
            ..shape
        };
        self.prices.attention(&block, kernel, dtype, backward).time * cp as f64
    }

    fn group(&self, axis: Axis) -> Group {
        match axis {
            Axis::Cp => self.of.key.groups.cp,
            Axis::Ep => self.of.key.groups.ep,
            Axis::Etp => self.of.key.groups.etp,
            Axis::Tp | Axis::Edp | Axis::DpShard | Axis::DpReplicate | Axis::Pp => {
                self.of.key.groups.tp
            }
        }
    }

    fn collective_time(&self, collective: Collective) -> Seconds {
        let group = self.group(collective.axis);
        let bytes = Bytes(collective.bytes);
        match collective.kind {
            // One step of the ring; there are `size − 1`.
            CollectiveKind::RingExchange => {
                self.prices.point_to_point(bytes, group).time * (group.size - 1) as f64
            }
            kind => self.prices.collective(kind, bytes, group).time,
        }
    }

    /// What is left of a collective beside the kernel that can hide it.
    fn exposed(
        &self,
        collective: Collective,
        kernels: &[Kernel],
        raw: &[Seconds],
        index: usize,
    ) -> Seconds {
        let time = raw[index];
        match (collective.axis, collective.kind) {
            (Axis::Cp, CollectiveKind::RingExchange) => {
                // The first of `cp` attention steps has its block already; the others hide a
                // transfer each.
                let cp = self.of.key.layout.cp as f64;
                let attention = nearest(kernels, raw, index, is_attention);
                let hidden = attention * ((cp - 1.0) / cp);
                Seconds((time - hidden).0.max(0.0))
            }
            (Axis::Tp, kind) => self.exposed_tp(kind, kernels, raw, index),
            _ => time,
        }
    }

    /// Tensor-parallel collectives: Transformer Engine's user buffers and PyTorch's async TP split
    /// them into `tp` chunks behind the product they feed or follow, so one chunk stays exposed;
    /// Megatron runs the backward ones beside the other product of the same linear.
    fn exposed_tp(
        &self,
        kind: CollectiveKind,
        kernels: &[Kernel],
        raw: &[Seconds],
        index: usize,
    ) -> Seconds {
        let time = raw[index];
        let slowdown = self.of.scenario.runtime.overheads.overlap_slowdown.value;
        let chunks = self.of.key.layout.tp as f64;
        let backward = kernels[index].pass != Pass::Forward;
        let product = nearest(kernels, raw, index, is_product);
        let decomposed = self.of.key.overlap_tp
            && matches!(
                kind,
                CollectiveKind::AllGather | CollectiveKind::ReduceScatter
            );
        let hidden = if decomposed {
            time.min(product) * (1.0 - 1.0 / chunks)
        } else if backward && self.of.lowering.has(Rewrite::AsyncTensorParallelBackward) {
            let beside = following(kernels, raw, index, is_weight_gradient);
            time.min(beside)
        } else {
            Seconds(0.0)
        };
        time - hidden + hidden * (slowdown - 1.0)
    }

    fn regathers(&self) -> bool {
        self.of.key.layout.sequence_parallel
            && self.of.key.layout.tp > 1
            && self.of.lowering.has(Rewrite::RegatherSequenceParallelInput)
            && !matches!(
                self.of.key.recompute,
                Recompute::Full | Recompute::Layers(_)
            )
    }

    /// The sharded inputs of column-parallel linears are gathered again in backward, beside the
    /// data-gradient product (Korthikanti et al. 2022, §4.2.2).
    fn regather(&self, trace: &Trace) -> Work {
        let mut work = Work::default();
        for op in &trace.forward {
            let dtensor::OpKind::Collective(c) = op.kind else {
                continue;
            };
            if c.axis == Axis::Tp && c.kind == CollectiveKind::AllGather {
                let time = self.collective_time(c);
                let beside = trace
                    .backward
                    .iter()
                    .filter(|b| b.scope == op.scope && b.pass == Pass::BackwardInput)
                    .count();
                // Without a product of its scope the gather has nothing to hide behind; with one,
                // the product is longer than the gather on every NVLink system.
                let exposed = if beside > 0 || self.of.key.overlap_tp {
                    known::REGATHER.factor()
                } else {
                    0.0
                };
                work.tp += time * exposed;
                work.host += self.of.scenario.runtime.overheads.launch.value;
            }
        }
        work
    }
}

fn is_product(kernel: &Kernel) -> bool {
    matches!(
        kernel.kind,
        KernelKind::Gemm { .. } | KernelKind::GroupedGemm { .. }
    )
}

fn is_weight_gradient(kernel: &Kernel) -> bool {
    is_product(kernel) && kernel.pass == Pass::BackwardWeight
}

/// Elements of the weight gradient that a kernel writes.
fn weight_elements(kernel: &Kernel) -> u64 {
    match kernel.kind {
        KernelKind::Gemm { m, n, .. } if is_weight_gradient(kernel) => m * n,
        KernelKind::GroupedGemm { groups, m, n, .. } if is_weight_gradient(kernel) => {
            groups * m * n
        }
        _ => 0,
    }
}

fn is_attention(kernel: &Kernel) -> bool {
    matches!(
        kernel.kind,
        KernelKind::Attention { .. } | KernelKind::BatchedGemm { .. }
    )
}

/// Time of the closest kernel that satisfies `want`, looking both ways.
fn nearest(
    kernels: &[Kernel],
    raw: &[Seconds],
    index: usize,
    want: fn(&Kernel) -> bool,
) -> Seconds {
    let distance = |i: &usize| i.abs_diff(index);
    (0..kernels.len())
        .filter(|&i| want(&kernels[i]))
        .min_by_key(distance)
        .map_or(Seconds(0.0), |i| raw[i])
}

/// Time of the next kernel that satisfies `want`, at most three further on.
fn following(
    kernels: &[Kernel],
    raw: &[Seconds],
    index: usize,
    want: fn(&Kernel) -> bool,
) -> Seconds {
    (index + 1..kernels.len().min(index + 4))
        .find(|&i| want(&kernels[i]))
        .map_or(Seconds(0.0), |i| raw[i])
}

fn name(trace: &Trace, kernel: &Kernel) -> String {
    let op = match kernel.pass {
        Pass::Forward => &trace.forward[kernel.op],
        Pass::BackwardInput | Pass::BackwardWeight => &trace.backward[kernel.op],
    };
    let what = match kernel.kind {
        KernelKind::Gemm { .. } => "matmul",
        KernelKind::GroupedGemm { .. } => "grouped matmul",
        KernelKind::BatchedGemm { .. } => "batched matmul",
        KernelKind::Attention { .. } => "fused attention",
        KernelKind::Memory { .. } => "memory-bound",
        KernelKind::Comm(c) => match c.kind {
            CollectiveKind::AllReduce => "all-reduce",
            CollectiveKind::AllGather => "all-gather",
            CollectiveKind::ReduceScatter => "reduce-scatter",
            CollectiveKind::AllToAll => "all-to-all",
            CollectiveKind::RingExchange => "ring exchange",
            CollectiveKind::Broadcast => "broadcast",
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
