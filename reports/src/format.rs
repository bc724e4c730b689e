//! Numbers as people read them. Memory is in GiB, as frameworks report it; rates are decimal.

use catalog::{Bytes, FlopRate, Seconds};
use plans::Breakdown;

const GIB: f64 = 1_073_741_824.0;
const MIB: f64 = 1_048_576.0;

/// A size with its unit: `71.2 GiB`, or MiB and KiB below one of the larger unit.
#[must_use]
pub fn bytes(value: Bytes) -> String {
    let (size, unit) = unit_of(value);
    match value.0 {
        0..1024 => format!("{} B", value.0),
        _ => format!("{} {unit}", significant(value.as_f64() / size)),
    }
}

/// The largest unit of at most this size, from KiB.
fn unit_of(value: Bytes) -> (f64, &'static str) {
    match value.as_f64() {
        b if b >= GIB => (GIB, "GiB"),
        b if b >= MIB => (MIB, "MiB"),
        _ => (1024.0, "KiB"),
    }
}

/// The number of GiB without its unit, with one decimal.
#[must_use]
pub fn gib(value: Bytes) -> String {
    format!("{:.1}", value.as_f64() / GIB)
}

/// A time with its unit: `12.3 s`, `4.56 ms`, `7.89 µs`. Times below 5 ns, which no kernel reaches, are shown as `0 s`.
#[must_use]
pub fn seconds(value: Seconds) -> String {
    match value.0.abs() < 5e-9 {
        true => "0 s".to_owned(),
        false => value.to_string(),
    }
}

/// An interval such as `7.61 – 10.05 s`, with the unit and decimals of the predicted value.
#[must_use]
pub fn seconds_between(point: Seconds, low: Seconds, high: Seconds) -> String {
    let (size, unit) = match point.0.abs() {
        s if s >= 1.0 => (1.0, "s"),
        s if s >= 1e-3 => (1e-3, "ms"),
        _ => (1e-6, "µs"),
    };
    between(point.0 / size, low.0 / size, high.0 / size, unit)
}

/// An interval such as `50.5 – 66.7 GiB`, with the unit and decimals of the predicted value.
#[must_use]
pub fn bytes_between(point: Bytes, low: Bytes, high: Bytes) -> String {
    let (size, unit) = unit_of(point);
    let [point, low, high] = [point, low, high].map(|bytes| bytes.as_f64() / size);
    between(point, low, high, unit)
}

fn between(point: f64, low: f64, high: f64, unit: &str) -> String {
    let [low, high] = [low, high].map(|value| with_decimals(value, decimals(point)));
    format!("{low} – {high} {unit}")
}

/// A fraction in percent, with one decimal: `45.6 %`; `<0.1 %` for one that would show as 0.0 %.
#[must_use]
pub fn percent(fraction: f64) -> String {
    if fraction > 0.0 && fraction < 0.0005 {
        return "<0.1 %".to_owned();
    }
    format!("{:.1} %", fraction * 100.0)
}

/// A change with its sign and one decimal: `+12.3`, and `+0.0` for what rounds to nothing.
#[must_use]
pub fn signed(change: f64) -> String {
    // The sum turns −0 into 0.
    format!("{:+.1}", (change * 10.0).round() / 10.0 + 0.0)
}

/// A probability with two decimals, such as `0.93`. Below 0.01 it is `<0.01`, and above 0.99 it is `>0.99`: 0.00 and 1.00 would look
/// certain, and no prediction is.
#[must_use]
pub fn probability(p: f64) -> String {
    if p < 0.01 {
        "<0.01".to_owned()
    } else if p > 0.99 {
        ">0.99".to_owned()
    } else {
        format!("{p:.2}")
    }
}

/// A count with thousands separated by commas.
#[must_use]
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count with what is counted, whose plural ends in s: `1 layer`, `1,024 layers`.
#[must_use]
pub fn counted(number: u64, one: &str) -> String {
    match number {
        1 => format!("1 {one}"),
        many => format!("{} {one}s", count(many)),
    }
}

/// A count in thousands, millions, billions or trillions: `70.6 B`, `15 T`.
#[must_use]
pub fn short_count(value: f64) -> String {
    let scales = [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")];
    for (scale, letter) in scales {
        if value >= scale {
            return format!("{} {letter}", significant(value / scale));
        }
    }
    significant(value)
}

/// A rate of operations: `989 TFLOP/s`.
#[must_use]
pub fn flop_rate(value: FlopRate) -> String {
    format!("{} TFLOP/s", significant(value.0 / 1e12))
}

/// A long time: `23.4 days`, hours below two days, minutes below an hour. Never years, because
/// training plans are made in days; `never` if infinite.
#[must_use]
pub fn duration(value: Seconds) -> String {
    let hours = value.0 / 3600.0;
    if value.0.is_infinite() {
        "never".to_owned()
    } else if hours >= 48.0 {
        format!("{} days", significant(hours / 24.0))
    } else if hours >= 1.0 {
        format!("{} hours", significant(hours))
    } else if value.0 >= 120.0 {
        format!("{} min", significant(value.0 / 60.0))
    } else {
        seconds(value)
    }
}

/// A price: `$ 1,234,567`.
#[must_use]
pub fn dollars(value: f64) -> String {
    if value < 100.0 {
        format!("$ {value:.2}")
    } else {
        // The guard above leaves a non-negative number, so the cast only drops the fraction.
        format!("$ {}", count(value.round() as u64))
    }
}

/// Three significant figures, or all digits of the integer part where that is longer.
#[must_use]
pub fn significant(value: f64) -> String {
    with_decimals(value, decimals(value))
}

/// A number with this many decimals; a long whole number has its thousands separated by commas.
fn with_decimals(value: f64, decimals: usize) -> String {
    let text = format!("{value:.decimals$}");
    if decimals == 0 && value.abs() >= 10_000.0 {
        return grouped(&text);
    }
    text
}

/// Decimals with which a number has three significant figures.
fn decimals(value: f64) -> usize {
    match value.abs() {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    }
}

/// The parts of a step with the names people read, in the order they are drawn.
#[must_use]
pub fn breakdown_parts(parts: &Breakdown) -> [(&'static str, &'static str, f64); 14] {
    [
        ("compute", "Compute", parts.compute_s),
        ("recompute", "Recompute", parts.recompute_s),
        ("tp", "Exposed TP communication", parts.tp_exposed_s),
        ("cp", "Exposed CP communication", parts.cp_exposed_s),
        ("ep", "Exposed EP communication", parts.ep_exposed_s),
        ("dp", "Exposed DP communication", parts.dp_exposed_s),
        ("pp", "Exposed PP communication", parts.pp_exposed_s),
        ("bubble", "Pipeline bubble", parts.bubble_s),
        ("optimizer", "Optimizer", parts.optimizer_s),
        (
            "offload",
            "Exposed offload to the host",
            parts.offload_exposed_s,
        ),
        ("host", "Waiting for the host", parts.host_s),
        (
            "imbalance",
            "Waiting for longer sequences",
            parts.imbalance_s,
        ),
        ("stragglers", "Waiting for slow ranks", parts.stragglers_s),
        ("pools", "Gradients between pools", parts.pools_exposed_s),
    ]
}

/// The largest part of the step that is not forward and backward kernels.
#[must_use]
pub fn largest_loss(parts: &Breakdown) -> Option<(&'static str, f64)> {
    breakdown_parts(parts)
        .into_iter()
        .filter(|(key, _, time)| *key != "compute" && *time > 0.0)
        .map(|(_, name, time)| (name, time))
        .max_by(|a, b| a.1.total_cmp(&b.1))
}

fn grouped(digits: &str) -> String {
    let (sign, digits) = digits.strip_prefix('-').map_or(("", digits), |d| ("-", d));
    match digits.parse::<u64>() {
        Ok(value) => format!("{sign}{}", count(value)),
        Err(_) => format!("{sign}{digits}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_as_people_write_them() {
        let cases = [
            (bytes(Bytes(0)), "0 B"),
            (bytes(Bytes(1536)), "1.50 KiB"),
            (bytes(Bytes(80 << 30)), "80.0 GiB"),
            (bytes(Bytes(1 << 20)), "1.00 MiB"),
            (seconds(Seconds(0.0)), "0 s"),
            (seconds(Seconds(12.34)), "12.3 s"),
            (seconds(Seconds(0.012_34)), "12.3 ms"),
            (seconds(Seconds(1.5e-6)), "1.50 µs"),
            (seconds(Seconds(1e-12)), "0 s"),
            (seconds(Seconds(0.000_999_9)), "1.00 ms"),
            (seconds(Seconds(0.9994)), "999 ms"),
            (seconds(Seconds(0.9996)), "1.00 s"),
            (percent(0.4567), "45.7 %"),
            (percent(0.0004), "<0.1 %"),
            (percent(0.0), "0.0 %"),
            (signed(-0.04), "+0.0"),
            (signed(-12.34), "-12.3"),
            (probability(0.934), "0.93"),
            (probability(0.999), ">0.99"),
            (probability(0.0), "<0.01"),
            (count(1_234_567), "1,234,567"),
            (count(999), "999"),
            (counted(1, "layer"), "1 layer"),
            (counted(1024, "layer"), "1,024 layers"),
            (short_count(70.55e9), "70.5 B"),
            (short_count(15e12), "15.0 T"),
            (duration(Seconds(86_400.0 * 23.4)), "23.4 days"),
            (duration(Seconds(7_200.0)), "2.00 hours"),
            (duration(Seconds(2_100.0)), "35.0 min"),
            (dollars(1_234_567.4), "$ 1,234,567"),
            (dollars(2.5), "$ 2.50"),
            (significant(12_345.6), "12,346"),
            (
                seconds_between(Seconds(8.28), Seconds(7.611), Seconds(10.049)),
                "7.61 – 10.05 s",
            ),
            (
                seconds_between(Seconds(0.9), Seconds(0.71), Seconds(1.1)),
                "710 – 1100 ms",
            ),
            (
                bytes_between(Bytes(54 << 30), Bytes(50 << 30), Bytes(67 << 30)),
                "50.0 – 67.0 GiB",
            ),
        ];
        for (got, want) in cases {
            assert_eq!(got, want);
        }
    }
}
