//! The report's words and tables.

use maud::{Markup, html};
use plans::Fit;
use plans::grammar::short;

use super::{ReportInput, gib};

/// The decision: whether it fits, how fast, which plan.
pub(super) fn verdict(input: &ReportInput<'_>) -> Markup {
    let p = &input.best.prediction;
    let fits = p.fit.fits();
    let (low, high) = p.peak_memory_interval;
    let spread = (high.as_f64() - low.as_f64()) / 2.0;
    html! {
        header {
            p.kicker { "vescale-plan · plan " code { (input.plan_id) } }
            h1 { (input.title) }
            p #verdict .verdict.fits[fits].fails[!fits] {
                strong { @if fits { "FITS" } @else { "DOES NOT FIT" } }
                " " (gib(p.peak_memory.as_f64())) " ± " (gib(spread)) " of " (gib(input.device_memory.as_f64()))
                " on pipeline rank " (p.peak_rank) ", at " (p.peak_moment)
                @if let Fit::TooLarge { over, largest } = &p.fit {
                    ". " (over) " too large; the largest part is " (largest) "."
                }
            }
            dl.figures {
                div { dt { "step time" } dd { (p.step_time) } dd.small { (p.step_time_interval.0) " – " (p.step_time_interval.1) ", 80%" } }
                div { dt { "throughput" } dd { (format!("{:.0}", p.tokens_per_s_per_gpu)) } dd.small { "tokens/s/GPU" } }
                div { dt { "MFU" } dd { (format!("{:.1}%", p.mfu * 100.0)) } dd.small { "of " (p.peak_flop_rate) " dense" } }
                div { dt { "memory" } dd { (gib(p.peak_memory.as_f64())) } dd.small { "limit " (gib(input.capacity.as_f64())) } }
                @if let Some((tokens, days, dollars)) = input.budget {
                    div {
                        dt { (format!("{:.2} T tokens", tokens / 1e12)) }
                        dd { (format!("{days:.1} days")) }
                        @if let Some(d) = dollars { dd.small { (format!("{:.2} M$", d / 1e6)) } }
                    }
                }
            }
            p.plan {
                code #strategy { (input.best.strategy.to_string()) }
                button type="button" data-copy="strategy" { "Copy" }
            }
            ul.inputs { @for (name, value) in &input.inputs { li { (name) " " strong { (value) } } } }
        }
    }
}

/// The best plans, sortable.
pub(super) fn alternatives(input: &ReportInput<'_>) -> Markup {
    html! {
        section {
            h2 { "Plans" }
            div.scroll { table.sortable #plans {
                thead { tr {
                    th { button type="button" { "plan" } }
                    th.number { button type="button" { "step time, s" } }
                    th.number { button type="button" { "MFU, %" } }
                    th.number { button type="button" { "memory, GiB" } }
                    th { button type="button" { "why not first" } }
                } }
                tbody { @for c in input.top { tr {
                    td { (short(&c.strategy)) }
                    td.number { (format!("{:.4}", c.prediction.step_time.0)) }
                    td.number { (format!("{:.1}", c.prediction.mfu * 100.0)) }
                    td.number { (format!("{:.1}", c.prediction.peak_memory.as_f64() / 1024f64.powi(3))) }
                    td { @if c.why_not_first.is_empty() { "first" } @else { (c.why_not_first) } }
                } } }
            } }
        }
    }
}

/// How the space was disposed of.
pub(super) fn space(input: &ReportInput<'_>) -> Markup {
    let Some(space) = input.space else {
        return html! {};
    };
    html! {
        section {
            h2 { "What was considered" }
            p { (space.strategies) " legal strategies; " (space.simulated) " simulated in full, " (space.too_large) " of them too large." }
            table { thead { tr { th { "ruled out by" } th.number { "strategies" } } } tbody {
                @for (reason, count) in &space.pruned { tr { td { (reason) } td.number { (count) } } }
            } }
            @if !space.illegal.is_empty() {
                p { "Sizes that are not in the space:" }
                table { thead { tr { th { "rule" } th.number { "times" } } } tbody {
                    @for (reason, count) in &space.illegal { tr { td { (reason) } td.number { (count) } } }
                } }
            }
        }
    }
}

/// Kernels and memory by name.
pub(super) fn tables(input: &ReportInput<'_>) -> Markup {
    let p = &input.best.prediction;
    html! {
        section.columns {
            div {
                h2 { "Time by kernel" }
                div.scroll { table.sortable { thead { tr { th { button type="button" { "kernel or collective" } } th.number { button type="button" { "ms per step" } } } } tbody {
                    @for k in p.kernels.iter().take(40) { tr { td { (k.name) } td.number { (format!("{:.2}", k.seconds * 1e3)) } } }
                } } }
            }
            div {
                h2 { "Memory by name" }
                div.scroll { table.sortable { thead { tr { th { button type="button" { "tensor" } } th.number { button type="button" { "MiB" } } } } tbody {
                    @for m in p.memory.iter().take(60) { tr { td { (m.name) } td.number { (format!("{:.1}", m.bytes as f64 / 1024f64.powi(2))) } } }
                } } }
            }
        }
    }
}

/// Every constant with its evidence.
pub(super) fn provenance(input: &ReportInput<'_>) -> Markup {
    html! {
        section {
            h2 { "What it rests on" }
            p { "Every constant that entered, with the kind of evidence behind it." }
            div.scroll { table.sortable #provenance { thead { tr {
                th { button type="button" { "constant" } } th { button type="button" { "value" } }
                th { button type="button" { "evidence" } } th { button type="button" { "source" } }
            } } tbody {
                @for c in &input.best.prediction.provenance { tr {
                    td { (c.name) } td { (c.value) } td { (format!("{:?}", c.origin).to_lowercase()) } td { (c.source) }
                } }
            } } }
        }
    }
}
