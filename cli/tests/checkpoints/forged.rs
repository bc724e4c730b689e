//! Checkpoints that somebody made to break the reader: every checksum is right.

use std::fs;

use serde_json::json;

use crate::forge::Forge;
use crate::{refused, saved};

const HUGE: u64 = 1 << 40;
/// A parameter of the model and its shape.
const WEIGHT: (&str, [u64; 2]) = ("transformer.h.0.mlp.c_fc.weight", [512, 128]);

/// Name of the forgery, a function that makes it, commands that still succeed, part of the message.
type Case = (
    &'static str,
    fn(&mut Forge),
    &'static [&'static str],
    &'static str,
);

const CASES: [Case; 20] = [
    (
        "a run of 12 TiB",
        |f| f.first()["runs"][0][1] = json!(HUGE),
        &[],
        "is beyond its shape",
    ),
    (
        "a shape and a run of 12 TiB",
        |f| f.reshape(&[HUGE], json!([[0, HUGE]])),
        &[],
        "bytes of data from 0 on, the file has",
    ),
    (
        "a run whose end overflows",
        |f| f.first()["runs"][0] = json!([u64::MAX, 2]),
        &[],
        "is beyond its shape",
    ),
    (
        "runs whose sum overflows",
        |f| {
            let runs = vec![[0, u64::MAX]; 4];
            f.reshape(&[u64::MAX], json!(runs));
        },
        &[],
        "no more than a file holds",
    ),
    (
        "a shape whose product overflows",
        |f| f.reshape(&[1 << 33, 1 << 33], json!([[0, 1]])),
        &[],
        "is no parameter's",
    ),
    (
        "an empty shape",
        |f| f.reshape(&[], json!([[0, 1]])),
        &[],
        "is no parameter's",
    ),
    (
        "an empty shape of an expert",
        |f| f.rename(WEIGHT.0, "h.experts.gate_up_proj.0.gate.weight", &[]),
        &[],
        "is no parameter's",
    ),
    (
        "a shape with a zero",
        |f| f.reshape(&[0, 64], json!([])),
        &[],
        "is no parameter's",
    ),
    (
        "a piece without elements",
        |f| f.first()["runs"] = json!([]),
        &[],
        "at least one and no more than a file holds",
    ),
    (
        "expert 10^12",
        |f| {
            f.rename(
                WEIGHT.0,
                "h.experts.down_proj.1000000000000.weight",
                &WEIGHT.1,
            )
        },
        &["inspect", "verify"],
        "do not fill it",
    ),
    (
        "two parameters of one tensor",
        |f| {
            let name = "h.experts.gate_up_proj.0.gate.weight";
            f.rename(WEIGHT.0, name, &WEIGHT.1);
        },
        &["inspect", "verify"],
        "do not fill it",
    ),
    (
        "a piece with the offset of another and a false checksum",
        |f| {
            let before = f.first()["offset"].clone();
            f.ranks[0][1].0["offset"] = before;
            f.ranks[0][1].0["sha256"] = json!("0".repeat(64));
        },
        &[],
        "its data start at byte 0",
    ),
    (
        "an offset beyond the file",
        |f| f.first()["offset"] = json!(HUGE),
        &[],
        "its data start at byte",
    ),
    (
        "a parameter that is listed and not there",
        |f| f.take_out(WEIGHT.0),
        &[],
        "transformer.h.0.mlp.c_fc.weight is missing",
    ),
    (
        "a parameter that is there and not listed",
        |f| drop(f.manifest.parameters.as_mut().map(|p| p.remove(WEIGHT.0))),
        &[],
        "transformer.h.0.mlp.c_fc.weight is not in the manifest's list",
    ),
    (
        "a rank that is listed twice",
        |f| {
            f.ranks[1] = f.ranks[0].clone();
            f.manifest.files[1].name = "rank-00000.bin".to_owned();
        },
        &[],
        "file 1 of its list is called \"rank-00000.bin\"",
    ),
    (
        "the elements of a rank twice",
        |f| f.ranks[1] = f.ranks[0].clone(),
        &[],
        "is there twice",
    ),
    (
        "a rank that is left out",
        |f| drop((f.ranks.pop(), f.manifest.files.pop())),
        &[],
        "missing",
    ),
    (
        "no files",
        |f| {
            f.ranks.clear();
            f.manifest.files.clear();
        },
        &[],
        "it lists no files",
    ),
    (
        "a file outside its folder",
        |f| f.manifest.files[1].name = "../step-00000001/rank-00001.bin".to_owned(),
        &[],
        "expected  rank-00001.bin",
    ),
];

#[test]
fn forged_checkpoints_are_refused_without_memory() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let whole = Forge::read(&saved(folder.path()));
    for (case, forge, may, says) in CASES {
        let mut forged = whole.clone();
        forge(&mut forged);
        let target = folder.path().join("forged/step-00000002");
        let _ = fs::remove_dir_all(&target);
        forged.write(&target);
        refused(folder.path(), "forged/step-00000002", case, may, says);
    }
    // What was not forged passes the same door.
    let target = folder.path().join("forged/step-00000002");
    whole.clone().write(&target);
    let output = crate::run(folder.path(), &["checkpoint", "verify", "forged"]);
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn forged_manifests_are_refused_without_memory() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = saved(folder.path());
    let whole = Forge::read(&path);
    /// Of the manifest alone: how, and whether its checksum is made right.
    type Edit = (&'static str, fn(&mut Forge), bool, &'static str);
    #[rustfmt::skip]
    let edits: [Edit; 7] = [
        ("an edited step", |f| f.manifest.step = 7, false, "it was changed"),
        ("an edited step with a right checksum", |f| f.manifest.step = 7, true,
            "it is of step 7, its folder of step 2"),
        ("an edited seed", |f| f.manifest.seed = 7, false, "it was changed"),
        ("a version to come", |f| f.manifest.schema_version = 3, true, "this tool reads versions 1 and 2"),
        ("an old version with new fields", |f| f.manifest.schema_version = 1, true, "or has another version's"),
        ("a new version without its checksum", |f| f.manifest.sha256 = None, false,
            "it lacks fields of schema_version 2"),
        ("no list of parameters", |f| f.manifest.parameters = None, true, "it lacks fields of schema_version 2"),
    ];
    for (case, edit, seal, says) in edits {
        let mut forged = whole.clone();
        edit(&mut forged);
        if seal {
            forged.manifest = forged.manifest.sealed();
        }
        forged.write_manifest(&path);
        refused(folder.path(), "saved/step-00000002", case, &[], says);
    }
    // Nested without end, and longer than any.
    let manifest = path.join("manifest.json");
    fs::write(&manifest, "[".repeat(1 << 20)).expect("writable");
    refused(
        folder.path(),
        "saved/step-00000002",
        "nesting",
        &[],
        "manifest.json",
    );
    let file = fs::File::create(&manifest).expect("writable");
    file.set_len(HUGE).expect("a sparse file");
    let says = "expected  at most 268435456 bytes";
    refused(
        folder.path(),
        "saved/step-00000002",
        "a manifest of 1 TiB",
        &[],
        says,
    );
}
