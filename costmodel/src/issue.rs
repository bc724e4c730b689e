//! The order in which a training system issues a block's kernels and messages, and the streams they run on.
//!
//! A message waits for the kernels issued before it, and the next kernel waits for the message. Five kinds overlap:
//!
//! - Backward sums of column-parallel linears. Megatron-LM sends them between the linear's data-gradient and
//!   weight-gradient products and waits after the second (`LinearWithGradAccumulationAndAsyncCommunication`); so does
//!   Transformer Engine, also with user buffers ("bulk" overlap).
//! - Repeated gathers of sequence-parallel inputs, in the same code: sent before the data-gradient product, waited for
//!   before the weight-gradient product (Korthikanti et al. 2022, §4.2.2).
//! - Gathers before and sums after a product of a layer, where both are split into a part per tensor-parallel rank
//!   (PyTorch's async tensor parallelism, the "ring exchange" of Transformer Engine's user buffers): the product of one
//!   part runs beside the message of another. A rank's own part needs no message. Transformer Engine splits sums after
//!   a product in four instead, each of which is sent whole ("pipeline"; methods and splits by default, which NeMo's
//!   configurations repeat, in `initialize_ub`, transformer_engine/pytorch/module/base.py;
//!   NVIDIA/NeMo-Framework-Launcher@1ab2c78, conf/training/tp_overlap).
//! - Ring attention: every step attends to one block of keys and values while the next one arrives (Transformer
//!   Engine's `AttnFuncWithCPAndKVP2P`). PyTorch gathers all blocks at once while it attends to the rank's own (`_AllGatherRotater`), and
//!   sends the gradients of one block while it attends to the next (`_templated_ring_attention_backward`).
//! - Messages to experts and back, if they are told to overlap with the layers of another micro-batch: in the steady state, where
//!   forwards and backwards alternate, the messages of the other micro-batch take as long as the pass's own. Megatron-Core calls a
//!   dispatcher's dispatch and combine on a stream of their own (NVIDIA/Megatron-LM@d0b3b77, `model_chunk_schedule_plan.py`,
//!   `_build_callable_nodes`). HybridEP orders rows inside these calls (`fused_a2a.py`, `dispatch_with_permute`,
//!   `combine_with_unpermute`), so its ordering kernels run beside the other micro-batch too. Those of other dispatchers belong to
//!   the experts and run on the compute stream (`token_dispatcher.py`, `get_permuted_hidden_states_by_experts`).

mod regathers;
mod rings;

use std::ops::Range;

use catalog::runtime::Rewrite;
use catalog::{Axis, Dispatcher, Fp8Recipe};
use dtensor::{Collective, CollectiveKind, Pass, TensorId, Trace};

use crate::block_cost::BlockKey;
use crate::launches::{Launch, Queue};
use crate::lower::rearranged::{self, Around};
use crate::lower::{Kernel, KernelKind, Lowered, Lowering};
use crate::price::MemoryKind;
use crate::streams::Stream;

/// Number of parts into which Transformer Engine splits a product whose result is reduced ("pipeline" overlap).
const PIPELINE_SPLITS: u64 = 4;

/// Decides how a block's kernels are issued. Kernel indices count forward first, then backward.
#[derive(Debug)]
pub(crate) struct Order<'a> {
    lowering: Lowering<'a>,
    key: &'a BlockKey,
    trace: &'a Trace,
    lowered: &'a Lowered,
    regathers: Vec<Regather>,
}

/// A forward gather that is repeated in backward because its result was not kept.
#[derive(Clone, Copy, Debug)]
struct Regather {
    message: usize,
    /// Index of the kernel before which the gather is issued.
    before: usize,
    /// Index of the kernel that waits for the gather.
    until: usize,
}

/// A reduction of a product's result that overlaps with other kernels.
#[derive(Clone, Copy, Debug)]
struct Sum {
    message: usize,
    product: usize,
    /// Number of parts that the product is split into; 1 if it is not.
    parts: u64,
    /// Number of parts that are sent, each as soon as it is computed; one less than `parts` if the last part is the
    /// rank's own.
    messages: u64,
}

/// A gather that is split into parts, and the products that read its result.
#[derive(Clone, Debug)]
struct Gather {
    message: usize,
    products: Vec<usize>,
}

/// The messages in a list of kernels that overlap with compute, by kind.
#[derive(Debug, Default)]
struct Beside {
    sums: Vec<Sum>,
    gathers: Vec<Gather>,
    rings: Vec<Ring>,
}

/// The messages of ring attention in a pass.
#[derive(Clone, Debug)]
struct Ring {
    /// The all-gather of all ranks' keys and values; `None` if ranks pass keys and values on to one another instead.
    gather: Option<usize>,
    /// The message that each rank passes on to the next: keys and values, their gradients, or both. `None` if nothing is passed on, as in
    /// the forward pass when keys and values are gathered.
    exchange: Option<usize>,
    /// The kernels of core attention, which every step runs.
    steps: Range<usize>,
}

impl<'a> Order<'a> {
    /// The order for a block under a layout.
    pub(crate) fn new(
        lowering: Lowering<'a>,
        key: &'a BlockKey,
        trace: &'a Trace,
        lowered: &'a Lowered,
    ) -> Self {
        let mut order = Self {
            lowering,
            key,
            trace,
            lowered,
            regathers: Vec::new(),
        };
        order.regathers = order.regathers();
        order
    }

    /// Issues the block's kernels at the given indices, in that order, without kernels around messages that are not needed.
    pub(crate) fn issue(&self, kernels: &[usize]) -> Vec<Launch> {
        if !self.lowering.has(Rewrite::RearrangeSequences) && !self.lowering.splits_messages() {
            return self.issue_all(kernels);
        }
        let needed = |&&kernel: &&usize| !self.is_left_out(kernel);
        let kernels: Vec<usize> = kernels.iter().filter(needed).copied().collect();
        self.issue_all(&kernels)
    }

    /// Issues forward kernels again, for recomputation. If gathers are split, the copy of the
    /// gathered tensor is left out: only the weight's gradient reads it, and the first forward pass
    /// has made it already.
    pub(crate) fn issue_again(&self, kernels: &[usize]) -> Vec<Launch> {
        if !self.splits_gathers() {
            return self.issue(kernels);
        }
        let copy = Some(Around::Copy(CollectiveKind::AllGather));
        let needed = |&&kernel: &&usize| self.around(kernel) != copy;
        let kernels: Vec<usize> = kernels.iter().filter(needed).copied().collect();
        self.issue(&kernels)
    }

    fn issue_all(&self, kernels: &[usize]) -> Vec<Launch> {
        let beside = self.beside(kernels);
        let mut queue = Queue::with_room(kernels.len());
        let mut sent: Vec<(usize, usize)> = Vec::new();
        let mut skipped: Vec<usize> = Vec::new();
        for &kernel in kernels {
            for again in &self.regathers {
                if again.until == again.before && again.until == kernel {
                    queue.exchange(again.message, Axis::Cp);
                } else if again.before == kernel {
                    sent.push((again.message, queue.send(again.message, 1, Stream::Tensor)));
                } else if again.until == kernel {
                    wait_for(again.message, &sent, &mut queue);
                }
            }
            if skipped.contains(&kernel) {
                continue;
            }
            if let Some(ring) = beside.ring(kernel) {
                let steps = ring.steps.clone();
                let steps: Vec<usize> = steps.filter(|step| kernels.contains(step)).collect();
                self.issue_ring(ring, &steps, &mut queue);
                skipped.extend(ring.gather.iter().chain(&ring.exchange));
                skipped.extend(steps);
            } else if let Some(gather) = beside.gathers.iter().find(|g| g.message == kernel) {
                self.gather(gather, &mut queue);
                skipped.extend(&gather.products);
            } else if beside.sums.iter().any(|sum| sum.message == kernel) {
                wait_for(kernel, &sent, &mut queue);
            } else if let Some(sum) = beside.sums.iter().find(|sum| sum.product == kernel) {
                let last = Self::sum(*sum, &mut queue);
                sent.extend(last.map(|launch| (sum.message, launch)));
            } else if self.runs_beside_others(kernel) {
                queue.beside_others(kernel, Axis::Ep);
            } else if let Some(collective) = self.message(kernel) {
                queue.exchange(kernel, collective.axis);
            } else {
                queue.compute(kernel, 1);
            }
        }
        queue.launches()
    }

    /// Whether a kernel or message runs while the compute stream works on layers of another micro-batch. Bounds have no dispatcher:
    /// they hold for HybridEP too.
    fn runs_beside_others(&self, kernel: usize) -> bool {
        let execution = self.key.execution;
        let orders_inside = matches!(execution.dispatcher, None | Some(Dispatcher::HybridEp));
        execution.beside_others
            && match self.kernel(kernel).kind {
                KernelKind::Comm(collective) => collective.axis == Axis::Ep,
                KernelKind::Memory { kind, .. } => orders_inside && kind == MemoryKind::Permute,
                _ => false,
            }
    }

    /// Whether gathers are split so that they run beside the products that read them. PyTorch's asynchronous tensor parallelism
    /// does not split a gather whose result is then scaled by row (pytorch/pytorch issue 149990).
    fn splits_gathers(&self) -> bool {
        let scaled_after = self.trace.eight_bits && self.lowering.fp8_recipe == Fp8Recipe::Rowwise;
        self.key.execution.overlap_tp && !scaled_after
    }

    /// Whether a kernel around a message is left out.
    ///
    /// - The copy of the rank's own part and the sum run only if the message is split.
    /// - The copy before a scatter runs only if the scatter is not split: a split product writes each rank's part in place.
    /// - The copy after a gather runs even if the gather is split. The split product does not need it, but the product that computes the
    ///   weight's gradient does. Only a split gather of 8-bit numbers has no such copy: the cast by columns puts the tensor in order.
    fn is_left_out(&self, kernel: usize) -> bool {
        let narrow = self.trace.eight_bits && self.lowering.gathers_quantised();
        match self.around(kernel) {
            None => false,
            Some(Around::Copy(CollectiveKind::AllGather)) => self.splits_gathers() && narrow,
            Some(Around::Copy(_)) => self.key.execution.overlap_tp,
            Some(Around::OwnPart) => !self.splits_gathers(),
            Some(Around::Sum) => !self.key.execution.overlap_tp,
        }
    }

    /// What a kernel does around a message; `None` if it belongs to no message.
    fn around(&self, kernel: usize) -> Option<Around> {
        let of = rearranged::serves(self.trace, self.kernel(kernel))?;
        let is_its_message = |other: usize| {
            let place = |kernel: &Kernel| (kernel.pass, kernel.op);
            self.message(other).is_some() && place(self.kernel(other)) == place(self.kernel(kernel))
        };
        let after = kernel.checked_sub(1).is_some_and(is_its_message);
        Some(match (of.kind, after) {
            (CollectiveKind::AllGather, false) => Around::OwnPart,
            (CollectiveKind::ReduceScatter, true) => Around::Sum,
            (kind, _) => Around::Copy(kind),
        })
    }

    /// Issues a product and the reduction of its result, which overlaps with the product's own
    /// parts or with what follows. Returns the launch of the last message.
    fn sum(sum: Sum, queue: &mut Queue) -> Option<usize> {
        let mut last = None;
        for part in 0..sum.parts {
            queue.compute(sum.product, sum.parts);
            if part < sum.messages {
                last = Some(queue.send(sum.message, sum.messages, Stream::Tensor));
            }
        }
        last
    }

    /// Issues the products of a split gather, part by part as it arrives. The first part is the rank's own.
    fn gather(&self, gather: &Gather, queue: &mut Queue) {
        let parts = self.key.layout.tp;
        let others = parts - 1;
        let arrivals: Vec<usize> = (0..others)
            .map(|_| queue.send(gather.message, others, Stream::Tensor))
            .collect();
        for part in 0..parts as usize {
            if part > 0 {
                queue.wait(arrivals[part - 1]);
            }
            for &product in &gather.products {
                queue.compute(product, parts);
            }
        }
    }

    /// Finds the messages among these kernels that overlap with compute.
    fn beside(&self, kernels: &[usize]) -> Beside {
        let mut beside = Beside::default();
        for (place, &message) in kernels.iter().enumerate() {
            let Some(collective) = self.message(message) else {
                continue;
            };
            let (earlier, later) = (&kernels[..place], &kernels[place + 1..]);
            if self.is_of_ring(collective) {
                if !self.lowering.waits_for_ring()
                    && let Some(steps) = self.attention(message)
                {
                    beside.add_to_ring(message, collective.kind, steps);
                }
            } else if collective.axis == Axis::Tp {
                if let Some(gather) = self.split_gather(message, collective, later) {
                    beside.gathers.push(gather);
                } else if let Some(sum) = self.sum_of(message, collective, earlier)
                    && !beside
                        .gathers
                        .iter()
                        .any(|g| g.products.contains(&sum.product))
                {
                    beside.sums.push(sum);
                }
            }
        }
        beside
    }

    /// The all-gather of a message, with the matrix products that read its result. `None` if gathers are
    /// not split, or if there are no such products.
    fn split_gather(
        &self,
        message: usize,
        collective: Collective,
        later: &[usize],
    ) -> Option<Gather> {
        if !self.splits_gathers() || collective.kind != CollectiveKind::AllGather {
            return None;
        }
        let gathered = self.kernel(message).writes[0];
        let reads = |&&kernel: &&usize| {
            let kernel = self.kernel(kernel);
            self.is_product(kernel)
                && kernel.pass != Pass::BackwardWeight
                && self.among(&kernel.reads, gathered)
        };
        let products: Vec<usize> = later.iter().filter(reads).copied().collect();
        (!products.is_empty()).then_some(Gather { message, products })
    }

    /// The matrix product whose partial sums this message adds up, if the two overlap.
    fn sum_of(&self, message: usize, collective: Collective, earlier: &[usize]) -> Option<Sum> {
        let forward = self.kernel(message).pass == Pass::Forward;
        let megatron = self.lowering.has(Rewrite::AsyncTensorParallelBackward);
        let splits =
            self.key.execution.overlap_tp && collective.kind == CollectiveKind::ReduceScatter;
        let tp = self.key.layout.tp;
        let (parts, messages) = match (megatron, forward) {
            (true, false) if collective.kind != CollectiveKind::AllGather => (1, 1),
            (true, true) if splits => (PIPELINE_SPLITS, PIPELINE_SPLITS),
            (false, _) if splits => (tp, tp - 1),
            _ => return None,
        };
        let summed = self.kernel(message).reads[0];
        let makes = |&&kernel: &&usize| {
            let kernel = self.kernel(kernel);
            self.is_product(kernel) && self.among(&kernel.writes, summed)
        };
        let product = *earlier.iter().rfind(makes)?;
        Some(Sum {
            message,
            product,
            parts,
            messages,
        })
    }

    fn kernel(&self, index: usize) -> &'a Kernel {
        let Lowered { forward, backward } = self.lowered;
        match index.checked_sub(forward.len()) {
            None => &forward[index],
            Some(index) => &backward[index],
        }
    }

    fn message(&self, kernel: usize) -> Option<Collective> {
        match self.kernel(kernel).kind {
            KernelKind::Comm(collective) => Some(collective),
            _ => None,
        }
    }

    /// Whether a kernel is a product that messages may run beside; an adapter's is too short.
    fn is_product(&self, kernel: &Kernel) -> bool {
        use KernelKind::{Gemm, GroupedGemm};
        let product = matches!(kernel.kind, Gemm { .. } | GroupedGemm { .. });
        product && !self.trace.op(kernel.pass, kernel.op).is_of_adapter()
    }

    fn is_attention(&self, kernel: usize) -> bool {
        let kernel = self.kernel(kernel);
        self.trace.op(kernel.pass, kernel.op).is_core_attention()
    }

    /// Whether one of the tensors shares its storage with `tensor`.
    fn among(&self, tensors: &[TensorId], tensor: TensorId) -> bool {
        let storage = |id| self.trace.tensor(id).storage;
        tensors.iter().any(|&id| storage(id) == storage(tensor))
    }
}

/// Makes the next kernel wait for a message that was issued before.
fn wait_for(message: usize, sent: &[(usize, usize)], queue: &mut Queue) {
    if let Some(&(_, launch)) = sent.iter().rfind(|(kernel, _)| *kernel == message) {
        queue.wait(launch);
    }
}

#[cfg(test)]
mod tests {
    use catalog::DType;
    use models::BlockLayout;
    use plans::{Group, Recompute};

    use models::BlockClass;

    use super::*;
    use crate::block_cost::BlockGroups;
    use crate::execution::Execution;

    fn sign(stream: Stream) -> String {
        match stream {
            Stream::Compute => String::new(),
            _ => "+".to_owned(),
        }
    }

    /// What a runtime issues in a pass of a GPT-2 layer. Products and attention have the end of
    /// their names; kernels around messages are `copy`, `own` and `sum`; `+` is a send, `-` a wait.
    fn issued(runtime: &str, [tp, cp]: [u64; 2], overlap_tp: bool, backward: bool) -> String {
        let model = catalog::load::model("gpt2").expect("a preset");
        let runtime = catalog::load::runtime(runtime).expect("a preset");
        let layout = BlockLayout {
            tp,
            cp,
            sequence_parallel: tp > 1,
            ..BlockLayout::alone(1, 64, DType::Bf16)
        };
        let class = BlockClass::Layer(model.layer_class(0));
        let trace = models::trace_block(&model, class, &layout).expect("a block");
        let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
        let lowered = lowering.lower(&trace);
        let [tp, cp, ep, etp] = [Group { size: 1, stride: 1 }; 4];
        let key = BlockKey {
            class,
            layout,
            recompute: Recompute::None,
            execution: Execution {
                overlap_tp,
                ..Execution::own(&runtime)
            },
            accumulates: DType::F32,
            groups: BlockGroups { tp, cp, ep, etp },
        };
        let order = Order::new(lowering, &key, &trace, &lowered);
        let forward = lowered.forward.len();
        let kernels: Vec<usize> = match backward {
            false => (0..forward).collect(),
            true => (forward..forward + lowered.backward.len()).collect(),
        };
        let launches = order.issue(&kernels);
        let name = |launch: &Launch| {
            let kernel = order.kernel(launch.kernel);
            let op = trace.op(kernel.pass, kernel.op);
            let scope = op.scope.rsplit('.').next().unwrap_or_default();
            match (kernel.kind, kernel.pass) {
                (KernelKind::Comm(c), _) => Some(format!("{:?}", c.kind)),
                (KernelKind::Memory { .. }, _) => Some(match order.around(launch.kernel)? {
                    Around::Copy(_) => "copy".to_owned(),
                    Around::OwnPart => "own".to_owned(),
                    Around::Sum => "sum".to_owned(),
                }),
                (_, Pass::BackwardWeight) => Some(format!("{scope}'")),
                _ => Some(scope.to_owned()),
            }
        };
        let mut shown = Vec::new();
        for launch in &launches {
            for (_, awaited) in launch.waits.tasks() {
                if launches[awaited].stream != Stream::Compute {
                    shown.extend(name(&launches[awaited]).map(|name| format!("-{name}")));
                }
            }
            shown.extend(name(launch).map(|name| sign(launch.stream) + &name));
        }
        shown.join(" ")
    }

    #[test]
    fn megatron_sends_backward_sums_and_gathers_beside_products() {
        // The input of a column-parallel linear is gathered again beside its data-gradient product, and the sum of
        // that product's results is sent beside the weight-gradient product.
        assert_eq!(
            issued("megatron-core", [2, 1], false, true),
            "+AllGather -AllGather c_proj c_proj' +AllGather c_fc +ReduceScatter -AllGather c_fc' -ReduceScatter \
             +AllGather -AllGather c_proj c_proj' core_attention \
             +AllGather c_attn +ReduceScatter -AllGather c_attn' -ReduceScatter"
        );
        // Other systems wait for every message. torchtitan copies what it gathers and what it scatters.
        assert_eq!(
            issued("torchtitan", [2, 1], false, true),
            "+AllGather -AllGather copy c_proj c_proj' c_fc c_fc' copy +ReduceScatter -ReduceScatter \
             +AllGather -AllGather copy c_proj c_proj' core_attention \
             c_attn c_attn' copy +ReduceScatter -ReduceScatter"
        );
    }

    #[test]
    fn split_products_run_beside_the_next_part() {
        let sum = "c_proj +ReduceScatter";
        let four = [sum; 4].join(" ");
        assert_eq!(
            issued("nemo", [2, 1], true, false),
            format!(
                "+AllGather c_attn -AllGather c_attn core_attention {four} -ReduceScatter \
                 +AllGather c_fc -AllGather c_fc {four} -ReduceScatter"
            )
        );
        assert_eq!(
            issued("nemo", [2, 1], true, true),
            "+AllGather c_proj -AllGather c_proj c_proj' +AllGather c_fc +ReduceScatter -AllGather c_fc' -ReduceScatter \
             +AllGather c_proj -AllGather c_proj c_proj' core_attention \
             +AllGather c_attn +ReduceScatter -AllGather c_attn' -ReduceScatter"
        );
        // The rank's own part of a sum is computed last and not sent. Gathered tensors are copied
        // only for the weight's gradient.
        assert_eq!(
            issued("torchtitan", [2, 1], true, true),
            "+AllGather c_proj -AllGather c_proj copy c_proj' c_fc +ReduceScatter c_fc c_fc' -ReduceScatter \
             +AllGather c_proj -AllGather c_proj copy c_proj' core_attention \
             c_attn +ReduceScatter c_attn c_attn' -ReduceScatter"
        );
    }

    #[test]
    fn split_messages_begin_with_a_copy_of_the_own_part_and_end_with_a_sum() {
        let forward = |overlap_tp| issued("torchtitan-compile", [2, 1], overlap_tp, false);
        assert_eq!(
            forward(true),
            "own +AllGather c_attn -AllGather c_attn copy core_attention c_proj +ReduceScatter c_proj -ReduceScatter sum \
             own +AllGather c_fc -AllGather c_fc copy c_proj +ReduceScatter c_proj -ReduceScatter sum"
        );
        assert_eq!(
            forward(false),
            "+AllGather -AllGather copy c_attn core_attention c_proj copy +ReduceScatter -ReduceScatter \
             +AllGather -AllGather copy c_fc c_proj copy +ReduceScatter -ReduceScatter"
        );
        // Transformer Engine adds up partial sums while it sends them.
        assert!(!issued("nemo", [2, 1], true, false).contains("sum"));
    }

    #[test]
    fn attention_runs_while_the_next_keys_arrive() {
        let ring = "+RingExchange core_attention -RingExchange +RingExchange -RingExchange core_attention \
                    -RingExchange core_attention";
        assert_eq!(
            issued("megatron-core", [1, 3], false, false),
            format!("c_attn {ring} c_proj c_fc c_proj")
        );
        assert_eq!(
            issued("megatron-core", [1, 3], false, true),
            format!("c_proj c_proj' c_fc c_fc' c_proj c_proj' {ring} c_attn c_attn'")
        );
    }

    #[test]
    fn pytorch_gathers_keys_beside_the_first_step_and_passes_their_gradients_on() {
        // The second of three steps stands for the third too.
        let forward = "+AllGather core_attention -AllGather core_attention core_attention";
        assert_eq!(
            issued("torchtitan", [1, 3], false, false),
            format!("c_attn {forward} c_proj c_fc c_proj")
        );
        // Messages leave in order: each waits for the one before it.
        let backward = "+AllGather core_attention -AllGather +RingExchange -AllGather core_attention -RingExchange \
                        +RingExchange -RingExchange core_attention -RingExchange +RingExchange -RingExchange";
        assert_eq!(
            issued("torchtitan", [1, 3], false, true),
            format!("c_proj c_proj' c_fc c_fc' c_proj c_proj' {backward} c_attn c_attn'")
        );
    }
}
