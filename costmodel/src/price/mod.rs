//! Prices of single kernels and collectives on a device and its network, each running alone.

mod algorithms;
pub(crate) mod alignment;
mod attention;
pub(crate) mod between_gpus;
mod borrowed;
mod clocks;
mod gemm;
mod measured;
mod memory;
mod network;
mod profile;
mod ratios;
mod roofline;
mod waves;
pub(crate) mod windows;

use catalog::calibration::TimeFactors;
use catalog::fitted;
use catalog::runtime::AttentionKernel;
use catalog::{
    Architecture, Bytes, Cluster, DType, Device, Fabric, Fitted, Origin, Seconds, tables,
};
use dtensor::{AttentionShape, CollectiveKind, Pass, Scan};
use plans::{Group, UsedConstant};

use crate::CostError;
use crate::known::{self, constant};

pub use memory::MemoryKind;
pub use profile::ProfilePrices;

/// Prices of kernels and collectives on a cluster of accelerators, from tables.
#[derive(Clone, Debug)]
pub struct TablePrices {
    gemm: gemm::GemmPrices,
    attention: attention::AttentionPrices,
    memory: memory::MemoryPrices,
    network: network::NetworkPrices,
    roofline: roofline::Roofline,
    fitted: Fitted,
    architecture: Architecture,
    fabric: Fabric,
    /// Factors on the times of tables, from the cluster's own runs and its relative speed.
    learned: TimeFactors,
}

/// How much longer work takes on a cluster than tables say.
fn learned(cluster: &Cluster) -> TimeFactors {
    // Host time is no price: the runtime's overheads carry its factor.
    let own = cluster.calibration.as_ref();
    let mut learned = own.map_or_else(TimeFactors::default, |own| own.time_factors);
    if let Some(speed) = &cluster.speed {
        learned.compute /= speed.value;
        learned.memory /= speed.value;
    }
    learned
}

impl TablePrices {
    /// Builds the prices of a cluster for jobs of `ranks` ranks.
    ///
    /// # Errors
    /// When the device names a table that does not exist.
    pub fn new(cluster: &Cluster, ranks: u64, fitted: &Fitted) -> Result<Self, CostError> {
        let device: &Device = &cluster.device;
        let unknown = || CostError::Prices {
            device: device.name.clone(),
            reason: format!("unknown kernel table {}", device.kernels),
        };
        let part = tables::measured_on(&device.kernels).ok_or_else(unknown)?;
        let profile = cluster.gpu_profile.as_deref().map(measured::OfGpus);
        Ok(Self {
            gemm: gemm::GemmPrices::new(device, fitted, part, profile).ok_or_else(unknown)?,
            attention: attention::AttentionPrices::new(device, fitted, part, profile),
            memory: memory::MemoryPrices::new(device, profile),
            network: network::NetworkPrices::new(cluster, ranks, profile),
            roofline: roofline::Roofline::new(cluster, ranks),
            fitted: *fitted,
            architecture: device.architecture,
            fabric: cluster.fabric,
            learned: learned(cluster),
        })
    }

    /// Time of a dense product `[m, k] × [k, n]` that runs alone for a short time; `sizes` are `[m, n, k]`.
    #[must_use]
    pub fn short_gemm(&self, sizes: [u64; 3], dtype: DType) -> Seconds {
        let least = self.roofline.products(1, sizes, dtype);
        self.gemm.tabled(sizes, dtype, 1.0).max(least)
    }

    /// Time of a dense product `[m, k] × [k, n]`, one of the three of a linear layer; `sizes` are `[m, n, k]`.
    #[must_use]
    pub fn gemm(&self, sizes: [u64; 3], dtype: DType, pass: Pass) -> Seconds {
        let time = self.gemm.price(sizes, dtype, pass) * self.learned.compute;
        time.max(self.roofline.products(1, sizes, dtype))
    }

    /// The time that all experts' products take at least on our own executor's kernel, which uses only matrix instructions that
    /// Ampere already has. `sizes` are `[m, n, k]` of [`Self::grouped_gemm`].
    #[must_use]
    pub fn portable_grouped(&self, sizes: [u64; 3]) -> Seconds {
        self.gemm.portable_grouped(sizes)
    }

    /// Time of one matrix product for each of `groups` experts; `sizes` are `[m, n, k]`. `m` is the number of rows of all experts
    /// together; in gradients of weights `k` is, which is summed over. It is at least the time in which the device's memory delivers
    /// every expert's operands once: with few rows per expert, reading the weights takes longer than multiplying by them.
    #[must_use]
    pub fn grouped_gemm(&self, groups: u64, sizes: [u64; 3], dtype: DType, pass: Pass) -> Seconds {
        let time = self.gemm.grouped(groups, sizes, dtype, pass) * self.learned.compute;
        let [m, n, k] = sizes;
        let (left, right, product) = match pass {
            Pass::Forward | Pass::BackwardInput => (m * k, groups * k * n, m * n),
            Pass::BackwardWeight => (m * k, k * n, groups * m * n),
        };
        let moved =
            Bytes((left + right) * dtype.size() + product * dtype.size().max(DType::Bf16.size()));
        time.max(self.memory_bound(MemoryKind::Pointwise, moved))
            .max(self.roofline.products(1, sizes, dtype))
    }

    /// Time of equal products of `[m, n, k]`, one per sequence and head.
    #[must_use]
    pub fn batched_gemm(&self, batch: u64, sizes: [u64; 3], dtype: DType) -> Seconds {
        let time = self.gemm.batched(batch, sizes, dtype) * self.learned.compute;
        time.max(self.roofline.products(batch, sizes, dtype))
    }

    /// Time of fused attention over queries, keys and values of a type.
    #[must_use]
    pub fn attention(
        &self,
        shape: &AttentionShape,
        kernel: AttentionKernel,
        dtype: DType,
        backward: bool,
    ) -> Seconds {
        let time = self.attention.price(shape, kernel, dtype, backward) * self.learned.compute;
        time.max(self.roofline.attention(shape, dtype, backward))
    }

    /// Time of the kernels of a recurrence over tensors of a type. They are bound by the bytes that
    /// they read and write, the states between chunks included, unless their products take longer.
    #[must_use]
    pub fn scan(&self, sizes: &Scan, dtype: DType, backward: bool) -> Seconds {
        let work = sizes.work(dtype, backward);
        let each = Bytes((work.bytes / f64::from(work.kernels)) as u64);
        let one = self.memory_bound(MemoryKind::Scan, each);
        (one * f64::from(work.kernels)).max(self.roofline.bound(work.flops, 0.0, dtype))
    }

    /// Time of a memory-bound kernel that reads and writes `bytes` in all.
    #[must_use]
    pub fn memory_bound(&self, kind: MemoryKind, bytes: Bytes) -> Seconds {
        let time = self.memory.price(kind, bytes) * self.learned.memory;
        time.max(self.roofline.moved(bytes))
    }

    /// Time of a collective, or of one transfer from every rank of a group to the next; bytes by the convention of
    /// [`dtensor::Collective`].
    #[must_use]
    pub fn collective(&self, kind: CollectiveKind, bytes: Bytes, group: Group) -> Seconds {
        let time = self.network.collective(kind, bytes, group) * self.learned.network;
        time.max(self.roofline.collective(kind, bytes, group))
    }

    /// Time for which a collective occupies the network card of each of its ranks, if nothing else limits it.
    #[must_use]
    pub fn on_card(&self, kind: CollectiveKind, bytes: Bytes, group: Group) -> Seconds {
        self.network.on_card(kind, bytes, group) * self.learned.network
    }

    /// The constants that these prices rest on, with their evidence.
    pub(crate) fn constants(&self) -> Vec<UsedConstant> {
        let mut used = self.gemm.provenance();
        used.extend(self.attention.provenance());
        used.extend(self.memory.provenance());
        used.extend(self.network.provenance());
        used.extend(known::rows(self.architecture, self.fabric));
        used.extend(fitted::entries().iter().map(|entry| {
            let value = format!("{}, {}", self.fitted.get(entry.name), entry.unit);
            constant(&entry.what, value, Origin::Fitted, &entry.source)
        }));
        used
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use catalog::Bandwidth;
    use catalog::fitted::Constant;
    use catalog::profile::{Gpu, Machine, Measured, Profile};

    use super::*;

    const SIZE: [u64; 3] = [1024, 1024, 1024];
    const ATTENTION: [u64; 4] = [64, 8192, 8192, 128];

    fn entry(kernel: &str, sizes: &[u64], seconds: f64) -> Measured {
        Measured {
            kernel: kernel.to_owned(),
            sizes: sizes.to_vec(),
            ranks: 1,
            seconds,
            spread: 0.0,
        }
    }

    /// A profile of an H200. Products and copies take twice the tables' times, attention three
    /// times, messages four times, a gather over hosts five times.
    fn measured(tables: &TablePrices, library: Option<&str>) -> Profile {
        let product = tables.gemm.tabled(SIZE, DType::Bf16, 1.0).0;
        let attention = |backward| {
            let shape = measured::attention(ATTENTION);
            let kernel = AttentionKernel::CudnnOrFlash3;
            tables.attention(&shape, kernel, DType::Bf16, backward).0
        };
        let copied = Bytes(8 << 28);
        let copy = copied / (Bandwidth(4800e9) * 0.87);
        let message = tables.collective(CollectiveKind::AllReduce, Bytes(1 << 24), near(8));
        let gather = tables.collective(CollectiveKind::AllGather, Bytes(1 << 24), near(16));
        Profile {
            schema_version: 1,
            tool_version: String::new(),
            machine: Machine {
                processor: "NVIDIA H200".to_owned(),
                cores: 1,
                memory_bytes: 140 << 30,
                gpu: Some(Gpu {
                    count: 8,
                    multiprocessors: 132,
                    attention: library.map(str::to_owned),
                    ..Gpu::default()
                }),
            },
            measured: vec![
                entry("matmul forward bf16", &SIZE, product * 2.0),
                // Our own executor's products add up in 32 bits, and their times include casts.
                entry("matmul weight gradient bf16", &SIZE, 1.0),
                entry("matmul forward f8", &SIZE, 1.0),
                // Faster than the device can.
                entry("matmul forward tf32", &[1 << 14; 3], 1e-9),
                entry(
                    "attention scores forward bf16",
                    &ATTENTION,
                    attention(false) * 3.0,
                ),
                entry(
                    "attention context of input 0 backward bf16",
                    &ATTENTION,
                    attention(true) * 3.0,
                ),
                // Too small: it stays in caches.
                entry("copy", &[1 << 20], 1e-9),
                entry("copy", &[1 << 28], copy.0 * 2.0),
                entry("nccl all-reduce", &[8, 1 << 24], message.0 * 4.0),
                entry("nccl send and receive", &[2, 1 << 24], 1.0),
                entry(
                    "nccl all-gather over hosts",
                    &[16, 8, 1 << 24],
                    gather.0 * 5.0,
                ),
            ],
        }
    }

    fn near(size: u64) -> Group {
        Group { size, stride: 1 }
    }

    /// Prices of H200s by the tables, and with that profile.
    fn both(library: Option<&str>) -> [TablePrices; 2] {
        let mut cluster = catalog::load::cluster("dgx-h200").expect("a preset");
        let fitted = Fitted::default();
        let tables = TablePrices::new(&cluster, 64, &fitted).expect("prices");
        cluster.gpu_profile = Some(Arc::new(measured(&tables, library)));
        let with = TablePrices::new(&cluster, 64, &fitted).expect("prices");
        [tables, with]
    }

    fn assert_ratio(of: [Seconds; 2], wanted: f64, what: &str) {
        let [before, after] = of.map(|time| time.0);
        assert!(
            (after / before / wanted - 1.0).abs() < 1e-9,
            "{what}: {before} {after}"
        );
    }

    #[test]
    fn measured_kernels_beat_tables() {
        let both = both(Some("cuDNN 9.19.0"));
        // Times of a profile are not stretched to those of training.
        let sustained = Fitted::default().get(Constant::TrainingTime);
        let other = [2048, 1024, 512];
        for (size, dtype, pass, wanted) in [
            (SIZE, DType::Bf16, Pass::Forward, 2.0 / sustained),
            (SIZE, DType::Bf16, Pass::BackwardWeight, 2.0 / sustained),
            (other, DType::F16, Pass::BackwardInput, 2.0 / sustained),
            (SIZE, DType::F8, Pass::Forward, 1.0),
        ] {
            let of = both.each_ref().map(|p| p.gemm(size, dtype, pass));
            assert_ratio(of, wanted, &format!("{size:?} {dtype:?} {pass:?}"));
        }
        let [_, with] = &both;
        let side = 1u64 << 14;
        let fast = with.gemm([side; 3], DType::F32, Pass::Forward);
        let rate = 2.0 * (side as f64).powi(3) / fast.0;
        let peak = 494.5e12;
        assert!((rate / peak - 1.0).abs() < 1e-9, "{rate}");
        let moved = |prices: &TablePrices| {
            let time = |bytes| prices.memory_bound(MemoryKind::Optimizer, Bytes(bytes)).0;
            time(2 << 30) - time(1 << 30)
        };
        let [before, after] = both.each_ref().map(moved);
        assert!((after / before - 2.0).abs() < 1e-6, "{before} {after}");
    }

    #[test]
    fn measured_attention_beats_charts_of_the_same_kernel() {
        use AttentionKernel::{CudnnOrFlash3, Flash2};
        let plain = measured::attention(ATTENTION);
        let windowed = AttentionShape {
            window: Some(catalog::Window::Sliding(1024)),
            ..plain
        };
        let longer = AttentionShape {
            q_len: 1 << 14,
            kv_len: 1 << 14,
            ..plain
        };
        for (library, shape, kernel, wanted) in [
            (true, plain, CudnnOrFlash3, 3.0),
            (true, longer, CudnnOrFlash3, 3.0),
            (true, windowed, CudnnOrFlash3, 1.0),
            (true, plain, Flash2, 1.0),
            // Our own kernels say nothing about those of another system.
            (false, plain, CudnnOrFlash3, 1.0),
        ] {
            let both = both(library.then_some("cuDNN 9.19.0"));
            for backward in [false, true] {
                let of = both
                    .each_ref()
                    .map(|p| p.attention(&shape, kernel, DType::Bf16, backward));
                assert_ratio(of, wanted, &format!("{library} {shape:?} {kernel:?}"));
            }
        }
    }

    /// cuDNN's own benchmark of windows of 128 tokens, in milliseconds (NVIDIA/cudnn-frontend@b514eea and @93a91a9,
    /// `benchmark/attention_training/results/gpt_oss`). The charts are of heads twice as wide without windows.
    #[test]
    fn narrow_windows_take_about_what_cudnn_measures() {
        let shape = AttentionShape {
            batch: 2,
            heads: 128,
            kv_heads: 128,
            q_len: 8192,
            kv_len: 8192,
            qk_dim: 64,
            v_dim: 64,
            causal: true,
            window: Some(catalog::Window::Sliding(128)),
        };
        for (name, [forward, backward]) in [
            ("dgx-h200", [0.518, 1.826]),
            ("gb200-nvl72", [0.416, 0.900]),
            ("a100-pcie-node", [1.807, 5.027]),
        ] {
            let cluster = catalog::load::cluster(name).expect("a preset");
            let prices = TablePrices::new(&cluster, 64, &Fitted::default()).expect("prices");
            for (of_backward, measured) in [(false, forward), (true, backward)] {
                let kernel = AttentionKernel::CudnnOrFlash3;
                let time = prices.attention(&shape, kernel, DType::Bf16, of_backward);
                let ratio = time.0 * 1e3 / measured;
                assert!((0.65..1.5).contains(&ratio), "{name}: {ratio}");
            }
        }
    }

    /// The same benchmark in 8 bits on GB200 (@3929da2, MXFP8), and that of Llama 3.1. The backward pass computes all keys.
    #[test]
    fn attention_of_8_bits_takes_about_what_cudnn_measures() {
        let cluster = catalog::load::cluster("gb200-nvl72").expect("a preset");
        let prices = TablePrices::new(&cluster, 64, &Fitted::default()).expect("prices");
        let window = Some(catalog::Window::Sliding(128));
        for (heads, dim, tokens, window, backward, measured) in [
            (128, 64, 4096, window, false, 0.210),
            (128, 64, 16384, window, false, 0.826),
            (128, 64, 4096, None, true, 2.080),
            (128, 64, 16384, None, true, 27.94),
            (64, 128, 4096, None, false, 0.326),
            (64, 128, 16384, None, true, 15.32),
        ] {
            let shape = AttentionShape {
                batch: 2,
                heads,
                kv_heads: heads,
                q_len: tokens,
                kv_len: tokens,
                qk_dim: dim,
                v_dim: dim,
                causal: true,
                window,
            };
            let kernel = AttentionKernel::CudnnFp8;
            let time = prices.attention(&shape, kernel, DType::Bf16, backward);
            let ratio = time.0 * 1e3 / measured;
            assert!((0.65..1.5).contains(&ratio), "{shape:?}: {ratio}");
        }
    }

    #[test]
    fn power_slows_products_on_hopper_but_no_attention() {
        let cluster = catalog::load::cluster("dgx-h100").expect("a preset");
        let slower = |time: fn(&TablePrices) -> Seconds| {
            let of = |training_time| {
                let fitted = Fitted::default().with(Constant::TrainingTime, training_time);
                let prices = TablePrices::new(&cluster, 64, &fitted).expect("prices");
                time(&prices).0
            };
            of(1.2) / of(1.0)
        };
        let product = slower(|of| of.gemm.price([8192; 3], DType::Bf16, Pass::Forward));
        let attention = slower(|of| {
            let shape = measured::attention(ATTENTION);
            of.attention(&shape, AttentionKernel::Flash2, DType::Bf16, true)
        });
        assert!((product - 1.2).abs() < 1e-9, "{product}");
        assert!((attention - 1.0).abs() < 1e-9, "{attention}");
    }

    /// Rates in GB/s of an all-gather over the eight GPUs of a node.
    #[test]
    fn hosts_without_nvlink_reach_what_their_pci_express_does() {
        let fitted = Fitted::default();
        for (name, rates) in [
            ("rtx-pro-6000-node", 20.0..26.0),
            ("h100-pcie-node", 20.0..26.0),
            ("rtx-4090-node", 10.0..13.0),
            ("l40s-node", 10.0..13.0),
            ("a100-pcie-node", 10.0..13.0),
            ("dgx-a100", 150.0..300.0),
        ] {
            let cluster = catalog::load::cluster(name).expect("a preset");
            let prices = TablePrices::new(&cluster, 64, &fitted).expect("prices");
            let bytes = 1u64 << 28;
            let time = prices.collective(CollectiveKind::AllGather, Bytes(bytes), near(8));
            let rate = bytes as f64 * 7.0 / 8.0 / time.0 / 1e9;
            assert!(rates.contains(&rate), "{name}: {rate}");
        }
    }

    /// Attention on Blackwell's RTX cards runs the kernels of Ada, so that the larger card is the faster one.
    #[test]
    fn rtx_cards_of_blackwell_are_faster_than_those_of_ada() {
        let of = |name: &str| {
            let cluster = catalog::load::cluster(name).expect("a preset");
            TablePrices::new(&cluster, 1, &Fitted::default()).expect("prices")
        };
        let product =
            |of: &TablePrices, n, k| of.gemm.price([8192, n, k], DType::Bf16, Pass::Forward).0;
        let attention = |of: &TablePrices, kernel| {
            let shape = measured::attention(ATTENTION);
            of.attention(&shape, kernel, DType::Bf16, true).0
        };
        for (older, newer) in [
            ("rtx-4090-node", "rtx-5090-node"),
            ("rtx-6000-ada-node", "rtx-pro-6000-node"),
        ] {
            let [older, newer] = [older, newer].map(of);
            assert!(product(&newer, 8192, 8192) < product(&older, 8192, 8192));
            for kernel in [AttentionKernel::Flash2, AttentionKernel::CudnnOrFlash3] {
                assert!(attention(&newer, kernel) < attention(&older, kernel));
            }
        }
    }

    #[test]
    fn measured_messages_beat_fits_and_models() {
        let both = both(None);
        let across = Group { size: 8, stride: 8 };
        for (kind, group, wanted) in [
            (CollectiveKind::AllReduce, near(8), 4.0),
            (CollectiveKind::AllReduce, near(4), 1.0),
            (CollectiveKind::AllReduce, near(16), 1.0),
            (CollectiveKind::AllReduce, across, 1.0),
            (CollectiveKind::AllGather, near(8), 1.0),
            (CollectiveKind::AllGather, near(16), 5.0),
            (CollectiveKind::AllGather, near(64), 5.0),
            (CollectiveKind::AllGather, across, 5.0),
            (CollectiveKind::SendRecv, across, 1.0),
        ] {
            let of = both
                .each_ref()
                .map(|p| p.collective(kind, Bytes(1 << 24), group));
            assert_ratio(of, wanted, &format!("{kind:?} {group:?}"));
        }
        let [_, with] = both;
        let step = with.collective(CollectiveKind::SendRecv, Bytes(1 << 24), near(4));
        assert_eq!(step, Seconds(1.0));
    }

    #[test]
    fn provenance_names_the_profile() {
        let [tables, with] = both(Some("cuDNN 9.19.0"));
        let rows = |prices: &TablePrices| {
            let used = prices.constants().into_iter();
            let known = known::rows(prices.architecture, prices.fabric);
            let of_profile = used.filter(|row| !known.contains(row));
            let measured = of_profile.filter(|row| row.origin == Origin::Measured);
            measured
                .map(|row| (row.name, row.value))
                .collect::<Vec<_>>()
        };
        assert_eq!(rows(&tables), []);
        let expected = [
            (
                "matrix products",
                "1 measured, 2.00 to 2.00 times grid h200_sxm; others scaled like the nearest of them",
            ),
            (
                "fused attention, causal, forward",
                "1 measured, 3.00 to 3.00 times the charts; others scaled like the nearest of them",
            ),
            (
                "copies on the device",
                "2088 GB/s: memory bandwidth scaled by it",
            ),
            ("messages inside a node", "2 measured between 2, 8 GPUs"),
            (
                "nccl all-gather between nodes",
                "1 measured, 5.00 to 5.00 times the model; others scaled like the nearest of them",
            ),
        ];
        assert_eq!(
            rows(&with),
            expected.map(|(a, b)| (a.to_owned(), b.to_owned()))
        );
    }
}
