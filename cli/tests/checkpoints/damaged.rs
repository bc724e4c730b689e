//! Checkpoints that are damaged: by a disk, by a copy or by hand.

use std::fs::{self, File};
use std::path::Path;

use crate::{plan, refused, run, saved, stderr};

/// Name of the damage, a function that does it, commands that still succeed, part of the message.
type Case = (
    &'static str,
    fn(&Path),
    &'static [&'static str],
    &'static str,
);

fn edit(path: &Path, name: &str, edit: impl FnOnce(&mut Vec<u8>)) {
    let path = path.join(name);
    let mut bytes = fs::read(&path).expect("readable");
    edit(&mut bytes);
    fs::write(&path, bytes).expect("writable");
}

fn cut(path: &Path, name: &str, bytes: u64) {
    let file = File::options().write(true).open(path.join(name));
    file.and_then(|f| f.set_len(bytes)).expect("writable");
}

const RANK: &str = "rank-00001.bin";
const MANIFEST: &str = "manifest.json";

const CASES: [Case; 18] = [
    (
        "no bytes",
        |p| cut(p, RANK, 0),
        &[],
        "0 bytes, the manifest says",
    ),
    (
        "cut in its head",
        |p| cut(p, RANK, 12),
        &[],
        "12 bytes, the manifest says",
    ),
    (
        "cut in its header",
        |p| cut(p, RANK, 100),
        &[],
        "100 bytes, the manifest says",
    ),
    (
        "cut in its data",
        |p| edit(p, RANK, |b| b.truncate(b.len() - 4)),
        &[],
        "bytes, the manifest says",
    ),
    (
        "a byte more",
        |p| edit(p, RANK, |b| b.push(0)),
        &[],
        "bytes, the manifest says",
    ),
    (
        "its first byte",
        |p| edit(p, RANK, |b| b[0] ^= 1),
        &[],
        "its head is damaged",
    ),
    (
        "its length",
        |p| edit(p, RANK, |b| b[15] ^= 0x80),
        &[],
        "its head is damaged",
    ),
    (
        "its header",
        |p| edit(p, RANK, |b| b[40] ^= 1),
        &[],
        "its header does not match its checksum",
    ),
    (
        "a bit of its data",
        |p| edit(p, RANK, |b| *b.last_mut().expect("bytes") ^= 0x10),
        &["inspect"],
        "the data do not match their checksum",
    ),
    (
        "a block of zeros",
        |p| {
            edit(p, RANK, |b| {
                let end = b.len();
                b[end - 4096..].fill(0);
            });
        },
        &["inspect"],
        "the data do not match their checksum",
    ),
    (
        "no file",
        |p| fs::remove_file(p.join(RANK)).expect("there"),
        &[],
        "No such file",
    ),
    (
        "a folder for a file",
        |p| {
            fs::remove_file(p.join(RANK)).expect("there");
            fs::create_dir(p.join(RANK)).expect("made");
        },
        &[],
        "is not a file",
    ),
    (
        "files changed for each other",
        |p| {
            fs::rename(p.join(RANK), p.join("x")).expect("there");
            fs::rename(p.join("rank-00000.bin"), p.join(RANK)).expect("there");
            fs::rename(p.join("x"), p.join("rank-00000.bin")).expect("there");
        },
        &[],
        "rank-00000.bin\n",
    ),
    (
        "a file of another step",
        |p| {
            drop(fs::copy(
                p.with_file_name("step-00000001").join(RANK),
                p.join(RANK),
            ))
        },
        &[],
        "its header does not match its checksum",
    ),
    (
        "a manifest of another step",
        |p| {
            drop(fs::copy(
                p.with_file_name("step-00000001").join(MANIFEST),
                p.join(MANIFEST),
            ))
        },
        &[],
        "it is of step 1, its folder of step 2",
    ),
    (
        "a digit of the manifest",
        |p| {
            edit(p, MANIFEST, |b| {
                let at = b
                    .windows(8)
                    .position(|w| w == b"\"seed\": ")
                    .expect("a seed");
                b[at + 8] ^= 2;
            });
        },
        &[],
        "it was changed",
    ),
    ("half a manifest", |p| cut(p, MANIFEST, 90), &[], "EOF"),
    (
        "no manifest",
        |p| fs::remove_file(p.join(MANIFEST)).expect("there"),
        &[],
        "holds no complete checkpoint",
    ),
];

fn copy(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    fs::create_dir_all(to).expect("made");
    for entry in fs::read_dir(from).expect("a folder") {
        let path = entry.expect("an entry").path();
        fs::copy(&path, to.join(path.file_name().expect("a name"))).expect("copied");
    }
}

#[test]
fn damaged_checkpoints_are_refused() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = saved(folder.path());
    let whole = folder.path().join("whole");
    copy(&path, &whole);
    for (case, damage, may, says) in CASES {
        copy(&whole, &path);
        damage(&path);
        refused(folder.path(), "saved/step-00000002", case, may, says);
        if case != "no manifest" {
            answered(folder.path(), case, says);
        }
    }
}

/// `verify --json` prints a JSON document for every damaged checkpoint.
fn answered(folder: &Path, case: &str, says: &str) {
    let args = ["checkpoint", "verify", "saved/step-00000002", "--json"];
    let output = run(folder, &args);
    assert_eq!(output.status.code(), Some(2), "{case}");
    let answer: serde_json::Value =
        serde_json::from_slice(&output.stdout).expect("stdout is one JSON document");
    assert_eq!(answer["whole"], false, "{case}");
    let problems = answer["problems"].as_array().expect("a list");
    let said = problems.iter().filter_map(|problem| problem.as_str());
    let said: Vec<&str> = said.collect();
    assert!(
        said.iter().any(|p| p.contains(says.trim())),
        "{case}: {said:?}"
    );
}

#[test]
fn a_run_goes_on_from_the_last_whole_checkpoint_and_says_so() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = saved(folder.path());
    let whole = folder.path().join("whole");
    copy(&path, &whole);
    let resume = [
        "--checkpoints",
        "saved",
        "--resume",
        "--steps",
        "2",
        "-q",
        "--json",
    ];
    let plan = plan("dp2-zero3");
    let resume = [&["run", &plan], &resume[..]].concat();
    for case in [
        "a bit of its data",
        "no file",
        "half a manifest",
        "no manifest",
    ] {
        copy(&whole, &path);
        let (_, damage, ..) = CASES.iter().find(|c| c.0 == case).expect("a case");
        damage(&path);
        let output = run(folder.path(), &resume);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(0), "{case}: {said}");
        assert!(
            said.contains("warning: damaged: saved/step-00000002")
                && said.contains("going on from saved/step-00000001"),
            "{case}: {said}"
        );
        // The damaged checkpoint was written again when its step was reached.
        let output = run(
            folder.path(),
            &["checkpoint", "verify", "saved/step-00000002"],
        );
        assert_eq!(output.status.code(), Some(0), "{case}: {}", stderr(&output));
        let bytes = |path: &Path| fs::read(path.join(MANIFEST)).expect("a manifest");
        assert_eq!(bytes(&path), bytes(&whole), "{case}");
    }
    // Now both are damaged.
    for step in [1, 2] {
        let path = folder.path().join(format!("saved/step-0000000{step}"));
        cut(&path, RANK, 7);
    }
    let output = run(folder.path(), &resume);
    assert_eq!(output.status.code(), Some(2));
    let said = stderr(&output);
    assert!(said.contains("error: 7 bytes"), "{said}");
    assert!(said.contains("step-00000002/rank-00001.bin\n"), "{said}");
}
