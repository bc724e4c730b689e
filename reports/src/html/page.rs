//! The frame of a page that opens offline, and of its sections.

use maud::{DOCTYPE, Markup, PreEscaped, html};

const STYLE: &str = include_str!("../assets/report.css");
const SCRIPT: &str = include_str!("../assets/report.js");

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

/// The script that copies, sorts, shows tips and draws the pipeline. Everything that is text is there without it.
pub(super) fn script() -> Markup {
    html! { script { (PreEscaped(SCRIPT)) } }
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
