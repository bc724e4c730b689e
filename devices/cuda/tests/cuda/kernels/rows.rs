//! Norms, sums over rows, embeddings and the loss.

use catalog::DType;
use catalog::model::NormKind;
use cuda_device::{Losses, NormGradient, RowOrder};

use super::{TYPES, close, random, read, within};
use crate::emulator;

#[test]
fn norms_and_their_gradients() {
    for device in emulator::devices() {
        // The last is wider than one element group of the most threads.
        for [rows, columns] in [[1, 1], [7, 13], [9, 256], [20, 771], [3, 8200]] {
            for (kind, from_one) in [
                (NormKind::LayerNorm, false),
                (NormKind::RmsNorm, false),
                (NormKind::RmsNorm, true),
            ] {
                for dtype in TYPES {
                    let what = format!("{kind:?} {from_one} {rows} × {columns} {dtype:?}");
                    let n = columns as f64;
                    let layer = kind == NormKind::LayerNorm;
                    let (x, wx) = random(&device, &[rows, columns], dtype, 1);
                    let (w, ww) = random(&device, &[columns], dtype, 2);
                    let (b, wb) = random(&device, &[columns], dtype, 3);
                    let (dy, wd) = random(&device, &[rows, columns], dtype, 4);
                    let bias = layer.then_some(&b);
                    let epsilon = 1e-5;
                    let rule = (kind, epsilon, from_one);
                    let (y, statistics) = device.norm(rule, &x, &w, bias).expect("runs");
                    let ww: Vec<f64> = ww.iter().map(|w| w + f64::from(from_one)).collect();
                    let (mut want, mut dx) = (Vec::new(), Vec::new());
                    let (mut dw, mut db) = (vec![1.0; columns], vec![1.0; columns]);
                    for r in 0..rows {
                        let row = &wx[r * columns..][..columns];
                        let d = &wd[r * columns..][..columns];
                        let mean = if layer {
                            row.iter().sum::<f64>() / n
                        } else {
                            0.0
                        };
                        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
                        let inverse = 1.0 / (variance + epsilon).sqrt();
                        let hat: Vec<f64> = row.iter().map(|x| (x - mean) * inverse).collect();
                        let g: Vec<f64> = d.iter().zip(&ww).map(|(d, w)| d * w).collect();
                        let along = g.iter().zip(&hat).map(|(g, h)| g * h).sum::<f64>() / n;
                        let average = if layer {
                            g.iter().sum::<f64>() / n
                        } else {
                            0.0
                        };
                        for j in 0..columns {
                            want.push(hat[j] * ww[j] + if layer { wb[j] } else { 0.0 });
                            dx.push(inverse * (g[j] - average - hat[j] * along));
                            dw[j] += d[j] * hat[j];
                            db[j] += d[j];
                        }
                    }
                    close(&device, &format!("forward {what}"), &y, &want);
                    let ones =
                        || super::upload(&device, &[columns], vec![1.0; columns], DType::F32).0;
                    let (d_weight, d_bias) = (ones(), ones());
                    let call = NormGradient {
                        kind,
                        from_one,
                        dy: &dy,
                        x: &x,
                        weight: &w,
                        statistics: &statistics,
                        d_weight: &d_weight,
                        d_bias: layer.then_some(&d_bias),
                    };
                    let got = device.norm_backward(&call, true).expect("runs");
                    let got = got.expect("was asked for");
                    // One element has no deviation: differences of nothing are rounding.
                    if columns > 1 {
                        let bound = if dtype == DType::Bf16 { 3e-3 } else { 5e-6 };
                        within(&device, &format!("backward {what}"), &got, &dx, bound);
                    }
                    within(&device, &format!("weight {what}"), &d_weight, &dw, 5e-6);
                    if layer {
                        within(&device, &format!("bias {what}"), &d_bias, &db, 5e-6);
                    }
                    assert!(device.norm_backward(&call, false).expect("runs").is_none());
                    let twice: Vec<f64> = dw.iter().map(|x| 2.0 * x - 1.0).collect();
                    within(
                        &device,
                        &format!("weight twice {what}"),
                        &d_weight,
                        &twice,
                        5e-6,
                    );
                }
            }
        }
    }
}

#[test]
fn column_sums() {
    for device in emulator::devices() {
        for [rows, columns] in [[1, 1], [5, 9], [70, 300], [513, 40]] {
            for dtype in TYPES {
                let (x, wide) = random(&device, &[rows, columns], dtype, 5);
                let (gradient, before) = random(&device, &[columns], DType::F32, 6);
                device.add_column_sum(&gradient, &x).expect("runs");
                let want: Vec<f64> = (0..columns)
                    .map(|j| before[j] + (0..rows).map(|r| wide[r * columns + j]).sum::<f64>())
                    .collect();
                within(
                    &device,
                    &format!("columns {rows} {columns}"),
                    &gradient,
                    &want,
                    5e-6,
                );
            }
        }
    }
}

#[test]
fn embeddings_and_their_gradients() {
    for device in emulator::devices() {
        for columns in [1, 24, 301] {
            for dtype in TYPES {
                let (table, wide) = random(&device, &[6, columns], dtype, 11);
                // Rows 10 to 15 of the whole; the others are on other ranks.
                let ids: Vec<u32> = vec![10, 15, 3, 12, 12, 16, 10, 12];
                let list = device.indices(&ids).expect("memory");
                let out = device
                    .embedding(&list, &table, 10, vec![2, 4, columns])
                    .expect("runs");
                let here = |id: u32| (10..16).contains(&id).then(|| (id - 10) as usize);
                let want: Vec<f64> = (0..ids.len() * columns)
                    .map(|i| {
                        here(ids[i / columns]).map_or(0.0, |r| wide[r * columns + i % columns])
                    })
                    .collect();
                close(&device, "embedding", &out, &want);
                let (dy, wd) = random(&device, &[8, columns], dtype, 12);
                let (gradient, mut want) = random(&device, &[6, columns], DType::F32, 13);
                // An order serves one batch of tokens after the other.
                let others = [15, 10, 10, 3, 16, 11, 15, 12];
                let order = RowOrder::new(&device, &others, 10..16).expect("memory");
                order.update(&device, &ids).expect("writes");
                device
                    .add_embedding_gradient(&gradient, &dy, &order)
                    .expect("runs");
                for (i, d) in wd.iter().enumerate() {
                    if let Some(r) = here(ids[i / columns]) {
                        want[r * columns + i % columns] += d;
                    }
                }
                within(&device, "embedding's gradient", &gradient, &want, 2e-6);
            }
        }
    }
}

#[test]
fn losses_whole_and_over_shards() {
    for device in emulator::devices() {
        for [rows, columns] in [[1, 2], [5, 37], [3, 1000], [2, 9001]] {
            for dtype in TYPES {
                let what = format!("{rows} × {columns} {dtype:?}");
                let (logits, wide) = random(&device, &[rows, columns], dtype, 14);
                // One label is on another rank.
                let labels: Vec<u32> = (0..rows as u32)
                    .map(|r| 100 + (r * 13) % columns as u32)
                    .collect();
                let list = device.indices(&labels).expect("memory");
                let call = Losses {
                    labels: &list,
                    first: 100,
                    scale: 0.25,
                };
                let sums = device.loss_sums(&logits, &call).expect("runs");
                let mut want = [Vec::new(), Vec::new(), Vec::new()];
                let (mut losses, mut gradient) = (Vec::new(), Vec::new());
                for r in 0..rows {
                    let row = &wide[r * columns..][..columns];
                    let largest = row.iter().copied().fold(f64::MIN, f64::max);
                    let sum: f64 = row.iter().map(|x| (x - largest).exp()).sum();
                    let target = row[labels[r] as usize - 100];
                    want[0].push(largest);
                    want[1].push(sum);
                    want[2].push(target);
                    losses.push(largest + sum.ln() - target);
                    for (j, x) in row.iter().enumerate() {
                        let hit = f64::from(u8::from(j == labels[r] as usize - 100));
                        gradient.push(0.25 * ((x - largest).exp() / sum - hit));
                    }
                }
                close(&device, &format!("sums {what}"), &sums, &want.concat());
                let copy = device.cast(&logits, dtype).expect("copies");
                let got = device.loss(&copy, &call, Some(&sums)).expect("runs");
                within(
                    &device,
                    &format!("loss by sums {what}"),
                    &got,
                    &losses,
                    5e-6,
                );
                let given = read(&device, &copy);
                let got = device.loss(&logits, &call, None).expect("runs");
                within(&device, &format!("loss {what}"), &got, &losses, 5e-6);
                let bound = if dtype == DType::Bf16 { 3e-3 } else { 5e-6 };
                within(
                    &device,
                    &format!("gradient {what}"),
                    &logits,
                    &gradient,
                    bound,
                );
                assert_eq!(given, read(&device, &logits), "{what}");
            }
        }
    }
}
