//! Operators of one pass.

use catalog::DType;
use catalog::model::Activation;
use cuda_device::launcher::{Place, StreamArgument, TurningArgument, threshold};
use dtensor::Nonlinearity;
use dtensor::philox::Stream;

use super::{TYPES, close, random, read, upload};
use crate::emulator;

const SHAPES: [[usize; 2]; 5] = [[1, 1], [3, 7], [5, 8], [4, 40], [33, 67]];

/// A nonlinearity and its derivative in 64 bits.
pub(super) fn oracle(f: Nonlinearity, x: f64) -> [f64; 2] {
    let value = |x: f64| match f.function {
        Activation::Gelu if f.tanh => {
            0.5 * x
                * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
        }
        Activation::Gelu => 0.5 * x * (1.0 + libm_erf(x / std::f64::consts::SQRT_2)),
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Relu => x.max(0.0),
        Activation::Relu2 => x.max(0.0).powi(2),
    };
    let h = 1e-5;
    [value(x), (value(x + h) - value(x - h)) / (2.0 * h)]
}

/// erf by its series, which converges everywhere.
fn libm_erf(x: f64) -> f64 {
    let mut term = x;
    let mut sum = x;
    for n in 1..200 {
        let n = f64::from(n);
        term *= -x * x / n;
        sum += term / (2.0 * n + 1.0);
    }
    (2.0 / std::f64::consts::PI.sqrt() * sum).clamp(-1.0, 1.0)
}

const FUNCTIONS: [(Activation, bool); 5] = [
    (Activation::Gelu, true),
    (Activation::Gelu, false),
    (Activation::Silu, false),
    (Activation::Relu, false),
    (Activation::Relu2, false),
];

#[test]
fn additions_casts_and_biases() {
    for device in emulator::devices() {
        for shape @ [rows, columns] in SHAPES {
            for dtype in TYPES {
                let (a, wide_a) = random(&device, &shape, dtype, 1);
                let (b, wide_b) = random(&device, &shape, dtype, 2);
                let what = format!("{shape:?} {dtype:?}");
                let sum = device.add(&a, &b).expect("adds");
                let want: Vec<f64> = wide_a.iter().zip(&wide_b).map(|(a, b)| a + b).collect();
                close(&device, &format!("add {what}"), &sum, &want);
                for to in TYPES {
                    let cast = device.cast(&a, to).expect("casts");
                    close(&device, &format!("cast {what} {to:?}"), &cast, &wide_a);
                }
                let (row, wide_row) = random(&device, &[columns], dtype, 3);
                let biased = device.bias(&a, &row, None).expect("adds");
                let want: Vec<f64> = (0..rows * columns)
                    .map(|i| wide_a[i] + wide_row[i % columns])
                    .collect();
                close(&device, &format!("bias {what}"), &biased, &want);
                let (table, wide_table) = random(&device, &[9, columns], dtype, 4);
                let sequence = rows.min(3);
                let list: Vec<u32> = (0..sequence as u32).map(|i| 8 - 2 * i).collect();
                let positions = device.indices(&list).expect("memory");
                let placed = device
                    .bias(&a, &table, Some((&positions, sequence)))
                    .expect("adds");
                let want: Vec<f64> = (0..rows * columns)
                    .map(|i| {
                        let at = list[i / columns % sequence] as usize;
                        wide_a[i] + wide_table[at * columns + i % columns]
                    })
                    .collect();
                close(&device, &format!("positions {what}"), &placed, &want);
            }
        }
    }
}

#[test]
fn nonlinearities_and_gates() {
    for device in emulator::devices() {
        for (function, tanh) in FUNCTIONS {
            let f = Nonlinearity { function, tanh };
            for shape @ [rows, columns] in SHAPES {
                for dtype in TYPES {
                    let what = format!("{function:?} {tanh} {shape:?} {dtype:?}");
                    let (x, wide) = random(&device, &shape, dtype, 5);
                    let (dy, wide_dy) = random(&device, &shape, dtype, 6);
                    let (up, wide_up) = random(&device, &shape, dtype, 7);
                    let value: Vec<[f64; 2]> = wide.iter().map(|&x| oracle(f, x)).collect();
                    let y = device.activation(f, &x).expect("runs");
                    let want: Vec<f64> = value.iter().map(|v| v[0]).collect();
                    close(&device, &format!("forward {what}"), &y, &want);
                    let dx = device.activation_backward(f, &dy, &x).expect("runs");
                    let want: Vec<f64> =
                        value.iter().zip(&wide_dy).map(|(v, d)| v[1] * d).collect();
                    close(&device, &format!("backward {what}"), &dx, &want);
                    let gated = device.gated(f, &x, Some(&up)).expect("runs");
                    let want: Vec<f64> =
                        value.iter().zip(&wide_up).map(|(v, u)| v[0] * u).collect();
                    close(&device, &format!("gated {what}"), &gated, &want);
                    let (d_gate, d_up) =
                        device.gated_backward(f, &dy, &x, Some(&up)).expect("runs");
                    let want_gate: Vec<f64> = (0..rows * columns)
                        .map(|i| wide_dy[i] * wide_up[i] * value[i][1])
                        .collect();
                    let want_up: Vec<f64> = (0..rows * columns)
                        .map(|i| wide_dy[i] * value[i][0])
                        .collect();
                    close(
                        &device,
                        &format!("gate's gradient {what}"),
                        &d_gate,
                        &want_gate,
                    );
                    let d_up = d_up.expect("up has a tensor");
                    close(&device, &format!("up's gradient {what}"), &d_up, &want_up);
                    // Gate and up as halves of one tensor.
                    let joined = device
                        .tensor(vec![rows, 2 * columns], dtype)
                        .expect("memory");
                    device.put_part(&joined, 0, &x).expect("copies");
                    device.put_part(&joined, columns, &up).expect("copies");
                    let both = device.gated(f, &joined, None).expect("runs");
                    assert_eq!(read(&device, &both), read(&device, &gated), "{what}");
                    let (d_both, _) = device.gated_backward(f, &dy, &joined, None).expect("runs");
                    for (start, apart) in [(0, &d_gate), (columns, &d_up)] {
                        let part = device
                            .copy_columns(&d_both, start, columns)
                            .expect("copies");
                        assert_eq!(read(&device, &part), read(&device, apart), "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn dropout_draws_the_cpus_numbers() {
    for device in emulator::devices() {
        let stream = Stream::new(11, 3, "model.layers.1.dropout");
        // (sequences, positions held, sequence, columns held, first column, columns)
        for (batch, positions, sequence, columns, first, all) in [
            (2usize, vec![0u32, 1, 6, 7], 8i64, 5usize, 3i64, 13i64),
            (1, vec![2, 3], 4, 16, 16, 32),
            (3, vec![0], 1, 8, 0, 8),
        ] {
            for dtype in TYPES {
                let p = 0.3;
                let rows = batch * positions.len();
                let (x, wide) = random(&device, &[rows, columns], dtype, 8);
                let list = device.indices(&positions).expect("memory");
                let step = device.indices(&[3]).expect("memory");
                let place = Place {
                    stream: StreamArgument::new(stream, step.address),
                    threshold: threshold(p),
                    scale: (1.0 / (1.0 - p)) as f32,
                    first_sequence: 5,
                    sequence: [positions.len() as i64, sequence],
                    columns: [columns as i64, first, all],
                };
                let (out, mask) = device.dropout(&x, place, &list).expect("runs");
                let mut want = Vec::new();
                for (i, x) in wide.iter().enumerate() {
                    let (row, c) = (i / columns, (i % columns) as i64);
                    let b = 5 + (row / positions.len()) as i64;
                    let line = b * sequence + i64::from(positions[row % positions.len()]);
                    let mut u = [0.0];
                    stream.uniforms((line * all + first + c) as u64, &mut u);
                    let kept = f64::from(u[0]) >= p;
                    want.push(if kept { x / (1.0 - p) } else { 0.0 });
                }
                close(&device, "dropout", &out, &want);
                let again = device
                    .masked(&x, &mask, (1.0 / (1.0 - p)) as f32)
                    .expect("runs");
                assert_eq!(read(&device, &again), read(&device, &out));
            }
        }
    }
}

#[test]
fn rotary_positions_turn_and_turn_back() {
    for device in emulator::devices() {
        // (sequence, heads, [head_dim, first, dims], neighbours)
        for (sequence, heads, all @ [head_dim, first, dims], neighbours) in [
            (3, 2, [16, 0, 16], false),
            (2, 3, [10, 0, 6], false),
            (4, 1, [64, 0, 32], false),
            (3, 2, [17, 5, 12], false),
            (3, 2, [24, 8, 16], true),
            (2, 3, [21, 3, 14], true),
        ] {
            for dtype in TYPES {
                let what = format!("{all:?} {neighbours} {dtype:?}");
                let rows = 2 * sequence;
                let (x, wide) = random(&device, &[rows, heads * head_dim], dtype, 9);
                let half = dims / 2;
                let angle =
                    |t: usize, i: usize| t as f64 * 100f64.powf(-2.0 * i as f64 / dims as f64);
                let turns: Vec<f32> = (0..sequence * half)
                    .flat_map(|at| {
                        let (sin, cos) = angle(at / half, at % half).sin_cos();
                        [cos as f32, sin as f32]
                    })
                    .collect();
                let (table, _) = upload(&device, &[turns.len()], turns, DType::F32);
                let buffer = device.indices(&vec![0; table.len()]).expect("memory");
                device
                    .launcher
                    .copy(buffer.address, table.address(), table.bytes())
                    .expect("copies");
                let mut turning = TurningArgument {
                    sequence: sequence as i64,
                    heads: heads as i64,
                    dims: all.map(|n| n as i64),
                    neighbours: i32::from(neighbours),
                    direction: 1.0,
                };
                let out = device.rope(&x, &buffer, turning).expect("runs");
                let mut want = wide.clone();
                for line in 0..rows * heads {
                    let t = line / heads % sequence;
                    for i in 0..half {
                        let at = line * head_dim + first;
                        let (a, b) = match neighbours {
                            true => (at + 2 * i, at + 2 * i + 1),
                            false => (at + i, at + half + i),
                        };
                        let (sin, cos) = angle(t, i).sin_cos();
                        want[a] = wide[a] * cos - wide[b] * sin;
                        want[b] = wide[b] * cos + wide[a] * sin;
                    }
                }
                close(&device, &format!("rope {what}"), &out, &want);
                turning.direction = -1.0;
                let back = device.rope(&out, &buffer, turning).expect("runs");
                let bound = if dtype == DType::Bf16 { 6e-3 } else { 2e-6 };
                let what = format!("rope back {what}");
                super::within(&device, &what, &back, &wide, bound);
            }
        }
    }
}
