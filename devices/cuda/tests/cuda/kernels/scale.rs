//! Scaling and bounding, and columns that heads share.

use super::{TYPES, close, random, within};
use crate::emulator;
use catalog::DType;

const SHAPES: [[usize; 2]; 4] = [[1, 1], [3, 7], [5, 8], [33, 267]];

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// A function of two numbers, and its derivatives by differences.
fn gradient(f: impl Fn(f64, f64) -> f64, x: f64, y: f64) -> [f64; 2] {
    let h = 1e-5;
    [
        (f(x + h, y) - f(x - h, y)) / (2.0 * h),
        (f(x, y + h) - f(x, y - h)) / (2.0 * h),
    ]
}

#[test]
fn factors_and_bounds() {
    for device in emulator::devices() {
        for shape in SHAPES {
            for dtype in TYPES {
                let what = format!("{shape:?} {dtype:?}");
                let (x, wide) = random(&device, &shape, dtype, 1);
                let (dy, wide_dy) = random(&device, &shape, dtype, 2);
                let scaled = device.scale(&x, 2.75).expect("runs");
                let want: Vec<f64> = wide.iter().map(|x| x * 2.75).collect();
                close(&device, &format!("scale {what}"), &scaled, &want);
                // Well inside of the bound, and beyond it.
                for bound in [0.5, 30.0] {
                    let cap = |x: f64, _: f64| bound * (x / bound).tanh();
                    let out = device.cap(&x, bound as f32).expect("runs");
                    let want: Vec<f64> = wide.iter().map(|&x| cap(x, 0.0)).collect();
                    close(&device, &format!("cap {bound} {what}"), &out, &want);
                    let dx = device.cap_backward(&dy, &x, bound as f32).expect("runs");
                    let pairs = wide.iter().zip(&wide_dy);
                    let want: Vec<f64> =
                        pairs.map(|(&x, d)| d * gradient(cap, x, 0.0)[0]).collect();
                    close(
                        &device,
                        &format!("cap's gradient {bound} {what}"),
                        &dx,
                        &want,
                    );
                }
            }
        }
    }
}

#[test]
fn bounded_gates() {
    for device in emulator::devices() {
        for shape in SHAPES {
            for dtype in TYPES {
                // A bound that some of both exceed, and one that nothing does.
                for limit in [0.7, 50.0] {
                    let what = format!("{limit} {shape:?} {dtype:?}");
                    let (g, wg) = random(&device, &shape, dtype, 3);
                    let (u, wu) = random(&device, &shape, dtype, 4);
                    let (dy, wd) = random(&device, &shape, dtype, 5);
                    let f = |g: f64, u: f64| {
                        let g = g.min(limit);
                        g * sigmoid(1.702 * g) * (u.clamp(-limit, limit) + 1.0)
                    };
                    let out = device.bounded_glu(&g, &u, limit as f32).expect("runs");
                    let pairs = || wg.iter().zip(&wu);
                    let want: Vec<f64> = pairs().map(|(&g, &u)| f(g, u)).collect();
                    close(&device, &format!("forward {what}"), &out, &want);
                    let got = device
                        .bounded_glu_backward(&dy, &g, &u, limit as f32)
                        .expect("runs");
                    for (side, got) in got.iter().enumerate() {
                        let slopes = pairs().map(|(&g, &u)| gradient(f, g, u)[side]);
                        let want: Vec<f64> = slopes.zip(&wd).map(|(s, d)| s * d).collect();
                        close(&device, &format!("gradient {side} {what}"), got, &want);
                    }
                }
            }
        }
    }
}

#[test]
fn rows_times_sigmoids() {
    for device in emulator::devices() {
        for shape @ [rows, columns] in [[1, 1], [3, 7], [5, 2056], [33, 267]] {
            for dtype in TYPES {
                let what = format!("{shape:?} {dtype:?}");
                let (x, wx) = random(&device, &shape, dtype, 6);
                let (g, wg) = random(&device, &[rows, 1], dtype, 7);
                let (dy, wd) = random(&device, &shape, dtype, 8);
                let out = device.gate_rows(&x, &g).expect("runs");
                let factor = |i: usize| sigmoid(wg[i / columns]);
                let times = |x: &[f64]| -> Vec<f64> {
                    x.iter().enumerate().map(|(i, x)| x * factor(i)).collect()
                };
                close(&device, &format!("rows {what}"), &out, &times(&wx));
                let [dx, d_gate] = device.gate_rows_backward(&dy, &x, &g).expect("runs");
                close(&device, &format!("gradient {what}"), &dx, &times(&wd));
                let want: Vec<f64> = (0..rows)
                    .map(|r| {
                        let at = r * columns..(r + 1) * columns;
                        let along: f64 =
                            wx[at.clone()].iter().zip(&wd[at]).map(|(x, d)| x * d).sum();
                        let s = sigmoid(wg[r]);
                        along * s * (1.0 - s)
                    })
                    .collect();
                let bound = if dtype == DType::Bf16 { 3e-3 } else { 5e-6 };
                within(&device, &format!("numbers {what}"), &d_gate, &want, bound);
            }
        }
    }
}

#[test]
fn columns_that_heads_share() {
    for device in emulator::devices() {
        for (rows, heads, own, shared) in [(1, 1, 1, 1), (5, 3, 8, 4), (4, 8, 67, 33)] {
            for dtype in TYPES {
                let what = format!("{rows} {heads} {own} {shared} {dtype:?}");
                let (x, wx) = random(&device, &[rows, heads * own], dtype, 9);
                let (more, wm) = random(&device, &[rows, shared], dtype, 10);
                let out = device.join(&x, &more, own).expect("runs");
                let width = own + shared;
                let mut want = Vec::new();
                for row in 0..rows {
                    for head in 0..heads {
                        want.extend_from_slice(&wx[(row * heads + head) * own..][..own]);
                        want.extend_from_slice(&wm[row * shared..][..shared]);
                    }
                }
                close(&device, &format!("join {what}"), &out, &want);
                let (dy, wd) = random(&device, &[rows, heads * width], dtype, 11);
                let [dx, d_more] = device.join_backward(&dy, own, shared).expect("runs");
                let (mut want, mut sums) = (Vec::new(), vec![0.0; rows * shared]);
                for (line, head) in wd.chunks(width).enumerate() {
                    want.extend_from_slice(&head[..own]);
                    for (j, d) in head[own..].iter().enumerate() {
                        sums[line / heads * shared + j] += d;
                    }
                }
                close(&device, &format!("own {what}"), &dx, &want);
                close(&device, &format!("shared {what}"), &d_more, &sums);
            }
        }
    }
}
