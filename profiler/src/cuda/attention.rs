//! Measures core attention, forward and backward, over head counts, lengths and head dimensions.

use catalog::DType;
use catalog::profile::{Kernel, Measured};
use cuda_device::launcher::{AttentionArgument, StreamArgument};
use cuda_device::{AttentionCall, Buffer, CudaError, Device, Tensor};
use dtensor::CausalAttention;
use dtensor::philox::Stream;

use super::operands::{Tiled, Wanted, check, rounding};
use super::timing::{sets, timed};
use crate::ProfilerError;
use crate::lanes::Effort;

/// Tolerance: sixteen roundings of probabilities and score gradients to bf16. A sum has as many terms as there are
/// keys, and errors grow as the root of the sum of their squares.
const ROUNDED: f64 = 16.0 / 512.0;
/// Tolerance of log-sum-exps, which are in 32 bits with the device's own exponential.
const SUM_ERROR: f64 = 1e-4;

/// Absolute tolerance, for results near 0 whose terms of magnitude one cancel. The gradient of a query that sees only one key,
/// for example, is exactly 0, and a GPU computes it to about 3e-9.
const CANCELLED: f64 = 1e-6;

/// A causal attention in bf16 to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Causal {
    /// Number of sequences.
    pub batch: u64,
    /// Tokens per sequence.
    pub length: u64,
    /// Query heads.
    pub heads: u64,
    /// Key/value heads.
    pub groups: u64,
    /// Dimensions per head.
    pub dim: u64,
}

/// Operands of one set, with the output and log-sum-exps of forward.
struct Operands {
    q: Tiled,
    k: Tiled,
    v: Tiled,
    d: Tiled,
    out: Tensor,
    sums: Tensor,
}

impl Causal {
    /// Kernels of forward and of backward, as traces name them; the first carries the time of all.
    #[must_use]
    pub fn kernels(&self) -> [Vec<Kernel>; 2] {
        let lines = self.batch * self.heads;
        let product = [lines, self.length, self.length, self.dim];
        let rows = [lines * self.length, self.length];
        let named = |name: &str, pass: &str| {
            let name = format!("{name} {pass} bf16");
            match name.starts_with("softmax") {
                true => Kernel::new(name, rows),
                false => Kernel::new(name, product),
            }
        };
        let forward = ["attention scores", "softmax", "attention context"];
        let backward = [
            "attention context of input 0",
            "attention context of input 1",
            "softmax",
            "attention scores of input 0",
            "attention scores of input 1",
        ];
        [
            forward.map(|name| named(name, "forward")).into(),
            backward.map(|name| named(name, "backward")).into(),
        ]
    }

    fn sizes(&self) -> AttentionArgument {
        let length = self.length as i64;
        AttentionArgument {
            lengths: [length; 2],
            heads: [self.heads as i64, self.groups as i64],
            dims: [self.dim as i64; 2],
            window: length,
            scale: self.scale() as f32,
            threshold: 0,
            keep: 1.0,
            cap: 0.0,
            // There is no dropout, so no random number is drawn.
            stream: StreamArgument::new(Stream::new(1, 0, "attention"), 0),
            first_sequence: 0,
            first_head: 0,
            global_heads: self.heads as i64,
            global_queries: length,
            slopes: 0,
            sinks: 0,
        }
    }

    fn scale(&self) -> f64 {
        1.0 / (self.dim as f64).sqrt()
    }

    fn call<'c>(&self, set: [&'c Tiled; 3], positions: &'c Buffer) -> AttentionCall<'c> {
        let [q, k, v] = set.map(|x| &x.tensor);
        let sizes = self.sizes();
        AttentionCall {
            q,
            k,
            v,
            positions,
            sinks: None,
            sizes,
            library: Some(CausalAttention {
                batch: self.batch as i64,
                length: self.length as i64,
                heads: sizes.heads,
                dims: sizes.dims,
                window: None,
            }),
        }
    }

    fn operands(
        &self,
        device: &Device,
        positions: &Buffer,
        seed: u64,
    ) -> Result<Operands, CudaError> {
        let tiled = |heads: u64, of: u64| {
            let shape = [self.batch, self.length, heads * self.dim];
            let shape = shape.map(|size| size as usize).into();
            Tiled::new(device, shape, DType::Bf16, 4 * seed + of)
        };
        let [q, k] = [tiled(self.heads, 0)?, tiled(self.groups, 1)?];
        let [v, d] = [tiled(self.groups, 2)?, tiled(self.heads, 3)?];
        let call = self.call([&q, &k, &v], positions);
        let (out, sums) = device.memory.poisoned(|| device.attention(&call))?;
        Ok(Operands {
            q,
            k,
            v,
            d,
            out,
            sums,
        })
    }

    /// Checks and times both directions.
    ///
    /// # Errors
    /// When memory or the device fails, or a result differs from the host's.
    pub fn measure(&self, device: &Device, effort: Effort) -> Result<Vec<Measured>, ProfilerError> {
        let indices: Vec<u32> = (0..self.length as u32).collect();
        let positions = device.indices(&indices)?;
        let tokens = self.batch * self.length * self.dim;
        let bytes = 2 * tokens * (2 * self.heads + 2 * self.groups);
        let sets: Vec<Operands> = (0..sets(bytes) as u64)
            .map(|set| self.operands(device, &positions, set))
            .collect::<Result<_, _>>()?;
        let [forward, backward] = self.kernels();
        self.check(device, &sets[0], &positions)?;
        let set = |call: usize| {
            let set = &sets[call % sets.len()];
            (self.call([&set.q, &set.k, &set.v], &positions), set)
        };
        let mut measured = timed(device, effort, &forward, |call| {
            device.attention(&set(call).0).map(drop)
        })?;
        measured.extend(timed(device, effort, &backward, |call| {
            let (call, set) = set(call);
            let done = device.attention_backward(&call, &set.d.tensor, &set.out, &set.sums, None);
            done.map(drop)
        })?);
        Ok(measured)
    }

    fn check(
        &self,
        device: &Device,
        set: &Operands,
        positions: &Buffer,
    ) -> Result<(), ProfilerError> {
        let [forward, backward] = self.kernels();
        let oracle = Oracle::new(device, self, set)?;
        check(device, &forward[0], &set.sums, |at| oracle.sum(at))?;
        check(device, &forward[0], &set.out, |at| oracle.out(at))?;
        let call = self.call([&set.q, &set.k, &set.v], positions);
        let back = || device.attention_backward(&call, &set.d.tensor, &set.out, &set.sums, None);
        let [dq, dk, dv] = device.memory.poisoned(back)?;
        check(device, &backward[0], &dq, |at| oracle.dq(at))?;
        check(device, &backward[0], &dk, |at| oracle.dk(at))?;
        check(device, &backward[0], &dv, |at| oracle.dv(at))
    }
}

/// Computes elements of attention on the host in 64 bits. Backward uses the outputs of forward, as the device does.
struct Oracle<'o> {
    set: &'o Operands,
    length: usize,
    heads: usize,
    groups: usize,
    dim: usize,
    scale: f64,
    /// Log-sum-exps, and `Σ dO · O`, each by sequence, head and query.
    sums: Vec<f32>,
    delta: Vec<f64>,
}

/// A row of a head: `[sequence, token, head]`.
type Row = [usize; 3];

impl<'o> Oracle<'o> {
    fn new(device: &Device, shape: &Causal, set: &'o Operands) -> Result<Self, CudaError> {
        let [length, heads, groups, dim] =
            [shape.length, shape.heads, shape.groups, shape.dim].map(|size| size as usize);
        let out = device.download(&set.out)?;
        let out = out.f32();
        let lines = shape.batch as usize * heads;
        let delta = (0..lines * length).map(|at| {
            let (line, query) = (at / length, at % length);
            let start = ((line / heads * length + query) * heads + line % heads) * dim;
            dot(set.d.slice(start, dim), &out[start..start + dim])
        });
        Ok(Self {
            set,
            length,
            heads,
            groups,
            dim,
            scale: shape.scale(),
            delta: delta.collect(),
            sums: device.download(&set.sums)?.into_f32(),
        })
    }

    /// Row and column within the head of an element, in a tensor with this many heads.
    fn place(&self, at: usize, heads: usize) -> (Row, usize) {
        let (line, c) = (at / self.dim, at % self.dim);
        let (token, head) = (line / heads, line % heads);
        ([token / self.length, token % self.length, head], c)
    }

    fn row<'r>(&self, of: &'r Tiled, heads: usize, [b, token, head]: Row) -> &'r [f32] {
        let line = (b * self.length + token) * heads + head;
        of.slice(line * self.dim, self.dim)
    }

    /// The row of keys or values at a token that a query's head attends to.
    fn seen<'r>(&self, of: &'r Tiled, [b, _, head]: Row, key: usize) -> &'r [f32] {
        let group = head / (self.heads / self.groups);
        self.row(of, self.groups, [b, key, group])
    }

    fn score(&self, query: Row, key: usize) -> f64 {
        let q = self.row(&self.set.q, self.heads, query);
        self.scale * dot(q, self.seen(&self.set.k, query, key))
    }

    fn line(&self, [b, query, head]: Row) -> usize {
        (b * self.heads + head) * self.length + query
    }

    fn sum(&self, at: usize) -> Wanted {
        let (line, query) = (at / self.length, at % self.length);
        let row = [line / self.heads, query, line % self.heads];
        let total: f64 = (0..=query).map(|key| self.score(row, key).exp()).sum();
        Wanted {
            value: total.ln(),
            tolerance: SUM_ERROR,
        }
    }

    fn probability(&self, query: Row, key: usize) -> f64 {
        let sum = f64::from(self.sums[self.line(query)]);
        (self.score(query, key) - sum).exp()
    }

    /// The gradient of a score, multiplied by the scale of scores.
    fn gradient(&self, query: Row, key: usize) -> f64 {
        let d = self.row(&self.set.d, self.heads, query);
        let dp = dot(d, self.seen(&self.set.v, query, key));
        self.probability(query, key) * (dp - self.delta[self.line(query)]) * self.scale
    }

    fn out(&self, at: usize) -> Wanted {
        let (row, c) = self.place(at, self.heads);
        let exponentials = (0..=row[1]).map(|key| self.score(row, key).exp());
        let exponentials: Vec<f64> = exponentials.collect();
        let total: f64 = exponentials.iter().sum();
        let v = |key: usize| f64::from(self.seen(&self.set.v, row, key)[c]);
        let terms = exponentials.iter().enumerate();
        rounded(terms.map(|(key, e)| e / total * v(key)))
    }

    fn dq(&self, at: usize) -> Wanted {
        let (row, c) = self.place(at, self.heads);
        let k = |key: usize| f64::from(self.seen(&self.set.k, row, key)[c]);
        rounded((0..=row[1]).map(|key| self.gradient(row, key) * k(key)))
    }

    /// Rows of all queries that attend to a key.
    fn queries(&self, [b, key, group]: Row) -> impl Iterator<Item = Row> {
        let share = self.heads / self.groups;
        let length = self.length;
        let heads = group * share..(group + 1) * share;
        heads.flat_map(move |head| (key..length).map(move |query| [b, query, head]))
    }

    fn dk(&self, at: usize) -> Wanted {
        let (row, c) = self.place(at, self.groups);
        let q = |query: Row| f64::from(self.row(&self.set.q, self.heads, query)[c]);
        let queries = self.queries(row);
        rounded(queries.map(|query| self.gradient(query, row[1]) * q(query)))
    }

    fn dv(&self, at: usize) -> Wanted {
        let (row, c) = self.place(at, self.groups);
        let d = |query: Row| f64::from(self.row(&self.set.d, self.heads, query)[c]);
        let queries = self.queries(row);
        rounded(queries.map(|query| self.probability(query, row[1]) * d(query)))
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(a, b)| f64::from(*a) * f64::from(*b))
        .sum()
}

/// A rounded sum of terms, each with one factor rounded to bf16.
fn rounded(terms: impl Iterator<Item = f64>) -> Wanted {
    let (mut value, mut squares) = (0.0, 0.0);
    for term in terms {
        value += term;
        squares += term * term;
    }
    Wanted {
        value,
        tolerance: rounding(DType::Bf16) * f64::abs(value)
            + ROUNDED * f64::sqrt(squares)
            + CANCELLED,
    }
}
