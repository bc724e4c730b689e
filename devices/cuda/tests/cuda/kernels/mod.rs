//! Every kernel on the emulator against an oracle in 64 bits, with random inputs, memory poisoned
//! with NaNs before it is written, and sizes that no tile divides.

mod attention;
mod eight_bits;
mod elementwise;
mod expert;
mod optimizer;
mod products;
mod rows;
mod scale;

use catalog::DType;
use cuda_device::{Device, Tensor};
use dtensor::philox::Stream;

/// Both element types.
const TYPES: [DType; 2] = [DType::F32, DType::Bf16];

/// Standard normals on the device, as it holds them, and the same numbers in 64 bits.
fn random(device: &Device, shape: &[usize], dtype: DType, seed: u64) -> (Tensor, Vec<f64>) {
    let mut data = vec![0.0; shape.iter().product()];
    Stream::new(seed, 0, "kernels").normals(0, &mut data);
    upload(device, shape, data, dtype)
}

fn upload(device: &Device, shape: &[usize], data: Vec<f32>, dtype: DType) -> (Tensor, Vec<f64>) {
    let host = cpu_device::Tensor::new(shape.to_vec(), data, dtype);
    let wide = host.f32().iter().map(|&x| f64::from(x)).collect();
    (device.upload(&host).expect("memory"), wide)
}

fn read(device: &Device, x: &Tensor) -> Vec<f64> {
    device.launcher.synchronize().expect("nothing failed");
    let host = device.download(x).expect("work before succeeded");
    host.f32().iter().map(|&x| f64::from(x)).collect()
}

/// Compares by ‖got − want‖ ≤ bound · ‖want‖ and every element by the largest. Arithmetic is in 32 bits;
/// a result in bf16 is rounded once, by at most 2⁻⁹.
fn close(device: &Device, what: &str, got: &Tensor, want: &[f64]) {
    let bound = match got.dtype {
        DType::Bf16 => 3e-3,
        _ => 2e-6,
    };
    within(device, what, got, want, bound);
}

fn within(device: &Device, what: &str, got: &Tensor, want: &[f64], bound: f64) {
    let got = read(device, got);
    assert_eq!(got.len(), want.len(), "{what}");
    let square = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let error = square(&mut got.iter().zip(want).map(|(a, b)| a - b));
    let size = square(&mut want.iter().copied());
    assert!(
        error <= bound * size + 1e-9,
        "{what}: error {error:e} of {size:e}, more than {bound:e} of it"
    );
    let largest = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    for (i, (a, b)) in got.iter().zip(want).enumerate() {
        assert!(
            (a - b).abs() <= 8.0 * bound * largest + 1e-9,
            "{what}: element {i} is {a}, not {b}"
        );
    }
}
