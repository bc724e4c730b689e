//! The condition of a cluster's nodes, written after its name: `dgx-h100 at 0.8 with 2% jitter`.

use std::path::Path;

use crate::cluster::Cluster;
use crate::error::SpecError;
use crate::mistake::Mistake;
use crate::pools;
use crate::provenance::Sourced;

const EXAMPLE: &str = "--cluster 'dgx-h100 at 0.8 with 2% jitter'";

/// Speed and jitter of a cluster's nodes; `None` keeps the cluster's own value.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Condition {
    /// Compute speed relative to the tables.
    pub(crate) speed: Option<f64>,
    /// Standard deviation of the time that a rank takes for a pass, as a share of that time.
    pub(crate) jitter: Option<f64>,
}

impl Condition {
    /// Splits a line into the part that names a cluster and the condition of its nodes.
    ///
    /// # Errors
    /// A speed or jitter that is no number, or is given twice.
    pub(crate) fn split(line: &str) -> Result<(&str, Self), SpecError> {
        let mut name = line.trim();
        let mut condition = Self::default();
        if let Some((before, jitter)) = name
            .strip_suffix(" jitter")
            .and_then(|text| text.rsplit_once(" with "))
        {
            let read = share(jitter).ok_or_else(|| {
                let wrong = Mistake::new(format!("`{jitter}` is not a jitter"));
                misread(line, wrong.expected("a share of a pass's time"))
            })?;
            condition.jitter = Some(read);
            name = before.trim_end();
        }
        if let Some((before, speed)) = name.rsplit_once(" at ") {
            let read = share(speed).ok_or_else(|| {
                let wrong = Mistake::new(format!("`{speed}` is not a speed"));
                misread(line, wrong.expected("a share of the usual speed"))
            })?;
            condition.speed = Some(read);
            name = before.trim_end();
        }
        if condition.is_usual() || Path::new(name).exists() {
            return Ok((name, condition));
        }
        let (_, before) = Self::split(name)?;
        let again = [
            ("speed", before.speed.and(condition.speed)),
            ("jitter", before.jitter.and(condition.jitter)),
        ];
        match again.into_iter().find(|(_, value)| value.is_some()) {
            None => Ok((name, condition)),
            Some((what, _)) => {
                let wrong = Mistake::new(format!("a {what} is given twice"));
                Err(misread(line, wrong.expected(format!("one {what}"))))
            }
        }
    }

    /// Whether neither speed nor jitter was given.
    pub(crate) fn is_usual(self) -> bool {
        self == Self::default()
    }

    /// A cluster's name with this condition after it.
    pub(crate) fn after(self, name: &str) -> String {
        let mut line = name.to_owned();
        if let Some(speed) = self.speed {
            line.push_str(&format!(" at {speed}"));
        }
        if let Some(jitter) = self.jitter {
            line.push_str(&format!(" with {} jitter", percent(jitter)));
        }
        line
    }

    /// Applies this condition to `cluster`. `line`, as the user wrote it, is for error messages.
    ///
    /// # Errors
    /// When a value is out of range, or the cluster is a measured machine or has pools.
    pub(crate) fn of(self, line: &str, cluster: Cluster) -> Result<Cluster, SpecError> {
        if cluster.profile.is_some() {
            let wrong = Mistake::new(format!("{} was measured at its own speed", cluster.name));
            return Err(misread(
                line,
                wrong.expected("a cluster whose prices are in tables"),
            ));
        }
        if cluster.pools.is_some() {
            let wrong = Mistake::new("each pool has a speed and a jitter of its own");
            return Err(misread(line, wrong));
        }
        let conditioned = Cluster {
            name: self.after(&cluster.name),
            speed: self.speed.map(Sourced::given).or(cluster.speed),
            jitter: self.jitter.map(Sourced::given).or(cluster.jitter),
            ..cluster
        };
        conditioned.check().map_err(|(field, message)| {
            misread(line, Mistake::of_sentence(&format!("{field} {message}")))
        })?;
        Ok(conditioned)
    }
}

/// Returns `arg` with this jitter on all of its nodes; the jitter is a share of a pass's time.
///
/// # Errors
/// When `arg` already has a speed or jitter that is not a number.
pub fn jittering(arg: &str, jitter: f64) -> Result<String, SpecError> {
    let jittering = |name: &str| {
        let (base, condition) = Condition::split(name)?;
        let jitter = Some(jitter);
        Ok(Condition {
            jitter,
            ..condition
        }
        .after(base))
    };
    if !pools::lists_pools(arg) || Path::new(arg).exists() {
        return jittering(arg);
    }
    let (parts, links) = arg
        .split_once(',')
        .map_or((arg, None), |(parts, links)| (parts, Some(links)));
    let parts: Vec<String> = parts
        .split(" + ")
        .map(jittering)
        .collect::<Result<_, SpecError>>()?;
    let links = links.map_or_else(String::new, |links| format!(",{links}"));
    Ok(parts.join(" + ") + &links)
}

/// Parses a share: `0.02` or `2%`.
fn share(text: &str) -> Option<f64> {
    let (number, scale) = match text.trim().strip_suffix('%') {
        Some(number) => (number, 100.0),
        None => (text, 1.0),
    };
    let number: f64 = number.trim().parse().ok()?;
    Some(number / scale)
}

/// Formats a share as a percentage, or as a number if that would be another value.
fn percent(value: f64) -> String {
    let rounded = (value * 1e10).round() / 1e8;
    match rounded / 100.0 == value {
        true => format!("{rounded}%"),
        false => value.to_string(),
    }
}

fn misread(line: &str, mistake: Mistake) -> SpecError {
    let mistake = mistake.at(format!("cluster `{line}`"));
    SpecError::Wrong(mistake.example(EXAMPLE))
}
