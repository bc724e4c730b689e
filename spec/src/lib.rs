//! What we are given: units, provenance, models, devices, clusters, workloads, runtimes, tables.

pub mod calibration;
pub mod cluster;
pub mod cluster_file;
mod cluster_presets;
pub mod device;
pub mod dtype;
pub mod error;
pub mod hf;
pub mod load;
pub mod model;
mod model_presets;
pub mod parallelism;
pub mod profile;
pub mod provenance;
pub mod residuals;
pub mod runs;
pub mod runtime;
pub mod runtime_file;
pub mod runtime_presets;
pub mod suggest;
pub mod tables;
pub mod text;
pub mod units;
pub mod workload;

pub use cluster::{Cluster, Fabric, Link};
pub use device::{Architecture, Device};
pub use dtype::{DType, Precision};
pub use error::SpecError;
pub use model::{LayerClass, ModelConfig};
pub use parallelism::{Axis, AxisOrder, CpKind, Overlap, ScheduleKind, Zero};
pub use profile::Profile;
pub use provenance::{Origin, Sourced};
pub use runtime::Runtime;
pub use units::{Bandwidth, Bytes, FlopRate, Flops, Seconds};
pub use workload::Workload;
