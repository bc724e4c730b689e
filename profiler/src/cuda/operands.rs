//! Operands whose elements the host computes without storing them, and results checked at sampled elements. The host makes
//! [`TILE`] random numbers and the device repeats them. `TILE` is prime, so rows differ.

use std::rc::Rc;

use catalog::DType;
use catalog::profile::Kernel;
use cuda_device::{CudaError, Device, Tensor};
use dtensor::philox::Stream;

use crate::ProfilerError;

/// Random elements after which a tensor repeats: a prime.
const TILE: usize = 65_537;
/// Most consecutive elements that [`Tiled::slice`] returns.
const SLICE: usize = 256;
/// Elements of a result that are compared with the host's.
const SAMPLES: u64 = 16;
/// Weyl sequence with the golden ratio: spreads indices evenly over any length.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// A tensor on the device with elements in [−½, ½), the magnitude that norms leave activations in.
pub(super) struct Tiled {
    pub(super) tensor: Tensor,
    /// The tile, followed by its beginning, so that slices may cross its end.
    tile: Rc<[f32]>,
    period: usize,
}

impl Tiled {
    pub(super) fn new(
        device: &Device,
        shape: Vec<usize>,
        dtype: DType,
        seed: u64,
    ) -> Result<Self, CudaError> {
        let tensor = device.tensor(shape, dtype)?;
        let tile = tile(tensor.len().min(TILE), seed, dtype);
        repeated(device, &tensor, &tile)?;
        let period = tile.len().max(1);
        let values = tile.f32();
        let again = values.iter().cycle().take(SLICE);
        let tile = values.iter().chain(again).copied().collect();
        Ok(Self {
            tensor,
            tile,
            period,
        })
    }

    /// An element, as the device holds it.
    pub(super) fn at(&self, index: usize) -> f64 {
        f64::from(self.tile[index % self.period])
    }

    /// Up to [`SLICE`] consecutive elements.
    pub(super) fn slice(&self, start: usize, len: usize) -> &[f32] {
        &self.tile[start % self.period..][..len]
    }

    /// The element at a row and a column.
    pub(super) fn of(&self, row: usize, column: usize) -> f64 {
        self.at(row * self.tensor.columns() + column)
    }

    /// The sum of squares of all elements.
    pub(super) fn squares(&self) -> f64 {
        let sum = |tile: &[f32]| {
            tile.iter()
                .map(|&x| f64::from(x) * f64::from(x))
                .sum::<f64>()
        };
        let (whole, rest) = (
            self.tensor.len() / self.period,
            self.tensor.len() % self.period,
        );
        whole as f64 * sum(&self.tile[..self.period]) + sum(&self.tile[..rest])
    }

    /// The elements of a row.
    pub(super) fn row(&self, row: usize) -> Vec<f64> {
        let columns = self.tensor.columns();
        (0..columns).map(|column| self.of(row, column)).collect()
    }
}

/// Fills a tensor by repeating `tile`.
pub(super) fn repeated(
    device: &Device,
    tensor: &Tensor,
    tile: &cpu_device::Tensor,
) -> Result<(), CudaError> {
    let each = tensor.dtype.size();
    let at = tensor.address();
    let first = tile.len().min(tensor.len());
    let bytes = tile.pack();
    device.launcher.write(at, &bytes[..first * each as usize])?;
    let mut written = first;
    while written < tensor.len() {
        // Whole tiles are written until the last copy.
        let more = written.min(tensor.len() - written);
        let (to, bytes) = (at + written as u64 * each, more as u64 * each);
        device.launcher.copy(to, at, bytes)?;
        written += more;
    }
    Ok(())
}

fn tile(len: usize, seed: u64, dtype: DType) -> cpu_device::Tensor {
    let mut data = vec![0.0; len];
    Stream::new(seed, 0, "operands").uniforms(0, &mut data);
    data.iter_mut().for_each(|x| *x -= 0.5);
    cpu_device::Tensor::new(vec![len], data, dtype)
}

/// The expected value of an element, and how far rounding may move it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) value: f64,
    pub(super) tolerance: f64,
}

/// Unit roundoff of a type: the largest relative error of rounding to it.
pub(super) fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::Bf16 => 1.0 / 256.0,
        _ => f64::from(f32::EPSILON),
    }
}

/// Compares sampled elements of a result, including the first and the last, with the host's.
///
/// # Errors
/// When an element is outside its tolerance, or the device failed.
pub(super) fn check(
    device: &Device,
    kernel: &Kernel,
    got: &Tensor,
    want: impl Fn(usize) -> Wanted,
) -> Result<(), ProfilerError> {
    for element in samples(got.len()) {
        let one = device.download(&got.part(element, vec![1]))?;
        let (got, want) = (f64::from(one.f32()[0]), want(element));
        // A NaN fails this comparison whatever the tolerance.
        if (got - want.value).abs() <= want.tolerance {
            continue;
        }
        return Err(ProfilerError::Wrong {
            kernel: format!("{} {:?}", kernel.name, kernel.sizes),
            element,
            got,
            want: want.value,
        });
    }
    Ok(())
}

/// Indices spread evenly over `0..len`.
pub(super) fn samples(len: usize) -> Vec<usize> {
    let spread = |i: u64| {
        let part = u128::from(i.wrapping_mul(GOLDEN)) * len as u128;
        (part >> 64) as usize
    };
    let mut indices: Vec<usize> = (0..SAMPLES).map(spread).collect();
    indices.push(len.saturating_sub(1));
    indices.retain(|&index| index < len);
    indices.sort_unstable();
    indices.dedup();
    indices
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_lie_within_and_hold_both_ends() {
        for len in [0, 1, 2, 17, 1000, 1 << 33] {
            let indices = samples(len);
            assert!(indices.iter().all(|&i| i < len), "{len}");
            if len > 0 {
                assert_eq!((indices[0], indices.last()), (0, Some(&(len - 1))));
            }
            // Few samples coincide.
            assert!(indices.len() >= len.min(17) * 3 / 4, "{len}: {indices:?}");
        }
    }
}
