//! Parser of Megatron-LM's pipeline layouts, such as `Et*9|t*10|t*11L`.

/// Decoder layers of each stage of a layout: `|` separates stages, `*n` repeats a letter or a group. `None` if the text has another
/// form.
#[must_use]
pub fn parse_layout(text: &str) -> Option<Vec<u64>> {
    let flat = flat(text)?;
    let layers = |stage: &str| {
        let known = stage.chars().all(|c| "EtmL".contains(c));
        known.then(|| stage.matches('t').count() as u64)
    };
    flat.split('|').map(layers).collect()
}

/// Whether a layout has layers of multi-token prediction (`m`) on another stage than the last, which holds the loss.
pub(super) fn prediction_layers_apart(text: &str) -> bool {
    let flat = flat(text).unwrap_or_default();
    flat.rsplit_once('|')
        .is_some_and(|(before_last, _)| before_last.contains('m'))
}

/// A layout with every repetition written out.
fn flat(text: &str) -> Option<String> {
    let written = |c: &char| !c.is_whitespace() && *c != ',';
    let flat = unrolled(&mut text.chars().filter(written).peekable(), 0)?;
    (flat.len() <= 1 << 20).then_some(flat)
}

fn unrolled(
    chars: &mut std::iter::Peekable<impl Iterator<Item = char>>,
    depth: usize,
) -> Option<String> {
    let mut flat = String::new();
    while let Some(c) = chars.next() {
        let unit = match c {
            ')' if depth > 0 => return Some(flat),
            '(' if depth < 8 => unrolled(chars, depth + 1)?,
            ')' | '(' => return None,
            c => c.to_string(),
        };
        let mut times = 1usize;
        if chars.next_if_eq(&'*').is_some() {
            let mut digits = String::new();
            while let Some(d) = chars.next_if(char::is_ascii_digit) {
                digits.push(d);
            }
            times = digits.parse().ok()?;
        }
        if unit.len().checked_mul(times)? > 1 << 20 || flat.len() > 1 << 20 {
            return None;
        }
        flat.push_str(&unit.repeat(times));
    }
    (depth == 0).then_some(flat)
}
