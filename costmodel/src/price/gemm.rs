//! Matrix products: log-log interpolation in the device's measured grid.
//!
//! Inside the grid, `log t` is trilinear in `log m, log n, log k`. Beyond its upper end the rate of
//! the edge holds (time grows with the product of sizes); below its lower end time stays at the
//! edge's, because launch and one tile bound it. A device without a grid uses its nearest relative's
//! with time scaled by the ratio of peaks.
//!
//! On GPUs before Hopper the interpolated time is that of full waves, and a last wave that is not full adds to it (`waves`).
//!
//! If a profile of the cluster's own GPUs measured products, these times correct the grid's (`ratios`). A profile keeps
//! the device busy, so its times are not stretched to those of training.

use catalog::fitted::Constant;
use catalog::tables::{self, GemmGrid, MeasuredOn};
use catalog::{Architecture, DType, Device, Fitted, FlopRate, Origin, Seconds, elementary};
use dtensor::Pass;
use ndarray::Array3;
use plans::UsedConstant;

use super::alignment::{self, Rows};
use super::borrowed::SlowerUnits;
use super::clocks::{clock_factor, headroom, sustained, throttled};
use super::measured::{self, OfGpus};
use super::ratios::Ratios;
use super::waves::Waves;
use crate::known::{self, constant};

/// The highest rate of 8-bit products in training, where the power limit lowers clocks. It is a fitted share of the best rate in
/// short benchmarks, higher for GPUs with more power for their peak than the table's GPU, lower for those with less. Tables need it
/// because they come from short runs at boost clocks. `None` for generations without published training runs in 8 bits.
fn power_cap(device: &Device, part: &MeasuredOn, fitted: &Fitted) -> Option<FlopRate> {
    let best = match device.architecture {
        Architecture::Hopper => known::HOPPER_BEST_8,
        Architecture::Blackwell => known::BLACKWELL_BEST_8,
        Architecture::Volta
        | Architecture::Ampere
        | Architecture::Ada
        | Architecture::BlackwellRtx
        | Architecture::Cdna3
        | Architecture::Cpu => return None,
    };
    let share = best.factor() * fitted.get(Constant::SustainedShare8);
    let clocks = clock_factor(device, part) / headroom(device, part);
    Some(FlopRate(device.peak_rate(DType::F8)?.0 * share / clocks))
}

/// The least `n` and `k` at which a grid's times are used for batched products: alone, narrower products leave units idle, and
/// shorter ones run on badly chosen kernels.
const WIDE: u64 = 256;

#[derive(Clone, Debug)]
pub(super) struct GemmPrices {
    wide: Scaled,
    narrow: Option<Scaled>,
    peak: FlopRate,
    /// Time of products in 32 bits over those in 16: the ratio of the device's own peaks. Where it has
    /// TF32 units these run them (2 on every generation so far), elsewhere its 32-bit units do (8 on V100).
    single: f64,
    sustained: f64,
    /// Time of 8-bit products over that of the table.
    narrow_sustained: f64,
    /// Time in long training over that in short benchmarks, of the largest products on Ampere. (`sustained` is that of others.)
    sustained_large: f64,
    cap: Option<FlopRate>,
    table: String,
    device: Device,
    /// Whether the table is of another GPU than this one.
    is_borrowed: bool,
    /// Measured over tabled time of products: in 16 bits, and on TF32 units.
    ratios: [Ratios<3>; 2],
    source: Option<String>,
}

#[derive(Clone, Debug)]
struct Scaled {
    /// Logarithms of the grid's sizes along `m`, `n` and `k`.
    axes: [Vec<f64>; 3],
    /// Logarithms of the grid's times in microseconds.
    log_t: Array3<f64>,
    /// Factor from the table's time to this device's.
    factor: f64,
    /// On a device with slower matrix units: how much longer operations and the rest take, apart from `factor`, and the measured
    /// GPU's peak for the grid's type.
    slower_units: Option<(SlowerUnits, FlopRate)>,
    /// Smallest `m` and `n` of the grid; smaller products fill waves as these do.
    least: [u64; 2],
    /// How tiles of products fill this device in waves. If that is known, `log_t`, the logarithm of times, is of products whose
    /// last wave is full.
    waves: Option<Waves>,
}

impl GemmPrices {
    pub(super) fn new(
        device: &Device,
        fitted: &Fitted,
        part: &MeasuredOn,
        profile: Option<OfGpus<'_>>,
    ) -> Option<Self> {
        let peak = device.peak_rate(DType::Bf16)?;
        let grid = tables::gemm(&device.kernels, DType::Bf16)?;
        let clocks = clock_factor(device, part);
        let slower_units = SlowerUnits::of(device, part);
        let factor = |peaks: f64| match slower_units {
            Some(_) => clocks,
            None => peaks * clocks,
        };
        // A power limit far below what the peak needs: the best products take as long as measured, and others longer as in the table.
        let limited = |dtype, grid: &GemmGrid, otherwise: f64| match device.best_rate(dtype) {
            Some(best) => highest_rate(grid).0 / best.0,
            None => otherwise,
        };
        let waves = Waves::of(device, part);
        let narrow = tables::gemm(&device.kernels, DType::F8).and_then(|grid| {
            let own = device.peak.get(&DType::F8)?;
            let reference = FlopRate(2.0 * part.peak.value.0);
            let slower_units = slower_units.map(|units| (units, reference));
            let factor = limited(DType::F8, &grid, factor(reference / own.value));
            Some(Scaled::new(grid, factor, slower_units, None))
        });
        let wide = {
            let slower_units = slower_units.map(|units| (units, part.peak.value));
            let factor = limited(DType::Bf16, &grid, factor(part.peak.value / peak));
            Scaled::new(grid, factor, slower_units, waves)
        };
        let single = device
            .peak_rate(DType::F32)
            .map_or(1.0, |own| (peak / own).max(1.0));
        let ratios = [("bf16", 1.0), ("tf32", single)]
            .map(|(element, slower)| wide.corrected(profile, element, slower));
        Some(Self {
            wide,
            narrow,
            peak,
            single,
            sustained: sustained(device, part, fitted),
            narrow_sustained: match device.best_rate(DType::F8) {
                Some(_) => 1.0,
                None => known::NARROW.factor(),
            },
            sustained_large: throttled(known::AMPERE_SUSTAINED_LARGE.factor(), device, part),
            cap: power_cap(device, part, fitted),
            table: device.kernels.clone(),
            device: device.clone(),
            is_borrowed: part.peak.value != peak || clocks != 1.0,
            ratios,
            source: profile.map(|profile| profile.source()),
        })
    }

    pub(super) fn price(&self, sizes: [u64; 3], dtype: DType, pass: Pass) -> Seconds {
        let ratio = self.ratio(sizes, dtype);
        let flops = flops(sizes);
        let (sustained, cap) = if dtype == DType::F8 && self.narrow.is_some() {
            (self.narrow_sustained, self.cap)
        } else {
            (self.sustained(flops), None)
        };
        let throttled = cap.map_or(Seconds(0.0), |rate| Seconds(flops / rate.0));
        let time = match ratio {
            Some(ratio) => self.tabled(sizes, dtype, 1.0) * ratio,
            None => self.tabled(sizes, dtype, sustained),
        };
        let time = time.max(throttled);
        let of_pass = match pass {
            Pass::Forward | Pass::BackwardInput => 1.0,
            Pass::BackwardWeight => known::WEIGHT_GRADIENT.factor(),
        };
        let unaligned = alignment::rate(&self.device, sizes, dtype, pass);
        let time = time * of_pass;
        unaligned.map_or(time, |rate| time.max(Seconds(flops / rate.0)))
    }

    /// A product whose `k` may be shorter than that of any linear layer. Its tiles take a fixed time each, and the same time
    /// for every step along `k`; the grid's times at [`WIDE`] and at twice that give both. The grid's own times at smaller
    /// `k` are not used: libraries choose kernels badly for such shapes, which linear layers do not have. On A100 a product
    /// of 128 takes as long as one of 256, in one source of four a fifth less. Products as short as these do not reach the
    /// power limit of training.
    fn of_short_rows(&self, [m, n, k]: [u64; 3], dtype: DType) -> Seconds {
        let [short, long] = [WIDE, 2 * WIDE];
        let time = |k: u64| self.tabled([m, n, k], dtype, 1.0);
        let time = match k < short {
            true => {
                let step = (time(long) - time(short)) * (1.0 / (long - short) as f64);
                let law = time(short) - step * (short - k) as f64;
                law.max(time(short) * (k as f64 / short as f64))
            }
            false => time(k),
        };
        time * self.ratio([m, n, k], dtype).unwrap_or(1.0)
    }

    /// Measured over tabled time of a product, if the cluster's profile measured any like it.
    fn ratio(&self, sizes: [u64; 3], dtype: DType) -> Option<f64> {
        let [half, single] = &self.ratios;
        match (dtype, &self.narrow) {
            (DType::F8, Some(_)) => None,
            (DType::F32, _) => single.at(sizes),
            _ => half.at(sizes),
        }
    }

    /// Time by the device's grid, if kernels take `longer` times as long as in the short runs that the grid was measured in.
    pub(super) fn tabled(&self, sizes: [u64; 3], dtype: DType, longer: f64) -> Seconds {
        match (dtype, &self.narrow) {
            (DType::F8, Some(narrow)) => narrow.time(sizes, longer),
            (DType::F32, _) => self.wide.time(sizes, longer) * self.single,
            _ => self.wide.time(sizes, longer),
        }
    }

    /// Factor by which a product in training takes longer than the table says. On Ampere it falls with the size of the
    /// product: at 4096³ cuBLASLt sustains the table's rate divided by 1.11; from 8192³ on it sustains the table's rate,
    /// within 1% (Azure/AI-benchmarking-guide@8fd0c6e).
    fn sustained(&self, flops: f64) -> f64 {
        if self.device.architecture != Architecture::Ampere {
            return self.sustained;
        }
        let (small, large) = (2.0 * 4096f64.powi(3), 2.0 * 8192f64.powi(3));
        let position =
            (elementary::ln(flops / small) / elementary::ln(large / small)).clamp(0.0, 1.0);
        mix(self.sustained, self.sustained_large, position)
    }

    pub(super) fn grouped(
        &self,
        groups: u64,
        [m, n, k]: [u64; 3],
        dtype: DType,
        pass: Pass,
    ) -> Seconds {
        // In weight gradients the token rows are the contracted dimension.
        let [one, together] = match pass {
            Pass::BackwardWeight => [m, m * groups].map(|m| [m, n, k.div_ceil(groups)]),
            Pass::Forward | Pass::BackwardInput => [m.div_ceil(groups), m].map(|m| [m, n, k]),
        };
        // A grouped GEMM fills the device with tiles of all groups, so it takes as long as one product over all rows,
        // up to the grouped factor longer, but no longer than separate products.
        let [one, together] = [one, together].map(|sizes| self.price(sizes, dtype, pass));
        (together * known::GROUPED.factor())
            .min(one * groups as f64)
            .max(together)
    }

    /// The time that all experts' products take at least on our own executor's kernel, which uses only matrix instructions that
    /// Ampere already has.
    pub(super) fn portable_grouped(&self, sizes: [u64; 3]) -> Seconds {
        let rate = known::PORTABLE_GROUPED.of_multiprocessor();
        Seconds(flops(sizes) / (rate.0 * self.device.sm_count as f64))
    }

    /// The price of `batch` equal products, one for each sequence and head. One launch computes the tiles of all of them, so they
    /// take as long as a single product that has as many results and the same `k`. Matrix units read rows in pieces of
    /// 16 bytes (NVIDIA, "Matrix multiplication background user's guide", alignment). Products whose rows cannot be read so run
    /// on vector units.
    pub(super) fn batched(&self, batch: u64, [m, n, k]: [u64; 3], dtype: DType) -> Seconds {
        let columns = n.max(WIDE);
        let rows = (batch * m * n).div_ceil(columns);
        let aligned = self.of_short_rows([rows, columns, k], dtype);
        let bytes = n.min(k) * dtype.size();
        if bytes.is_multiple_of(16) {
            return aligned;
        }
        // A load brings one or two pairs of 16-bit numbers; loads and multiplications take turns.
        let pairs = if bytes.is_multiple_of(8) { 2.0 } else { 1.0 };
        let vector_units = match self.device.architecture {
            Architecture::Volta => 1.0 / self.single,
            _ => known::VECTOR_UNITS.factor(),
        };
        let rate = self.peak.0 * vector_units * pairs / (pairs + 1.0);
        let flops = 2.0 * batch as f64 * m as f64 * n as f64 * k as f64;
        aligned.max(Seconds(flops / rate))
    }

    pub(super) fn provenance(&self) -> Vec<UsedConstant> {
        let (grid, origin) = match self.is_borrowed {
            false => (format!("grid {}", self.table), Origin::Published),
            true => {
                let borrowed = format!(
                    "grid {}, scaled to this device's peak and power",
                    self.table
                );
                (borrowed, Origin::Assumed)
            }
        };
        let [half, single] = self.ratios.each_ref().map(Ratios::summary);
        let products = match (half.or(single), &self.source) {
            (Some(summary), Some(source)) => constant(
                "matrix products",
                measured::beside(summary, &grid),
                Origin::Measured,
                source,
            ),
            _ => constant(
                "matrix products",
                grid,
                origin,
                "ai-dynamo/aiconfigurator@095f58a GEMM tables; interpolation off the grid: median error 2-5% (docs/kernels.md)",
            ),
        };
        vec![
            products,
            constant(
                "sustained over short products",
                format!("{}×", self.sustained),
                Origin::Fitted,
                "Azure/AI-benchmarking-guide@8fd0c6e; published A100 and H100 runs",
            ),
            constant(
                "rate at the power limit, 8 bits",
                self.cap.map_or_else(
                    || "none known".to_owned(),
                    |cap| format!("{:.0} TFLOP/s", cap.0 / 1e12),
                ),
                Origin::Fitted,
                "published H100 runs",
            ),
        ]
    }
}

/// The highest rate of a product of the grid.
fn highest_rate(grid: &GemmGrid) -> FlopRate {
    let [m, n, k] = &grid.sizes;
    let rates = grid.microseconds.indexed_iter().map(|((i, j, l), &time)| {
        let flops = flops([m[i], n[j], k[l]]);
        FlopRate(flops / (time * 1e-6))
    });
    rates.fold(
        FlopRate(0.0),
        |most, rate| if rate > most { rate } else { most },
    )
}

impl Scaled {
    fn new(
        grid: GemmGrid,
        factor: f64,
        slower_units: Option<(SlowerUnits, FlopRate)>,
        waves: Option<[Waves; 2]>,
    ) -> Self {
        let least = [grid.sizes[0][0], grid.sizes[1][0]];
        let mut log_t = grid.microseconds.mapv_into(elementary::ln);
        if let Some([_, tabled]) = waves {
            for ((i, j, _), log) in log_t.indexed_iter_mut() {
                *log -= elementary::ln(tabled.stretch(grid.sizes[0][i], grid.sizes[1][j]));
            }
        }
        let log = |sizes: Vec<u64>| {
            sizes
                .into_iter()
                .map(|v| elementary::ln(v as f64))
                .collect()
        };
        Self {
            axes: grid.sizes.map(log),
            log_t,
            factor,
            slower_units,
            least,
            waves: waves.map(|[own, _]| own),
        }
    }

    /// Measured over the grid's times of products of a type, which take `slower` times those of the grid.
    fn corrected(&self, profile: Option<OfGpus<'_>>, element: &str, slower: f64) -> Ratios<3> {
        let products = profile.map_or_else(Vec::new, |profile| profile.products(element));
        // Unaligned products run on other kernels than the grid's, so they cannot correct it.
        let products = products
            .into_iter()
            .filter(|&(sizes, _)| Rows::of(sizes, Pass::Forward) == Rows::Aligned);
        Ratios::new(products, |sizes| self.time(sizes, 1.0).0 * slower)
    }

    /// Time of kernels that take `longer` times those of the grid.
    fn time(&self, [m, n, k]: [u64; 3], longer: f64) -> Seconds {
        let (mi, mf, mx) = locate(&self.axes[0], m);
        let (ni, nf, nx) = locate(&self.axes[1], n);
        let (ki, kf, kx) = locate(&self.axes[2], k);
        let along_k = |i, j| mix(self.log_t[[i, j, ki]], self.log_t[[i, j, ki + 1]], kf);
        let along_n = |i| mix(along_k(i, ni), along_k(i, ni + 1), nf);
        let log = mix(along_n(mi), along_n(mi + 1), mf) + mx + nx + kx;
        let stretch = self.waves.map_or(1.0, |waves| {
            waves.stretch(m.max(self.least[0]), n.max(self.least[1]))
        });
        let measured = elementary::exp(log) * 1e-6;
        match self.slower_units {
            None => Seconds(measured * self.factor * stretch * longer),
            Some((units, peak)) => {
                let at_peak = Seconds(flops([m, n, k]) / peak.0);
                units.time(Seconds(measured * stretch * longer), at_peak) * self.factor
            }
        }
    }
}

/// Floating-point operations of a product.
fn flops([m, n, k]: [u64; 3]) -> f64 {
    2.0 * m as f64 * n as f64 * k as f64
}

fn mix(a: f64, b: f64, f: f64) -> f64 {
    a + (b - a) * f
}

/// The grid cell of a size, its position in the cell, and the logarithm of how far it lies beyond the grid's upper end.
fn locate(axis: &[f64], size: u64) -> (usize, f64, f64) {
    let log = elementary::ln(size.max(1) as f64);
    let last = axis.len() - 1;
    if log >= axis[last] {
        return (last - 1, 1.0, log - axis[last]);
    }
    let cell = axis
        .partition_point(|&v| v <= log)
        .saturating_sub(1)
        .min(last - 1);
    let f = ((log - axis[cell]) / (axis[cell + 1] - axis[cell])).clamp(0.0, 1.0);
    (cell, f, 0.0)
}
