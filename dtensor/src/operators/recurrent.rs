//! Operators of layers that carry a state along the sequence: the causal convolution, the recurrence in chunks (Mamba-2's
//! state space, the gated delta rule) and the gated norm. Heads and channels may be sharded; the sequence may not.
//!
//! A recurrence's operations and traffic are those of the kernels that training systems run, counted kernel by kernel:
//! of Mamba-2, `mamba_ssm/ops/triton/ssd_combined.py` (the algorithm is §6 of arXiv 2405.21060); of the gated delta
//! rule, `fla/ops/gated_delta_rule/chunk.py` of flash-linear-attention (§3.3 of arXiv 2412.06464). Both write the states
//! between chunks to memory, and backward computes them again.

use catalog::{Axis, DType};

use crate::error::DTensorError;
use crate::gradients::{Backward, Of};
use crate::operator::{
    Class, Convolution, CostClass, GatedNorm, Gradient, Operator, Recurrent, Scan, ScanRule,
};
use crate::placement::{BLOCK_AXES, Placement};
use crate::tape::{DTensor, Tape, no_rule};
use crate::tensor::{TensorId, TensorRole};

/// Dimension of the sequence in `[batch, sequence, columns]`.
const SEQUENCE: usize = 1;

impl Tape<'_> {
    /// Causal convolution over `kernel` tokens, then SiLU, of all channels of the concatenated
    /// `inputs` `[b, s, c]`. `weight: [channels, 1, kernel]`; one bias per channel. Saves `inputs`.
    ///
    /// # Errors
    /// When the sequence is sharded, or channels are not sharded as the weight is.
    pub fn causal_convolution(
        &mut self,
        scope: &str,
        inputs: &[&DTensor],
        (weight, bias): (&DTensor, Option<&DTensor>),
        of: Convolution,
    ) -> Result<DTensor, DTensorError> {
        let first = inputs[0];
        let last = first.shape.len() - 1;
        let refused = || no_rule("causal convolution", scope, &[first, weight]);
        let mut placements = first.placements;
        for axis in self.shared_axes() {
            let alike = inputs.iter().all(|x| {
                let on = x.placements.on(axis);
                on.shards(last) == first.placements.on(axis).shards(last) && whole_sequence(on)
            });
            let on = match (first.placements.on(axis), weight.placements.on(axis)) {
                (Placement::Replicate, Placement::Replicate) if alike => Placement::Replicate,
                (x, Placement::Shard(0)) if alike && x.shards(last) => Placement::Shard(last),
                (x, Placement::Interleaved(0, parts)) if alike && x.shards(last) => {
                    Placement::Interleaved(last, parts)
                }
                _ => return Err(refused()),
            };
            placements = placements.with(axis, on);
        }
        let mut shape = first.shape.clone();
        shape[last] = weight.shape[0];
        let out = self.output(scope, &shape, placements, first.dtype);
        let saved: Vec<TensorId> = inputs.iter().map(|x| x.id).collect();
        let read: Vec<&DTensor> = (inputs.iter().copied())
            .chain([weight])
            .chain(bias)
            .collect();
        let operator = Operator::Recurrent(Recurrent::Convolution(of));
        self.record(scope, operator, &read, &out, &saved);
        Ok(out)
    }

    /// A recurrence over the sequence. Inputs are sharded by heads or groups; each of `weights` has one number per head.
    ///
    /// | rule | inputs | saved for the backward |
    /// |---|---|---|
    /// | Mamba-2 | `[x, b, c, dt]`: input, input matrix B, output matrix C, time step | inputs, output, cumulative log decays |
    /// | gated delta | `[q, k, v, b, a]`: query, key, value, write gate, decay gate | normalised q and k, v, both gates, inverse matrix of each chunk |
    ///
    /// # Errors
    /// When the sequence is sharded, or inputs are sharded differently.
    pub fn scan(
        &mut self,
        scope: &str,
        inputs: &[&DTensor],
        weights: &[&DTensor],
        sizes: Scan,
    ) -> Result<DTensor, DTensorError> {
        let operator = Recurrent::Scan(sizes);
        self.in_whole_sequences(operator.name(), scope, inputs)?;
        let (like, kept, states) = match sizes.rule {
            ScanRule::StateSpace { .. } => (
                inputs[0],
                vec![("decays", sizes.per_head(1), DType::F32)],
                DType::F32,
            ),
            ScanRule::GatedDelta { key_dim, .. } => {
                let dtype = inputs[2].dtype;
                let kept = vec![
                    ("queries", sizes.per_head(key_dim), dtype),
                    ("keys", sizes.per_head(key_dim), dtype),
                    ("writes", sizes.per_head(1), dtype),
                    ("decays", sizes.per_head(1), DType::F32),
                    ("inverses", sizes.per_head(sizes.chunk), dtype),
                ];
                (inputs[2], kept, dtype)
            }
        };
        let out = self.like(scope, like, like.dtype);
        let kept = kept.into_iter();
        let kept: Vec<TensorId> = kept
            .map(|(name, shape, dtype)| self.beside(scope, name, shape, dtype))
            .collect();
        let mut saved: Vec<TensorId> = match sizes.rule {
            ScanRule::StateSpace { .. } => inputs.iter().map(|x| x.id).chain([out.id]).collect(),
            ScanRule::GatedDelta { .. } => vec![like.id],
        };
        saved.extend(&kept);
        let read = [inputs, weights].concat();
        self.record(scope, Operator::Recurrent(operator), &read, &out, &saved);
        kept.into_iter().for_each(|id| self.also_makes(id));
        let states = self.beside(scope, "states", sizes.states(), states);
        self.also_makes(states);
        Ok(out)
    }

    /// RMS norm of `x`, times `weight` and the SiLU of `gate`, which multiplies before or after the norm. Saves both inputs
    /// and a statistic per norm.
    ///
    /// # Errors
    /// When the gate is not sharded as `x` is.
    pub fn gated_norm(
        &mut self,
        scope: &str,
        [x, gate]: [&DTensor; 2],
        weight: &DTensor,
        norm: GatedNorm,
    ) -> Result<DTensor, DTensorError> {
        if !self.lie_alike(x, gate) {
            return Err(no_rule("gated norm", scope, &[x, gate]));
        }
        let out = self.like(scope, x, x.dtype);
        let rows = self.trace.tensor(x.id).elements() / norm.group.max(1);
        let statistics = self.beside(scope, "statistics", vec![rows, 1], DType::F32);
        let saved = [x.id, gate.id, statistics];
        let operator = Operator::Recurrent(Recurrent::GatedNorm(norm));
        self.record(scope, operator, &[x, gate, weight], &out, &saved);
        self.also_makes(statistics);
        Ok(out)
    }

    /// The axes with more than one rank.
    fn shared_axes(&self) -> impl Iterator<Item = Axis> + use<> {
        let mesh = *self.mesh();
        (BLOCK_AXES.into_iter()).filter(move |&axis| mesh.size(axis) > 1)
    }

    /// Returns an error if the sequence is sharded, or if the inputs are not sharded alike.
    fn in_whole_sequences(
        &self,
        operator: &'static str,
        scope: &str,
        inputs: &[&DTensor],
    ) -> Result<(), DTensorError> {
        let alike = inputs.iter().all(|x| self.lie_alike(x, inputs[0]));
        let whole = (self.shared_axes())
            .all(|axis| inputs.iter().all(|x| whole_sequence(x.placements.on(axis))));
        if alike && whole {
            return Ok(());
        }
        Err(no_rule(operator, scope, inputs))
    }

    /// A local tensor that an operator makes in addition to its output.
    fn beside(&mut self, scope: &str, name: &str, shape: Vec<u64>, dtype: DType) -> TensorId {
        let name = format!("{scope}.{name}");
        self.local_tensor(&name, shape, dtype, TensorRole::Activation)
    }
}

/// Whether every rank has all tokens, and no part of a sum.
fn whole_sequence(placement: Placement) -> bool {
    placement != Placement::Partial && !placement.shards(SEQUENCE)
}

impl Recurrent {
    /// One operator, which also adds to its weights' gradients; a scan's writes the states' too.
    pub(super) fn backward(self, to: &mut Backward<'_, '_>, of: Of<'_>, gradient: &DTensor) {
        let operator = Gradient::Recurrent(of.index, self);
        to.push_one(of, gradient, operator, |_, placed| placed);
        if let Self::Scan(sizes) = self {
            let name = format!("{}.states.gradient", to.tape.trace.forward[of.index].scope);
            let (shape, role) = (sizes.states(), TensorRole::Gradient);
            let states = to.tape.local_tensor(&name, shape, DType::F32, role);
            let op = to.tape.trace.backward.last_mut();
            op.expect("just pushed").outputs.push(states);
        }
    }

    /// The operator's name in messages and profiles.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Convolution(_) => "causal convolution",
            Self::Scan(scan) => match scan.rule {
                ScanRule::StateSpace { .. } => "state-space scan",
                ScanRule::GatedDelta { .. } => "gated delta rule",
            },
            Self::GatedNorm(_) => "gated norm",
        }
    }

    /// Name in profiles and cost class.
    pub(super) fn class(self) -> Class {
        let class = match self {
            Self::Convolution(_) => CostClass::Convolution,
            Self::Scan(scan) => CostClass::Scan(scan),
            Self::GatedNorm(_) => CostClass::Norm,
        };
        (self.name().into(), class)
    }
}

/// The work of a recurrence's kernels in one forward or backward pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScanWork {
    /// Floating-point operations of their matrix products.
    pub flops: f64,
    /// Bytes read from and written to device memory.
    pub bytes: f64,
    /// Number of kernels.
    pub kernels: u32,
}

impl Scan {
    /// Shape of a tensor with `numbers` elements per token and head.
    fn per_head(&self, numbers: u64) -> Vec<u64> {
        vec![self.batch, self.length, self.heads * numbers]
    }

    /// Shape of the states between chunks.
    fn states(&self) -> Vec<u64> {
        let (rows, columns) = match self.rule {
            ScanRule::StateSpace {
                head_dim, state, ..
            } => (head_dim, state),
            ScanRule::GatedDelta {
                key_dim, value_dim, ..
            } => (key_dim, value_dim),
        };
        let chunks = self.length.div_ceil(self.chunk);
        vec![self.batch, chunks, self.heads, rows, columns]
    }

    /// The sizes that decide the time, for names in profiles.
    pub(crate) fn sizes(&self) -> Vec<u64> {
        let [_, _, heads, rows, columns] = self.states()[..] else {
            return Vec::new();
        };
        vec![self.batch * heads, self.length, rows, columns, self.chunk]
    }

    /// Work of the kernels of forward, or of backward, for tensors of this type.
    #[must_use]
    pub fn work(&self, dtype: DType, backward: bool) -> ScanWork {
        let size = dtype.size() as f64;
        let per_token = match self.rule {
            ScanRule::StateSpace { .. } => self.state_space(size, backward),
            ScanRule::GatedDelta { .. } => self.gated_delta(size, backward),
        };
        let tokens = self.batch as f64 * self.length as f64;
        ScanWork {
            flops: per_token.flops * tokens,
            bytes: per_token.bytes * tokens,
            ..per_token
        }
    }

    /// Work per token of Mamba-2's kernels, for elements of this many bytes.
    ///
    /// Forward: sums of decays; states of chunks (`2NP` operations per head); states passed on; `C·Bᵀ` within chunks (`2QN`
    /// per group); the scan (`2QP + 2NP`). Backward runs the first four again, then: gradients of states from the output
    /// (`2NP`); passed back; of the input (`2QP + 2NP`); of B (`2NP`); of C (`2NP`); of `C·Bᵀ` (`2QP`); from that of B and
    /// of C (`2QN` each); of the decays (`2QP`); of the steps. It also reads the convolution's input and writes its output
    /// again, which nothing keeps.
    fn state_space(&self, size: f64, backward: bool) -> ScanWork {
        let ScanRule::StateSpace {
            head_dim,
            state,
            groups,
        } = self.rule
        else {
            unreachable!("called for a state space")
        };
        let [h, p, n, g, q] = [self.heads, head_dim, state, groups, self.chunk].map(|n| n as f64);
        // Numbers per token: inputs, a B or C, states between chunks, products C·Bᵀ.
        let [x, b, states, products] = [h * p, g * n, h * p * n / q, g * q];
        match backward {
            false => ScanWork {
                flops: 4.0 * h * n * p + 2.0 * q * h * p + 2.0 * q * g * n,
                bytes: size * (3.0 * x + 4.0 * b + 2.0 * states + h)
                    + 4.0 * (2.0 * states + 2.0 * products + 6.0 * h),
                kernels: 5,
            },
            true => ScanWork {
                flops: 10.0 * h * n * p + 6.0 * q * h * p + 6.0 * q * g * n,
                bytes: size * (13.0 * x + 15.0 * b + 6.0 * states + 2.0 * h)
                    + 4.0 * (5.0 * states + 4.0 * b + 6.0 * products + 20.0 * h),
                kernels: 15,
            },
        }
    }

    /// Work per token of the gated delta rule's kernels, for elements of this many bytes.
    ///
    /// Forward: queries and keys repeated for every value head and normed; sums of decays; `K·Kᵀ` within chunks (`2CK`
    /// operations per head); its inverse (`2C²/3`); both products with it (`2CK + 2CV`); the states (`4KV`); the output
    /// (`2KV + 2CK + 2CV`). Backward runs the products with the inverse and the states again, then: gradients of values
    /// within chunks (`2CK + 2CV`); of states (`6KV`); of queries, keys and the first product (`6KV + 6CK + 2CV`);
    /// through the inverse (`10CK + 4CV + 4C²`); of the norms.
    fn gated_delta(&self, size: f64, backward: bool) -> ScanWork {
        let ScanRule::GatedDelta {
            key_heads,
            key_dim,
            value_dim,
        } = self.rule
        else {
            unreachable!("called for a gated delta rule")
        };
        let [h, k, v, c] = [self.heads, key_dim, value_dim, self.chunk].map(|n| n as f64);
        // Numbers per token: keys of all value heads, values, states between chunks, inverses.
        let [keys, values, states, inverses] = [h * k, h * v, h * k * v / c, h * c];
        // Queries and keys as they come, which are repeated if several value heads share one.
        let own = key_heads as f64 * k;
        let repeated = if key_heads < self.heads {
            2.0 * (own + keys)
        } else {
            0.0
        };
        match backward {
            false => ScanWork {
                flops: h * (6.0 * k * v + 2.0 * c * (3.0 * k + 2.0 * v) + 2.0 * c * c / 3.0),
                bytes: size * (repeated + 11.0 * keys + 6.0 * values + 2.0 * states)
                    + (2.0 * size + 8.0) * inverses
                    + 24.0 * h,
                kernels: 8,
            },
            true => ScanWork {
                flops: h * (16.0 * k * v + 2.0 * c * (10.0 * k + 5.0 * v) + 4.0 * c * c),
                bytes: size
                    * (repeated + 26.0 * keys + 15.0 * values + 4.0 * states + 2.0 * inverses)
                    + 40.0 * h,
                kernels: 10,
            },
        }
    }
}
