//! The data file of a rank: a header that lists its pieces, and their data.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::files::{read_at, regular};
use super::manifest::{FileEntry, hex};
use super::problem::{Problem, wrong};
use crate::error::ExecutorError;

/// First bytes of a rank's file. Then come the header's length, the header, and the data.
pub(super) const MAGIC: &[u8; 8] = b"vsplanck";
/// Bytes before the header: [`MAGIC`] and the header's length.
const FRONT: u64 = 16;
/// Bytes per element: weight and both moments in fp32.
const ELEMENT: u64 = 12;

/// A piece as listed in a file's header.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PieceEntry {
    pub(super) name: String,
    pub(super) global: Vec<u64>,
    pub(super) runs: Vec<[u64; 2]>,
    /// Offset of its data in bytes from the end of the header.
    pub(super) offset: u64,
    /// SHA-256 of its data.
    pub(super) sha256: String,
}

impl PieceEntry {
    /// Size of its data in bytes. Cannot overflow: opening has checked the runs.
    pub(super) fn bytes(&self) -> u64 {
        ELEMENT * self.runs.iter().map(|run| run[1]).sum::<u64>()
    }

    /// Size of its data in bytes, if its shape and runs are valid.
    fn checked(&self) -> Result<u64, Problem> {
        let (name, global) = (&self.name, &self.global);
        let whole = elements(name, global)?;
        let mut sum = 0u64;
        for &[first, length] in &self.runs {
            let end = first.checked_add(length).filter(|&end| end <= whole);
            if end.is_none() {
                return Err(format!(
                    "{name}: a run of {length} elements from {first} on is beyond its shape {global:?}"
                ));
            }
            sum = sum.saturating_add(length);
        }
        let bytes = sum.checked_mul(ELEMENT).filter(|&bytes| bytes > 0);
        bytes.ok_or_else(|| {
            format!(
                "{name}: its runs have {sum} elements, expected at least one and no more than a file holds"
            )
        })
    }
}

/// Number of elements of a parameter.
pub(super) fn elements(name: &str, shape: &[u64]) -> Result<u64, Problem> {
    let product = shape
        .iter()
        .try_fold(1u64, |all, &dim| all.checked_mul(dim));
    let some = product.filter(|&elements| elements > 0 && !shape.is_empty());
    some.ok_or_else(|| format!("{name}: shape {shape:?} is no parameter's"))
}

/// Reads a file's header: the offset of its data, and its pieces, which must fill the file without gaps.
pub(super) fn read_header(
    path: &Path,
    entry: &FileEntry,
) -> Result<(u64, Vec<PieceEntry>), ExecutorError> {
    let size = regular(path)?;
    if size != entry.bytes {
        let reason = format!("{size} bytes, the manifest says {}", entry.bytes);
        return Err(wrong(path, reason));
    }
    let damaged = || {
        wrong(
            path,
            "is not a rank's file, or its head is damaged".to_owned(),
        )
    };
    if size < FRONT {
        return Err(damaged());
    }
    let mut front = [0; FRONT as usize];
    read_at(path, 0, &mut front)?;
    let (magic, length) = front.split_at(MAGIC.len());
    let length = u64::from_le_bytes(length.try_into().expect("eight bytes"));
    if magic != MAGIC || length > size - FRONT {
        return Err(damaged());
    }
    let mut header = vec![0; length as usize];
    read_at(path, FRONT, &mut header)?;
    if hex(&header) != entry.header_sha256 {
        return Err(wrong(
            path,
            "its header does not match its checksum".to_owned(),
        ));
    }
    let pieces: Vec<PieceEntry> =
        serde_json::from_slice(&header).map_err(|e| wrong(path, e.to_string()))?;
    let first = FRONT + length;
    fill(&pieces, size - first).map_err(|reason| wrong(path, reason))?;
    Ok((first, pieces))
}

/// Checks that pieces are contiguous and fill `bytes` bytes.
fn fill(pieces: &[PieceEntry], bytes: u64) -> Result<(), Problem> {
    let mut next = 0u64;
    for piece in pieces {
        let own = piece.checked()?;
        if piece.offset != next {
            return Err(format!(
                "{}: its data start at byte {}, expected {next}",
                piece.name, piece.offset
            ));
        }
        let end = next.checked_add(own).filter(|&end| end <= bytes);
        next = end.ok_or_else(|| {
            format!(
                "{}: {own} bytes of data from {next} on, the file has {bytes}",
                piece.name
            )
        })?;
    }
    match next == bytes {
        true => Ok(()),
        false => Err(format!("{} bytes after its data", bytes - next)),
    }
}
