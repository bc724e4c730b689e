//! Published training runs: the `runs-v1` schema.

use catalog::SpecError;
use catalog::runs::{RunsFile, to_compact};

use super::clusters::refused;
use crate::outcome::Outcome;
use crate::scene;
use crate::target::{Depth, Target};
use crate::tree::Format;

/// Files of published runs.
pub(super) fn runs() -> Target {
    Target::of_text(
        "published-runs",
        seeds,
        |pool, rng| Format::Json.mutate(pool, rng),
        read,
    )
}

fn seeds() -> Vec<Vec<u8>> {
    let all = scene::files("catalog/presets/runs", "published.jsonl");
    let text = String::from_utf8_lossy(all.first().map_or(&[][..], |v| v));
    let lines: Vec<&str> = text.lines().collect();
    let some = lines.iter().step_by(1 + lines.len() / 24);
    some.map(|line| format!("{{\"schema\":\"runs-v1\",\"runs\":[{line}]}}").into_bytes())
        .collect()
}

fn read(text: &str, _: Depth) -> Outcome {
    let file = match RunsFile::parse(text, "input") {
        Ok(file) => file,
        Err(error) => return refused(text, &error),
    };
    let moe = file
        .runs
        .iter()
        .filter(|r| r.model.experts.is_some())
        .count();
    let mut outcome = Outcome::accepted(format!(
        "{} runs, {moe} with experts",
        file.runs.len().min(3)
    ));
    let compact = to_compact(&file.runs);
    let again: Result<Vec<catalog::runs::Run>, SpecError> = compact
        .lines()
        .map(|line| catalog::text::json(line, "written"))
        .collect();
    // What is null is left out, and nulls inside of flags are nothing.
    let count = again.as_ref().map_or(0, Vec::len);
    outcome.expect(count == file.runs.len(), || {
        format!("written, {:?}", again.err())
    });
    for run in &file.runs {
        let rate = run.metric(|m| &m.tokens_per_s_per_gpu);
        let numbers = [
            run.metric(|m| &m.step_time_s),
            rate,
            run.metric(|m| &m.mfu_pct),
        ];
        let finite = numbers.into_iter().flatten().all(f64::is_finite);
        outcome.expect(finite, || "a metric is not finite".to_owned());
    }
    outcome
}
