//! File operations for tests, of which one fails. Nothing is synced to the disk; a list records
//! what a power cut would lose.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::checkpoint::Store;
use crate::checkpoint::files::{Disk, Files};

/// The fault injected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fault {
    /// The process is killed: this call and all later ones do nothing, except that a write does its first half.
    Kill,
    /// A power cut: like `Kill`, and unsynced bytes of files and names of folders are lost.
    PowerCut,
    /// The disk is full: a write or new file fails, and so do all later ones; other calls work.
    FullDisk,
    /// This call fails; all others work.
    Once,
    /// Rank 1 gives up before this call, and takes its file of a checkpoint back; all calls work.
    RankGivesUp {
        /// The step of the checkpoint.
        step: u64,
    },
}

/// A change of names that has not been synced.
enum Change {
    Made(PathBuf),
    Renamed(PathBuf, PathBuf),
}

#[derive(Default)]
struct State {
    calls: usize,
    /// Files with bytes that have not been synced.
    dirty: Vec<PathBuf>,
    changes: Vec<Change>,
}

/// A disk with a fault at one call.
pub(super) struct Dying {
    fault: Fault,
    /// Index of the faulty call, from 0; `None` for no fault.
    at: Option<usize>,
    /// The folder of checkpoints.
    dir: PathBuf,
    state: Mutex<State>,
}

impl Dying {
    pub(super) fn new(dir: &Path, fault: Fault, at: usize) -> Self {
        Self {
            fault,
            at: Some(at),
            dir: dir.to_owned(),
            state: Mutex::default(),
        }
    }

    /// A disk without a fault.
    pub(super) fn never() -> Self {
        Self {
            at: None,
            ..Self::new(Path::new(""), Fault::Once, 0)
        }
    }

    /// Whether the fault has happened.
    pub(super) fn died(&self) -> bool {
        let calls = self.state.lock().expect("no panic").calls;
        self.at.is_some_and(|at| calls > at)
    }

    /// Counts a call and fails if the fault says so.
    fn call(&self, grows: bool) -> io::Result<()> {
        let mut state = self.state.lock().expect("no panic");
        let call = state.calls;
        state.calls += 1;
        let fails = |at| match self.fault {
            Fault::Kill | Fault::PowerCut => call >= at,
            Fault::FullDisk => call >= at && grows,
            Fault::Once => call == at,
            Fault::RankGivesUp { .. } => false,
        };
        if let Fault::RankGivesUp { step } = self.fault
            && self.at == Some(call)
        {
            Store::new(&self.dir).abandon(step, Some(1));
        }
        match self.at.is_some_and(fails) {
            true => Err(io::Error::other(format!("{:?} at {call}", self.fault))),
            false => Ok(()),
        }
    }

    /// After a power cut: undoes what was not synced, in reverse order.
    pub(super) fn restart(&self) {
        if self.fault != Fault::PowerCut {
            return;
        }
        let mut state = self.state.lock().expect("no panic");
        for path in state.dirty.drain(..) {
            // It may have been removed since.
            let _ = File::options()
                .write(true)
                .open(&path)
                .map(|f| f.set_len(0));
        }
        for change in state.changes.drain(..).rev() {
            let _ = match change {
                Change::Made(path) if path.is_dir() => fs::remove_dir_all(&path),
                Change::Made(path) => fs::remove_file(&path),
                Change::Renamed(from, to) => fs::rename(&to, &from),
            };
        }
    }

    fn changed(&self, change: Change) {
        self.state.lock().expect("no panic").changes.push(change);
    }
}

/// The folder whose names a change affects.
fn folder(change: &Change) -> Option<&Path> {
    match change {
        Change::Made(path) | Change::Renamed(path, _) => path.parent(),
    }
}

impl Files for Dying {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.call(true)?;
        Disk.create_dir(path)?;
        self.changed(Change::Made(path.to_owned()));
        Ok(())
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        self.call(true)?;
        let file = Disk.create(path)?;
        self.changed(Change::Made(path.to_owned()));
        self.state
            .lock()
            .expect("no panic")
            .dirty
            .push(path.to_owned());
        Ok(file)
    }

    fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<()> {
        let first_half = self.died();
        if let Err(error) = self.call(true) {
            if !first_half {
                Disk.write(file, &bytes[..bytes.len() / 2])?;
            }
            return Err(error);
        }
        Disk.write(file, bytes)
    }

    fn sync(&self, _: &File) -> io::Result<()> {
        self.call(false)?;
        // Files are written one at a time: the last that was made is the one.
        self.state.lock().expect("no panic").dirty.pop();
        Ok(())
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.call(false)?;
        let mut state = self.state.lock().expect("no panic");
        state.changes.retain(|change| folder(change) != Some(path));
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.call(false)?;
        Disk.rename(from, to)?;
        self.changed(Change::Renamed(from.to_owned(), to.to_owned()));
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.call(false)?;
        Disk.remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.call(false)?;
        Disk.remove_dir(path)
    }
}
