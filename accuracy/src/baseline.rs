//! The regression gate: no group's error may grow beyond the committed baseline.

use std::fmt::Write as _;

use super::summary::Group;

/// Groupings that the gate watches.
const WATCHED: [&str; 5] = ["all", "source", "runtime", "gpu", "precision"];

/// How much a median may grow before it counts as worse: half a percentage point, the rounding of constants.
const SLACK: f64 = 0.005;

/// The baseline of groups as CSV: `by,group,runs,time median,memory runs,memory median,too large`.
pub(crate) fn text(groups: &[Group]) -> String {
    let mut text = String::from(
        "# Medians of absolute relative errors on the published runs, by group.\n\
         # Made by `vescale-plan validate --write-baseline tests/accuracy.csv`.\n\
         # by,group,runs,step time,memory runs,memory,too large\n",
    );
    for group in groups.iter().filter(|g| WATCHED.contains(&g.by)) {
        let time = group.step_time.map_or((0, 0.0), |s| (s.count, s.median));
        let memory = group.peak_memory.map_or((0, 0.0), |s| (s.count, s.median));
        let _ = writeln!(
            text,
            "{},{},{},{:.4},{},{:.4},{}",
            group.by,
            group.name.replace(',', ";"),
            time.0,
            time.1,
            memory.0,
            memory.1,
            group.wrongly_too_large
        );
    }
    text
}

/// Sentences on groups whose errors have grown, or that are no longer predicted; new groups pass.
pub(crate) fn grown(groups: &[Group], baseline: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in baseline.lines().filter(|line| !line.starts_with('#')) {
        let cells: Vec<&str> = line.split(',').collect();
        let [by, name, _, time, _, memory, too_large] = cells[..] else {
            continue;
        };
        let Some(group) = groups
            .iter()
            .find(|g| g.by == by && g.name.replace(',', ";") == name)
        else {
            found.push(format!("{by} {name}: no run is predicted any more"));
            continue;
        };
        for (what, now, before) in [
            ("step time", group.step_time, time),
            ("memory", group.peak_memory, memory),
        ] {
            let (Some(now), Ok(before)) = (now, before.parse::<f64>()) else {
                continue;
            };
            if now.median > before + SLACK {
                found.push(format!(
                    "{by} {name}: {what} median {:.1}% was {:.1}%",
                    now.median * 100.0,
                    before * 100.0
                ));
            }
        }
        if too_large
            .parse()
            .is_ok_and(|before: usize| group.wrongly_too_large > before)
        {
            found.push(format!(
                "{by} {name}: {} runs predicted too large, were {too_large}",
                group.wrongly_too_large
            ));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Report, embedded};
    use catalog::Fitted;

    #[test]
    fn no_group_of_published_runs_is_predicted_worse_than_committed() {
        let report = Report::new(
            &embedded().expect("embedded runs are well-formed"),
            &Fitted::default(),
            &|_| (),
        );
        let grown = grown(&report.summary, include_str!("../../tests/accuracy.csv"));
        assert!(grown.is_empty(), "{}", grown.join("\n"));
    }
}
