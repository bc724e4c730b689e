//! Predictions do not depend on measured values.

use accuracy::Report;
use catalog::Fitted;
use catalog::runs::Run;
use serde_json::Value;

/// Every measured number of a run times another factor.
fn scrambled(run: &Run, index: usize) -> Run {
    let factor = 0.1 + (index % 17) as f64;
    let mut fields = serde_json::to_value(run).expect("a run is JSON");
    for part in ["metrics", "derived"] {
        let numbers = fields[part].as_object_mut().into_iter().flatten();
        for (_, value) in numbers {
            if let Some(number) = value.as_f64() {
                *value = Value::from(number * factor);
            }
        }
    }
    serde_json::from_value(fields).expect("a run")
}

#[test]
fn predictions_are_the_same_when_what_was_measured_is_scrambled() {
    let runs = accuracy::embedded().expect("embedded runs are well-formed");
    let predicted = |runs: &[(Run, String)]| -> Vec<Value> {
        let report = Report::new(runs, &Fitted::default(), &|_| ());
        let json = serde_json::to_value(&report).expect("a report is JSON");
        let runs = json["runs"].as_array().expect("runs").iter();
        runs.map(|run| run["predicted"].clone()).collect()
    };
    let others: Vec<(Run, String)> = runs
        .iter()
        .enumerate()
        .map(|(index, (run, source))| (scrambled(run, index), source.clone()))
        .collect();
    let (stated, scrambled) = (predicted(&runs), predicted(&others));
    assert!(stated.iter().filter(|p| !p.is_null()).count() > 500);
    for ((run, _), (a, b)) in runs.iter().zip(stated.iter().zip(&scrambled)) {
        assert_eq!(a, b, "{}", run.id);
    }
}
