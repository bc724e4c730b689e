//! Waves: how well the tiles of a matrix product fill a GPU.
//!
//! A matrix product is computed in tiles, and each multiprocessor computes one tile at a time. An A100 has 108 multiprocessors,
//! so it computes 108 tiles at once: a wave. A wave that is not full takes as long as a full one (NVIDIA, "Matrix
//! multiplication background user's guide", wave quantization). For example, a result of 4096 by 4096 numbers has 512 tiles
//! of 256 by 128. They take four full waves and a fifth of only 80 tiles.
//!
//! Products are measured only in sizes that are powers of two. A product of another size may fill its last wave more or less
//! than the measured ones, and interpolating between them misses that. Hopper, Blackwell and kernels for 8 bits are priced
//! without waves, because that comes closer to products measured in other sizes (docs/kernels.md).

use catalog::tables::MeasuredOn;
use catalog::{Architecture, Device};

use crate::known;

/// How many tiles a GPU computes at once: one on each of its multiprocessors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waves {
    multiprocessors: u64,
}

impl Waves {
    /// The waves of products in 16 bits: those of the GPU that is priced, and those of the GPU whose table it uses. `None` if this
    /// generation of GPUs is priced without waves.
    pub(super) fn of(device: &Device, part: &MeasuredOn) -> Option<[Self; 2]> {
        let own_and_tabled = [device.sm_count, part.multiprocessors];
        match device.architecture {
            Architecture::Volta
            | Architecture::Ampere
            | Architecture::Ada
            | Architecture::BlackwellRtx => {
                Some(own_and_tabled.map(|multiprocessors| Self { multiprocessors }))
            }
            Architecture::Hopper
            | Architecture::Blackwell
            | Architecture::Cdna3
            | Architecture::Cpu => None,
        }
    }

    /// How many times as long a product with `m` by `n` results takes because its last wave is not full. cuBLAS can choose between
    /// several sizes of tiles; it is assumed to choose the fastest.
    pub(super) fn stretch(self, m: u64, n: u64) -> f64 {
        let small = known::SMALL_TILES.factor();
        let computed = |rows: u64, columns: u64, slower: f64| {
            let tiles = m.div_ceil(rows) * n.div_ceil(columns);
            let waves = tiles.div_ceil(self.multiprocessors);
            (waves * self.multiprocessors * rows * columns) as f64 * slower
        };
        let best = computed(256, 128, 1.0)
            .min(computed(128, 256, 1.0))
            .min(computed(128, 128, small));
        best / (m as f64 * n as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_last_wave_takes_as_long_as_the_others() {
        let a100 = Waves {
            multiprocessors: 108,
        };
        // 512 tiles in five waves of 108.
        let stretch = a100.stretch(4096, 4096);
        assert!((stretch - 540.0 / 512.0).abs() < 1e-12, "{stretch}");
        // 108 tiles fill one wave; one row more needs a second.
        assert_eq!(a100.stretch(256 * 9, 128 * 12), 1.0);
        assert!(a100.stretch(256 * 9 + 1, 128 * 12) > 1.2);
        // Small tiles fill the wave better, each result taking a tenth longer.
        let few = a100.stretch(128 * 9, 128 * 12);
        assert!((few - 1.1).abs() < 1e-12, "{few}");
    }

    #[test]
    fn only_generations_whose_tables_show_waves_have_them() {
        let has = |name: &str| {
            let device = catalog::load::device(name).expect("a preset");
            let part = catalog::tables::measured_on(&device.kernels).expect("a table");
            Waves::of(&device, part).map(|of| of.map(|waves| waves.multiprocessors))
        };
        assert_eq!(has("a100-80gb"), Some([108, 108]));
        assert_eq!(has("v100-sxm2"), Some([80, 108]));
        assert_eq!(has("rtx-5090"), Some([170, 188]));
        assert_eq!(has("h100-sxm"), None);
    }
}
