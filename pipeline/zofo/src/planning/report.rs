//! A simulated step as one HTML page: timeline and devices.

use std::fmt::Write;

use super::Simulated;
use crate::timeline::{Timeline, bytes, escaped, page};
use zofo_pipeline::planner::{Outcome, Problem};

/// The page; it needs nothing else.
pub fn report(p: &Problem, outcome: &Outcome) -> String {
    let s = Simulated::new(p, outcome);
    let mut table = String::new();
    for d in &s.devices {
        let _ = write!(
            table,
            "<tr><td>{}</td><td>{:.6}</td><td>{:.1} %</td><td>{:.6}</td><td>{}</td><td>{}</td></tr>",
            escaped(&d.name),
            d.busy_s,
            100.0 * d.busy_s / s.makespan_s.max(f64::MIN_POSITIVE),
            d.communicating_s,
            d.peak_in_flight,
            if d.peak_memory_bytes > 0.0 { bytes(d.peak_memory_bytes as u64) } else { "-".into() }
        );
    }
    let body = format!(
        "<h1>{} : {:.6} s a step (modelled)</h1>\
         <p>Computing {:.1} % of the time, {:.1} % without the extra directions.</p>{}\
         <table><tr><th>device</th><th>busy s</th><th>of the time</th><th>communicating s</th><th>in flight</th><th>memory at the peak</th></tr>{table}</table>",
        escaped(&s.schedule),
        s.makespan_s,
        100.0 * s.utilisation,
        100.0 * s.utilisation_without_directions,
        Timeline::modelled(p, outcome).svg()
    );
    page("a simulated step", &body)
}
