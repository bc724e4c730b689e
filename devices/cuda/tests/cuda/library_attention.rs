//! Core attention computed in 64 bits, in place of a library: scaled scores, causal, with or
//! without a window. Backward overwrites the workspace, to show that it is as large as was asked
//! for.

use cuda_device::launcher::{Address, AttentionOperands};
use dtensor::CausalAttention;
use half::bf16;

/// Rows of one head of a tensor `[batch, length, heads · dims]` in bf16.
#[derive(Clone, Copy)]
struct Rows {
    first: *mut bf16,
    stride: usize,
    dims: usize,
}

impl Rows {
    fn new(address: Address, of: &CausalAttention, heads: i64, dims: i64, at: [i64; 2]) -> Self {
        let [batch, head] = at;
        let first = batch * of.length * heads * dims + head * dims;
        Self {
            // SAFETY: the caller's tensors are as large as their sizes say.
            first: unsafe { (address as *mut bf16).add(first as usize) },
            stride: (heads * dims) as usize,
            dims: dims as usize,
        }
    }

    fn get(self, row: usize) -> Vec<f64> {
        let at = |column| {
            // SAFETY: as above.
            unsafe { self.first.add(row * self.stride + column).read() }.to_f64()
        };
        (0..self.dims).map(at).collect()
    }

    fn set(self, row: usize, values: &[f64]) {
        for (column, &value) in values.iter().enumerate() {
            // SAFETY: as above.
            unsafe {
                let at = self.first.add(row * self.stride + column);
                at.write(bf16::from_f64(value));
            }
        }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut [f64], factor: f64, from: &[f64]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}

/// Runs core attention, forward or backward.
pub fn attend(of: &CausalAttention, operands: &AttentionOperands) {
    let [heads, kv_heads] = of.heads;
    let [key, value] = of.dims;
    let [q, k, v, out, sums] = operands.tensors;
    if operands.gradients.is_some() {
        // SAFETY: the caller gives as much as was asked for.
        unsafe {
            std::ptr::write_bytes(
                operands.workspace as *mut u8,
                0xEE,
                of.backward_workspace() as usize,
            );
        }
    }
    for batch in 0..of.batch {
        for group in 0..kv_heads {
            let n = of.length as usize;
            let kv = |address, dims| Rows::new(address, of, kv_heads, dims, [batch, group]);
            let mut dk = vec![vec![0.0; key as usize]; n];
            let mut dv = vec![vec![0.0; value as usize]; n];
            let share = heads / kv_heads;
            for head in group * share..(group + 1) * share {
                let own = |address, dims| Rows::new(address, of, heads, dims, [batch, head]);
                // SAFETY: one number per query.
                let sums = unsafe {
                    let first = ((batch * heads + head) * of.length) as usize;
                    std::slice::from_raw_parts_mut((sums as *mut f32).add(first), n)
                };
                let one = Head {
                    of,
                    scale: f64::from(operands.scale),
                    q: own(q, key),
                    k: kv(k, key),
                    v: kv(v, value),
                    out: own(out, value),
                };
                match operands.gradients {
                    None => one.forward(sums),
                    Some([d_out, dq, ..]) => {
                        let [d_out, dq] = [own(d_out, value), own(dq, key)];
                        one.backward(sums, d_out, dq, &mut dk, &mut dv);
                    }
                }
            }
            if let Some([_, _, to_k, to_v]) = operands.gradients {
                for row in 0..n {
                    kv(to_k, key).set(row, &dk[row]);
                    kv(to_v, value).set(row, &dv[row]);
                }
            }
        }
    }
}

/// One head of one sequence.
struct Head<'h> {
    of: &'h CausalAttention,
    scale: f64,
    q: Rows,
    k: Rows,
    v: Rows,
    out: Rows,
}

impl Head<'_> {
    /// Keys that a query sees, with its scores.
    fn scores(&self, row: usize) -> (std::ops::Range<usize>, Vec<f64>) {
        let first = self
            .of
            .window
            .map_or(0, |w| (row + 1).saturating_sub(w as usize));
        let q = self.q.get(row);
        let scores = (first..=row).map(|key| self.scale * dot(&q, &self.k.get(key)));
        (first..row + 1, scores.collect())
    }

    fn forward(&self, sums: &mut [f32]) {
        for (row, sum) in sums.iter_mut().enumerate() {
            let (keys, scores) = self.scores(row);
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|x| (x - largest).exp()).sum();
            *sum = (largest + total.ln()) as f32;
            let mut out = vec![0.0; self.v.dims];
            for (key, score) in keys.zip(scores) {
                add(&mut out, (score - largest).exp() / total, &self.v.get(key));
            }
            self.out.set(row, &out);
        }
    }

    fn backward(
        &self,
        sums: &[f32],
        d_out: Rows,
        to_q: Rows,
        dk: &mut [Vec<f64>],
        dv: &mut [Vec<f64>],
    ) {
        for (row, &sum) in sums.iter().enumerate() {
            let (keys, scores) = self.scores(row);
            let (q, d) = (self.q.get(row), d_out.get(row));
            let delta = dot(&d, &self.out.get(row));
            let mut dq = vec![0.0; self.q.dims];
            for (key, score) in keys.zip(scores) {
                let p = (score - f64::from(sum)).exp();
                let ds = p * (dot(&d, &self.v.get(key)) - delta) * self.scale;
                add(&mut dq, ds, &self.k.get(key));
                add(&mut dk[key], ds, &q);
                add(&mut dv[key], p, &d);
            }
            to_q.set(row, &dq);
        }
    }
}
