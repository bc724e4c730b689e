//! Changes of inputs: numbers at their boundaries, words for words, lines, and single bytes.

use crate::rng::Rng;
use crate::target::Pool;

/// Whole numbers where limits, products and shifts go wrong.
const EDGES: [i128; 36] = [
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    9,
    15,
    16,
    31,
    32,
    33,
    63,
    64,
    100,
    127,
    128,
    255,
    256,
    1000,
    1023,
    1024,
    4096,
    65535,
    65536,
    1 << 20,
    1 << 24,
    (1 << 24) + 1,
    (1 << 31) - 1,
    1 << 32,
    1 << 40,
    1 << 53,
    i64::MAX as i128,
    1 << 63,
    u64::MAX as i128,
];
/// Other spellings of numbers.
const ODD: [&str; 16] = [
    "-1",
    "-0.0",
    "0.5",
    "1.5",
    "1e308",
    "1e-308",
    "1e400",
    ".nan",
    ".inf",
    "nan",
    "inf",
    "340282366920938463463374607431768211456",
    "0x10",
    "1_000",
    "+8",
    "08",
];
/// Texts that break out of quotes, comments, terminals and paths.
pub const HOSTILE: [&str; 14] = [
    "",
    " ",
    "\"",
    "'",
    "`touch x`",
    "$(touch x)",
    "a\nb",
    "\u{1b}[31m",
    "</script>",
    "../../x",
    "\u{0}",
    "é☃\u{202e}",
    "a: b",
    "{[",
];

/// A number near or far from another, as text.
pub fn number(old: &str, rng: &mut Rng) -> String {
    if rng.percent(6) {
        return (*rng.pick(&ODD)).to_owned();
    }
    if let Ok(n) = old.parse::<i64>().map(i128::from) {
        let near = [n + 1, n - 1, n * 2, n / 2, n * 3, n * 10, -n];
        return match rng.below(10) {
            0..=4 => near[rng.below(6)].max(0).to_string(),
            5 => near[rng.below(near.len())].to_string(),
            6..=7 => EDGES[rng.below(20)].to_string(),
            _ => rng.pick(&EDGES).to_string(),
        };
    }
    match old.parse::<f64>() {
        Ok(x) => {
            let near = [
                x * 2.0,
                x / 2.0,
                x * 0.9,
                0.0,
                1.0,
                -x,
                x * 1e6,
                x * 1e-6,
                x * 1e300,
            ];
            let weight = if rng.percent(70) { 3 } else { near.len() };
            near[rng.below(weight)].to_string()
        }
        Err(_) => rng.pick(&EDGES).to_string(),
    }
}

/// Spans of the text that are numbers, or words.
fn spans(text: &str, of: fn(char) -> bool, begins: fn(char) -> bool) -> Vec<(usize, usize)> {
    let mut spans = Vec::new();
    let mut open: Option<usize> = None;
    let mut before = ' ';
    for (at, c) in text.char_indices() {
        match open {
            Some(from) if !of(c) => {
                spans.push((from, at));
                open = None;
            }
            None if begins(c) && !before.is_ascii_alphanumeric() => open = Some(at),
            _ => {}
        }
        before = c;
    }
    if let Some(from) = open {
        spans.push((from, text.len()));
    }
    spans
}

fn replace(text: &str, (from, to): (usize, usize), new: &str) -> String {
    format!("{}{new}{}", &text[..from], &text[to..])
}

/// Changes one number of a text.
#[must_use]
pub fn one_number(text: &str, rng: &mut Rng) -> String {
    let found = spans(
        text,
        |c| c.is_ascii_digit() || c == '.',
        |c| c.is_ascii_digit(),
    );
    if found.is_empty() {
        return text.to_owned();
    }
    let span = *rng.pick(&found);
    let old = text[span.0..span.1].trim_end_matches('.');
    let new = number(old, rng);
    replace(text, (span.0, span.0 + old.len()), &new)
}

/// Puts another word in place of one.
#[must_use]
pub fn one_word(text: &str, pool: &Pool, rng: &mut Rng) -> String {
    let of = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let found = spans(text, of, |c| c.is_ascii_alphabetic());
    if found.is_empty() {
        return text.to_owned();
    }
    let span = *rng.pick(&found);
    let new = match rng.below(12) {
        0 => (*rng.pick(&HOSTILE)).to_owned(),
        1 => misspelt(&text[span.0..span.1], rng),
        _ => pool.word(rng),
    };
    replace(text, span, &new)
}

fn misspelt(word: &str, rng: &mut Rng) -> String {
    let mut letters: Vec<char> = word.chars().collect();
    let at = rng.below(letters.len());
    match rng.below(3) {
        0 => drop(letters.remove(at)),
        1 => letters.insert(at, 'x'),
        _ => letters.reverse(),
    }
    letters.into_iter().collect()
}

/// Removes, doubles, swaps or borrows a line.
#[must_use]
pub fn one_line(text: &str, other: &str, rng: &mut Rng) -> String {
    let mut lines: Vec<&str> = text.split('\n').collect();
    let at = rng.below(lines.len());
    match rng.below(4) {
        0 => drop(lines.remove(at)),
        1 => lines.insert(at, lines[at]),
        2 => {
            let to = rng.below(lines.len());
            lines.swap(at, to);
        }
        _ => {
            let theirs: Vec<&str> = other.split('\n').collect();
            lines.insert(at, theirs[rng.below(theirs.len())]);
        }
    }
    lines.join("\n")
}

/// Changes, removes, inserts or repeats bytes.
#[must_use]
pub fn bytes(input: &[u8], rng: &mut Rng) -> Vec<u8> {
    let mut all = input.to_vec();
    let at = rng.below(all.len());
    let upto = (at + 1 + rng.below(16)).min(all.len());
    match rng.below(6) {
        0 if !all.is_empty() => all[at] = rng.bits() as u8,
        1 if !all.is_empty() => all[at] ^= 1 << rng.below(8),
        2 => drop(all.drain(at..upto)),
        3 => all.insert(at, *rng.pick(b"{}[]:,\"'\\\n #&*|>-=$()\t\0\xff9")),
        4 => {
            let piece = all[at..upto].to_vec();
            let count = 1 + rng.below(64);
            all.splice(at..at, piece.repeat(count));
        }
        _ => all.truncate(at),
    }
    all
}

/// One to three changes of a text that mostly keep its syntax.
#[must_use]
pub fn text(pool: &Pool, rng: &mut Rng) -> Vec<u8> {
    let mut input = String::from_utf8_lossy(pool.pick(rng)).into_owned();
    for _ in 0..1 + rng.below(3) {
        input = match rng.below(20) {
            0..=9 => one_number(&input, rng),
            10..=14 => one_word(&input, pool, rng),
            15..=18 => {
                let other = String::from_utf8_lossy(pool.seed(rng)).into_owned();
                one_line(&input, &other, rng)
            }
            _ => String::from_utf8_lossy(&bytes(input.as_bytes(), rng)).into_owned(),
        };
    }
    input.into_bytes()
}
