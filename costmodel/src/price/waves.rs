//! Waves: how well the tiles of a matrix product fill a GPU.
//!
//! A GPU before Hopper computes a product tile by tile. Every multiprocessor computes one tile at a time, so the tiles run in
//! waves, and the last wave takes as long as the others however few tiles are left for it (NVIDIA, "Matrix multiplication
//! background user's guide", wave quantization). For example, 4096 by 4096 results are 512 tiles of 256 by 128: five waves on the
//! 108 multiprocessors of an A100, of which the last is three quarters full.
//!
//! Grids of measured products have sizes that are powers of two. Other sizes fill their waves better or worse, which
//! interpolation alone does not see. Kernels of Hopper and Blackwell, and those for 8 bits, share out work in smaller
//! pieces: their tables are interpolated better without waves (docs/kernels.md).

use catalog::tables::MeasuredOn;
use catalog::{Architecture, Device};

use crate::known;

/// The multiprocessors that compute a product's tiles.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waves {
    multiprocessors: u64,
}

/// Waves of a device, and of the GPU that its table was measured on.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnAndTabled {
    pub(super) own: Waves,
    pub(super) tabled: Waves,
}

impl Waves {
    /// The waves of products in 16 bits; `None` for a generation whose tables show none.
    pub(super) fn of(device: &Device, part: &MeasuredOn) -> Option<OwnAndTabled> {
        let of = |multiprocessors| Self { multiprocessors };
        match device.architecture {
            Architecture::Volta | Architecture::Ampere | Architecture::Ada => Some(OwnAndTabled {
                own: of(device.sm_count),
                tabled: of(part.multiprocessors),
            }),
            Architecture::Hopper
            | Architecture::Blackwell
            | Architecture::Cdna3
            | Architecture::Cpu => None,
        }
    }

    /// Time of a product with `m` by `n` results over the time that it would take if its tiles filled every wave. Of the tiles
    /// that cuBLAS can choose from, those are counted that make the product fastest.
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
            Waves::of(&device, part)
                .map(|of| [of.own, of.tabled].map(|waves| waves.multiprocessors))
        };
        assert_eq!(has("a100-80gb"), Some([108, 108]));
        assert_eq!(has("v100-sxm2"), Some([80, 108]));
        assert_eq!(has("h100-sxm"), None);
    }
}
