//! Predicted against measured, log-log, as an SVG.

use std::fmt::Write as _;

/// A run as a point: measured, predicted, source.
pub(crate) struct Point<'a> {
    pub(crate) measured: f64,
    pub(crate) predicted: f64,
    pub(crate) source: &'a str,
}

/// Eight hues that stay apart for colour-blind readers (Okabe and Ito 2008).
const COLOURS: [&str; 8] = [
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#000000", "#b2a000",
];

const SIZE: f64 = 520.0;
const MARGIN: f64 = 60.0;
const LEGEND: f64 = 250.0;

/// The plot; `unit` follows the axis names. The band is ±10% around the diagonal.
pub(crate) fn svg(title: &str, unit: &str, points: &[Point<'_>]) -> String {
    let values = || points.iter().flat_map(|p| [p.measured, p.predicted]);
    let low = values().fold(f64::INFINITY, f64::min).log10().floor();
    let high = values().fold(0.0, f64::max).log10().ceil();
    let scale = (SIZE - 2.0 * MARGIN) / (high - low).max(1.0);
    let x = |value: f64| MARGIN + (value.log10() - low) * scale;
    let y = |value: f64| SIZE - MARGIN - (value.log10() - low) * scale;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {SIZE}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"{MARGIN}\" y=\"24\" font-size=\"15\">{title}</text>\n",
        SIZE + LEGEND
    );
    let (first, last) = (10f64.powf(low), 10f64.powf(high));
    let _ = writeln!(
        out,
        "<polygon points=\"{:.1},{:.1} {:.1},{:.1} {:.1},{:.1} {:.1},{:.1}\" fill=\"#eeeeee\"/>",
        x(first),
        y(first * 0.9),
        x(first),
        y(first * 1.1),
        x(last),
        y(last * 1.1),
        x(last),
        y(last * 0.9)
    );
    let _ = writeln!(
        out,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"#888888\"/>",
        x(first),
        y(first),
        x(last),
        y(last)
    );
    for power in low as i32..=high as i32 {
        let value = 10f64.powi(power);
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{value}</text>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{value}</text>",
            x(value),
            SIZE - MARGIN + 18.0,
            MARGIN - 6.0,
            y(value) + 4.0
        );
    }
    let middle = SIZE / 2.0;
    let _ = writeln!(
        out,
        "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">measured, {unit}</text>\
         <text x=\"14\" y=\"{middle}\" text-anchor=\"middle\" transform=\"rotate(-90 14 {middle})\">\
         predicted, {unit}</text>",
        SIZE - 16.0
    );
    let mut sources: Vec<&str> = points.iter().map(|p| p.source).collect();
    sources.sort_unstable();
    sources.dedup();
    for (index, source) in sources.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        for p in points.iter().filter(|p| p.source == *source) {
            let _ = writeln!(
                out,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"2.5\" fill=\"{colour}\" fill-opacity=\"0.6\"/>",
                x(p.measured),
                y(p.predicted)
            );
        }
        let row = MARGIN + 20.0 * index as f64;
        let _ = writeln!(
            out,
            "<circle cx=\"{SIZE}\" cy=\"{row}\" r=\"4\" fill=\"{colour}\"/>\
             <text x=\"{}\" y=\"{}\">{source}</text>",
            SIZE + 10.0,
            row + 4.0
        );
    }
    out.push_str("</svg>\n");
    out
}
