//! Names of the files that hold a plan and what is made from it.

use std::path::{Path, PathBuf};

use crate::inputs::InputsJson;
use crate::opened;

/// The name of a plan file that says what the plan is for.
#[must_use]
pub fn plan(inputs: &InputsJson) -> String {
    let gpus = format!("{}gpus", inputs.gpus);
    let stem = stem(&[&inputs.model, &gpus, &inputs.cluster, &inputs.runtime]);
    format!("{stem}.plan.yaml")
}

/// Default path of a file made from a plan: `x.ENDING` beside `x.plan.yaml` or `x.yaml`, and `x.group2.ENDING` for the second
/// of its groups of replicas, `x.plan.yaml#2`.
#[must_use]
pub fn derived(plan: &Path, ending: &str) -> PathBuf {
    let (file, group) = match opened::group(plan) {
        Some((file, number)) => (file, format!(".group{number}")),
        None => (plan.to_owned(), String::new()),
    };
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let stem = name.trim_end_matches(".yaml").trim_end_matches(".plan");
    plan.with_file_name(format!("{stem}{group}.{ending}"))
}

/// Ending of the name of a plan's report.
pub const REPORT: &str = "report.html";
/// Ending of the name of the report of a search in which nothing fits.
pub const NOTHING_FITS: &str = "nothing-fits.html";

/// A file name made of descriptive words: letters, digits, `.`, `_` and `-`.
fn stem(words: &[&str]) -> String {
    /// Longest part that a word contributes, so that the name stays far below file systems' 255 bytes.
    const LONGEST: usize = 40;
    let safe = |word: &&str| {
        let mut safe: String = word
            .chars()
            .map(|c| match c {
                'a'..='z' | 'A'..='Z' | '0'..='9' | '.' | '_' => c,
                _ => '-',
            })
            .take(LONGEST)
            .collect();
        while safe.contains("--") {
            safe = safe.replace("--", "-");
        }
        safe.trim_matches(['-', '.']).to_owned()
    };
    let words = words.iter().map(safe).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{REPORT, derived, stem};

    #[test]
    fn what_is_made_from_a_plan_stands_beside_it() {
        for (plan, report) in [
            ("a/x.plan.yaml", "a/x.report.html"),
            ("x.yaml", "x.report.html"),
            ("a/x.plan.yaml#2", "a/x.group2.report.html"),
            ("x.plan.yaml#y", "x.plan.yaml#y.report.html"),
        ] {
            assert_eq!(derived(Path::new(plan), REPORT), Path::new(report));
        }
    }

    #[test]
    fn names_are_safe_for_file_systems() {
        for (words, name) in [
            (
                &["llama3-70b", "512gpus", "dgx-h100"][..],
                "llama3-70b-512gpus-dgx-h100",
            ),
            (&["../../etc/passwd", "8gpus"], "etc-passwd-8gpus"),
            (&["a b'$(x)`\"", "8gpus"], "a-b-x-8gpus"),
            (&["...", "8gpus"], "8gpus"),
            (&["-rf", "中文", "v1.5"], "rf-v1.5"),
            (&["a\n\u{1b}b"], "a-b"),
        ] {
            assert_eq!(stem(words), name);
        }
        assert!(stem(&[&"n".repeat(300)[..]; 3]).len() < 200);
    }
}
