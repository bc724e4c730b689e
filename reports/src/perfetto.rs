//! Timelines as Chrome trace events, which Perfetto and chrome://tracing open.

use plans::{Stream, Timeline};
use serde_json::{Value, json};

/// Complete events (`ph: X`), microseconds; one process per pipeline rank, one thread per stream,
/// a counter of memory per rank.
#[must_use]
pub fn trace(timeline: &Timeline) -> Value {
    let mut events: Vec<Value> = Vec::with_capacity(timeline.events.len() + timeline.memory.len());
    for rank in 0..timeline.ranks {
        events.push(json!({
            "ph": "M", "pid": rank, "name": "process_name",
            "args": {"name": format!("pipeline rank {rank}")},
        }));
        for stream in [Stream::Compute, Stream::Pipeline, Stream::DataParallel] {
            events.push(json!({
                "ph": "M", "pid": rank, "tid": thread(stream), "name": "thread_name",
                "args": {"name": name(stream)},
            }));
        }
    }
    for e in &timeline.events {
        events.push(json!({
            "ph": "X", "pid": e.rank, "tid": thread(e.stream), "name": e.name, "cat": name(e.stream),
            "ts": e.start.0 * 1e6, "dur": (e.end.0 - e.start.0) * 1e6,
            "args": {"stage": e.stage, "micro_batch": e.micro_batch},
        }));
    }
    for (rank, at, bytes) in &timeline.memory {
        events.push(json!({
            "ph": "C", "pid": rank, "name": "memory", "ts": at.0 * 1e6,
            "args": {"GiB": bytes.as_f64() / 1024f64.powi(3)},
        }));
    }
    json!({"traceEvents": events, "displayTimeUnit": "ms"})
}

fn thread(stream: Stream) -> u32 {
    match stream {
        Stream::Compute => 0,
        Stream::Pipeline => 1,
        Stream::DataParallel => 2,
    }
}

fn name(stream: Stream) -> &'static str {
    match stream {
        Stream::Compute => "compute",
        Stream::Pipeline => "pipeline transfers",
        Stream::DataParallel => "data parallel",
    }
}
