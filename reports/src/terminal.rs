//! Tables for a terminal: aligned, coloured only when asked.

use catalog::{Bytes, Seconds};
use comfy_table::presets;
use comfy_table::{CellAlignment, Table};
use plans::grammar::short;
use plans::{Candidate, Fit, Prediction, SearchOutcome, Strategy};

/// The result of a search.
#[must_use]
pub fn search(outcome: &SearchOutcome, capacity: Bytes, colour: bool) -> String {
    let mut text = String::new();
    if let Some(best) = outcome.top.first() {
        text.push_str(&prediction(
            &best.strategy,
            &best.prediction,
            capacity,
            colour,
        ));
        if outcome.top.len() > 1 {
            text.push_str("\nAlternatives\n");
            text.push_str(&candidates(&outcome.top[1..], best.prediction.step_time));
        }
    } else {
        let why = match outcome.interrupted {
            true => "Interrupted before a plan was found that fits.\n",
            false => "No plan fits.\n",
        };
        text.push_str(&paint(why, "31", colour));
        for line in &outcome.relax {
            text.push_str(&format!("  {line}\n"));
        }
    }
    text.push_str(&space(outcome));
    text
}

fn space(outcome: &SearchOutcome) -> String {
    let s = &outcome.space;
    let mut text = format!("\n{} strategies: {} simulated", s.strategies, s.simulated);
    if s.too_large > 0 {
        text.push_str(&format!(" ({} of them too large)", s.too_large));
    }
    for (reason, count) in &s.pruned {
        text.push_str(&format!(", {count} ruled out by {reason}"));
    }
    text.push('\n');
    let mut illegal: Vec<(&String, &u64)> = s.illegal.iter().collect();
    illegal.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
    if !illegal.is_empty() {
        let list: Vec<String> = illegal
            .iter()
            .take(4)
            .map(|(rule, count)| format!("{rule} ({count})"))
            .collect();
        text.push_str(&format!("not in the space: {}\n", list.join(", ")));
    }
    text
}

/// Table of one strategy's prediction: time, memory and their parts.
#[must_use]
pub fn prediction(strategy: &Strategy, p: &Prediction, capacity: Bytes, colour: bool) -> String {
    let (verdict, shade) = match &p.fit {
        Fit::Fits { .. } => ("FITS", "32"),
        Fit::TooLarge { .. } => ("DOES NOT FIT", "31"),
    };
    let mut text = format!(
        "{}  {} of {} on pipeline rank {}, at {}\n",
        paint(verdict, shade, colour),
        p.peak_memory,
        capacity,
        p.peak_rank,
        p.peak_moment
    );
    if let Fit::TooLarge { over, largest } = &p.fit {
        text.push_str(&format!(
            "{over} too large; the largest part is {largest}\n"
        ));
    }
    text.push_str(&format!("{}\n\n", paint(&short(strategy), "1", colour)));
    let rows = vec![
        row(
            "step time",
            format!(
                "{}  ({} – {})",
                p.step_time, p.step_time_interval.0, p.step_time_interval.1
            ),
        ),
        row(
            "throughput",
            format!("{:.0} tokens/s/GPU", p.tokens_per_s_per_gpu),
        ),
        row(
            "MFU",
            format!(
                "{:.1}% of {} dense{}",
                p.mfu * 100.0,
                p.peak_flop_rate,
                p.mfu_palm_beside().map_or_else(String::new, |palm| format!(
                    ", causal attention counted once ({:.1}% by the PaLM convention)",
                    palm * 100.0
                ))
            ),
        ),
        row(
            "memory",
            format!(
                "{}  ({} – {})",
                p.peak_memory, p.peak_memory_interval.0, p.peak_memory_interval.1
            ),
        ),
    ];
    text.push_str(&bare(&rows));
    text.push_str(&format!(
        "\n80% intervals, {}; fits with probability {:.2}\n",
        p.evidence, p.p_fits
    ));
    text.push_str("\nStep time\n");
    text.push_str(&bare(&breakdown(p)));
    text.push_str("\nMemory of the heaviest rank\n");
    text.push_str(&bare(&memory(p)));
    text
}

fn row(name: &str, value: String) -> Vec<String> {
    vec![format!("  {name}"), value]
}

fn breakdown(p: &Prediction) -> Vec<Vec<String>> {
    let b = &p.breakdown;
    let parts = [
        ("compute", b.compute_s),
        ("recomputation", b.recompute_s),
        ("exposed TP", b.tp_exposed_s),
        ("exposed CP", b.cp_exposed_s),
        ("exposed EP", b.ep_exposed_s),
        ("exposed DP", b.dp_exposed_s),
        ("exposed PP", b.pp_exposed_s),
        ("bubble", b.bubble_s),
        ("optimizer", b.optimizer_s),
        ("host", b.host_s),
    ];
    parts
        .into_iter()
        .filter(|(_, s)| *s > 1e-6)
        .map(|(name, s)| {
            let share = s / p.step_time.0 * 100.0;
            vec![
                format!("  {name}"),
                Seconds(s).to_string(),
                format!("{share:.1}%"),
                bar(share),
            ]
        })
        .collect()
}

fn memory(p: &Prediction) -> Vec<Vec<String>> {
    let mut saved = 0;
    let mut rows: Vec<(String, u64)> = Vec::new();
    for item in &p.memory {
        if item.name.starts_with("saved activations") {
            saved += item.bytes;
        } else {
            rows.push((item.name.clone(), item.bytes));
        }
    }
    rows.push(("saved activations".to_owned(), saved));
    rows.retain(|(_, bytes)| *bytes > 0);
    rows.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    let total = p.peak_memory.as_f64();
    rows.into_iter()
        .map(|(name, bytes)| {
            let share = bytes as f64 / total * 100.0;
            vec![
                format!("  {name}"),
                Bytes(bytes).to_string(),
                format!("{share:.1}%"),
                bar(share),
            ]
        })
        .collect()
}

fn bar(share: f64) -> String {
    "▇".repeat((share.clamp(0.0, 100.0) / 2.5).round() as usize)
}

/// Kernels and collectives that take most time.
#[must_use]
pub fn kernels(p: &Prediction, most: usize) -> String {
    let rows: Vec<Vec<String>> = p
        .kernels
        .iter()
        .take(most)
        .map(|k| {
            let share = k.seconds / p.step_time.0 * 100.0;
            vec![
                format!("  {}", k.name),
                Seconds(k.seconds).to_string(),
                format!("{share:.1}%"),
            ]
        })
        .collect();
    format!(
        "\nKernels and collectives of the busiest rank\n{}",
        bare(&rows)
    )
}

/// Table of candidates, compared with the first one's step time.
#[must_use]
pub fn candidates(list: &[Candidate], first: Seconds) -> String {
    let rows: Vec<Vec<String>> = list
        .iter()
        .map(|c| {
            let p = &c.prediction;
            let change = (p.step_time.0 / first.0 - 1.0) * 100.0;
            let fits = if p.fit.fits() {
                String::new()
            } else {
                "does not fit".to_owned()
            };
            vec![
                format!("  {}", short(&c.strategy)),
                p.step_time.to_string(),
                format!("{change:+.1}%"),
                p.peak_memory.to_string(),
                if fits.is_empty() {
                    c.why_not_first.clone()
                } else {
                    fits
                },
            ]
        })
        .collect();
    bare(&rows)
}

/// A table of three columns.
#[must_use]
pub fn three(header: [&str; 3], rows: &[[String; 3]]) -> String {
    plain(
        &header,
        &rows.iter().map(|r| r.to_vec()).collect::<Vec<_>>(),
    )
}

/// A table with a header and no borders.
#[must_use]
pub fn plain(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_header(header.to_vec());
    for row in rows {
        table.add_row(row.clone());
    }
    trimmed(&table)
}

/// Aligned columns, numbers to the right.
fn bare(rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    for row in rows {
        table.add_row(row.clone());
    }
    for column in table.column_iter_mut().skip(1).take(2) {
        if rows.iter().all(|r| r.len() > 2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    trimmed(&table)
}

fn trimmed(table: &Table) -> String {
    let mut text = String::new();
    for line in table.to_string().lines() {
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn paint(text: &str, code: &str, colour: bool) -> String {
    if colour {
        format!("\u{1b}[{code}m{text}\u{1b}[0m")
    } else {
        text.to_owned()
    }
}
