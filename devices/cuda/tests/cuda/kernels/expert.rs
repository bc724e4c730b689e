//! Routing, rows by expert, and products per expert.

use std::collections::BTreeSet;

use catalog::DType;
use catalog::model::Router;
use cuda_device::{Device, Route, Tensor};

use super::{TYPES, close, random, read, within};
use crate::emulator::{self, ORDERS};

fn words(device: &Device, buffer: &cuda_device::Buffer) -> Vec<u32> {
    let mut bytes = vec![0; buffer.bytes as usize];
    device
        .launcher
        .read(buffer.address, &mut bytes)
        .expect("reads");
    bytemuck::pod_collect_to_vec(&bytes)
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Indices in falling order of `worth`; of equals, the lower index is first.
fn best(worth: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..worth.len()).collect();
    order.sort_by(|&a, &b| worth[b].total_cmp(&worth[a]).then(a.cmp(&b)));
    order
}

/// The choice in 64 bits, best first.
fn choice(row: &[f64], k: usize, router: &Router, bias: &[f64]) -> Vec<u32> {
    let score = |x: f64| if router.sigmoid { sigmoid(x) } else { x };
    let mut worth: Vec<f64> = row.iter().zip(bias).map(|(&x, b)| score(x) + b).collect();
    let size = row.len() / router.groups as usize;
    let of_group = |group: &[f64]| {
        let order = best(group);
        let count = if router.sigmoid { 2 } else { 1 };
        order.iter().take(count).map(|&i| group[i]).sum::<f64>()
    };
    let groups: Vec<f64> = worth.chunks(size).map(of_group).collect();
    for &group in &best(&groups)[router.best_groups as usize..] {
        worth[group * size..(group + 1) * size].fill(f64::NEG_INFINITY);
    }
    best(&worth).iter().take(k).map(|&e| e as u32).collect()
}

/// Weights of chosen experts.
fn weights(row: &[f64], chosen: &[u32], router: &Router) -> Vec<f64> {
    let largest = row.iter().copied().fold(f64::MIN, f64::max);
    let score = |x: f64| match router.sigmoid {
        true => sigmoid(x),
        false => (x - largest).exp(),
    };
    let among = || chosen.iter().map(|&e| row[e as usize]);
    let sum: f64 = match (router.normalise, router.sigmoid) {
        (true, _) => among().map(score).sum(),
        (false, true) => 1.0,
        (false, false) => row.iter().map(|&x| score(x)).sum(),
    };
    among().map(|x| router.scale * score(x) / sum).collect()
}

/// A router that chooses from the best of several groups.
fn grouped(sigmoid: bool, normalise: bool, [groups, best_groups]: [u64; 2]) -> Router {
    Router {
        sigmoid,
        normalise,
        scale: 2.5,
        groups,
        best_groups,
        weighs_inputs: false,
    }
}

/// Tokens, experts, choices, and how these are made.
fn routers() -> Vec<(usize, usize, usize, Router)> {
    let mut all = Vec::new();
    for normalise in [false, true] {
        let plain = Router {
            normalise,
            ..Router::default()
        };
        let sizes = [(1, 2, 1), (50, 8, 2), (700, 40, 3), (9, 256, 8)];
        all.extend(sizes.map(|(tokens, experts, k)| (tokens, experts, k, plain)));
        for sigmoid in [false, true] {
            all.extend([
                (20, 8, 3, grouped(sigmoid, normalise, [4, 2])),
                (11, 160, 6, grouped(sigmoid, normalise, [8, 3])),
                (5, 256, 8, grouped(sigmoid, normalise, [32, 4])),
                (7, 5, 2, grouped(sigmoid, normalise, [5, 2])),
                (6, 33, 4, grouped(sigmoid, normalise, [1, 1])),
            ]);
        }
    }
    all
}

#[test]
fn routes_are_the_best_in_order() {
    for device in emulator::devices() {
        for (tokens, experts, k, router) in routers() {
            for dtype in TYPES {
                let what = format!("{k} of {experts} by {router:?}, {dtype:?}");
                let (logits, wide) = random(&device, &[tokens, experts], dtype, 1);
                let (bias, wide_bias) = random(&device, &[experts], DType::F32, 20);
                // Without sigmoids it is no rule of any model.
                let bias = router.sigmoid.then_some(&bias);
                let wide_bias = bias.map_or(vec![0.0; experts], |_| wide_bias);
                let (route, got) = device.route(&logits, k, (&router, bias)).expect("routes");
                let (mut chosen, mut want) = (Vec::new(), Vec::new());
                for row in wide.chunks(experts) {
                    let one = choice(row, k, &router, &wide_bias);
                    want.extend(weights(row, &one, &router));
                    chosen.extend(one);
                }
                assert_eq!(words(&device, &route.chosen), chosen, "{what}");
                close(&device, &format!("weights {what}"), &got, &want);
                let mut order: Vec<u32> = (0..chosen.len() as u32).collect();
                order.sort_by_key(|&i| (chosen[i as usize], i));
                assert_eq!(words(&device, &route.source), order, "{what}");
                let place = words(&device, &route.place);
                let back = (0u32..).zip(&order);
                assert!(back.clone().all(|(row, &i)| place[i as usize] == row));
                let offsets: Vec<u32> = (0..=experts as u32)
                    .map(|e| order.partition_point(|&i| chosen[i as usize] < e) as u32)
                    .collect();
                assert_eq!(words(&device, &route.offsets), offsets, "{what}");
                router_gradient(&device, (&route, &got), (&logits, &wide), &router);
            }
        }
    }
}

/// Kernels stay within their memory even if training has diverged to NaNs.
#[test]
fn logits_that_are_no_numbers_choose_some_expert() {
    for device in emulator::devices() {
        for (experts, k, router) in [
            (8, 3, grouped(true, true, [4, 2])),
            (40, 4, Router::default()),
        ] {
            let values: Vec<f32> = (0..16 * experts)
                .map(|i| if i % 3 == 0 { f32::NAN } else { (i % 7) as f32 })
                .collect();
            let host = cpu_device::Tensor::new(vec![16, experts], values, DType::F32);
            let logits = device.upload(&host).expect("memory");
            let (route, _) = device.route(&logits, k, (&router, None)).expect("routes");
            for choices in words(&device, &route.chosen).chunks(k) {
                let different: BTreeSet<_> = choices.iter().collect();
                assert_eq!(different.len(), k, "{choices:?}");
                assert!(choices.iter().all(|&choice| (choice as usize) < experts));
            }
        }
    }
}

/// The router's gradient before differences of the weights' sum, each times its own factor.
fn router_gradient(
    device: &Device,
    (route, weighed): (&Route, &Tensor),
    (logits, wide): (&Tensor, &[f64]),
    router: &Router,
) {
    let (experts, k) = (route.experts, route.top_k);
    let (d, wd) = random(device, &[route.tokens, k], DType::F32, 2);
    let got = device
        .route_backward(route, &d, (logits, weighed), router)
        .expect("runs");
    let chosen = words(device, &route.chosen);
    let mut want = Vec::new();
    for (token, row) in wide.chunks(experts).enumerate() {
        let (chosen, d) = (&chosen[token * k..][..k], &wd[token * k..][..k]);
        let sum = |row: &[f64]| -> f64 {
            let weights = weights(row, chosen, router);
            weights.iter().zip(d).map(|(w, d)| w * d).sum()
        };
        let h = 1e-5;
        want.extend((0..experts).map(|e| {
            let moved = |by: f64| {
                let mut row = row.to_vec();
                row[e] += by;
                sum(&row)
            };
            (moved(h) - moved(-h)) / (2.0 * h)
        }));
    }
    // One weight that is always 1 has no gradient: differences of nothing are rounding.
    if k == 1 && router.normalise {
        return;
    }
    let bound = if got.dtype == DType::Bf16 { 3e-3 } else { 5e-6 };
    within(device, "router's gradient", &got, &want, bound);
}

#[test]
fn rows_go_out_and_come_back() {
    for device in emulator::devices() {
        for (tokens, experts, k, columns) in [(5, 4, 2, 9), (40, 8, 3, 264)] {
            for dtype in TYPES {
                let (logits, _) = random(&device, &[tokens, experts], DType::F32, 3);
                let (route, _) = device
                    .route(&logits, k, (&Router::default(), None))
                    .expect("routes");
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
fn biases_per_expert() {
    for device in emulator::devices() {
        // Experts without rows first, between and last.
        for (sizes, columns) in [
            (vec![3u32, 0, 5], 9usize),
            (vec![0, 0, 70, 1, 0, 20, 0], 300),
            (vec![4], 8),
        ] {
            for dtype in TYPES {
                let what = format!("{sizes:?} {columns} {dtype:?}");
                let mut offsets = vec![0u32];
                let mut experts = Vec::new();
                for (e, &size) in sizes.iter().enumerate() {
                    offsets.push(offsets[e] + size);
                    experts.extend(vec![e; size as usize]);
                }
                let list = device.indices(&offsets).expect("memory");
                let (x, wx) = random(&device, &[experts.len(), columns], dtype, 12);
                let (b, wb) = random(&device, &[sizes.len(), columns], dtype, 13);
                let (dy, wd) = random(&device, &[experts.len(), columns], dtype, 14);
                let (gradient, mut db) = random(&device, &[sizes.len(), columns], DType::F32, 15);
                let mut want = Vec::new();
                for (row, &e) in experts.iter().enumerate() {
                    for j in 0..columns {
                        want.push(wx[row * columns + j] + wb[e * columns + j]);
                        db[e * columns + j] += wd[row * columns + j];
                    }
                }
                let out = device.expert_bias(&list, &x, &b).expect("runs");
                close(&device, &format!("rows {what}"), &out, &want);
                device
                    .add_expert_bias_gradient(&list, &gradient, &dy)
                    .expect("runs");
                within(&device, &format!("gradient {what}"), &gradient, &db, 2e-6);
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
