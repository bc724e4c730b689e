//! How NVIDIA's libraries and their functions are found. Nothing is linked: a library is loaded on first use, so the
//! program starts on any machine.
//!
//! A library is looked for in the folders of `VESCALE_CUDA_LIBRARIES` (a list like `PATH`; a Python
//! environment's `site-packages` will do, whose `nvidia/*/lib` folders are searched), then where the
//! dynamic linker looks (`LD_LIBRARY_PATH` among others).

#![allow(
    unsafe_code,
    reason = "functions of C libraries, bound by name with the types of their headers"
)]

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::Library;

use super::error::CudaError;
use super::library::{LIBRARIES, Name};

/// Environment variable: folders in which libraries are looked for first.
pub const FOLDERS: &str = "VESCALE_CUDA_LIBRARIES";

/// A loaded library. It is never unloaded: libraries leave threads behind that run their code (NCCL 2.28 does).
#[derive(Debug)]
pub struct Loaded {
    library: Library,
    /// The file it was loaded from.
    pub path: String,
}

impl Name {
    /// Loads the library, once per process, from the first of its files that can be loaded.
    ///
    /// # Errors
    /// When no file can be loaded.
    pub fn open(self) -> Result<&'static Loaded, CudaError> {
        static LOADED: [OnceLock<Loaded>; LIBRARIES.len()] =
            [const { OnceLock::new() }; LIBRARIES.len()];
        let place = &LOADED[self as usize];
        if let Some(loaded) = place.get() {
            return Ok(loaded);
        }
        let folders = folders(std::env::var_os(FOLDERS).as_deref());
        let beside = |file: &&str| folders.iter().map(|f| f.join(file)).collect::<Vec<_>>();
        let placed = self.files().iter().flat_map(beside);
        let named = self.files().iter().map(PathBuf::from);
        for path in placed.filter(|p| p.exists()).chain(named) {
            self.open_parts(&path);
            // SAFETY: these libraries' initialisers only set up their own state.
            if let Ok(library) = unsafe { Library::new(&path) } {
                let path = path.display().to_string();
                return Ok(place.get_or_init(|| Loaded { library, path }));
            }
        }
        Err(CudaError::Missing {
            library: self,
            tried: self.files().join(", "),
            remedy: self.remedy(),
        })
    }

    /// Loads libraries in this one's folder that it opens by bare name, such as NVRTC 13.0's
    /// built-in functions.
    fn open_parts(self, path: &Path) {
        let folder = path
            .parent()
            .filter(|folder| self == Self::Nvrtc && !folder.as_os_str().is_empty());
        for part in folder.map(files).unwrap_or_default() {
            let name = part.file_name().map(|name| name.to_string_lossy());
            if name.is_some_and(|name| name.starts_with("libnvrtc-builtins.so")) {
                // SAFETY: as for the library itself. If it does not load, compiling fails later.
                let _ = unsafe { Library::new(&part) }.map(std::mem::forget);
            }
        }
    }
}

/// The folders of a list, and the library folders of NVIDIA's wheels below each.
fn folders(list: Option<&std::ffi::OsStr>) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for folder in list.map(std::env::split_paths).into_iter().flatten() {
        let wheels = files(&folder.join("nvidia"));
        found.push(folder);
        found.extend(wheels.into_iter().map(|wheel| wheel.join("lib")));
    }
    found
}

/// The files of a folder, sorted by name.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut found: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    found.sort();
    found
}

/// A function pointer, cached at its call site.
pub(crate) type Found = OnceLock<unsafe extern "C" fn()>;

/// Finds a function of a library with the signature of `declared`, but returning a plain number.
///
/// # Errors
/// When the library or the function is missing.
pub(crate) fn function<S: Signature>(
    _declared: Option<S>,
    library: Name,
    name: &'static str,
    found: &'static Found,
) -> Result<S::Foreign, CudaError> {
    let function = match found.get() {
        Some(function) => *function,
        None => {
            let loaded = library.open()?;
            // SAFETY: a function, whose type is corrected below.
            let function = unsafe { loaded.library.get::<unsafe extern "C" fn()>(name) };
            let function = function.map_err(|_| CudaError::Function {
                library,
                path: loaded.path.clone(),
                function: name,
            })?;
            *found.get_or_init(|| *function)
        }
    };
    // SAFETY: both are function pointers; the type is the header's, with a number for the code.
    Ok(unsafe { std::mem::transmute_copy(&function) })
}

/// A function signature as Rust declares it.
pub(crate) trait Signature {
    /// The same signature in C, with a number for the result: a library may return a code newer than its declaration.
    type Foreign: Copy;
}

macro_rules! signatures {
    ($first:ident $($rest:ident)*) => {
        signatures!(@of $first $($rest)*);
        signatures!($($rest)*);
    };
    () => { signatures!(@of); };
    (@of $($argument:ident)*) => {
        impl<Code, $($argument),*> Signature for unsafe fn($($argument),*) -> Code {
            type Foreign = unsafe extern "C" fn($($argument),*) -> i32;
        }
    };
}
signatures!(A B C D E F G H I J K L M N O P);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheels_of_a_python_environment_are_searched() {
        let site = std::env::temp_dir().join(format!("vescale-site-{}", std::process::id()));
        let lib = site.join("nvidia/nccl/lib");
        std::fs::create_dir_all(&lib).expect("a temporary folder");
        let list = std::env::join_paths([Path::new("/nowhere"), &site]).expect("no colons");
        let found = folders(Some(&list));
        std::fs::remove_dir_all(&site).expect("was made above");
        assert_eq!(found, [PathBuf::from("/nowhere"), site, lib]);
        assert!(folders(None).is_empty());
    }
}
