//! Quantities with a dimension.
//!
//! Counts and bytes are integers, time and FLOPs are `f64`. Division across types gives the
//! physical result: `Bytes / Bandwidth = Seconds`, `Flops / FlopRate = Seconds`. Every type parses
//! from and prints to the notation people write: `"80 GiB"`, `"3.35 TB/s"`, `"989 TFLOP/s"`.

use std::fmt::{self, Display, Formatter};
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Sub, SubAssign};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

/// A duration in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Seconds(pub f64);

/// A number of floating-point operations (a multiply-add counts two).
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Flops(pub f64);

/// Floating-point operations per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct FlopRate(pub f64);

/// Bytes per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Bandwidth(pub f64);

macro_rules! additive {
    ($($t:ident),*) => {$(
        impl Add for $t {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }
        impl Sub for $t {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }
        impl AddAssign for $t {
            fn add_assign(&mut self, other: Self) {
                self.0 += other.0;
            }
        }
        impl SubAssign for $t {
            fn sub_assign(&mut self, other: Self) {
                self.0 -= other.0;
            }
        }
        impl Sum for $t {
            fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
                iter.fold(Self::default(), Add::add)
            }
        }
    )*};
}
additive!(Seconds, Flops, FlopRate, Bandwidth);

// Sums and products of bytes saturate at the largest number; no device holds that many, so such a
// plan does not fit. A difference below zero is a bug of ours, and is caught.
impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}
impl Sub for Bytes {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}
impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}
impl SubAssign for Bytes {
    fn sub_assign(&mut self, other: Self) {
        *self = *self - other;
    }
}
impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::default(), Add::add)
    }
}

macro_rules! scaled_by_f64 {
    ($($t:ident),*) => {$(
        impl Mul<f64> for $t {
            type Output = Self;
            fn mul(self, factor: f64) -> Self {
                Self(self.0 * factor)
            }
        }
        impl Div<f64> for $t {
            type Output = Self;
            fn div(self, divisor: f64) -> Self {
                Self(self.0 / divisor)
            }
        }
        impl Div for $t {
            type Output = f64;
            fn div(self, other: Self) -> f64 {
                self.0 / other.0
            }
        }
    )*};
}
scaled_by_f64!(Seconds, Flops, FlopRate, Bandwidth);

impl Seconds {
    /// The larger of two values; a NaN is ignored.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self(self.0.max(other.0))
    }

    /// The smaller of two values; a NaN is ignored.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        Self(self.0.min(other.0))
    }
}

impl Mul<u64> for Bytes {
    type Output = Self;
    fn mul(self, count: u64) -> Self {
        Self(self.0.saturating_mul(count))
    }
}

impl Bytes {
    /// The size as a float, for ratios.
    #[must_use]
    pub fn as_f64(self) -> f64 {
        self.0 as f64
    }

    /// Scales these bytes from a total of `own` to a total of `of`, rounded up.
    #[must_use]
    pub fn as_share_of(self, of: Self, own: Self) -> Self {
        if of == own {
            return self;
        }
        Self((self.as_f64() * of.as_f64() / own.as_f64()).ceil() as u64)
    }

    /// Difference that stops at zero.
    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl Div<Bandwidth> for Bytes {
    type Output = Seconds;
    fn div(self, bandwidth: Bandwidth) -> Seconds {
        Seconds(self.0 as f64 / bandwidth.0)
    }
}

impl Div<FlopRate> for Flops {
    type Output = Seconds;
    fn div(self, rate: FlopRate) -> Seconds {
        Seconds(self.0 / rate.0)
    }
}

/// Formats a value in the first unit in which it is at least 1, or else in the last unit.
fn with_unit(value: f64, steps: &[(f64, &str)]) -> String {
    let (size, unit) = steps
        .iter()
        .find(|(size, _)| value.abs() >= *size)
        .or(steps.last())
        .copied()
        .unwrap_or((1.0, ""));
    let number = value / size;
    let digits = if number.abs() >= 100.0 {
        0
    } else if number.abs() >= 10.0 {
        1
    } else {
        2
    };
    let text = format!("{number:.digits$}");
    let text = if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.')
    } else {
        &text
    };
    format!("{text} {unit}")
}

impl Display for Bytes {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let steps = [
            (1024f64.powi(4), "TiB"),
            (1024f64.powi(3), "GiB"),
            (1024f64.powi(2), "MiB"),
            (1024.0, "KiB"),
            (1.0, "B"),
        ];
        f.pad(&with_unit(self.as_f64(), &steps))
    }
}

/// Units of time, from the largest, as files write them.
const TIMES: [(f64, &str); 5] = [
    (86400.0, "days"),
    (1.0, "s"),
    (1e-3, "ms"),
    (1e-6, "us"),
    (1e-9, "ns"),
];

impl Seconds {
    /// The time as files write it: in ASCII and without trailing zeros, such as `62.2 us`.
    fn in_files(&self) -> String {
        with_unit(self.0, &TIMES)
    }
}

/// The time for people, with three significant figures: `12.3 s`, `4.56 ms`, `7.89 µs`.
impl Display for Seconds {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        // Values that round to 1000 of a unit are shown as 1.00 of the next.
        const NEARLY: f64 = 0.9995;
        let size = self.0.abs();
        if size == 0.0 {
            return f.pad("0 s");
        }
        let within = |(unit, _): &&(f64, &str)| size >= NEARLY * unit;
        let (unit, name) = *TIMES.iter().find(within).unwrap_or(&TIMES[4]);
        let number = self.0 / unit;
        let digits = match number.abs() {
            n if n >= 99.95 => 0,
            n if n >= 9.995 => 1,
            _ => 2,
        };
        let name = if name == "us" { "µs" } else { name };
        f.pad(&format!("{number:.digits$} {name}"))
    }
}

impl Display for Flops {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.pad(&with_unit(
            self.0,
            &[
                (1e15, "PFLOP"),
                (1e12, "TFLOP"),
                (1e9, "GFLOP"),
                (1.0, "FLOP"),
            ],
        ))
    }
}

impl Display for FlopRate {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.pad(&with_unit(
            self.0,
            &[(1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1.0, "FLOP/s")],
        ))
    }
}

impl Display for Bandwidth {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.pad(&with_unit(
            self.0,
            &[(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1.0, "B/s")],
        ))
    }
}

/// A text is not a quantity of the expected kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a {kind}; expected a number and one of: {units}")]
pub struct UnitError {
    text: String,
    kind: &'static str,
    units: String,
}

impl UnitError {
    fn new(text: &str, kind: &'static str, units: &[(&str, f64)]) -> Self {
        let units: Vec<&str> = units.iter().map(|(name, _)| *name).collect();
        Self {
            text: text.chars().take(40).collect(),
            kind,
            units: units.join(", "),
        }
    }
}

/// Parses a number with a unit, in the base unit.
fn parse(text: &str, kind: &'static str, units: &[(&str, f64)]) -> Result<f64, UnitError> {
    let error = || UnitError::new(text, kind, units);
    let trimmed = text.trim();
    let split = trimmed
        .find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '-' | '+' | '_')))
        .unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let number: f64 = number.replace('_', "").parse().map_err(|_| error())?;
    let unit = unit.trim();
    let (_, size) = units
        .iter()
        .find(|(name, _)| *name == unit)
        .ok_or_else(error)?;
    let value = number * size;
    if value.is_finite() && number >= 0.0 {
        Ok(value)
    } else {
        Err(error())
    }
}

/// The units that a text may have for [`Bytes`], each in its base unit.
const OF_BYTES: &[(&str, f64)] = &[
    ("B", 1.0),
    ("KB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("TB", 1e12),
    ("KiB", 1024.0),
    ("MiB", 1048576.0),
    ("GiB", 1073741824.0),
    ("TiB", 1099511627776.0),
];

impl FromStr for Bytes {
    type Err = UnitError;
    fn from_str(text: &str) -> Result<Self, UnitError> {
        let bytes = parse(text, "size in bytes", OF_BYTES)?;
        if bytes < 2f64.powi(63) {
            Ok(Self(bytes.round() as u64))
        } else {
            Err(UnitError::new(text, "size in bytes below 8 EiB", OF_BYTES))
        }
    }
}

/// The units that a text may have for [`Seconds`], each in its base unit.
const OF_SECONDS: &[(&str, f64)] = &[
    ("s", 1.0),
    ("ms", 1e-3),
    ("us", 1e-6),
    ("µs", 1e-6),
    ("ns", 1e-9),
    ("days", 86400.0),
];

impl FromStr for Seconds {
    type Err = UnitError;
    fn from_str(text: &str) -> Result<Self, UnitError> {
        parse(text, "duration", OF_SECONDS).map(Self)
    }
}

/// The units that a text may have for [`FlopRate`], each in its base unit.
const OF_RATE: &[(&str, f64)] = &[
    ("FLOP/s", 1.0),
    ("GFLOP/s", 1e9),
    ("TFLOP/s", 1e12),
    ("PFLOP/s", 1e15),
];

impl FromStr for FlopRate {
    type Err = UnitError;
    fn from_str(text: &str) -> Result<Self, UnitError> {
        parse(text, "rate of computation", OF_RATE).map(Self)
    }
}

/// The units that a text may have for [`Bandwidth`], each in its base unit.
const OF_BANDWIDTH: &[(&str, f64)] = &[
    ("B/s", 1.0),
    ("MB/s", 1e6),
    ("GB/s", 1e9),
    ("TB/s", 1e12),
    ("GiB/s", 1073741824.0),
    ("Gb/s", 0.125e9),
    ("Gbit/s", 0.125e9),
    ("Tb/s", 0.125e12),
];

impl FromStr for Bandwidth {
    type Err = UnitError;
    fn from_str(text: &str) -> Result<Self, UnitError> {
        parse(text, "bandwidth", OF_BANDWIDTH).map(Self)
    }
}

macro_rules! as_text {
    ($($t:ident: $units:ident, $example:literal, $written:path;)*) => {$(
        impl Serialize for $t {
            fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.collect_str(&$written(self))
            }
        }
        impl<'de> Deserialize<'de> for $t {
            fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                let text = std::borrow::Cow::<str>::deserialize(d)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
        impl schemars::JsonSchema for $t {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($t).into()
            }
            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                let units: Vec<&str> = $units.iter().map(|(unit, _)| *unit).collect();
                schemars::json_schema!({
                    "type": "string",
                    "description": concat!("number and unit, such as `", $example, "`"),
                    "pattern": format!(r"^\s*\+?[0-9._]+\s*({})\s*$", units.join("|")),
                })
            }
        }
    )*};
}
as_text! {
    Bytes: OF_BYTES, "80 GiB", Bytes::to_string;
    Seconds: OF_SECONDS, "5 us", Seconds::in_files;
    FlopRate: OF_RATE, "989 TFLOP/s", FlopRate::to_string;
    Bandwidth: OF_BANDWIDTH, "3.35 TB/s", Bandwidth::to_string;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_and_prints() {
        assert_eq!("80 GiB".parse(), Ok(Bytes(80 << 30)));
        assert_eq!("80GB".parse(), Ok(Bytes(80_000_000_000)));
        assert_eq!("3.35 TB/s".parse(), Ok(Bandwidth(3.35e12)));
        assert_eq!("400 Gb/s".parse(), Ok(Bandwidth(50e9)));
        assert_eq!("989 TFLOP/s".parse(), Ok(FlopRate(989e12)));
        assert_eq!(Bytes(80 << 30).to_string(), "80 GiB");
        assert_eq!(Bandwidth(3.35e12).to_string(), "3.35 TB/s");
        for (seconds, shown, in_file) in [
            (0.0, "0 s", "0 ns"),
            (0.0125, "12.5 ms", "12.5 ms"),
            (58.0, "58.0 s", "58 s"),
            (0.043, "43.0 ms", "43 ms"),
            (0.000_999_9, "1.00 ms", "1000 us"),
            (62.2e-6, "62.2 µs", "62.2 us"),
            (250e-9, "250 ns", "250 ns"),
            (86400.0, "1.00 days", "1 days"),
        ] {
            assert_eq!(Seconds(seconds).to_string(), shown);
            assert_eq!(Seconds(seconds).in_files(), in_file);
            assert!(shown.parse::<Seconds>().is_ok(), "{shown}");
        }
    }

    #[test]
    fn refuses_what_is_no_quantity() {
        for text in [
            "",
            "GiB",
            "80 XB",
            "-1 GiB",
            "1e99999 B",
            "99999999999999 TiB",
            "nan B",
            "8 0 GiB",
        ] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn refuses_what_overflows() {
        let huge = "9".repeat(308);
        assert!(format!("{huge} days").parse::<Seconds>().is_err());
        assert!(format!("{huge} TB/s").parse::<Bandwidth>().is_err());
        assert!("8388608 TiB".parse::<Bytes>().is_err());
    }

    #[test]
    fn bytes_do_not_wrap() {
        let most = Bytes(u64::MAX);
        assert_eq!(most + Bytes(1), most);
        assert_eq!(Bytes(1 << 40) * (1 << 40), most);
    }

    #[test]
    fn dividing_gives_the_physical_result() {
        assert_eq!(Bytes(100) / Bandwidth(50.0), Seconds(2.0));
        assert_eq!(Flops(100.0) / FlopRate(50.0), Seconds(2.0));
    }
}
