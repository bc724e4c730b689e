//! Functions of NVIDIA's libraries, with the types and constants of their headers (CUDA 13.0, cuDNN
//! 9.19, NCCL 2.28). One file per library.

pub mod cublaslt;
pub mod cudnn;
pub mod driver;
pub mod nccl;
pub mod nvml;
pub mod nvrtc;
