//! A log-log scatter plot of predicted against measured, as SVG.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// A run as a point of the plot: measured, predicted, source.
pub(crate) struct Point<'a> {
    pub(crate) measured: f64,
    pub(crate) predicted: f64,
    pub(crate) source: &'a str,
}

/// Eight hues that colour-blind readers can tell apart (Okabe and Ito 2008).
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(213, 94, 0),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
    RGBColor(178, 160, 0),
];

/// Side of the square that holds the axes and their labels, and width of the legend, in pixels.
const SIZE: u32 = 520;
const LEGEND: u32 = 250;

/// Font of labels. `plotters` takes the line height; 15 gives type of 12 pixels.
const TEXT: (&str, u32) = ("sans-serif", 15);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn<'a> = Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>>;

/// Draws the plot; `unit` follows the axis names. The band is ±10% around the diagonal.
pub(crate) fn svg(title: &str, unit: &str, points: &[Point<'_>]) -> String {
    let mut out = String::new();
    let area = SVGBackend::with_string(&mut out, (SIZE + LEGEND, SIZE)).into_drawing_area();
    let mut sources: Vec<&str> = points.iter().map(|p| p.source).collect();
    sources.sort_unstable();
    sources.dedup();
    let (axes, beside) = area.split_horizontally(SIZE);
    area.fill(&WHITE)
        .and_then(|()| chart(&axes, title, unit, points, &sources))
        .and_then(|()| legend(&beside, &sources))
        .and_then(|()| area.present())
        .expect("a string takes whatever is written to it");
    drop((area, axes, beside));
    out
}

fn chart<'a>(
    area: &Area<'a>,
    title: &str,
    unit: &str,
    points: &[Point<'_>],
    sources: &[&str],
) -> Drawn<'a> {
    let values = || points.iter().flat_map(|p| [p.measured, p.predicted]);
    let low = 10f64.powf(values().fold(f64::INFINITY, f64::min).log10().floor());
    let high = 10f64.powf(values().fold(0.0, f64::max).log10().ceil());
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 19))
        .margin(12)
        .set_all_label_area_size(48)
        .top_x_label_area_size(0)
        .right_y_label_area_size(0)
        // The margin keeps the legend away from the axes and makes both axes equally long.
        .margin_right(37)
        .build_cartesian_2d(
            (low * 0.999..high).log_scale(),
            (low * 0.999..high).log_scale(),
        )?;
    let within = |y: f64| y.clamp(low, high);
    let band = [
        (low, low),
        (low, low * 1.1),
        (high / 1.1, high),
        (high, high),
        (high, within(high * 0.9)),
        (low / 0.9, low),
    ];
    chart.draw_series([Polygon::new(band, RGBColor(238, 238, 238).filled())])?;
    chart.draw_series([PathElement::new(
        [(low, low), (high, high)],
        RGBColor(136, 136, 136),
    )])?;
    chart
        .configure_mesh()
        // Powers of ten only: with marks between them, plotters 0.3.7 writes the last one twice.
        .x_labels(9)
        .y_labels(9)
        .disable_mesh()
        .label_style(TEXT)
        .axis_desc_style(TEXT)
        .x_label_formatter(&f64::to_string)
        .y_label_formatter(&f64::to_string)
        .x_desc(format!("measured, {unit}"))
        .y_desc(format!("predicted, {unit}"))
        .draw()?;
    for (source, colour) in sources.iter().zip(COLOURS.iter().cycle()) {
        let own = points.iter().filter(|p| p.source == *source);
        chart.draw_series(
            own.map(|p| Circle::new((p.measured, p.predicted), 2, colour.mix(0.6).filled())),
        )?;
    }
    Ok(())
}

fn legend<'a>(area: &Area<'a>, sources: &[&str]) -> Drawn<'a> {
    let text = TEXT
        .into_text_style(area)
        .pos(Pos::new(HPos::Left, VPos::Center));
    for ((source, colour), y) in sources
        .iter()
        .zip(COLOURS.iter().cycle())
        .zip((60..).step_by(20))
    {
        area.draw(&Circle::new((4, y), 4, colour.filled()))?;
        area.draw(&Text::new((*source).to_owned(), (14, y), text.clone()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_point_and_source_is_drawn_and_text_is_escaped() {
        let point = |measured, source| Point {
            measured,
            predicted: measured * 1.05,
            source,
        };
        let points = [point(0.2, "a<b"), point(30.0, "a<b"), point(900.0, "c")];
        let svg = svg("Step time", "s", &points);
        assert_eq!(svg.matches("<circle").count(), points.len() + 2);
        for text in [
            "a&lt;b",
            "Step time",
            "measured, s",
            "predicted, s",
            "\n0.1\n",
            "\n1000\n",
        ] {
            assert!(svg.contains(text), "{text}");
        }
    }
}
