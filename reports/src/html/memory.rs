//! Memory: the peak of every pipeline rank against capacity, and the named parts of the heaviest.

use catalog::Bytes;
use maud::{Markup, html};
use plans::Prediction;

use super::page::{Bar, bars, section as frame};
use crate::format;
use crate::groups::{self, Group, place};
use crate::input::ReportInput;
use crate::words;

/// Parts beyond this many are summed.
const PARTS: usize = 14;

/// One bar per pipeline rank of each of the `groups`, if replicas differ; the mark is the memory that a plan may use.
pub(super) fn by_rank(input: &ReportInput, groups: &[Group<'_>]) -> Markup {
    let prediction = input.prediction;
    let peak = prediction.memory_by_rank.iter().copied().max();
    let most = prediction.usable_by_rank.iter().copied().max();
    let scale = (peak.max(most).unwrap_or_default().as_f64()).max(input.capacity.as_f64());
    let ranks = prediction
        .memory_by_rank
        .iter()
        .zip(&prediction.usable_by_rank);
    let alike = prediction
        .usable_by_rank
        .iter()
        .all(|usable| *usable == prediction.usable());
    let body = html! {
        div.ranks {
            @for (rank, (bytes, usable)) in (0..).zip(ranks) {
                @let heaviest = rank == prediction.peak_rank;
                @let place = place(groups, rank);
                @let tip = format!("{}: {}", groups::rank(groups, rank), format::bytes(*bytes));
                @if let Some((number, 0)) = place { p.note { "Group " (number) } }
                @let line = format!("left:{:.2}%", usable.as_f64() / scale * 100.0);
                div.rank .heaviest[heaviest] .over[bytes > usable] data-tip=(tip) {
                    span.name { (place.map_or(rank, |(_, rank)| rank)) }
                    span.track {
                        i style=(format!("width:{:.2}%", bytes.as_f64() / scale * 100.0)) {}
                        u style=(line) {}
                    }
                    span.num { (format::gib(*bytes)) }
                }
            }
        }
        p.note {
            "GiB at peak per pipeline rank. "
            @if alike {
                "The mark is the usable " (format::gib(prediction.usable())) " of "
                (format::gib(input.capacity)) " GiB."
            } @else {
                "The mark is what is usable of the memory of its own GPUs."
            }
        }
    };
    let lead = "Every rank has its own peak; the heaviest decides.";
    frame("memory", "Memory by pipeline rank", lead, &body)
}

/// What the heaviest rank holds at its peak; `heaviest` is that rank in words.
pub(super) fn parts(prediction: &Prediction, heaviest: &str) -> Markup {
    let all = prediction.memory.iter().map(|part| {
        let tip = || format!("{}, {}", part.name, words::moment(&part.moment));
        let tip = (!part.moment.is_empty()).then(tip);
        (&part.name[..], tip, part.bytes as f64)
    });
    let all: Vec<Bar<'_>> = all.collect();
    let body = bars(&all, PARTS, |bytes| {
        let share = bytes / prediction.peak_memory.as_f64();
        [format::bytes(Bytes(bytes as u64)), format::percent(share)]
    });
    let lead = format!(
        "The heaviest, {heaviest}, {}: {}.",
        words::moment(&prediction.peak_moment),
        format::bytes(prediction.peak_memory)
    );
    frame("memory-parts", "What fills the memory", &lead, &body)
}
