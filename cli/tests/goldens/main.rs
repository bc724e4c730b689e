//! What must not change while the code is rebuilt: predictions, searches, trained weights, exports,
//! and all that users and their scripts see of commands.
//!
//! Every test makes one text anew and compares it with the file of its name in this folder, byte by byte.
//! A change that is meant makes the files anew: `VESCALE_GOLDENS=write cargo test -p vescale-plan --test
//! goldens`; a change of predictions shows the errors on all published runs before and after.

#[path = "../common/mod.rs"]
mod common;
mod interface;
#[path = "../limited/mod.rs"]
mod limited;
mod predictions;
mod training;

use std::fs;
use std::path::Path;

use sha2::{Digest, Sha256};

/// Compares a text with the file of that name, or writes that file where it is to be made anew.
///
/// # Panics
/// The first lines that differ.
fn compare(name: &str, text: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/goldens")
        .join(name);
    if std::env::var_os("VESCALE_GOLDENS").is_some_and(|v| v == "write") {
        fs::write(&file, text).expect("the folder of goldens is writable");
        return;
    }
    let golden = fs::read_to_string(&file).unwrap_or_default();
    if golden == text {
        return;
    }
    let (before, after): (Vec<&str>, Vec<&str>) =
        (golden.lines().collect(), text.lines().collect());
    let longest = before.len().max(after.len());
    let differ = |at: &usize| before.get(*at) != after.get(*at);
    let shown: Vec<String> = (0..longest)
        .filter(differ)
        .take(6)
        .map(|at| {
            let line = |lines: &[&str]| lines.get(at).map_or("(no line)", |line| line).to_owned();
            format!(
                "line {}\n  was {}\n  is  {}",
                at + 1,
                line(&before),
                line(&after)
            )
        })
        .collect();
    let count = (0..longest).filter(differ).count();
    panic!(
        "{name}: {count} of {} lines differ\n{}",
        before.len(),
        shown.join("\n")
    );
}

/// The first 16 hexadecimal digits of a text's SHA-256.
fn digest(text: &[u8]) -> String {
    let bytes: [u8; 32] = Sha256::digest(text).into();
    bytes[..8]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// One line for every item, in their order; two items at a time.
fn lines<T: Sync>(items: &[T], line: impl Fn(&T) -> String + Sync) -> String {
    limited::side_by_side(items, |item| Some(line(item))).join("\n") + "\n"
}
