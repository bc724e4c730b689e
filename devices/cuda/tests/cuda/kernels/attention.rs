//! Fused core attention against scores, softmax and context computed in 64 bits.

use catalog::DType;
use cuda_device::AttentionCall;
use cuda_device::launcher::{AttentionArgument, AttentionBy, StreamArgument, threshold};
use dtensor::CausalAttention;
use dtensor::philox::Stream;

use super::{random, upload, within};
use crate::emulator;

struct Case {
    batch: usize,
    positions: Vec<u32>,
    keys: usize,
    heads: [usize; 2],
    dims: [usize; 2],
    window: Option<i64>,
    dropout: f64,
    scores: Scores,
}

/// What modifies the scores in addition to scaling.
#[derive(Clone, Copy, Default)]
struct Scores {
    cap: Option<f64>,
    /// Whether scores fall with distance, by a slope for each head (ALiBi).
    slopes: bool,
    sinks: bool,
}

impl Scores {
    fn slope(self, head: usize) -> f64 {
        if self.slopes {
            0.3 / (head + 1) as f64
        } else {
            0.0
        }
    }
}

impl Case {
    /// The attention as a library would run it; `None` if none supports it.
    fn library(&self, dtype: DType) -> Option<CausalAttention> {
        let Scores { cap, slopes, sinks } = self.scores;
        let plain = cap.is_none() && !slopes && !sinks && self.dropout == 0.0;
        let whole = self.positions == all(self.keys as u32);
        let fits = self.dims.iter().all(|dim| dim.is_multiple_of(8));
        (plain && whole && fits && dtype == DType::Bf16).then_some(CausalAttention {
            batch: self.batch as i64,
            length: self.keys as i64,
            heads: self.heads.map(|n| n as i64),
            dims: self.dims.map(|n| n as i64),
            window: self.window,
        })
    }
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
        scores: Scores::default(),
    };
    let with = |scores, case: Case| Case { scores, ..case };
    let (cap, slopes, sinks) = (Some(0.7), true, true);
    let quarters = |n: u32| (0..n).chain(3 * n..4 * n).collect();
    let none = Scores::default();
    vec![
        with(
            Scores { cap, ..none },
            case(all(70), 70, [2, 1], [24, 16], None, 0.0),
        ),
        with(
            Scores { slopes, ..none },
            case(all(97), 97, [3, 1], [16, 16], None, 0.1),
        ),
        with(
            Scores { sinks, ..none },
            case(all(140), 140, [4, 2], [16, 24], Some(12), 0.0),
        ),
        with(
            Scores { cap, slopes, sinks },
            case(quarters(20), 80, [2, 2], [8, 40], Some(33), 0.2),
        ),
        with(
            Scores { sinks, ..none },
            case(all(1), 1, [1, 1], [8, 8], None, 0.0),
        ),
        // The latent attention of DeepSeek: keys longer than values.
        case(all(66), 66, [1, 1], [192, 128], None, 0.0),
        case(all(1), 1, [1, 1], [8, 8], None, 0.0),
        case(all(70), 70, [2, 1], [16, 16], None, 0.0),
        case(all(129), 129, [2, 2], [64, 64], None, 0.0),
        // Long enough that tiles of keys replace each other in shared memory.
        case(all(200), 200, [1, 1], [16, 16], None, 0.0),
        case(all(210), 210, [1, 1], [8, 16], Some(150), 0.0),
        case(all(100), 100, [4, 2], [24, 10], Some(17), 0.0),
        case(all(65), 65, [2, 1], [32, 48], None, 0.25),
        // The first and last quarters of a sequence: a rank of two under zig-zag balance.
        case(quarters(32), 128, [2, 2], [16, 16], None, 0.0),
        case(quarters(20), 80, [2, 1], [16, 16], Some(33), 0.1),
    ]
}

#[test]
fn attention_forward_and_backward() {
    if emulator::device().is_none() {
        return;
    }
    for (index, c) in cases().into_iter().enumerate() {
        for (dtype, order, by) in [
            (DType::F32, 0, AttentionBy::Own),
            (DType::Bf16, 0, AttentionBy::Own),
            (DType::Bf16, 3, AttentionBy::Own),
            (DType::Bf16, 0, AttentionBy::Library),
        ] {
            let library = c.library(dtype);
            let device = match by {
                AttentionBy::Own => emulator::device_in(order),
                AttentionBy::Library if library.is_none() => continue,
                AttentionBy::Library => emulator::device_with_library(),
            };
            let device = device.expect("there is a compiler").with_attention(by);
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
            let slopes: Vec<f32> = (0..h).map(|head| c.scores.slope(head) as f32).collect();
            let (slopes, _) = upload(&device, &[h], slopes, DType::F32);
            let (sinks, wide_sinks) = random(&device, &[h], dtype, 5);
            let (d_sinks, before) = random(&device, &[h], DType::F32, 6);
            let scale = 1.0 / (dk as f64).sqrt();
            let call = AttentionCall {
                q: &q,
                k: &k,
                v: &v,
                positions: &positions,
                sinks: c.scores.sinks.then(|| sinks.clone()),
                sizes: AttentionArgument {
                    lengths: [queries as i64, keys as i64],
                    heads: [h as i64, g as i64],
                    dims: [dk as i64, dv as i64],
                    window: c.window.unwrap_or(i64::MAX / 4),
                    scale: scale as f32,
                    threshold: threshold(c.dropout),
                    keep: (1.0 / (1.0 - c.dropout)) as f32,
                    cap: c.scores.cap.unwrap_or(0.0) as f32,
                    stream: StreamArgument::new(stream, step.address),
                    first_sequence: 3,
                    first_head: 2,
                    global_heads: 2 + h as i64,
                    global_queries: keys as i64,
                    slopes: if c.scores.slopes { slopes.address() } else { 0 },
                    sinks: 0,
                },
                library,
            };
            let (out, sums) = device.attention(&call).expect("runs");
            let got = device
                .attention_backward(
                    &call,
                    &d,
                    &out,
                    &sums,
                    call.sinks.as_ref().map(|_| &d_sinks),
                )
                .expect("runs");
            let mut want = Oracle::new(&c, wide_sinks, before);
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
            let what = |part: &str| format!("case {index} {dtype:?} {by:?} order {order} {part}");
            // In bf16 probabilities and their gradients are rounded before they are multiplied.
            let bound = if dtype == DType::Bf16 { 6e-3 } else { 5e-6 };
            within(&device, &what("output"), &out, &want.out, bound);
            within(&device, &what("sums"), &sums, &want.sums, 1e-5);
            let [dq, dk, dv] = &got;
            let bound = if dtype == DType::Bf16 { 1e-2 } else { 1e-5 };
            // With a single key and no sink, the gradient is zero.
            if keys > 1 || c.scores.sinks {
                within(&device, &what("queries"), dq, &want.dq, bound);
                within(&device, &what("keys"), dk, &want.dk, bound);
            }
            within(&device, &what("values"), dv, &want.dv, bound);
            within(&device, &what("sinks"), &d_sinks, &want.d_sinks, bound);
        }
    }
}

struct Oracle {
    sinks: Vec<f64>,
    d_sinks: Vec<f64>,
    out: Vec<f64>,
    sums: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

impl Oracle {
    fn new(c: &Case, sinks: Vec<f64>, d_sinks: Vec<f64>) -> Self {
        let ([h, g], [dk, dv]) = (c.heads, c.dims);
        let (q, k) = (c.batch * c.positions.len(), c.batch * c.keys);
        Self {
            sinks,
            d_sinks,
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
        let products: Vec<f64> = seen
            .clone()
            .map(|key| scale * dot(q, &k[kv(key) * dk..][..dk]))
            .collect();
        let bent = |x: f64| c.scores.cap.map_or(x, |cap| cap * (x / cap).tanh());
        let slope = c.scores.slope(head);
        let pairs = seen.clone().zip(&products);
        let scores: Vec<f64> = pairs
            .map(|(key, &x)| bent(x) - slope * (position - key as i64) as f64)
            .collect();
        let sink = match c.scores.sinks {
            true => self.sinks[head],
            false => f64::NEG_INFINITY,
        };
        let largest = scores.iter().copied().fold(sink, f64::max);
        let alone = (sink - largest).exp();
        let sum = alone + scores.iter().map(|s| (s - largest).exp()).sum::<f64>();
        self.sums[(b * h + head) * queries + row] = largest + sum.ln();
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
        self.d_sinks[head] -= alone / sum * along;
        for ((key, p), x) in seen.zip(&p).zip(&products) {
            let dp = keep(key) * dot(d, &v[kv(key) * dv..][..dv]);
            let growth = c
                .scores
                .cap
                .map_or(1.0, |cap| 1.0 - (x / cap).tanh().powi(2));
            let ds = p * (dp - along) * scale * growth;
            for j in 0..dk {
                self.dq[at.0 * dk + j] += ds * k[kv(key) * dk + j];
                self.dk[kv(key) * dk + j] += ds * q[j];
            }
        }
    }
}
