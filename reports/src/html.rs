//! The HTML report: one file that opens offline, with the decision first.
//!
//! One module per section, each a function from the input to markup. Style and script are
//! inlined; nothing is fetched. Colours of the parts of a step are CSS variables named after the
//! part (`--c-compute`), so light and dark themes live in one place.

mod alternatives;
mod breakdown;
pub mod compare;
pub mod fragment;
mod gantt;
mod groups;
mod inputs;
mod launch;
mod memory;
mod memory_timeline;
pub mod nothing;
mod page;
mod pareto;
mod present;
mod provenance;
mod ranks;
pub mod run;
mod space;
mod verdict;

use maud::{Markup, html};

use self::page::{document, script};
use crate::groups::{Group, rank};
use crate::input::ReportInput;

/// The whole report as one HTML document.
#[must_use]
pub fn report(input: &ReportInput) -> String {
    page(input, &sections(input))
}

/// The whole report of groups of replicas side by side. `input` describes all together; `slowest`
/// is the number and the report of the slowest group.
#[must_use]
pub fn report_of_groups(
    input: &ReportInput,
    all: &[Group<'_>],
    slowest: (usize, &ReportInput),
) -> String {
    let (number, slowest) = slowest;
    let sections = html! {
        (verdict::section(input, all))
        (groups::section(all))
        (present::section(input))
        div.two {
            (breakdown::section(input.prediction))
            (memory::by_rank(input, all))
        }
        (page::charts())
        div.two {
            (memory::parts(input.prediction, &rank(all, input.prediction.peak_rank)))
            (breakdown::kernels(input.prediction))
        }
        (groups::of_slowest(number, slowest))
        (space::ways(input))
        (space::section(input))
        (inputs::section(input))
        (provenance::section(input.prediction))
    };
    page(input, &sections)
}

fn page(input: &ReportInput, sections: &Markup) -> String {
    let masthead = page::masthead(&input.model, &input.devices);
    let title = format!("{} on {} · vescale-plan", input.model, input.devices);
    let footer = format!(
        "vescale-plan {} · a prediction, made without running anything · this file is self-contained",
        input.version
    );
    document(&title, &masthead, sections, &footer, &script())
}

fn sections(input: &ReportInput) -> Markup {
    html! {
        (verdict::section(input, &[]))
        (launch::section(input))
        (present::section(input))
        div.two {
            (breakdown::section(input.prediction))
            (memory::by_rank(input, &[]))
        }
        (alternatives::section(input))
        (page::charts())
        (pareto::section(input))
        (gantt::section(input))
        (memory_timeline::section(input))
        div.two {
            (memory::parts(input.prediction, &rank(&[], input.prediction.peak_rank)))
            (breakdown::kernels(input.prediction))
        }
        (ranks::section(input))
        (space::ways(input))
        (space::section(input))
        (inputs::section(input))
        (provenance::section(input.prediction))
    }
}
