//! Timelines in the trace event format, which Perfetto and chrome://tracing open.

use serde_json::{Value, json};
use zofo_pipeline::planner::{Outcome, Problem};

/// The simulated step as trace events: a track per worker, a slice per action. Times are microseconds; these are modelled, not measured.
pub fn trace(p: &Problem, outcome: &Outcome) -> Value {
    let mut events = Vec::new();
    for (worker, spans) in outcome.timeline.spans.iter().enumerate() {
        let name = super::report::worker_name(p, outcome, worker);
        events.push(json!({"ph": "M", "name": "thread_name", "pid": 0, "tid": worker, "args": {"name": name}}));
        events.extend(spans.iter().filter(|s| s.end > s.start).map(|s| {
            json!({
                "ph": "X", "name": s.step.action.to_string(), "cat": format!("stage {}", s.step.stage), "pid": 0, "tid": worker,
                "ts": s.start * 1e6, "dur": (s.end - s.start) * 1e6,
            })
        }));
    }
    json!({"displayTimeUnit": "ms", "otherData": {"times": "modelled"}, "traceEvents": events})
}
