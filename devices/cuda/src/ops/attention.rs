//! Fused core attention.

use catalog::DType;

use super::grid::unsupported;
use crate::error::CudaError;
use crate::kernels::{Head, Kernel, Source, typed};
use crate::launcher::{Arguments, AttentionArgument, AttentionBy, AttentionOperands, Located};
use crate::memory::Buffer;
use crate::tensor::{Device, Tensor};
use dtensor::CausalAttention;

/// Most dimensions of a head in the 32-bit kernels and in the kernel of backward's sums.
const MOST_DIMS: i64 = 256;
/// Queries per block and keys loaded at a time; in the kernel of keys' gradients, keys and queries.
const FORWARD: [usize; 2] = [64, 64];
const BACKWARD: [usize; 2] = [64, 32];
/// Padding of a row in shared memory, which avoids bank conflicts.
const PAD: usize = 8;
const BF16: usize = 2;
/// Threads per block of the tensor-core kernels.
const THREADS: u32 = 128;
/// Warps per block of the other kernels, one query or key each.
const WARPS: usize = 4;

/// Operands and sizes of one core attention.
#[derive(Clone, Debug)]
pub struct AttentionCall<'a> {
    /// Queries `[batch, q_len, heads · qk_dim]`.
    pub q: &'a Tensor,
    /// Keys `[batch, kv_len, kv_heads · qk_dim]`.
    pub k: &'a Tensor,
    /// Values `[batch, kv_len, kv_heads · v_dim]`.
    pub v: &'a Tensor,
    /// Positions of the queries in their sequence.
    pub positions: &'a Buffer,
    /// Sink logits: one per head, which takes part in the softmax but contributes no value.
    pub sinks: Option<Tensor>,
    /// Sizes, mask, scaling and dropout; the address of sinks is not set here.
    pub sizes: AttentionArgument,
    /// The same attention as a library takes it; `None` if no library can run it.
    pub library: Option<CausalAttention>,
}

impl AttentionCall<'_> {
    fn batch(&self) -> usize {
        self.q.shape[0]
    }

    fn queries(&self) -> usize {
        self.sizes.lengths[0] as usize
    }

    fn keys(&self) -> usize {
        self.sizes.lengths[1] as usize
    }

    fn heads(&self) -> u32 {
        self.sizes.heads[0] as u32
    }

    fn head(&self) -> Head {
        let [key, value] = self.sizes.dims.map(|dim| (dim as u32).next_multiple_of(16));
        Head { key, value }
    }

    fn argument(&self) -> AttentionArgument {
        AttentionArgument {
            sinks: self.sinks.as_ref().map_or(0, Tensor::address),
            ..self.sizes
        }
    }

    fn check(&self) -> Result<(), CudaError> {
        let [key, value] = self.sizes.dims;
        if key.max(value) > MOST_DIMS {
            let reason = format!("heads of {key} and {value} dimensions, more than {MOST_DIMS}");
            return Err(unsupported("attention", reason));
        }
        Ok(())
    }

    /// A kernel with its grid over `count` queries or keys and `heads`, and shared memory.
    fn launch(
        &self,
        name: [&'static str; 2],
        (count, heads): (usize, u32),
        sizes: [usize; 2],
    ) -> (Kernel, [u32; 3], u32) {
        let batch = self.batch() as u32;
        if !self.q.is_bf16() {
            let kernel = Kernel::plain(Source::AttentionSmall, name[0]);
            let grid = [count.div_ceil(WARPS) as u32, heads, batch];
            return (kernel, grid, 0);
        }
        let head = self.head();
        let kernel = Kernel {
            source: Source::Attention,
            name: name[1],
            head,
        };
        let row = |dim: u32| (dim as usize + PAD) * BF16;
        let (own, other) = (sizes[0], 2 * sizes[1]);
        let both = row(head.key) + row(head.value);
        let shared = if name[1] == FORWARD_NAMES[1] {
            own * row(head.key) + other * both
        } else {
            // Two buffers of two 32-bit statistics for each query of a step.
            (own + other) * both + 2 * other * 4
        };
        let grid = [count.div_ceil(own) as u32, heads, batch];
        (kernel, grid, shared as u32)
    }
}

const FORWARD_NAMES: [&str; 2] = ["attention_forward_f32", "attention_forward_bf16"];
const KEY_NAMES: [&str; 2] = ["attention_key_backward_f32", "attention_key_backward_bf16"];
const QUERY_NAMES: [&str; 2] = [
    "attention_query_backward_f32",
    "attention_query_backward_bf16",
];

impl Device {
    /// Runs attention; returns its output and the log-sum-exps `[batch, heads, q_len]`.
    ///
    /// # Errors
    /// When memory or the device fails, or heads are too long.
    pub fn attention(&self, call: &AttentionCall<'_>) -> Result<(Tensor, Tensor), CudaError> {
        call.check()?;
        let (batch, heads) = (call.batch(), call.heads());
        let columns = heads as usize * call.sizes.dims[1] as usize;
        let out = self.tensor(vec![batch, call.queries(), columns], call.q.dtype)?;
        let shape = vec![batch, heads as usize, call.queries()];
        let sums = self.tensor(shape, DType::F32)?;
        if let Some((of, [workspace, _])) = self.library_attention(call)? {
            self.attend(&of, call, [&out, &sums], None, workspace)?;
            return Ok((out, sums));
        }
        let arguments = Arguments::of(&[&out, &sums, &call.q, &call.k, &call.v, &call.positions])
            .with(call.argument());
        let (kernel, grid, shared) = call.launch(FORWARD_NAMES, (call.queries(), heads), FORWARD);
        self.blocks(kernel, grid, THREADS, shared, arguments)?;
        Ok((out, sums))
    }

    /// Returns gradients of queries, keys and values; adds the gradient of the sinks to `d_sinks`.
    ///
    /// # Errors
    /// When memory or the device fails, or heads are too long.
    pub fn attention_backward(
        &self,
        call: &AttentionCall<'_>,
        d_out: &Tensor,
        out: &Tensor,
        sums: &Tensor,
        d_sinks: Option<&Tensor>,
    ) -> Result<[Tensor; 3], CudaError> {
        call.check()?;
        if let Some((of, [_, workspace])) = self.library_attention(call)? {
            let [dq, dk, dv] = self.gradients(call)?;
            let gradients = [d_out, &dq, &dk, &dv];
            self.attend(&of, call, [out, sums], Some(gradients), workspace)?;
            return Ok([dq, dk, dv]);
        }
        let delta = self.attention_delta(call, d_out, out, sums)?;
        if let Some(gradient) = d_sinks {
            let arguments = Arguments::of(&[&gradient, &sums, &delta])
                .sizes([call.batch()])
                .with(call.argument());
            let kernel = typed!(AttentionSmall, "attention_sinks", call.q.is_bf16());
            let grid = [call.heads(), 1, 1];
            self.blocks(kernel, grid, super::grid::THREADS, 0, arguments)?;
        }
        let [dq, dk, dv] = self.gradients(call)?;
        let launch = |names, count, written: &[&dyn Located]| {
            let read: [&dyn Located; 7] = [
                &d_out,
                &call.q,
                &call.k,
                &call.v,
                &sums,
                &delta,
                &call.positions,
            ];
            let arguments = Arguments::of(&[written, &read].concat()).with(call.argument());
            let (kernel, grid, shared) = call.launch(names, count, BACKWARD);
            self.blocks(kernel, grid, THREADS, shared, arguments)
        };
        let kv_heads = call.sizes.heads[1] as u32;
        launch(KEY_NAMES, (call.keys(), kv_heads), &[&dk, &dv])?;
        launch(QUERY_NAMES, (call.queries(), call.heads()), &[&dq])?;
        Ok([dq, dk, dv])
    }

    /// For every query and head, the dot product of the output and its gradient.
    fn attention_delta(
        &self,
        call: &AttentionCall<'_>,
        d_out: &Tensor,
        out: &Tensor,
        sums: &Tensor,
    ) -> Result<Tensor, CudaError> {
        let delta = self.tensor(sums.shape.clone(), DType::F32)?;
        let grid = [
            call.queries().div_ceil(WARPS) as u32,
            call.heads(),
            call.batch() as u32,
        ];
        let arguments = Arguments::of(&[&delta, &d_out, &out]).with(call.argument());
        let kernel = typed!(AttentionSmall, "attention_delta", call.q.is_bf16());
        self.blocks(kernel, grid, THREADS, 0, arguments)?;
        Ok(delta)
    }

    /// Allocates the gradients of queries, keys and values, unwritten.
    fn gradients(&self, call: &AttentionCall<'_>) -> Result<[Tensor; 3], CudaError> {
        let like = |x: &Tensor| self.tensor(x.shape.clone(), x.dtype);
        Ok([like(call.q)?, like(call.k)?, like(call.v)?])
    }

    /// The attention for the library, with workspaces `[forward, backward]` in bytes; else `None`.
    fn library_attention(
        &self,
        call: &AttentionCall<'_>,
    ) -> Result<Option<(CausalAttention, [u64; 2])>, CudaError> {
        let Some(of) = call
            .library
            .filter(|_| self.attention_by == AttentionBy::Library)
        else {
            return Ok(None);
        };
        let workspaces = self.launcher.attention_workspaces(&of)?;
        Ok(workspaces.map(|bytes| (of, bytes)))
    }

    fn attend(
        &self,
        of: &CausalAttention,
        call: &AttentionCall<'_>,
        [out, sums]: [&Tensor; 2],
        gradients: Option<[&Tensor; 4]>,
        workspace: u64,
    ) -> Result<(), CudaError> {
        let workspace = self.memory.allocate(workspace)?;
        let tensors = [call.q, call.k, call.v, out, sums];
        let operands = AttentionOperands {
            tensors: tensors.map(Tensor::address),
            gradients: gradients.map(|all| all.map(Tensor::address)),
            scale: call.sizes.scale,
            workspace: workspace.address,
        };
        self.launcher.attend(of, &operands)
    }
}
