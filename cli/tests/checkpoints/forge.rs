//! Makes checkpoints with valid checksums and wrong content.

use std::fs;
use std::path::Path;

use executor::checkpoint::Manifest;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// A checkpoint taken apart.
#[derive(Clone)]
pub(crate) struct Forge {
    pub(crate) manifest: Manifest,
    /// Per rank: heads of pieces with their data.
    pub(crate) ranks: Vec<Vec<(Value, Vec<u8>)>>,
}

fn sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Forge {
    pub(crate) fn read(folder: &Path) -> Self {
        let read = |name: &str| fs::read(folder.join(name)).expect("readable");
        let manifest: Manifest =
            serde_json::from_slice(&read("manifest.json")).expect("a manifest");
        let ranks = manifest.files.iter().map(|file| {
            let bytes = read(&file.name);
            let length = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
            let (header, data) = bytes[16..].split_at(length as usize);
            let heads: Vec<Value> = serde_json::from_slice(header).expect("a header");
            let starts = heads
                .iter()
                .map(|h| h["offset"].as_u64().expect("a number") as usize);
            let starts: Vec<usize> = starts.chain([data.len()]).collect();
            let parts = starts.windows(2).map(|w| data[w[0]..w[1]].to_vec());
            heads.into_iter().zip(parts).collect()
        });
        let ranks = ranks.collect();
        Self { manifest, ranks }
    }

    /// Writes it with valid sizes and checksums.
    pub(crate) fn write(mut self, folder: &Path) {
        fs::create_dir_all(folder).expect("writable");
        for (rank, (entry, pieces)) in self.manifest.files.iter_mut().zip(&self.ranks).enumerate() {
            let heads: Vec<&Value> = pieces.iter().map(|(head, _)| head).collect();
            let header = serde_json::to_vec(&heads).expect("JSON");
            let mut bytes = b"vsplanck".to_vec();
            bytes.extend((header.len() as u64).to_le_bytes());
            bytes.extend(&header);
            bytes.extend(pieces.iter().flat_map(|(_, data)| data));
            entry.bytes = bytes.len() as u64;
            entry.header_sha256 = sha256(&header);
            fs::write(folder.join(format!("rank-{rank:05}.bin")), bytes).expect("writable");
        }
        self.manifest = self.manifest.sealed();
        self.write_manifest(folder);
    }

    /// Writes the manifest without making its checksum valid.
    pub(crate) fn write_manifest(&self, folder: &Path) {
        let text = serde_json::to_vec_pretty(&self.manifest).expect("JSON");
        fs::write(folder.join("manifest.json"), text).expect("writable");
    }

    /// The first piece of the first rank.
    pub(crate) fn first(&mut self) -> &mut Value {
        &mut self.ranks[0][0].0
    }

    /// Renames a parameter, and changes its shape, in all pieces and in the manifest.
    pub(crate) fn rename(&mut self, from: &str, to: &str, shape: &[u64]) {
        let listed = self.manifest.parameters.as_mut().expect("listed");
        listed.remove(from).expect("a parameter");
        listed.insert(to.to_owned(), shape.to_vec());
        for (head, _) in self.ranks.iter_mut().flatten() {
            if head["name"] == from {
                head["name"] = json!(to);
                head["global"] = json!(shape);
            }
        }
    }

    /// Removes the pieces of a parameter and corrects offsets.
    pub(crate) fn take_out(&mut self, name: &str) {
        for pieces in &mut self.ranks {
            pieces.retain(|(head, _)| head["name"] != name);
            let mut offset = 0;
            for (head, data) in pieces {
                head["offset"] = json!(offset);
                offset += data.len();
            }
        }
    }

    /// Changes the shape and runs of the first piece's parameter.
    pub(crate) fn reshape(&mut self, shape: &[u64], runs: Value) {
        let name = self.first()["name"].as_str().expect("a name").to_owned();
        self.rename(&name, &name, shape);
        self.first()["runs"] = runs;
    }
}
