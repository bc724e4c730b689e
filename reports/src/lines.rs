//! Text laid out in lines that fit a width, and colours.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

/// Longest bar, in characters.
const LONGEST_BAR: usize = 40;
/// Narrowest width that text is laid out for; a narrower terminal breaks the lines itself.
const NARROWEST: usize = 40;

/// How text is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    /// Characters on a line.
    pub width: usize,
    /// Whether text is coloured.
    pub colour: bool,
}

/// What a colour tells the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shade {
    /// All is well.
    Good,
    /// Something to know before going on.
    Careful,
    /// It does not work.
    Bad,
    /// What to read first.
    Strong,
    /// What may be skipped.
    Faint,
}

impl Style {
    /// A text in a colour, if colours are wanted.
    #[must_use]
    pub fn paint(self, shade: Shade, text: &str) -> String {
        let code = match shade {
            Shade::Good => "32",
            Shade::Careful => "33",
            Shade::Bad => "31",
            Shade::Strong => "1",
            Shade::Faint => "2",
        };
        if self.colour {
            format!("\u{1b}[{code}m{text}\u{1b}[0m")
        } else {
            text.to_owned()
        }
    }

    /// Characters to fill on a line: the width, but at least [`NARROWEST`].
    fn room(self) -> usize {
        self.width.max(NARROWEST)
    }

    /// A paragraph whose first line begins with `first`; the others are indented as far.
    #[must_use]
    pub fn paragraph(self, first: &str, text: &str) -> String {
        let indent = first.chars().count();
        let lines = wrapped(text, self.room().saturating_sub(indent));
        match lines.is_empty() {
            true => String::new(),
            false => format!(
                "{first}{}\n",
                lines.join(&format!("\n{}", " ".repeat(indent)))
            ),
        }
    }

    /// A heading after an empty line; its lines are painted one by one.
    #[must_use]
    pub fn heading(self, text: &str) -> String {
        format!("\n{}", self.painted(Shade::Strong, "", text))
    }

    /// A paragraph in a colour; its lines are painted one by one.
    #[must_use]
    pub fn painted(self, shade: Shade, first: &str, text: &str) -> String {
        let lines = self.paragraph(first, text);
        let painted = lines.lines().map(|line| self.paint(shade, line) + "\n");
        painted.collect()
    }

    /// Wraps a text to the width of the page. Each paragraph and each list item is one line of `text`. The further lines of an item are
    /// indented like its first, or, if the item begins with a label and two spaces, like the text after these.
    #[must_use]
    pub fn page(self, text: &str) -> String {
        let line = |line: &str| {
            let item = line.trim_start();
            let margin = line.len() - item.len();
            match item.is_empty() {
                true => "\n".to_owned(),
                false if margin == 0 || !item.contains("  ") => {
                    self.paragraph(&line[..margin], item)
                }
                false => self.fitted(line),
            }
        };
        text.lines().map(line).collect()
    }

    /// Names and texts in two columns; texts wrap.
    #[must_use]
    pub fn pairs(self, rows: &[(&str, String)]) -> String {
        let longest = rows.iter().map(|(name, _)| name.chars().count()).max();
        let longest = longest.unwrap_or(0);
        let line = |(name, text): &(&str, String)| {
            let padding = " ".repeat(longest - name.chars().count());
            self.paragraph(&format!("  {name}{padding}  "), text)
        };
        rows.iter().map(line).collect()
    }

    /// Lines of name, value and share, each with a bar in proportion to its share in the space that is left.
    #[must_use]
    pub fn bars(self, rows: &[(String, String, f64)]) -> String {
        let longest = |text: fn(&(String, String, f64)) -> &str| {
            let lengths = rows.iter().map(|row| text(row).chars().count());
            lengths.max().unwrap_or(0)
        };
        let value = longest(|row| &row.1);
        // Two spaces before each column, and six characters for a share.
        let most = self.room().saturating_sub(value + 12);
        let name = longest(|row| &row.0).min(most);
        let left = self.room().saturating_sub(name + value + 14);
        let line = |(text, amount, share): &(String, String, f64)| {
            let bar =
                "▇".repeat((share.clamp(0.0, 1.0) * left.min(LONGEST_BAR) as f64).round() as usize);
            let mut lines = wrapped(text, name);
            let last = lines.pop().unwrap_or_default();
            let above: String = lines.iter().map(|line| format!("  {line}\n")).collect();
            let line = format!(
                "  {last:<name$}  {amount:>value$}  {:>6}  {bar}",
                of(*share)
            );
            format!("{above}{}\n", line.trim_end())
        };
        rows.iter().map(line).collect()
    }

    /// A command to copy: indented, and broken before its options where it is too long, as a shell accepts it.
    #[must_use]
    pub fn command(self, text: &str) -> String {
        let mut lines: Vec<String> = Vec::new();
        for part in options(text) {
            let fits =
                |line: &String| line.chars().count() + part.chars().count() + 7 <= self.room();
            match lines.last_mut() {
                Some(line) if fits(line) => {
                    line.push(' ');
                    line.push_str(&part);
                }
                _ => lines.push(part),
            }
        }
        format!("    {}\n", lines.join(" \\\n      "))
    }

    /// A line as it is if it fits. Otherwise it goes on below, further in: under the text after its label, if two spaces
    /// set a label apart. A command is broken as a shell accepts it.
    #[must_use]
    pub fn fitted(self, line: &str) -> String {
        if line.chars().count() <= self.room() {
            return format!("{line}\n");
        }
        let lead = line.len() - line.trim_start().len();
        let label = line[lead..].find("  ").map(|gap| {
            let after = &line[lead + gap..];
            lead + gap + after.len() - after.trim_start().len()
        });
        let (before, text) = line.split_at(label.unwrap_or(lead));
        if text.starts_with("vescale-plan ") {
            return format!("{}\n{}", before.trim_end(), self.command(text));
        }
        let below = label.map_or(lead + 2, |_| before.chars().count());
        let lines = wrapped(text, self.room().saturating_sub(below));
        let margin = format!("\n{}", " ".repeat(below));
        format!("{before}{}\n", lines.join(&margin))
    }

    /// A table with a header and no frames, whose widest column wraps.
    #[must_use]
    pub fn columns(self, header: &[&str], rows: &[Vec<String>]) -> String {
        let mut table = Table::new();
        table
            .load_style(presets::NOTHING)
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_width(u16::try_from(self.room()).unwrap_or(u16::MAX))
            .set_header(header.to_vec());
        for row in rows {
            table.add_row(row.clone());
        }
        for (index, column) in table.column_iter_mut().enumerate() {
            column.set_padding((u16::from(index > 0), 1));
            let number = |row: &Vec<String>| {
                let cell = row.get(index).map_or("", String::as_str);
                cell.is_empty() || cell.starts_with(|c: char| c.is_ascii_digit())
            };
            if index > 0 && index + 1 < header.len() && rows.iter().all(number) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        let lines = table.to_string();
        let lines = lines.lines().map(|line| format!("{}\n", line.trim_end()));
        lines.collect()
    }
}

/// A share in `[0, 1]` as a percentage; `<0.1%` for one that would show as 0.0%.
#[must_use]
pub fn of(share: f64) -> String {
    if share > 0.0 && share < 0.0005 {
        return "<0.1%".to_owned();
    }
    format!("{:.1}%", share * 100.0)
}

/// A command split before each of its options: an option keeps its value, and quoted values stay whole.
fn options(command: &str) -> Vec<String> {
    let mut parts: Vec<String> = vec![String::new()];
    let mut quoted = false;
    for word in command.split(' ') {
        let starts = !quoted && word.starts_with('-');
        match parts.last_mut() {
            Some(last) if !starts => {
                if !last.is_empty() {
                    last.push(' ');
                }
                last.push_str(word);
            }
            _ => parts.push(word.to_owned()),
        }
        quoted ^= word.matches('\'').count() % 2 == 1;
    }
    parts
}

/// Lines of at most `width` characters; a longer word has a line of its own.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    const NARROW: Style = Style {
        width: 60,
        colour: false,
    };

    #[test]
    fn lines_fit() {
        let pairs = NARROW.pairs(&[
            ("step time", "8.28 s (7.61 – 10.05 s)".into()),
            (
                "MFU",
                "44.9% of 989 TFLOP/s dense, causal attention counted once".into(),
            ),
        ]);
        let long = "exposed communication of tensor parallelism inside nodes";
        let bars = NARROW.bars(&[
            ("compute".into(), "7.22 s".into(), 0.872),
            (long.into(), "822 ms".into(), 0.099),
            ("host".into(), "5.00 ms".into(), 0.0001),
        ]);
        let command = NARROW.command(
            "vescale-plan explain llama3-70b-512gpus.plan.yaml --why-not 'tp4 pp4 recompute=none' --json",
        );
        let plan = "tp4 pp4 vpp10 cp2(ring) dp16 zero1 sp mbs1 interleaved";
        let columns = NARROW.columns(
            &["GPUs", "rate", "plan"],
            &[
                vec!["8".into(), "901 tokens/s".into(), "tp1".into()],
                vec!["1024".into(), "12 tokens/s".into(), plan.into()],
            ],
        );
        let fitted: String = [
            "error: unknown model `lama3-8b`, which is no preset and no file",
            "  expected  a preset that `vescale-plan models` lists, or the path of a config.json",
            "  nearest   llama3-8b",
            "  example   vescale-plan search --model llama3-8b --gpus 8 -o best.plan.yaml",
        ]
        .map(|line| NARROW.fitted(line))
        .concat();
        let heading = NARROW.heading(
            "simplest within 2%; fewest GPUs of a replica of these; no context parallelism",
        );
        let page = NARROW.page(
            "A cluster is a preset, a file, or one line that says of which GPUs it is made:\n\n  --cluster dgx-h100  a preset, of which `vescale-plan clusters` prints a list\n      A text that is set in goes on where it began, and not further in.",
        );
        let all = [pairs, bars, command, columns, fitted, heading, page].join("\n");
        assert!(all.lines().all(|line| line.chars().count() <= NARROW.width));
        insta::assert_snapshot!(all);
    }

    #[test]
    fn colours_are_asked_for() {
        let coloured = Style {
            colour: true,
            ..NARROW
        };
        assert_eq!(NARROW.paint(Shade::Good, "FITS"), "FITS");
        assert_eq!(
            coloured.paint(Shade::Good, "FITS"),
            "\u{1b}[32mFITS\u{1b}[0m"
        );
    }
}
