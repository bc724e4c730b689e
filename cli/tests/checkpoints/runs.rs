//! A run continues from its own checkpoints, and does not mix them with those of another run.

use std::fs;
use std::path::Path;

use crate::forge::Forge;
use crate::{limited, plan, run, saved, stderr};

/// Runs a plan with these options in a folder that has checkpoints; returns exit code and stderr.
fn resumed(folder: &Path, options: &[&str]) -> (Option<i32>, String) {
    let plan = plan("dp2-zero3");
    let output = run(folder, &[&["run", &plan, "-q"], options].concat());
    (output.status.code(), stderr(&output))
}

/// Names in the folder of checkpoints, in order.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder.join("saved"))
        .expect("a folder")
        .flatten();
    let mut names: Vec<_> = entries
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn another_run_is_refused_by_what_differs() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let folder = folder.path();
    saved(folder);
    let text = "another text, long enough for a sequence and its labels. ".repeat(9);
    fs::write(folder.join("other.txt"), text).expect("writable");
    let cases: [(&[&str], &str); 3] = [
        (&["--data", "other.txt"], "data is "),
        (&["--seed", "77"], "seed is 1234 there and 77 here"),
        (&["--steps", "9"], "over 2 steps"),
    ];
    for (options, says) in cases {
        let steps: &[&str] = if options[0] == "--steps" {
            &[]
        } else {
            &["--steps", "2"]
        };
        let args = [&["--resume", "saved/step-00000001"], steps, options].concat();
        let (code, said) = resumed(folder, &args);
        assert_eq!(code, Some(2), "{options:?}: {said}");
        assert!(
            said.contains(says) && said.contains("--force-resume"),
            "{said}"
        );
        assert!(
            said.lines().skip(1).all(|line| line.starts_with("  ")),
            "{said}"
        );
        let (code, said) = resumed(folder, &[&args[..], &["--force-resume"]].concat());
        assert_eq!(code, Some(0), "{options:?}: {said}");
        assert!(said.contains("warning: ") && said.contains(says), "{said}");
    }
    // A forced run may not save beside the other run, whose step 2 would be taken for its own.
    let mixed = [
        "--resume",
        "saved/step-00000001",
        "--checkpoints",
        "saved",
        "--force-resume",
    ];
    let (code, said) = resumed(folder, &[&mixed[..], &["--seed", "77"]].concat());
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("holds step 2 of another run"), "{said}");
    assert_eq!(names(folder), ["step-00000001", "step-00000002"]);
}

#[test]
fn a_fresh_run_does_not_mix_with_an_earlier_one() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let folder = folder.path();
    saved(folder);
    let line = "{\"step\":7}\n";
    fs::write(folder.join("log"), line).expect("writable");
    let fresh = ["--steps", "1", "--checkpoints", "saved", "--log", "log"];
    let (code, said) = resumed(folder, &fresh);
    assert_eq!(code, Some(2), "{said}");
    assert!(
        said.contains("holds step 1 of an earlier run\n  where     saved\n  expected  --resume"),
        "{said}"
    );
    let log = fs::read_to_string(folder.join("log")).expect("a log");
    assert_eq!(log, line);
}

#[test]
fn a_log_is_added_to_when_a_run_goes_on() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let folder = folder.path();
    saved(folder);
    // Two steps, then killed within a line; step 1 is repeated.
    fs::write(folder.join("log"), "{\"step\":0}\n{\"step\":1}\n{\"st").expect("writable");
    let on = [
        "--steps",
        "2",
        "--resume",
        "saved/step-00000001",
        "--log",
        "log",
    ];
    let (code, said) = resumed(folder, &on);
    assert_eq!(code, Some(0), "{said}");
    let log = fs::read_to_string(folder.join("log")).expect("a log");
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!(lines[..3], ["{\"step\":0}", "{\"step\":1}", "{\"st"]);
    assert!(
        lines.len() == 4 && lines[3].starts_with("{\"step\":1,"),
        "{log}"
    );
}

#[test]
fn checkpoints_of_the_first_version_open() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let folder = folder.path();
    let path = saved(folder);
    let mut old = Forge::read(&path);
    let manifest = &mut old.manifest;
    (manifest.schema_version, manifest.run) = (1, None);
    (manifest.parameters, manifest.sha256) = (None, None);
    old.write_manifest(&path);
    let output = run(folder, &["checkpoint", "verify", "saved"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let plan = plan("dp2-zero3");
    let output = run(folder, &["run", &plan, "--steps", "3", "--resume", "saved"]);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(
        said.contains("does not say of which data, batch, optimizer"),
        "{said}"
    );
}

#[test]
fn a_disk_that_is_full_leaves_the_last_checkpoint_and_nothing_else() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let folder = folder.path();
    saved(folder);
    // A file may have 200 blocks, and a write beyond fails instead of ending the process.
    let limits = "trap '' XFSZ && ulimit -f 200";
    let plan = plan("dp2-zero3");
    for more in [&[][..], &["--communicator", "tcp"]] {
        let args = [
            "--steps",
            "2",
            "--checkpoints",
            "saved",
            "--resume",
            "saved/step-00000001",
        ];
        let output = limited(
            folder,
            limits,
            &[&["run", &plan, "-q"], &args[..], more].concat(),
        );
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("File too large"), "{said}");
        assert_eq!(names(folder), ["step-00000001", "step-00000002"]);
        let output = run(folder, &["checkpoint", "verify", "saved"]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    }
}

#[test]
fn a_link_to_nothing_is_no_folder_of_checkpoints() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let link = folder.path().join("saved");
    std::os::unix::fs::symlink(folder.path().join("gone"), &link).expect("a link");
    let plan = plan("single");
    let args = ["run", &plan, "-q", "--steps", "1", "--checkpoints", "saved"];
    let output = run(folder.path(), &args);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("is a symbolic link to nothing"), "{said}");
    assert!(link.is_symlink());
}

#[test]
fn two_runs_do_not_save_in_one_folder() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let folder = folder.path();
    fs::create_dir(folder.join("saved")).expect("a folder");
    let plan = plan("single");
    let args = ["run", &plan, "-q", "--steps", "1", "--checkpoints", "saved"];
    // Another run has locked the folder.
    let held = fs::File::open(folder.join("saved")).expect("a folder");
    held.try_lock().expect("nobody else holds it");
    let refused = run(folder, &args);
    assert_eq!(refused.status.code(), Some(2));
    let said = stderr(&refused);
    assert!(said.contains("another run saves there now"), "{said}");
    assert_eq!(
        fs::read_dir(folder.join("saved"))
            .expect("a folder")
            .count(),
        0
    );
    drop(held);
    assert_eq!(run(folder, &args).status.code(), Some(0));
}

#[test]
fn an_export_replaces_weights_alone() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let folder = folder.path();
    saved(folder);
    let export = |name: &str, more: &[&str]| {
        let args = ["checkpoint", "export", "saved", "-o", name];
        run(folder, &[&args[..], more].concat())
    };
    let read = |name: &str| fs::read(folder.join(name)).expect("there");
    fs::write(folder.join("victim"), "mine").expect("writable");
    std::os::unix::fs::symlink("victim", folder.join("link")).expect("linked");
    std::os::unix::net::UnixListener::bind(folder.join("socket")).expect("a socket");
    for (name, said) in [
        ("victim", "not a safetensors file"),
        ("link", "symbolic link"),
        ("socket", "device, pipe or socket"),
        ("saved", "it is a folder"),
        ("absent/x", "no folder absent"),
    ] {
        let refused = export(name, &[]);
        assert_eq!(refused.status.code(), Some(2), "{name}");
        assert!(stderr(&refused).contains(said), "{}", stderr(&refused));
        assert_eq!(read("victim"), b"mine");
    }
    assert_eq!(export("x.safetensors", &[]).status.code(), Some(0));
    let again = export("x.safetensors", &[]);
    assert!(stderr(&again).contains("replaced"), "{}", stderr(&again));
    assert_eq!(export("link", &["--force"]).status.code(), Some(0));
    assert_eq!(read("victim"), b"mine");
    assert_eq!(read("link"), read("x.safetensors"));
    // An export that cannot be written leaves no draft.
    let before = fs::read_dir(folder).expect("a folder").count();
    let args = ["checkpoint", "export", "saved", "-o", "z.safetensors"];
    let full = limited(folder, "trap '' XFSZ && ulimit -f 200", &args);
    assert_eq!(full.status.code(), Some(1), "{}", stderr(&full));
    assert_eq!(fs::read_dir(folder).expect("a folder").count(), before);
}
