//! Failures and checkpoints as people write them: `50000h`, `'5 years per node'`, `40GB/s`, `10min`.

use catalog::{Bandwidth, Mistake, Seconds};

/// Longest time that is accepted, in seconds: a thousand years.
const LONGEST: f64 = 1000.0 * YEAR;
const YEAR: f64 = 365.25 * 86400.0;

/// Names of units of time, with their seconds.
const UNITS: [(&str, f64); 19] = [
    ("s", 1.0),
    ("sec", 1.0),
    ("second", 1.0),
    ("seconds", 1.0),
    ("ms", 1e-3),
    ("m", 60.0),
    ("min", 60.0),
    ("minute", 60.0),
    ("minutes", 60.0),
    ("h", 3600.0),
    ("hour", 3600.0),
    ("hours", 3600.0),
    ("d", 86400.0),
    ("day", 86400.0),
    ("days", 86400.0),
    ("y", YEAR),
    ("yr", YEAR),
    ("year", YEAR),
    ("years", YEAR),
];

/// A mean time between failures of one part of a cluster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mtbf {
    /// Mean time between failures of one GPU.
    PerGpu(Seconds),
    /// Mean time between failures of one node.
    PerNode(Seconds),
}

/// How long writing a checkpoint takes, as a rate or as a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Checkpoint {
    /// The rate at which all GPUs together write.
    Rate(Bandwidth),
    /// The time for which training stops.
    Time(Seconds),
}

/// Reads a time above 0.
pub fn duration(text: &str) -> Result<Seconds, Mistake> {
    let said = text.trim();
    let number = |c: char| c.is_ascii_digit() || matches!(c, '.' | '_' | ',');
    let end = said.find(|c: char| !number(c)).unwrap_or(said.len());
    let (number, unit) = said.split_at(end);
    let unit = unit.trim().to_ascii_lowercase();
    let unit = UNITS.into_iter().find(|(name, _)| *name == unit);
    let number = number.replace(['_', ','], "").parse::<f64>().ok();
    match (number, unit) {
        (Some(number), Some((_, seconds))) if number > 0.0 && number * seconds <= LONGEST => {
            Ok(Seconds(number * seconds))
        }
        _ => Err(Mistake::new(format!("`{text}` is not a time"))
            .expected("a number above 0 with s, min, h, days or years")
            .example("30s, 10min, 50000h or 5y")),
    }
}

/// Reads a mean time between failures, which is per GPU unless the text says per node.
pub fn mtbf(text: &str) -> Result<Mtbf, Mistake> {
    let lower = text.to_ascii_lowercase();
    let split = |words: [&str; 2]| {
        let mut ends = words.into_iter();
        ends.find_map(|end| lower.trim_end().strip_suffix(end).map(str::to_owned))
    };
    if let Some(time) = split(["per node", "/node"]) {
        return duration(&time).map(Mtbf::PerNode);
    }
    let time = split(["per gpu", "/gpu"]).unwrap_or_else(|| text.to_owned());
    let read = duration(&time).map(Mtbf::PerGpu);
    read.map_err(|mistake| mistake.example("50000h, or '5 years per node'"))
}

/// Reads what writing a checkpoint takes: a rate or a time.
pub fn checkpoint(text: &str) -> Result<Checkpoint, Mistake> {
    if text.contains('/') {
        let rate = text.trim().parse::<Bandwidth>().ok();
        return match rate.filter(|rate| rate.0 > 0.0) {
            Some(rate) => Ok(Checkpoint::Rate(rate)),
            None => Err(Mistake::new(format!("`{text}` is not a rate"))
                .expected("bytes per second that all GPUs write together")
                .example("40GB/s or 2TB/s")),
        };
    }
    let time = duration(text).map(Checkpoint::Time);
    time.map_err(|mistake| {
        let mistake = mistake.expected("a rate, or the time for which training stands still");
        mistake.example("40GB/s or 30s")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_rates_are_read_as_people_write_them() {
        for (text, seconds) in [
            ("30s", 30.0),
            ("10 min", 600.0),
            ("50,000h", 1.8e8),
            ("54 days", 54.0 * 86400.0),
            ("1y", YEAR),
            ("500ms", 0.5),
        ] {
            assert_eq!(duration(text), Ok(Seconds(seconds)), "{text}");
        }
        for text in ["5y per node", "5 years/node", "5Y PER NODE"] {
            assert_eq!(mtbf(text), Ok(Mtbf::PerNode(Seconds(5.0 * YEAR))));
        }
        for text in ["5y", "5y per GPU", "5 years/gpu"] {
            assert_eq!(mtbf(text), Ok(Mtbf::PerGpu(Seconds(5.0 * YEAR))));
        }
        assert_eq!(checkpoint("40GB/s"), Ok(Checkpoint::Rate(Bandwidth(40e9))));
        assert_eq!(checkpoint("30s"), Ok(Checkpoint::Time(Seconds(30.0))));
    }

    #[test]
    fn wrong_ones_are_refused() {
        for text in ["", "5", "-5s", "0s", "nan h", "5 weeks", "1e9y", "9999y"] {
            assert!(duration(text).is_err(), "{text}");
            assert!(mtbf(text).is_err(), "{text}");
            assert!(checkpoint(text).is_err(), "{text}");
        }
        for text in ["0GB/s", "-1GB/s", "40 GB", "fast/s", "40/s"] {
            assert!(checkpoint(text).is_err(), "{text}");
        }
    }
}
