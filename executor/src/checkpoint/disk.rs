//! Checkpoints on a file system.
//!
//! `DIR/step-00000100/` holds one file per rank and `manifest.json`. It is written under a temporary
//! name, every file synced, the manifest last, and then renamed: what has the final name is whole.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{Piece, Source, copy_common};
use crate::error::ExecutorError;

const MAGIC: &[u8; 8] = b"vsplanck";
const MANIFEST: &str = "manifest.json";
const SCHEMA_VERSION: u32 = 1;

/// What a checkpoint says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of this format.
    pub schema_version: u32,
    /// Steps done.
    pub step: u64,
    /// Seed of the job: with the step, the state of every random stream and of the data.
    pub seed: u64,
    /// Model.
    pub model: String,
    /// Strategy that wrote it.
    pub strategy: String,
    /// One file per rank.
    pub files: Vec<FileEntry>,
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Name in the checkpoint's folder.
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// SHA-256 of its header.
    pub header_sha256: String,
}

/// A piece in a file's header.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PieceEntry {
    name: String,
    global: Vec<u64>,
    runs: Vec<[u64; 2]>,
    /// Byte offset of the data in the file.
    offset: u64,
    /// SHA-256 of the data.
    sha256: String,
}

fn io(path: &Path, error: &std::io::Error) -> ExecutorError {
    wrong(path, error.to_string())
}

fn wrong(path: &Path, reason: String) -> ExecutorError {
    ExecutorError::Checkpoint {
        path: path.display().to_string(),
        reason,
    }
}

fn hex(data: &[u8]) -> String {
    Sha256::digest(data)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

fn final_name(dir: &Path, step: u64) -> PathBuf {
    dir.join(format!("step-{step:08}"))
}

fn temporary(dir: &Path, step: u64) -> PathBuf {
    dir.join(format!(".step-{step:08}.partial"))
}

fn rank_file(rank: usize) -> String {
    format!("rank-{rank:05}.bin")
}

/// Writes one rank's file of a checkpoint that [`finish`] completes.
pub(crate) fn write_rank(
    dir: &Path,
    step: u64,
    rank: usize,
    pieces: &[Piece],
) -> Result<FileEntry, ExecutorError> {
    let folder = temporary(dir, step);
    fs::create_dir_all(&folder).map_err(|e| io(&folder, &e))?;
    let path = folder.join(rank_file(rank));
    let data: Vec<Vec<u8>> = pieces
        .iter()
        .map(|p| {
            p.data
                .iter()
                .flat_map(|d| bytemuck::cast_slice::<f32, u8>(d).iter().copied())
                .collect()
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
    let write = || -> std::io::Result<u64> {
        let mut file = File::create(&path)?;
        file.write_all(MAGIC)?;
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        for data in &data {
            file.write_all(data)?;
        }
        file.sync_all()?;
        Ok(file.metadata()?.len())
    };
    let bytes = write().map_err(|e| io(&path, &e))?;
    Ok(FileEntry {
        name: rank_file(rank),
        bytes,
        header_sha256: hex(&header),
    })
}

/// Completes a checkpoint whose files are all written.
pub(crate) fn finish(dir: &Path, manifest: &Manifest) -> Result<PathBuf, ExecutorError> {
    let folder = temporary(dir, manifest.step);
    let path = folder.join(MANIFEST);
    let text = serde_json::to_vec_pretty(manifest).map_err(|e| wrong(&path, e.to_string()))?;
    let target = final_name(dir, manifest.step);
    let write = || -> std::io::Result<()> {
        let mut file = File::create(&path)?;
        file.write_all(&text)?;
        file.sync_all()?;
        File::open(&folder)?.sync_all()?;
        if target.exists() {
            // The same step again, after a resume: the new one replaces the old.
            fs::remove_dir_all(&target)?;
        }
        fs::rename(&folder, &target)?;
        File::open(dir)?.sync_all()
    };
    write().map_err(|e| io(&target, &e))?;
    Ok(target)
}

/// The last complete checkpoint in a folder of checkpoints, if there is one.
///
/// # Errors
/// When the folder cannot be read.
pub fn latest(dir: &Path) -> Result<Option<PathBuf>, ExecutorError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io(dir, &e)),
    };
    let mut found: Vec<PathBuf> = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| io(dir, &e))?.path();
        let named = path
            .file_name()
            .and_then(|n| n.to_str())
            .is_some_and(|n| n.starts_with("step-"));
        if named && path.join(MANIFEST).is_file() {
            found.push(path);
        }
    }
    Ok(found.into_iter().max())
}

/// Data of pieces that match their checksums, by file and offset.
type Checked = BTreeMap<(usize, u64), Arc<Vec<f32>>>;

/// A checkpoint opened for reading.
pub struct Checkpoint {
    folder: PathBuf,
    /// What it says of itself.
    pub manifest: Manifest,
    /// Pieces of every parameter: file, where its data start, and what it is.
    pieces: BTreeMap<String, Vec<(usize, u64, PieceEntry)>>,
    /// What was read and checked so far.
    read: Mutex<Checked>,
}

/// A parameter of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ParameterEntry {
    /// Name.
    pub name: String,
    /// Global shape.
    pub shape: Vec<u64>,
    /// Files that hold pieces of it.
    pub files: Vec<String>,
}

impl Checkpoint {
    /// Opens a checkpoint's folder, or the last complete one in a folder of checkpoints.
    ///
    /// # Errors
    /// When there is none, or its manifest or a header is damaged.
    pub fn open(path: &Path) -> Result<Self, ExecutorError> {
        let folder = if path.join(MANIFEST).is_file() {
            path.to_owned()
        } else {
            latest(path)?.ok_or_else(|| wrong(path, "holds no complete checkpoint".to_owned()))?
        };
        let file = folder.join(MANIFEST);
        let text = fs::read(&file).map_err(|e| io(&file, &e))?;
        let manifest: Manifest =
            serde_json::from_slice(&text).map_err(|e| wrong(&file, e.to_string()))?;
        if manifest.schema_version != SCHEMA_VERSION {
            let version = manifest.schema_version;
            let reason =
                format!("schema_version {version}; this tool reads version {SCHEMA_VERSION}");
            return Err(wrong(&file, reason));
        }
        let mut pieces: BTreeMap<String, Vec<(usize, u64, PieceEntry)>> = BTreeMap::new();
        for (index, entry) in manifest.files.iter().enumerate() {
            let path = folder.join(&entry.name);
            let (start, entries) = read_header(&path, entry)?;
            for piece in entries {
                pieces
                    .entry(piece.name.clone())
                    .or_default()
                    .push((index, start, piece));
            }
        }
        Ok(Self {
            folder,
            manifest,
            pieces,
            read: Mutex::default(),
        })
    }

    /// Its folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Its parameters by name.
    #[must_use]
    pub fn parameters(&self) -> Vec<ParameterEntry> {
        self.pieces
            .iter()
            .map(|(name, pieces)| ParameterEntry {
                name: name.clone(),
                shape: pieces[0].2.global.clone(),
                files: pieces
                    .iter()
                    .map(|p| self.manifest.files[p.0].name.clone())
                    .collect(),
            })
            .collect()
    }

    /// Checks every byte, and that every element of every parameter is there once. Returns what is
    /// wrong.
    #[must_use]
    pub fn verify(&self) -> Vec<ExecutorError> {
        let mut found = Vec::new();
        for (name, pieces) in &self.pieces {
            let mut runs: Vec<[u64; 2]> = Vec::new();
            for (file, start, piece) in pieces {
                if let Err(error) = self.piece(*file, *start, piece) {
                    found.push(error);
                }
                runs.extend(&piece.runs);
            }
            runs.sort_unstable();
            let whole: u64 = pieces[0].2.global.iter().product();
            let mut next = 0;
            for [first, length] in runs {
                if first != next {
                    let reason = format!("{name}: elements {next}..{first} are missing or doubled");
                    found.push(wrong(&self.folder, reason));
                }
                next = first + length;
            }
            if next != whole {
                let reason = format!("{name}: {next} of {whole} elements");
                found.push(wrong(&self.folder, reason));
            }
        }
        found
    }

    /// A piece's data: master weights, then both moments. Checked when it is read first.
    fn piece(
        &self,
        file: usize,
        start: u64,
        piece: &PieceEntry,
    ) -> Result<Arc<Vec<f32>>, ExecutorError> {
        let key = (file, piece.offset);
        let poisoned = std::sync::PoisonError::into_inner;
        if let Some(data) = self.read.lock().unwrap_or_else(poisoned).get(&key) {
            return Ok(Arc::clone(data));
        }
        let path = self.folder.join(&self.manifest.files[file].name);
        let elements: u64 = piece.runs.iter().map(|r| r[1]).sum();
        let mut bytes = vec![0; 12 * elements as usize];
        read_at(&path, start + piece.offset, &mut bytes)?;
        if hex(&bytes) != piece.sha256 {
            let reason = format!("{}: the data do not match their checksum", piece.name);
            return Err(wrong(&path, reason));
        }
        let data = Arc::new(bytemuck::pod_collect_to_vec(&bytes));
        let mut read = self.read.lock().unwrap_or_else(poisoned);
        read.insert(key, Arc::clone(&data));
        Ok(data)
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
        for (file, start, piece) in pieces {
            if piece.global != global {
                let reason = format!(
                    "{name} has shape {:?}, the model wants {global:?}",
                    piece.global
                );
                return Err(wrong(&self.folder, reason));
            }
            let meets = |run: &[u64; 2]| run[0] < end && run[0] + run[1] > first;
            if piece.runs.iter().any(meets) {
                let data = self.piece(*file, *start, piece)?;
                let (master, moments) = data.split_at(data.len() / 3);
                let (momentum, variance) = moments.split_at(moments.len() / 2);
                copied += copy_common(&piece.runs, [master, momentum, variance], first, &mut into);
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

/// Where a file's data start, and what it holds.
fn read_header(path: &Path, entry: &FileEntry) -> Result<(u64, Vec<PieceEntry>), ExecutorError> {
    let size = fs::metadata(path).map_err(|e| io(path, &e))?.len();
    if size != entry.bytes {
        let reason = format!("{size} bytes, the manifest says {}", entry.bytes);
        return Err(wrong(path, reason));
    }
    let mut front = [0; 16];
    read_at(path, 0, &mut front)?;
    let length = u64::from_le_bytes(front[8..].try_into().expect("eight bytes"));
    if &front[..8] != MAGIC || length > size - 16 {
        return Err(wrong(
            path,
            "is not a rank's file, or its head is damaged".to_owned(),
        ));
    }
    let mut header = vec![0; length as usize];
    read_at(path, 16, &mut header)?;
    if hex(&header) != entry.header_sha256 {
        return Err(wrong(
            path,
            "its header does not match its checksum".to_owned(),
        ));
    }
    let pieces: Vec<PieceEntry> =
        serde_json::from_slice(&header).map_err(|e| wrong(path, e.to_string()))?;
    Ok((16 + length, pieces))
}

fn read_at(path: &Path, offset: u64, into: &mut [u8]) -> Result<(), ExecutorError> {
    use std::io::{Read, Seek, SeekFrom};
    File::open(path)
        .and_then(|mut file| {
            file.seek(SeekFrom::Start(offset))?;
            file.read_exact(into)
        })
        .map_err(|e| io(path, &e))
}

impl Manifest {
    pub(crate) fn new(
        step: u64,
        seed: u64,
        (model, strategy): (String, String),
        files: Vec<FileEntry>,
    ) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            step,
            seed,
            model,
            strategy,
            files,
        }
    }
}
