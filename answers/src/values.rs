//! Values as people write them: `8k`, `5%`, `15T`, `64 nodes`, `512x h100`.

use std::fmt;
use std::path::Path;

use catalog::{Adapters, Cluster, Lengths, Mistake, Precision};

/// Most tokens of a training run: a million times the largest so far.
const MAX_TOKENS: f64 = 1e20;

/// A number of GPUs as it was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gpus {
    /// `512`.
    Count(u64),
    /// `64 nodes` of the cluster.
    Nodes(u64),
    /// `512x h100`: a number of GPUs, and which GPU.
    Of(u64, String),
}

impl Gpus {
    /// The number of GPUs. Nodes are counted with the GPUs per node of `cluster`.
    pub fn count(&self, cluster: &Cluster) -> u64 {
        match self {
            Self::Count(count) | Self::Of(count, _) => *count,
            Self::Nodes(nodes) => nodes.saturating_mul(cluster.gpus_per_node),
        }
    }

    /// The GPU that was named, if one was.
    pub fn device(&self) -> Option<&str> {
        match self {
            Self::Of(_, device) => Some(device),
            Self::Count(_) | Self::Nodes(_) => None,
        }
    }
}

impl fmt::Display for Gpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => write!(f, "{count}"),
            Self::Nodes(1) => write!(f, "'1 node'"),
            Self::Nodes(nodes) => write!(f, "'{nodes} nodes'"),
            Self::Of(count, device) => write!(f, "'{count}x {device}'"),
        }
    }
}

/// An example of adapters, for messages.
pub(crate) const ADAPTERS: &str = "rank=16,alpha=32,modules=qkv+proj";

/// Reads adapters, such as `rank=16,modules=attention`.
pub fn adapters(text: &str) -> Result<Adapters, Mistake> {
    text.parse().map_err(|wrong: String| {
        let mistake = match wrong.split_once(": expected ") {
            Some((word, expected)) => {
                Mistake::new(format!("{word} is not understood")).expected(expected)
            }
            None => Mistake::new(wrong),
        };
        mistake.example(ADAPTERS)
    })
}

/// Reads lengths of documents in their notation, or from the file that the text names.
pub fn lengths(text: &str) -> Result<Lengths, Mistake> {
    let path = Path::new(text);
    let read = match path.is_file() {
        true => Lengths::counted(&catalog::text::read(path).map_err(|wrong| wrong.mistake())?),
        false if path.is_dir() => Err(format!("`{text}` is a folder, not a file")),
        false => text.parse(),
    };
    read.map_err(|wrong| {
        Mistake::new(wrong)
            .expected("lengths with their shares, a distribution, or a file of lengths and counts")
            .example("512:0.7,4k:0.3, lognormal:mean=1k,sigma=0.9, or lengths.txt")
    })
}

/// Reads a number of GPUs.
pub fn gpus(text: &str) -> Result<Gpus, Mistake> {
    let wrong = || {
        Mistake::new(format!("`{text}` is not a number of GPUs"))
            .expected("a whole number, nodes, or GPUs of a kind")
            .example("--gpus 512, --gpus '64 nodes', --gpus '512x h100'")
    };
    let digits = text.trim_start();
    let end = digits
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(digits.len());
    let (number, rest) = digits.split_at(end);
    let count: u64 = number.parse().map_err(|_| wrong())?;
    let rest = rest.trim();
    match rest.to_ascii_lowercase().as_str() {
        "" | "gpu" | "gpus" => return Ok(Gpus::Count(count)),
        "node" | "nodes" | "host" | "hosts" => return Ok(Gpus::Nodes(count)),
        _ => {}
    }
    let device = rest
        .strip_prefix(['x', 'X', '×', '*'])
        .unwrap_or(rest)
        .trim();
    let is_word = device.starts_with(|c: char| c.is_ascii_alphabetic());
    if is_word || catalog::load::device(device).is_ok() {
        return Ok(Gpus::Of(count, device.to_owned()));
    }
    // `2x256` and `512.0` are refused with the number that they mean.
    let product = || {
        device
            .parse::<u64>()
            .ok()?
            .checked_mul(count)
            .filter(|gpus| *gpus > 0)
    };
    let whole = || {
        let number = text.trim().parse::<f64>().ok()?;
        (number.fract() == 0.0).then(|| number.to_string())
    };
    Err(wrong().nearest(product().map(|n| n.to_string()).or_else(whole)))
}

/// Reads a length of sequences or a batch: a whole number, which may end in `k` (times 1024) or `M` (times 1024 · 1024).
pub fn count(text: &str) -> Result<u64, Mistake> {
    let (number, scale) = match text.trim().strip_suffix(['k', 'K']) {
        Some(number) => (number, 1 << 10),
        None => match text.trim().strip_suffix(['m', 'M']) {
            Some(number) => (number, 1 << 20),
            None => (text.trim(), 1),
        },
    };
    let whole: String = number.trim().replace([',', '_'], "");
    let read = whole.parse::<u64>().ok().and_then(|n| n.checked_mul(scale));
    read.ok_or_else(|| {
        Mistake::new(format!("`{text}` is not a whole number"))
            .expected("a whole number; k is 1,024 and M is 1,048,576")
            .example("8192, 8k, 1M")
    })
}

/// Reads a share: `0.05` or `5%`.
pub fn share(text: &str) -> Result<f64, Mistake> {
    let wrong = || {
        Mistake::new(format!("`{text}` is not a share"))
            .expected("a share in [0, 1), or a percentage")
            .example("0.05 or 5%")
    };
    let (number, scale) = match text.trim().strip_suffix('%') {
        Some(number) => (number.trim(), 100.0),
        None => (text.trim(), 1.0),
    };
    let value: f64 = number.parse().map_err(|_| wrong())?;
    let share = value / scale;
    if (0.0..1.0).contains(&share) {
        return Ok(share);
    }
    let percent = scale == 1.0 && (1.0..100.0).contains(&value);
    Err(wrong().nearest(percent.then(|| format!("{value}%"))))
}

/// Reads a precision of linear layers by its name.
pub fn precision(name: &str) -> Result<Precision, Mistake> {
    let known = serde_json::from_value(name.to_ascii_lowercase().into());
    known.map_err(|_| {
        Mistake::new(format!("unknown precision `{name}`")).expected("fp32, fp16, bf16 or fp8")
    })
}

/// Reads a number of tokens to train on: `15T`, `300B`, `1e12`.
pub fn tokens(text: &str) -> Result<f64, Mistake> {
    let said = text.trim();
    let wrong = |what: String| {
        Mistake::new(what)
            .expected(
                "a number of tokens; K, M, B and T are thousands, millions, billions and trillions",
            )
            .example("15T or 300B")
    };
    let lower = said.to_ascii_lowercase();
    let units = ["tb", "gb", "mb", "kb", "tib", "gib", "mib", "kib", "bytes"];
    if let Some(unit) = units.into_iter().find(|unit| lower.ends_with(unit)) {
        let number = said[..said.len() - unit.len()].trim_end();
        let letter = unit.chars().next().filter(|c| *c != 'b');
        let letter = letter.map_or(String::new(), |c| c.to_ascii_uppercase().to_string());
        let letter = if letter == "G" {
            "B".to_owned()
        } else {
            letter
        };
        let near = number
            .parse::<f64>()
            .is_ok()
            .then(|| format!("{number}{letter}"));
        return Err(wrong(format!("`{text}`: tokens, not bytes")).nearest(near));
    }
    let number = lower.strip_suffix("tokens").unwrap_or(&lower).trim_end();
    let (number, scale) = match number.char_indices().last() {
        Some((at, 'k')) => (&number[..at], 1e3),
        Some((at, 'm')) => (&number[..at], 1e6),
        Some((at, 'b' | 'g')) => (&number[..at], 1e9),
        Some((at, 't')) => (&number[..at], 1e12),
        _ => (number, 1.0),
    };
    match number.trim_end().replace([',', '_'], "").parse::<f64>() {
        Ok(n) if n > 0.0 && n * scale <= MAX_TOKENS => Ok(n * scale),
        _ => Err(wrong(format!("`{text}` is not a number of tokens"))),
    }
}

/// Reads a price: `2.5` or `$2.50`, dollars per GPU and hour.
pub fn price(text: &str) -> Result<f64, Mistake> {
    let number = text.trim().trim_start_matches('$').trim();
    let number = number.trim_end_matches("/h").trim_end();
    match number.parse::<f64>() {
        Ok(price) if price.is_finite() && price >= 0.0 => Ok(price),
        _ => Err(Mistake::new(format!("`{text}` is not a price"))
            .expected("dollars per GPU and hour")
            .example("--price 2.5")),
    }
}

/// Reads a finite number of at least 0.
pub fn at_least_0(text: &str) -> Result<f64, Mistake> {
    let number = text.trim().parse::<f64>().ok();
    number
        .filter(|number| number.is_finite() && *number >= 0.0)
        .ok_or_else(|| {
            Mistake::new(format!("`{text}` is not a number of at least 0")).expected("0 or more")
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_as_people_write_them() {
        assert_eq!(gpus("512"), Ok(Gpus::Count(512)));
        assert_eq!(gpus("64 nodes"), Ok(Gpus::Nodes(64)));
        for text in ["512x h100", "512 x h100", "512 H100", "512×h100"] {
            let read = gpus(text).expect(text);
            let Gpus::Of(512, device) = read else {
                panic!("{text}: {read:?}");
            };
            assert!(device.eq_ignore_ascii_case("h100"));
        }
        for (text, value) in [
            ("8k", 8192),
            ("128K", 131_072),
            ("1M", 1 << 20),
            ("8,192", 8192),
        ] {
            assert_eq!(count(text), Ok(value));
        }
        for (text, value) in [("5%", 0.05), ("0.05", 0.05), ("0", 0.0), ("12.5 %", 0.125)] {
            assert_eq!(share(text), Ok(value));
        }
        for (text, value) in [
            ("15T", 15e12),
            ("300B", 300e9),
            ("1e12", 1e12),
            ("7 b tokens", 7e9),
        ] {
            assert_eq!(tokens(text), Ok(value));
        }
        for (text, value) in [("2.5", 2.5), ("$2.50", 2.5), ("2.5/h", 2.5), ("0", 0.0)] {
            assert_eq!(price(text), Ok(value));
        }
    }

    #[test]
    fn wrong_values_say_what_was_meant() {
        let near = |wrong: Mistake| wrong.nearest.unwrap_or_default();
        assert_eq!(near(gpus("8x64").expect_err("a product")), "512");
        assert_eq!(near(gpus("0x10").expect_err("no number")), "");
        assert_eq!(near(gpus("512.0").expect_err("no whole number")), "512");
        assert_eq!(near(share("5").expect_err("more than all")), "5%");
        let bytes = tokens("15TB").expect_err("bytes");
        assert!(bytes.what.contains("tokens, not bytes"));
        assert_eq!(near(bytes), "15T");
        assert_eq!(near(tokens("300 GB").expect_err("bytes")), "300B");
        for text in ["-8", "", "many", "8 %"] {
            assert!(gpus(text).is_err(), "{text}");
        }
        for text in ["abc", "-2", "nan", "inf"] {
            assert!(price(text).is_err(), "{text}");
        }
        for text in ["nan", "-1", "1", "100%", "-5%"] {
            assert!(share(text).is_err(), "{text}");
        }
        for text in ["-1T", "0", "T", "1e30"] {
            assert!(tokens(text).is_err(), "{text}");
        }
    }
}
