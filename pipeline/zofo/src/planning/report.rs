//! A simulated step as one HTML page: timeline and devices.

use std::fmt::Write;

use super::Simulated;
use zofo_pipeline::{
    ir::Action,
    planner::{Outcome, Problem},
};

const WIDTH: f64 = 1200.0;
const ROW: f64 = 28.0;
/// Beyond so many slices a page is slow to open, and they are thinner than a pixel.
const MOST: usize = 20_000;

/// Devices of a worker.
pub(super) fn worker_name(p: &Problem, outcome: &Outcome, worker: usize) -> String {
    let stage = outcome.layout.placement.iter().position(|w| *w == worker);
    let members = stage.map_or(&[][..], |s| &outcome.layout.stages[s].members);
    members.iter().map(|m| p.device(m.device).name.as_str()).collect::<Vec<_>>().join(" + ")
}

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

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The page; it needs nothing else.
pub fn report(p: &Problem, outcome: &Outcome) -> String {
    let s = Simulated::new(p, outcome);
    let scale = WIDTH / outcome.makespan().max(f64::MIN_POSITIVE);
    let rows = outcome.timeline.spans.len();
    let mut bars = String::new();
    let mut left = MOST;
    for (worker, spans) in outcome.timeline.spans.iter().enumerate() {
        let y = worker as f64 * ROW;
        let name = escaped(&worker_name(p, outcome, worker));
        let _ = write!(bars, "<text x=\"-8\" y=\"{:.1}\" text-anchor=\"end\">{name}</text>", y + 0.65 * ROW);
        for span in spans.iter().filter(|s| s.end > s.start) {
            if left == 0 {
                break;
            }
            left -= 1;
            let (x, width) = (span.start * scale, (span.end - span.start) * scale);
            let _ = write!(
                bars,
                "<rect x=\"{x:.2}\" y=\"{:.1}\" width=\"{width:.2}\" height=\"{:.1}\" fill=\"{}\"><title>{} {:.6} to {:.6} s</title></rect>",
                y + 2.0,
                ROW - 4.0,
                colour(&span.step.action),
                escaped(&span.step.to_string()),
                span.start,
                span.end
            );
        }
    }
    let mut table = String::new();
    for d in &s.devices {
        let _ = write!(
            table,
            "<tr><td>{}</td><td>{:.6}</td><td>{:.1} %</td><td>{:.6}</td><td>{}</td><td>{:.0}</td></tr>",
            escaped(&d.name),
            d.busy_s,
            100.0 * d.busy_s / s.makespan_s.max(f64::MIN_POSITIVE),
            d.communicating_s,
            d.peak_in_flight,
            d.peak_memory_bytes
        );
    }
    let cut_off = if left == 0 { format!("<p>The first {MOST} actions are drawn.</p>") } else { String::new() };
    let height = rows as f64 * ROW;
    format!(
        "<!DOCTYPE html><html lang=\"en\"><meta charset=\"utf-8\"><title>zofo: a simulated step</title>\
         <style>body{{font:14px system-ui,sans-serif;margin:24px}}svg{{width:100%}}text{{font-size:12px}}td,th{{padding:2px 12px;text-align:right}}\
         td:first-child,th:first-child{{text-align:left}}</style>\
         <h1>{} : {:.6} s a step (modelled)</h1>\
         <p>Computing {:.1} % of the time, {:.1} % without the extra directions.</p>\
         <svg viewBox=\"-110 0 {} {height}\">{bars}</svg>{cut_off}\
         <p>blue forward, orange backward, yellow weight gradients, green perturbed, violet exit, red readout</p>\
         <table><tr><th>device</th><th>busy s</th><th>of the time</th><th>communicating s</th><th>in flight</th><th>peak bytes</th></tr>{table}</table></html>",
        escaped(&s.schedule),
        s.makespan_s,
        100.0 * s.utilisation,
        100.0 * s.utilisation_without_directions,
        WIDTH + 120.0
    )
}
