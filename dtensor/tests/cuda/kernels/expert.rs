//! Routing, rows by expert, and products per expert.

use dtensor::cuda::{Device, Route, Tensor};
use spec::DType;

use super::{TYPES, close, random, read, within};
use crate::emulator::{self, ORDERS};

fn words(device: &Device, buffer: &dtensor::cuda::Buffer) -> Vec<u32> {
    let mut bytes = vec![0; buffer.bytes as usize];
    device
        .launcher
        .read(buffer.address, &mut bytes)
        .expect("reads");
    bytemuck::pod_collect_to_vec(&bytes)
}

/// The choice in 64 bits: chosen experts and their probabilities, best first.
fn choice(row: &[f64], k: usize, normalise: bool) -> (Vec<u32>, Vec<f64>) {
    let mut order: Vec<u32> = (0..row.len() as u32).collect();
    order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b)));
    order.truncate(k);
    let largest = row.iter().copied().fold(f64::MIN, f64::max);
    let e = |x: f64| (x - largest).exp();
    let sum: f64 = if normalise {
        order.iter().map(|&i| e(row[i as usize])).sum()
    } else {
        row.iter().map(|&x| e(x)).sum()
    };
    let p = order.iter().map(|&i| e(row[i as usize]) / sum).collect();
    (order, p)
}

#[test]
fn routes_are_the_largest_in_order() {
    for device in emulator::devices() {
        for (tokens, experts, k) in [(1, 2, 1), (50, 8, 2), (700, 40, 3), (9, 256, 8)] {
            for dtype in TYPES {
                for normalise in [false, true] {
                    let (logits, wide) = random(&device, &[tokens, experts], dtype, 1);
                    let (route, chances) = device.route(&logits, k, normalise).expect("routes");
                    let (mut chosen, mut p) = (Vec::new(), Vec::new());
                    for row in wide.chunks(experts) {
                        let one = choice(row, k, normalise);
                        chosen.extend(one.0);
                        p.extend(one.1);
                    }
                    assert_eq!(words(&device, &route.chosen), chosen);
                    close(&device, "probabilities", &chances, &p);
                    let mut order: Vec<u32> = (0..chosen.len() as u32).collect();
                    order.sort_by_key(|&i| (chosen[i as usize], i));
                    assert_eq!(words(&device, &route.source), order);
                    let place = words(&device, &route.place);
                    assert!(
                        (0u32..)
                            .zip(&order)
                            .all(|(row, &i)| place[i as usize] == row)
                    );
                    let offsets: Vec<u32> = (0..=experts as u32)
                        .map(|e| order.partition_point(|&i| chosen[i as usize] < e) as u32)
                        .collect();
                    assert_eq!(words(&device, &route.offsets), offsets);
                    router_gradient(&device, (&route, &chances), (&logits, &wide), normalise);
                }
            }
        }
    }
}

/// The router's gradient before differences of the probabilities' weighted sum.
fn router_gradient(
    device: &Device,
    (route, chances): (&Route, &Tensor),
    (logits, wide): (&dtensor::cuda::Tensor, &[f64]),
    normalise: bool,
) {
    let (experts, k) = (route.experts, route.top_k);
    let (d, wd) = random(device, &[route.tokens, k], DType::F32, 2);
    let got = device
        .route_backward(route, &d, (logits, chances), normalise)
        .expect("runs");
    let mut want = Vec::new();
    for (token, row) in wide.chunks(experts).enumerate() {
        let (chosen, p) = choice(row, k, normalise);
        let d = &wd[token * k..(token + 1) * k];
        let along: f64 = p.iter().zip(d).map(|(p, d)| p * d).sum();
        let (_, all) = choice(row, experts, false);
        let (order, _) = choice(row, experts, false);
        let mut line = vec![0.0; experts];
        if !normalise {
            for (&e, p) in order.iter().zip(&all) {
                line[e as usize] = -p * along;
            }
        }
        for ((&e, p), d) in chosen.iter().zip(&p).zip(d) {
            line[e as usize] += p * if normalise { d - along } else { *d };
        }
        want.extend(line);
    }
    let bound = if got.dtype == DType::Bf16 { 3e-3 } else { 5e-6 };
    if k > 1 || !normalise {
        within(device, "router's gradient", &got, &want, bound);
    }
}

#[test]
fn rows_go_out_and_come_back() {
    for device in emulator::devices() {
        for (tokens, experts, k, columns) in [(5, 4, 2, 9), (40, 8, 3, 264)] {
            for dtype in TYPES {
                let (logits, _) = random(&device, &[tokens, experts], DType::F32, 3);
                let (route, _) = device.route(&logits, k, true).expect("routes");
                let source = words(&device, &route.source);
                let (x, wide) = random(&device, &[tokens, columns], dtype, 4);
                let rows = device.permute(&route, &x).expect("runs");
                let want: Vec<f64> = source
                    .iter()
                    .flat_map(|&s| wide[s as usize / k * columns..][..columns].to_vec())
                    .collect();
                close(&device, "permute", &rows, &want);
                let (y, wy) = random(&device, &[tokens * k, columns], dtype, 5);
                let (p, wp) = random(&device, &[tokens, k], DType::F32, 6);
                for weighted in [false, true] {
                    let out = device
                        .combine(&route, &y, weighted.then_some(&p), vec![tokens, columns])
                        .expect("runs");
                    let mut want = vec![0.0; tokens * columns];
                    for (row, &s) in source.iter().enumerate() {
                        let factor = if weighted { wp[s as usize] } else { 1.0 };
                        for j in 0..columns {
                            want[s as usize / k * columns + j] += factor * wy[row * columns + j];
                        }
                    }
                    close(&device, "combine", &out, &want);
                }
                let (d, wd) = random(&device, &[tokens, columns], dtype, 7);
                let [d_rows, d_p] = device.combine_backward(&route, &d, &y, &p).expect("runs");
                let mut want = (Vec::new(), vec![0.0; tokens * k]);
                for (row, &s) in source.iter().enumerate() {
                    let d = &wd[s as usize / k * columns..][..columns];
                    want.0.extend(d.iter().map(|d| d * wp[s as usize]));
                    let y = &wy[row * columns..][..columns];
                    want.1[s as usize] = d.iter().zip(y).map(|(a, b)| a * b).sum();
                }
                close(&device, "rows' gradient", &d_rows, &want.0);
                within(&device, "probabilities' gradient", &d_p, &want.1, 5e-6);
            }
        }
    }
}

#[test]
fn products_per_expert() {
    if emulator::device().is_none() {
        return;
    }
    // Group sizes: an empty one, ones that end inside a tile, one longer than a tile.
    for (sizes, n, k) in [
        (vec![3u32, 0, 5], 9usize, 7usize),
        (vec![131, 1, 60], 40, 72),
        (vec![0, 20], 136, 264),
    ] {
        for (dtype, order) in ORDERS.flat_map(|o| TYPES.map(|t| (t, o))) {
            let device = emulator::device_in(order).expect("there is a compiler");
            let experts = sizes.len();
            let mut offsets = vec![0u32];
            for size in &sizes {
                offsets.push(offsets[offsets.len() - 1] + size);
            }
            let rows = offsets[experts] as usize;
            let list = device.indices(&offsets).expect("memory");
            let (x, wx) = random(&device, &[rows, k], dtype, 8);
            let (w, ww) = random(&device, &[experts, n, k], dtype, 9);
            let (dy, wd) = random(&device, &[rows, n], dtype, 10);
            let (gradient, mut dw) = random(&device, &[experts, n, k], DType::F32, 11);
            let (mut y, mut dx) = (vec![0.0; rows * n], vec![0.0; rows * k]);
            for e in 0..experts {
                for r in offsets[e] as usize..offsets[e + 1] as usize {
                    for i in 0..n {
                        for j in 0..k {
                            let at = (e * n + i) * k + j;
                            y[r * n + i] += wx[r * k + j] * ww[at];
                            dx[r * k + j] += wd[r * n + i] * ww[at];
                            dw[at] += wd[r * n + i] * wx[r * k + j];
                        }
                    }
                }
            }
            let what = format!("{sizes:?} {n} {k} {dtype:?} order {order}");
            let got = device.grouped(&list, &x, &w, false).expect("runs");
            close(&device, &format!("forward {what}"), &got, &y);
            let got = device.grouped(&list, &dy, &w, true).expect("runs");
            close(&device, &format!("backward {what}"), &got, &dx);
            device
                .add_grouped_gradient(&list, &gradient, &dy, &x)
                .expect("runs");
            within(&device, &format!("weight {what}"), &gradient, &dw, 2e-6);
            assert_eq!(read(&device, &gradient).len(), dw.len());
        }
    }
}
