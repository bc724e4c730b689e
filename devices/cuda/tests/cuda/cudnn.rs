//! cuDNN plans attention for a GPU that is not here, where cuDNN is installed; its workspaces are
//! compared.

#![allow(unsafe_code, reason = "a library built here is loaded")]

use std::path::Path;
use std::process::Command;

use cuda_device::{Name, attention_workspaces};
use dtensor::CausalAttention;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY};

/// Bytes by which a workspace may exceed the predicted one.
const SLACK: u64 = 1024;

/// A Hopper GPU as cuDNN itself would describe it.
const HOPPER: &str = r#"{"deviceVer":900,"driverVer":13000,"deviceName":"NVIDIA H200","cudaDeviceId":0,
"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,
"multiProcessorCount":132,"smCountOrigin":0,"totalGlobalMem":150000000000,"warpSize":32,
"maxSharedMemoryPerBlock":49152,"maxSharedMemoryPerBlockOptin":232448,"oversizedSharedMemoryPerBlock":0,
"reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,
"maxThreadsPerSM":2048,"pciDeviceId":0,"isTccDriver":0,"supportCoopLaunch":1,"smClockRateKHz":1980000,
"memClockRateKHz":3201000,"memoryBusWidth":6144,"l2CacheSize":62914560}"#;

/// Builds and loads a substitute for the CUDA driver that only allows compiling; `None` if there is
/// a driver.
fn driver(folder: &Path) -> Option<Library> {
    if Name::Driver.open().is_ok() {
        return None;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulator/compile_only.cpp");
    let library = folder.join("libcuda.so.1");
    let mut compiler = Command::new("c++");
    compiler
        .args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"])
        .args([&library, &source]);
    let done = compiler.status().expect("there is a compiler");
    assert!(done.success(), "it compiles");
    // SAFETY: it has no initialisers. Its name stands for the driver's from here on.
    let loaded = unsafe { Library::open(Some(&library), RTLD_GLOBAL | RTLD_LAZY) };
    Some(loaded.expect("it was made above"))
}

#[test]
fn graphs_become_plans() {
    // Where there is a GPU, the first two are loaded already; cuDNN finds them by name.
    let libraries = [Name::Nvrtc, Name::CublasLt, Name::Cudnn].map(Name::open);
    if let Some(error) = libraries.iter().find_map(|library| library.as_ref().err()) {
        eprintln!("not tested: {error}");
        return;
    }
    let folder = std::env::temp_dir().join(format!("vescale-cudnn-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    let _driver = driver(&folder);
    std::fs::remove_dir_all(&folder).expect("was made above");
    for (batch, length, heads, dims, window) in [
        // GPT-2, Llama, Mistral, DeepSeek's latent attention, and a few tokens.
        (8, 1024, [12, 12], [64, 64], None),
        (2, 4096, [32, 8], [128, 128], None),
        (1, 8192, [32, 8], [128, 128], Some(4096)),
        (1, 2048, [16, 16], [192, 128], None),
        (1, 17, [4, 1], [64, 64], None),
        (2, 1024, [8, 2], [128, 128], None),
    ] {
        let of = CausalAttention {
            batch,
            length,
            heads,
            dims,
            window,
        };
        let workspaces = attention_workspaces(HOPPER, &of).expect("it has engines for it");
        let [forward, backward] = workspaces;
        let predicted = of.backward_workspace();
        assert!(forward <= SLACK, "{of:?}: {forward}");
        assert!(
            (predicted..=predicted + SLACK).contains(&backward),
            "{of:?}: {backward}, predicted {predicted}"
        );
    }
    // Heads of a size that matrix units do not support.
    let odd = CausalAttention {
        batch: 1,
        length: 64,
        heads: [2, 2],
        dims: [10, 10],
        window: None,
    };
    assert!(attention_workspaces(HOPPER, &odd).is_err());
}
