//! Explains why one strategy beats another.

use catalog::elementary;
use plans::{Breakdown, Prediction};

use crate::contest::TIE;

/// One part of the step time, in each of two strategies.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Name of the part.
    pub name: &'static str,
    /// Seconds it takes in the first strategy.
    pub first_s: f64,
    /// Seconds it takes in the second strategy.
    pub second_s: f64,
}

/// The parts of a breakdown, with their names, in seconds.
#[must_use]
pub fn parts(b: &Breakdown) -> [(&'static str, f64); 14] {
    [
        ("compute", b.compute_s),
        ("recomputation", b.recompute_s),
        ("exposed tensor-parallel communication", b.tp_exposed_s),
        ("exposed context-parallel communication", b.cp_exposed_s),
        ("exposed expert-parallel communication", b.ep_exposed_s),
        ("exposed data-parallel communication", b.dp_exposed_s),
        ("exposed pipeline transfers", b.pp_exposed_s),
        ("pipeline bubble", b.bubble_s),
        ("optimizer", b.optimizer_s),
        ("exposed offload to the host", b.offload_exposed_s),
        ("host", b.host_s),
        ("waiting for longer sequences", b.imbalance_s),
        ("waiting for slow ranks", b.stragglers_s),
        ("gradients between pools", b.pools_exposed_s),
    ]
}

/// Compares two breakdowns part by part, largest change first.
#[must_use]
pub fn differences(first: &Breakdown, second: &Breakdown) -> Vec<Difference> {
    let mut list: Vec<Difference> = parts(first)
        .into_iter()
        .zip(parts(second))
        .map(|((name, first_s), (_, second_s))| Difference {
            name,
            first_s,
            second_s,
        })
        .collect();
    list.sort_by(|a, b| {
        (b.second_s - b.first_s)
            .abs()
            .total_cmp(&(a.second_s - a.first_s).abs())
    });
    list
}

/// A change of time with its sign, in milliseconds below a second.
fn change(seconds: f64) -> String {
    if seconds.abs() < 1.0 {
        format!("{:+.0} ms", seconds * 1e3)
    } else {
        format!("{seconds:+.2} s")
    }
}

/// One line: how much slower or faster a strategy is than the first, and which part of the step
/// changed most in that direction. It marks differences within the error of comparisons; those up
/// to [`TIE`] are called ties. `more` names what only the other strategy uses.
#[must_use]
pub fn why_not_first(first: &Prediction, other: &Prediction, more: &str) -> String {
    let ratio = other.step_time.0 / first.step_time.0 - 1.0;
    if ratio < -5e-4 && !more.is_empty() {
        return format!("{:+.1}% step time, for {more}", ratio * 100.0);
    }
    let sign = if ratio < 0.0 { -1.0 } else { 1.0 };
    let towards = |d: &Difference| sign * (d.second_s - d.first_s);
    let most = differences(&first.breakdown, &other.breakdown)
        .into_iter()
        .filter(|d| towards(d) > 0.0)
        .max_by(|a, b| towards(a).total_cmp(&towards(b)));
    let cause = most.map_or_else(String::new, |d| {
        format!(": {} {}", d.name, change(d.second_s - d.first_s))
    });
    if ratio.abs() < 5e-4 {
        let more = (other.peak_memory.as_f64() - first.peak_memory.as_f64()) / 1024f64.powi(3);
        // Adding 0 turns −0 into 0, so that no minus is shown.
        let more = (more * 10.0).round() / 10.0 + 0.0;
        return format!("same time within 0.05%, {more:+.1} GiB memory");
    }
    let slower = format!("{:+.1}% step time{cause}", ratio * 100.0);
    let error = first.ratio_error.max(other.ratio_error);
    format!("{}{slower}", closeness(ratio, error))
}

/// Words before a relative difference of step times: whether it is within the error of comparisons,
/// and also small enough for a tie.
fn closeness(ratio: f64, error: f64) -> &'static str {
    if elementary::ln_1p(ratio).abs() > error {
        ""
    } else if ratio.abs() > TIE {
        "within the error of such comparisons: "
    } else {
        "tie within the error of such comparisons: "
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_small_differences_within_the_error_are_ties() {
        for (ratio, error, said) in [
            (0.004, 0.06, "tie within the error of such comparisons: "),
            (0.057, 0.06, "within the error of such comparisons: "),
            (0.1, 0.06, ""),
            (0.004, 0.002, ""),
        ] {
            assert_eq!(closeness(ratio, error), said, "{ratio}, {error}");
        }
    }
}
