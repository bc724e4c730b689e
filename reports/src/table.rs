//! Terminal tables: aligned columns, no frames, as `docker ps` and `cargo` print them.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

/// How the cells of a column are aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// To the left, for text.
    Left,
    /// To the right, for numbers.
    Right,
}

/// An aligned table with a header. The last column wraps when `width` says how wide a line may be.
#[must_use]
pub fn table(columns: &[(&str, Align)], rows: &[Vec<String>], width: Option<u16>) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Dynamic);
    if let Some(width) = width {
        table.set_width(width);
    }
    table.set_header(columns.iter().map(|(name, _)| *name));
    for row in rows {
        table.add_row(row);
    }
    for (index, (_, align)) in columns.iter().enumerate() {
        let Some(column) = table.column_mut(index) else {
            continue;
        };
        column.set_padding((if index == 0 { 0 } else { 1 }, 1));
        column.set_cell_alignment(match align {
            Align::Left => CellAlignment::Left,
            Align::Right => CellAlignment::Right,
        });
    }
    trim_lines(&table.to_string())
}

/// Names and values on lines, the values aligned.
#[must_use]
pub fn pairs(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.chars().count()).max();
    let width = width.unwrap_or(0);
    let lines = rows
        .iter()
        .map(|(name, value)| format!("{name:<width$}  {value}"));
    lines.collect::<Vec<_>>().join("\n")
}

/// A bar of `width` characters, filled to `fraction`.
#[must_use]
pub fn bar(fraction: f64, width: usize) -> String {
    let filled = (fraction.clamp(0.0, 1.0) * width as f64).round() as usize;
    format!("{}{}", "█".repeat(filled), "·".repeat(width - filled))
}

fn trim_lines(text: &str) -> String {
    text.lines()
        .map(str::trim_end)
        .collect::<Vec<_>>()
        .join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [
            vec!["tp=8,pp=4".into(), "12.3 s".into()],
            vec!["tp=4".into(), "101 s".into()],
        ];
        let columns = [("strategy", Align::Left), ("step", Align::Right)];
        insta::assert_snapshot!(table(&columns, &rows, None), @r"
        strategy     step
        tp=8,pp=4  12.3 s
        tp=4        101 s
        ");
    }

    #[test]
    fn pairs_and_bars() {
        insta::assert_snapshot!(pairs(&[("a", "1".into()), ("long", "2".into())]), @r"
        a     1
        long  2
        ");
        assert_eq!(bar(0.5, 4), "██··");
        assert_eq!(bar(7.0, 4), "████");
    }
}
