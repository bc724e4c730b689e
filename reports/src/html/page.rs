//! The frame of a page that opens offline, and of its sections.

use maud::{DOCTYPE, Markup, PreEscaped, html};
use serde_json::Value;

const STYLE: &str = include_str!("../assets/report.css");
const SCRIPT: &str = include_str!("../assets/report.js");
/// uPlot 1.6.32 (MIT, see `assets/uplot/LICENSE`), which draws charts and their axes.
const CHARTS: &str = include_str!("../assets/uplot/uPlot.iife.min.js");
const CHARTS_STYLE: &str = include_str!("../assets/uplot/uPlot.min.css");

/// The page as HTML, its style inlined.
pub(super) fn document(
    title: &str,
    header: &Markup,
    main: &Markup,
    footer: &str,
    script: &Markup,
) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) }
                // Browsers ask for a favicon unless the page brings one.
                link rel="icon" href="data:,";
                style { (PreEscaped(STYLE)) }
            }
            body {
                header.page { (header) }
                main {
                    (main)
                    div #tip role="tooltip" hidden {}
                    p #said .unseen role="status" {}
                }
                footer { (footer) }
                (script)
            }
        }
    };
    page.into_string()
}

/// The head of a page about a model on devices.
pub(super) fn masthead(model: &str, devices: &str) -> Markup {
    html! {
        p.eyebrow { "vescale-plan" }
        h1 { (model) " " span.on { "on " (devices) } }
    }
}

/// The script that copies, sorts, shows tips and draws the pipeline. The page's text can be read
/// without it.
pub(super) fn script() -> Markup {
    html! { script { (PreEscaped(SCRIPT)) } }
}

/// The library that draws charts, with its style; a page with a chart includes it before [`script`].
pub(super) fn charts() -> Markup {
    html! {
        style { (PreEscaped(CHARTS_STYLE)) }
        script { (PreEscaped(CHARTS)) }
    }
}

/// The head of a table: the titles of its columns, `#` before those of numbers.
pub(super) fn heads(titles: &[&str]) -> Markup {
    html! {
        thead { tr {
            @for title in titles {
                @match title.strip_prefix('#') {
                    Some(title) => { th.num scope="col" { (title) } }
                    None => { th scope="col" { (title) } }
                }
            }
        } }
    }
}

/// A part in a table of bars: its name, its tip and its value.
pub(super) type Bar<'a> = (&'a str, Option<String>, f64);

/// A table of bars, the longest first; those beyond `most` are summed. Each row has two numbers, which `shown` writes.
pub(super) fn bars(parts: &[Bar<'_>], most: usize, shown: impl Fn(f64) -> [String; 2]) -> Markup {
    let (listed, rest) = parts.split_at(parts.len().min(most));
    let largest = listed.first().map_or(1.0, |(.., value)| *value);
    html! {
        table.bars {
            @for (name, tip, value) in listed {
                (bar_row(name, tip.as_deref(), Some(value / largest), &shown(*value)))
            }
            @if !rest.is_empty() {
                @let sum: f64 = rest.iter().map(|(.., value)| value).sum();
                (bar_row(&format!("{} others", rest.len()), None, None, &shown(sum)))
            }
        }
    }
}

/// A row of a table of bars: a name that may break after its dots and underscores, a bar, and two numbers. A sum of several
/// parts has no bar, because it may be longer than the largest part.
fn bar_row(name: &str, tip: Option<&str>, share: Option<f64>, values: &[String; 2]) -> Markup {
    html! {
        tr data-tip=[tip] {
            td { @for (n, part) in name.split_inclusive(['.', '_']).enumerate() { @if n > 0 { wbr; } (part) } }
            td.track {
                @if let Some(share) = share { i style=(format!("width:{:.2}%", share * 100.0)) {} }
            }
            @for value in values { td.num { (value) } }
        }
    }
}

/// Markup of a text whose parts between backticks become code.
pub(super) fn prose(text: &str) -> Markup {
    html! {
        @for (index, part) in text.split('`').enumerate() {
            @if index % 2 == 1 { code { (part) } } @else { (part) }
        }
    }
}

/// The note in place of a chart where no script runs.
pub(super) fn undrawn() -> Markup {
    html! { noscript { p.note { "This chart is drawn by a script, and scripts do not run here." } } }
}

/// A section with a heading and one sentence that says what it shows.
pub(super) fn section(id: &str, title: &str, lead: &str, body: &Markup) -> Markup {
    html! {
        section id=(id) aria-labelledby=(format!("{id}-title")) {
            h2 id=(format!("{id}-title")) { (title) }
            @if !lead.is_empty() { p.lead { (lead) } }
            (body)
        }
    }
}

/// JSON with `<` escaped, so that it cannot end the script element around it.
pub(super) fn script_safe(value: &Value) -> String {
    value.to_string().replace('<', "\\u003c")
}
