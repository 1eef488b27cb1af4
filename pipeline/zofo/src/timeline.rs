//! Who does what when in a step, simulated or measured: as trace events and as a picture.

use std::fmt::Write;

use serde_json::{Value, json};
use zofo_pipeline::{
    events::Span,
    ir::{Action, Step},
    plan::Plan,
    planner::{Outcome, Problem},
};

/// A step on the clock, a track for each device or, simulated, for each group of devices that works as one.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Timeline {
    /// `measured` or `modelled`.
    pub times: &'static str,
    /// The tracks, in pipeline order.
    pub tracks: Vec<Track>,
}

/// What one device does.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Track {
    /// Its name; those of a group together.
    pub name: String,
    /// Its actions, those of no length left out.
    pub slices: Vec<Slice>,
}

/// An action. Times are seconds from the step's start.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Slice {
    /// What is done.
    pub step: Step,
    /// When it begins.
    pub start: f64,
    /// When it ends.
    pub end: f64,
    /// Seconds of that in which the device waits for others inside layers that they share.
    pub waiting: f64,
}

impl Track {
    /// Seconds of computing.
    pub fn busy(&self) -> f64 {
        self.slices.iter().map(|s| s.end - s.start - s.waiting).sum()
    }
}

const WIDTH: f64 = 1200.0;
const ROW: f64 = 28.0;
/// Beyond so many slices a page is slow to open, and they are thinner than a pixel.
const MOST: usize = 20_000;

/// What the colours of [`Timeline::svg`] mean.
pub(crate) const LEGEND: &str = "blue: forward (F) and losses (L); orange: backward (B, I); yellow: weight gradients (W); green: perturbed (P); violet: exit (X); \
     red: readout at the cut (D), guided estimate (G); grey: update (U). The number is the micro-batch.";

fn colour(a: &Action) -> &'static str {
    match a {
        Action::Forward { .. } | Action::Loss { .. } => "#4e79a7",
        Action::Backward { .. } | Action::BackwardInput { .. } => "#f28e2b",
        Action::BackwardWeight { .. } => "#edc948",
        Action::PerturbedForward(_) => "#59a14f",
        Action::ExitForward(_) => "#b07aa1",
        Action::BoundaryDot(_) | Action::Guide { .. } => "#e15759",
        _ => "#79706e",
    }
}

/// Bytes for people.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (n as f64, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Text inside a page.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

impl Timeline {
    fn new(times: &'static str, tracks: impl Iterator<Item = (String, Vec<Slice>)>) -> Self {
        let track = |(name, mut slices): (String, Vec<Slice>)| {
            slices.retain(|s| s.end > s.start);
            Track { name, slices }
        };
        Self { times, tracks: tracks.map(track).collect() }
    }

    /// A simulated step.
    pub fn modelled(p: &Problem, outcome: &Outcome) -> Self {
        let name = |worker: usize| {
            let stage = outcome.layout.placement.iter().position(|w| *w == worker);
            let members = stage.map_or(&[][..], |s| &outcome.layout.stages[s].members);
            members.iter().map(|m| p.device(m.device).name.as_str()).collect::<Vec<_>>().join(" + ")
        };
        let spans = outcome.timeline.spans.iter().enumerate();
        let slices = |spans: &Vec<zofo_pipeline::sim::SimSpan>| {
            spans.iter().map(|s| Slice { step: s.step, start: s.start, end: s.end, waiting: 0.0 }).collect()
        };
        Self::new("modelled", spans.map(|(worker, spans)| (name(worker), slices(spans))))
    }

    /// A step of a run by `plan`: the timeline of a [`zofo_pipeline::events::StepReport`].
    pub fn measured(plan: &Plan, timeline: &[Vec<Span>]) -> Self {
        let slice =
            |s: &Span| Slice { step: s.step, start: s.start.as_secs_f64(), end: s.end.as_secs_f64(), waiting: s.waiting.as_secs_f64() };
        let tracks = plan.devices().into_iter().zip(timeline);
        Self::new("measured", tracks.map(|(name, spans)| (name.to_owned(), spans.iter().map(slice).collect())))
    }

    /// When the last action ends.
    pub fn seconds(&self) -> f64 {
        self.tracks.iter().flat_map(|t| &t.slices).map(|s| s.end).fold(0.0, f64::max)
    }

    /// In the trace event format, which Perfetto and chrome://tracing open: a track each, a slice per action, in microseconds.
    pub fn trace(&self) -> Value {
        let mut events = Vec::new();
        for (tid, track) in self.tracks.iter().enumerate() {
            events.push(json!({"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": track.name}}));
            events.extend(track.slices.iter().map(|s| {
                json!({
                    "ph": "X", "name": s.step.action.to_string(), "cat": format!("stage {}", s.step.stage), "pid": 0, "tid": tid,
                    "ts": s.start * 1e6, "dur": (s.end - s.start) * 1e6, "args": {"waiting_us": s.waiting * 1e6},
                })
            }));
        }
        json!({"displayTimeUnit": "ms", "otherData": {"times": self.times}, "traceEvents": events})
    }

    /// As a picture, an `<svg>` element for a page; what there is too much of is left out and said.
    pub fn svg(&self) -> String {
        let scale = WIDTH / self.seconds().max(f64::MIN_POSITIVE);
        let mut bars = String::new();
        let mut left = MOST;
        for (row, track) in self.tracks.iter().enumerate() {
            let y = row as f64 * ROW;
            let _ = write!(bars, "<text x=\"-8\" y=\"{:.1}\" text-anchor=\"end\">{}</text>", y + 0.65 * ROW, escaped(&track.name));
            let drawn = track.slices.len().min(left);
            left -= drawn;
            for s in &track.slices[..drawn] {
                let _ = write!(
                    bars,
                    "<rect x=\"{:.2}\" y=\"{:.1}\" width=\"{:.2}\" height=\"{:.1}\" fill=\"{}\"><title>{} {:.6} to {:.6} s</title></rect>",
                    s.start * scale,
                    y + 2.0,
                    (s.end - s.start) * scale,
                    ROW - 4.0,
                    colour(&s.step.action),
                    escaped(&s.step.to_string()),
                    s.start,
                    s.end
                );
            }
        }
        let height = self.tracks.len() as f64 * ROW;
        for i in 0..=4 {
            let (x, at) = (f64::from(i) * WIDTH / 4.0, f64::from(i) * self.seconds() / 4.0);
            let _ = write!(
                bars,
                "<path d=\"M{x:.0} 0V{height:.0}\" stroke=\"#888\" stroke-width=\"0.5\"/><text x=\"{x:.0}\" y=\"{:.0}\" text-anchor=\"middle\">{at:.4} s</text>",
                height + 16.0
            );
        }
        let cut_off = if left == 0 { format!("<p>The first {MOST} actions are drawn.</p>") } else { String::new() };
        format!("<svg class=\"timeline\" viewBox=\"-110 0 {} {}\">{bars}</svg>{cut_off}<p>{LEGEND}</p>", WIDTH + 160.0, height + 24.0)
    }
}

/// A page that needs nothing else.
pub(crate) fn page(title: &str, body: &str) -> String {
    format!(
        "<!DOCTYPE html><html lang=\"en\"><meta charset=\"utf-8\"><title>zofo: {}</title>\
         <style>body{{font:14px system-ui,sans-serif;margin:24px}}svg{{width:100%}}.timeline text{{font-size:12px}}td,th{{padding:2px 12px;text-align:right}}\
         td:first-child,th:first-child{{text-align:left}}</style>{body}</html>",
        escaped(title)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use zofo_pipeline::{
        cluster::Cluster,
        estimator::{EstimatorName, EstimatorSpec},
        plan::PlanRequest,
    };

    #[test]
    fn every_device_has_a_track() {
        let (cluster, e) = (Cluster::virtual_cpus(0, 2), EstimatorSpec::new(EstimatorName::CutTangent, 1));
        let plan = PlanRequest::new(&cluster, 2, 1, &e).plan().unwrap();
        let span = |action, start, end| Span {
            step: Step::new(0, action),
            start: Duration::from_millis(start),
            end: Duration::from_millis(end),
            waiting: Duration::from_millis(end.min(1)),
        };
        let all = [vec![span(Action::Forward { m: 0 }, 0, 2), span(Action::Update, 3, 3)], vec![span(Action::Backward { m: 0 }, 2, 5)]];
        let t = Timeline::measured(&plan, &all);
        assert_eq!((t.times, t.tracks.len(), t.seconds()), ("measured", 2, 0.005));
        assert_eq!(t.tracks[0].slices.len(), 1, "what takes no time is not shown");
        assert!((t.tracks[1].busy() - 0.002).abs() < 1e-12);
        let trace = t.trace();
        assert_eq!(
            trace["traceEvents"][3],
            json!({"ph": "X", "name": "B0", "cat": "stage 0", "pid": 0, "tid": 1, "ts": 2000.0, "dur": 3000.0, "args": {"waiting_us": 1000.0}})
        );
        assert_eq!(trace["otherData"]["times"], "measured");
        let svg = t.svg();
        assert!(svg.starts_with("<svg") && svg.matches("<rect").count() == 2 && svg.contains("gpu1"), "{svg}");
    }
}
