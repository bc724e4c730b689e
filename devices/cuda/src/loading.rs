//! How NVIDIA's libraries are found and their functions bound. Nothing is linked: a library is loaded when it is
//! first asked for, so the program starts on any machine.
//!
//! A library is looked for in the folders of `VESCALE_CUDA_LIBRARIES` (a list like `PATH`; a Python
//! environment's `site-packages` will do, whose `nvidia/*/lib` folders are searched), then where the
//! dynamic linker looks (`LD_LIBRARY_PATH` among others).

#![allow(
    unsafe_code,
    reason = "functions of C libraries, bound by name with the types of their headers"
)]

use std::path::{Path, PathBuf};

use libloading::Library;

use super::error::CudaError;
use super::library::Name;

/// Where libraries are looked for first.
pub const FOLDERS: &str = "VESCALE_CUDA_LIBRARIES";

impl Name {
    /// Loads it from the first file that is there, and says which that was.
    ///
    /// # Errors
    /// When none is.
    pub fn open(self) -> Result<(Library, String), CudaError> {
        let folders = folders(std::env::var_os(FOLDERS).as_deref());
        let beside = |file: &&str| folders.iter().map(|f| f.join(file)).collect::<Vec<_>>();
        let placed = self.files().iter().flat_map(beside);
        let named = self.files().iter().map(PathBuf::from);
        for path in placed.filter(|p| p.exists()).chain(named) {
            // SAFETY: these libraries' initialisers only set up their own state.
            if let Ok(library) = unsafe { Library::new(&path) } {
                return Ok((library, path.display().to_string()));
            }
        }
        Err(CudaError::Missing {
            library: self,
            tried: self.files().join(", "),
            remedy: self.remedy(),
        })
    }
}

/// The folders of a list, and the library folders of NVIDIA's wheels below each.
fn folders(list: Option<&std::ffi::OsStr>) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for folder in list.map(std::env::split_paths).into_iter().flatten() {
        let wheels = subfolders(&folder.join("nvidia"));
        found.push(folder);
        found.extend(wheels.into_iter().map(|wheel| wheel.join("lib")));
    }
    found
}

fn subfolders(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut found: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    found.retain(|path| path.is_dir());
    found.sort();
    found
}

/// Binds functions of a library: each becomes a method that returns the call's result, checked.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident of $name:expr; $(
        fn $method:ident = $symbol:literal ($($arg:ident: $type:ty),* $(,)?);
    )*) => {
        $(#[$doc])*
        pub struct $table {
            $($method: unsafe extern "C" fn($($type),*) -> i32,)*
            /// File it was loaded from.
            pub path: String,
            // Last: the functions live as long as it.
            _library: libloading::Library,
        }

        impl $table {
            /// Loads the library and binds every function.
            ///
            /// # Errors
            /// When the library or a function is missing.
            pub fn load() -> Result<Self, $crate::CudaError> {
                let (library, path) = $name.open()?;
                Ok(Self {
                    $($method: {
                        // SAFETY: the type is that of the header.
                        let symbol = unsafe {
                            library.get::<unsafe extern "C" fn($($type),*) -> i32>(
                                concat!($symbol, "\0").as_bytes(),
                            )
                        };
                        *symbol.map_err(|_| $crate::CudaError::Function {
                            library: $name,
                            path: path.clone(),
                            function: $symbol,
                        })?
                    },)*
                    path,
                    _library: library,
                })
            }

            $(
                #[doc = concat!("Calls `", $symbol, "`.")]
                ///
                /// # Safety
                /// Arguments are as NVIDIA's documentation of the function asks.
                ///
                /// # Errors
                /// When it does not return success.
                #[allow(clippy::too_many_arguments, reason = "the function's own")]
                pub unsafe fn $method(&self, $($arg: $type),*) -> Result<(), $crate::CudaError> {
                    // SAFETY: passed on to the caller.
                    let code = unsafe { (self.$method)($($arg),*) };
                    if code == 0 {
                        return Ok(());
                    }
                    Err($crate::CudaError::Call {
                        library: $name,
                        call: $symbol,
                        code,
                        reason: self.reason(code),
                    })
                }
            )*
        }
    };
}
pub(super) use functions;

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
