//! The timeline as Chrome trace events, which Perfetto and `chrome://tracing` open.
//!
//! One process per pipeline rank, one thread per stream, complete events (`ph: X`) in
//! microseconds, and a counter (`ph: C`) of memory in use. Format: "Trace Event Format",
//! Google, section "Complete Events".

use plans::{Event, Stream, Timeline};
use serde_json::{Value, json};

/// The whole trace as one JSON document.
#[must_use]
pub fn trace(timeline: &Timeline) -> Value {
    let names = (0..timeline.ranks).flat_map(rank_names);
    let events = timeline.events.iter().map(complete);
    let memory = timeline.memory.iter().map(|(rank, time, bytes)| {
        json!({
            "ph": "C", "name": "memory", "pid": rank, "tid": 0,
            "ts": micros(time.0), "args": { "bytes": bytes.0 },
        })
    });
    let all: Vec<Value> = names.chain(events).chain(memory).collect();
    json!({ "displayTimeUnit": "ms", "traceEvents": all })
}

/// Number and name of a stream's thread.
#[must_use]
pub fn thread(stream: Stream) -> (u32, &'static str) {
    match stream {
        Stream::Compute => (0, "compute"),
        Stream::Pipeline => (1, "pipeline"),
        Stream::DataParallel => (2, "data parallel"),
    }
}

fn complete(event: &Event) -> Value {
    let (tid, category) = thread(event.stream);
    let mut args = serde_json::Map::new();
    if let Some([stage, micro_batch]) = event.of() {
        args.insert("stage".into(), stage.into());
        args.insert("micro_batch".into(), micro_batch.into());
    }
    json!({
        "ph": "X", "name": event.action.to_string(), "cat": category, "pid": event.rank, "tid": tid,
        "ts": micros(event.start.0), "dur": micros(event.end.0 - event.start.0), "args": args,
    })
}

fn rank_names(rank: u32) -> Vec<Value> {
    let mut names = vec![json!({
        "ph": "M", "name": "process_name", "pid": rank, "tid": 0,
        "args": { "name": format!("pipeline rank {rank}") },
    })];
    for stream in [Stream::Compute, Stream::Pipeline, Stream::DataParallel] {
        let (tid, name) = thread(stream);
        names.push(json!({
            "ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": { "name": name },
        }));
    }
    names
}

/// Microseconds to the nanosecond: more digits are noise, and fewer lose short kernels.
fn micros(seconds: f64) -> f64 {
    (seconds * 1e9).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use catalog::{Bytes, Seconds};
    use plans::{Action, ActionKind};

    #[test]
    fn events_are_complete_and_in_microseconds() {
        let timeline = Timeline {
            ranks: 1,
            events: vec![Event {
                rank: 0,
                stream: Stream::Compute,
                action: Action {
                    kind: ActionKind::F,
                    stage: 0,
                    micro_batch: 1,
                },
                start: Seconds(0.001),
                end: Seconds(0.003_5),
            }],
            memory: vec![(0, Seconds(0.001), Bytes(42))],
        };
        let trace = trace(&timeline);
        let events = trace["traceEvents"].as_array().expect("a list");
        assert_eq!(
            events.iter().filter(|e| e["ph"] == "M").count(),
            4,
            "one process and three threads are named"
        );
        let event = events.iter().find(|e| e["ph"] == "X").expect("one event");
        assert_eq!(event["ts"], 1000.0);
        assert_eq!(event["dur"], 2500.0);
        assert_eq!(event["pid"], 0);
        assert_eq!(event["args"]["micro_batch"], 1);
        let memory = events.iter().find(|e| e["ph"] == "C").expect("one counter");
        assert_eq!(memory["args"]["bytes"], 42);
    }
}
