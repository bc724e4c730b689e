//! A checkpoint opened for reading.
//!
//! Opening checks the sizes, offsets, runs and shapes in the manifest and headers against the files, so it is safe to
//! allocate whatever a [`Checkpoint`] describes: it never exceeds what its files hold.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde::Serialize;
use sha2::{Digest, Sha256};

use super::files::read_at;
use super::manifest::{MANIFEST, Manifest, hex, hex_of};
use super::piece::{Source, copy_common};
use super::problem::{Problem, io, wrong};
use super::rank_file::{PieceEntry, elements, read_header};
use super::store::{all, latest, restored};
use crate::error::ExecutorError;

/// Bytes read at a time while checksums are verified.
const CHUNK: usize = 1 << 20;

/// A piece and its position in the files.
struct Held {
    /// Index of the file in the manifest.
    file: usize,
    /// Offset of its data in the file, in bytes.
    start: u64,
    entry: PieceEntry,
}

/// Data of pieces whose checksums matched, by file index and offset.
type Checked = BTreeMap<(usize, u64), Arc<Vec<f32>>>;

/// A checkpoint opened for reading.
pub struct Checkpoint {
    folder: PathBuf,
    /// The checkpoint's manifest.
    pub manifest: Manifest,
    /// The pieces of every parameter, by name.
    pieces: BTreeMap<String, Vec<Held>>,
    /// Cache of pieces that were read and whose checksums matched.
    read: Mutex<Checked>,
}

/// A parameter stored in a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ParameterEntry {
    /// Name in the model's `state_dict`.
    pub name: String,
    /// Global shape.
    pub shape: Vec<u64>,
    /// Names of the files that hold pieces of it.
    pub files: Vec<String>,
}

/// Whether a path is a checkpoint itself, rather than a folder of checkpoints.
fn is_one(path: &Path) -> bool {
    path.join(MANIFEST).is_file()
}

impl Checkpoint {
    /// Opens a checkpoint, or the latest one in a folder of checkpoints.
    ///
    /// # Errors
    /// When there is none, or its manifest or a header is damaged.
    pub fn open(path: &Path) -> Result<Self, ExecutorError> {
        Self::at(Self::locate(path)?)
    }

    /// The folder of the checkpoint at `path`, or of the latest one in a folder of checkpoints.
    ///
    /// # Errors
    /// When there is none.
    pub fn locate(path: &Path) -> Result<PathBuf, ExecutorError> {
        if is_one(path) {
            return Ok(path.to_owned());
        }
        latest(path)?.ok_or_else(|| none(path))
    }

    /// Opens the checkpoint in `folder`.
    ///
    /// # Errors
    /// When its manifest or a header is damaged.
    pub fn at(folder: PathBuf) -> Result<Self, ExecutorError> {
        let manifest = Manifest::read(&folder)?;
        let mut pieces: BTreeMap<String, Vec<Held>> = BTreeMap::new();
        for (file, entry) in manifest.files.iter().enumerate() {
            let path = folder.join(&entry.name);
            let (first, entries) = read_header(&path, entry)?;
            for entry in entries {
                let start = first + entry.offset;
                let name = entry.name.clone();
                let held = Held { file, start, entry };
                pieces.entry(name).or_default().push(held);
            }
        }
        complete(&manifest, &pieces).map_err(|reason| wrong(&folder, reason))?;
        Ok(Self {
            folder,
            manifest,
            pieces,
            read: Mutex::default(),
        })
    }

    /// Opens a checkpoint to continue from and verifies every byte: the one at `path`, or the latest undamaged one in
    /// a folder of checkpoints. Also returns what is wrong with later ones.
    ///
    /// # Errors
    /// When there is no undamaged one, or `path` is itself a damaged checkpoint.
    pub fn open_whole(path: &Path) -> Result<(Self, Vec<ExecutorError>), ExecutorError> {
        if is_one(path) {
            return Ok((Self::whole(path)?, Vec::new()));
        }
        let mut damaged = Vec::new();
        for folder in all(path)?.values().rev() {
            match Self::whole(folder) {
                Ok(checkpoint) => return Ok((checkpoint, damaged)),
                Err(error) => damaged.push(error),
            }
        }
        Err(damaged.into_iter().next().unwrap_or_else(|| none(path)))
    }

    fn whole(folder: &Path) -> Result<Self, ExecutorError> {
        if !is_one(folder) {
            return Err(wrong(folder, format!("has no {MANIFEST}")));
        }
        let checkpoint = Self::at(folder.to_owned())?;
        match checkpoint.verify().into_iter().next() {
            Some(error) => Err(error),
            None => Ok(checkpoint),
        }
    }

    /// Folder of the checkpoint.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The stored parameters in order of name.
    #[must_use]
    pub fn parameters(&self) -> Vec<ParameterEntry> {
        self.pieces
            .iter()
            .map(|(name, pieces)| ParameterEntry {
                name: name.clone(),
                shape: pieces[0].entry.global.clone(),
                files: pieces
                    .iter()
                    .map(|p| self.manifest.files[p.file].name.clone())
                    .collect(),
            })
            .collect()
    }

    /// Verifies every checksum and returns the errors. That every element of every parameter is there exactly once was
    /// already checked on opening.
    #[must_use]
    pub fn verify(&self) -> Vec<ExecutorError> {
        let mut chunk = vec![0; CHUNK];
        let pieces = self.pieces.values().flatten();
        let mut damage = |piece| self.check(piece, &mut chunk).err();
        pieces.filter_map(&mut damage).collect()
    }

    fn path(&self, piece: &Held) -> PathBuf {
        let name = &self.manifest.files[piece.file].name;
        let path = self.folder.join(name);
        // A checkpoint that was set aside gets its final name back when the resumed run prepares the folder.
        let back = restored(&self.folder).filter(|_| !path.exists());
        back.map_or(path, |folder| folder.join(name))
    }

    /// Compares a piece's data with its checksum, reading one chunk at a time.
    fn check(&self, piece: &Held, chunk: &mut [u8]) -> Result<(), ExecutorError> {
        let path = self.path(piece);
        let mut digest = Sha256::new();
        let mut left = piece.entry.bytes();
        let mut read = || -> std::io::Result<()> {
            let mut file = File::open(&path)?;
            file.seek(SeekFrom::Start(piece.start))?;
            while left > 0 {
                let part = left.min(chunk.len() as u64);
                let part = &mut chunk[..part as usize];
                file.read_exact(part)?;
                digest.update(&*part);
                left -= part.len() as u64;
            }
            Ok(())
        };
        read().map_err(|e| io(&path, &e))?;
        piece.matches(&hex_of(digest), &path)
    }

    /// A piece's data: master weights, then both moments. Verified when first read.
    fn data(&self, piece: &Held) -> Result<Arc<Vec<f32>>, ExecutorError> {
        let key = (piece.file, piece.start);
        let poisoned = std::sync::PoisonError::into_inner;
        if let Some(data) = self.read.lock().unwrap_or_else(poisoned).get(&key) {
            return Ok(Arc::clone(data));
        }
        let path = self.path(piece);
        let mut bytes = vec![0; piece.entry.bytes() as usize];
        read_at(&path, piece.start, &mut bytes)?;
        piece.matches(&hex(&bytes), &path)?;
        let data = Arc::new(bytemuck::pod_collect_to_vec(&bytes));
        let mut read = self.read.lock().unwrap_or_else(poisoned);
        read.insert(key, Arc::clone(&data));
        Ok(data)
    }
}

fn none(path: &Path) -> ExecutorError {
    wrong(
        path,
        "holds no complete checkpoint; expected a folder that `run --checkpoints` wrote".to_owned(),
    )
}

impl Held {
    fn matches(&self, sha256: &str, path: &Path) -> Result<(), ExecutorError> {
        if sha256 == self.entry.sha256 {
            return Ok(());
        }
        let name = &self.entry.name;
        let reason = format!("{name}: the data do not match their checksum");
        Err(wrong(path, reason))
    }
}

/// Checks that every element of every parameter is there exactly once.
fn complete(manifest: &Manifest, pieces: &BTreeMap<String, Vec<Held>>) -> Result<(), Problem> {
    for (name, pieces) in pieces {
        let shape = &pieces[0].entry.global;
        if let Some(other) = pieces.iter().find(|p| p.entry.global != *shape) {
            let other = &other.entry.global;
            return Err(format!("{name} has two shapes: {shape:?} and {other:?}"));
        }
        let runs = pieces.iter().flat_map(|p| p.entry.runs.iter().copied());
        let mut runs: Vec<[u64; 2]> = runs.collect();
        runs.sort_unstable();
        let mut next = 0;
        for [first, length] in runs {
            if first > next {
                return Err(format!("{name}: elements {next}..{first} are missing"));
            }
            if first < next {
                return Err(format!("{name}: element {first} is there twice"));
            }
            next = first + length;
        }
        let whole = elements(name, shape)?;
        if next != whole {
            return Err(format!("{name}: elements {next}..{whole} are missing"));
        }
    }
    let Some(listed) = &manifest.parameters else {
        return match pieces.is_empty() {
            true => Err("its files hold no parameters".to_owned()),
            false => Ok(()),
        };
    };
    for (name, shape) in listed {
        match pieces.get(name).map(|pieces| &pieces[0].entry.global) {
            Some(there) if there == shape => {}
            Some(there) => {
                return Err(format!(
                    "{name} has shape {there:?}, the manifest says {shape:?}"
                ));
            }
            None => return Err(format!("{name} is missing")),
        }
    }
    match pieces.keys().find(|name| !listed.contains_key(*name)) {
        Some(name) => Err(format!("{name} is not in the manifest's list")),
        None => Ok(()),
    }
}

impl Source for Checkpoint {
    fn read(
        &self,
        name: &str,
        global: &[u64],
        first: u64,
        mut into: [&mut [f32]; 3],
    ) -> Result<(), ExecutorError> {
        let pieces = self
            .pieces
            .get(name)
            .ok_or_else(|| wrong(&self.folder, format!("{name} is not in the checkpoint")))?;
        let end = first + into[0].len() as u64;
        let mut copied = 0;
        for piece in pieces {
            let entry = &piece.entry;
            if entry.global != global {
                let reason = format!(
                    "{name} has shape {:?}, the model wants {global:?}",
                    entry.global
                );
                return Err(wrong(&self.folder, reason));
            }
            let meets = |run: &[u64; 2]| run[0] < end && run[0] + run[1] > first;
            if entry.runs.iter().any(meets) {
                let data = self.data(piece)?;
                let (master, moments) = data.split_at(data.len() / 3);
                let (momentum, variance) = moments.split_at(moments.len() / 2);
                copied += copy_common(&entry.runs, [master, momentum, variance], first, &mut into);
            }
        }
        if copied < into[0].len() {
            let reason = format!(
                "{name}: {copied} of {} elements from {first} on",
                into[0].len()
            );
            return Err(wrong(&self.folder, reason));
        }
        Ok(())
    }
}
