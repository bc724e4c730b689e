//! Compiles kernels for a device's architecture with NVRTC and caches the machine code on disk, keyed by source,
//! options, architecture and compiler version.

#![allow(unsafe_code, reason = "functions of NVRTC")]

use std::ffi::{CString, c_char};
use std::io::Write;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::error::CudaError;
use super::kernels::{Head, Source};
use super::sys::call;
use super::sys::nvrtc::nvrtcProgram;

/// Environment variable: folder that compiled kernels are cached in [default: `vescale-plan` in the user's cache
/// folder].
pub const CACHE: &str = "VESCALE_CUDA_CACHE";

/// NVRTC with its cache folder.
pub struct Compiler {
    version: [i32; 2],
    cache: Option<PathBuf>,
}

impl Compiler {
    /// This machine's NVRTC, with compiled kernels cached in the default folder.
    ///
    /// # Errors
    /// When NVRTC is missing.
    pub fn new() -> Result<Self, CudaError> {
        Self::with_cache(cache_folder())
    }

    /// This machine's NVRTC with another cache folder, or without a cache.
    ///
    /// # Errors
    /// When NVRTC is missing.
    pub fn with_cache(cache: Option<PathBuf>) -> Result<Self, CudaError> {
        let mut version = [0; 2];
        let [major, minor] = &mut version;
        // SAFETY: writes two numbers.
        unsafe { call!(nvrtc::nvrtcVersion(major, minor)) }?;
        Ok(Self { version, cache })
    }

    /// Machine code (cubin) of a source file for a compute capability, from the cache if it is there.
    ///
    /// # Errors
    /// When it does not compile. A cache that cannot be written is no error.
    pub fn cubin(
        &self,
        source: Source,
        head: Head,
        [major, minor]: [u32; 2],
    ) -> Result<Vec<u8>, CudaError> {
        let text = source.text();
        let options = [
            format!("--gpu-architecture=sm_{major}{minor}"),
            "--std=c++17".to_owned(),
            format!("-DHEAD={}", head.key),
            format!("-DVALUE={}", head.value),
        ];
        let path = self.cache.as_ref().map(|folder| {
            let key = format!("{text}{options:?}{:?}", self.version);
            let hash: String = Sha256::digest(key.as_bytes())
                .iter()
                .take(12)
                .map(|byte| format!("{byte:02x}"))
                .collect();
            folder.join(format!("{}-{hash}.cubin", source.file()))
        });
        if let Some(kept) = path.as_ref().and_then(|path| std::fs::read(path).ok()) {
            return Ok(kept);
        }
        let cubin = Self::compile(source.file(), &text, &options)?;
        if let Some(path) = path {
            // If the cache cannot be written, the kernels are compiled again next time.
            let _ = keep(&path, &cubin);
        }
        Ok(cubin)
    }

    fn compile(file: &str, text: &str, options: &[String]) -> Result<Vec<u8>, CudaError> {
        let c = |text: &str| CString::new(text).expect("sources and options have no zeros");
        let (source, name) = (c(text), c(file));
        let owned: Vec<CString> = options.iter().map(|option| c(option)).collect();
        let options: Vec<_> = owned.iter().map(|option| option.as_ptr()).collect();
        let mut program: nvrtcProgram = std::ptr::null_mut();
        let none = std::ptr::null();
        // SAFETY: strings end in 0 and outlive the calls; there are no headers.
        unsafe {
            call!(nvrtc::nvrtcCreateProgram(
                &raw mut program,
                source.as_ptr(),
                name.as_ptr(),
                0,
                none,
                none,
            ))
        }?;
        // SAFETY: as many options as there are.
        let compiled = unsafe {
            call!(nvrtc::nvrtcCompileProgram(
                program,
                options.len() as i32,
                options.as_ptr()
            ))
        };
        // SAFETY: each writes one number, then as many bytes as it said.
        let result = match compiled {
            Ok(()) => written(
                |size| unsafe { call!(nvrtc::nvrtcGetCUBINSize(program, size)) },
                |cubin| unsafe { call!(nvrtc::nvrtcGetCUBIN(program, cubin)) },
            ),
            Err(_) => {
                let log = written(
                    |size| unsafe { call!(nvrtc::nvrtcGetProgramLogSize(program, size)) },
                    |log| unsafe { call!(nvrtc::nvrtcGetProgramLog(program, log)) },
                )?;
                Err(CudaError::Compile {
                    file: file.to_owned(),
                    architecture: owned[0].to_string_lossy().into_owned(),
                    log: String::from_utf8_lossy(&log)
                        .trim_end_matches('\0')
                        .to_owned(),
                })
            }
        };
        // SAFETY: made above, used no more.
        unsafe { call!(nvrtc::nvrtcDestroyProgram(&raw mut program)) }?;
        result
    }
}

/// Calls `write` on a buffer of as many bytes as `size` reports, and returns them.
fn written(
    size: impl FnOnce(*mut usize) -> Result<(), CudaError>,
    write: impl FnOnce(*mut c_char) -> Result<(), CudaError>,
) -> Result<Vec<u8>, CudaError> {
    let mut length = 0;
    size(&raw mut length)?;
    let mut bytes = vec![0u8; length];
    write(bytes.as_mut_ptr().cast())?;
    Ok(bytes)
}

fn cache_folder() -> Option<PathBuf> {
    let folder = |name: &str| {
        std::env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    folder(CACHE)
        .or_else(|| Some(folder("XDG_CACHE_HOME")?.join("vescale-plan")))
        .or_else(|| Some(folder("HOME")?.join(".cache/vescale-plan")))
}

/// Writes a file atomically, because ranks of a job may compile and cache the same kernels at once.
fn keep(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let mut draft = tempfile::NamedTempFile::new_in(folder)?;
    draft.write_all(bytes)?;
    draft.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_keep_the_same_kernels_never_show_a_part() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("kept/kernels.cubin");
        let bytes = vec![7; 1 << 16];
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        keep(&path, &bytes).expect("the folder is writable");
                        assert!(std::fs::read(&path).expect("was kept") == bytes);
                    }
                });
            }
        });
        let kept = std::fs::read_dir(folder.path().join("kept")).expect("a folder");
        assert_eq!(kept.count(), 1);
    }
}
