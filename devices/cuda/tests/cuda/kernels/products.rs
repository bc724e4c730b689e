//! Matrix products: linear layers forward and backward, in every way that operands are multiplied.

use catalog::DType;
use catalog::model::Activation;
use cuda_device::Device;
use cuda_device::launcher::Compute;
use dtensor::Nonlinearity;

use super::elementwise::oracle;
use super::{random, within};
use crate::emulator;

/// `x · wᵀ`, `dy · w` and `dyᵀ · x` in 64 bits; `[rows, out features, in features]`.
pub(super) fn linear([m, n, k]: [usize; 3], x: &[f64], w: &[f64], dy: &[f64]) -> [Vec<f64>; 3] {
    let mut all = [vec![0.0; m * n], vec![0.0; m * k], vec![0.0; n * k]];
    let [y, dx, dw] = &mut all;
    for i in 0..m {
        for j in 0..n {
            for l in 0..k {
                y[i * n + j] += x[i * k + l] * w[j * k + l];
                dx[i * k + l] += dy[i * n + j] * w[j * k + l];
                dw[j * k + l] += dy[i * n + j] * x[i * k + l];
            }
        }
    }
    all
}

#[test]
fn linear_layers_and_their_gradients() {
    for device in emulator::devices() {
        // TF32 rounds each operand by at most 2⁻¹¹.
        let ways = [
            (DType::F32, Compute::Whole, 2e-6),
            (DType::F32, Compute::Tf32, 1e-3),
            (DType::Bf16, Compute::Whole, 3e-3),
            (DType::Bf16, Compute::Tf32, 3e-3),
        ];
        for sizes in [[5, 9, 7], [3, 17, 40], [48, 24, 64]] {
            for (dtype, compute, bound) in ways {
                let device = device.clone().with_compute(compute);
                check(&device, sizes, dtype, bound, compute);
            }
        }
    }
}

fn check(device: &Device, sizes: [usize; 3], dtype: DType, bound: f64, compute: Compute) {
    let [m, n, k] = sizes;
    let (x, wx) = random(device, &[m, k], dtype, 20);
    let (w, ww) = random(device, &[n, k], dtype, 21);
    let (dy, wd) = random(device, &[m, n], dtype, 22);
    let (bias, wb) = random(device, &[n], dtype, 23);
    let (gradient, before) = random(device, &[n, k], DType::F32, 24);
    let [mut y, dx, mut dw] = linear(sizes, &wx, &ww, &wd);
    let what = format!("{sizes:?} {dtype:?} {compute:?}");
    let got = device.linear(&x, &w, None, dtype).expect("runs");
    within(device, &format!("forward {what}"), &got, &y, bound);
    for (i, y) in y.iter_mut().enumerate() {
        *y += wb[i % n];
    }
    let got = device.linear(&x, &w, Some(&bias), dtype).expect("runs");
    within(device, &format!("bias {what}"), &got, &y, bound);
    let got = device.linear_backward(&dy, &w, dtype).expect("runs");
    within(device, &format!("input {what}"), &got, &dx, bound);
    device
        .add_linear_gradient(&gradient, &dy, &x)
        .expect("runs");
    for (dw, before) in dw.iter_mut().zip(&before) {
        *dw += before;
    }
    // Products of numbers in bf16 are whole.
    let bound = if dtype == DType::Bf16 { 2e-6 } else { bound };
    within(device, &format!("weight {what}"), &gradient, &dw, bound);
}

/// GELUs by tanh, and gradients through them, also where there is no algorithm for such products. Tokens are no
/// multiple of anything.
#[test]
fn products_take_gelus() {
    let without = emulator::device_without_gelus();
    for device in emulator::devices().into_iter().chain(without) {
        for sizes in [[5, 8, 16], [3, 40, 24], [49, 24, 64]] {
            check_gelus(&device, sizes);
        }
    }
}

fn check_gelus(device: &Device, sizes: [usize; 3]) {
    // A result in bf16 is rounded once; of tanh no more than 11 bits may be right (`tanh.approx.f32`).
    const BOUND: f64 = 4e-3;
    let f = Nonlinearity {
        function: Activation::Gelu,
        tanh: true,
    };
    let [m, n, k] = sizes;
    let (x, wx) = random(device, &[m, k], DType::Bf16, 30);
    let (w, ww) = random(device, &[n, k], DType::Bf16, 31);
    let (dy, wd) = random(device, &[m, n], DType::Bf16, 32);
    let (bias, wb) = random(device, &[n], DType::Bf16, 33);
    let (before, wp) = random(device, &[m, k], DType::Bf16, 34);
    let [y, dx, _] = linear(sizes, &wx, &ww, &wd);
    for (bias, wb) in [(None, vec![0.0; n]), (Some(&bias), wb)] {
        let sum: Vec<f64> = y
            .iter()
            .zip(wb.iter().cycle())
            .map(|(y, b)| y + b)
            .collect();
        let want: Vec<f64> = sum.iter().map(|&x| oracle(f, x)[0]).collect();
        for stays in [false, true] {
            let what = format!("{sizes:?}, bias {}, stays {stays}", bias.is_some());
            device.memory.reset_peak();
            let got = device.linear_gelu(&x, &w, bias, stays).expect("runs");
            let usage = device.memory.usage();
            assert_eq!(usage.peak, usage.live, "{what}: no more than it returns");
            within(device, &format!("GELU {what}"), &got.0, &want, BOUND);
            assert_eq!(got.1.is_some(), stays, "{what}");
            if let Some(input) = got.1 {
                within(device, &format!("input {what}"), &input, &sum, BOUND);
            }
        }
    }
    let slopes = dx.iter().zip(&wp).map(|(d, &x)| d * oracle(f, x)[1]);
    let want: Vec<f64> = slopes.collect();
    let got = device.linear_gelu_backward(&dy, &w, &before).expect("runs");
    within(device, &format!("gradient {sizes:?}"), &got, &want, BOUND);
}

#[test]
fn tf32_rounds_operands_and_nothing_else_does() {
    for device in emulator::devices() {
        let [x, one] = [1.0 + 1.0 / 4096.0, 1.0];
        for (dtype, compute, want) in [
            (DType::F32, Compute::Whole, x),
            (DType::F32, Compute::Tf32, one),
        ] {
            let device = device.clone().with_compute(compute);
            // Large enough for tensor cores.
            let (x, _) = super::upload(&device, &[128, 128], vec![x; 1 << 14], dtype);
            let mut eye = vec![0.0; 1 << 14];
            eye.iter_mut().step_by(129).for_each(|one| *one = 1.0);
            let (eye, _) = super::upload(&device, &[128, 128], eye, dtype);
            let y = device.linear(&x, &eye, None, dtype).expect("runs");
            let got = super::read(&device, &y);
            assert!(
                got.iter().all(|&y| y == f64::from(want)),
                "{compute:?} {}",
                got[0]
            );
        }
    }
}
