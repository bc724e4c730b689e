//! A folder of checkpoints: adds or replaces one so that a complete one exists at every moment.
//!
//! `DIR/step-00000100/` is a checkpoint: a file per rank and `manifest.json`. It is written in three steps:
//!
//! 1. Every rank writes its file to `.step-00000100.partial` and syncs it.
//! 2. When all ranks have, rank 0 renames the folder to `.step-00000100.sealed`. A rank that fails later cannot remove its
//!    file from there.
//! 3. Rank 0 adds the manifest and gives the folder its final name: a folder with that name is complete.
//!
//! An existing checkpoint of the same step is first renamed to `.step-00000100.replaced`, and removed once the new one has
//! the final name. A `.replaced` folder without one of the final name means that a save died between the two renames; it
//! then counts as the checkpoint.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::files::{Disk, Files, create_dirs, regular, remove_tree};
use super::manifest::{FileEntry, MANIFEST, Manifest, hex, rank_file, step_of};
use super::piece::Piece;
use super::problem::{io, wrong};
use super::rank_file::{MAGIC, PieceEntry};
use crate::error::ExecutorError;

const PARTIAL: &str = ".partial";
const SEALED: &str = ".sealed";
const REPLACED: &str = ".replaced";

/// A folder of checkpoints.
#[derive(Clone, Copy)]
pub(crate) struct Store<'a> {
    dir: &'a Path,
    files: &'a dyn Files,
}

/// What a rank reports about the file it wrote for a checkpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Written {
    pub(crate) file: FileEntry,
    /// Name and global shape of every parameter in the file.
    pub(crate) parameters: BTreeMap<String, Vec<u64>>,
}

/// A folder of checkpoints that one run holds. When dropped, it lets go of the folder, and removes what it made if nothing
/// was saved there.
pub(crate) struct Claim<'a> {
    files: &'a dyn Files,
    /// The folders that were made, the innermost first.
    made: Vec<PathBuf>,
    /// The lock of the folder, which keeps other runs out; `None` where folders cannot be locked.
    lock: Option<File>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // A folder that holds something is not removed, nor are those around it.
        let mut made = self.made.iter();
        let _ = made.try_for_each(|folder| self.files.remove_dir(folder));
        drop(self.lock.take());
    }
}

impl<'a> Store<'a> {
    /// A store on the real file system.
    pub(crate) fn new(dir: &'a Path) -> Self {
        Self::with(dir, &Disk)
    }

    /// A store with given file operations, for tests.
    pub(crate) fn with(dir: &'a Path, files: &'a dyn Files) -> Self {
        Self { dir, files }
    }

    /// Sets a checkpoint aside, as a replacement does before the new one has its name.
    #[cfg(test)]
    pub(super) fn set_aside(&self, step: u64) {
        let aside = self.hidden(step, REPLACED);
        fs::rename(self.target(step), aside).expect("renamed");
    }

    fn target(&self, step: u64) -> PathBuf {
        self.dir.join(final_name(step))
    }

    fn hidden(&self, step: u64, end: &str) -> PathBuf {
        self.dir.join(format!(".step-{step:08}{end}"))
    }

    /// Makes the folder and keeps other runs out of it, until the value returned is dropped.
    pub(crate) fn claim(&self) -> Result<Claim<'a>, ExecutorError> {
        exists(self.dir)?;
        let above = self.dir.ancestors();
        let missing = above.take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists());
        let mut claim = Claim {
            files: self.files,
            made: missing.map(Path::to_owned).collect(),
            lock: None,
        };
        create_dirs(self.files, self.dir).map_err(|e| io(self.dir, &e))?;
        if let Ok(folder) = File::open(self.dir) {
            match folder.try_lock() {
                Ok(()) => claim.lock = Some(folder),
                Err(TryLockError::WouldBlock) => {
                    let reason = "another run saves there now, expected another folder";
                    return Err(wrong(self.dir, reason.to_owned()));
                }
                Err(TryLockError::Error(_)) => {}
            }
        }
        Ok(claim)
    }

    /// Makes the folder and cleans up after an interrupted save: an old checkpoint that was set aside gets its name
    /// back if no new one has it, and incomplete ones are removed.
    pub(crate) fn recover(&self) -> Result<(), ExecutorError> {
        create_dirs(self.files, self.dir).map_err(|e| io(self.dir, &e))?;
        for path in listed(self.dir)? {
            let Some((step, end)) = hidden_step(&path) else {
                continue;
            };
            let target = self.target(step);
            let done = if end == REPLACED && !target.exists() && path.join(MANIFEST).is_file() {
                self.files
                    .rename(&path, &target)
                    .and_then(|()| self.files.sync_dir(self.dir))
            } else {
                remove_tree(self.files, &path, MANIFEST)
            };
            done.map_err(|e| io(&path, &e))?;
        }
        Ok(())
    }

    /// Writes one rank's file of a checkpoint; [`Store::finish`] completes it.
    pub(crate) fn write_rank(
        &self,
        step: u64,
        rank: usize,
        pieces: &[Piece],
    ) -> Result<Written, ExecutorError> {
        let path = self.hidden(step, PARTIAL).join(rank_file(rank));
        let data: Vec<Vec<u8>> = pieces
            .iter()
            .map(|p| {
                let states = p.data.iter();
                let bytes = states.flat_map(|d| bytemuck::cast_slice::<f32, u8>(d));
                bytes.copied().collect()
            })
            .collect();
        let mut offset = 0;
        let entries: Vec<PieceEntry> = pieces
            .iter()
            .zip(&data)
            .map(|(piece, data)| {
                let entry = PieceEntry {
                    name: piece.name.clone(),
                    global: piece.global.clone(),
                    runs: piece.runs.clone(),
                    offset,
                    sha256: hex(data),
                };
                offset += data.len() as u64;
                entry
            })
            .collect();
        let header = serde_json::to_vec(&entries).map_err(|e| wrong(&path, e.to_string()))?;
        let length = (header.len() as u64).to_le_bytes();
        let front = [&MAGIC[..], &length[..], &header[..]];
        let parts = front.into_iter().chain(data.iter().map(Vec::as_slice));
        let file = self.create_rank(&path).map_err(|e| io(&path, &e))?;
        let bytes = self.write_file(file, parts).map_err(|e| io(&path, &e))?;
        Ok(Written {
            file: FileEntry {
                name: rank_file(rank),
                bytes,
                header_sha256: hex(&header),
            },
            parameters: pieces
                .iter()
                .map(|p| (p.name.clone(), p.global.clone()))
                .collect(),
        })
    }

    /// Makes a rank's file and its folder. Retries, because another rank that fails may remove the folder before this
    /// rank's file is in it.
    fn create_rank(&self, path: &Path) -> std::io::Result<File> {
        let folder = path.parent().unwrap_or(self.dir);
        let mut attempts = 3;
        loop {
            create_dirs(self.files, folder)?;
            attempts -= 1;
            match self.files.create(path) {
                Err(e) if e.kind() == std::io::ErrorKind::NotFound && attempts > 0 => {}
                result => return result,
            }
        }
    }

    /// Writes `parts` to a new file and syncs it; returns the number of bytes written.
    fn write_file<'p>(
        &self,
        mut file: File,
        parts: impl Iterator<Item = &'p [u8]>,
    ) -> std::io::Result<u64> {
        let mut bytes = 0;
        for part in parts {
            self.files.write(&mut file, part)?;
            bytes += part.len() as u64;
        }
        self.files.sync(&file)?;
        Ok(bytes)
    }

    /// Completes a checkpoint once all ranks' files are written.
    pub(crate) fn finish(&self, manifest: &Manifest) -> Result<PathBuf, ExecutorError> {
        let step = manifest.step;
        let (folder, target) = (self.hidden(step, SEALED), self.target(step));
        let aside = self.hidden(step, REPLACED);
        self.seal(manifest)?;
        let complete = || -> std::io::Result<()> {
            let text = manifest.bytes();
            let file = self.files.create(&folder.join(MANIFEST))?;
            self.write_file(file, std::iter::once(&text[..]))?;
            self.files.sync_dir(&folder)?;
            if fs::symlink_metadata(&target).is_ok() {
                // The same step was saved before a resume: the new checkpoint replaces it.
                remove_tree(self.files, &aside, MANIFEST)?;
                self.files.rename(&target, &aside)?;
            }
            if let Err(error) = self.files.rename(&folder, &target) {
                // Fails harmlessly where nothing was set aside.
                let _ = self.files.rename(&aside, &target);
                return Err(error);
            }
            self.files.sync_dir(self.dir)
        };
        complete().map_err(|e| io(&target, &e))?;
        // The checkpoint is complete; leftovers of the old one are removed by the next run at the latest.
        let _ = remove_tree(self.files, &aside, MANIFEST);
        Ok(target)
    }

    /// Renames the folder, so that ranks can no longer remove their files, and checks that all are
    /// whole: a rank that failed before may have removed its own.
    fn seal(&self, manifest: &Manifest) -> Result<(), ExecutorError> {
        let partial = self.hidden(manifest.step, PARTIAL);
        let folder = self.hidden(manifest.step, SEALED);
        let renamed = self.files.rename(&partial, &folder);
        renamed.map_err(|e| io(&partial, &e))?;
        for file in &manifest.files {
            let path = folder.join(&file.name);
            let bytes = regular(&path)?;
            if bytes != file.bytes {
                let expected = file.bytes;
                let reason = format!("the file has {bytes} bytes, expected {expected} bytes");
                return Err(wrong(&path, reason));
            }
        }
        Ok(())
    }

    /// Removes an incomplete checkpoint: all of it, or one rank's file and then the folder if it is empty. What cannot
    /// be removed now is removed by the next run.
    pub(crate) fn abandon(&self, step: u64, rank: Option<usize>) {
        let folder = self.hidden(step, PARTIAL);
        match rank {
            None => {
                for folder in [folder, self.hidden(step, SEALED)] {
                    let _ = remove_tree(self.files, &folder, MANIFEST);
                }
            }
            Some(rank) => {
                let _ = self.files.remove_file(&folder.join(rank_file(rank)));
                let _ = self.files.remove_dir(&folder);
            }
        }
    }
}

/// The paths of all entries of a folder.
fn listed(dir: &Path) -> Result<Vec<PathBuf>, ExecutorError> {
    let entries = fs::read_dir(dir).map_err(|e| io(dir, &e))?;
    let paths = entries.map(|entry| Ok(entry.map_err(|e| io(dir, &e))?.path()));
    let mut paths = paths.collect::<Result<Vec<_>, ExecutorError>>()?;
    paths.sort();
    Ok(paths)
}

/// The step and suffix of a folder that has no final name.
fn hidden_step(path: &Path) -> Option<(u64, &'static str)> {
    let name = path.file_name()?.to_str()?.strip_prefix('.')?;
    [PARTIAL, SEALED, REPLACED].into_iter().find_map(|end| {
        let step = step_of(Path::new(name.strip_suffix(end)?))?;
        Some((step, end))
    })
}

/// The final path of a checkpoint that was set aside.
pub(super) fn restored(folder: &Path) -> Option<PathBuf> {
    let (step, _) = hidden_step(folder).filter(|(_, end)| *end == REPLACED)?;
    Some(folder.with_file_name(final_name(step)))
}

/// Folder name of a complete checkpoint.
fn final_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// Whether there is a folder of checkpoints; an error if it is a file.
fn exists(dir: &Path) -> Result<bool, ExecutorError> {
    match fs::metadata(dir) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => match fs::symlink_metadata(dir) {
            Ok(_) => Err(wrong(
                dir,
                "is a symbolic link to nothing, expected a folder".to_owned(),
            )),
            Err(_) => Ok(false),
        },
        Ok(kind) if !kind.is_dir() => Err(wrong(dir, "is a file, expected a folder".to_owned())),
        _ => Ok(true),
    }
}

/// All checkpoints in a folder, by step; including one that was set aside if the new one never got its name.
///
/// # Errors
/// When the folder cannot be read.
pub fn all(dir: &Path) -> Result<BTreeMap<u64, PathBuf>, ExecutorError> {
    if !exists(dir)? {
        return Ok(BTreeMap::new());
    }
    let mut found = BTreeMap::new();
    let paths = listed(dir)?;
    for path in &paths {
        if let Some((step, REPLACED)) = hidden_step(path)
            && path.join(MANIFEST).is_file()
        {
            found.insert(step, path.clone());
        }
    }
    for path in paths {
        if let Some(step) = step_of(&path).filter(|_| path.is_dir()) {
            found.insert(step, path);
        }
    }
    Ok(found)
}

/// The latest checkpoint in a folder of checkpoints, if there is one.
///
/// # Errors
/// When the folder cannot be read.
pub fn latest(dir: &Path) -> Result<Option<PathBuf>, ExecutorError> {
    Ok(all(dir)?.into_values().next_back())
}
