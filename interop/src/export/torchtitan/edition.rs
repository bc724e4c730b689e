//! The forms that torchtitan's configuration has had over its versions.

/// A form of the configuration: TOML of 0.2, Python of 0.3, Python of main.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Edition {
    Toml02,
    Python03,
    PythonMain,
}
