//! HybridOP's planner: the closed form of the head placement, minimised by two dynamic programmes (section 4.3, Algorithm 1).
//!
//! Bp-free devices lie in front, those that backpropagate behind them, each group in the order given. The number of layers in front is
//! enumerated; a first programme minimises the sum of forward times there, a second one `sum (1 + r) t + M Q t* + (1 + r) (M - 1) t_max` behind,
//! once for each value that `t_max` can have.
//!
//! Errata of the text that are mended here: the programme behind keeps to `t_max` (as printed it never does); `t_max` takes all of its finitely
//! many values (steps of epsilon lose up to `3 (M - 1) epsilon`); a stage keeps `min(M, |G| - i)` micro-batches, i from 0 (as printed the last
//! keeps none); tables are made once and not for every number of layers in front. What cannot be mended is the objective: it has no term for
//! the rate of bp-free devices, so it gives them all that memory allows. `as_printed` is the original.

use super::{Layout, Method, Problem, Proposal, split};
use crate::{cluster::Kind, ir::Readout, order::ScheduleName};
use std::ops::Range;
use zofo_hal::{Error, Result};

/// Seconds of a GPipe step: `3 (sum t + (M - 1) max t)` (section 4.2).
pub fn t_gpipe(t: &[f64], m: u32) -> f64 {
    3.0 * (t.iter().sum::<f64>() + f64::from(m - 1) * largest(t))
}

/// Seconds with bp-free devices behind: `3 sum_G t + sum_N t + ((1 + Q) M - 1) max_N t` (section 4.2).
pub fn t_tail(gpus: &[f64], npus: &[f64], m: u32, q: u32) -> f64 {
    3.0 * gpus.iter().sum::<f64>() + npus.iter().sum::<f64>() + (f64::from((1 + q) * m) - 1.0) * largest(npus)
}

/// Seconds with bp-free devices in front: `sum_N t + 3 sum_G t + 3 (M - 1) max_G t + M Q t*`, t* that of the first device behind (eq. 5).
pub fn t_head(npus: &[f64], gpus: &[f64], m: u32, q: u32) -> f64 {
    let first = gpus.first().copied().unwrap_or(0.0);
    npus.iter().sum::<f64>() + 3.0 * gpus.iter().sum::<f64>() + 3.0 * f64::from(m - 1) * largest(gpus) + f64::from(m * q) * first
}

fn largest(t: &[f64]) -> f64 {
    t.iter().copied().fold(0.0, f64::max)
}

#[derive(Clone, Copy, PartialEq)]
enum Text {
    Mended,
    Printed,
}

/// Plans by the mended text.
///
/// # Errors
/// `InvalidArgument` where a group of devices is missing or nothing fits, naming a device that is short.
pub(super) fn plan(p: &Problem, method: &Method) -> Result<Proposal> {
    search(p, method, Text::Mended)
}

/// Plans as the text has it, for comparison.
///
/// # Errors
/// As for the mended text.
pub(super) fn as_printed(p: &Problem, method: &Method) -> Result<Proposal> {
    search(p, method, Text::Printed)
}

/// Bp-free devices and the others, in the order given.
pub(super) fn groups(p: &Problem) -> Result<(Vec<usize>, Vec<usize>)> {
    let (free, capable): (Vec<_>, Vec<_>) = (0..p.devices()).partition(|d| p.device(*d).kind == Kind::BpFree);
    match (capable.is_empty(), free.len() + capable.len() > p.layers()) {
        (true, _) => Err(Error::invalid("no device backpropagates: HybridOP needs at least one behind the bp-free ones")),
        (_, true) => Err(Error::invalid(format!("{} devices for {} layers: HybridOP gives each at least one", p.devices(), p.layers()))),
        _ => Ok((free, capable)),
    }
}

fn search(p: &Problem, method: &Method, text: Text) -> Result<Proposal> {
    let (npus, gpus) = groups(p)?;
    let (layers, m) = (p.layers(), f64::from(p.micro_batches()));
    let head = Head::new(p, &npus);
    let at_loss = method.estimator.readout() == Readout::Loss;
    let q = if npus.is_empty() || !at_loss { 0.0 } else { f64::from(method.directions) };
    let tail = Tail { p, gpus: &gpus, m, q, text };
    let mut best: Option<(f64, Vec<usize>)> = None;
    let candidates = tail.bottlenecks();
    // Below the first value that leaves a split nothing is possible; beyond the one whose own term exceeds the best, nothing is gained.
    let first = match text {
        Text::Mended => candidates.partition_point(|t| tail.table(*t).is_none()),
        Text::Printed => 0,
    };
    let free = candidates
        .last()
        .and_then(|t| tail.table(*t))
        .map_or(f64::INFINITY, |t| (npus.len()..=layers - gpus.len()).map(|s| head.cost(s) + t.cost(s)).fold(f64::INFINITY, f64::min));
    for t_max in candidates.into_iter().skip(first) {
        if best.as_ref().is_some_and(|(t, _)| free + tail.pass() * (m - 1.0) * t_max >= *t) {
            break;
        }
        let Some(table) = tail.table(t_max) else { continue };
        for s in npus.len()..=layers - gpus.len() {
            if npus.is_empty() && s > 0 {
                break;
            }
            let (front, behind) = (head.cost(s), table.cost(s));
            let total = front + behind + tail.pass() * (m - 1.0) * t_max;
            if total.is_finite() && best.as_ref().is_none_or(|(t, _)| total < *t) {
                best = Some((total, [head.ends(s), table.ends(s)].concat()));
            }
        }
    }
    let (predicted, ends) = best.ok_or_else(|| shortage(p, &npus, &gpus, text))?;
    let devices = [npus.clone(), gpus].concat();
    let layout = Layout::pipeline(&devices, &ends, npus.len(), method);
    let outcome = layout.simulate(p, method, ScheduleName::HybridopHead).or_else(|_| layout.best(p, method))?;
    let notes = vec![format!("closed form {predicted:.4} s, simulated {:.4} s", outcome.makespan())];
    Ok(Proposal { outcome, method: *method, notes })
}

/// What is said where nothing fits: the most even split names a device.
fn shortage(p: &Problem, npus: &[usize], gpus: &[usize], text: Text) -> Error {
    let devices = [npus, gpus].concat();
    let ends = split::equal(p.layers(), devices.len());
    let mut first = 0;
    for (i, (d, end)) in devices.iter().zip(ends).enumerate() {
        let layers = first..end;
        first = end;
        let kept = if i < npus.len() { 0 } else { kept(gpus.len(), i - npus.len(), p.micro_batches(), text) };
        if let (Some(limit), Some(short)) = (p.device(*d).memory_bytes, split::short_by(p, *d, &layers, kept)) {
            return super::layout::short(&p.device(*d).name, limit + short, limit);
        }
    }
    Error::invalid("no split of the layers fits the memory of all devices; the most even one does, but for messages and kept activations")
}

/// Micro-batches that stage i of the group behind keeps.
fn kept(gpus: usize, i: usize, m: u32, text: Text) -> usize {
    match text {
        Text::Mended => (gpus - i).min(m as usize),
        Text::Printed => gpus - i - 1,
    }
}

/// Least sums of forward times of the first k layers on the bp-free devices.
struct Head {
    best: Vec<Vec<(f64, usize)>>,
}

impl Head {
    fn new(p: &Problem, npus: &[usize]) -> Self {
        let layers = p.layers();
        let mut best = vec![vec![(f64::INFINITY, 0); layers + 1]; npus.len() + 1];
        best[0][0] = (0.0, 0);
        for (i, d) in npus.iter().enumerate() {
            for end in i + 1..=layers {
                for start in i..end {
                    let range = start..end;
                    if split::short_by(p, *d, &range, 0).is_none() {
                        let t = best[i][start].0 + p.forward(*d, &range, false);
                        if t < best[i + 1][end].0 {
                            best[i + 1][end] = (t, start);
                        }
                    }
                }
            }
        }
        Self { best }
    }

    fn cost(&self, s: usize) -> f64 {
        self.best[self.best.len() - 1][s].0
    }

    fn ends(&self, s: usize) -> Vec<usize> {
        let mut ends = Vec::new();
        let mut end = s;
        for i in (1..self.best.len()).rev() {
            ends.push(end);
            end = self.best[i][end].1;
        }
        ends.reverse();
        ends
    }
}

/// The programme behind the cut.
struct Tail<'a> {
    p: &'a Problem,
    gpus: &'a [usize],
    m: f64,
    q: f64,
    text: Text,
}

/// Least costs of the layers from s on, by first device; for one `t_max`.
struct Table {
    /// Per device from the last: per first layer, cost and the end of its range.
    best: Vec<Vec<(f64, usize)>>,
}

impl Table {
    fn cost(&self, s: usize) -> f64 {
        self.best[0][s].0
    }

    fn ends(&self, s: usize) -> Vec<usize> {
        let mut at = s;
        (0..self.best.len() - 1)
            .map(|i| {
                at = self.best[i][at].1;
                at
            })
            .collect()
    }
}

impl Tail<'_> {
    /// A forward and a backward pass in forward passes: 3 with the paper's ratio. Of the first device; the closed form has one for all.
    fn pass(&self) -> f64 {
        1.0 + self.p.device(self.gpus[0]).backward_ratio
    }

    /// All values of `t_max`, or steps of a hundredth of the least one as the text has it.
    fn bottlenecks(&self) -> Vec<f64> {
        let p = self.p;
        let layers = p.layers();
        let mut all: Vec<f64> = Vec::new();
        match self.text {
            Text::Mended => {
                for d in self.gpus {
                    all.extend((0..layers).flat_map(|a| (a + 1..=layers).map(move |b| a..b)).map(|r| p.forward(*d, &r, true)));
                }
                all.sort_by(f64::total_cmp);
                all.dedup_by(|a, b| (*a - *b).abs() <= 1e-12 * b.abs());
            }
            Text::Printed => {
                // Bounds and steps of the text, for the layers that every number in front leaves.
                let whole = 0..layers;
                let rate: f64 = self.gpus.iter().map(|d| 1.0 / p.forward(*d, &whole, true)).sum();
                let (least, most) = (1.0 / rate, self.gpus.iter().map(|d| p.forward(*d, &whole, true)).fold(0.0, f64::max));
                let step = least / 100.0;
                if step > 0.0 {
                    all = (0..).map(|i| least + step * f64::from(i)).take_while(|t| *t <= most).take(10_000).collect();
                }
                all.push(most);
            }
        }
        all
    }

    fn table(&self, t_max: f64) -> Option<Table> {
        let (p, layers, n) = (self.p, self.p.layers(), self.gpus.len());
        let mut best = vec![vec![(f64::INFINITY, 0); layers + 1]; n + 1];
        best[n][layers] = (0.0, layers);
        for i in (0..n).rev() {
            let d = self.gpus[i];
            let factor = self.pass() + if i == 0 { self.m * self.q } else { 0.0 };
            for start in (i..layers).rev() {
                for end in start + 1..=layers {
                    let range: Range<usize> = start..end;
                    let t = p.forward(d, &range, true);
                    if self.text == Text::Mended && t > t_max * (1.0 + 1e-12) {
                        break;
                    }
                    if best[i + 1][end].0.is_infinite() || split::short_by(p, d, &range, kept(n, i, self.m as u32, self.text)).is_some() {
                        continue;
                    }
                    let total = factor * t + best[i + 1][end].0;
                    if total < best[i][start].0 {
                        best[i][start] = (total, end);
                    }
                }
            }
        }
        best[0].iter().any(|b| b.0.is_finite()).then_some(Table { best })
    }
}

/// The placement with bp-free devices behind, by its closed form: a model of latency, see [`Readout::Tail`].
pub(super) fn tail(p: &Problem, method: &Method) -> Result<Proposal> {
    let (npus, gpus) = groups(p)?;
    if npus.is_empty() || method.directions == 0 {
        return Err(Error::invalid("the tail placement needs a bp-free device and at least one direction"));
    }
    let (layers, m, q) = (p.layers(), f64::from(p.micro_batches()), f64::from(method.directions));
    let devices = [gpus.clone(), npus.clone()].concat();
    let n = devices.len();
    let mut limits: Vec<f64> = Vec::new();
    for d in &npus {
        limits.extend((0..layers).flat_map(|a| (a + 1..=layers).map(move |b| a..b)).map(|r| p.forward(*d, &r, false)));
    }
    limits.sort_by(f64::total_cmp);
    limits.dedup_by(|a, b| (*a - *b).abs() <= 1e-12 * b.abs());
    let mut best: Option<(f64, Vec<usize>)> = None;
    for t_max in limits {
        let mut table = vec![vec![(f64::INFINITY, 0); layers + 1]; n + 1];
        table[0][0] = (0.0, 0);
        for (i, d) in devices.iter().enumerate() {
            let behind = i >= gpus.len();
            for end in i + 1..=layers {
                for start in i..end {
                    let range = start..end;
                    let t = p.forward(*d, &range, !behind);
                    // First-order stages wait for all passes of the others, so they keep all micro-batches.
                    let kept = if behind { 0 } else { p.micro_batches() as usize };
                    if (behind && t > t_max * (1.0 + 1e-12)) || split::short_by(p, *d, &range, kept).is_some() {
                        continue;
                    }
                    let factor = if behind { 1.0 } else { 1.0 + p.device(*d).backward_ratio };
                    let total = table[i][start].0 + factor * t;
                    if total < table[i + 1][end].0 {
                        table[i + 1][end] = (total, start);
                    }
                }
            }
        }
        let total = table[n][layers].0 + ((1.0 + q) * m - 1.0) * t_max;
        if total.is_finite() && best.as_ref().is_none_or(|(t, _)| total < *t) {
            let mut ends = vec![layers; n];
            for i in (1..n).rev() {
                ends[i - 1] = table[i + 1][ends[i]].1;
            }
            best = Some((total, ends));
        }
    }
    let (predicted, ends) = best.ok_or_else(|| Error::invalid("no split of the layers fits the memory of all devices"))?;
    let mut layout = Layout::pipeline(&devices, &ends, 0, method);
    layout.stages.iter_mut().skip(gpus.len()).for_each(|s| s.role = method.head_role());
    let outcome = layout.best(p, method)?;
    let notes = vec![
        format!("closed form {predicted:.4} s, simulated {:.4} s", outcome.makespan()),
        "a model of latency: behind the cut nobody can return a gradient, so this cannot train".into(),
    ];
    Ok(Proposal { outcome, method: *method, notes })
}
