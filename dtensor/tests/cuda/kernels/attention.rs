//! Core attention, fused, before scores, softmax and context in 64 bits.

use dtensor::cuda::AttentionCall;
use dtensor::cuda::launcher::{AttentionArgument, StreamArgument, threshold};
use dtensor::philox::Stream;
use spec::DType;

use super::{random, within};
use crate::emulator;

struct Case {
    batch: usize,
    positions: Vec<u32>,
    keys: usize,
    heads: [usize; 2],
    dims: [usize; 2],
    window: Option<i64>,
    dropout: f64,
}

fn all(n: u32) -> Vec<u32> {
    (0..n).collect()
}

fn cases() -> Vec<Case> {
    let case = |positions: Vec<u32>, keys, heads, dims, window, dropout| Case {
        batch: 2,
        positions,
        keys,
        heads,
        dims,
        window,
        dropout,
    };
    vec![
        case(all(1), 1, [1, 1], [8, 8], None, 0.0),
        case(all(70), 70, [2, 1], [16, 16], None, 0.0),
        case(all(129), 129, [2, 2], [64, 64], None, 0.0),
        // Long enough for tiles of keys to take each other's place.
        case(all(200), 200, [1, 1], [16, 16], None, 0.0),
        case(all(210), 210, [1, 1], [8, 16], Some(150), 0.0),
        case(all(100), 100, [4, 2], [24, 10], Some(17), 0.0),
        case(all(65), 65, [2, 1], [32, 48], None, 0.25),
        // The first and last quarters of a sequence: a rank of two under zig-zag balance.
        case(
            (0..32).chain(96..128).collect(),
            128,
            [2, 2],
            [16, 16],
            None,
            0.0,
        ),
        case(
            (0..20).chain(60..80).collect(),
            80,
            [2, 1],
            [16, 16],
            Some(33),
            0.1,
        ),
    ]
}

#[test]
fn attention_forward_and_backward() {
    if emulator::device().is_none() {
        return;
    }
    for (index, c) in cases().into_iter().enumerate() {
        for (dtype, order) in [
            (DType::F32, 0),
            (DType::Bf16, 0),
            (DType::Bf16, 1),
            (DType::Bf16, 3),
        ] {
            let device = emulator::device_in(order).expect("there is a compiler");
            let [h, g] = c.heads;
            let [dk, dv] = c.dims;
            let (queries, keys) = (c.positions.len(), c.keys);
            let (q, wq) = random(&device, &[c.batch, queries, h * dk], dtype, 1);
            let (k, wk) = random(&device, &[c.batch, keys, g * dk], dtype, 2);
            let (v, wv) = random(&device, &[c.batch, keys, g * dv], dtype, 3);
            let (d, wd) = random(&device, &[c.batch, queries, h * dv], dtype, 4);
            let stream = Stream::new(3, 1, "attention");
            let positions = device.indices(&c.positions).expect("memory");
            let step = device.indices(&[1]).expect("memory");
            let scale = 1.0 / (dk as f64).sqrt();
            let call = AttentionCall {
                q: &q,
                k: &k,
                v: &v,
                positions: &positions,
                sizes: AttentionArgument {
                    lengths: [queries as i64, keys as i64],
                    heads: [h as i64, g as i64],
                    dims: [dk as i64, dv as i64],
                    window: c.window.unwrap_or(i64::MAX / 4),
                    scale: scale as f32,
                    threshold: threshold(c.dropout),
                    keep: (1.0 / (1.0 - c.dropout)) as f32,
                    padding: 0,
                    stream: StreamArgument::new(stream, step.address),
                    first_sequence: 3,
                    first_head: 2,
                    global_heads: 2 + h as i64,
                    global_queries: keys as i64,
                },
            };
            let (out, sums) = device.attention(&call).expect("runs");
            let got = device
                .attention_backward(&call, &d, &out, &sums)
                .expect("runs");
            let mut want = Oracle::new(&c);
            for b in 0..c.batch {
                for head in 0..h {
                    for row in 0..queries {
                        let keep = |key: usize| {
                            let line =
                                ((3 + b) * (2 + h) + 2 + head) * keys + c.positions[row] as usize;
                            let mut u = [0.0];
                            stream.uniforms((line * keys + key) as u64, &mut u);
                            let kept = f64::from(u[0]) >= c.dropout;
                            if kept { 1.0 / (1.0 - c.dropout) } else { 0.0 }
                        };
                        want.row(&c, (b, head, row), [&wq, &wk, &wv, &wd], keep);
                    }
                }
            }
            let what = |part: &str| format!("case {index} {dtype:?} order {order} {part}");
            // In bf16 probabilities and their gradients are rounded before they are multiplied.
            let bound = if dtype == DType::Bf16 { 6e-3 } else { 5e-6 };
            within(&device, &what("output"), &out, &want.out, bound);
            within(&device, &what("sums"), &sums, &want.sums, 1e-5);
            let [dq, dk, dv] = &got;
            let bound = if dtype == DType::Bf16 { 1e-2 } else { 1e-5 };
            if keys > 1 {
                within(&device, &what("queries"), dq, &want.dq, bound);
                within(&device, &what("keys"), dk, &want.dk, bound);
            }
            within(&device, &what("values"), dv, &want.dv, bound);
        }
    }
}

struct Oracle {
    out: Vec<f64>,
    sums: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

impl Oracle {
    fn new(c: &Case) -> Self {
        let ([h, g], [dk, dv]) = (c.heads, c.dims);
        let (q, k) = (c.batch * c.positions.len(), c.batch * c.keys);
        Self {
            out: vec![0.0; q * h * dv],
            sums: vec![0.0; q * h],
            dq: vec![0.0; q * h * dk],
            dk: vec![0.0; k * g * dk],
            dv: vec![0.0; k * g * dv],
        }
    }

    /// One query of one head: its output, and what it adds to the gradients.
    fn row(
        &mut self,
        c: &Case,
        (b, head, row): (usize, usize, usize),
        [q, k, v, d]: [&[f64]; 4],
        keep: impl Fn(usize) -> f64,
    ) {
        let ([h, g], [dk, dv]) = (c.heads, c.dims);
        let queries = c.positions.len();
        let position = c.positions[row] as i64;
        let first = c.window.map_or(0, |w| (position - w + 1).max(0)) as usize;
        let seen = first..position as usize + 1;
        let scale = 1.0 / (dk as f64).sqrt();
        let at = ((b * queries + row) * h + head, dk, dv);
        let kv = |key: usize| (b * c.keys + key) * g + head / (h / g);
        let q = &q[at.0 * dk..][..dk];
        let d = &d[at.0 * dv..][..dv];
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let scores: Vec<f64> = seen
            .clone()
            .map(|key| scale * dot(q, &k[kv(key) * dk..][..dk]))
            .collect();
        let largest = scores.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
        self.sums[(b * h + head) * queries + row] = (largest + sum.ln()) * std::f64::consts::LOG2_E;
        let p: Vec<f64> = scores.iter().map(|s| (s - largest).exp() / sum).collect();
        let mut along = 0.0;
        for (key, p) in seen.clone().zip(&p) {
            let value = &v[kv(key) * dv..][..dv];
            along += p * keep(key) * dot(d, value);
            for j in 0..dv {
                self.out[at.0 * dv + j] += p * keep(key) * value[j];
                self.dv[kv(key) * dv + j] += p * keep(key) * d[j];
            }
        }
        for (key, p) in seen.zip(&p) {
            let dp = keep(key) * dot(d, &v[kv(key) * dv..][..dv]);
            let ds = p * (dp - along) * scale;
            for j in 0..dk {
                self.dq[at.0 * dk + j] += ds * k[kv(key) * dk + j];
                self.dk[kv(key) * dk + j] += ds * q[j];
            }
        }
    }
}
