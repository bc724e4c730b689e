//! Quantities with units, as flags and files write them.

use std::fmt::Display;
use std::str::FromStr;

use catalog::{Bandwidth, Bytes, FlopRate, Seconds};

use crate::mutate;
use crate::outcome::Outcome;
use crate::rng::Rng;
use crate::target::{Depth, Pool, Target};

const UNITS: [&str; 28] = [
    "B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB", "s", "ms", "us", "µs", "ns", "days",
    "FLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s", "B/s", "MB/s", "GB/s", "TB/s", "GiB/s", "Gb/s",
    "Gbit/s", "Tb/s", "PB",
];

/// `80 GiB`, `3.35 TB/s`, `989 TFLOP/s`, `5 us`.
pub(super) fn units() -> Target {
    Target::of_text("units", seeds, changed, read)
}

fn seeds() -> Vec<Vec<u8>> {
    let values = ["80", "3.35", "0", "1e3", "1_000", "0.001"];
    let all = UNITS.iter().zip(values.iter().cycle());
    all.map(|(unit, value)| format!("{value} {unit}").into_bytes())
        .collect()
}

fn changed(pool: &Pool, rng: &mut Rng) -> Vec<u8> {
    if rng.percent(30) {
        return mutate::text(pool, rng);
    }
    let value = mutate::number(&format!("{}", rng.below(5000) as f64 / 8.0), rng);
    let gap = *rng.pick(&["", " ", "  ", "\t"]);
    format!("{value}{gap}{}", rng.pick(&UNITS)).into_bytes()
}

fn read(text: &str, _: Depth) -> Outcome {
    let mut outcome = Outcome {
        syntax: well_formed(text),
        ..Outcome::default()
    };
    let mut taken = String::new();
    let mut read = |kind: &str, result: Result<f64, String>, outcome: &mut Outcome| match result {
        Ok(value) => {
            outcome.accepted = true;
            taken.push_str(kind);
            outcome.expect(value.is_finite() && value >= 0.0, || {
                format!("{kind} {value}")
            });
        }
        Err(error) => {
            if outcome.class.is_empty() {
                outcome.class = crate::outcome::kind(&error);
            }
        }
    };
    let bytes = there_and_back::<Bytes>(text, |b| b.0 as f64, &mut outcome);
    // 2^64 stands for whatever is larger.
    outcome.expect(bytes != Ok(u64::MAX as f64), || {
        "more bytes than can be counted".to_owned()
    });
    read("bytes", bytes, &mut outcome);
    let seconds = there_and_back::<Seconds>(text, |s| s.0, &mut outcome);
    read("seconds", seconds, &mut outcome);
    let rate = there_and_back::<FlopRate>(text, |r| r.0, &mut outcome);
    read("rate", rate, &mut outcome);
    let bandwidth = there_and_back::<Bandwidth>(text, |b| b.0, &mut outcome);
    read("bandwidth", bandwidth, &mut outcome);
    if outcome.accepted {
        outcome.class = format!("accepted: {taken}");
        outcome.syntax = true;
    }
    outcome
}

/// Larger numbers are not read back: bytes end at 2^63.
const MOST_PRINTED: f64 = 9.2e18;

/// A number and a unit of letters.
fn well_formed(text: &str) -> bool {
    let text = text.trim();
    let end = text
        .find(|c: char| c.is_alphabetic() && !matches!(c, 'e' | 'E'))
        .unwrap_or(text.len());
    let number = text[..end].trim().replace('_', "").parse::<f64>();
    let unit = &text[end..];
    number.is_ok() && !unit.is_empty() && unit.chars().all(|c| c.is_alphabetic() || c == '/')
}

/// Checks that a printed quantity is read back nearly unchanged.
fn there_and_back<T: FromStr + Display>(
    text: &str,
    value: fn(&T) -> f64,
    outcome: &mut Outcome,
) -> Result<f64, String>
where
    T::Err: Display,
{
    let read: T = text.parse().map_err(|e: T::Err| e.to_string())?;
    let number = value(&read);
    // Just below 2^63 bytes the rounded text says 2^63, which is refused.
    if number.is_finite() && number > 1e-8 && number < MOST_PRINTED {
        match read.to_string().parse::<T>() {
            Ok(again) => {
                let near = (value(&again) / number - 1.0).abs() < 0.01 || value(&again) < 1.0;
                outcome.expect(near, || format!("{read} is read back as {again}"));
            }
            Err(error) => outcome.expect(false, || format!("`{read}` is printed: {error}")),
        }
    }
    Ok(number)
}
