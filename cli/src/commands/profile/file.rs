//! The file of a profile, to which several `profile` runs may add at the same time.
//!
//! Measuring takes minutes, so a run does not lock the file meanwhile. To write, it takes a lock, reads the file again,
//! and adds its own measurements. If two runs measured the same kernel, the later one stays.

use std::collections::BTreeMap;
use std::path::Path;

use catalog::files::{self, Destination, Kind, Replace};
use catalog::profile::{self, Machine, Measured, Profile};

use crate::error::CliError;

/// Identity of a measurement: kernel name, ranks and sizes.
type Key = (String, u64, Vec<u64>);

/// A profile's file, as it was when a run began.
pub(super) struct ProfileFile {
    to: Destination,
    machine: Machine,
    /// Seconds that the file held then, by kernel, ranks and sizes.
    held: BTreeMap<Key, f64>,
}

impl ProfileFile {
    /// Opens a file to add to; returns it with the earlier measurements of this machine.
    pub(super) fn open(path: &Path, machine: &Machine) -> Result<(Self, Profile), CliError> {
        let profile = read(path, machine)?;
        let file = Self {
            to: Destination::check(path, Kind::Profile, Replace::SameKind)?,
            machine: machine.clone(),
            held: profile
                .measured
                .iter()
                .map(|m| (key(m), m.seconds))
                .collect(),
        };
        Ok((file, profile))
    }

    /// Path of the file.
    pub(super) fn path(&self) -> &Path {
        self.to.path()
    }

    /// Adds what is new in `profile` since the file was opened; returns what the file then holds.
    pub(super) fn add(&self, profile: &Profile) -> Result<Profile, CliError> {
        let _lock = files::lock(self.path())?;
        let now = read(self.path(), &self.machine)?;
        let own = profile.measured.iter();
        let own = own.filter(|m| self.held.get(&key(m)) != Some(&m.seconds));
        let mut all = Profile {
            measured: now.measured,
            ..profile.clone()
        };
        all.add(own.cloned());
        self.to.write(all.to_yaml())?;
        Ok(all)
    }
}

fn key(m: &Measured) -> Key {
    (m.kernel.clone(), m.ranks, m.sizes.clone())
}

/// The earlier measurements of this machine.
fn read(path: &Path, machine: &Machine) -> Result<Profile, CliError> {
    let empty = Profile {
        schema_version: profile::SCHEMA_VERSION,
        tool_version: env!("CARGO_PKG_VERSION").to_owned(),
        machine: machine.clone(),
        measured: Vec::new(),
    };
    if !path.exists() {
        return Ok(empty);
    }
    let shown = path.display().to_string();
    let old = Profile::from_yaml(&catalog::text::read(path)?, &shown)?;
    if (&old.machine.processor, old.machine.cores) != (&machine.processor, machine.cores) {
        let (processor, cores) = (&old.machine.processor, old.machine.cores);
        let what = format!("the profile is of another machine ({processor}, {cores} cores)");
        let expected = "another file, named with -o";
        return Err(CliError::unexpected(shown, what, expected));
    }
    let attention = old.machine.gpu.and_then(|gpu| gpu.attention);
    let gpu = machine.gpu.clone();
    Ok(Profile {
        measured: old.measured,
        machine: Machine {
            gpu: gpu.map(|gpu| profile::Gpu { attention, ..gpu }),
            ..machine.clone()
        },
        ..empty
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        Machine {
            processor: "of these tests".to_owned(),
            cores: 2,
            memory_bytes: 1 << 30,
            gpu: None,
        }
    }

    fn measured(kernel: &str, seconds: f64) -> Measured {
        Measured {
            kernel: kernel.to_owned(),
            sizes: vec![8],
            ranks: 1,
            seconds,
            spread: 0.0,
        }
    }

    /// A run in miniature: opens the file, measures, and writes after every measurement.
    fn run(path: &Path, own: &str) {
        let (file, mut profile) = ProfileFile::open(path, &machine()).expect("readable");
        for kernel in 0..20 {
            profile.add([measured(&format!("{own} {kernel}"), 1e-3)]);
            file.add(&profile).expect("writable");
        }
    }

    #[test]
    fn runs_on_one_file_keep_each_others_measurements() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = &folder.path().join("p.yaml");
        std::thread::scope(|scope| {
            for own in ["a", "b", "c"] {
                scope.spawn(move || run(path, own));
            }
        });
        let (_, profile) = ProfileFile::open(path, &machine()).expect("readable");
        assert_eq!(profile.measured.len(), 60);
    }

    #[test]
    fn of_a_kernel_that_both_measured_the_later_stays() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = &folder.path().join("p.yaml");
        let (first, mut early) = ProfileFile::open(path, &machine()).expect("readable");
        early.add([measured("old", 1.0), measured("both", 2.0)]);
        first.add(&early).expect("writable");
        // Two runs that begin from the same file.
        let (a, mut of_a) = ProfileFile::open(path, &machine()).expect("readable");
        let (b, mut of_b) = ProfileFile::open(path, &machine()).expect("readable");
        of_a.add([measured("old", 3.0), measured("both", 4.0)]);
        of_b.add([measured("both", 5.0)]);
        a.add(&of_a).expect("writable");
        let all = b.add(&of_b).expect("writable");
        let seconds: Vec<f64> = all.measured.iter().map(|m| m.seconds).collect();
        // What b read as `old` is older than what a has measured since.
        assert_eq!(seconds, [5.0, 3.0]);
    }
}
