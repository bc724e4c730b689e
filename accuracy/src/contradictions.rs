//! Finds published rows that other rows of the same source contradict. They are left out by rules about facts, and the
//! reason names the other row; no rule knows a run, a model or a source.

use catalog::runs::{Run, Status};

use super::{mapping, score};

const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

/// Why the run at `index` is left out; `None` if no other of `runs` contradicts it.
pub(crate) fn contradicted(runs: &[(Run, String)], index: usize) -> Option<String> {
    let (run, source) = runs.get(index)?;
    let of_source = |other: &&(Run, String)| other.1 == *source;
    if run.status == Status::Oom {
        return runs
            .iter()
            .filter(of_source)
            .filter_map(|(other, _)| would_fit(run, other))
            .min_by(|a, b| a.0.total_cmp(&b.0))
            .map(|(_, reason)| reason);
    }
    runs[..index]
        .iter()
        .filter(of_source)
        .find_map(|(other, _)| exchanged(run, other))
}

/// Finds a row with columns exchanged: its time is the printed rate of an earlier row of the same configuration, and
/// its rate is that row's time. It is that row again, not a second measurement.
fn exchanged(run: &Run, earlier: &Run) -> Option<String> {
    let columns = |run: &Run| {
        let time = run.metric(|m| &m.step_time_s);
        time.zip(run.metric(|m| &m.tflops_per_gpu))
    };
    let (time, rate) = columns(run)?;
    let same = columns(earlier)? == (rate, time)
        && time != rate
        && run.model == earlier.model
        && run.micro_batch == earlier.micro_batch
        && same_layout(run, earlier);
    same.then(|| {
        format!(
            "contradicted: time and rate are those of {} with the columns exchanged",
            earlier.id
        )
    })
}

/// Finds an out-of-memory row that would have fitted, judging by another run on the same devices, software and layout:
/// even if all of that run's memory grew as much as the part that grows most, it would stay below capacity. Returns the
/// bytes needed, and the reason. Only memory counters of the whole device count.
fn would_fit(run: &Run, other: &Run) -> Option<(f64, String)> {
    let measured = score::measured(other);
    let comparable = other.status == Status::Ok
        && measured.memory_counter == Some("nvidia-smi")
        && same_layout(run, other)
        && same_kind(run, other);
    if !comparable {
        return None;
    }
    let growth = growth(run, other)?;
    let most = measured.peak_memory_bytes? * growth;
    let memory = mapping::map(run).ok()?.scenario.cluster.device.memory.value;
    if most >= memory.as_f64() {
        return None;
    }
    let reason = format!(
        "contradicted: {} ran on the same layout with {:.0} GiB; times {growth:.2}, the most that anything in \
         memory grows by, that is {:.1} of {:.1} GiB",
        other.id,
        measured.peak_memory_bytes.unwrap_or_default() / GIB,
        most / GIB,
        memory.as_f64() / GIB
    );
    Some((most, reason))
}

/// The largest ratio of two runs' sizes, at least 1, over all that is in memory: weights with their
/// states (`hidden²`, `hidden · ffn`, `vocabulary · hidden`) and activations (micro-batch times
/// `hidden`, `ffn`, heads, vocabulary), all for the layers of a stage.
fn growth(run: &Run, other: &Run) -> Option<f64> {
    let sizes = |run: &Run| {
        let model = &run.model;
        let (hidden, ffn) = (model.hidden? as f64, model.ffn? as f64);
        let (heads, vocab) = (model.heads? as f64, model.vocab? as f64);
        let batch = run.micro_batch? as f64;
        let stages = run.pp? * run.vpp.unwrap_or(1);
        let layers = model.layers?.div_ceil(stages) as f64;
        let once = [
            hidden * hidden,
            hidden * ffn,
            vocab * hidden,
            batch * hidden,
            batch * ffn,
            batch * heads,
            batch * vocab,
        ];
        Some((once, layers))
    };
    let ((a, layers), (b, other_layers)) = (sizes(run)?, sizes(other)?);
    let deeper = (layers / other_layers).max(1.0);
    let ratios = a.iter().zip(b).map(|(a, b)| a / b * deeper);
    Some(ratios.fold(1.0, f64::max))
}

/// Whether two runs have the same software, devices and parallelism.
fn same_layout(a: &Run, b: &Run) -> bool {
    let degrees = |r: &Run| [r.tp, r.pp, r.vpp, r.cp, r.ep, r.etp, r.dp];
    let batch = |r: &Run| [r.global_batch, r.grad_accum, r.seq_len];
    let machine = |r: &Run| (r.gpu.clone(), r.num_gpus, r.gpus_per_node);
    let system = |r: &Run| (r.sw_version.clone(), r.precision.clone(), r.zero.clone());
    let memory = |r: &Run| (r.recompute.clone(), r.sequence_parallel, r.flags.clone());
    degrees(a) == degrees(b)
        && batch(a) == batch(b)
        && machine(a) == machine(b)
        && system(a) == system(b)
        && memory(a) == memory(b)
}

/// Whether two models differ only in sizes.
fn same_kind(a: &Run, b: &Run) -> bool {
    let kind = |r: &Run| {
        let m = &r.model;
        let dense = [
            m.experts,
            m.topk,
            m.moe_ffn,
            m.shared_experts,
            m.dense_layers,
        ];
        let grouped = m.kv_heads == m.heads;
        (
            m.mlp.clone(),
            m.attn.clone(),
            m.tied_embeddings,
            dense,
            grouped,
        )
    };
    kind(a) == kind(b)
}

#[cfg(test)]
mod tests {
    use catalog::runs::{Measure, Metrics};

    use super::*;

    fn row(id: &str, change: impl FnOnce(&mut Run)) -> (Run, String) {
        let runs = catalog::runs::embedded().expect("embedded runs are well-formed");
        let mut run = runs
            .into_iter()
            .find(|run| run.id == "bloom_L939_203b_n384_dp8_tp4_pp12_mbs2")
            .expect("a run with memory");
        run.id = id.to_owned();
        change(&mut run);
        (run, "source".to_owned())
    }

    fn set(run: &mut Run, metric: fn(&mut Metrics) -> &mut Option<Measure>, value: f64) {
        let metrics = run.metrics.get_or_insert_default();
        *metric(metrics) = Measure::try_from(serde_json::json!(value)).ok();
    }

    fn assert_second_left_out(what: &str, rows: &[(Run, String); 2], expected: bool) {
        assert_eq!(contradicted(rows, 1).is_some(), expected, "{what}");
        assert_eq!(contradicted(rows, 0), None, "{what}: the row that ran");
    }

    #[test]
    fn rows_out_of_memory_are_left_out_only_where_a_larger_one_ran() {
        type Change = fn(&mut Run);
        let cases: [(&str, Change, bool); 8] = [
            ("the same run", |_| {}, true),
            ("a smaller model", |r| r.model.layers = Some(48), true),
            ("wider, still fits", |r| r.model.hidden = Some(14336), true),
            ("twice as wide", |r| r.model.hidden = Some(26624), false),
            ("deeper by a fifth", |r| r.model.layers = Some(118), false),
            ("twice the batch", |r| r.micro_batch = Some(4), false),
            (
                "another layout",
                |r| r.zero = Some("zero0".to_owned()),
                false,
            ),
            (
                "another device",
                |r| r.gpu = Some("A100-40GB".to_owned()),
                false,
            ),
        ];
        for (what, change, expected) in cases {
            let oom = row("b", |run| {
                run.status = Status::Oom;
                run.metrics = None;
                change(run);
            });
            assert_second_left_out(what, &[row("a", |_| {}), oom], expected);
        }
    }

    #[test]
    fn rows_with_exchanged_columns_are_left_out_and_repeats_are_not() {
        for (what, time, rate, expected) in [
            ("exchanged columns", 146.12, 124.1, true),
            ("a repeat", 124.1, 146.12, false),
            ("a faster repeat", 120.0, 150.0, false),
        ] {
            let first = row("a", |run| set(run, |m| &mut m.tflops_per_gpu, 146.12));
            let second = row("b", |run| {
                set(run, |m| &mut m.step_time_s, time);
                set(run, |m| &mut m.tflops_per_gpu, rate);
            });
            assert_second_left_out(what, &[first, second], expected);
        }
    }
}
