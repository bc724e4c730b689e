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

/// The axes of a plot: decades from `low` to `high`, equal in both directions.
struct Frame {
    low: f64,
    high: f64,
}

impl Frame {
    fn around(points: &[Point<'_>]) -> Self {
        let values = || points.iter().flat_map(|p| [p.measured, p.predicted]);
        Self {
            low: values().fold(f64::INFINITY, f64::min).log10().floor(),
            high: values().fold(0.0, f64::max).log10().ceil(),
        }
    }

    fn along(&self, value: f64) -> f64 {
        let scale = (SIZE - 2.0 * MARGIN) / (self.high - self.low).max(1.0);
        (value.log10() - self.low) * scale
    }

    fn x(&self, value: f64) -> f64 {
        MARGIN + self.along(value)
    }

    fn y(&self, value: f64) -> f64 {
        SIZE - MARGIN - self.along(value)
    }

    /// The band, the diagonal and the labels.
    fn draw(&self, out: &mut String, unit: &str) {
        let (first, last) = (10f64.powf(self.low), 10f64.powf(self.high));
        let corners = [
            (first, first * 0.9),
            (first, first * 1.1),
            (last, last * 1.1),
            (last, last * 0.9),
        ]
        .map(|(x, y)| format!("{:.1},{:.1}", self.x(x), self.y(y)))
        .join(" ");
        let _ = writeln!(out, "<polygon points=\"{corners}\" fill=\"#eeeeee\"/>");
        let _ = writeln!(
            out,
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"#888888\"/>",
            self.x(first),
            self.y(first),
            self.x(last),
            self.y(last)
        );
        for power in self.low as i32..=self.high as i32 {
            let value = 10f64.powi(power);
            let _ = writeln!(
                out,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{value}</text>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{value}</text>",
                self.x(value),
                SIZE - MARGIN + 18.0,
                MARGIN - 6.0,
                self.y(value) + 4.0
            );
        }
        let middle = SIZE / 2.0;
        let _ = writeln!(
            out,
            "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">measured, {unit}</text>\
             <text x=\"14\" y=\"{middle}\" text-anchor=\"middle\" \
             transform=\"rotate(-90 14 {middle})\">predicted, {unit}</text>",
            SIZE - 16.0
        );
    }
}

/// The plot; `unit` follows the axis names. The band is ±10% around the diagonal.
pub(crate) fn svg(title: &str, unit: &str, points: &[Point<'_>]) -> String {
    let frame = Frame::around(points);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {SIZE}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"{MARGIN}\" y=\"24\" font-size=\"15\">{title}</text>\n",
        SIZE + LEGEND
    );
    frame.draw(&mut out, unit);
    let mut sources: Vec<&str> = points.iter().map(|p| p.source).collect();
    sources.sort_unstable();
    sources.dedup();
    for (index, source) in sources.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        for p in points.iter().filter(|p| p.source == *source) {
            let _ = writeln!(
                out,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"2.5\" fill=\"{colour}\" fill-opacity=\"0.6\"/>",
                frame.x(p.measured),
                frame.y(p.predicted)
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
