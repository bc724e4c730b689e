//! The cuda device where there is none: one clear line, and an exit code that says so.

use std::path::Path;
use std::process::Command;

#[test]
fn without_a_gpu_one_line_says_what_is_missing() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    for args in [
        &["profile", "--device", "cuda"][..],
        &["run", "nanogpt-single.yaml", "--device", "cuda"],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_vescale-plan"))
            .args(args)
            .current_dir(&examples)
            .output()
            .expect("the binary starts");
        let said = String::from_utf8_lossy(&output.stderr);
        if dtensor::cuda::devices().is_ok() {
            eprintln!("not tested: this machine has a CUDA device");
            return;
        }
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(output.stdout.is_empty());
        assert_eq!(said.lines().count(), 1, "{said}");
        let named = ["libcuda.so.1", "shows no device", "the CUDA driver"];
        assert!(named.iter().any(|part| said.contains(part)), "{said}");
    }
}
