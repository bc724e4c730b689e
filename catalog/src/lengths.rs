//! How long documents are, as people write it: `lognormal:mean=1k,sigma=0.9`, `512:0.7,4k:0.3`, or a file that counts
//! documents by length.

use std::fmt;
use std::str::FromStr;

use crate::elementary;

/// Largest number of tokens in a sequence.
pub const MAX_SEQ_LEN: u64 = 1 << 24;

/// The most different lengths of documents that are kept one by one; if there are more, they are grouped into classes.
const MOST_LENGTHS: usize = 256;
/// Classes of lengths for each doubling of the length. A class is 9% wide; its mean represents it,
/// which makes the sum of squared lengths too low by less than 0.1%.
const CLASSES_PER_OCTAVE: f64 = 8.0;
/// Largest standard deviation of the logarithm of the length.
const MAX_SIGMA: f64 = 4.0;
/// Largest number of documents of one length, so that sums stay finite.
const MAX_DOCUMENTS: f64 = 1e18;
/// How far the sum of shares may be from 1.
const SHARES_TOLERANCE: f64 = 1e-3;

/// The distribution of the lengths of documents, in tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum Lengths {
    /// The logarithm of the length is normally distributed.
    LogNormal {
        /// Mean length.
        mean: u64,
        /// Standard deviation of the natural logarithm of the length.
        sigma: f64,
    },
    /// Lengths in ascending order, each with a weight: its share of the documents, or its number of documents.
    Listed(Vec<(u64, f64)>),
}

impl Lengths {
    /// Reads the text of a file. Each line holds a length and the number of documents of that length; without a number it
    /// is one document. `#` starts a comment.
    ///
    /// # Errors
    /// The number and text of the first line that cannot be read.
    pub fn counted(text: &str) -> Result<Self, String> {
        let mut pairs = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let said = line.split('#').next().unwrap_or_default().trim();
            if said.is_empty() {
                continue;
            }
            let wrong = |why: String| format!("line {}: {why}", index + 1);
            let mut words = said
                .split([' ', '\t', ',', ':', ';'])
                .filter(|w| !w.is_empty());
            let length = tokens(words.next().unwrap_or_default()).map_err(wrong)?;
            let count = words.next().map_or(Ok(1), |word| {
                let count = word.parse::<u64>().ok().filter(|&count| count > 0);
                count.ok_or_else(|| wrong(format!("`{word}` is not a number of documents")))
            })?;
            if let Some(more) = words.next() {
                return Err(wrong(format!("`{more}` follows a length and its count")));
            }
            pairs.push((length, count as f64));
        }
        match pairs.is_empty() {
            true => Err("it lists no lengths".to_owned()),
            false => Ok(Self::listed(pairs)),
        }
    }

    /// Sorts lengths, adds up the weights of equal ones, and gathers them in classes if they are many.
    fn listed(mut pairs: Vec<(u64, f64)>) -> Self {
        pairs.sort_by_key(|&(length, _)| length);
        let equal = merged(&pairs, |length| length as f64);
        Self::Listed(match equal.len() > MOST_LENGTHS {
            true => merged(&equal, |length| {
                (elementary::log2(length as f64) * CLASSES_PER_OCTAVE).floor()
            }),
            false => equal,
        })
    }

    /// Lengths with their shares of all documents, which add up to 1. Documents of a log-normal
    /// distribution are cut to `most`; a list must not have longer ones.
    pub(crate) fn shares(&self, most: u64) -> Vec<(u64, f64)> {
        let weights = match self {
            Self::Listed(pairs) => pairs.clone(),
            &Self::LogNormal { mean, sigma } => log_normal(mean as f64, sigma, most),
        };
        let all: f64 = weights.iter().map(|(_, weight)| weight).sum();
        let shares = weights
            .iter()
            .map(|&(length, weight)| (length, weight / all));
        shares.collect()
    }

    /// The longest listed length, or the mean of a log-normal distribution, which has no longest.
    pub(crate) fn longest(&self) -> u64 {
        match self {
            Self::LogNormal { mean, .. } => *mean,
            Self::Listed(pairs) => pairs.last().map_or(0, |&(length, _)| length),
        }
    }
}

/// Adds up the weights of neighbours of the same class; each class becomes its mean length.
fn merged(pairs: &[(u64, f64)], class: impl Fn(u64) -> f64) -> Vec<(u64, f64)> {
    let same = pairs.chunk_by(|a, b| class(a.0) == class(b.0));
    let one = |of: &[(u64, f64)]| {
        let weight: f64 = of.iter().map(|(_, weight)| weight).sum();
        let tokens: f64 = of
            .iter()
            .map(|&(length, weight)| length as f64 * weight)
            .sum();
        (((tokens / weight).round() as u64).max(1), weight)
    };
    same.map(one).collect()
}

/// Classes of a log-normal distribution with their probabilities; longer documents get `most`.
fn log_normal(mean: f64, sigma: f64, most: u64) -> Vec<(u64, f64)> {
    let middle = elementary::ln(mean) - sigma * sigma / 2.0;
    // Shares of documents, and of tokens, in documents shorter than `length`.
    let below = |length: f64| {
        let z = (elementary::ln(length) - middle) / sigma;
        [z, z - sigma].map(elementary::normal_below)
    };
    let last = (elementary::log2(most as f64) * CLASSES_PER_OCTAVE).ceil() as u64;
    let edges = (1..=last).map(|edge| elementary::exp2(edge as f64 / CLASSES_PER_OCTAVE));
    let mut pairs = Vec::new();
    let mut before = [0.0, 0.0];
    for edge in edges.map(|edge| edge.min(most as f64)) {
        let now = below(edge);
        let [documents, tokens] = [now[0] - before[0], now[1] - before[1]];
        before = now;
        if documents > 0.0 {
            let length = (mean * tokens / documents).round().clamp(1.0, most as f64);
            pairs.push((length as u64, documents));
        }
    }
    pairs.push((most, 1.0 - before[0]));
    pairs.retain(|&(_, weight)| weight > 0.0);
    merged(&pairs, |length| length as f64)
}

impl FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if let Some(of) = text.strip_prefix("lognormal:") {
            return parameters(of);
        }
        let pair = |item: &str| {
            let (length, share) = item
                .split_once(':')
                .ok_or_else(|| format!("`{}` is not a length with its share", item.trim()))?;
            Ok((tokens(length)?, weight(share.trim())?))
        };
        let pairs: Vec<(u64, f64)> = text.split(',').map(pair).collect::<Result<_, String>>()?;
        let all: f64 = pairs.iter().map(|(_, weight)| weight).sum();
        let counts = pairs.iter().all(|(_, weight)| weight.fract() == 0.0);
        if !counts && (all - 1.0).abs() > SHARES_TOLERANCE {
            let all = (all * 1e6).round() / 1e6;
            return Err(format!("the shares add up to {all}, not to 1"));
        }
        Ok(Self::listed(pairs))
    }
}

/// Reads `mean=1k,sigma=0.9`.
fn parameters(text: &str) -> Result<Lengths, String> {
    let (mut mean, mut sigma) = (None, None);
    let twice = |what: &str| format!("lognormal: {what} is given twice");
    for item in text.split(',') {
        let pair = item.split_once('=');
        let pair = pair.map(|(key, value)| (key.trim(), value));
        match pair {
            Some(("mean", _)) if mean.is_some() => return Err(twice("mean=")),
            Some(("sigma", _)) if sigma.is_some() => return Err(twice("sigma=")),
            Some(("mean", value)) => mean = Some(tokens(value)?),
            Some(("sigma", value)) => {
                let number = value.trim().parse::<f64>().ok();
                let number = number.filter(|&sigma| sigma > 0.0 && sigma <= MAX_SIGMA);
                sigma = Some(number.ok_or_else(|| {
                    format!(
                        "sigma is `{}`, not a number above 0 and up to {MAX_SIGMA}",
                        value.trim()
                    )
                })?);
            }
            _ => return Err(format!("`{}` is neither mean= nor sigma=", item.trim())),
        }
    }
    let missing = |what: &str| format!("lognormal: {what} is missing");
    Ok(Lengths::LogNormal {
        mean: mean.ok_or_else(|| missing("mean="))?,
        sigma: sigma.ok_or_else(|| missing("sigma="))?,
    })
}

/// Reads a length: a whole number, which may end in `k` (times 1024) or `M` (times 1024 · 1024).
fn tokens(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let scales = [
        ("k", 1 << 10),
        ("K", 1 << 10),
        ("m", 1 << 20),
        ("M", 1 << 20),
    ];
    let scaled = scales
        .iter()
        .find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, *scale)));
    let (digits, scale) = scaled.unwrap_or((text, 1));
    let read = digits
        .parse::<u64>()
        .ok()
        .and_then(|n| n.checked_mul(scale));
    read.filter(|length| (1..=MAX_SEQ_LEN).contains(length))
        .ok_or_else(|| format!("`{text}` is not a length of 1 to {MAX_SEQ_LEN} tokens"))
}

/// Reads a weight: a share, a percentage or a number of documents.
fn weight(text: &str) -> Result<f64, String> {
    let (digits, scale) = match text.strip_suffix('%') {
        Some(digits) => (digits.trim(), 100.0),
        None => (text, 1.0),
    };
    let read = digits.parse::<f64>().ok().map(|weight| weight / scale);
    read.filter(|weight| *weight > 0.0 && *weight <= MAX_DOCUMENTS)
        .ok_or_else(|| format!("`{text}` is not a share above 0"))
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LogNormal { mean, sigma } => {
                write!(f, "lognormal:mean={},sigma={sigma}", short(*mean))
            }
            Self::Listed(pairs) => {
                for (index, (length, weight)) in pairs.iter().enumerate() {
                    let comma = if index == 0 { "" } else { "," };
                    write!(f, "{comma}{}:{weight}", short(*length))?;
                }
                Ok(())
            }
        }
    }
}

/// Formats a length, with `k` or `M` where that is exact.
fn short(length: u64) -> String {
    match length {
        l if l.is_multiple_of(1 << 20) => format!("{}M", l >> 20),
        l if l.is_multiple_of(1 << 10) => format!("{}k", l >> 10),
        l => l.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        for text in [
            "lognormal:mean=1k,sigma=0.9",
            "512:0.7,4k:0.3",
            "100:7,3000:2",
            "1M:1",
        ] {
            let read: Lengths = text.parse().expect(text);
            assert_eq!(read.to_string(), text);
        }
        let same: Lengths = "4k:30%, 512:0.5,512:20%".parse().expect("shares");
        assert_eq!(same.to_string(), "512:0.7,4k:0.3");
        let file = Lengths::counted("# length count\n512 7\n4096, 2\n4k\n").expect("counts");
        assert_eq!(file.to_string(), "512:7,4k:3");
    }

    #[test]
    fn mistakes_are_named() {
        for (text, wanted) in [
            ("512:0.7,4k:0.2", "add up to 0.9"),
            ("0:1", "`0` is not a length"),
            ("512:0,4k:1", "`0` is not a share"),
            ("512:-1", "is not a share"),
            ("512", "is not a length with its share"),
            ("512:nan", "is not a share"),
            ("512:1e300,4k:1e300", "is not a share"),
            ("lognormal:mean=1k", "sigma= is missing"),
            ("lognormal:mean=1k,sigma=0", "sigma is `0`"),
            ("lognormal:mean=1k,sigma=1,max=3", "`max=3` is neither"),
            ("lognormal:mean=1k,sigma=1,sigma=2", "sigma= is given twice"),
            ("lognormal:mean=1k,mean=2k,sigma=1", "mean= is given twice"),
        ] {
            let wrong = text.parse::<Lengths>().expect_err(text);
            assert!(wrong.contains(wanted), "{text}: {wrong}");
        }
        for (text, wanted) in [
            ("", "no lengths"),
            ("512 2\nx 3", "line 2"),
            ("5 0", "line 1"),
        ] {
            let wrong = Lengths::counted(text).expect_err(text);
            assert!(wrong.contains(wanted), "{text}: {wrong}");
        }
    }

    #[test]
    fn a_log_normal_distribution_keeps_its_moments() {
        let lengths: Lengths = "lognormal:mean=1k,sigma=0.9".parse().expect("lengths");
        let shares = lengths.shares(1 << 20);
        let moment = |power: i32| -> f64 {
            let term = |&(length, share): &(u64, f64)| share * (length as f64).powi(power);
            shares.iter().map(term).sum()
        };
        let square = 1024.0 * 1024.0 * elementary::exp(0.81);
        assert!((moment(0) - 1.0).abs() < 1e-12);
        assert!((moment(1) / 1024.0 - 1.0).abs() < 1e-3, "{}", moment(1));
        assert!((moment(2) / square - 1.0).abs() < 2e-3, "{}", moment(2));
        assert_eq!(
            lengths.shares(512).last().map(|&(length, _)| length),
            Some(512)
        );
    }

    #[test]
    fn many_lengths_are_gathered() {
        let text: String = (1..=5000).map(|length| format!("{length} 3\n")).collect();
        let Lengths::Listed(pairs) = Lengths::counted(&text).expect("lengths") else {
            panic!("a list");
        };
        assert!(pairs.len() < MOST_LENGTHS);
        let squares: f64 = pairs.iter().map(|&(l, n)| n * (l * l) as f64).sum();
        let exact: f64 = (1..=5000u64).map(|l| 3.0 * (l * l) as f64).sum();
        assert!((squares / exact - 1.0).abs() < 1e-3, "{squares} {exact}");
    }
}
