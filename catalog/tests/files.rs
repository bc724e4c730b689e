//! Where files may be written, what remains when writing is refused, and the modes of files.

use std::fs;
use std::path::{Path, PathBuf};

use catalog::files::{self, Destination, FileError, FolderDestination, Kind, NamedFile, Replace};

const PLAN: &str = "schema_version: 1\nid: a\nstrategy:\n  tp: 1\n";
const PROFILE: &str = "schema_version: 1\nmachine:\n  cores: 1\nmeasured:\n";
const REPORT: &str = "<!DOCTYPE html><title>a · vescale-plan</title><style></style>";

fn temporary() -> tempfile::TempDir {
    tempfile::tempdir().expect("folder")
}

/// Every entry of a folder, hidden ones too.
fn entries(folder: &Path) -> Vec<String> {
    let found = fs::read_dir(folder).expect("readable").flatten();
    let mut names: Vec<String> = found
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// One example of every kind.
fn example(kind: Kind) -> &'static [u8] {
    match kind {
        Kind::Plan => PLAN.as_bytes(),
        Kind::Profile => PROFILE.as_bytes(),
        Kind::Report => REPORT.as_bytes(),
        Kind::Trace => b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[]}\n",
        Kind::Cluster => b"schema_version: 1\nname: a\nextends: dgx-h100\nprofile: gpu.yaml\n",
        Kind::RunLog => b"{\"step\":0,\"loss\":1.0}\n",
        Kind::Weights => b"\x02\0\0\0\0\0\0\0{}",
        Kind::PublishedRuns => b"{\"id\":\"a\"}\n",
        Kind::Baseline => b"# Medians of absolute relative errors on the published runs\n",
        Kind::Residuals => b"# ln(measured / predicted) of the published runs\n",
        Kind::AccuracyReport => b"# Accuracy\n\nPredictions\n",
        Kind::Plot => b"<svg xmlns=\"http://www.w3.org/2000/svg\"></svg>\n",
        Kind::ModelConfig => b"{\"model_type\": \"llama\"}\n",
        Kind::Exported => b"#!/bin/sh\n# vescale-plan 1: a model\n",
    }
}

/// A file is replaced by its own kind alone, unless forced.
#[test]
fn a_file_of_another_kind_stays() {
    let folder = temporary();
    let path = folder.path().join("a");
    for &there in Kind::ALL {
        for &written in Kind::ALL {
            fs::write(&path, example(there)).expect("written");
            let checked = Destination::check(&path, written, Replace::SameKind);
            let refused = matches!(checked, Err(FileError::OtherKind { .. }));
            assert_eq!(refused, there != written, "{written} over {there}");
            assert_eq!(fs::read(&path).expect("read"), example(there));
            let forced = Destination::check(&path, written, Replace::Anything).expect("forced");
            assert!(forced.replaces());
            forced.write(example(written)).expect("written");
            assert_eq!(fs::read(&path).expect("read"), example(written));
        }
    }
    for foreign in ["my notes\n", "{\"a\": 1}\n", "a: 1\n", "\u{0}\u{1}\u{2}"] {
        fs::write(&path, foreign).expect("written");
        for &kind in Kind::ALL {
            assert!(
                Destination::check(&path, kind, Replace::SameKind).is_err(),
                "{kind} over {foreign:?}"
            );
        }
    }
    fs::write(&path, "").expect("written");
    files::write(&path, Kind::Plan, Replace::SameKind, PLAN).expect("nothing is lost");
    assert_eq!(entries(folder.path()), ["a"]);
}

/// The check refuses a destination that cannot be written, and leaves nothing behind.
#[test]
fn a_destination_is_checked_first() {
    let folder = temporary();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("folder")).expect("folder");
    fs::write(at("file"), PLAN).expect("file");
    let refused = |path: &Path| {
        let error = Destination::check(path, Kind::Plan, Replace::Anything).expect_err("refused");
        error.to_string()
    };
    for (path, said) in [
        (at("absent/plan.yaml"), "there is no folder"),
        (at("file/plan.yaml"), "it is not a folder"),
        (at("folder"), "it is a folder"),
        (at("new/"), "it is a folder"),
        (at(".."), "it is a folder"),
        (PathBuf::from("/"), "it is a folder"),
        (at(&"n".repeat(300)), "cannot write"),
    ] {
        assert!(refused(&path).contains(said), "{}", path.display());
    }
    let hostile = refused(&at("absent\u{1b}[2J\nerror: x/plan.yaml"));
    assert!(!hostile.contains(['\u{1b}', '\n']), "{hostile}");
    assert_eq!(entries(folder.path()), ["file", "folder"]);
}

#[cfg(target_os = "linux")]
#[test]
fn devices_and_folders_that_take_no_files_are_refused() {
    let refused = |path: &str| {
        let checked = Destination::check(Path::new(path), Kind::Plan, Replace::Anything);
        checked.expect_err("refused").to_string()
    };
    assert!(refused("/proc/plan.yaml").contains("no file can be made in /proc"));
    // A pipe, where every user may make files.
    let folder = temporary();
    let pipe = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    if made.is_ok_and(|status| status.success()) {
        assert!(refused(&pipe.to_string_lossy()).contains("device, pipe or socket"));
    }
}

#[cfg(unix)]
#[test]
fn a_symbolic_link_is_never_followed() {
    use std::os::unix::fs::symlink;
    let folder = temporary();
    let (link, victim) = (folder.path().join("link"), folder.path().join("victim"));
    fs::write(&victim, PLAN).expect("file");
    symlink(&victim, &link).expect("link");
    let checked = Destination::check(&link, Kind::Plan, Replace::SameKind);
    assert!(matches!(checked, Err(FileError::Link { .. })));
    let log = files::open_log(&link, Kind::Plan, Replace::Anything);
    assert!(matches!(log, Err(FileError::LogLink { .. })));
    // Forced, the link itself gives way.
    files::write(&link, Kind::Report, Replace::Anything, REPORT).expect("forced");
    assert_eq!(fs::read_to_string(&victim).expect("read"), PLAN);
    assert!(!link.is_symlink());
    // One that is planted between the check and the end of the work.
    let late = folder.path().join("late");
    let destination = Destination::check(&late, Kind::Plan, Replace::SameKind).expect("free");
    symlink(&victim, &late).expect("link");
    assert!(destination.write("other").is_err());
    assert_eq!(fs::read_to_string(&victim).expect("read"), PLAN);
    assert_eq!(entries(folder.path()), ["late", "link", "victim"]);
}

/// A user's file that appears at the destination after the check is kept.
#[test]
fn a_file_that_appears_after_the_check_stays() {
    let folder = temporary();
    let path = folder.path().join("a");
    let destination = Destination::check(&path, Kind::Plan, Replace::SameKind).expect("free");
    assert!(!destination.replaces());
    fs::write(&path, "notes").expect("written");
    assert!(destination.write(PLAN).is_err());
    assert_eq!(fs::read_to_string(&path).expect("read"), "notes");
    assert_eq!(entries(folder.path()), ["a"]);
}

#[test]
fn a_dropped_draft_leaves_nothing() {
    use std::io::Write;
    let folder = temporary();
    let path = folder.path().join("a");
    let destination = Destination::check(&path, Kind::Plan, Replace::SameKind).expect("free");
    let mut draft = destination.draft().expect("draft");
    draft.write_all(b"half").expect("written");
    assert_eq!(entries(folder.path()).len(), 1);
    drop(draft);
    assert!(entries(folder.path()).is_empty());
}

/// Files get the modes that a file made by the shell has, in new folders and old ones.
#[cfg(unix)]
#[test]
fn the_umask_rules() {
    use std::os::unix::fs::PermissionsExt;
    let folder = temporary();
    let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
    let usual = folder.path().join("usual");
    fs::write(&usual, "").expect("written");
    let path = folder.path().join("plan");
    files::write(&path, Kind::Plan, Replace::SameKind, PLAN).expect("written");
    assert_eq!(mode(&path), mode(&usual));
    let made = folder.path().join("made");
    fs::create_dir(&made).expect("folder");
    let exported = folder.path().join("out");
    let script = NamedFile {
        name: "launch.sh",
        content: b"#!/bin/sh\n# vescale-plan\n",
        executable: true,
    };
    for _ in 0..2 {
        let checked = FolderDestination::check(&exported, Kind::Exported, Replace::SameKind);
        checked.expect("free").write(&[script]).expect("written");
        // A folder made by the shell may be entered wherever a script made by it may be run.
        assert_eq!(mode(&exported.join("launch.sh")), mode(&made));
        assert_eq!(mode(&exported), mode(&made));
    }
}

/// All files or none; a user's own file among them keeps all out.
#[test]
fn a_folder_is_written_whole_or_not_at_all() {
    let folder = temporary();
    let out = folder.path().join("out");
    let file = |name: &'static str, content: &'static [u8]| NamedFile {
        name,
        content,
        executable: false,
    };
    let files = [
        file("a.sh", b"# vescale-plan 1\n"),
        file("config.json", b"{\"a\": 1}\n"),
    ];
    let check = |replace| FolderDestination::check(&out, Kind::Exported, replace);
    let first = check(Replace::SameKind).expect("free").write(&files);
    assert!(first.expect("written").is_empty());
    assert_eq!(entries(folder.path()), ["out"]);
    // The same again, though JSON does not say whose it is.
    let again = check(Replace::SameKind).expect("there").write(&files);
    assert_eq!(again.expect("written").len(), 2);
    fs::write(out.join("config.json"), "{\"mine\": 1}\n").expect("written");
    let newer = [file("a.sh", b"# vescale-plan 2\n"), files[1]];
    let refused = check(Replace::SameKind).expect("there").write(&newer);
    assert!(matches!(refused, Err(FileError::OtherKind { .. })));
    assert_eq!(fs::read(out.join("a.sh")).expect("read"), files[0].content);
    let mine = fs::read_to_string(out.join("config.json")).expect("read");
    assert_eq!(mine, "{\"mine\": 1}\n");
    let forced = check(Replace::Anything).expect("there").write(&newer);
    assert_eq!(forced.expect("written").len(), 2);
    assert_eq!(entries(&out), ["a.sh", "config.json"]);
    for name in ["../a.sh", "/tmp/a.sh", "b/a.sh", "..", ""] {
        let outside = check(Replace::Anything).expect("there");
        assert!(outside.write(&[file(name, b"#")]).is_err(), "{name}");
    }
    let taken = folder.path().join("file");
    fs::write(&taken, "").expect("written");
    let refused = FolderDestination::check(&taken, Kind::Exported, Replace::Anything);
    assert!(matches!(refused, Err(FileError::NotAFolder { .. })));
}

#[test]
fn a_log_grows() {
    use std::io::Write;
    let folder = temporary();
    let path = folder.path().join("run.jsonl");
    files::check_log(&path, Kind::RunLog, Replace::SameKind).expect("free");
    assert!(!path.exists(), "checking leaves nothing");
    for step in 0..2 {
        let mut log = files::open_log(&path, Kind::RunLog, Replace::SameKind).expect("opened");
        writeln!(log, "{{\"step\":{step}}}").expect("written");
    }
    let text = fs::read_to_string(&path).expect("read");
    assert_eq!(text, "{\"step\":0}\n{\"step\":1}\n");
    fs::write(&path, "notes").expect("written");
    assert!(files::open_log(&path, Kind::RunLog, Replace::SameKind).is_err());
    assert!(files::open_log(&path, Kind::RunLog, Replace::Anything).is_ok());
}

/// Names are shown on one line, with control characters escaped.
#[test]
fn control_characters_are_shown_not_sent() {
    let shown = catalog::names::shown("a\u{1b}[2J\n\u{202e}b\u{9b}é·中");
    assert_eq!(shown, "a\\u{1b}[2J\\n\\u{202e}b\\u{9b}é·中");
    assert!(catalog::names::checked("é·中 8b", "x", "name").is_ok());
    for name in ["a\nb", "a\u{1b}", "\u{202e}a", "a\0", "a\u{2028}"] {
        let error = catalog::names::checked(name, "x", "name").expect_err("refused");
        assert!(error.to_string().contains("control character"));
    }
}
