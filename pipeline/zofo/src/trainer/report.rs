//! A run as one HTML page: what it came to, the loss, the last step on the clock, the devices.

use std::fmt::Write;

use crate::{
    summary::Summary,
    timeline::{Timeline, bytes, escaped, page},
};
use zofo_pipeline::plan::Plan;

/// The page; it needs nothing else. `curves` is an `<svg>` element, `timeline` that of the last step, where one was made.
pub(super) fn report(plan: &Plan, summary: &Summary, curves: &str, timeline: Option<&Timeline>) -> String {
    let mut facts = String::new();
    let mut fact = |name: &str, value: String| {
        let _ = write!(facts, "<tr><td>{name}</td><td>{}</td></tr>", escaped(&value));
    };
    fact("model", summary.model.clone());
    fact("data", summary.data.clone());
    fact("schedule", summary.schedule.clone());
    fact("estimator of stages that do not backpropagate", summary.estimator.clone());
    fact("steps", summary.steps.to_string());
    if let (Some(first), Some(last)) = (summary.loss_first, summary.loss_last) {
        fact("loss per label token", format!("{first:.4} to {last:.4}"));
    }
    for (name, before, after) in [
        ("macro-F1 on held-out examples", summary.f1_before, summary.f1_after),
        ("loss per label token on held-out examples", summary.eval_loss_before, summary.eval_loss_after),
    ] {
        if let (Some(before), Some(after)) = (before, after) {
            fact(name, format!("{before:.4} to {after:.4}"));
        }
    }
    fact("samples a second", format!("{:.1}", summary.samples_per_second));
    fact("computing, mean over devices and steps", format!("{:.1} % of the time", 100.0 * summary.compute_utilisation));
    fact("device memory at the peak", bytes(summary.device_peak_bytes));
    let mut clock = String::new();
    if let Some(timeline) = timeline {
        let seconds = timeline.seconds();
        let mut table = String::new();
        for track in &timeline.tracks {
            let busy = track.busy();
            let stages = plan.stages.iter().filter(|s| s.has(&track.name));
            let holds: Vec<String> = stages.map(|s| format!("{}..{} {}", s.layers.start, s.layers.end, s.role.name())).collect();
            let _ = write!(
                table,
                "<tr><td>{}</td><td>{}</td><td>{busy:.6}</td><td>{:.1} %</td></tr>",
                escaped(&track.name),
                holds.join(", "),
                100.0 * busy / seconds.max(f64::MIN_POSITIVE)
            );
        }
        clock = format!(
            "<h2>The last step: {seconds:.6} s ({})</h2>{}<table><tr><th>device</th><th>layers</th><th>busy s</th><th>of the time</th></tr>{table}</table>",
            timeline.times,
            timeline.svg()
        );
    }
    page("a run", &format!("<h1>A run of zofo</h1><table>{facts}</table><h2>Loss</h2>{curves}{clock}"))
}
