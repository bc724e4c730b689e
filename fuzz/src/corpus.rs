//! Inputs that were once treated wrongly, kept as files: `corpus/<target>/<name>`.
//! None of them may show a fault; those whose name ends in `.refused` must be refused, too.

use std::path::PathBuf;

/// An input of the corpus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The target's name.
    pub target: String,
    /// The file's name.
    pub name: String,
    /// The input.
    pub input: Vec<u8>,
}

/// Every input of the corpus, in order.
///
/// # Errors
/// When the folder cannot be read.
pub fn entries() -> std::io::Result<Vec<Entry>> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let mut all = Vec::new();
    for target in std::fs::read_dir(root)? {
        let target = target?;
        for file in std::fs::read_dir(target.path())? {
            let file = file?;
            all.push(Entry {
                target: target.file_name().to_string_lossy().into_owned(),
                name: file.file_name().to_string_lossy().into_owned(),
                input: std::fs::read(file.path())?,
            });
        }
    }
    all.sort_by(|a, b| (&a.target, &a.name).cmp(&(&b.target, &b.name)));
    Ok(all)
}
