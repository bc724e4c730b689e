//! The NVIDIA libraries that the cuda device calls.

use std::fmt;

/// A library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Name {
    /// The CUDA driver.
    Driver,
    /// The compiler of CUDA C kernels.
    Nvrtc,
    /// GEMMs.
    CublasLt,
    /// Core attention.
    Cudnn,
    /// Collectives and point-to-point messages between GPUs.
    Nccl,
    /// Clocks and power of GPUs.
    Nvml,
}

/// Every library, in the order they are needed.
pub const LIBRARIES: [Name; 6] = [
    Name::Driver,
    Name::Nvrtc,
    Name::CublasLt,
    Name::Cudnn,
    Name::Nccl,
    Name::Nvml,
];

impl Name {
    /// The library's file names, newest version first.
    #[must_use]
    pub fn files(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &["libcuda.so.1", "libcuda.so"],
            Self::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
            Self::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
            Self::Cudnn => &["libcudnn.so.9", "libcudnn.so"],
            Self::Nccl => &["libnccl.so.2", "libnccl.so"],
            Self::Nvml => &["libnvidia-ml.so.1", "libnvidia-ml.so"],
        }
    }

    /// How to install the library, for error messages.
    #[must_use]
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Driver | Self::Nvml => "the NVIDIA driver package installs it",
            Self::Nvrtc => {
                "the CUDA toolkit has it, or `pip install nvidia-cuda-nvrtc` with \
                 VESCALE_CUDA_LIBRARIES set to that environment's site-packages"
            }
            Self::CublasLt => {
                "the CUDA toolkit has it, or `pip install nvidia-cublas` with \
                 VESCALE_CUDA_LIBRARIES set to that environment's site-packages"
            }
            Self::Cudnn => {
                "NVIDIA's package cudnn9 has it, or `pip install nvidia-cudnn-cu13` with \
                 VESCALE_CUDA_LIBRARIES set to that environment's site-packages"
            }
            Self::Nccl => {
                "NVIDIA's package libnccl2 has it, or `pip install nvidia-nccl-cu13` with \
                 VESCALE_CUDA_LIBRARIES set to that environment's site-packages"
            }
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Driver => "the CUDA driver",
            Self::Nvrtc => "NVRTC",
            Self::CublasLt => "cuBLASLt",
            Self::Cudnn => "cuDNN",
            Self::Nccl => "NCCL",
            Self::Nvml => "NVML",
        })
    }
}
