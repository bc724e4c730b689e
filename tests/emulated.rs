//! NVIDIA's libraries, emulated (`devices/cuda/tests/emulator`), for tests that start a process with them.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// Names under which the libraries are looked for.
const NAMES: [&str; 6] = [
    "libcuda.so.1",
    "libnvrtc.so.13",
    "libcublasLt.so.13",
    "libcudnn.so.9",
    "libnccl.so.2",
    "libnvidia-ml.so.1",
];
/// The source files of the emulated libraries.
const SOURCES: [&str; 4] = ["libraries.cpp", "driver.cpp", "cudnn.cpp", "emulator.h"];

/// What a process finds `gpus` GPUs by; nothing where no C++ compiler is. `target` keeps libraries and kernels that were
/// compiled.
///
/// # Panics
/// When the libraries cannot be built.
#[must_use]
pub fn environment(target: &Path, gpus: u64) -> Option<Vec<(&'static str, OsString)>> {
    let folder = target.join("emulated-libraries");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../devices/cuda/tests/emulator");
    // Tests of one program are threads.
    static BUILDING: Mutex<()> = Mutex::new(());
    let building = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    build(&source, &folder)?;
    drop(building);
    Some(vec![
        ("VESCALE_CUDA_LIBRARIES", folder.clone().into()),
        ("VESCALE_CUDA_CACHE", folder.join("cache").into()),
        ("EMULATED_FOLDER", folder.into()),
        ("EMULATED_HEADER", source.join("emulator.h").into()),
        ("EMULATED_GPUS", gpus.to_string().into()),
    ])
}

fn build(source: &Path, folder: &Path) -> Option<()> {
    std::fs::create_dir_all(folder).expect("the target folder is writable");
    for name in NAMES {
        let link = folder.join(name);
        if link.symlink_metadata().is_err() {
            std::os::unix::fs::symlink("libemulated.so", link).expect("the folder is writable");
        }
    }
    let library = folder.join("libemulated.so");
    let changed = |file: PathBuf| std::fs::metadata(file).and_then(|about| about.modified());
    let built = changed(library.clone());
    let is_new = |name: &str| {
        let edited = changed(source.join(name)).expect("the source is there");
        built.as_ref().is_ok_and(|built| *built > edited)
    };
    if SOURCES.into_iter().all(is_new) {
        return Some(());
    }
    // Under another name first: a test beside this one may be using what was there.
    let draft = folder.join(format!("libemulated.{}.so", std::process::id()));
    let output = Command::new("c++")
        .args(["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o"])
        .arg(&draft)
        .arg(source.join("libraries.cpp"))
        .args(["-ldl", "-lpthread"])
        .output();
    let Ok(output) = output else {
        eprintln!("not tested: no C++ compiler (c++) is here");
        return None;
    };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    std::fs::rename(draft, library).expect("the folder is writable");
    Some(())
}
